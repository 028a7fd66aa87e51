"""The experiment from beginning to end: prepare, pretrain, run the arms, report, time."""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lab import folder, run
from lab.accuracy import measure, read_accuracy
from lab.answer import answer, reading
from lab.cores import one_thread
from lab.lock import locked
from lab.model import count_parameters
from lab.pictures import draw_pictures
from lab.report import ReportData, SpeedRow, render_report
from lab.run import Run
from lab.samples import sample_texts
from lab.settings import CompareError, Settings, check_settings
from lab.summary import read_drift, summarise, summarise_drift
from lab.team import TIMEOUT, Team, assembled
from lab.text import Corpus, load_corpus, prompt_starts

if TYPE_CHECKING:
    from rich.console import Console

EXTRAS = ("rich", "matplotlib", "jinja2")


@dataclass(frozen=True)
class Options:
    """The command's request; ``chosen`` holds the settings that are not left at their defaults."""

    chosen: dict[str, object]
    out: Path
    resume: bool = False
    force: bool = False
    bench: bool = True
    parallel: str | None = None
    timeout: float = TIMEOUT


def check_extras() -> None:
    """Raises :class:`CompareError` if the packages that only the experiment needs are missing."""
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise CompareError(f"the experiment needs {', '.join(missing)}: pip install 'klfast[demo]'")


def compare(options: Options, stop: Callable[[], bool] | None = None) -> bool:
    """Runs the experiment and writes its report; False if it was interrupted (also by ``stop``).

    Raises:
        CompareError: something the user can mend is wrong, or another process holds the folder.
            Nothing has then been computed, and no file of an earlier run has been touched.
    """
    check_extras()
    with assembled(options.parallel, options.timeout) as team:
        return _compare(options, stop, team)


def _compare(options: Options, stop: Callable[[], bool] | None, team: Team) -> bool:
    from rich.console import Console

    console = Console(quiet=not team.leads)
    with ExitStack() as held:

        def take_folder() -> None:
            team.check(_check(options))
            folder.check_writable(options.out)
            held.enter_context(locked(options.out, partial(_print_line, console)))
            folder.remove_temporary(options.out)
            if not options.resume:
                _make_room(options, console)

        team.agree(take_folder)
        return _run(_begin(options, console, team), options, stop, console)


def _run(
    experiment: Run, options: Options, stop: Callable[[], bool] | None, console: Console
) -> bool:
    """Computes, and writes a report. A single process writes it even after an error.

    With ranks, an error may leave the others waiting, so that no report can be written.
    """
    leaves_report = experiment.team.group is None
    _print_plan(experiment, console)
    try:
        _compute(experiment, stop, console)
        leaves_report = experiment.team.leads
        finished = experiment.finished
        if leaves_report:
            _print_result(experiment, console)
            if not finished:
                text = "Interrupted. Everything done so far is saved; go on with --resume."
                _print_line(console, text)
            elif options.bench:
                finished = _add_speed(experiment, console)
    finally:
        if leaves_report:
            report = write_report(experiment)
    if leaves_report:
        _print_line(console, f"Report: {report}")
        _print_line(console, f"Open it in a browser: {report.resolve().as_uri()}")
    return finished


def _print_plan(experiment: Run, console: Console) -> None:
    settings = experiment.settings
    _print_line(
        console,
        f"Pretraining a GPT of {count_parameters(experiment.pretraining.model):,} parameters for "
        f"{settings.pretrain_steps} steps. It is the reference of {len(settings.arms)} arms of "
        f"{settings.steps} steps, {run.workers(experiment)} of which train at a time. The results "
        f"go to {experiment.out}.",
    )


def _print_line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)


def _check(options: Options) -> Settings:
    """The run's settings; checks what can be wrong before the folder is touched."""
    if options.resume:
        return run.stored_settings(options.out)[0]
    settings = Settings(**options.chosen)  # type: ignore[arg-type]  # checked by value below
    check_settings(settings)
    check_text(load_corpus(), settings)
    folder.check_ours(options.out)
    return settings


def _make_room(options: Options, console: Console) -> None:
    if not options.force:
        folder.check_no_run(options.out)
    elif (earlier := folder.set_aside(options.out)) is not None:
        _print_line(console, f"The earlier run is kept in {earlier}")


def _begin(options: Options, console: Console, team: Team) -> Run:
    if options.resume:
        return _resume(options, console, team)
    settings = Settings(**options.chosen)  # type: ignore[arg-type]  # checked by the leading rank
    return run.start(settings, load_corpus(), options.out, team)


