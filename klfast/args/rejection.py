"""A rejection criterion for tokens or sequences, as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from klfast.args.checks import check_choice, check_number

STATISTICS = (
    "ratio",
    "k1",
    "abs",
    "k2",
    "k3",
    "binary_kl",
    "binary_kl_reverse",
    "binary_tv",
    "difference",
)
"""Names of the statistics of a token. The ops get ``ratio`` as ``k1``, with log bounds."""

OVER = ("token", "seq-sum", "seq-mean", "seq-max", "seq-min")
"""The number that a criterion compares: each token's own, or one per sequence."""

_SIGNED = ("k1", "difference")


@dataclass(frozen=True)
class Rejection:
    """A bound on how far the policy may have left the rollout policy, as plain data.

    With ``x = logprobs - rollout_logprobs`` in nats, p = exp(logprobs), q = exp(rollout_logprobs),
    the statistic of a token is

    ===================== ==================================================== ====================
    statistic             of a token                                           unit
    ===================== ==================================================== ====================
    ratio                 exp(x); its product and geometric mean over tokens   none
    k1                    x                                                    nats
    abs                   abs(x)                                               nats
    k2                    x**2 / 2                                             nats squared
    k3                    expm1(x) - x, >= 0, of tokens that q has sampled     nats
    binary_kl             q log(q/p) + (1 - q) log((1-q)/(1-p))                nats
    binary_kl_reverse     p log(p/q) + (1 - p) log((1-p)/(1-q))                nats
    binary_tv             abs(p - q)                                           probability
    difference            p - q, with a sign                                   probability
    ===================== ==================================================== ====================

    ``over`` says which number the bounds apply to. With ``"token"`` it is each token's own number,
    and a token that fails is rejected alone. With ``"seq-sum"``, ``"seq-mean"``, ``"seq-max"`` and
    ``"seq-min"`` it is the sum, mean, greatest or least over the kept tokens of a sequence, and the
    whole sequence is rejected. Sums and means are weighted by the mask. For the ratio,
    ``"seq-sum"`` is the product and ``"seq-mean"`` the geometric mean. Bounds are inclusive:
    ``low <= number <= high`` is kept. A token's number and its bounds are rounded to fp32 (fp64 if
    a log-prob is fp64) before they are compared. Numbers of sequences are compared in fp64.

    Numbers saturate instead of overflowing: exp(x) in k3 saturates at x = 20. 1 - p and 1 - q are
    at least 1e-8, and p and q at most 1. A criterion over sequences includes a token with x = -inf
    as one whose policy log-prob is -inf, also if its rollout log-prob is +inf, which is none. Its
    ratio is 0, k1 is -inf, and abs, k2, k3 and binary_kl are inf. It counts in the length of a
    mean. A token with x = inf or NaN is left out, of the sum and of the length. Every token that is
    not finite is itself rejected.

    Args:
        statistic: a name from the table.
        over: ``"token"``, ``"seq-sum"``, ``"seq-mean"``, ``"seq-max"`` or ``"seq-min"``.
        low: the least number that is kept, in the statistic's unit, or None for no lower bound. A
            veto is ``Rejection("ratio", "seq-min", low=1e-4)``.
        high: the greatest number that is kept, or None for no upper bound.
        outward_only: a token fails only if its advantage pushes it further out (DPPO,
            arXiv:2602.04879). This is x > 0 with an advantage > 0, or x < 0 with an advantage <= 0.
            Use it with ``over="token"`` and ``rollout_correction(..., advantages=...)``.

    Raises:
        ValueError: an unknown choice, no bound at all, ``low > high``, a bound that is not > 0
            (k1 and difference allow bounds of any sign), or ``outward_only`` over sequences.
        TypeError: an argument of the wrong type.

    Sources: ratios and geometric means are from Y. Liu et al., "When Speed Kills Stability" (2025,
    richardli.xyz/rl-collapse). Binary divergences are from arXiv:2602.04879. Both directions of the
    binary KL are from J. Guo et al., "KPop" (2026, ringtech.notion.site/kpop).
    """

    statistic: str
    over: str = "token"
    low: float | None = field(default=None, kw_only=True)
    high: float | None = field(default=None, kw_only=True)
    outward_only: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, STATISTICS)
        check_choice("over", self.over, OVER)
        for name in ("low", "high"):
            if (bound := getattr(self, name)) is not None:
                above = None if self.statistic in _SIGNED else 0
                object.__setattr__(self, name, check_number(name, bound, above=above))
        if self.low is None and self.high is None:
            raise ValueError(f"low or high must be given, got neither for {self.statistic!r}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low!r} > {self.high!r}")
        if not isinstance(self.outward_only, bool):
            raise TypeError(f"outward_only must be True or False, got {self.outward_only!r}")
        if self.outward_only and self.over != "token":
            raise ValueError(f"outward_only must go with over='token', got over={self.over!r}")

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high), infinite if absent. The bounds of a ratio are logarithms and apply to x."""
        scale = math.log if self.statistic == "ratio" else float
        low = -math.inf if self.low is None else scale(self.low)
        return low, math.inf if self.high is None else scale(self.high)

    @property
    def formula(self) -> str:
        """The name in ``klfast.formulas.rollout`` of the number that ``bounds`` apply to."""
        return "k1" if self.statistic == "ratio" else self.statistic

    @property
    def is_of_sequence(self) -> bool:
        """True if the criterion rejects whole sequences."""
        return self.over != "token"


torch.serialization.add_safe_globals([Rejection])


def as_rules(reject: object) -> tuple[Rejection, ...]:
    """The criteria in a user's argument, each (statistic, over) once."""
    rules: tuple[Any, ...] = (reject,)
    if isinstance(reject, Sequence) and not isinstance(reject, str):
        rules = tuple(reject)
    seen = set()
    for rule in rules:
        if not isinstance(rule, Rejection):
            raise TypeError(
                f"reject must be a Rejection or a sequence of them, got {type(rule).__name__}"
            )
        key = (rule.statistic, rule.over)
        if key in seen:
            raise ValueError(
                f"reject must have each criterion once, got {rule.statistic!r} over "
                f"{rule.over!r} twice"
            )
        seen.add(key)
    return rules
