"""The direct road of the functions over log-probs, without the checks in Python.

For plain tensors (``klfast.ops.direct``): the extension checks shapes, dtypes, devices and values
in its own read. What it declines is left to the checked functions, where the error texts are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from klfast.backends import BACKENDS
from klfast.checks import hints
from klfast.checks.arguments import without_graph
from klfast.coefficient import Coefficient, value_of
from klfast.estimator import SHORTHAND, Estimator
from klfast.names import GRADIENTS, BackendName, EstimatorName, ReductionName
from klfast.ops import autograd
from klfast.ops.direct import Direct, NotPlainError
from klfast.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS
from klfast.stats import KLStats

P = ParamSpec("P")
R = TypeVar("R")

_NUMBERS = (float, int)
_TENSORS = (Tensor, torch.nn.Parameter)
_OPTIONAL = (*_TENSORS, type(None))
_ENCODED = {name: (r.encoded(), r.is_scalar()) for name, r in REDUCTIONS.items()}
_NO_GRADIENT = GRADIENTS.index("none")


def tries_first(shortcut: Callable[P, R | None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The function, after ``shortcut``, which returns None for what it does not serve."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def public(*args: P.args, **kwargs: P.kwargs) -> R:
            result = shortcut(*args, **kwargs)
            return function(*args, **kwargs) if result is None else result

        return public

    return decorate


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: EstimatorName | Estimator = "k3",
    reduction: ReductionName = "none",
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    coef: Coefficient = 1.0,
    return_stats: bool = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, KLStats] | None:
    """The result of ``klfast.kl_penalty``; None: the checked function must be called."""
    if torch.compiler.is_compiling() or (direct := _direct(backend)) is None:
        return None
    if isinstance(estimator, str):
        estimator = SHORTHAND.get(estimator, estimator)
    if type(coef) not in _NUMBERS:
        coef = value_of(coef)
    if normalizer is None:
        normalizer = 0.0
    elif type(normalizer) not in _NUMBERS or not normalizer > 0:
        return None
    if not (
        type(logprobs) in _TENSORS
        and type(ref_logprobs) in _TENSORS
        and type(estimator) is Estimator
        and isinstance(reduction, str)
        and reduction in _ENCODED
        and (normalizer == 0 or reduction in NORMALIZED_REDUCTIONS)
        and type(coef) in _NUMBERS
        and type(return_stats) is bool
        and not getattr(mask, "requires_grad", False)
        and direct.serves(logprobs)
    ):
        return None
    (of_reduction, is_scalar), (choices, limits) = _ENCODED[reduction], estimator._encoded
    encoded = (
        (*choices, *of_reduction),
        (*limits, cast(float, coef), cast(float, normalizer)),
    )
    forward = direct.functions.kl_penalty_fwd
    try:
        if (
            torch.is_grad_enabled()
            and (logprobs.requires_grad or ref_logprobs.requires_grad or autograd.is_forward_mode())
            and choices[1] != _NO_GRADIENT
        ):
            if (
                torch._C._are_functorch_transforms_active()
                or type(old_logprobs) not in _OPTIONAL
                or type(mask) not in _OPTIONAL
            ):
                return None
            constants = (without_graph(old_logprobs), mask, cu_seqlens, None, None)
            plan = autograd.Plan(forward, direct.ops, encoded, is_scalar, return_stats)
            result, statistics = autograd.differentiable(logprobs, ref_logprobs, constants, plan)
        else:
            others = (old_logprobs, mask, cu_seqlens, None, None)
            wants = (False, False, False, return_stats)
            outputs = forward(logprobs, ref_logprobs, *others, *encoded, None, *wants)
            if outputs is NotImplemented:
                return None
            result, statistics = outputs[0], outputs[2]
    except NotPlainError:
        return None
    hints.of_penalty(
        logprobs,
        ref_logprobs,
        mask,
        estimator,
        reduction,
        cu_seqlens,
        old_logprobs,
        coef,
    )
    return (result, KLStats(*statistics.unbind(0))) if return_stats else result


def kl_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    kl_coef: Coefficient,
    estimator: EstimatorName | Estimator = "k1",
    cu_seqlens: Tensor | None = None,
    return_stats: bool = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, KLStats] | None:
    """The result of ``klfast.kl_rewards``; None: the checked function must be called."""
    if torch.compiler.is_compiling() or (direct := _direct(backend)) is None:
        return None
    if isinstance(estimator, str):
        estimator = SHORTHAND.get(estimator, estimator)
    if type(kl_coef) not in _NUMBERS:
        kl_coef = value_of(kl_coef)
    if not (
        type(scores) in _TENSORS
        and type(logprobs) in _TENSORS
        and type(ref_logprobs) in _TENSORS
        and type(estimator) is Estimator
        and type(kl_coef) in _NUMBERS
        and type(return_stats) is bool
        and not getattr(mask, "requires_grad", False)
        and direct.serves(logprobs)
    ):
        return None
    (of_reduction, _), (choices, limits) = _ENCODED["none"], estimator._encoded
    encoded = ((*choices, *of_reduction), (*limits, cast(float, kl_coef), 0.0))
    others = (None, mask, cu_seqlens, None, None)
    wants = (False, False, False, return_stats)
    outputs = direct.functions.kl_penalty_fwd(
        logprobs, ref_logprobs, *others, *encoded, scores, *wants
    )
    if outputs is NotImplemented:
        return None
    hints.of_rewards(logprobs, ref_logprobs, mask)
    rewards, _, statistics, *_ = outputs
    return (rewards, KLStats(*statistics.unbind(0))) if return_stats else rewards


def _direct(backend: object) -> Direct | None:
    """The direct road of a backend; of ``auto``, that of the first it tries."""
    if not isinstance(backend, str):
        return None
    if backend == "auto":
        return next(iter(BACKENDS.values())).direct
    chosen = BACKENDS.get(backend)
    return None if chosen is None else chosen.direct
