"""A run in words: which rule held the target best, what a fixed coefficient got, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from statistics import median

from lab.arms import ARMS, on_policy
from lab.settings import Settings
from lab.summary import HELD_WITHIN, Summary
from lab.words import number

_SURE = 2.0
"""Standard errors that two means must be apart to be told apart."""


@dataclass(frozen=True)
class Answer:
    """In a line, and what must be known beside it.

    Attributes:
        arm: whose settings are worth copying; None if there is none yet.
        held: whether that arm held the target.
    """

    line: str
    notes: list[str]
    arm: str | None = None
    held: bool = False


def answer(summaries: list[Summary], settings: Settings) -> Answer:
    """Computed from the summaries, as every sentence of it."""
    done = [s for s in summaries if s.steps == settings.steps]
    missing = len(on_policy(settings.arms)) - len(done)
    if missing:
        arms = "1 arm has" if missing == 1 else f"{missing} arms have"
        return Answer(f"No answer yet: {arms} not made all {steps_of(settings.steps)}.", [])
    steering = sorted((s for s in done if s.steers), key=lambda s: _distance(s, settings))
    fixed = sorted(
        (s for s in done if not s.steers and s.coefficient > 0),
        key=lambda s: _distance(s, settings),
    )
    if not steering:
        return _without_steering(fixed, settings)
    best, others = steering[0], steering[1:]
    held = best.held(settings.target)
    ties = [s for s in others if _is_level(s, best, settings)] if held else []
    notes = [_rivals(best, others, ties) if held else _never(steering, settings)]
    notes += [_against_fixed(best, fixed, settings), _caution(best, settings)]
    return Answer(_line(best, ties, fixed, settings), notes, best.name, held)


def _distance(s: Summary, settings: Settings) -> float:
    return abs(s.kl - settings.target)


def _is_level(s: Summary, best: Summary, settings: Settings) -> bool:
    """Whether noise alone may have put an arm behind the best; of single steps it may."""
    behind = _distance(s, settings) - _distance(best, settings)
    return behind <= _SURE * hypot(s.kl_noise, best.kl_noise)


def _line(best: Summary, ties: list[Summary], fixed: list[Summary], settings: Settings) -> str:
    verdict = (
        "held the target best"
        if best.held(settings.target)
        else "came closest, and did not hold it"
    )
    if ties:
        verdict += f", level within the noise with {', '.join(s.label for s in ties)}"
    text = f"{name_of(best)} {verdict}: {_ending(best, settings)}"
    if fixed:
        text += (
            f"; the fixed coefficient {number(fixed[0].coefficient)} got {_got(fixed[0], settings)}"
        )
    return f"{text}."


def _ending(s: Summary, settings: Settings) -> str:
    spread = f" ± {number(s.kl_spread)}" if s.window > 1 else ""
    return (
        f"a KL of {number(s.kl)}{spread} nats per sequence ({off(s, settings.target)}) with a "
        f"reward of {s.reward:.1%}"
    )


def _got(s: Summary, settings: Settings) -> str:
    return f"{s.reward:.1%} at {number(s.kl)} nats ({off(s, settings.target)})"


def _rivals(best: Summary, others: list[Summary], ties: list[Summary]) -> str:
    """Who may have held it as well."""
    if not others:
        return "No other arm of this run steers."
    if best.window < 2:
        return "The means are of a single step, which cannot tell the arms that steer apart."
    if not ties:
        return "The next best was further off by more than the noise of the means."
    names = ", ".join(f"{mid(s)} ({number(s.kl)} nats, {s.reward:.1%})" for s in ties)
    return f"Not to be told apart from it by noise: {names}."


def _never(steering: list[Summary], settings: Settings) -> str:
    """How far the arms that steer were from holding it."""
    within = f"within {HELD_WITHIN:.0%} of the target of {number(settings.target)}"
    text = f"No arm that steers held its mean KL {within}"
    reached = [s for s in steering if s.settled is not None]
    if not reached:
        return f"{text}, and no step of any came there."
    return f"{text}, though steps of {', '.join(mid(s) for s in reached)} came there."


def _against_fixed(best: Summary, fixed: list[Summary], settings: Settings) -> str:
    """The fixed coefficient whose KL came closest to the target."""
    if not fixed:
        return "No arm with a fixed coefficient ran beside it."
    closest = fixed[0]
    which = "the only one" if len(fixed) == 1 else f"of {len(fixed)} the one closest to the target"
    text = f"Beside it the fixed coefficient, {which}, got {_trade(closest, best)}"
    if closest.held(settings.target):
        text += "; it held the target too, though nothing steered it there"
    return f"{text}."


def _trade(fixed: Summary, best: Summary) -> str:
    """The difference of the fixed coefficient from the arm that steers."""
    reward = _compared(fixed.reward, best.reward, hypot(fixed.reward_noise, best.reward_noise))
    kl = _compared(fixed.kl, best.kl, hypot(fixed.kl_noise, best.kl_noise))
    amounts = {-1: "less {}", 0: "as much {} (within the noise)", 1: "more {}"}
    return f"{amounts[reward].format('reward')} at {amounts[kl].format('KL')}"


def _compared(one: float, other: float, noise: float) -> int:
    """1 if more, -1 if less, 0 if the noise hides it."""
    if abs(one - other) <= _SURE * noise:
        return 0
    return 1 if one > other else -1


def _caution(best: Summary, settings: Settings) -> str:
    spread = ", ± a step's standard deviation" if best.window > 1 else ""
    return (
        f"This is one run with one seed ({settings.seed}), its numbers the means of the last "
        f"{steps_of(best.window)} of {settings.steps}{spread}: another seed may order the arms "
        "otherwise."
    )


def _without_steering(fixed: list[Summary], settings: Settings) -> Answer:
    if not fixed:
        return Answer("No arm of this run has a penalty: there is no answer in it.", [])
    closest = fixed[0]
    return Answer(
        f"No arm of this run steers. The fixed coefficient {number(closest.coefficient)} came "
        f"closest to the target: {_ending(closest, settings)}.",
        [_caution(closest, settings)],
        closest.name,
        closest.held(settings.target),
    )


def reading(summaries: list[Summary], settings: Settings) -> list[str]:
    """Statements that follow from the numbers; none is written beforehand."""
    if not summaries:
        return ["The run was stopped before any arm made a step: there is nothing to read yet."]
    sentences = [_unfinished(summaries, settings)]
    sentences += [_steering(s, settings) for s in summaries if s.steers]
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
    bad = ", ".join(f"{s.nonfinite:,} in {mid(s)}" for s in summaries if s.nonfinite)
    return f"Tokens with a log-ratio or a penalty that is NaN or infinite: {bad}." if bad else ""


def _cost(summaries: list[Summary]) -> str:
    kl = median(s.kl_seconds for s in summaries)
    step = median(s.step_seconds for s in summaries)
    return (
        f"The KL step (penalty, gradient and statistics) took {number(kl * 1e3)} ms of processor "
        f"time, {kl / step:.1%} of a training step of {number(step * 1e3)} ms (medians)."
    )


def off(s: Summary, target: float) -> str:
    miss = s.miss(target)
    if miss >= 1:
        return f"{number(s.kl / target)} times the target of {number(target)}"
    if abs(miss) < 0.005:
        return f"on the target of {number(target)}"
    return f"{abs(miss):.0%} {'above' if miss > 0 else 'below'} the target of {number(target)}"


def name_of(s: Summary) -> str:
    return s.label[0].upper() + s.label[1:]


def mid(s: Summary) -> str:
    return f"the arm “{s.label}”"


def steps_of(count: int) -> str:
    return f"{count} steps" if count > 1 else "step"
