"""The records in numbers: each arm on the policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median, stdev

from lab.arms import ARMS, on_policy
from lab.errors import SAMPLED
from lab.means import Ending, ending_of, last_third, mean_of, rows_by_arm
from lab.settings import Settings
from lab.train import Row

HELD_WITHIN = 0.2
"""An arm held the target if its mean KL over the last third is within this share of it."""


@dataclass(frozen=True)
class Estimate:
    """One sampled estimator beside the exact KL, in nats per sequence.

    Attributes:
        kl: its mean.
        bias: ``kl`` minus the exact KL.
        error_std: standard deviation of a single sequence's error.
    """

    kl: float
    bias: float
    error_std: float


@dataclass(frozen=True)
class Lengths:
    """The sequences of ``first`` to ``last`` tokens.

    Attributes:
        share: of all sequences.
        exact, k3: nats per token.
    """

    first: int
    last: int
    share: float
    exact: float
    k3: float


@dataclass(frozen=True)
class Summary(Ending):
    """One arm. Unless said otherwise, means over the last third of its steps.

    Attributes:
        kl: nats per sequence (k3, the estimator that the controllers read).
        kl_spread, reward_spread: standard deviations from step to step; 0 for a single step.
        kl_per_token: nats per token.
        length: tokens of a sequence.
        first_reward, first_perplexity: of the first step.
        settled: the first step whose KL came within ``HELD_WITHIN`` of the target, if any did.
        kl_seconds, step_seconds: medians over all steps.
        clipped: tokens where the penalty's clip acted, as a share of all.
        nonfinite: tokens whose log-ratio was NaN or infinite, in all steps.
        lengths: the KL by the length of the sequence.
    """

    steers: bool
    kl: float
    kl_spread: float
    reward_spread: float
    kl_per_token: float
    length: float
    estimates: dict[str, Estimate]
    coefficient: float
    first_reward: float
    first_perplexity: float
    settled: int | None
    kl_seconds: float
    step_seconds: float
    clipped: float
    nonfinite: int
    lengths: list[Lengths]

    @property
    def kl_noise(self) -> float:
        """Standard error of ``kl``, of steps as if they were independent; unknown of one."""
        return self._noise(self.kl_spread)

    @property
    def reward_noise(self) -> float:
        """The same of ``reward``."""
        return self._noise(self.reward_spread)

    def _noise(self, spread: float) -> float:
        return spread / sqrt(self.window) if self.window > 1 else inf

    def miss(self, target: float) -> float:
        """How far ``kl`` is off, as a share of the target: -0.1 is 10 % below."""
        return self.kl / target - 1

    def held(self, target: float) -> bool:
        return abs(self.miss(target)) <= HELD_WITHIN


def summarise(rows: Iterable[Row], settings: Settings) -> list[Summary]:
    """One summary for each arm on the policy that has made a step, in the order of the settings."""
    by_arm = rows_by_arm(rows, on_policy(settings.arms))
    return [_summarise_arm(name, own, settings) for name, own in by_arm.items() if own]


def _summarise_arm(name: str, rows: list[Row], settings: Settings) -> Summary:
    last = last_third(rows)
    near = (
        row["step"]
        for row in rows
        if abs(row["kl_per_sequence_k3"] / settings.target - 1) <= HELD_WITHIN
    )
    tokens = sum(sum(_lengths(row, "tokens")) for row in last)
    return Summary(
        **vars(ending_of(name, rows)),
        steers=ARMS[name].steers,
        kl=mean_of(last, "kl_per_sequence_k3"),
        kl_spread=_spread(last, "kl_per_sequence_k3"),
        reward_spread=_spread(last, "reward"),
        kl_per_token=mean_of(last, "kl_per_token_k3"),
        length=tokens / sum(sum(_lengths(row, "sequences")) for row in last),
        estimates={estimator: _estimate(estimator, last) for estimator in SAMPLED},
        coefficient=mean_of(last, "coefficient"),
        first_reward=rows[0]["reward"],
        first_perplexity=rows[0]["held_out_perplexity"],
        settled=next(near, None),
        kl_seconds=median(row["kl_step_seconds"] for row in rows),
        step_seconds=median(row["step_seconds"] for row in rows),
        clipped=sum(row["clipped"] for row in last) / tokens,
        nonfinite=sum(row["nonfinite"] for row in rows),
        lengths=_by_length(last),
    )


def _spread(rows: Sequence[Row], key: str) -> float:
    """Standard deviation from step to step."""
    return stdev(row[key] for row in rows) if len(rows) > 1 else 0.0


def _lengths(row: Row, column: str) -> list[float]:
    found: list[float] = row["by_length"][column]
    return found


def _by_length(rows: Sequence[Row]) -> list[Lengths]:
    totals: dict[float, dict[str, float]] = {}
    for row in rows:
        for i, first in enumerate(_lengths(row, "first")):
            total = totals.setdefault(first, dict.fromkeys(row["by_length"], 0.0))
            for name in total:
                total[name] += _lengths(row, name)[i]
    sequences = sum(total["sequences"] for total in totals.values())
    return [
        Lengths(
            int(first),
            2 * int(first) - 1,
            total["sequences"] / sequences,
            total["exact"] / total["tokens"],
            total["k3"] / total["tokens"],
        )
        for first, total in sorted(totals.items())
    ]


def _estimate(estimator: str, rows: Sequence[Row]) -> Estimate:
    key = f"kl_per_sequence_{estimator}"
    return Estimate(
        kl=mean_of(rows, key),
        bias=fmean(row[key] - row["kl_per_sequence_exact"] for row in rows),
        error_std=sqrt(fmean(row[f"{key}_error_std"] ** 2 for row in rows)),
    )
