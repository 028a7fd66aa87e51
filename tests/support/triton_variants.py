"""The Triton kernels as their launches compile them, for GPUs that are not here."""

import functools

import torch
from triton.backends.compiler import GPUTarget
from triton_compile import build, build_nvidia

from klfast.backends.triton import (
    logits_kernels,
    logits_launch,
    penalty_kernels,
    penalty_launch,
)
from klfast.backends.triton.divergences import DIVERGENCES
from klfast.backends.triton.math import ESTIMATORS, LOG_LARGEST
from klfast.backends.triton.tokens import Form

PLAIN = Form(*(False,) * 8, log_largest=LOG_LARGEST["fp32"])
MEAN = {dtype: penalty_launch._reduced(dtype, 0, 1, False) for dtype in penalty_launch.ACC}
"""The constants of "token-mean"."""


def constants(estimator="k3", **others):
    formula = ESTIMATORS[estimator]
    return {
        "VALUE": formula.value,
        "DERIVATIVE": formula.derivative,
        "SUM": formula.value_plus_derivative,
        "FORM": PLAIN,
        "REDUCED": MEAN[torch.float32],
        "LAYOUT": "aligned",
        "GRADIENT": "none",
        "STATISTICS": False,
        "REWARDS": False,
        "FINISHES": False,
    } | others


def token_kernel(dtype="fp32", capability=90, outputs=("partials",), inputs=None, **options):
    """``kl_penalty_kernel`` for one dtype, as ``triton_launch`` compiles it."""
    wide = dtype == "fp64"
    result = "*fp64" if wide else "*fp32"
    types = {"partials": "*fp64", "value": result, "result": result, "statistics": result}
    pointers = {"logprobs": f"*{dtype}", "ref_logprobs": f"*{dtype}", "mask": "*i1"}
    pointers |= {"weights": result} | (inputs or {})
    pointers |= {name: types.get(name, f"*{dtype}") for name in outputs}
    options = constants(**{"REDUCED": MEAN[torch.float64 if wide else torch.float32]} | options)
    warps = 8 if wide or options["FORM"].weighs else 4
    kernel = penalty_kernels.kl_penalty_kernel
    return build_nvidia(kernel, pointers, options, capability, warps)


@functools.cache
def unit_gradient_kernel(estimator, dtype, capability=90):
    outputs = ("partials", "grad_logprobs")
    return token_kernel(dtype, capability, outputs, estimator=estimator, GRADIENT="unit")


HOPPER = GPUTarget("cuda", 90, 32)


def result(dtype):
    return "*fp64" if dtype == "fp64" else "*fp32"


def divergence(dtype, backward=False, divergence="kl", stage="row", entropy="none"):
    """(kernel, pointers, constants) with a mask.

    The forward computes the policy's gradient in the same read, or an entropy. The backward
    computes both gradients from the gradients of tokens and entropies.
    """
    pointers = {"first": f"*{dtype}", "second": f"*{dtype}", "values": result(dtype)}
    pointers |= {"saved": "*fp64", "keep": "*i1"}
    options = {"DIVERGENCE": DIVERGENCES[divergence], "ENTROPY": entropy}
    if entropy != "none":
        pointers |= {"entropies": result(dtype)}
    if stage == "row" and (backward or entropy == "none"):
        pointers |= {"grad_first": f"*{dtype}"}
    if backward:
        pointers |= {"grad_second": f"*{dtype}"}
        incoming = ("grad_rows", "grad_logprobs", "grad_ref_logprobs")
        pointers |= dict.fromkeys(incoming, result(dtype)) | {"token_ids": "*i64"}
        if entropy != "none":
            pointers |= {"grad_entropies": result(dtype)}
        return logits_kernels.kl_divergence_backward_kernel, pointers, options
    options["STAGE"] = stage
    pointers |= {"partials": "*fp64"} if stage != "row" else {"row_weights": result(dtype)}
    return logits_kernels.kl_divergence_kernel, pointers, options


