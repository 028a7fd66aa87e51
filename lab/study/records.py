"""Recorded runs of ``python -m lab compare``: which coefficient met which KL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lab.folder import METRICS, Row, read_rows

RECORDED = Path(__file__).with_name("recorded.json")
"""Runs with the default settings, which the default plant is fitted to."""

_KL = "kl_per_sequence_exact"
_MEASURED = "kl_per_sequence_k3"
_DRIFT = "rollout"  # of the arms whose sampler is not the policy


@dataclass(frozen=True)
class Records:
    """Arms of one length, [A] by [T] steps, fp64.

    Attributes:
        arms: their names.
        coefficient: [A, T], of the step.
        kl: [A, T], the exact KL in nats per sequence of the step's samples, before the step.
        measured: [A, T], its estimate by k3, which controllers read.
    """

    arms: tuple[str, ...]
    coefficient: Tensor
    kl: Tensor
    measured: Tensor


def read_run(folder: Path) -> Records:
    """The records of a finished run's folder, of the arms whose samples are the policy's own.

    Raises:
        ValueError: there is no run, or its arms have different lengths, or a line lacks a number.
    """
    path = folder / METRICS
    if not path.is_file():
        raise ValueError(f"there is no {path}: not the folder of a run of python -m lab compare")
    rows: dict[str, list[Row]] = {}
    for row in read_rows(path):
        missing = [name for name in ("arm", "coefficient", _KL, _MEASURED) if name not in row]
        if missing:
            raise ValueError(f"{path} must have {missing[0]} in every line, got {str(row)[:60]!r}")
        if _DRIFT not in row:
            rows.setdefault(row["arm"], []).append(row)
    if not rows or len({len(own) for own in rows.values()}) > 1:
        raise ValueError(f"the run in {folder} is not finished: its arms have different lengths")
    return _records(
        {
            name: {
                "coefficient": [row["coefficient"] for row in own],
                "kl": [row[_KL] for row in own],
                "measured": [row[_MEASURED] for row in own],
            }
            for name, own in rows.items()
        }
    )


def load_records(path: Path = RECORDED) -> Records:
    """The records that :func:`save_records` wrote."""
    return _records(json.loads(path.read_text()))


def save_records(records: Records, path: Path = RECORDED) -> None:
    """Writes records, rounded to seven digits."""
    columns = {
        name: {
            key: [float(f"{value:.7g}") for value in getattr(records, key)[i].tolist()]
            for key in ("coefficient", "kl", "measured")
        }
        for i, name in enumerate(records.arms)
    }
    path.write_text(json.dumps(columns) + "\n")


def _records(columns: dict[str, dict[str, list[float]]]) -> Records:
    tensors = {
        key: torch.tensor([own[key] for own in columns.values()], dtype=torch.float64)
        for key in ("coefficient", "kl", "measured")
    }
    return Records(tuple(columns), **tensors)
