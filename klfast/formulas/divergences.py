"""The divergences as rows: what ``direction=`` takes, and what each value means.

p is the policy (the student), q the reference (the teacher).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.formulas.estimators import exp_minus_1_minus
from klfast.types.names import DirectionName

Term = Callable[[Tensor, Tensor], Tensor]
"""The terms of a KL from the logs of two numbers: :func:`term` or :func:`dropped_term`."""


def term(log_x: Tensor, log_y: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """X log(x / y) - x + y, which is x (e^d - 1 - d) with d = log(y / x): >= 0, and 0 at x = y.

    ``log_ratio``: d, if it has more digits than the difference.
    """
    x = log_x.exp()
    ratio = log_y - log_x if log_ratio is None else log_ratio
    is_near = ratio.abs() <= 1
    # The branch that is not taken must be finite, as its gradient is multiplied by 0.
    near = torch.where(is_near, ratio, 0.0)
    return torch.where(
        is_near, x * exp_minus_1_minus(near), log_y.exp() - x + dropped_term(log_x, log_y)
    )


def dropped_term(log_x: Tensor, log_y: Tensor) -> Tensor:
    """X log(x / y); 0 where x is 0."""
    x = log_x.exp()
    return x * torch.where(x == 0, 0.0, log_x - log_y)


def half_distance(log_x: Tensor, log_y: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """1/2 |x - y|, with a slope of NaN if it is NaN. ``log_ratio`` as in :func:`term`."""
    ratio = log_y - log_x if log_ratio is None else log_ratio
    is_near = ratio.abs() <= 1
    near = log_x.exp() * torch.where(is_near, ratio, 0.0).expm1()
    apart = torch.where(is_near, near, log_y.exp() - log_x.exp())
    slope = torch.where(apart.isnan(), apart, apart.sign()).detach()  # torch's is 0 at NaN
    return 0.5 * slope * apart


def log_mixture(log_x: Tensor, log_y: Tensor, of_x: float, of_y: float) -> Tensor:
    """log(of_x x + of_y y), and -inf where both are 0, whose slope would be NaN."""
    possible = (log_x != -torch.inf) | (log_y != -torch.inf)
    x, y = (torch.where(possible, log, 0.0) for log in (log_x, log_y))
    mixed = torch.logaddexp(x + math.log(of_x), y + math.log(of_y))
    return torch.where(possible, mixed, -torch.inf)


def _jsd(of: Term, x: Tensor, y: Tensor, beta: float) -> Tensor:
    m = log_mixture(x, y, 1 - beta, beta)
    return (1 - beta) * of(x, m) + beta * of(y, m)


class Divergence(NamedTuple):
    """A divergence of two models, x and y, as the ops take it."""

    # Its terms from logs of x and y, one number each, and its parameter.
    terms: Callable[[Term, Tensor, Tensor, float], Tensor]
    parameter: str | None = None  # the argument that its parameter comes from
    # Why it is no sum over shards of a vocabulary; None if it is one.
    why_no_shards: str | None = None


_OF_MIXTURE = "the mixture has another weight in every shard"
_OF_MASSES = "each |p - q| depends on both models' mass of the shard"
DIVERGENCE_TABLE = {
    "kl": Divergence(lambda of, x, y, _: of(x, y)),
    "jsd": Divergence(_jsd, "jsd_beta", _OF_MIXTURE),
    "tv": Divergence(lambda _, x, y, __: half_distance(x, y), None, _OF_MASSES),
    "skew": Divergence(
        lambda of, x, y, alpha: of(x, log_mixture(x, y, alpha, 1 - alpha)),
        "skew_alpha",
        _OF_MIXTURE,
    ),
}
DIVERGENCES = tuple(DIVERGENCE_TABLE)
"""The names of the rows of ``DivergenceTable`` in ``csrc/formulas/divergences.h``, in its order."""


class Direction(NamedTuple):
    """What a value of ``direction=`` computes."""

    name: DirectionName
    divergence: str
    policy: int = 0  # the policy's place: 0 if it is x, 1 if it is y


_DIRECTIONS = (
    Direction("reverse", "kl"),
    Direction("forward", "kl", 1),
    Direction("jsd", "jsd"),
    Direction("tv", "tv"),
    Direction("skew-reverse", "skew"),
    Direction("skew-forward", "skew", 1),
)
DIRECTION_TABLE: dict[str, Direction] = {of.name: of for of in _DIRECTIONS}
