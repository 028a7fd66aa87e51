"""The Triton kernels: NVIDIA and AMD GPUs, without a compiler at installation.

Their ops stand in a namespace of their own (``klfast.ops.table``), as the extension may be absent.
Triton is imported when the first of them runs: it takes its time.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klfast.call import KLCall
from klfast.checks.values import (
    are_tracing,
    check_divergence_values,
    check_token_logprobs_values,
    check_values,
    checks_requested,
)
from klfast.logits import autograd as logits_ops
from klfast.logits.autograd import LogitsKernels
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.ops import autograd as ops
from klfast.ops.table import SCHEMAS, define
from klfast.stats import KLStats

if TYPE_CHECKING:
    from klfast.logits.outputs import KLOutputs

NAMESPACE = "klfast_triton"

_installed = importlib.util.find_spec("triton") is not None
_interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(device: torch.device) -> str | None:
    """Why this backend cannot serve ``device``; None if it can."""
    if not _installed:
        return "triton is not installed; run pip install triton"
    if device.type == "cuda" or (device.type == "cpu" and _interpreted):
        return None
    return (
        "Triton kernels run on GPUs; set TRITON_INTERPRET=1 before Python starts to step through "
        "them on the CPU"
    )


def kl_penalty(call: KLCall) -> tuple[Tensor, KLStats | None]:
    """The penalty, and its statistics if asked for. See ``klfast.kl_penalty``."""
    if _checks(call.tensors.logprobs):
        check_values(call)
    return ops.kl_penalty(call, _kernels())


def token_logprobs(call: TokenLogprobsCall) -> tuple[Tensor, Tensor | None]:
    """Log-probs, and entropies if asked for. See ``klfast.token_logprobs``."""
    if _checks(call.logits):
        check_token_logprobs_values(call)
    return logits_ops.token_logprobs(call, LogitsKernels.of(torch.ops.klfast_triton))


def kl_divergence(call: KLDivergenceCall) -> KLOutputs:
    """The divergence and what else is asked for. See ``klfast.kl_divergence``."""
    if _checks(call.logits):
        check_divergence_values(call)
    kernels = LogitsKernels.of(torch.ops.klfast_triton)
    return logits_ops.kl_divergence(call, kernels, _kernels())


def _kernels() -> ops.Kernels:
    return ops.Kernels.of(torch.ops.klfast_triton)


def _checks(of: Tensor) -> bool:
    """Whether values are looked at: where that is free, or asked for."""
    return not are_tracing() and (of.device.type == "cpu" or checks_requested())


def _implement() -> None:
    library = define(NAMESPACE)
    for name in SCHEMAS:
        for key in ("CUDA", "CPU"):
            library.impl(name, _run(name), key)


def _run(name: str) -> Any:
    """The implementation of an op, imported when it is first called."""

    def run(*args: Any) -> Any:
        from klfast.backends.triton import logits_launch, penalty_launch

        module = penalty_launch if hasattr(penalty_launch, name) else logits_launch
        return getattr(module, name)(*args)

    return run


_implement()
