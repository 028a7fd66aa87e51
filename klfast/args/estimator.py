"""The estimator of a token: its formula, gradient, weight and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from klfast.args.checks import check_choice, check_number
from klfast.types.names import (
    ALIASES,
    ESTIMATORS,
    FRAMEWORKS_NAMES,
    GRADIENTS,
    IMPORTANCE,
    NAMES,
    PLUS,
    EstimatorName,
    GradientName,
    ImportanceName,
)

# An absent limit to the ops: AOTInductor's packages hold no infinity.
NO_LIMIT = torch.finfo(torch.float64).max

_FORMULA_OF = {**ALIASES, **PLUS}
_Limits = tuple[float, float, float, float, float]
_Encoded = tuple[tuple[int, int, int, int], _Limits]


@dataclass(frozen=True)
class Estimator:
    """A per-token estimator of KL(policy || reference), as plain data.

    With ``x = log_ratio = logprobs - ref_logprobs`` in nats, the value of a token is ``w * f(x)``:

    ========== =============== ================== =============================================
    name       f(x)            df/dx              what it is
    ========== =============== ================== =============================================
    k1         x               1                  unbiased, can be negative
    abs        abs(x)          sign(x), 0 at 0
    k2, mse    x**2 / 2        x                  biased; its gradient is the reverse KL's
    k3 [#a]_   expm1(-x) + x   -expm1(-x)         unbiased, >= 0, low variance
    k3_ref     expm1(x) - x    expm1(x)           k3 for tokens sampled from the reference
    r_log_r    exp(x) * x      exp(x) * (1 + x)   weighted k1 for tokens from the reference
    ========== =============== ================== =============================================

    .. [#a] also ``low_var_kl``.

    In fp32 the value of k3 is inf below x = -88.7, of k3_ref above 88.7, of r_log_r above 84.2.
    ``KLStats.nonfinite`` counts such tokens. ``linear_tail`` or ``log_ratio_clip`` keeps the value
    finite.

    ``k1+``, ``k2+`` and ``k3+`` are names for ``gradient="k2", importance="detached"``:
    ``Estimator("k3+")`` is ``Estimator("k3", gradient="k2", importance="detached")``, with ``name``
    "k3". Its expected gradient is the gradient of the reverse KL, on-policy, and off-policy with
    ``old_logprobs``.

    ``log_ratio_clip`` applies to x, then ``linear_tail`` to f, then ``kl_clip`` to the result. The
    weight multiplies last, and ``kl_clip`` does not clip it, unless ``clip_weighted`` is set. Where
    a clip acts, it ends the gradient through x. The gradient through a differentiable weight
    continues there, as ``w * clip(f)``, unless ``clip_weighted`` is set.

    Args:
        name: a name from the table. The aliases ``mse`` and ``low_var_kl`` become ``k2`` and
            ``k3``, and a name with a ``+`` becomes the name before it.
        gradient: ``"value"``: the derivative of the value. ``"k2"``: the value of f with the
            gradient of ``w * x**2 / 2`` at the unclipped x (verl's ``k3+``). Limits then change
            only the value. ``"none"``: the result carries no gradient. A name with a ``+`` sets
            ``"k2"``, and does not allow ``"none"``.
        importance: how the weight ``w = exp(logprobs - old_logprobs)`` enters the gradient if
            ``old_logprobs`` is given (w is 1 otherwise). ``"differentiable"``, the default,
            includes the gradient of w. k1 and k3 need it for the gradient of the reverse KL.
            ``"detached"`` uses w as a constant. ``gradient="k2"`` needs this for the gradient of
            the reverse KL. A name with a ``+`` sets ``"detached"``.
        importance_cap: ``w = min(w, importance_cap)``; no gradient flows through a capped weight.
        log_ratio_clip: c or (lo, hi). x is clipped before f. The gradient through x is 0 outside,
            as for ``torch.clamp``.
        kl_clip: c. f is clipped to [-c, c]. The gradient through x is 0 outside.
        clip_weighted: with ``old_logprobs``, ``kl_clip`` acts on ``w * f``, on its value and its
            whole gradient, including the weight's. Where ``log_ratio_clip`` acts, the weight
            carries no gradient either. A weight that is NaN or infinite (in the arithmetic's dtype,
            after ``importance_cap``) is 0 and counts as clipped. NeMo-RL's loss does all three,
            slime's ``low_var_kl`` only the first. Without ``old_logprobs`` the option changes
            nothing. With ``gradient="k2"`` the limits still change only the value.
        linear_tail: c. For abs(x) > c, f continues on its tangent at c or -c, so the value stays
            finite and the gradient never becomes 0.

    Raises:
        ValueError: an unknown name or choice, or a limit that is not a positive number.
        TypeError: an argument of the wrong type.

    Sources: J. Schulman, "Approximating KL Divergence" (2020), for k1, k2 and k3; Y. Tang and
    R. Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (2025,
    arXiv:2506.09477), for what their gradients estimate.
    """

    name: EstimatorName = "k3"
    gradient: GradientName = "value"
    importance: ImportanceName = "differentiable"
    importance_cap: float | None = None
    log_ratio_clip: float | tuple[float, float] | None = None
    kl_clip: float | None = None
    clip_weighted: bool = False
    linear_tail: float | None = None
    _encoded: ClassVar[_Encoded]  # an attribute of each, and no field

    def __post_init__(self) -> None:
        check_choice("estimator", self.name, NAMES)
        check_choice("gradient", self.gradient, GRADIENTS)
        check_choice("importance", self.importance, IMPORTANCE)
        if not isinstance(self.clip_weighted, bool):
            raise TypeError(f"clip_weighted must be True or False, got {self.clip_weighted!r}")
        fields: dict[str, object] = {"name": _FORMULA_OF.get(self.name, self.name)}
        if self.name in PLUS:
            if self.gradient == "none":
                raise ValueError(f"gradient must be 'k2' with estimator {self.name!r}, got 'none'")
            fields |= {"gradient": "k2", "importance": "detached"}
        for limit in ("importance_cap", "kl_clip", "linear_tail"):
            if (value := getattr(self, limit)) is not None:
                fields[limit] = check_number(limit, value, above=0)
        clip: object = self.log_ratio_clip
        if isinstance(clip, list):  # a pair as JSON gives it
            fields["log_ratio_clip"] = clip = tuple(clip)
        _check_log_ratio_clip(clip)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        # Each call needs it, and computing it takes longer than a small kernel.
        object.__setattr__(self, "_encoded", self._encode())

    def encoded(self) -> _Encoded:
        """The fields of ``klfast.args.penalty.Choices`` and ``Numbers`` that an estimator has."""
        # Dynamo may turn a value that it reads from an object into a symbol.
        return self._encode() if torch.compiler.is_compiling() else self._encoded

    def _encode(self) -> _Encoded:
        limits = (self.importance_cap, *self.log_ratio_bounds, self.linear_tail, self.kl_clip)
        largest = torch.finfo(torch.float64).max  # NO_LIMIT, and a constant to dynamo
        finite = (largest if limit is None else float(limit) for limit in limits)
        choices = (
            ESTIMATORS.index(self.name),
            GRADIENTS.index(self.gradient),
            IMPORTANCE.index(self.importance),
            int(self.clip_weighted),
        )
        limited = tuple(max(-largest, min(limit, largest)) for limit in finite)
        return choices, cast(_Limits, limited)

    @property
    def log_ratio_bounds(self) -> tuple[float, float]:
        """``log_ratio_clip`` as (lo, hi); infinite where there is none."""
        clip = self.log_ratio_clip
        if clip is None:
            return (-math.inf, math.inf)
        lo, hi = clip if isinstance(clip, tuple) else (-clip, clip)
        return (float(lo), float(hi))


torch.serialization.add_safe_globals([Estimator])


def _check_log_ratio_clip(clip: object) -> None:
    if clip is None:
        return
    if not isinstance(clip, tuple):
        check_number("log_ratio_clip", clip, above=0)
        return
    if len(clip) != 2:
        raise ValueError(f"log_ratio_clip must be a number or a pair (lo, hi), got {clip!r}")
    for bound in clip:
        check_number("log_ratio_clip", bound)
    if not clip[0] < clip[1]:
        raise ValueError(f"log_ratio_clip must have lo < hi, got {clip!r}")


SHORTHAND = {name: Estimator(name) for name in NAMES}  # name -> the estimator without options


def as_estimator(estimator: EstimatorName | Estimator) -> Estimator:
    if isinstance(estimator, Estimator):
        return estimator
    if not (isinstance(estimator, str) and estimator in SHORTHAND):
        check_choice("estimator", estimator, NAMES, others=FRAMEWORKS_NAMES)
    return SHORTHAND[estimator]
