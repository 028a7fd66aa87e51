"""Puts the results of the study, and of its experiment, into docs/controllers.md.

- ``python -m lab.study.report --record runs/compare`` first makes that run the one which the
  default plant is fitted to (``lab/study/recorded.json``).
- ``python -m lab.study.report runs/study`` first copies what ``python -m lab study`` wrote there to
  ``benchmarks/results/study.json`` and ``docs/study.png``.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from lab.study.plant import Plant, without_noise
from lab.study.records import load_records, read_run, save_records
from lab.study.table import plant_table, reading, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "study.json"
EXPERIMENT = RESULTS.with_name("study-experiment.json")
PICTURE = ROOT / "docs" / "study.png"
PAGE = ROOT / "docs" / "controllers.md"
BLOCK = re.compile(r"(<!-- study:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def blocks() -> dict[str, str]:
    """The text of the page's blocks, by name."""
    study = json.loads(RESULTS.read_text())
    return {
        "plant": plant_table(study),
        "fit": fit_sentence(Plant(**study["plant"])),
        "experiment": experiment_table(json.loads(EXPERIMENT.read_text())),
        "table": table(study),
        "reading": "".join(f"- {sentence}\n" for sentence in reading(study)),
    }


def fit_sentence(plant: Plant) -> str:
    """How far the fitted KL is from the recorded ones."""
    records = load_records()
    steered = (records.coefficient > 0).all(1)
    fitted = without_noise(plant, records.coefficient[steered])
    off = torch.log(fitted[:, 1:] / records.kl[steered][:, 1:]).abs().median().expm1()
    return (
        f"The fitted KL is off the recorded one by {float(off):.0%} in the median, over all steps "
        f"of {int(steered.sum())} arms.\n"
    )


def experiment_table(experiment: dict[str, Any]) -> str:
    """A row for each rule and its gains, least mean miss first."""

    def mean(rule: dict[str, Any]) -> float:
        return float(statistics.mean(run["miss"] for run in rule["runs"]))

    lines = ["| rule | gains | miss | its runs | highest | error |", "|---|---|---|---|---|---|"]
    for rule in sorted(experiment["rules"], key=mean):
        runs = rule["runs"]
        misses = ", ".join(f"{run['miss']:.3f}" for run in runs)
        highest = max(run["highest"] for run in runs)
        error = statistics.mean(run["error"] for run in runs)
        cells = (
            rule["label"],
            f"{rule['source']}: {rule['gains']}",
            f"{mean(rule):.3f}",
            misses,
            f"{highest:.2f}",
            f"{error:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """The page with its blocks as the results say."""
    found = blocks()
    return BLOCK.sub(lambda match: f"{match[1]}{found[match[2]]}{match[3]}", page)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--record"]:
        save_records(read_run(Path(arguments[1])))
    elif arguments:
        folder = Path(arguments[0])
        shutil.copyfile(folder / "study.json", RESULTS)
        shutil.copyfile(folder / "study.png", PICTURE)
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
