"""The call object of ``rollout_correction``: its arguments after every check.

It is plain data: tensors, positions in lists, and numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import check_choice, check_number
from klfast.args.estimator import NO_LIMIT
from klfast.args.rejection import OVER, Rejection, as_rules
from klfast.args.signature import Tokens
from klfast.args.values import check_cu_seqlens_values, check_mask_values
from klfast.formulas.rollout import TOKEN_STATISTICS
from klfast.types.dtypes import arithmetic_dtype

WEIGHTS = ("none", "token", "sequence", "geometric")
"""The log of a weight: none, a token's x, the sum of x over the sequence, its mean."""

OUTSIDE = ("truncate", "mask")
NORMALIZE = ("token", "sequence")
FORMULAS = tuple(TOKEN_STATISTICS)  # names of the formulas of criteria, in the order of the ops


class RolloutChoices(NamedTuple):
    """The choices of a spec as the ops take them: positions in ``WEIGHTS`` and ``OUTSIDE``."""

    weight: int
    outside: int


class RolloutNumbers(NamedTuple):
    """The numbers of a spec as the ops take them: bounds on the log of a weight, and the bounds
    themselves. An absent log bound is -``NO_LIMIT`` or ``NO_LIMIT``. An absent bound is 0 or
    ``NO_LIMIT``.
    """

    log_floor: float
    log_cap: float
    log_least: float  # a weight counts as below under this: log_floor, or -log_cap without a floor
    floor: float
    cap: float


class RuleChoices(NamedTuple):
    """A criterion's choices for the ops: positions in ``FORMULAS`` and ``OVER``, and 0 or 1."""

    formula: int
    over: int
    outward_only: int


class RuleBounds(NamedTuple):
    """A criterion's bounds for the ops. Absent bounds are -``NO_LIMIT`` and ``NO_LIMIT``."""

    low: float
    high: float


class RolloutSpec(NamedTuple):
    """The options: every argument that is not a tensor of the batch."""

    weight: str  # one of WEIGHTS
    floor: float | None
    cap: float | None
    outside: str  # one of OUTSIDE
    rules: tuple[Rejection, ...]

    @classmethod
    def of(
        cls,
        weight: str | None,
        floor: float | None,
        cap: float | None,
        outside: str,
        reject: object,
    ) -> RolloutSpec:
        if weight is not None:
            check_choice("weight", weight, WEIGHTS[1:])
        elif floor is not None:
            raise ValueError(f"floor must be None with weight=None, got {floor!r}")
        check_choice("outside", outside, OUTSIDE)
        floor = None if floor is None else check_number("floor", floor, above=0)
        cap = None if cap is None else check_number("cap", cap, above=0)
        if floor is not None and cap is not None and floor > cap:
            raise ValueError(f"cap must be >= floor={floor!r}, got {cap!r}")
        cap = None if weight is None else cap
        return cls(weight or "none", floor, cap, outside, as_rules(reject))

    def log_bounds(self) -> tuple[float, float]:
        """Bounds on the log of a weight, infinite if absent."""
        return (
            -math.inf if self.floor is None else math.log(self.floor),
            math.inf if self.cap is None else math.log(self.cap),
        )

    def log_least(self) -> float:
        """The log of the weight below which ``RolloutStats.below`` counts."""
        low, high = self.log_bounds()
        return -high if self.floor is None else low

    def by_sequence(self) -> str | None:
        """An option that needs each token's sequence, as a hint names it; None if there is none."""
        if self.weight in ("sequence", "geometric"):
            return f"weight {self.weight!r}"
        over = next((rule.over for rule in self.rules if rule.is_of_sequence), None)
        return None if over is None else f"a Rejection over {over!r}"

    def encoded(self) -> tuple[RolloutChoices, RolloutNumbers]:
        """Weights and bounds as the ops take them."""
        low, high = (limited(bound) for bound in self.log_bounds())
        floor = 0.0 if self.floor is None else self.floor
        cap = NO_LIMIT if self.cap is None else self.cap
        choices = RolloutChoices(WEIGHTS.index(self.weight), OUTSIDE.index(self.outside))
        return choices, RolloutNumbers(low, high, limited(self.log_least()), floor, cap)

    def encoded_rules(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The criteria as the ops take them: all their ``RuleChoices`` and ``RuleBounds``."""
        choices: tuple[int, ...] = ()
        bounds: tuple[float, ...] = ()
        for rule in self.rules:
            choices += RuleChoices(
                FORMULAS.index(rule.formula), OVER.index(rule.over), int(rule.outward_only)
            )
            bounds += RuleBounds(*map(limited, rule.bounds))
        return choices, bounds


def limited(bound: float) -> float:
    """A bound as the ops take it: ``NO_LIMIT`` or its negative in place of infinity."""
    return max(-NO_LIMIT, min(bound, NO_LIMIT))


class RolloutCall(NamedTuple):
    """Arguments of ``rollout_correction`` after every check; no tensor carries a graph."""

    logprobs: Tensor
    rollout_logprobs: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    spec: RolloutSpec
    advantages: Tensor | None = None  # in the shape of logprobs, or one per sequence

    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(self.logprobs, self.rollout_logprobs)

    def check_values(self) -> None:
        """Raise ValueError if a mask or cu_seqlens holds an invalid value."""
        if self.mask is not None:
            check_mask_values(self.mask, self.arithmetic())
        if self.cu_seqlens is not None:
            check_cu_seqlens_values(self.cu_seqlens, self.logprobs.shape[0])

    def check_numbers(self) -> None:
        """Nothing: no kernel refuses a number of the options."""


def rollout_call(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor | None,
    spec: RolloutSpec,
    normalize: str | None = None,
    cu_seqlens: Tensor | None = None,
    advantages: Tensor | None = None,
) -> RolloutCall:
    """The arguments except ``backend`` and the group, after every check that needs no data."""
    if normalize is not None:
        check_choice("normalize", normalize, NORMALIZE)
        if spec.weight == "none":
            raise ValueError(f"normalize must be None with weight=None, got {normalize!r}")
    wanted = any(rule.outward_only for rule in spec.rules)
    if wanted and advantages is None:
        raise ValueError(
            "advantages must be given for a Rejection with outward_only=True, got None"
        )
    if advantages is not None and not wanted:
        raise ValueError(
            "advantages must be None without a Rejection with outward_only=True, got a tensor"
        )
    Tokens.of("rollout_correction", logprobs, cu_seqlens).check(
        rollout_logprobs=rollout_logprobs, mask=mask, advantages=advantages
    )
    return RolloutCall(
        logprobs.detach(),
        rollout_logprobs.detach(),
        mask,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        spec,
        None if advantages is None else advantages.detach(),
    )
