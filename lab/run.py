"""A run: started afresh or taken up again, stepped, and saved so that nothing is lost.

A run's state is its pretraining and its arms. Everything in them that a step reads or changes
(weights, optimiser, random generator, controller, records) is in the checkpoints, so that a run
taken up again gives the same numbers, bit for bit, as one that was never interrupted.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from klfast.backends.info import commit
from klfast.version import __version__
from lab import folder
from lab.cores import cores, side_by_side
from lab.folder import Row
from lab.model import GPT, frozen_copy
from lab.pretrain import PretrainState, new_pretraining, pretrain_step
from lab.settings import (
    CompareError,
    Settings,
    settings_from_json,
    settings_to_json,
)
from lab.team import ALONE, Team, load_whole_state, whole_state
from lab.text import Corpus
from lab.train import ArmState, World, build_world, new_arm, train_step

VERSION = 5
"""The version of a run's records and arithmetic: a run goes on under the one it began with."""

SAVE_EVERY = 10
PRETRAIN_SAVE_EVERY = 100
_PRETRAIN = "pretrain"

Stopped = Callable[[], bool]


@dataclass
class Run:
    """The whole state of an experiment and the folder that it lives in."""

    settings: Settings
    corpus: Corpus
    out: Path
    pretraining: PretrainState
    team: Team = ALONE
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
    """The versions and the machine, on which numbers depend besides the settings."""
    return {
        "text": corpus.digest,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "klfast": __version__,
        "commit": commit(),
    }


