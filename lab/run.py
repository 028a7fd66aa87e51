"""A run: its folder, its state, and the steps that train it.

A run's state is its pretraining and its arms. Each has a checkpoint of everything that a step reads
or changes: weights, optimizer, random generator, controller, records. So a resumed run gives the
same numbers, bit for bit, as a run that was never interrupted.
"""

import io
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from klfast.backends.info import commit
from klfast.version import __version__
from lab.model import GPT, PretrainState, frozen_copy, new_pretraining, pretrain_step, side_by_side
from lab.settings import CompareError, Settings, settings_from_json, settings_to_json
from lab.text import Corpus
from lab.train import ArmState, Row, World, build_world, new_arm, train_step

VERSION = 6
"""The version of a run's records and arithmetic. A run is only resumed with the same version."""

SAVE_EVERY = 10
PRETRAIN_SAVE_EVERY = 100

SETTINGS, METRICS, SPEED, REPORT = "settings.json", "metrics.jsonl", "speed.json", "report.html"
FRONTIER, CURVES, ESTIMATORS, SAMPLER = PICTURES = (
    *("frontier.png", "curves.png"),
    *("estimators.png", "sampler.png"),
)
CHECKPOINTS, EARLIER = "checkpoints", "earlier"
_OURS = (METRICS, *PICTURES, SPEED, REPORT, CHECKPOINTS, SETTINGS)

Stopped = Callable[[], bool]


def write(path: Path, data: bytes) -> None:
    """Writes the whole file or leaves the old file, so no reader and no crash sees half of it."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def write_json(path: Path, value: object) -> None:
    write(path, (json.dumps(value, indent=2) + "\n").encode())


def check_writable(out: Path) -> None:
    """Makes the folder, and raises :class:`CompareError` if no file can be written in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise CompareError(f"cannot write to the output folder {out}: {error.strerror}") from None


def files_of(out: Path) -> list[Path]:
    """The files of an earlier run."""
    return [out / name for name in _OURS if (out / name).exists()]


def set_aside(out: Path) -> Path | None:
    """Moves an earlier run's files to ``earlier/<date>``. Returns that folder, or None."""
    present = files_of(out)
    if not present:
        return None
    newest = max(path.stat().st_mtime for path in present)
    stem = time.strftime("%Y%m%d-%H%M%S", time.localtime(newest))
    place, count = out / EARLIER / stem, 1
    while place.exists():
        count += 1
        place = out / EARLIER / f"{stem}-{count}"
    place.mkdir(parents=True)
    for path in present:
        path.rename(place / path.name)
    return place


@dataclass
class Run:
    """The whole state of an experiment, and its folder."""

    settings: Settings
    corpus: Corpus
    out: Path
    pretraining: PretrainState
    arms: dict[str, ArmState] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The records, one arm after the other."""
        done = (self.arms[name] for name in self.settings.arms if name in self.arms)
        return [row for arm in done for row in arm.rows]

    @property
    def pretrained(self) -> bool:
        return self.pretraining.step >= self.settings.pretrain_steps

    @property
    def finished(self) -> bool:
        return len(self.rows) == self.settings.steps * len(self.settings.arms)

    @property
    def reference(self) -> GPT:
        return frozen_copy(self.pretraining.model)


def environment(corpus: Corpus) -> dict[str, Any]:
    """The versions and the machine. Numbers depend on these and on the settings."""
    return {
        "text": corpus.digest,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "klfast": __version__,
        "commit": commit(),
    }


def now() -> str:
    """The time in the format of records and reports."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def start(settings: Settings, corpus: Corpus, out: Path) -> Run:
    """A new run in ``out``, which has no run yet."""
    record = {"settings": settings_to_json(settings), "environment": environment(corpus)}
    write_json(out / SETTINGS, {"version": VERSION, **record, "began": now()})
    run = Run(settings, corpus, out, new_pretraining(corpus, settings))
    write_rows(run)
    return run


def stored(out: Path) -> dict[str, Any]:
    """The record of the run in ``out``, which includes its :class:`Settings`.

    Raises:
        CompareError: there is no run, or its record cannot be read.
    """
    path = out / SETTINGS
    if not path.is_file():
        raise CompareError(f"nothing to resume: there is no {path}; begin a run without --resume")
    with _readable(path):
        record: dict[str, Any] = json.loads(path.read_bytes())
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']} of a run's records, not {VERSION}")
        return {**record, "settings": settings_from_json(record["settings"])}


