"""Trains the demo's GPT under every controller, for the table of docs/controllers.md.

``python -m lab.study.experiment`` takes minutes on one core, and writes
``benchmarks/results/study-experiment.json``; ``lab/study/table.py`` then writes the page. The best
three controllers of the recorded study run with the gains that were tuned on its plant too, if they
are others than the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from klfast.control.base import CoefficientController
from klfast.control.table import CONTROLLERS
from lab.model import frozen_copy, new_pretraining, pretrain_step
from lab.run import environment
from lab.settings import ARMS, Settings
from lab.study.candidates import CANDIDATES
from lab.study.simulate import Course, mean_miss
from lab.study.table import EXPERIMENT, RESULTS, gains_text, ranked
from lab.text import load_corpus
from lab.train import World, build_world, new_arm, train_step

SEEDS = (0, 1, 2)
BEST = 3
FASTER = {"kp": 1.0, "ki": 0.2}
"""nuPI's defaults with twice the integral gain."""


@dataclass
class Case:
    """A controller and its gains; without gains those of the arm."""

    arm: str
    source: str
    gains: dict[str, float] | None = None
    runs: list[dict[str, float]] = field(default_factory=list)

    def controller(self, settings: Settings) -> CoefficientController:
        if self.gains is None:
            return ARMS[self.arm].controller(settings)
        make: Any = CONTROLLERS[self.arm]
        first: tuple[float, float] = (settings.init_coef, settings.target)
        made: CoefficientController = make(*first, unit="sequence", **self.gains)
        return made


def cases(study: dict[str, Any]) -> Iterator[Case]:
    for name, arm in ARMS.items():
        if arm.steers:
            is_setting = name in ("adaptive", "exponential")
            yield Case(name, "the demo's" if is_setting else "default")
    for rule in ranked(study)[:BEST]:
        tuned = Case(rule["name"], "tuned on the plant", rule["tuned_gains"])
        if gains_of(tuned, Settings()) != gains_of(Case(rule["name"], ""), Settings()):
            yield tuned
    yield Case("nupi", "default, but ki", FASTER)


def gains_of(case: Case, settings: Settings) -> str:
    """The gains that the case runs with."""
    candidate = next(c for c in CANDIDATES if c.name == case.arm)
    controller = case.controller(settings)
    return gains_text({name: getattr(controller, name) for name in candidate.gains})


def held(case: Case, world: World, settings: Settings) -> dict[str, float]:
    """How a controller held its target over a run."""
    state = new_arm(case.arm, world, settings)
    state.controller = case.controller(settings)
    while len(state.rows) < settings.steps:
        train_step(state, world, settings)
    kl = torch.tensor([row["kl_per_sequence_exact"] for row in state.rows], dtype=torch.float64)
    share = kl / settings.target
    end = share[-len(share) // 3 :]
    return {
        "miss": float(mean_miss(kl[None], Course(target=settings.target))),
        "highest": float(share.max()),
        "error": float((end - 1).square().mean().sqrt()),
    }


def main() -> None:
    torch.set_num_threads(1)
    corpus, all_cases = load_corpus(), list(cases(json.loads(RESULTS.read_text())))
    for seed in SEEDS:
        settings = Settings(seed=seed)
        pretraining = new_pretraining(corpus, settings)
        while pretraining.step < settings.pretrain_steps:
            pretrain_step(pretraining, corpus, settings)
        world = build_world(corpus, frozen_copy(pretraining.model), settings)
        for case in all_cases:
            case.runs.append(held(case, world, settings))
            print(seed, case.arm, case.source, case.runs[-1], flush=True)
    rules = [
        {
            "label": ARMS[case.arm].label,
            "source": case.source,
            "gains": gains_of(case, Settings()),
            "runs": case.runs,
        }
        for case in all_cases
    ]
    recorded = {"environment": environment(corpus), "seeds": SEEDS, "rules": rules}
    EXPERIMENT.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
