"""The result of ``rollout_correction``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.rollout.stats import RolloutStats


class RolloutCorrection(NamedTuple):
    """Weights, mask and statistics: ``weights, mask, stats = rollout_correction(...)``.

    Attributes:
        weights: per token in the shape of the log-probs, in the arithmetic's dtype, 0 where masked
            or where x is not finite, without gradient; None with ``weight=None``. A rejected token
            keeps its weight: the mask is what leaves it out.
        mask: the mask that was given, in its own dtype, 0 where a token is rejected; without one,
            a boolean mask.
        stats: :class:`RolloutStats`.
    """

    weights: Tensor | None
    mask: Tensor
    stats: RolloutStats


torch.serialization.add_safe_globals([RolloutCorrection])
