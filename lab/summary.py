"""The records in numbers: each arm on the policy, those off it, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median, stdev

from lab.accuracy import SAMPLED
from lab.arms import ARMS, PARTNER, off_policy, on_policy
from lab.folder import Row
from lab.settings import Settings
from lab.words import number


@dataclass(frozen=True)
class Ending:
    """How one arm ended: means over the last third of its steps.

    Attributes:
        steps: how many it has made.
        window: how many the means are over.
        exact_kl: to the reference, over the whole vocabulary, nats per sequence.
        perplexity: of held-out text, per token.
    """

    name: str
    label: str
    steps: int
    window: int
    reward: float
    exact_kl: float
    perplexity: float


def ending_of(name: str, rows: Sequence[Row]) -> Ending:
    last = last_third(rows)
    return Ending(
        name=name,
        label=ARMS[name].label,
        steps=len(rows),
        window=len(last),
        reward=mean_of(last, "reward"),
        exact_kl=mean_of(last, "kl_per_sequence_exact"),
        perplexity=mean_of(last, "held_out_perplexity"),
    )


def rows_by_arm(rows: Iterable[Row], names: Iterable[str]) -> dict[str, list[Row]]:
    """The rows of these arms."""
    by_arm: dict[str, list[Row]] = {name: [] for name in names}
    for row in rows:
        if row["arm"] in by_arm:
            by_arm[row["arm"]].append(row)
    return by_arm


def last_third(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows that an arm's means are over, in text, tables and pictures."""
    return rows[-max(1, len(rows) // 3) :]


def window_of(rows: Sequence[Row]) -> tuple[int, int]:
    """The first and the last step of them."""
    last = last_third(rows)
    return last[0]["step"], last[-1]["step"]


def mean_of(rows: Iterable[Row], key: str) -> float:
    return fmean(row[key] for row in rows)


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
        kl_seconds, step_seconds: medians of the processor time over all steps.
        clipped: tokens where the penalty's clip acted, as a share of all.
        nonfinite: tokens whose log-ratio or penalty was NaN or infinite, in all steps.
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


# The sampler


@dataclass(frozen=True)
class Sampled:
    """Sampler and policy: means over all steps of an arm.

    Attributes:
        k3: KL(rollout || policy) in nats per token, by k3.
        worst_k3: that of the worst step.
        ess: effective sample size, a fraction of the tokens.
        outside: fraction of tokens whose weight the correction bounds.
        rejected: fraction of tokens that it rejects.
        plain_error, weighted_error: of the KL to the reference by k1, without weights and with
            them, as a share of the exact KL.
    """

    k3: float
    worst_k3: float
    ess: float
    outside: float
    rejected: float
    plain_error: float
    weighted_error: float


@dataclass(frozen=True)
class Drift(Ending):
    """One arm off the policy, or the one that is the same on it.

    Attributes:
        sampled: None on the policy.
    """

    sampled: Sampled | None


def summarise_drift(rows: Iterable[Row], settings: Settings) -> list[Drift]:
    """The arms off the policy that have made a step, behind their partner on it; or nothing."""
    names = compared(settings)
    found = [_summary(name, own) for name, own in rows_by_arm(rows, names).items() if own]
    return found if any(each.sampled for each in found) else []


def compared(settings: Settings) -> list[str]:
    """The arms off the policy, and before them their partner, if it is in the run."""
    names = off_policy(settings.arms)
    return [PARTNER, *names] if names and PARTNER in settings.arms else names


def _summary(name: str, rows: list[Row]) -> Drift:
    sampled = _sampled(rows) if ARMS[name].is_off_policy else None
    return Drift(**vars(ending_of(name, rows)), sampled=sampled)


def _sampled(rows: list[Row]) -> Sampled:
    def mean(key: str) -> float:
        return fmean(row["rollout"][key] for row in rows)

    return Sampled(
        k3=mean("k3"),
        worst_k3=max(row["rollout"]["k3"] for row in rows),
        ess=mean("ess"),
        outside=mean("outside"),
        rejected=mean("rejected_tokens"),
        plain_error=_error((row["kl_per_sequence_k1"] for row in rows), rows),
        weighted_error=_error((row["rollout"]["weighted_k1"] for row in rows), rows),
    )


def _error(estimates: Iterable[float], rows: list[Row]) -> float:
    """The estimates' sum over that of the exact KL, less 1; 0 where that is 0."""
    exact = sum(row["kl_per_sequence_exact"] for row in rows)
    return sum(estimates) / exact - 1 if exact > 0 else 0.0


def read_drift(drifts: list[Drift], settings: Settings) -> list[str]:
    """The arms in plain words: every statement follows from the numbers, none is pre-written."""
    sentences = [_drifted(d, d.sampled, settings) for d in drifts if d.sampled]
    by_name = {d.name: d for d in drifts}
    if "stale" in by_name and "corrected" in by_name:
        sentences.append(_change(by_name["stale"], by_name["corrected"], by_name.get(PARTNER)))
    return sentences


def _drifted(drift: Drift, sampled: Sampled, settings: Settings) -> str:
    acts = "bounded" if ARMS[drift.name].is_corrected else "would have bounded"
    rejects = "rejected" if ARMS[drift.name].is_corrected else "would have rejected"
    return (
        f"In the arm “{drift.label}” KL(rollout || policy) was {number(sampled.k3)} nats per token "
        f"(k3, mean of {drift.steps} steps; {number(sampled.worst_k3)} in the worst). The "
        f"correction “{settings.correction}” {acts} the weight of {sampled.outside:.1%} of the "
        f"tokens and {rejects} {sampled.rejected:.1%}; its effective sample size was "
        f"{sampled.ess:.0%}. On the sampler's tokens k1 was off the exact KL to the reference "
        f"by {sampled.plain_error:+.1%} without weights, and by {sampled.weighted_error:+.1%} with "
        "them."
    )


def _change(stale: Drift, corrected: Drift, partner: Drift | None) -> str:
    def numbers(drift: Drift) -> str:
        return (
            f"a reward of {drift.reward:.1%} at {number(drift.exact_kl)} nats per sequence (exact) "
            f"and a held-out perplexity of {number(drift.perplexity)}"
        )

    text = (
        f"At the same coefficient, the stale sampler ended with {numbers(stale)}; with the "
        f"correction with {numbers(corrected)}"
    )
    if partner is not None:
        text += f". The arm “{partner.label}”, whose sampler is the policy, had {numbers(partner)}"
    return text + "."
