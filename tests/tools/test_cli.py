"""The command lines: usage, exit codes, Ctrl-C, odd encodings and pipes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import klfast
from klfast.__main__ import main as klfast_main
from lab.__main__ import main

ROOT = Path(klfast.__file__).parents[1]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (main, ["compare", "--steps", "many"]),
        (main, []),
        (klfast_main, ["check", "--speed"]),
        (klfast_main, ["compare"]),
    ],
)
def test_an_unknown_word_is_an_error_of_usage(capsys, program, arguments):
    with pytest.raises(SystemExit, match="2"):
        program(arguments)
    assert "error:" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
@pytest.mark.parametrize("module", ["lab", "benchmarks"])
def test_ctrl_c_while_torch_is_imported_is_no_traceback(tmp_path, module):
    (tmp_path / "torch").mkdir()
    # A shell's background jobs ignore SIGINT, and so would this child.
    source = "from signal import *; signal(SIGINT, default_int_handler); raise_signal(SIGINT)"
    (tmp_path / "torch" / "__init__.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", module]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment)
    assert (ended.stdout, ended.stderr) == (b"", b"")
    assert ended.returncode in (130, -signal.SIGINT)  # a shell sees the same


def shell(line, **environment):
    """Exit code of the pipeline's first command, standard output and error."""
    process = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )
    return process.returncode, process.stdout.decode(), process.stderr.decode()


OUTPUTS = {
    "ascii": ("", {"PYTHONIOENCODING": "ascii"}),
    "C-locale": ("", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "read-in-part": ("| head -n 1", {}),
    "all-unread": ("2>&1 | true", {}),
    "all-closed": (">&- 2>&-", {}),
}
COMMANDS = {
    "compare": "lab compare --out out --steps 2 --arms adaptive,stale --pretrain-steps 2 "
    "--no-bench",
    "info": "klfast info",
}


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="pipes of a POSIX shell")
@pytest.mark.parametrize(
    ("name", "output"),
    [
        *(("info", output) for output in OUTPUTS),
        *(("compare", output) for output in ("ascii", "C-locale")),
    ],
)
def test_no_encoding_and_no_pipe_ends_a_command(tmp_path, name, output):
    command, (redirection, environment) = COMMANDS[name], OUTPUTS[output]
    code, _, errors = shell(f"cd {tmp_path}; $PYTHON -m {command} {redirection}", **environment)
    assert code == 0 or (code == 128 + signal.SIGPIPE and "|" in redirection), errors
    assert "Traceback" not in errors
    assert "rror:" not in errors
    if name == "compare":
        assert "Settings" in (tmp_path / "out" / "report.html").read_text()


def test_the_version_is_said_with_its_commit(monkeypatch, capsys):
    monkeypatch.setenv("KLFAST_COMMIT", "abc1234")
    with pytest.raises(SystemExit, match="0"):
        klfast_main(["--version"])
    assert capsys.readouterr().out == f"klfast {klfast.__version__}, commit abc1234\n"