def resume(settings: Settings, corpus: Corpus, out: Path) -> Run:
    """The run in ``out`` from its checkpoints. All are read before anything is written."""
    run = Run(settings, corpus, out, new_pretraining(corpus, settings))
    if (record := _load(run, "pretrain", run.pretraining)) is not None:
        run.pretraining.step = record["step"]
    world = build_world(corpus, run.reference, settings)
    for name in settings.arms:
        arm = new_arm(name, world, settings)
        if (record := _load(run, name, arm)) is not None:
            arm.rows.extend(record["rows"])
            run.arms[name] = arm
    if run.arms and not run.pretrained:
        raise CompareError(_damaged(_checkpoint(run, "pretrain"), "missing or unfinished"))
    write_rows(run)
    return run


def write_rows(run: Run) -> None:
    """The records of every arm, one arm after the other."""
    write(run.out / METRICS, "".join(json.dumps(row) + "\n" for row in run.rows).encode())


def _checkpoint(run: Run, name: str) -> Path:
    return run.out / CHECKPOINTS / f"{name}.pt"


def _save(run: Run, name: str, part: PretrainState | ArmState, **record: Any) -> None:
    """Writes a checkpoint: a record, and the states of a part of the run."""
    record["settings"] = settings_to_json(run.settings)
    record["generator"] = part.generator.get_state()
    record |= {key: of.state_dict() for key, of in part.stateful().items()}
    buffer = io.BytesIO()
    torch.save(record, buffer)
    (run.out / CHECKPOINTS).mkdir(exist_ok=True)
    write(_checkpoint(run, name), buffer.getvalue())


def _load(run: Run, name: str, part: PretrainState | ArmState) -> dict[str, Any] | None:
    """Loads a checkpoint into a part of the run. Returns its record, or None without one."""
    path = _checkpoint(run, name)
    if not path.is_file():
        return None
    with _readable(path):
        record: dict[str, Any] = torch.load(path, weights_only=True)
        if record["settings"] != settings_to_json(run.settings):
            raise ValueError("it belongs to a run with other settings")
        for key, of in part.stateful().items():
            of.load_state_dict(record[key])
        part.generator.set_state(record["generator"])
        return record


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns whatever is wrong with a file into one clear error."""
    try:
        yield
    except Exception as error:  # a damaged file can raise anything
        lines = str(error).splitlines() or [type(error).__name__]
        raise CompareError(_damaged(path, lines[0])) from None


def _damaged(path: Path, reason: str) -> str:
    return (
        f"cannot resume: {path} is damaged ({reason}); "
        "begin anew with --force, which keeps the earlier run's files, or in another folder"
    )


def pretrain(run: Run, stopped: Stopped, on_step: Callable[[int, float], None]) -> None:
    """Trains the reference, from its checkpoint if there is one. Returns early if ``stopped``."""
    state, begin = run.pretraining, run.pretraining.step
    while not run.pretrained and not stopped():
        on_step(state.step + 1, pretrain_step(state, run.corpus, run.settings))
        if state.step % PRETRAIN_SAVE_EVERY == 0:
            _save(run, "pretrain", state, step=state.step)
    if state.step > begin and state.step % PRETRAIN_SAVE_EVERY:
        _save(run, "pretrain", state, step=state.step)


def workers(run: Run) -> int:
    """The number of arms that train at a time, on the cores that this process may use."""
    with_affinity = hasattr(os, "sched_getaffinity")
    usable = len(os.sched_getaffinity(0)) if with_affinity else os.cpu_count() or 1
    return min(usable, len(run.settings.arms))


def train(run: Run, stopped: Stopped, on_step: Callable[[Row], None]) -> None:
    """Trains the arms, from their checkpoints if there are any. Returns early if ``stopped``.

    The threads take turns at the arms. A turn ends at the arm's next checkpoint, so all arms end at
    about the same time. An arm's numbers do not depend on the other arms.
    """
    world = build_world(run.corpus, run.reference, run.settings)
    for name in run.settings.arms:
        if name not in run.arms:
            run.arms[name] = new_arm(name, world, run.settings)
    turns = cycle(run.arms.values())
    end = threading.Event()

    def work(_: int) -> None:
        try:
            while not (run.finished or end.is_set()):
                arm = next(turns)
                with arm.turn:
                    if not _take_turn(run, arm, world, stopped, on_step):
                        break
        finally:
            end.set()  # an error or a stop in one thread ends all

    side_by_side(work, range(workers(run)))
    write_rows(run)


def _take_turn(
    run: Run, arm: ArmState, world: World, stopped: Stopped, on_step: Callable[[Row], None]
) -> bool:
    """Trains an arm up to its next checkpoint. Returns True if it got there."""
    before, goes_on = len(arm.rows), True
    while len(arm.rows) < run.settings.steps and (goes_on := not stopped()):
        row = train_step(arm, world, run.settings)
        with (run.out / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")  # in one write, so that a crash leaves whole lines
        on_step(row)
        if len(arm.rows) % SAVE_EVERY == 0:
            break
    if len(arm.rows) > before:
        _save(run, arm.name, arm, rows=arm.rows)
    return goes_on
