"""A run in words: every sentence follows from the numbers, none is written beforehand.

Which controller held the target best, what a fixed coefficient got, what the estimators and the
stale sampler did, and the Python to copy into another run.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, dataclass, fields
from math import hypot
from statistics import median
from typing import Any

from klfast import Estimator
from klfast.controllers.base import CoefficientController
from lab.settings import ARMS, PARTNER, Settings, on_policy
from lab.summary import (
    ENOUGH_STEPS,
    ENOUGH_TOKENS,
    HELD_WITHIN,
    Bin,
    Sampled,
    Summary,
    number,
)
from lab.train import REDUCTION, SAMPLED, estimator

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
    """Which arm held the target best."""
    target = settings.target
    done = [s for s in summaries if s.steps == settings.steps]
    missing = len(on_policy(settings.arms)) - len(done)
    if missing:
        arms = "1 arm has" if missing == 1 else f"{missing} arms have"
        return Answer(f"No answer yet: {arms} not made all {_steps(settings.steps)}.", [])
    nearest = sorted(done, key=lambda s: abs(s.kl - target))
    steering = [s for s in nearest if s.steers]
    fixed = [s for s in nearest if not s.steers and s.coefficient > 0]
    if not steering and not fixed:
        return Answer("No arm of this run has a penalty: there is no answer in it.", [])
    best = (steering or fixed)[0]
    held = best.held(target)
    if not steering:
        line = (
            f"No arm of this run steers. The fixed coefficient {number(best.coefficient)} came "
            f"closest to the target: {_got(best, settings)}."
        )
        return Answer(line, [_caution(best, settings)], best.name, held)

    def is_level(s: Summary) -> bool:
        """Whether noise alone may have put an arm behind the best; of single steps it may."""
        behind = abs(s.kl - target) - abs(best.kl - target)
        return behind <= _SURE * hypot(s.kl_noise, best.kl_noise)

    ties = [s for s in steering[1:] if is_level(s)] if held else []
    verdict = "held the target best" if held else "came closest, and did not hold it"
    if ties:
        verdict += f", level within the noise with {', '.join(s.label for s in ties)}"
    line = f"{_name(best)} {verdict}: {_got(best, settings)}"
    if fixed:
        line += (
            f"; the fixed coefficient {number(fixed[0].coefficient)} got {fixed[0].reward:.1%} at "
            f"{number(fixed[0].kl)} nats ({_off(fixed[0], target)})"
        )
    notes = [_ties(steering, ties) if held else _never(steering, settings)]
    notes += [_against_fixed(best, fixed, settings), _caution(best, settings)]
    return Answer(f"{line}.", notes, best.name, held)


def _got(s: Summary, settings: Settings) -> str:
    spread = f" ± {number(s.kl_spread)}" if s.window > 1 else ""
    return (
        f"a KL of {number(s.kl)}{spread} nats per sequence ({_off(s, settings.target)}) with a "
        f"reward of {s.reward:.1%}"
    )


def _ties(steering: list[Summary], ties: list[Summary]) -> str:
    """Who may have held it as well."""
    if len(steering) == 1:
        return "No other arm of this run steers."
    if steering[0].window < 2:
        return "The means are of a single step, which cannot tell the arms that steer apart."
    if not ties:
        return "The next best was further off by more than the noise of the means."
    names = ", ".join(f"{_mid(s)} ({number(s.kl)} nats, {s.reward:.1%})" for s in ties)
    return f"Not to be told apart from it by noise: {names}."


def _never(steering: list[Summary], settings: Settings) -> str:
    """How far the arms that steer were from holding it."""
    within = f"within {HELD_WITHIN:.0%} of the target of {number(settings.target)}"
    reached = ", ".join(_mid(s) for s in steering if s.settled is not None)
    came = f"though steps of {reached} came there" if reached else "and no step of any came there"
    return f"No arm that steers held its mean KL {within}, {came}."


def _against_fixed(best: Summary, fixed: list[Summary], settings: Settings) -> str:
    """The fixed coefficient whose KL came closest to the target."""
    if not fixed:
        return "No arm with a fixed coefficient ran beside it."
    closest = fixed[0]

    def amount(what: str, difference: float, noise: float) -> str:
        if abs(difference) <= _SURE * noise:
            return f"as much {what} (within the noise)"
        return f"{'more' if difference > 0 else 'less'} {what}"

    rewards = hypot(closest.reward_noise, best.reward_noise)
    reward = amount("reward", closest.reward - best.reward, rewards)
    kl = amount("KL", closest.kl - best.kl, hypot(closest.kl_noise, best.kl_noise))
    which = "the only one" if len(fixed) == 1 else f"of {len(fixed)} the one closest to the target"
    text = f"Beside it the fixed coefficient, {which}, got {reward} at {kl}"
    if closest.held(settings.target):
        text += "; it held the target too, though nothing steered it there"
    return f"{text}."


def _caution(best: Summary, settings: Settings) -> str:
    spread = ", ± a step's standard deviation" if best.window > 1 else ""
    return (
        f"This is one run with one seed ({settings.seed}), its numbers the means of the last "
        f"{_steps(best.window)} of {settings.steps}{spread}: another seed may order the arms "
        "otherwise."
    )


def reading(summaries: list[Summary], settings: Settings) -> list[str]:
    """The arms one by one, their clips and non-finite tokens, and what the penalty cost."""
    if not summaries:
        return ["The run was stopped before any arm made a step: there is nothing to read yet."]
    done = {s.name: s.steps for s in summaries}
    missing = [
        f"{ARMS[name].label} made {done.get(name, 0)} of {settings.steps} steps"
        for name in on_policy(settings.arms)
        if done.get(name, 0) < settings.steps
    ]
    sentences = [f"The run is not finished: {'; '.join(missing)}."] if missing else []
    sentences += [_steering(s, settings) for s in summaries if s.steers]
    if settings.clip:
        most = max(summaries, key=lambda s: s.clipped)
        acted = f"most in {_mid(most)}, on {most.clipped:.2%} of the tokens; the gradient of the "
        acted = f"{acted}penalty is 0 there" if most.clipped else "on no token"
        sentences.append(f"The clip at {number(settings.clip)} nats acted {acted}.")
    bad = ", ".join(f"{s.nonfinite:,} in {_mid(s)}" for s in summaries if s.nonfinite)
    if bad:
        sentences.append(f"Tokens with a log-ratio or a penalty that is NaN or infinite: {bad}.")
    kl, step = (median(getattr(s, f"{n}_seconds") for s in summaries) for n in ("kl", "step"))
    return [
        *sentences,
        f"The KL step (penalty, gradient and statistics) took {number(kl * 1e3)} ms of processor "
        f"time, {kl / step:.1%} of a training step of {number(step * 1e3)} ms (medians).",
    ]


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


def _off(s: Summary, target: float) -> str:
    miss = s.miss(target)
    if miss >= 1:
        return f"{number(s.kl / target)} times the target of {number(target)}"
    if abs(miss) < 0.005:
        return f"on the target of {number(target)}"
    return f"{abs(miss):.0%} {'above' if miss > 0 else 'below'} the target of {number(target)}"


def _name(s: Summary) -> str:
    return s.label[0].upper() + s.label[1:]


def _mid(s: Summary) -> str:
    return f"the arm “{s.label}”"


def _steps(count: int) -> str:
    return f"{count} steps" if count > 1 else "step"


# The estimators

_LOST = 0.1  # nats of k3's mean whose loss is worth a sentence


def read_accuracy(bins: list[Bin]) -> list[str]:
    """Bias and noise of each estimator against the exact KL."""
    if not bins:
        return [
            f"No bin holds {ENOUGH_TOKENS:,} tokens of {ENOUGH_STEPS} steps: "
            "too few to tell bias from noise."
        ]
    extent = (
        f"{sum(b.tokens for b in bins):,} tokens had an exact KL between {number(bins[0].low)} and "
        f"{number(bins[-1].high)} nats, in {_bins(len(bins))}. "
        "Noise alone leaves a 95% band once in 20 bins."
    )
    sentences = [extent, *(_estimator(name, bins) for name in SAMPLED), _crossing(bins)]
    worst = min(bins, key=lambda b: b.ratio)
    if worst.ratio <= 1 - _LOST:
        sentences.append(
            f"At {number(worst.exact)} nats the mean of reference / policy over the drawn tokens, "
            f"in expectation 1, was {number(worst.ratio)}: the tokens that make k3 unbiased are so "
            f"rare there that too few were drawn, which left it {number(1 - worst.ratio)} nats "
            "below k1."
        )
    return sentences


def _estimator(name: str, bins: list[Bin]) -> str:
    biased = [b for b in bins if b.estimators[name].is_biased]
    bias = f"no bias can be told from noise (95% bands in {_bins(len(bins))})"
    if biased:
        worst = max(biased, key=lambda b: abs(b.estimators[name].bias))
        accuracy = worst.estimators[name]
        bias = (
            f"its mean is off the exact KL by more than the 95% band in {len(biased)} of "
            f"{_bins(len(bins))}, most at {number(worst.exact)} nats: by {accuracy.bias:+.1%} "
            f"± {accuracy.margin:.1%}"
        )
    noise = " and ".join(
        f"{b.estimators[name].std:,.0%} of the exact KL at {number(b.exact)} nats"
        for b in (bins if len(bins) == 1 else (bins[0], bins[-1]))
    )
    return f"{name}: {bias}. A single token's error scatters by {noise}."


def _crossing(bins: list[Bin]) -> str:
    """Where k3 is the less noisy estimator, and where k1 is."""
    quiet = [b for b in bins if b.estimators["k3"].std < b.estimators["k1"].std]
    if not quiet:
        return "k3 was nowhere less noisy than k1."
    if len(quiet) == len(bins):
        return "k3 was less noisy than k1 everywhere."
    if quiet == bins[: len(quiet)]:
        upto = number(quiet[-1].high)
        return f"k3 was less noisy than k1 up to {upto} nats per token, and noisier beyond."
    return f"k3 was less noisy than k1 in {len(quiet)} of {_bins(len(bins))}."


def _bins(count: int) -> str:
    return f"{count} bins" if count > 1 else "1 bin"


# The sampler


def read_drift(drifts: list[Summary], settings: Settings) -> list[str]:
    """How far the stale sampler was from the policy, and what the correction changed."""
    sentences = [_drifted(d, d.sampled, settings) for d in drifts if d.sampled]
    ends = {
        d.name: f"a reward of {d.reward:.1%} at {number(d.exact_kl)} nats per sequence (exact) and "
        f"a held-out perplexity of {number(d.perplexity)}"
        for d in drifts
    }
    if "stale" in ends and "corrected" in ends:
        text = (
            f"At the same coefficient, the stale sampler ended with {ends['stale']}; with the "
            f"correction with {ends['corrected']}."
        )
        if PARTNER in ends:
            label = ARMS[PARTNER].label
            text += f" The arm “{label}”, whose sampler is the policy, had {ends[PARTNER]}."
        sentences.append(text)
    return sentences


def _drifted(drift: Summary, sampled: Sampled, settings: Settings) -> str:
    would = "" if ARMS[drift.name].is_corrected else "would have "
    return (
        f"In the arm “{drift.label}” KL(rollout || policy) was {number(sampled.k3)} nats per token "
        f"(k3, mean of {drift.steps} steps; {number(sampled.worst_k3)} in the worst). The "
        f"correction “{settings.correction}” {would}bounded the weight of {sampled.outside:.1%} of "
        f"the tokens and {would}rejected {sampled.rejected:.1%}; its effective sample size was "
        f"{sampled.ess:.0%}. On the sampler's tokens k1 was off the exact KL to the reference "
        f"by {sampled.plain_error:+.1%} without weights, and by {sampled.weighted_error:+.1%} with "
        "them."
    )


# The recipe for another run

_FIRST = ("kl_coef", "init_kl_coef")
_LINE = 48  # characters that a phone shows

_RECIPE = """\
import klfast

