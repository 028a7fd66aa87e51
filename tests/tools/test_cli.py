"""The command line: options, one clear error each, exit codes, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from refusals import POSITIVE

import klfast
from klfast.__main__ import main as klfast_main
from lab import run
from lab.__main__ import main
from lab.text import load_corpus

ROOT = Path(klfast.__file__).parents[1]
SHORT = ["--steps", "2", "--arms", "adaptive", "--pretrain-steps", "2", "--no-bench"]


def test_compare_writes_a_report_and_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    out = tmp_path / "new" / "folder"
    assert main(["compare", *SHORT, "--seed", "3", "--target", "2.5", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Pretraining a GPT of ")
    assert re.search(r"^adaptive: step 1 of \d+, KL 0, exact 0, coef 0\.03, reward", printed, re.M)
    page = out / "report.html"
    assert printed.endswith(f"Report: {page}\nOpen it in a browser: {page.as_uri()}\n")
    settings = json.loads((out / "settings.json").read_text())["settings"]
    assert (settings["seed"], settings["target"], settings["arms"]) == (3, 2.5, ["adaptive"])
    names = {path.name for path in out.iterdir()}
    pictures = {"curves.png", "estimators.png", "frontier.png"}
    assert names == {"settings.json", "metrics.jsonl", "report.html", "checkpoints"} | pictures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "adaptive,fixd"], "unknown arm 'fixd'; expected one of 'none', 'fixed-low'"),
        (["--arms", ","], "no arm given"),
        (["--steps", "0"], "steps must be a whole number >= 1, got 0"),
        (
            ["--seed", str(2**63)],
            "seed must be a whole number <= 9223372036854775807, got 9223372036854775808",
        ),
        (["--target", "nan"], f"target {POSITIVE}, got nan"),
        (["--target", "-1"], f"target {POSITIVE}, got -1.0"),
        (["--horizon", "0"], f"horizon {POSITIVE}, got 0.0"),
        (["--letter", "E!"], "letter must be one of 'a' to 'z', got 'E!'"),
        (["--resume"], "nothing to resume: there is no"),
    ],
)
def test_a_mistake_is_one_clear_line_and_nothing_is_written(tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    assert main(["compare", "--out", str(out), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m lab compare: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (main, ["compare", "--steps", "many"]),
        (main, ["compare", "--speed", "1"]),
        (main, ["dance"]),
        (main, []),
        *((klfast_main, [moved]) for moved in ("bench", "compare", "study")),
    ],
)
def test_an_unknown_word_is_an_error_of_usage(capsys, program, arguments):
    with pytest.raises(SystemExit, match="2"):
        program(arguments)
    assert "error:" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    assert main(["compare", *SHORT, "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot write to the output folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_leaves_a_valid_partial_report_that_can_be_resumed(tmp_path):
    command = [sys.executable, "-m", "lab", "compare", "--steps", "1000", "--arms"]
    command += ["none,adaptive", "--pretrain-steps", "2", "--no-bench", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline, "no step was recorded"
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""
    assert "go on with --resume" in printed
    assert "not finished" in (tmp_path / "report.html").read_text()
    settings = run.stored(tmp_path)["settings"]
    resumed = run.resume(settings, load_corpus(), tmp_path)
    assert resumed.rows == [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(resumed.rows) >= 2


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
@pytest.mark.parametrize("program", ["lab", "benchmarks"])
def test_ctrl_c_while_torch_is_imported_is_no_traceback(tmp_path, program):
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", program, "info"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert (ended.stdout, ended.stderr) == ("", "")
    assert ended.returncode in (130, -signal.SIGINT)  # to a shell the same


def test_ctrl_c_while_commands_are_imported_is_no_traceback(monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("klfast.cli.importlib.import_module", interrupt)
    assert klfast_main(["info"]) == 130


OUTPUTS = {
    "latin-1": ("", {"PYTHONIOENCODING": "latin-1"}),
    "C-locale": ("", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "read-in-part": ("| head -n 1", {}),
    "unread": ("2>&1 | true", {}),
    "closed": (">&- 2>&-", {}),
}
COMMANDS = {
    "compare": "lab compare --out out " + " ".join(SHORT),
    "bench": "benchmarks --quick --no-compile --rounds 1 --dtypes fp32 --ops forward "
    "--out bench.json --allow-load",
    "info": "klfast info",
}


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="pipes of a POSIX shell")
@pytest.mark.parametrize(
    ("name", "output"),
    [
        *(("info", output) for output in OUTPUTS),
        ("bench", "latin-1"),
        ("compare", "closed"),
        ("compare", "C-locale"),
    ],
)
def test_no_encoding_and_no_pipe_ends_a_command(tmp_path, name, output):
    redirection, environment = OUTPUTS[output]
    line = f"$PYTHON -m {COMMANDS[name]} {redirection}; exit ${{PIPESTATUS[0]}}"
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    ended = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, timeout=120, env=environment
    )
    errors = ended.stderr.decode()
    assert ended.returncode == 0 or (
        ended.returncode == 128 + signal.SIGPIPE and "|" in redirection
    ), errors
    assert "rror:" not in errors
    if name == "compare":
        assert "Settings" in (tmp_path / "out" / "report.html").read_text()
    if name == "bench":
        assert json.loads((tmp_path / "bench.json").read_text())["rows"]


def test_the_version_is_said_with_its_commit(monkeypatch, capsys):
    monkeypatch.setenv("KLFAST_COMMIT", "abc1234")
    with pytest.raises(SystemExit, match="0"):
        klfast_main(["--version"])
    assert capsys.readouterr().out == f"klfast {klfast.__version__}, commit abc1234\n"
