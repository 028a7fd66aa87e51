"""A row for each direction says what the tests know of it, in eager PyTorch.

``test_logits_oracle`` has the formulas in mpmath.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Eager(NamedTuple):
    """A direction at its default parameter.

    Attributes:
        terms: the terms of vocabulary entries, from log p of the policy and log q of the reference.
        most: the greatest value.
        curvature: near p = q, terms are ``curvature * p * (log p - log q)**2 / 2``.
        jumps: True if the slopes jump at p = q. The terms are then of the first order there.
    """

    terms: Callable[[Tensor, Tensor], Tensor]
    most: float = math.inf
    curvature: float = 1.0
    jumps: bool = False

    def of(self, logits: Tensor, ref_logits: Tensor) -> Tensor:
        """The divergence of each row."""
        return self.terms(logits.log_softmax(-1), ref_logits.log_softmax(-1)).sum(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return p.exp() * (p - q)


def _mixture(p: Tensor, q: Tensor, of_p: float) -> Tensor:
    return torch.logaddexp(p + math.log(of_p), q + math.log(1 - of_p))


def _jsd(p: Tensor, q: Tensor) -> Tensor:
    m = _mixture(p, q, 0.5)
    return (_kl(p, m) + _kl(q, m)) / 2


EAGER = {
    "reverse": Eager(_kl),
    "forward": Eager(lambda p, q: _kl(q, p)),
    "jsd": Eager(_jsd, math.log(2), 0.25),
    "tv": Eager(lambda p, q: (p.exp() - q.exp()).abs() / 2, 1.0, jumps=True),
    "skew-reverse": Eager(lambda p, q: _kl(p, _mixture(p, q, 0.1)), math.log(10), 0.9**2),
    "skew-forward": Eager(lambda p, q: _kl(q, _mixture(q, p, 0.1)), math.log(10), 0.9**2),
}