def _resume(options: Options, console: Console, team: Team) -> Run:
    settings, environment = run.stored_settings(options.out)
    for name, value in options.chosen.items():
        stored = getattr(settings, name)
        if value != stored:
            raise CompareError(
                f"cannot resume with another {name}: "
                f"the run in {options.out} has {stored!r}, got {value!r}"
            )
    corpus = load_corpus()
    now = run.environment(corpus)
    if environment.get("text") != now["text"]:
        raise CompareError(
            f"cannot resume: this Python's text ({now['python']}) is not the one that the run in "
            f"{options.out} began with ({environment.get('python')})"
        )
    changed = [key for key in now if environment.get(key) != now[key]]
    if changed:
        what = ", ".join(f"{key} was {environment.get(key)} and is {now[key]}" for key in changed)
        console.print(f"Resuming in another environment, so the last digits may differ: {what}.")
    return run.resume(settings, corpus, options.out, team)


def check_text(corpus: Corpus, settings: Settings) -> None:
    """The text must be long enough for the windows and prompts that the settings ask for."""
    for part in (corpus.train, corpus.held_out):
        if len(part) <= settings.context or not len(
            prompt_starts(corpus, part, settings.prompt_length)
        ):
            raise CompareError(
                f"the text is too short for prompts of {settings.prompt_length} and "
                f"continuations of {settings.continuation_length} tokens"
            )


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that each step is whole; a second one breaks off."""
    seen = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        if seen.is_set():
            raise KeyboardInterrupt
        seen.set()

    if threading.current_thread() is not threading.main_thread():
        yield seen.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _compute(experiment: Run, stop: Callable[[], bool] | None, console: Console) -> None:
    from lab.terminal import progress_bars

    bars_shown = progress_bars(console, experiment.settings)
    with one_thread(), interruptible() as interrupted, bars_shown as bars:

        def stopped() -> bool:
            return experiment.team.any(interrupted() or (stop is not None and stop()))

        bars.show(experiment.pretraining.step, experiment.rows)
        run.pretrain(experiment, stopped, bars.pretrained)
        if experiment.pretrained:
            run.train(experiment, stopped, bars.trained)
    if experiment.team.group is not None:
        run.unshard(experiment)


@one_thread()
def write_report(experiment: Run) -> Path:
    """Draws the pictures and writes the report; returns its path."""
    settings, rows, out = experiment.settings, experiment.rows, experiment.out
    summaries, bins = summarise(rows, settings), measure(rows)
    pictures = draw_pictures(rows, summaries, bins, settings)
    for name, picture in pictures.items():
        folder.write_atomic(out / name, picture.png)
    data = ReportData(
        settings=settings,
        beginning=run.beginning(out),
        environment=run.environment(experiment.corpus),
        written=run.now(),
        parameters=count_parameters(experiment.pretraining.model),
        summaries=summaries,
        bins=bins,
        pictures=pictures,
        drifts=summarise_drift(rows, settings),
        samples=sample_texts(experiment),
        speed=folder.read_json(out / folder.SPEED) or [],
    )
    path = out / folder.REPORT
    folder.write_atomic(path, render_report(data))
    return path


def _print_result(experiment: Run, console: Console) -> None:
    from lab.terminal import print_answer, print_summary

    summaries = summarise(experiment.rows, experiment.settings)
    print_answer(console, answer(summaries, experiment.settings))
    if summaries:
        print_summary(console, summaries, experiment.settings)
    for sentence in reading(summaries, experiment.settings):
        console.print(f"- {sentence}", highlight=False)
    console.print(f"The estimators against the exact KL ({folder.ESTIMATORS}):", highlight=False)
    for sentence in read_accuracy(measure(experiment.rows)):
        console.print(f"- {sentence}", highlight=False)
    if drifts := summarise_drift(experiment.rows, experiment.settings):
        console.print(f"A sampler that is not the policy ({folder.SAMPLER}):", highlight=False)
    for sentence in read_drift(drifts, experiment.settings):
        console.print(f"- {sentence}", highlight=False)


def _add_speed(experiment: Run, console: Console) -> bool:
    """Times the KL step and adds the table to the report; False if that was interrupted.

    A run that was timed before keeps its table.
    """
    from benchmarks.kl_step import time_kl_step
    from lab.terminal import print_speed

    path, settings = experiment.out / folder.SPEED, experiment.settings
    speed: list[SpeedRow] | None = folder.read_json(path)
    if speed is None:
        _print_line(console, "Timing the KL step against eager PyTorch, for some 10 s ...")
        try:
            speed = time_kl_step((settings.batch, settings.continuation_length))
        except KeyboardInterrupt:
            _print_line(console, "Interrupted: the report is complete but for the speed table.")
            return False
        folder.write_json(path, speed)
    print_speed(console, speed)
    return True
