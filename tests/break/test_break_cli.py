"""The command line: bad options, signals, kill -9, damaged folders, an output that goes away."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from experiment import metrics, no_pictures, without_times

from benchmarks.__main__ import main as benchmarks_main
from klfast.__main__ import main as klfast_main
from lab.__main__ import main as lab_main

CATEGORY = "command line"
SHORT = ["--steps", "6", "--pretrain-steps", "2", "--arms", "none,adaptive", "--no-bench"]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")


def whole(case):
    """A case of seconds, which the short form leaves out."""
    return pytest.param(case, marks=pytest.mark.whole)


@pytest.fixture(autouse=True)
def _quick():
    with no_pictures():
        yield


def outcome(*arguments, main=lab_main):
    """(exit code, standard error) of a command in this process."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as exit_:
            code = exit_.code
    return code, errors.getvalue()


NUMBERS = {
    "--target": "target",
    "--low": "low",
    "--high": "high",
    "--init": "init",
    "--horizon": "horizon",
    "--gain": "gain",
    "--clip": "clip",
    "--learning-rate": "learning",
}
COUNTS = {"--steps": "steps", "--pretrain-steps": "pretrain", "--seed": "seed"}
WORDS = {
    "--precision": ("precision", ("", "fp64", "Float32", "64")),
    "--letter": ("letter", ("", "E", "ab", "1", "é", " ")),
    "--arms": ("arm", ("", ",", "fixd", "none,none,x", "NONE")),
}


def bad_options():
    for option, name in NUMBERS.items():
        for value in ("nan", "inf", "-1", "x", "", "0x1"):
            yield [f"{option}={value}"], name
    for option, name in COUNTS.items():
        for value in ("-1", "1.5", "x", "", "nan", str(2**63 + 5)):
            if option == "--seed" or value != str(2**63 + 5):
                yield [f"{option}={value}"], name
    for option, (name, values) in WORDS.items():
        for value in values:
            yield [f"{option}={value}"], name
    yield ["--what"], "what"
    yield ["--resume", "--force"], "force"
    yield ["--resume"], "resume"
    yield ["positional"], "positional"


def test_bad_options_are_refused_and_nothing_is_written(hunt, tmp_path):
    out = tmp_path / "out"
    for options, name in bad_options():
        code, errors = outcome("compare", "--out", out, *options)

        def call(code=code, errors=errors):
            if code == 2:
                raise ValueError(errors)

        hunt.refuses(call, (name, name.replace("-", "_")), options)
        hunt.check(not out.exists(), options)
        hunt.check("Traceback" not in errors, options, got=errors)
        shutil.rmtree(out, ignore_errors=True)
    for main, *arguments in (
        (lab_main, "dance"),
        (lab_main,),
        (benchmarks_main, "--rounds", "x"),
        (benchmarks_main, "--dtypes", "fp7"),
        (klfast_main, "info", "x"),
    ):
        code, errors = outcome(*arguments, main=main)
        hunt.equal(code, 2, arguments)
        hunt.check("error" in errors and "Traceback" not in errors, arguments, got=errors)


def rows(out):
    """The recorded steps without their times."""
    return without_times(metrics(out))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was never interrupted. Not to be changed."""
    out = tmp_path_factory.mktemp("cli") / "finished"
    with no_pictures():
        assert outcome("compare", "--out", out, *SHORT)[0] == 0
    return out


def started(out, at_least, **options):
    command = [sys.executable, "-m", "lab", "compare", "--out", str(out), *SHORT]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options
    )
    records, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if records.exists() and records.read_text().count("\n") >= at_least:
            break
        time.sleep(0.005)
    return process


@pytest.mark.parametrize("steps", [3, *(whole(steps) for steps in (1, 5, 8, 11))])
def test_killed_runs_go_on_to_the_same_metrics(hunt, finished, tmp_path, steps):
    process = started(tmp_path / "out", steps)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, errors = outcome("compare", "--out", tmp_path / "out", "--resume", "--no-bench")
    hunt.equal(code, 0, steps, errors)
    hunt.equal(rows(tmp_path / "out"), rows(finished), steps)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(whole(number) for number in (signal.SIGTERM, signal.SIGHUP))]
)
def test_signals_leave_what_can_be_resumed(hunt, finished, tmp_path, number):
    process = started(tmp_path / "out", 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    hunt.check("Traceback" not in errors, number, got=errors)
    code, errors = outcome("compare", "--out", tmp_path / "out", "--resume", "--no-bench")
    hunt.equal(code, 0, number, errors)
    hunt.equal(rows(tmp_path / "out"), rows(finished), number)


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def empty(path):
    path.write_bytes(b"")


def noise(path):
    path.write_bytes(b"\x80\x02\x00\xff" * 50)


def remove(path):
    path.unlink()


def test_damaged_folders_are_refused_and_left_as_they_are(hunt, finished, tmp_path):
    files = ("settings.json", "checkpoints/pretrain.pt", "checkpoints/none.pt")
    for file in files:
        for damage in (cut, empty, noise, remove):
            if damage is remove and file == "checkpoints/none.pt":
                continue  # an arm that has not begun
            out = tmp_path / f"{damage.__name__} {file.replace('/', ' ')}"
            shutil.copytree(finished, out)
            damage(out / file)
            before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
            code, errors = outcome("compare", "--out", out, "--resume", "--no-bench")
            case = (file, damage.__name__)
            hunt.equal(code, 2, *case, errors)
            hunt.check("Traceback" not in errors and "resume" in errors, *case, got=errors)
            after = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
            hunt.equal(after.keys(), before.keys(), *case)
            hunt.check(after == before, *case)


@pytest.mark.parametrize(
    "line",
    [
        "klfast info | true",
        "klfast info >&-",
        whole("klfast info >&- 2>&-"),
        whole("klfast --help | head -n 1"),
        whole(f"lab compare --out out {' '.join(SHORT)} >&-"),
    ],
)
def test_an_output_that_goes_away_shows_no_traceback(hunt, tmp_path, line):
    process = subprocess.run(
        ["bash", "-c", f"$PYTHON -m {line}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
    )
    statuses = (0, 128 + signal.SIGPIPE) if "|" in line else (0,)
    hunt.check(process.returncode in statuses, line, got=process.stderr.decode())
    hunt.check(b"Traceback" not in process.stderr, line, got=process.stderr)
    if "compare" in line:
        hunt.equal(len(rows(tmp_path / "out")), 12, line)