def tokens(dtype, backward=False, stage="row"):
    """(kernel, pointers, constants) with entropies."""
    pointers = {"logits": f"*{dtype}", "token_ids": "*i64", "saved": "*fp64", "keep": "*i1"}
    pointers |= dict.fromkeys(("logprobs", "entropy"), result(dtype))
    if backward:
        pointers |= dict.fromkeys(("grad_logprobs", "grad_entropy"), result(dtype))
        return logits_kernels.token_logprobs_backward_kernel, pointers | {"grad": f"*{dtype}"}, {}
    pointers |= {"partials": "*fp64"} if stage != "row" else {}
    return logits_kernels.token_logprobs_kernel, pointers, {"STAGE": stage}


def of_rows(call):
    """The same with a temperature of every row's own, and of one model K token ids."""
    kernel, pointers, constants = call
    form = {"has_temperatures": True} | (
        {"picks": logits_launch._PICKS} if "logits" in pointers else {}
    )
    return kernel, pointers | {"inverse_temperature_at": "*fp64"}, constants | {"FORM": form}


CALLS = {
    "kl": (2, divergence),
    "kl-segment": (2, lambda dtype: divergence(dtype, stage="segment")),
    "kl-combine": (2, lambda dtype: divergence(dtype, stage="combine")),
    "kl-backward": (2, lambda dtype: divergence(dtype, backward=True)),
    "kl-entropy": (2, lambda dtype: divergence(dtype, entropy="first")),
    "kl-entropy-segment": (2, lambda dtype: divergence(dtype, stage="segment", entropy="second")),
    "kl-entropy-combine": (2, lambda dtype: divergence(dtype, stage="combine", entropy="second")),
    "kl-entropy-backward": (2, lambda dtype: divergence(dtype, backward=True, entropy="second")),
    "jsd": (2, lambda dtype: divergence(dtype, divergence="jsd")),
    "jsd-entropy": (2, lambda dtype: divergence(dtype, divergence="jsd", entropy="first")),
    "jsd-backward": (2, lambda dtype: divergence(dtype, backward=True, divergence="jsd")),
    "tv": (2, lambda dtype: divergence(dtype, divergence="tv")),
    "tv-backward": (2, lambda dtype: divergence(dtype, backward=True, divergence="tv")),
    "skew": (2, lambda dtype: divergence(dtype, divergence="skew", entropy="second")),
    "skew-backward": (2, lambda dtype: divergence(dtype, backward=True, divergence="skew")),
    "tokens": (1, tokens),
    "tokens-segment": (1, lambda dtype: tokens(dtype, stage="segment")),
    "tokens-backward": (1, lambda dtype: tokens(dtype, backward=True)),
    "kl-temperatures": (2, lambda dtype: of_rows(divergence(dtype))),
    "kl-temperatures-backward": (2, lambda dtype: of_rows(divergence(dtype, backward=True))),
    "picks": (1, lambda dtype: of_rows(tokens(dtype))),
    "picks-segment": (1, lambda dtype: of_rows(tokens(dtype, stage="segment"))),
    "picks-combine": (1, lambda dtype: of_rows(tokens(dtype, stage="combine"))),
    "picks-backward": (1, lambda dtype: of_rows(tokens(dtype, backward=True))),
}


def compiled(call, dtype, target=HOPPER, layout="aligned"):
    models, arguments = CALLS[call]
    kernel, pointers, constants = arguments(dtype)
    arithmetic = torch.float64 if dtype == "fp64" else torch.float32
    is_kl = constants.get("DIVERGENCE", DIVERGENCES["kl"]).is_kl.value
    form = constants.get("FORM", {})
    constants["FORM"] = logits_launch.form_of(arithmetic, layout, models, is_kl, **form)
    finishes = constants.get("STAGE") in ("row", "combine")
    room = logits_launch._ROOM if finishes and target.backend == "cuda" else {}
    return build(kernel, pointers, constants, target, logits_launch._WARPS, **room)
