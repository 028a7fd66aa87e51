"""The Triton kernels: NVIDIA and AMD GPUs, without a compiler at installation.

Their ops have the schemas of ``csrc/binding/penalty_ops.h``, in a namespace of their own as the extension may be
absent. Triton is imported when the first of them runs: it takes its time.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klfast import ops
from klfast.call import KLCall
from klfast.fakes import register
from klfast.logits import ops as logits_ops
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.logits.ops import LogitsKernels
from klfast.stats import KLStats
from klfast.value_checks import (
    are_tracing,
    check_divergence_values,
    check_token_logprobs_values,
    check_values,
    checks_requested,
)

if TYPE_CHECKING:
    from klfast.logits.outputs import KLOutputs

NAMESPACE = "klfast_triton"

_CALL = (
    "Tensor logprobs, Tensor ref_logprobs, Tensor? old_logprobs, Tensor? mask, "
    "Tensor? cu_seqlens, Tensor? coef_tensor, Tensor? normalizer_tensor, "
    "int estimator, int gradient, int importance, bool clip_weighted, float[] limits, "
    "int reduction, float coef, float normalizer, "
)
_INVERSE = "Tensor? inverse_temperature=None"
_TOKENS = "Tensor logits, Tensor token_ids, Tensor? keep, "
_TOKENS_BACKWARD = (
    "Tensor saved, Tensor entropy, float temperature, Tensor grad_logprobs, Tensor? grad_entropy, "
    f"{_INVERSE}"
)
_DIVERGENCE = (
    "Tensor logits, Tensor ref_logits, Tensor? token_ids, Tensor? keep, "
    "int divergence, float jsd_beta, float temperature, "
)
_SCHEMAS = {
    "token_logprobs_fwd": f"({_TOKENS}float temperature, bool want_entropy, {_INVERSE}) "
    "-> (Tensor, Tensor, Tensor)",
    "token_logprobs_bwd": f"({_TOKENS}{_TOKENS_BACKWARD}) -> Tensor",
    "token_logprobs_bwd_": f"({_TOKENS.replace('Tensor', 'Tensor(a!)', 1)}{_TOKENS_BACKWARD}) "
    "-> ()",
    "kl_divergence_fwd": f"({_DIVERGENCE}Tensor? shares, bool want_grad, bool want_grad_ref, "
    f"{_INVERSE}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "kl_divergence_bwd": f"({_DIVERGENCE}Tensor rows, Tensor saved, Tensor grad_rows, "
    "Tensor? grad_logprobs, Tensor? grad_ref_logprobs, bool want_grad, bool want_grad_ref, "
    f"{_INVERSE}) "
    "-> (Tensor, Tensor)",
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
        from klfast.backends import triton_launch, triton_logits_launch

        module = triton_launch if hasattr(triton_launch, name) else triton_logits_launch
        return getattr(module, name)(*args)

    return run


_library = _define()
