"""A backend, as a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.call import PenaltyCall
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.logits.outputs import KLOutputs
from klfast.ops.direct import Direct
from klfast.rollout.call import RolloutCall
from klfast.rollout.outputs import RolloutCorrection
from klfast.stats import KLStats


class Backend(NamedTuple):
    """What computes calls whose arguments and values have been checked."""

    name: str
    why_not: Callable[[torch.device], str | None]
    """Why it cannot serve a device, with what to install; None if it can."""
    kl_penalty: Callable[[PenaltyCall], tuple[Tensor, KLStats | None]]
    token_logprobs: Callable[[TokenLogprobsCall], tuple[Tensor, Tensor | None]]
    kl_divergence: Callable[[KLDivergenceCall], KLOutputs]
    rollout_correction: Callable[[RolloutCall], RolloutCorrection]
    checks_in_kernel: frozenset[str] = frozenset()
    """Types of devices on which its kernels check values in their own read."""
    direct: Direct | None = None
    """The direct road to its kernels, if there is one."""
