"""``rollout_correction`` by an op: plain data in, plain data out. Nothing carries a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.ops.table import Ops
from klfast.rollout.call import RolloutCall
from klfast.rollout.outputs import RolloutCorrection
from klfast.rollout.stats import RolloutStats


@torch.no_grad()
def rollout_correction(call: RolloutCall, ops: Ops) -> RolloutCorrection:
    """Weights, mask and statistics. See ``klfast.rollout_correction``."""
    try:
        weights, mask, table = _run(call, ops)
    except RuntimeError:
        call.explain()
        raise
    weighs = call.spec.weight != "none"
    return RolloutCorrection(weights if weighs else None, mask, RolloutStats.of_table(table))


def _run(call: RolloutCall, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
    choices, numbers = call.spec.encoded()
    assert ops.rollout_correction is not None  # or the backend would have no such function
    return ops.rollout_correction(
        call.logprobs,
        call.rollout_logprobs,
        call.layout.mask,
        call.layout.cu_seqlens,
        call.advantages,
        choices,
        numbers,
        *call.spec.encoded_rules(),
    )
