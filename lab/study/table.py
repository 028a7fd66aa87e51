"""The ``study`` subcommand, and the study as text: tables in Markdown, and what follows from them.

``python -m lab.study.table`` puts the results of the study, and of its experiment, into
docs/controllers.md.

- ``python -m lab.study.table runs/study`` first copies the results of ``python -m lab study`` from
  there to ``benchmarks/results/study.json`` and ``docs/study.png``.

The simulated policy is fitted to ``lab/study/recorded.json``, one run of ``python -m lab compare``
with every controller. ``benchmarks/results/study-experiment.json`` has runs of the demo's GPT under
every controller. They were made once, with the settings of ``python -m lab compare`` and the gains
in the table.
"""

import argparse
import importlib.util
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks import tables
from lab.study.plant import Plant, fit, load_records, without_noise
from lab.study.simulate import CANDIDATES, WITHIN, Course, runs_of, study, study_json

HELP = (
    "run every controller, with its published and its best gains, on a simulated policy that is "
    "fitted to recorded runs of compare, and write a table and a plot"
)
PLOT, TABLE, NUMBERS = FILES = ("study.png", "study.md", "study.json")
_COURSE = Course()
Rule = dict[str, Any]  # a controller in the study's JSON (see :class:`lab.study.simulate.Studied`)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "study.json"
EXPERIMENT = RESULTS.with_name("study-experiment.json")
PICTURE = ROOT / "docs" / "study.png"
PAGE = ROOT / "docs" / "controllers.md"
BLOCK = re.compile(r"(<!-- study:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(study: dict[str, Any]) -> str:
    """Two rows for each controller, in the order of their tuned gains' misses."""
    lines = []
    for rule in ranked(study):
        first = f"{rule['source']}: {gains_text(rule['first_gains'])}"
        tuned = f"tuned: {gains_text(rule['tuned_gains'])}"
        lines.append((rule["label"], first, *_held(rule["first"]), ""))
        lines.append(("", tuned, *_held(rule["tuned"]), f"{rule['octaves']:.1f}"))
    measures = ("settles in", "overshoot", "error", "recovers in", "lost", "mean miss")
    return tables.table(("rule", "gains", *measures, "octaves"), lines)


def _held(held: dict[str, Any]) -> tuple[str, ...]:
    settling, recovery = (
        "never" if held[key] is None else f"{held[key]:.0f}" for key in ("settling", "recovery")
    )
    overshoot, error, lost = (f"{held[key]:.0%}" for key in ("overshoot", "error", "lost"))
    return settling, overshoot, error, recovery, lost, f"{held['miss']:.3f}"


def ranked(study: dict[str, Any]) -> list[Rule]:
    """The controllers, from the least mean miss at tuned gains to the largest."""
    return sorted(study["rules"], key=lambda rule: float(rule["tuned"]["miss"]))


def reading(study: dict[str, Any]) -> list[str]:
    """The sentences that follow from the numbers."""
    rules = ranked(study)
    octaves = max(float(rule["octaves"]) for rule in rules)
    broad = ", ".join(rule["label"] for rule in rules if rule["octaves"] == octaves)
    quiet = min(rules, key=lambda rule: float(rule["tuned"]["overshoot"]))
    label = quiet["label"]
    first = sorted(rules, key=lambda rule: float(rule["first"]["miss"]))
    failing = ", ".join(
        f"{rule['label']} ({rule['first']['lost']:.0%} of the seeds)"
        for rule in rules
        if rule["first"]["lost"] >= 0.25
    )
    sentences = [
        f"Tuned, {rules[0]['label']} misses its target least ({rules[0]['tuned']['miss']:.3f} in "
        f"the logarithm), then {rules[1]['label']} ({rules[1]['tuned']['miss']:.3f}).",
        f"At the first gains of each {first[0]['label']} does best "
        f"({first[0]['first']['miss']:.3f}), then {first[1]['label']} "
        f"({first[1]['first']['miss']:.3f}).",
        f"Wrong gains matter least to: {broad}. {octaves:.1f} octaves of them keep the miss below "
        "1.5 times its least.",
        f"{label[0].upper()}{label[1:]} overshoots least when tuned, by "
        f"{quiet['tuned']['overshoot']:.0%}.",
    ]
    if failing:
        sentences.append(
            f"At their first gains these often end off target by a factor of 2 or more: {failing}."
        )
    return sentences


def gains_text(gains: dict[str, float]) -> str:
    return ", ".join(f"{name}={value:.3g}" for name, value in gains.items())


def blocks() -> dict[str, str]:
    """The text of the page's blocks, by name."""
    study = json.loads(RESULTS.read_text())
    plant = study["plant"]
    return {
        "plant": tables.table([*plant], [[f"{value:.3g}" for value in plant.values()]]),
        "fit": fit_sentence(Plant(**plant)),
        "experiment": experiment_table(json.loads(EXPERIMENT.read_text())),
        "table": table(study),
        "reading": "\n".join(f"- {sentence}" for sentence in reading(study)),
    }


def fit_sentence(plant: Plant) -> str:
    """A sentence about how far the fitted KL is from the recorded KLs."""
    records = load_records()
    steered = (records.coefficient > 0).all(1)
    fitted = without_noise(plant, records.coefficient[steered])
    off = torch.log(fitted[:, 1:] / records.kl[steered][:, 1:]).abs().median().expm1()
    return (
        f"The fitted KL is off the recorded one by {float(off):.0%} in the median, over all steps "
        f"of {int(steered.sum())} arms."
    )


def experiment_table(experiment: dict[str, Any]) -> str:
    """A row for each controller and its gains, least mean miss first."""
    lines = []
    for rule in experiment["rules"]:
        columns = {key: [run[key] for run in rule["runs"]] for key in rule["runs"][0]}
        misses = ", ".join(f"{miss:.3f}" for miss in columns["miss"])
        ends = (f"{max(columns['highest']):.2f}", f"{mean(columns['error']):.0%}")
        cells = (rule["label"], f"{rule['source']}: {rule['gains']}")
        lines.append((mean(columns["miss"]), cells, misses, ends))
    ordered = sorted(lines, key=lambda line: line[0])
    return tables.table(
        ("rule", "gains", "miss", "its runs", "highest", "error"),
        ((*cells, f"{miss:.3f}", misses, *ends) for miss, cells, misses, ends in ordered),
    )


def filled(page: str) -> str:
    """The page with its blocks filled from the results."""
    found = blocks()
    return BLOCK.sub(lambda match: f"{match[1]}{found[match[2]]}\n{match[3]}", page)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in (
        ("seeds", "runs for each choice of gains"),
        ("updates", "updates in a run, at least 60"),
    ):
        default = getattr(_COURSE, name)
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/study"),
        help=f"a new output folder, for {', '.join(FILES)} (default %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if finished, 2 on a mistake (see stderr)."""
    try:
        _study(arguments.out, arguments.seeds, arguments.updates)
    except (ValueError, OSError) as error:
        print(f"python -m lab study: error: {error}", file=sys.stderr)
        return 2
    return 0


def _study(out: Path, seeds: int, updates: int) -> None:
    for name, value, least in (("seeds", seeds, 1), ("updates", updates, 60)):
        if value < least:
            raise ValueError(f"{name} must be a whole number >= {least}, got {value}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the study needs matplotlib: pip install 'klfast[demo]'")
    from lab.pictures import draw_study

    earlier = [name for name in FILES if (out / name).exists()]
    if earlier:
        raise ValueError(
            f"{out} holds an earlier study ({', '.join(earlier)}): move it, or choose another "
            "folder (--out)"
        )
    out.mkdir(parents=True, exist_ok=True)
    course, plant = replace(_COURSE, seeds=seeds, updates=updates), fit(load_records())
    studied = [study(candidate, plant, course) for candidate in CANDIDATES]
    numbers = study_json(studied, plant, course)
    runs = {rule.name: runs_of(rule, plant, course) for rule in studied}
    (out / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n")
    (out / TABLE).write_text(f"{table(numbers)}\n")
    (out / PLOT).write_bytes(draw_study(studied, runs, course, WITHIN))
    print(f"Plant: {', '.join(f'{k} {v:.4g}' for k, v in numbers['plant'].items())}\n")
    print(f"{table(numbers)}\n")
    for sentence in reading(numbers):
        print(f"- {sentence}")
    best = ",".join(rule["name"] for rule in ranked(numbers)[:3])
    print(
        "\nThe best three with klfast's default gains on the real experiment: python -m lab "
        f"compare --arms {best}"
    )
    print(f"Written to {out}: {', '.join(FILES)}")


def main(arguments: list[str]) -> None:
    if arguments:
        folder = Path(arguments[0])
        shutil.copyfile(folder / "study.json", RESULTS)
        shutil.copyfile(folder / "study.png", PICTURE)
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
