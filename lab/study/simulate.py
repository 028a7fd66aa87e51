"""Controllers on simulated policies, with many seeds and gains at once, and how they did.

``CANDIDATES`` has their published gains, and the gains that the search changes.
"""

import math
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from klfast.controllers import CONTROLLERS
from klfast.controllers.rules import MeasuredBatch, advance
from klfast.controllers.target import TargetController
from lab.settings import ARMS
from lab.study.plant import Plant, Policy

BATCH = 40  # sequences in an update, as in ``python -m lab compare``
MIN_COEF, MAX_COEF = 1e-6, 100.0  # the bounds of the coefficient for every controller

Gains = dict[str, Any]
"""Settings of a controller: numbers, or tensors [G, 1] of many numbers at once."""


@dataclass(frozen=True)
class Candidate:
    """A controller and its gains.

    Attributes:
        name: as in ``python -m lab compare --arms``.
        source: the source of the first gains, ``"published"`` or klfast's ``"default"``.
        gains: the first gains.
        proportional: the gains that the search multiplies by a factor.
        integral: the gain that it multiplies by a second factor, if there is one.
    """

    name: str
    source: str
    gains: Gains
    proportional: tuple[str, ...] = ()
    integral: str = ""

    @property
    def label(self) -> str:
        return ARMS[self.name].label

    def make(self, target: float) -> TargetController:
        """A controller with the first gains. Its first coefficient is set later."""
        bounds = {"min_coef": MIN_COEF, "max_coef": MAX_COEF}
        make: Any = CONTROLLERS[self.name]
        made: TargetController = make(1.0, target, **{"unit": "sequence", **bounds, **self.gains})
        return made

    def scaled(self, gains: Gains, factor: Tensor, balance: Tensor) -> Gains:
        """The gains times a factor. A shorter horizon and a larger step count as larger gains."""
        new = {name: gains[name] * factor for name in self.proportional}
        if self.integral:
            new[self.integral] = gains[self.integral] * factor * balance
        if "horizon" in gains:
            new["horizon"] = gains["horizon"] / factor
        if "factor" in gains:
            new["factor"] = torch.pow(float(gains["factor"]), factor)
        return new


CANDIDATES = (
    # lm-human-preferences: 512 sequences a batch, a horizon of 10,000
    Candidate("adaptive", "published", {"horizon": 10_000 * BATCH / 512}),
    Candidate("exponential", "default", {"gain": 0.1}, ("gain",)),
    Candidate("nupi", "default", {"kp": 1.0, "ki": 0.1}, ("kp",), "ki"),
    # omnisafe's PIDLagrangian, for costs whose limit is 25; klfast's ki is a quarter of it
    Candidate(
        "pid-lagrangian", "published", {"kp": 0.1, "ki": 0.01, "kd": 0.01}, ("kp", "kd"), "ki"
    ),
    Candidate("dual", "default", {"lr": 0.03}, ("lr",)),
    # Schulman et al. 2017: after every batch
    Candidate("doubling", "published", {"factor": 2.0, "every": 1}),
    # Shao et al. 2020, the language model: ki is 1e-4 a nat, and the target here 6 nats
    Candidate("control-vae", "published", {"kp": 0.01, "ki": 6e-4}, ("kp",), "ki"),
)


@dataclass(frozen=True)
class Course:
    """The simulated training that every controller is tested on.

    Attributes:
        target: nats per sequence.
        updates: the length of a run.
        seeds: runs for each choice of gains.
        seed: the seed of the first run. Runs of the same number have the same noise under every
            controller.
        jump: from half the run on, the KL that a coefficient leads to is multiplied by this, as
            if the task changed.
        spread: the first coefficient is off the balancing coefficient by up to this factor, up or
            down.
    """

    target: float = 6.0
    updates: int = 300
    seeds: int = 64
    seed: int = 0
    jump: float = 2.0
    spread: float = 10.0