def now() -> str:
    """The time, as records and reports have it."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def start(settings: Settings, corpus: Corpus, out: Path, team: Team = ALONE) -> Run:
    """A new run in an empty place of ``out``."""
    if team.leads:
        folder.write_json(
            out / folder.SETTINGS,
            {
                "version": VERSION,
                "settings": settings_to_json(settings),
                "environment": environment(corpus),
                "began": now(),
            },
        )
        folder.write_rows(out / folder.METRICS, [])
    return Run(settings, corpus, out, new_pretraining(corpus, settings), team)


def beginning(out: Path) -> dict[str, Any]:
    """When the run in ``out`` began (``began``), and in what environment."""
    record = folder.read_json(out / folder.SETTINGS)
    return {"began": record.get("began"), **record["environment"]}


def stored_settings(out: Path) -> tuple[Settings, dict[str, Any]]:
    """Settings and environment of the run in ``out``; :class:`CompareError` if there is none."""
    path = out / folder.SETTINGS
    if not path.is_file():
        raise CompareError(f"nothing to resume: there is no {path}; begin a run without --resume")
    try:
        record = json.loads(path.read_bytes())
        version = record["version"]
        if version != VERSION:
            raise ValueError(f"version {version} of a run's records, not {VERSION}")
        return settings_from_json(record["settings"]), dict(record["environment"])
    except (CompareError, OSError, ValueError, TypeError, KeyError) as error:
        raise CompareError(_damaged(path, error)) from None


def resume(settings: Settings, corpus: Corpus, out: Path, team: Team = ALONE) -> Run:
    """The run in ``out`` as its checkpoints left it; all are read before anything is written.

    It may go on with another number of ranks than it began with.
    """
    run = Run(settings, corpus, out, new_pretraining(corpus, settings), team)
    path = _checkpoint(out, _PRETRAIN)
    if path.is_file():
        _restore(path, settings, partial(_load_pretraining, run.pretraining))
    world = build_world(corpus, run.reference, settings)
    for name in settings.arms:
        path = _checkpoint(out, name)
        if path.is_file():
            if not run.pretrained:
                raise CompareError(_damaged(_checkpoint(out, _PRETRAIN), "missing or unfinished"))
            arm = run.arms[name] = new_arm(name, world, settings, team)
            _restore(path, settings, partial(_load_arm, arm))
    _check_nothing_is_lost(run)
    if team.leads:
        folder.write_rows(out / folder.METRICS, run.rows)
    return run


def _check_nothing_is_lost(run: Run) -> None:
    """Raises :class:`CompareError` where records are further than a killed run's can be.

    Checkpoints have then been removed, and the records would be overwritten.
    """
    recorded = Counter(row["arm"] for row in folder.read_rows(run.out / folder.METRICS))
    for name, steps in recorded.items():
        kept = len(run.arms[name].rows) if name in run.arms else 0
        if steps - kept > SAVE_EVERY:
            raise CompareError(
                f"cannot resume: {run.out / folder.METRICS} has {steps} steps of the arm {name!r}, "
                f"its checkpoint {kept}; begin anew with --force, which keeps the earlier run's "
                "files, or in another folder"
            )


def unshard(run: Run) -> None:
    """Gives every arm its whole policy, on every rank; for reports, after the last step."""
    for arm in run.arms.values():
        weights, _ = whole_state(arm.policy, arm.optimizer)
        arm.policy = frozen_copy(run.pretraining.model)
        if weights:  # the first rank alone has them
            arm.policy.load_state_dict(weights)


def pretrain(run: Run, stopped: Stopped, on_step: Callable[[int, float], None]) -> None:
    """Makes the reference, or goes on making it; returns early when ``stopped``."""
    state = run.pretraining
    saved = state.step
    while not run.pretrained and not stopped():
        loss = pretrain_step(state, run.corpus, run.settings)
        on_step(state.step, loss)
        if state.step % PRETRAIN_SAVE_EVERY == 0:
            _save_pretraining(run)
            saved = state.step
    if saved != state.step:
        _save_pretraining(run)
    run.team.equalise(state.model)


def workers(run: Run) -> int:
    """The number of arms that train at a time: 1 with ranks, which must take steps in one order."""
    return min(cores(), len(run.settings.arms)) if run.team.group is None else 1


def train(run: Run, stopped: Stopped, on_step: Callable[[Row], None]) -> None:
    """Trains the arms, or goes on training them; returns early when ``stopped``.

    The threads take turns at the arms. A turn ends at the arm's next checkpoint, so all arms end at
    about the same time. An arm's numbers do not depend on the other arms.
    """
    world = build_world(run.corpus, run.reference, run.settings)
    for name in run.settings.arms:
        if name not in run.arms:
            run.arms[name] = new_arm(name, world, run.settings, run.team)
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
    if run.team.leads:
        folder.write_rows(run.out / folder.METRICS, run.rows)


def _take_turn(
    run: Run, arm: ArmState, world: World, stopped: Stopped, on_step: Callable[[Row], None]
) -> bool:
    """Trains an arm up to its next checkpoint; returns whether it came there."""
    before, goes_on = len(arm.rows), True
    while len(arm.rows) < run.settings.steps and (goes_on := not stopped()):
        row = train_step(arm, world, run.settings, run.team)
        if run.team.leads:
            folder.append_row(run.out / folder.METRICS, row)
        on_step(row)
        if len(arm.rows) % SAVE_EVERY == 0:
            break
    if len(arm.rows) > before:
        _save_arm(run, arm)
    return goes_on


def _checkpoint(out: Path, name: str) -> Path:
    return out / folder.CHECKPOINTS / f"{name}.pt"


def _save_pretraining(run: Run) -> None:
    state = run.pretraining
    if not run.team.leads:
        return
    folder.save_checkpoint(
        _checkpoint(run.out, _PRETRAIN),
        {
            "version": VERSION,
            "settings": settings_to_json(run.settings),
            "step": state.step,
            "model": state.model.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "generator": state.generator.get_state(),
        },
    )


def _load_pretraining(state: PretrainState, record: dict[str, Any]) -> None:
    state.model.load_state_dict(record["model"])
    state.optimizer.load_state_dict(record["optimizer"])
    state.generator.set_state(record["generator"])
    state.step = record["step"]


def _save_arm(run: Run, arm: ArmState) -> None:
    weights, moments = whole_state(arm.policy, arm.optimizer)
    if not run.team.leads:
        return
    folder.save_checkpoint(
        _checkpoint(run.out, arm.name),
        {
            "version": VERSION,
            "settings": settings_to_json(run.settings),
            "rows": arm.rows,
            "policy": weights,
            "optimizer": moments,
            "generator": arm.generator.get_state(),
            "controller": arm.controller.state_dict(),
            "sampler": None if arm.sampler is None else arm.sampler.state_dict(),
        },
    )


def _load_arm(arm: ArmState, record: dict[str, Any]) -> None:
    load_whole_state(arm.policy, arm.optimizer, record["policy"], record["optimizer"])
    arm.generator.set_state(record["generator"])
    arm.controller.load_state_dict(record["controller"])
    if arm.sampler is not None:
        arm.sampler.load_state_dict(record["sampler"])
    arm.rows.extend(record["rows"])


def _restore(path: Path, settings: Settings, load: Callable[[dict[str, Any]], None]) -> None:
    """Loads one checkpoint; whatever is wrong with it becomes one clear error."""
    try:
        record = folder.load_checkpoint(path)
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']} of a checkpoint, not {VERSION}")
        if record["settings"] != settings_to_json(settings):
            raise ValueError("it belongs to a run with other settings")
        load(record)
    except Exception as error:  # a damaged file can fail in any way
        raise CompareError(_damaged(path, error)) from None


def _damaged(path: Path, error: Exception | str) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"cannot resume: {path} is damaged ({reason}); "
        "begin anew with --force, which keeps the earlier run's files, or in another folder"
    )
