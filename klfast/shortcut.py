"""The direct road of the functions over log-probs, short of the checks in Python.

For plain tensors (``klfast.ops.direct``): the extension checks shapes, dtypes, devices and values
in its own read. What it refuses, and all else, goes the whole way, where the error texts are.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from klfast.backends import BACKENDS
from klfast.checks.arguments import without_graph
from klfast.estimator import GRADIENTS, SHORTHAND, Estimator
from klfast.ops import autograd
from klfast.ops.direct import Direct
from klfast.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS
from klfast.stats import KLStats

_NUMBERS = (float, int)
_TENSORS = (Tensor, torch.nn.Parameter)
_ENCODED = {name: (r.encoded, r.is_scalar) for name, r in REDUCTIONS.items()}
_NO_GRADIENT = GRADIENTS.index("none")


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    estimator: str | Estimator,
    reduction: str,
    cu_seqlens: Tensor | None,
    old_logprobs: Tensor | None,
    normalizer: float | Tensor | None,
    coef: float | Tensor,
    return_stats: bool,
    backend: str,
    scores: Tensor | None = None,
) -> Tensor | tuple[Tensor, KLStats] | None:
    """What ``klfast.kl_penalty`` returns, with ``scores`` what ``klfast.kl_rewards`` does; None
    where the whole way is to be gone.
    """
    if torch.compiler.is_compiling() or (direct := _direct(backend)) is None:
        return None
    if type(estimator) is str:
        estimator = SHORTHAND.get(estimator, estimator)
    if normalizer is None:
        normalizer = 0.0
    elif not (
        type(normalizer) in _NUMBERS and reduction in NORMALIZED_REDUCTIONS and normalizer > 0
    ):
        return None
    if not (
        type(estimator) is Estimator
        and type(reduction) is str
        and reduction in _ENCODED
        and type(coef) in _NUMBERS
        and type(return_stats) is bool
        and type(logprobs) in _TENSORS
        and type(ref_logprobs) in _TENSORS
        and direct.serves(logprobs)
    ):
        return None
    of_reduction, is_scalar = _ENCODED[reduction]
    choices = (*estimator.choices, *of_reduction)
    encoded = (choices, (*estimator.limits, cast(float, coef), cast(float, normalizer)))
    others = (old_logprobs, mask, cu_seqlens, None, None)
    is_constant = scores is not None or choices[1] == _NO_GRADIENT
    try:
        if is_constant or not (
            torch.is_grad_enabled()
            and (logprobs.requires_grad or ref_logprobs.requires_grad or autograd.is_forward_mode())
        ):
            wants = (False, False, False, return_stats)
            outputs = direct.functions.kl_penalty_fwd(
                logprobs, ref_logprobs, *others, *encoded, scores, *wants
            )
            if outputs is NotImplemented:
                return None
            result, statistics = outputs[0], outputs[2]
        else:
            if not direct.functions.are_plain(logprobs, ref_logprobs, *others):
                return None
            constants = (without_graph(old_logprobs), without_graph(mask), *others[2:])
            plan = autograd.Plan(direct.ops, encoded, is_scalar, return_stats)
            result, statistics = autograd.differentiable(logprobs, ref_logprobs, constants, plan)
    except (RuntimeError, OverflowError):
        return None
    return (result, KLStats(*statistics.unbind(0))) if return_stats else result


def _direct(backend: str) -> Direct | None:
    """The direct road of a backend; of ``auto``, that of the first it tries."""
    if backend == "auto":
        return next(iter(BACKENDS.values())).direct
    chosen = BACKENDS.get(backend) if type(backend) is str else None
    return None if chosen is None else chosen.direct


def kl_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    kl_coef: float | Tensor,
    estimator: str | Estimator,
    cu_seqlens: Tensor | None,
    return_stats: bool,
    backend: str,
) -> Tensor | tuple[Tensor, KLStats] | None:
    """What ``klfast.kl_rewards`` returns; None where the whole way is to be gone."""
    if type(scores) not in _TENSORS:
        return None
    return kl_penalty(
        *(logprobs, ref_logprobs, mask, estimator, "none", cu_seqlens),
        *(None, None, kl_coef, return_stats, backend, scores),
    )
