"""The records in words: sentences that are computed from the numbers."""

from __future__ import annotations

from statistics import median

from lab.arms import ARMS, on_policy
from lab.means import number
from lab.settings import Settings
from lab.summary import HELD_WITHIN, Summary


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
        f"{name_of(s)} {verdict} the target: over the last {steps_of(s.window)} its KL was "
        f"{number(s.kl)} nats per sequence, {off(s, settings.target)}. {start}{spread}."
    )


def _not_steering(s: Summary, settings: Settings) -> str:
    how = f"at a coefficient of {number(s.coefficient)}" if s.coefficient else "held by nothing"
    luck = " (close, though nothing steered it there)" if s.held(settings.target) else ""
    return (
        f"{name_of(s)}, {how}, ended at {number(s.kl)} nats per sequence, "
        f"{off(s, settings.target)}{luck}."
    )


def off(s: Summary, target: float) -> str:
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
        f"in {mid(worst)} ({number(worst.perplexity)}) and lowest in {mid(best)} "
        f"({number(best.perplexity)})."
    )


def _trade(summaries: list[Summary], settings: Settings) -> str:
    highest = max(summaries, key=lambda s: s.reward)
    text = (
        f"The share of '{settings.letter}' was {highest.first_reward:.1%} at the first step and "
        f"rose most in {mid(highest)}, to {highest.reward:.1%}"
        if highest.reward > highest.first_reward
        else f"In no arm did the share of '{settings.letter}' rise"
    )
    holding = [s for s in summaries if s.steers and s.held(settings.target) and s is not highest]
    if holding:
        best = max(holding, key=lambda s: s.reward)
        text += f"; of the arms that held the target, most in {mid(best)}, to {best.reward:.1%}"
    return text + "."


def _clips(summaries: list[Summary], settings: Settings) -> str:
    if not settings.clip:
        return ""
    most = max(summaries, key=lambda s: s.clipped)
    if not most.clipped:
        return f"The clip at {number(settings.clip)} nats acted on no token."
    return (
        f"The clip at {number(settings.clip)} nats acted most in {mid(most)}, on "
        f"{most.clipped:.2%} of the tokens; the gradient of the penalty is 0 there."
    )


def _nonfinite(summaries: list[Summary]) -> str:
    bad = [f"{s.nonfinite:,} in {mid(s)}" for s in summaries if s.nonfinite]
    return f"Tokens with a log-ratio that is NaN or infinite: {', '.join(bad)}." if bad else ""


def _cost(summaries: list[Summary]) -> str:
    kl = median(s.kl_seconds for s in summaries)
    step = median(s.step_seconds for s in summaries)
    return (
        f"The KL step (penalty, gradient and statistics) took {number(kl * 1e3)} ms, "
        f"{kl / step:.1%} of a training step of {number(step * 1e3)} ms (medians)."
    )


def name_of(s: Summary) -> str:
    return s.label[0].upper() + s.label[1:]


def mid(s: Summary) -> str:
    return f"the arm “{s.label}”"


def steps_of(count: int) -> str:
    return f"{count} steps" if count > 1 else "step"
