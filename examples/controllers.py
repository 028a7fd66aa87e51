"""Your own controller compared with klfast's, on the simulated policy of ``python -m lab study``.

``python examples/controllers.py`` draws docs/rules.png.

The simulated policy is fitted to recorded trainings (docs/controllers.md). With a higher
coefficient its KL falls after a while. Each run begins with a coefficient that is up to 10 times
too high or too low. Half-way, the KL that a coefficient leads to doubles. The target is 6 nats per
sequence. The output has a line per controller with the mean of abs(log(KL / target)) after the
first updates. A mean of 0.1 is off by 10 %.

Any object with ``value`` and ``update(kl, n_steps)`` is a controller. Edit ``Steps`` to try one. In
this example a fixed coefficient misses the target most and nuPI least.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

import klfast

sys.path.append(str(Path(__file__).parents[1]))  # the laboratory is not installed

from lab.drawing import (
    BAND,
    BLUE,
    GREEN,
    INK,
    LINE,
    VERMILION,
    dress,
    new_figure,
    set_ticks,
    zero_line,
)
from lab.study.plant import Plant, Policy

ROOT = Path(__file__).parents[1]
STUDY = json.loads((ROOT / "benchmarks" / "results" / "study.json").read_text())
PLANT, TARGET, BATCH = Plant(**STUDY["plant"]), 6.0, 40


class Steps:
    """Raises or lowers the coefficient by a tenth, at any distance to the target."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, kl: float, n_steps: int) -> None:
        self.value *= 1.1 if kl > TARGET else 1 / 1.1


RULES = {
    "fixed": (klfast.FixedKLController, INK, ":"),
    "Ziegler": (lambda v: klfast.AdaptiveKLController(v, TARGET, horizon=98), VERMILION, "--"),
    "your own": (Steps, GREEN, "-."),
    "nuPI": (lambda v: klfast.NuPIKLController(v, TARGET), BLUE, "-"),
}


def course(make, seed: int, seeds: int, updates: int) -> Tensor:
    """The KL over the updates [updates] under the controller ``make(first coefficient)``."""
    generator = torch.Generator().manual_seed(seed)
    off = 10 ** (2 * (seed + 0.5) / seeds - 1)
    controller, policy = make(PLANT.balance(TARGET) * off), Policy(PLANT, ())
    kls = []
    for t in range(updates):
        to_measure, to_wander = torch.randn(2, generator=generator, dtype=torch.float64)
        kls.append(policy.kl)
        measured = policy.measured(to_measure).item()
        used = torch.tensor(controller.value, dtype=torch.float64)
        policy.update(used, to_wander, push=2.0 if t >= updates // 2 else 1.0)
        controller.update(measured, BATCH)
    return torch.stack(kls)


def main() -> None:
    """Run every controller from every first coefficient, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "rules.png")
    options = parser.parse_args()
    figure = new_figure(6)
    panels = figure.subplots(2, len(RULES) // 2, sharex=True, sharey=True).flatten()
    for panel, (name, (make, color, style)) in zip(panels, RULES.items(), strict=True):
        runs = [course(make, i, options.seeds, options.updates) for i in range(options.seeds)]
        share = torch.stack(runs) / TARGET
        miss = share[:, 10:].clamp(0.1, 10).log().abs().mean()
        print(f"{name}: mean miss {miss:.2f}")
        panel.plot(share.T.clamp(min=1e-3), color=color, alpha=0.25, linewidth=0.8)
        panel.plot(share.median(0).values.clamp(min=1e-3), color=color, linestyle=style, **LINE)
        zero_line(panel, 1)
        panel.axhspan(0.8, 1.2, **BAND)
        panel.set_yscale("log")
        panel.set_ylim(1 / 16, 16)
        panel.set(xlabel="update", ylabel="KL / target")
        panel.label_outer()
        dress(panel, f"{name}: mean miss {miss:.2f}")
    set_ticks(panels[0].yaxis)
    figure.savefig(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
