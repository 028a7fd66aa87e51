"""Sentences about a run: which controller held the target best, and the code to copy."""

import json
from dataclasses import dataclass
from math import hypot
from statistics import median

from lab.settings import ARMS, PARTNER, Settings, on_policy
from lab.summary import Summary, number
from lab.train import ESTIMATOR, REDUCTION

_SURE = 2.0  # two means differ if they are this many standard errors apart


@dataclass(frozen=True)
class Answer:
    """The answer in a line, and facts that belong to it.

    Attributes:
        arm: the arm whose settings are worth copying, or None if there is none yet.
        held: True if that arm held the target.
    """

    line: str
    notes: tuple[str, ...] = ()
    arm: str | None = None
    held: bool = False


def answer(summaries: list[Summary], settings: Settings) -> Answer:
    """Which arm held the target best."""
    target = settings.target
    done = [s for s in summaries if s.steps == settings.steps]
    if len(done) < len(on_policy(settings.arms)):
        return Answer(f"No answer yet: not all arms have made all steps ({settings.steps}).")
    nearest = sorted(done, key=lambda s: abs(s.kl - target))
    steering = [s for s in nearest if s.steers]
    fixed = [s for s in nearest if not s.steers and s.coefficient > 0]
    if not steering and not fixed:
        return Answer("No arm of this run has a penalty: there is no answer in it.")
    best = (steering or fixed)[0]
    held = best.held(target)
    spread = f" ± {number(best.kl_spread)}" if best.window > 1 else ""
    got = (
        f"a KL of {number(best.kl)}{spread} nats per sequence ({_off(best, target)}) with a reward "
        f"of {best.reward:.1%}"
    )
    note = (
        f"This is one run with one seed ({settings.seed}), and its numbers are means of the last "
        f"third of the steps: another seed may order the arms otherwise."
    )
    if not steering:
        line = (
            f"No arm of this run steers. The fixed coefficient {number(best.coefficient)} came "
            f"closest to the target: {got}."
        )
        return Answer(line, (note,), best.name, held)

    def is_level(s: Summary) -> bool:
        """True if noise may be why an arm is behind the best. Always true for a single step."""
        behind = abs(s.kl - target) - abs(best.kl - target)
        return behind <= _SURE * hypot(s.kl_noise, best.kl_noise)

    ties = [s.label for s in steering[1:] if is_level(s)] if held else []
    verdict = "held the target best" if held else "came closest, and did not hold it"
    if ties:
        verdict += f", level within the noise with {', '.join(ties)}"
    line = f"{best.label[0].upper()}{best.label[1:]} {verdict}: {got}"
    if fixed:
        line += (
            f"; the fixed coefficient {number(fixed[0].coefficient)} got {fixed[0].reward:.1%} at "
            f"{number(fixed[0].kl)} nats ({_off(fixed[0], target)})"
        )
    return Answer(f"{line}.", (note,), best.name, held)


def reading(summaries: list[Summary], settings: Settings) -> list[str]:
    """Sentences about unfinished arms and the cost of the penalty."""
    if not summaries:
        return ["The run was stopped before any arm made a step: there is nothing to read yet."]
    done = {s.name: s.steps for s in summaries}
    missing = [
        f"{ARMS[name].label} made {done.get(name, 0)} of {settings.steps} steps"
        for name in on_policy(settings.arms)
        if done.get(name, 0) < settings.steps
    ]
    sentences = [f"The run is not finished: {'; '.join(missing)}."] if missing else []
    kl, step = (median(getattr(s, f"{n}_seconds") for s in summaries) for n in ("kl", "step"))
    return [
        *sentences,
        f"The KL step (penalty, gradient and statistics) took {number(kl * 1e3)} ms of processor "
        f"time, {kl / step:.1%} of a training step of {number(step * 1e3)} ms (medians).",
    ]


def corrected_reading(drifts: list[Summary]) -> str:
    """What the arm with the correction shows, or "" if an arm is missing."""
    by_name = {s.name: s for s in drifts}
    if not {PARTNER, "stale", "corrected"} <= by_name.keys():
        return ""
    own, stale, corrected = (by_name[name] for name in (PARTNER, "stale", "corrected"))
    at = "; ".join(
        f"{s.label}: {s.reward:.1%} at {number(s.exact_kl)} nats" for s in (own, stale, corrected)
    )
    shown = f"Reward and exact KL of the three arms: {at}."
    if corrected.exact_kl <= stale.exact_kl:
        return f"{shown} The arm with the correction has no higher KL than the one without."
    return (
        f"{shown} The KL is higher with the correction because its gradient is the current "
        "policy's. Without weights, tokens that the policy now avoids keep their full weight, and "
        "hold it back. A fixed coefficient sets a price for the KL and no bound, so what brings "
        "more reward may also bring more KL. With one seed, a small difference is noise."
    )


def _off(s: Summary, target: float) -> str:
    miss = s.miss(target)
    if miss >= 1:
        return f"{number(s.kl / target)} times the target of {number(target)}"
    if abs(miss) < 0.005:
        return f"on the target of {number(target)}"
    return f"{abs(miss):.0%} {'above' if miss > 0 else 'below'} the target of {number(target)}"


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
    arm = ARMS[name]
    arguments = [f"    {n}={json.dumps(v)}," for n, v in arm.arguments(settings).items()]
    clip = f", log_ratio_clip={settings.clip}" if settings.clip else ""
    return _RECIPE.format(
        controller="\n".join([f"klfast.{arm.kind.__name__}(", *arguments, ")"]),
        estimator=f'klfast.Estimator("{ESTIMATOR}"{clip})',
        reduction=REDUCTION,
    )
