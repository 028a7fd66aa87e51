"""The ``compare`` subcommand: its options, and the experiment from beginning to end."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lab import run as runs
from lab.model import count_parameters, one_thread
from lab.reading import answer
from lab.report import read_speed, speed_flags, time_kl_step, write_report
from lab.run import Run
from lab.settings import ARMS, DEFAULT_ARMS, CompareError, Settings, check_settings
from lab.summary import number, summarise
from lab.text import load_corpus
from lab.train import Row

if TYPE_CHECKING:
    from rich.console import Console

HELP = (
    "train a small language model under several KL controllers, compare the KL estimators with "
    "the exact KL, and write a report"
)
DEFAULT_OUT = Path("runs/compare")
EXTRAS = ("rich", "matplotlib", "jinja2")

_FILES = (runs.REPORT, *runs.PICTURES, runs.METRICS)
_DEFAULTS = Settings()
# option, setting, type, help
_OPTIONS = (
    ("--steps", "steps", int, "policy-gradient steps of each arm"),
    ("--seed", "seed", int, "seed of everything random"),
    ("--target", "target", float, "target KL of the controllers, in nats per sequence"),
    ("--letter", "letter", str, "the letter whose share of the text is the reward"),
    ("--low", "low_coef", float, "coefficient of the arm fixed-low"),
    ("--high", "high_coef", float, "coefficient of the arm fixed-high"),
    ("--init", "init_coef", float, "first coefficient of the controllers"),
    ("--horizon", "horizon", float, "horizon of the adaptive controller, in sequences"),
    ("--gain", "gain", float, "gain of the exponential controller per step"),
    ("--clip", "clip", float, "log-ratio clip of the penalty in nats, 0 for none"),
    ("--staleness", "staleness", int, "steps between two updates of the stale sampler's weights"),
    ("--correction", "correction", str, "preset of klfast.rollout_correction in the arm corrected"),
    ("--learning-rate", "learning_rate", float, "learning rate of the policy"),
    ("--precision", "precision", str, "dtype of weights and arithmetic, float32 or float64"),
    ("--pretrain-steps", "pretrain_steps", int, "language-model steps of the reference's training"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, name, kind, text in _OPTIONS:
        parser.add_argument(
            option,
            dest=name,
            type=kind,
            default=argparse.SUPPRESS,
            help=f"{text} (default {getattr(_DEFAULTS, name)})",
        )
    parser.add_argument(
        "--arms",
        type=lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
        default=argparse.SUPPRESS,
        metavar="A,B,...",
        help=f"arms to run: some of {', '.join(ARMS)} (default {','.join(DEFAULT_ARMS)})",
    )
    parser.add_argument(
        "--out",
        type=_folder,
        default=DEFAULT_OUT,
        help=f"output folder, for {', '.join(_FILES)} (default {DEFAULT_OUT})",
    )
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume", action="store_true", help="continue the interrupted run in the output folder"
    )
    earlier.add_argument(
        "--force",
        action="store_true",
        help="run in the folder of an earlier run, whose files are moved to its "
        f"{runs.EARLIER}/<date>; without this the folder is refused",
    )
    parser.add_argument(
        "--no-bench",
        dest="bench",
        action="store_false",
        help="leave out the speed table at the end",
    )


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must name a folder, got ''")
    return Path(text)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if finished, 130 if interrupted (with a report), 2 on a mistake (see stderr)."""
    given = vars(arguments)
    known = {name for _, name, _, _ in _OPTIONS} | {"arms"}
    chosen = {name: value for name, value in given.items() if name in known}
    rest = {name: given[name] for name in ("out", "resume", "force", "bench")}
    try:
        return 0 if compare(Options(chosen, **rest)) else 130
    except (CompareError, OSError) as error:
        print(f"python -m lab compare: error: {error}", file=sys.stderr)
        return 2


@dataclass(frozen=True)
class Options:
    """The command's request. ``chosen`` holds the settings that were given on the command line."""

    chosen: dict[str, Any]
    out: Path
    resume: bool = False
    force: bool = False
    bench: bool = True


def compare(options: Options) -> bool:
    """Runs the experiment and writes its report; False if it was interrupted.

    Raises:
        CompareError: the user has to change something. Nothing has been computed then, and the
            files of an earlier run are unchanged.
    """
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise CompareError(f"the experiment needs {', '.join(missing)}: pip install 'klfast[demo]'")
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    experiment = _resume(options, console) if options.resume else _start(options, console)
    settings = experiment.settings
    console.print(
        f"Pretraining a GPT of {count_parameters(experiment.pretraining.model):,} parameters "
        f"for {settings.pretrain_steps} steps. It is the reference of {len(settings.arms)} "
        f"arms of {settings.steps} steps, {runs.workers(experiment)} of which train at a time. "
        f"The results go to {experiment.out}."
    )
    try:
        _compute(experiment, console)
        found = answer(summarise(experiment.rows, settings), settings)
        console.print(found.line, style="bold", soft_wrap=False)
        for note in found.notes:
            console.print(f"- {note}", soft_wrap=False)
        finished = experiment.finished
        if not finished:
            console.print("Interrupted. Everything done so far is saved; go on with --resume.")
        elif options.bench:
            finished = _add_speed(experiment, console)
    finally:
        report = write_report(experiment)
    console.print(f"Report: {report}")
    console.print(f"Open it in a browser: {report.resolve().as_uri()}")
    return finished


