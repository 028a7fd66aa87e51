"""``rollout_correction`` by the extension's op, which has a kernel for the CPU alone.

Plain data in, plain data out. Nothing carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from klfast.args.rollout import RolloutCall
from klfast.stats.rollout import RolloutCorrection, RolloutStats


@torch.no_grad()
def rollout_correction(call: RolloutCall) -> RolloutCorrection:
    """Weights, mask and statistics. See ``klfast.rollout_correction``."""
    try:
        weights, mask, table = _run(call)
    except RuntimeError:
        call.explain()
        raise
    weighs = call.spec.weight != "none"
    return RolloutCorrection(weights if weighs else None, mask, RolloutStats.of_table(table))


def _run(call: RolloutCall) -> tuple[Tensor, Tensor, Tensor]:
    choices, numbers = call.spec.encoded()
    op: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.klfast.rollout_correction.default
    return op(
        call.logprobs,
        call.rollout_logprobs,
        call.mask,
        call.cu_seqlens,
        call.advantages,
        choices,
        numbers,
        *call.spec.encoded_rules(),
    )
