"""The textbook formulas of a token's statistics between rollout policy and policy.

The kernels have the stable forms. ``x = logprobs - rollout_logprobs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.formulas.estimators import FORMULAS, exp_minus_1_minus

# The greatest exponent in nats. A ratio's exponent is at least minus this, so a ratio lies in
# [2.1e-9, 4.9e8], and its square fits fp32. verl, SkyRL and slime have the same bound.
EXPONENT_LIMIT = 20.0

# The least 1 - p in a binary divergence, because log-probs near 0 are rounded to 0.
LEAST_COMPLEMENT = 1e-8


def ratio(x: Tensor) -> Tensor:
    """exp(x), saturated."""
    return torch.exp(x.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))


def k3(x: Tensor) -> Tensor:
    """expm1(x) - x, which saturates at x = EXPONENT_LIMIT."""
    return FORMULAS["k3_ref"](x.clamp(max=EXPONENT_LIMIT))


def chi2(x: Tensor) -> Tensor:
    """exp(2x) - 1, saturated: its mean over rollout samples is chi-square(policy || rollout)."""
    return torch.expm1(2 * x.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))


def multiplicative_error(x: Tensor) -> Tensor:
    """exp(abs(x)) - 1, saturated: the factor between the two probabilities, less 1."""
    return torch.expm1(x.abs().clamp(max=EXPONENT_LIMIT))


def binary_kl(a: Tensor, b: Tensor) -> Tensor:
    """KL of two events (this token, or any other) with probabilities exp(a) and exp(b)."""
    a, b = a.clamp(max=0), b.clamp(max=0)
    rest_a, rest_b = ((-torch.expm1(t)).clamp(min=LEAST_COMPLEMENT) for t in (a, b))
    rest = torch.log(rest_b / rest_a)
    if rest.dtype == torch.float64:
        of_this = torch.where(a == -torch.inf, 0.0, torch.exp(a) * (a - b))
        kl = of_this - rest_a * rest
    else:  # the same, with terms that do not cancel
        gap = (b - a).clamp(max=200)  # beyond, exp(a) is 0
        far, near = torch.exp(b) - torch.exp(a) * (1 + gap), exp_minus_1_minus(gap)
        of_this = torch.where(gap > 1, far, torch.exp(a) * near)
        kl = of_this + rest_a * exp_minus_1_minus(rest)
    # The clamp hides rounding. An exp(a) that is too small for the dtype is not 0.
    return torch.where((b == -torch.inf) & (a > -torch.inf), torch.inf, kl.clamp(min=0))


def difference(a: Tensor, b: Tensor) -> Tensor:
    """exp(a) - exp(b). Its magnitude is the total variation of the two events."""
    return torch.exp(a.clamp(max=0)) - torch.exp(b.clamp(max=0))


class Token(NamedTuple):
    """The inputs of the sums of ``RolloutStats``: tensors over tokens, 0 where not counted."""

    logprobs: Tensor
    x: Tensor
    weight: Tensor
    counted: Tensor  # True where a token is kept and x is finite


class Sum(NamedTuple):
    """A field of ``RolloutStats`` that is a sum over tokens, weighted by the mask."""

    term: Callable[[Token], Tensor]
    # The name of its mean per token in RolloutStats.as_dict, if that is logged.
    mean: str | None = None


SUMS = {
    "logprobs": Sum(lambda token: token.logprobs),
    "k1": Sum(lambda token: FORMULAS["k1"](token.x)),
    "abs": Sum(lambda token: FORMULAS["abs"](token.x), mean="abs_log_ratio"),
    "k2": Sum(lambda token: FORMULAS["k2"](token.x), mean="k2"),
    "k3": Sum(lambda token: k3(token.x), mean="k3"),
    "ratio": Sum(lambda token: torch.where(token.counted, ratio(token.x), 0.0)),
    "chi2": Sum(lambda token: chi2(token.x), mean="chi2_token"),
    "error": Sum(lambda token: multiplicative_error(token.x), mean="error"),
    "weight": Sum(lambda token: token.weight, mean="weight_mean"),
    "weight_squares": Sum(lambda token: token.weight.square()),
    "weight_deviation": Sum(lambda token: (token.weight - 1).square()),
}
"""By the field's name. ``csrc/rollout/statistics.h`` has the stable forms."""

TOKEN_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda a, b: FORMULAS["k1"](a - b),
    "abs": lambda a, b: FORMULAS["abs"](a - b),
    "k2": lambda a, b: FORMULAS["k2"](a - b),
    "k3": lambda a, b: k3(a - b),
    "binary_kl": lambda a, b: binary_kl(b, a),
    "binary_kl_reverse": binary_kl,
    "binary_tv": lambda a, b: difference(a, b).abs(),
    "difference": difference,
}
"""f(logprobs, rollout_logprobs) by name, in the order of the ops."""
