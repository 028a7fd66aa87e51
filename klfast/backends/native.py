"""The compiled kernels: C++ on the CPU, CUDA on NVIDIA GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klfast.call import KLCall
from klfast.checks.values import (
    are_tracing,
    check_divergence_values,
    check_keeping_mask,
    check_token_logprobs_values,
    check_values,
    checks_requested,
    holds_values,
)
from klfast.logits import autograd as logits_ops
from klfast.logits.autograd import LogitsKernels
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.ops import autograd as ops
from klfast.ops import load
from klfast.stats import KLStats

if TYPE_CHECKING:
    from klfast.logits.outputs import KLOutputs


def unavailable(device: torch.device) -> str | None:
    """Why this backend cannot serve ``device``; None if it can."""
    if (error := load.load_error()) is not None:
        return error
    if device.type == "cuda":
        return _cuda_problem(device.index)
    return None if device.type == "cpu" else f"the extension has no kernels for {device.type}"


def _cuda_problem(index: int | None) -> str | None:
    """Why the CUDA kernels cannot run on a device; None if they can."""
    if torch.version.hip is not None:
        return "the extension's kernels are for NVIDIA GPUs; on this one, pip install triton"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if index is None:
        index = torch.cuda.current_device()
    if index in _ready:
        return None
    from klfast import _C

    with torch.cuda.device(index):
        problem = _C.cuda_problem()
    if problem:
        return problem  # and not remembered: it may pass
    _ready.add(index)
    return None


_ready: set[int] = set()
"""Devices that have been asked, and can run the kernels."""

# A question about the machine: torch.compile takes the answer for a constant. Set as
# torch.compiler.assume_constant_result does, which would import all of dynamo.
_cuda_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kl_penalty(call: KLCall) -> tuple[Tensor, KLStats | None]:
    """The penalty, and its statistics if asked for. See ``klfast.kl_penalty``."""
    if _checks(call.tensors.logprobs):
        check_values(call)
    return ops.kl_penalty(call, ops.native_kernels())


def token_logprobs(call: TokenLogprobsCall) -> tuple[Tensor, Tensor | None]:
    """Log-probs, and entropies if asked for. See ``klfast.token_logprobs``."""
    if _checks(call.logits):
        check_token_logprobs_values(call)
    elif call.mask is not None and holds_values(call.mask):
        check_keeping_mask(call)  # the kernel reads ``keep``
    return logits_ops.token_logprobs(call, logits_kernels())


def kl_divergence(call: KLDivergenceCall) -> KLOutputs:
    """The divergence and what else is asked for. See ``klfast.kl_divergence``."""
    if _checks(call.logits):
        check_divergence_values(call)
    return logits_ops.kl_divergence(call, logits_kernels(), ops.native_kernels())


def logits_kernels() -> LogitsKernels:
    """The extension's ops over logits."""
    return LogitsKernels.of(torch.ops.klfast)


def _checks(of: Tensor) -> bool:
    """Whether values are looked at here: on a CPU the kernels do it as they read."""
    return checks_requested() and of.is_cuda and not are_tracing()
