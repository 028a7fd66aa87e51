"""What the records say: numbers per arm, and sentences computed from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, stdev

from klfast.experiment.arms import ARMS, on_policy
from klfast.experiment.errors import SAMPLED
from klfast.experiment.settings import Settings
from klfast.experiment.train import Row

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
class Summary:
    """One arm. Unless said otherwise, means over the last third of its steps.

    Attributes:
        steps: how many it has made.
        window: how many the means are over.
        kl: nats per sequence (k3, the estimator that the controllers read).
        kl_spread: standard deviation of ``kl`` from step to step; 0 for a single step.
        kl_per_token: nats per token.
        exact_kl: over the whole vocabulary, nats per sequence.
        first_reward, first_perplexity: of the first step.
        settled: the first step whose KL came within ``HELD_WITHIN`` of the target, if any did.
        kl_seconds, step_seconds: medians over all steps.
        clipped: tokens where the penalty's clip acted, as a share of all.
        nonfinite: tokens whose log-ratio was NaN or infinite, in all steps.
        lengths: the KL by the length of the sequence.
    """

    name: str
    label: str
    steers: bool
    steps: int
    window: int
    reward: float
    kl: float
    kl_spread: float
    kl_per_token: float
    exact_kl: float
    estimates: dict[str, Estimate]
    coefficient: float
    perplexity: float
    first_reward: float
    first_perplexity: float
    settled: int | None
    kl_seconds: float
    step_seconds: float
    clipped: float
    nonfinite: int
    lengths: list[Lengths]

    def miss(self, target: float) -> float:
        """How far ``kl`` is off, as a share of the target: -0.1 is 10 % below."""
        return self.kl / target - 1

    def held(self, target: float) -> bool:
        return abs(self.miss(target)) <= HELD_WITHIN


def summarise(rows: Iterable[Row], settings: Settings) -> list[Summary]:
    """One summary for each arm on the policy that has made a step, in the order of the settings."""
    by_arm = rows_by_arm(rows, on_policy(settings.arms))
    return [_summarise_arm(name, own, settings) for name, own in by_arm.items() if own]


def rows_by_arm(rows: Iterable[Row], names: Iterable[str]) -> dict[str, list[Row]]:
    """The rows of these arms."""
    by_arm: dict[str, list[Row]] = {name: [] for name in names}
    for row in rows:
        if row["arm"] in by_arm:
            by_arm[row["arm"]].append(row)
    return by_arm


def last_third(rows: list[Row]) -> list[Row]:
    """The rows that an arm's means are over."""
    return rows[-max(1, len(rows) // 3) :]


def _summarise_arm(name: str, rows: list[Row], settings: Settings) -> Summary:
    last = last_third(rows)

    def mean(key: str) -> float:
        return fmean(row[key] for row in last)

    kl = [row["kl_per_sequence_k3"] for row in last]
    near = (
        row["step"]
        for row in rows
        if abs(row["kl_per_sequence_k3"] / settings.target - 1) <= HELD_WITHIN
    )
    return Summary(
        name=name,
        label=ARMS[name].label,
        steers=ARMS[name].steers,
        steps=len(rows),
        window=len(last),
        reward=mean("reward"),
        kl=fmean(kl),
        kl_spread=stdev(kl) if len(kl) > 1 else 0.0,
        kl_per_token=mean("kl_per_token_k3"),
        exact_kl=mean("kl_per_sequence_exact"),
        estimates={estimator: _estimate(estimator, last) for estimator in SAMPLED},
        coefficient=mean("coefficient"),
        perplexity=mean("held_out_perplexity"),
        first_reward=rows[0]["reward"],
        first_perplexity=rows[0]["held_out_perplexity"],
        settled=next(near, None),
        kl_seconds=median(row["kl_step_seconds"] for row in rows),
        step_seconds=median(row["step_seconds"] for row in rows),
        clipped=sum(row["clipped"] for row in last)
        / sum(sum(_lengths(row, "tokens")) for row in last),
        nonfinite=sum(row["nonfinite"] for row in rows),
        lengths=_by_length(last),
    )


def _lengths(row: Row, column: str) -> list[float]:
    found: list[float] = row["by_length"][column]
    return found


def _by_length(rows: list[Row]) -> list[Lengths]:
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


def _estimate(estimator: str, rows: list[Row]) -> Estimate:
    key = f"kl_per_sequence_{estimator}"
    return Estimate(
        kl=fmean(row[key] for row in rows),
        bias=fmean(row[key] - row["kl_per_sequence_exact"] for row in rows),
        error_std=sqrt(fmean(row[f"{key}_error_std"] ** 2 for row in rows)),
    )


def reading(summaries: list[Summary], settings: Settings) -> list[str]:
    """The run in plain words: every statement follows from the numbers, none is pre-written."""
    if not summaries:
        return ["The run was stopped before any arm made a step: there is nothing to read yet."]
    sentences = [_unfinished(summaries, settings)]
    sentences += [_steering(s, settings) for s in summaries if s.steers]
    sentences += [_not_steering(s, settings) for s in summaries if not s.steers]
    sentences += [_fluency(summaries), _trade(summaries, settings)]
    sentences += [_clips(summaries, settings), _nonfinite(summaries), _cost(summaries)]
    return [sentence for sentence in sentences if sentence]


def _unfinished(summaries: list[Summary], settings: Settings) -> str:
    done = {s.name: s.steps for s in summaries}
    missing = [
        f"{ARMS[name].label} made {done.get(name, 0)} of {settings.steps} steps"
        for name in on_policy(settings.arms)
        if done.get(name, 0) < settings.steps
    ]
    return f"The run is not finished: {'; '.join(missing)}." if missing else ""


def _steering(s: Summary, settings: Settings) -> str:
    verdict = "held" if s.held(settings.target) else "did not hold"
    start = (
        f"It first came that close at step {s.settled}"
        if s.settled
        else f"No step of it came within {HELD_WITHIN:.0%} of the target"
    )
    spread = f", and its KL varied by ±{number(s.kl_spread)} a step" if s.window > 1 else ""
    return (
        f"{_name(s)} {verdict} the target: over the last {_steps(s.window)} its KL was "
        f"{number(s.kl)} nats per sequence, {_off(s, settings.target)}. {start}{spread}."
    )


def _not_steering(s: Summary, settings: Settings) -> str:
    how = f"at a coefficient of {number(s.coefficient)}" if s.coefficient else "held by nothing"
    luck = " (close, though nothing steered it there)" if s.held(settings.target) else ""
    return (
        f"{_name(s)}, {how}, ended at {number(s.kl)} nats per sequence, "
        f"{_off(s, settings.target)}{luck}."
    )


def _off(s: Summary, target: float) -> str:
    miss = s.miss(target)
    if miss >= 1:
        return f"{number(s.kl / target)} times the target of {number(target)}"
    if abs(miss) < 0.005:
        return f"on the target of {number(target)}"
    return f"{abs(miss):.0%} {'above' if miss > 0 else 'below'} the target of {number(target)}"


def _fluency(summaries: list[Summary]) -> str:
    worst = max(summaries, key=lambda s: s.perplexity)
    best = min(summaries, key=lambda s: s.perplexity)
    if worst is best:
        return (
            f"Held-out perplexity went from {number(best.first_perplexity)} after the first step "
            f"to {number(best.perplexity)}."
        )
    return (
        f"Held-out perplexity, {number(best.first_perplexity)} after the first step, ended highest "
        f"in {_mid(worst)} ({number(worst.perplexity)}) and lowest in {_mid(best)} "
        f"({number(best.perplexity)})."
    )


def _trade(summaries: list[Summary], settings: Settings) -> str:
    highest = max(summaries, key=lambda s: s.reward)
    text = (
        f"The share of '{settings.letter}' was {highest.first_reward:.1%} at the first step and "
        f"rose most in {_mid(highest)}, to {highest.reward:.1%}"
        if highest.reward > highest.first_reward
        else f"In no arm did the share of '{settings.letter}' rise"
    )
    holding = [s for s in summaries if s.steers and s.held(settings.target) and s is not highest]
    if holding:
        best = max(holding, key=lambda s: s.reward)
        text += f"; of the arms that held the target, most in {_mid(best)}, to {best.reward:.1%}"
    return text + "."


def _clips(summaries: list[Summary], settings: Settings) -> str:
    if not settings.clip:
        return ""
    most = max(summaries, key=lambda s: s.clipped)
    if not most.clipped:
        return f"The clip at {number(settings.clip)} nats acted on no token."
    return (
        f"The clip at {number(settings.clip)} nats acted most in {_mid(most)}, on "
        f"{most.clipped:.2%} of the tokens; the gradient of the penalty is 0 there."
    )


def _nonfinite(summaries: list[Summary]) -> str:
    bad = [f"{s.nonfinite:,} in {_mid(s)}" for s in summaries if s.nonfinite]
    return f"Tokens with a log-ratio that is NaN or infinite: {', '.join(bad)}." if bad else ""


def _cost(summaries: list[Summary]) -> str:
    kl = median(s.kl_seconds for s in summaries)
    step = median(s.step_seconds for s in summaries)
    return (
        f"The KL step (penalty, gradient and statistics) took {number(kl * 1e3)} ms, "
        f"{kl / step:.1%} of a training step of {number(step * 1e3)} ms (medians)."
    )


def _name(s: Summary) -> str:
    return s.label[0].upper() + s.label[1:]


def _mid(s: Summary) -> str:
    return f"the arm “{s.label}”"


def _steps(count: int) -> str:
    return f"{count} steps" if count > 1 else "step"


def number(value: float) -> str:
    """Three significant digits, without an exponent where people read numbers."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2e}"
