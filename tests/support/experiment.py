"""Runs of the experiment that take seconds."""

import json
from contextlib import contextmanager

import pytest

from lab import report, run

TINY = {
    "pretrain_steps": 3,
    "prompts": 2,
    "group": 2,
    "prompt_length": 4,
    "continuation_length": 6,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "held_out_windows": 4,
}
"""Settings; a run has its steps and arms beside them."""


@contextmanager
def no_pictures():
    """Pictures are written without being drawn, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_pictures", lambda *of: {run.CURVES: b"a picture"})
        yield patch


def metrics(out):
    return [json.loads(line) for line in (out / run.METRICS).read_text().splitlines()]


def without_times(rows):
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]


def contents(out):
    """The bytes of each file."""
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