def simulate(candidate: Candidate, gains: Gains, plant: Plant, course: Course) -> Tensor:
    """The true KL [G, seeds, updates] under each of G gains."""
    controller = candidate.make(course.target)
    count = max([1, *(len(value) for value in gains.values() if isinstance(value, Tensor))])
    bounds = {"lowest": controller.lowest, "highest": controller.highest}
    numbers = {
        name: torch.as_tensor(value, dtype=torch.float64)
        for name, value in {**vars(controller), **bounds, **gains}.items()
        if isinstance(value, (int, float, Tensor))
    }
    settings = SimpleNamespace(**numbers)
    generator = torch.Generator().manual_seed(course.seed)
    shape = (count, course.seeds)

    # The first coefficients are around the one that holds the target.
    share = 2 * torch.rand(course.seeds, generator=generator, dtype=torch.float64) - 1
    first = (plant.balance(course.target) * course.spread**share).expand(shape)
    memory = controller._initial_memory(settings, first).items()
    state = {"value": first, **{name: torch.zeros_like(first) + number for name, number in memory}}
    policy = Policy(plant, shape)
    n_steps = torch.tensor(float(BATCH), dtype=torch.float64)
    kls = []
    for t in range(course.updates):
        kls.append(policy.kl)
        to_measure, to_wander = torch.randn(
            2, course.seeds, generator=generator, dtype=torch.float64
        )
        current = policy.measured(to_measure)
        push = course.jump if t >= course.updates // 2 else 1.0
        policy.update(state["value"], to_wander, push)
        batch = MeasuredBatch(current, settings.target, n_steps)
        state = advance(controller, settings, state, batch)
    return torch.stack(kls, -1)


WITHIN = 0.2  # a KL is on target within this share of it

FACTORS = tuple(2.0 ** (i / 2) for i in range(-14, 15))
"""The factors of gains in the search and in the curves of sensitivity."""

BALANCES = (1 / 16, 1 / 4, 1.0, 4.0)  # the second factors, for gains that integrate

SENSITIVE = 1.5
"""Gains are good enough if their mean miss is below so many times the least mean miss."""

_SMOOTHED = 10  # the KL is averaged over so many updates before it is judged


@dataclass(frozen=True)
class Held:
    """How one choice of gains did: medians over the seeds.

    Attributes:
        miss: mean over the updates after the first 10 of abs(log(KL / target)), of at most log 10.
        settling: updates until the KL (mean of 10 updates) is within 20 % of its target and stays
            there up to the change of the task. None if half of the seeds never settle.
        overshoot: how far the largest KL before the change exceeds the target, as a share of it.
            At least 0.
        error: root mean square of KL / target - 1 over the last third of each half.
        recovery: as ``settling``, from the change of the task to the end.
        lost: the share of seeds whose last tenth is off target by a factor of 2 or more.
    """

    miss: float
    settling: float | None
    overshoot: float
    error: float
    recovery: float | None
    lost: float


@dataclass(frozen=True)
class Studied:
    """One controller.

    Attributes:
        name, label, source: of the candidate.
        first: its published or default gains, and how they did.
        tuned: the gains with the least miss, and how they did.
        factors: multiples of all tuned gains.
        misses: the mean miss at each of these multiples.
        octaves: the width of the range of factors around 1 whose miss is good enough, in powers
            of 2.
    """

    name: str
    label: str
    source: str
    first_gains: dict[str, float]
    first: Held
    tuned_gains: dict[str, float]
    tuned: Held
    factors: tuple[float, ...]
    misses: tuple[float, ...]
    octaves: float