controller = {controller}
estimator = {estimator}

# each step, on tensors [B, T]
penalty, stats = klfast.kl_penalty(
    logprobs,
    ref_logprobs,
    mask,
    estimator=estimator,
    reduction="{reduction}",
    coef=controller.value,
    return_stats=True,
)
loss = policy_loss + penalty
# and after the optimizer's step
controller.update(stats)
"""


def recipe(name: str, settings: Settings) -> str:
    """Python that sets up and makes the call of an arm."""
    return _RECIPE.format(
        controller=controller_text(ARMS[name].controller(settings)),
        estimator=estimator_text(estimator(settings)),
        reduction=REDUCTION,
    )


def controller_text(controller: CoefficientController) -> str:
    """The call that made a controller which has not moved; what it left at defaults is left out."""
    chosen = {}
    for parameter in inspect.signature(type(controller)).parameters.values():
        if parameter.name in ("device", "process_group"):
            continue
        value = getattr(controller, "value" if parameter.name in _FIRST else parameter.name)
        if parameter.default is parameter.empty or value != parameter.default:
            chosen[parameter.name] = value
    return _call(f"klfast.{type(controller).__name__}", chosen)


def estimator_text(of: Estimator) -> str:
    """The call that makes an estimator."""
    values = {field.name: getattr(of, field.name) for field in fields(of)}
    defaults = {f.name: f.default for f in fields(of) if f.default is not MISSING}
    chosen = {n: v for n, v in values.items() if n == "name" or v != defaults[n]}
    return _call("klfast.Estimator", chosen)


def _call(function: str, chosen: dict[str, Any]) -> str:
    """A line, or a line for each argument where that would be a long one."""
    values = {n: json.dumps(v) if isinstance(v, str) else repr(v) for n, v in chosen.items()}
    arguments = [f"{name}={value}" for name, value in values.items()]
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"{function}(", *(f"    {argument}," for argument in arguments), ")"])
