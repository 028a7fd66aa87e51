"""Controllers on the plant: the rules themselves, over many seeds and gains at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klfast.controllers.base import settings_on
from klfast.controllers.rules import Batch
from lab.study.candidates import BATCH, Candidate, Gains
from lab.study.plant import Plant, Policy


@dataclass(frozen=True)
class Course:
    """The course that every rule has to master.

    Attributes:
        target: nats per sequence.
        updates: the length of a run.
        seeds: runs for each choice of gains.
        seed: of the first; runs of the same number see the same noise, whatever their rule is.
        jump: what the KL that a coefficient leads to is multiplied by, as if the task changed, from
            half the run on.
        spread: the first coefficient is off the balancing one by up to this factor, either way.
    """

    target: float = 6.0
    updates: int = 300
    seeds: int = 64
    seed: int = 0
    jump: float = 2.0
    spread: float = 10.0


def simulate(candidate: Candidate, gains: Gains, plant: Plant, course: Course) -> Tensor:
    """The true KL [G, seeds, updates] under each of G gains."""
    device = torch.device("cpu")
    controller = candidate.make(course.target)
    settings: Any = settings_on(controller, device)
    count = max([1, *(len(value) for value in gains.values() if isinstance(value, Tensor))])
    for name, value in gains.items():
        setattr(settings, name, torch.as_tensor(value, dtype=torch.float64))
    rule = controller._update_rule()
    generator = torch.Generator().manual_seed(course.seed)
    shape = (count, course.seeds)

    first = _first(plant, course, generator).expand(shape)
    state = {"value": first, **_memory(controller, first, settings)}
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
        state = rule.advance(settings, state, Batch(current, settings.target, n_steps))
    return torch.stack(kls, -1)


def _first(plant: Plant, course: Course, generator: torch.Generator) -> Tensor:
    """The first coefficients [seeds], around the one that balances the plant."""
    share = 2 * torch.rand(course.seeds, generator=generator, dtype=torch.float64) - 1
    return plant.balance(course.target) * course.spread**share


def _memory(controller: Any, first: Tensor, settings: Any) -> dict[str, Tensor]:
    """The rule's first memory, for each first coefficient."""
    memory = controller._first_memory(settings, first)
    zeros = torch.zeros_like(first)
    return {name: zeros + number for name, number in memory.items()}
