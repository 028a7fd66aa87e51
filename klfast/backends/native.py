"""The compiled C++ kernels (CPU)."""

from __future__ import annotations

import torch
from torch import Tensor

from klfast import ops
from klfast.call import KLCall
from klfast.stats import KLStats


def unavailable(device: torch.device) -> str | None:
    """Why this backend cannot serve ``device``; None if it can."""
    if (error := ops.load_error()) is not None:
        return error
    return None if device.type == "cpu" else f"the extension has no kernels for {device.type}"


def kl_penalty(call: KLCall) -> tuple[Tensor, KLStats | None]:
    """The penalty, and its statistics if asked for. See ``klfast.kl_penalty``."""
    return ops.kl_penalty(call, ops.native_kernels())