def _start(options: Options, console: Console) -> Run:
    settings, out = Settings(**options.chosen), options.out
    check_settings(settings)
    runs.check_writable(out)
    if options.force:
        if (earlier := runs.set_aside(out)) is not None:
            console.print(f"The earlier run is kept in {earlier}")
    elif there := runs.files_of(out):
        raise CompareError(
            f"{out} has {there[0].name} of an earlier run: go on with it (--resume), move it to "
            f"{out / runs.EARLIER} and begin anew (--force), or choose another folder"
        )
    return runs.start(settings, load_corpus(), out)


def _resume(options: Options, console: Console) -> Run:
    record = runs.stored(options.out)
    runs.check_writable(options.out)
    settings, before = record["settings"], record["environment"]
    for name, value in options.chosen.items():
        if value != getattr(settings, name):
            raise CompareError(
                f"cannot resume with another {name}: "
                f"the run in {options.out} has {getattr(settings, name)!r}, got {value!r}"
            )
    corpus = load_corpus()
    now = runs.environment(corpus)
    if before.get("text") != now["text"]:
        raise CompareError(
            f"cannot resume: this Python's text ({now['python']}) is not the one that the run in "
            f"{options.out} began with ({before.get('python')})"
        )
    changed = [f"{k} was {before.get(k)} and is {now[k]}" for k in now if before.get(k) != now[k]]
    if changed:
        what = ", ".join(changed)
        console.print(f"Resuming in another environment, so the last digits may differ: {what}.")
    return runs.resume(settings, corpus, options.out)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that a step is finished. A second one interrupts."""
    seen = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        if seen.is_set():
            raise KeyboardInterrupt
        seen.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _compute(experiment: Run, console: Console) -> None:
    with one_thread(), interruptible() as stopped, _progress(experiment, console) as say:

        def trained(row: Row) -> None:
            text = (
                f"KL {number(row['kl_per_sequence_k3'])}, "
                f"exact {number(row['kl_per_sequence_exact'])}, "
                f"coef {number(row['coefficient'])}, reward {row['reward']:.0%}"
            )
            say(row["arm"], row["step"], text)

        runs.pretrain(
            experiment, stopped, lambda step, loss: say("pretraining", step, f"loss {loss:.2f}")
        )
        if experiment.pretrained:
            runs.train(experiment, stopped, trained)


@contextmanager
def _progress(experiment: Run, console: Console) -> Iterator[Callable[[str, int, str], None]]:
    """Shows a bar for the pretraining and for each arm.

    Without a terminal it prints every tenth step of an arm and every hundredth of the pretraining.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    settings = experiment.settings
    totals = {"pretraining": settings.pretrain_steps}
    totals |= dict.fromkeys(settings.arms, settings.steps)
    done = {name: len(arm.rows) for name, arm in experiment.arms.items()}
    done["pretraining"] = experiment.pretraining.step
    columns = ("{task.description}", BarColumn(bar_width=6), "{task.percentage:3.0f}%")
    rest = (TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, *rest, console=console, disable=not console.is_terminal) as progress:
        tasks = {
            name: progress.add_task(name, total=total, completed=done.get(name, 0), note="")
            for name, total in totals.items()
        }

        def say(name: str, step: int, note: str) -> None:
            progress.update(tasks[name], completed=step, note=note)
            every = runs.PRETRAIN_SAVE_EVERY if name == "pretraining" else runs.SAVE_EVERY
            if progress.disable and (step % every in (0, 1) or step == totals[name]):
                console.print(f"{name}: step {step} of {totals[name]}, {note}")

        yield say


def _add_speed(experiment: Run, console: Console) -> bool:
    """Times the KL step for the report, and prints the table. Returns False if interrupted.

    A run that was timed before keeps its table.
    """
    from rich import box
    from rich.table import Table

    settings = experiment.settings
    speed = read_speed(experiment.out)
    if speed is None:
        console.print("Timing the KL step against eager PyTorch, for some 10 s ...")
        try:
            speed = time_kl_step((settings.batch, settings.continuation_length))
        except KeyboardInterrupt:
            console.print("Interrupted: the report is complete but for the speed table.")
            return False
        runs.write_json(experiment.out / runs.SPEED, speed)
    table = Table(title="Speed of the KL step", title_justify="left", box=box.SIMPLE)
    table.add_column("case", min_width=len("forward+backward"))
    table.add_column("implementation", no_wrap=True)
    for heading in ("median ms", "min ms", "ratio", "flags"):
        table.add_column(heading, justify="right")
    for row in speed:
        numbers = (number(row[key]) for key in ("median_ms", "min_ms", "ratio"))
        table.add_row(str(row["case"]), str(row["impl"]), *numbers, speed_flags(row))
    console.print(table, soft_wrap=False)
    return True