def study(candidate: Candidate, plant: Plant, course: Course) -> Studied:
    """The controller at its first and at its best gains, and its sensitivity to gains."""
    first = simulate(candidate, candidate.gains, plant, course)
    factors = torch.tensor(FACTORS, dtype=torch.float64)
    balances = torch.tensor(BALANCES if candidate.integral else (1.0,), dtype=torch.float64)
    pairs = torch.cartesian_prod(factors, balances).view(-1, 2)
    grid = _column(candidate.scaled(candidate.gains, pairs[:, 0], pairs[:, 1]))
    best = int(
        mean_miss(simulate(candidate, {**candidate.gains, **grid}, plant, course), course).argmin()
    )
    tuned = {**candidate.gains, **{name: float(value[best, 0]) for name, value in grid.items()}}
    around = _column(candidate.scaled(tuned, factors, torch.ones_like(factors)))
    courses = simulate(candidate, {**tuned, **around}, plant, course)
    misses = mean_miss(courses, course)
    middle = len(FACTORS) // 2
    bad = ~(misses <= SENSITIVE * misses[middle])
    below, above = bad[:middle].nonzero()[:, 0], bad[middle:].nonzero()[:, 0]
    low = int(below[-1]) + 1 if len(below) else 0
    high = middle + int(above[0]) - 1 if len(above) else len(FACTORS) - 1
    return Studied(
        name=candidate.name,
        label=candidate.label,
        source=candidate.source,
        first_gains=dict(candidate.gains),
        first=judge(first[0], course),
        tuned_gains=tuned,
        tuned=judge(simulate(candidate, tuned, plant, course)[0], course),
        factors=FACTORS,
        misses=tuple(misses.tolist()),
        octaves=math.log2(FACTORS[high] / FACTORS[low]),
    )


def _column(gains: Gains) -> Gains:
    return {name: value[:, None] for name, value in gains.items()}


def mean_miss(kl: Tensor, course: Course) -> Tensor:
    """[..., seeds, updates] -> [...]: the mean over seeds and updates."""
    off = torch.log((kl[..., _SMOOTHED:] / course.target).clamp(0.1, 10.0))
    return off.abs().mean((-1, -2))


def judge(kl: Tensor, course: Course) -> Held:
    """The measures of runs [seeds, updates]."""
    change = course.updates // 2
    before, after = kl[:, :change], kl[:, change:]
    ends = [half[:, -half.shape[1] // 3 :] for half in (before, after)]
    off = torch.cat(ends, 1) / course.target - 1
    last = kl[:, -max(1, course.updates // 10) :].mean(1) / course.target
    lost = (last >= 2) | (last <= 0.5)
    return Held(
        miss=float(mean_miss(kl, course)),
        settling=_settled(before, course),
        overshoot=float((before.amax(1) / course.target - 1).clamp(min=0).median()),
        error=float(off.square().mean(1).sqrt().median()),
        recovery=_settled(after, course),
        lost=float(lost.double().mean()),
    )


def _settled(kl: Tensor, course: Course) -> float | None:
    """The median over the seeds of the first update from which all updates are on target."""
    smooth = kl.unfold(1, _SMOOTHED, 1).mean(-1)
    is_off = (smooth / course.target - 1).abs() > WITHIN
    places = torch.arange(1, is_off.shape[1] + 1)
    last_off = torch.where(is_off, places, 0).amax(1)
    since = torch.where(last_off < is_off.shape[1], last_off.double(), math.inf)
    since = torch.where(since > 0, since + _SMOOTHED - 1, since)
    middle = float(since.sort().values[(len(since) - 1) // 2])
    return middle if math.isfinite(middle) else None


def runs_of(rule: Studied, plant: Plant, course: Course) -> tuple[Tensor, Tensor]:
    """The KL [seeds, updates] under the first and the tuned gains, as multiples of the target."""
    candidate = next(c for c in CANDIDATES if c.name == rule.name)
    gains = (rule.first_gains, rule.tuned_gains)
    first, tuned = (simulate(candidate, each, plant, course)[0] for each in gains)
    return first / course.target, tuned / course.target


def study_json(studied: list[Studied], plant: Plant, course: Course) -> dict[str, Any]:
    return {
        "plant": asdict(plant),
        "course": asdict(course),
        "rules": [asdict(rule) for rule in studied],
    }
