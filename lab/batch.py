"""What a step samples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sampled continuations. ``mask`` ``[B, T]`` ends with the token that ends the paragraph."""

    prompts: Tensor
    continuations: Tensor
    mask: Tensor
