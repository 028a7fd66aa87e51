"""Trains the demo's GPT under every rule, for the table of docs/controllers.md.

``python -m lab.study.experiment`` takes minutes on one core, and writes
``benchmarks/results/study-experiment.json``; ``lab/study/report.py`` then writes the page.
The best three rules of the recorded study run with the gains that were tuned on its plant too, if
they are others than the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from klfast.controllers import CONTROLLERS
from klfast.controllers.base import CoefficientController
from lab.arms import ARMS
from lab.model import frozen_copy
from lab.pretrain import new_pretraining, pretrain_step
from lab.run import environment
from lab.settings import Settings
from lab.study.candidates import CANDIDATES
from lab.study.measure import mean_miss
from lab.study.simulate import Course
from lab.study.table import gains_text, ranked
from lab.text import Corpus, load_corpus
from lab.train import World, build_world, new_arm, train_step

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STUDY, EXPERIMENT = RESULTS / "study.json", RESULTS / "study-experiment.json"
SEEDS = (0, 1, 2)
BEST = 3
DEMOS = ("adaptive", "exponential")
"""Arms whose gains are settings of the demo."""
FASTER = {"kp": 1.0, "ki": 0.2}
"""nuPI's defaults with twice the integral gain."""


@dataclass(frozen=True, eq=False)
class Case:
    """A rule and its gains; without gains those of the arm."""

    arm: str
    source: str
    gains: dict[str, float] | None = None

    def controller(self, settings: Settings) -> CoefficientController:
        if self.gains is None:
            return ARMS[self.arm].controller(settings, None)
        make: Any = CONTROLLERS[self.arm]
        made: CoefficientController = make(
            settings.init_coef, settings.target, unit="sequence", **self.gains
        )
        return made


def cases(study: dict[str, Any]) -> Iterator[Case]:
    for arm in ARMS.values():
        if arm.steers:
            yield Case(arm.name, "the demo's" if arm.name in DEMOS else "default")
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


def world_of(seed: int, corpus: Corpus) -> tuple[World, Settings]:
    settings = Settings(seed=seed)
    pretraining = new_pretraining(corpus, settings)
    while pretraining.step < settings.pretrain_steps:
        pretrain_step(pretraining, corpus, settings)
    return build_world(corpus, frozen_copy(pretraining.model), settings), settings


def held(case: Case, world: World, settings: Settings) -> dict[str, float]:
    """How a rule held its target over a run."""
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
    corpus, study = load_corpus(), json.loads(STUDY.read_text())
    found: dict[Case, list[dict[str, float]]] = {}
    all_cases = list(cases(study))
    for seed in SEEDS:
        world, settings = world_of(seed, corpus)
        for case, runs in ((case, found.setdefault(case, [])) for case in all_cases):
            runs.append(held(case, world, settings))
            print(seed, case.arm, case.source, runs[-1], flush=True)
    rules = [
        {
            "label": ARMS[case.arm].label,
            "source": case.source,
            "gains": gains_of(case, Settings()),
            "runs": runs,
        }
        for case, runs in found.items()
    ]
    recorded = {"environment": environment(corpus), "seeds": SEEDS, "rules": rules}
    EXPERIMENT.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
