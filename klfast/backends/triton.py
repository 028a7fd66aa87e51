"""The Triton kernels: NVIDIA and AMD GPUs, without a compiler at installation.

Their ops have the schemas of ``csrc/ops.cpp``, in a namespace of their own as the extension may be
absent. Triton is imported when the first of them runs: it takes its time.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from klfast import ops
from klfast.call import KLCall
from klfast.fakes import register
from klfast.stats import KLStats
from klfast.value_checks import are_tracing, check_values, checks_requested

NAMESPACE = "klfast_triton"

_CALL = (
    "Tensor logprobs, Tensor ref_logprobs, Tensor? old_logprobs, Tensor? mask, "
    "Tensor? cu_seqlens, Tensor? coef_tensor, Tensor? normalizer_tensor, "
    "str estimator, str gradient, str importance, float[] limits, str reduction, "
    "float coef, float normalizer, "
)
_SCHEMAS = {
    "kl_penalty_fwd": f"({_CALL}Tensor? scores, bool want_grad_logprobs, "
    "bool want_grad_ref_logprobs, bool want_statistics) -> (Tensor, Tensor, Tensor, Tensor)",
    "kl_penalty_bwd": f"({_CALL}Tensor grad_out, Tensor per_sequence, bool want_grad_logprobs, "
    "bool want_grad_ref_logprobs) -> (Tensor, Tensor)",
    "scale_": "(Tensor(a!) tensor, Tensor factor) -> ()",
}

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
    if not are_tracing() and (call.tensors.logprobs.device.type == "cpu" or checks_requested()):
        check_values(call)
    return ops.kl_penalty(call, ops.Kernels.of(torch.ops.klfast_triton))


def _define() -> torch.library.Library:
    """The ops; they live as long as the library that is returned."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        for key in ("CUDA", "CPU"):
            library.impl(name, _run(name), key)
    register(NAMESPACE)
    return library


def _run(name: str) -> Any:
    """The implementation of an op, imported when it is first called."""

    def run(*args: Any) -> Any:
        from klfast.backends import triton_launch

        return getattr(triton_launch, name)(*args)

    return run


_library = _define()
