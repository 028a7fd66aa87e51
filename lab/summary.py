"""Summaries of the records: the end of each arm, a stale sampler's drift, the estimators' accuracy.

The exact KL at a token sums over the vocabulary, given the tokens before it. An estimator knows
only the sampled token. Its errors are put into bins of tokens with about the same exact KL. This KL
is fixed before the token is sampled, so an unbiased estimator is unbiased in every bin.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median, stdev

from lab.settings import ARMS, PARTNER, Settings, off_policy, on_policy
from lab.train import EDGES, SAMPLED, Row

HELD_WITHIN = 0.2
"""An arm held the target if its mean KL over the last third is within this share of it."""


def number(value: float) -> str:
    """Three significant digits, without an exponent for numbers of common size."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2e}"


def rows_by_arm(rows: Iterable[Row], names: Iterable[str]) -> dict[str, list[Row]]:
    by_arm: dict[str, list[Row]] = {name: [] for name in names}
    for row in rows:
        if row["arm"] in by_arm:
            by_arm[row["arm"]].append(row)
    return by_arm


def last_third(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows that an arm's means cover, in text, tables and pictures."""
    return rows[-max(1, len(rows) // 3) :]


def mean_of(rows: Iterable[Row], key: str) -> float:
    return fmean(row[key] for row in rows)


@dataclass(frozen=True)
class Sampled:
    """Sampler and policy: means over all steps of an arm.

    Attributes:
        k3: KL(rollout || policy) in nats per token, by k3.
        ess: effective sample size, a fraction of the tokens.
        outside: fraction of tokens whose weight the correction bounds.
        rejected: fraction of tokens that it rejects.
        plain_error, weighted_error: the error of the KL to the reference by k1, without and with
            weights, as a share of the exact KL.
    """

    k3: float
    ess: float
    outside: float
    rejected: float
    plain_error: float
    weighted_error: float


@dataclass(frozen=True)
class Summary:
    """One arm. Values are means over the last third of its steps, unless said otherwise.

    Attributes:
        steps: the number of its steps.
        window: the number of steps that the means cover.
        kl: nats per sequence (k3, the estimator that the controllers read).
        exact_kl: to the reference, over the whole vocabulary, nats per sequence.
        perplexity: of held-out text, per token.
        kl_spread, reward_spread: standard deviations from step to step, 0 for a single step.
        kl_per_token: nats per token.
        length: tokens of a sequence.
        kl_seconds, step_seconds: medians of the processor time over all steps.
        clipped: tokens where the penalty's clip acted, as a share of all.
        nonfinite: tokens whose log-ratio or penalty was NaN or infinite, in all steps.
        sampled: the sampler of an off-policy arm.
    """

    name: str
    label: str
    steers: bool
    steps: int
    window: int
    reward: float
    reward_spread: float
    kl: float
    kl_spread: float
    kl_per_token: float
    exact_kl: float
    perplexity: float
    length: float
    coefficient: float
    kl_seconds: float
    step_seconds: float
    clipped: float
    nonfinite: int
    sampled: Sampled | None

    @property
    def kl_noise(self) -> float:
        """Standard error of ``kl``, as if steps were independent. Unknown for a single step."""
        return self.kl_spread / sqrt(self.window) if self.window > 1 else inf

    def miss(self, target: float) -> float:
        """The deviation of ``kl`` from the target, as a share of it: -0.1 is 10 % below."""
        return self.kl / target - 1

    def held(self, target: float) -> bool:
        return abs(self.miss(target)) <= HELD_WITHIN


def summarise(rows: Iterable[Row], settings: Settings) -> list[Summary]:
    """A summary for each on-policy arm that has made a step, in the order of the settings."""
    return _summaries(rows, on_policy(settings.arms), settings)


def summarise_drift(rows: Iterable[Row], settings: Settings) -> list[Summary]:
    """A summary for each off-policy arm that has made a step, after their on-policy partner."""
    found = _summaries(rows, compared(settings), settings)
    return found if any(each.sampled for each in found) else []


def compared(settings: Settings) -> list[str]:
    """The off-policy arms, and before them their on-policy partner if it is in the run."""
    names = off_policy(settings.arms)
    return [PARTNER, *names] if names and PARTNER in settings.arms else names


def _summaries(rows: Iterable[Row], names: Iterable[str], settings: Settings) -> list[Summary]:
    by_arm = rows_by_arm(rows, names)
    return [_summarise_arm(name, own, settings) for name, own in by_arm.items() if own]


def _summarise_arm(name: str, rows: list[Row], settings: Settings) -> Summary:
    last = last_third(rows)
    length = mean_of(last, "mean_length")
    spread = {
        key: stdev(row[key] for row in last) if len(last) > 1 else 0.0
        for key in ("reward", "kl_per_sequence_k3")
    }
    return Summary(
        name=name,
        label=ARMS[name].label,
        steers=ARMS[name].steers,
        steps=len(rows),
        window=len(last),
        reward=mean_of(last, "reward"),
        reward_spread=spread["reward"],
        kl=mean_of(last, "kl_per_sequence_k3"),
        kl_spread=spread["kl_per_sequence_k3"],
        kl_per_token=mean_of(last, "kl_per_token_k3"),
        exact_kl=mean_of(last, "kl_per_sequence_exact"),
        perplexity=mean_of(last, "held_out_perplexity"),
        length=length,
        coefficient=mean_of(last, "coefficient"),
        kl_seconds=median(row["kl_step_seconds"] for row in rows),
        step_seconds=median(row["step_seconds"] for row in rows),
        clipped=mean_of(last, "clipped") / (length * settings.batch),
        nonfinite=sum(row["nonfinite"] for row in rows),
        sampled=_sampled(rows) if ARMS[name].is_off_policy else None,
    )


def _sampled(rows: list[Row]) -> Sampled:
    flat = [{**row, **row["rollout"]} for row in rows]
    exact = sum(row["kl_per_sequence_exact"] for row in rows)

    def error(key: str) -> float:
        """The sum of the estimates over the sum of the exact KL, minus 1. If the latter is 0, 0."""
        return sum(row[key] for row in flat) / exact - 1 if exact > 0 else 0.0

    return Sampled(
        k3=mean_of(flat, "k3"),
        ess=mean_of(flat, "ess"),
        outside=mean_of(flat, "outside"),
        rejected=mean_of(flat, "rejected_tokens"),
        plain_error=error("kl_per_sequence_k1"),
        weighted_error=error("weighted_k1"),
    )


ENOUGH_TOKENS, ENOUGH_STEPS = 1000, 10
"""A bin is shown if it has at least so many tokens, from at least so many steps."""

_CONFIDENCE = 1.96  # standard errors on either side of a 95 % band
Sums = dict[str, float]  # the columns of ``lab.train.Errors``, for one bin


@dataclass(frozen=True)
class Accuracy:
    """One estimator in one bin, as shares of the bin's mean exact KL.

    Attributes:
        bias: the mean error.
        margin: half the width of the 95 % band around ``bias``.
        std: the standard deviation of a single token's error.
    """

    bias: float
    margin: float
    std: float


@dataclass(frozen=True)
class Bin:
    """Tokens whose exact KL lies between ``low`` and ``high``, in nats. ``exact`` is its mean."""

    low: float
    high: float
    tokens: int
    steps: int
    exact: float
    estimators: dict[str, Accuracy]


def measure(rows: Iterable[Row]) -> list[Bin]:
    """The bins with enough tokens, over all steps of all arms, from low to high."""
    by_bin: dict[float, dict[int, Sums]] = {}
    for row in rows:
        if "token_errors" not in row:  # its tokens come from another sampler
            continue
        errors = row["token_errors"]
        for i, low in enumerate(errors["low"]):
            sums = by_bin.setdefault(low, {}).setdefault(row["step"], {})
            for key, column in errors.items():
                sums[key] = sums.get(key, 0.0) + column[i]
    bins = [_bin(low, list(by_bin[low].values())) for low in sorted(by_bin)]
    return [b for b in bins if b.tokens >= ENOUGH_TOKENS and b.steps >= ENOUGH_STEPS]


def _bin(low: float, by_step: list[Sums]) -> Bin:
    total = {key: sum(sums[key] for sums in by_step) for key in by_step[0]}
    count = total["tokens"]
    return Bin(
        low=low,
        high=next((edge for edge in EDGES if edge > low), inf),
        tokens=int(count),
        steps=len(by_step),
        exact=total["exact"] / count,
        estimators={name: _accuracy(name, by_step, total) for name in SAMPLED},
    )


def _accuracy(name: str, by_step: list[Sums], total: Sums) -> Accuracy:
    """All arms of a step count as one draw, because they draw with the same random numbers."""
    count, kl = total["tokens"], total["exact"]
    bias = total[name] / count
    variance = max(0.0, total[f"{name}_squared"] / count - bias**2)
    deviations = (sums[name] - bias * sums["tokens"] for sums in by_step)
    correction = len(by_step) / max(1, len(by_step) - 1)
    margin = _CONFIDENCE * sqrt(correction * sum(d * d for d in deviations))
    return Accuracy(total[name] / kl, margin / kl, sqrt(variance) * count / kl)
