"""The output folder: one process at a time in it, nobody else's files, no run overwritten."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from experiment import contents, no_pictures

from lab import folder, run
from lab.__main__ import main
from lab.lock import LOCK, locked
from lab.settings import CompareError

pytestmark = pytest.mark.exhaustive

SHORT = ["--steps", "2", "--arms", "none", "--pretrain-steps", "2", "--no-bench"]
LONG = ["--steps", "1000", "--arms", "none", "--pretrain-steps", "2", "--no-bench"]


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Files go to the same places without drawing pictures, which takes seconds."""
    with no_pictures():
        yield


def compare(out, *arguments):
    return main(["compare", *SHORT, "--out", str(out), *arguments])


def fail(text):
    raise AssertionError(text)


def started(out, *arguments):
    """A process that compares, and has made its first step."""
    command = [sys.executable, "-m", "lab", "compare", *LONG, "--out", str(out), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 1):
        assert time.monotonic() < deadline, "no step was recorded"
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run. Not to be changed."""
    out = tmp_path_factory.mktemp("folder") / "finished"
    assert compare(out) == 0
    return out


@pytest.fixture
def copy(finished, tmp_path):
    out = tmp_path / "copy"
    out.mkdir()
    for path, data in contents(finished).items():
        target = out / path.relative_to(finished)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)
    return out


@pytest.mark.long
def test_a_second_process_is_refused_by_name_until_the_first_is_gone(tmp_path, capsys):
    holder = started(tmp_path)
    try:
        for arguments in ([], ["--force"]):
            assert compare(tmp_path, *arguments) == 2
            error = capsys.readouterr().err
            name = rf"process {holder.pid} on {re.escape(socket.gethostname())} since 20\d\d-"
            assert re.search(rf"{re.escape(str(tmp_path))} is in use by {name}", error)
            assert error.count("\n") == 1
        assert main(["compare", "--resume", "--out", str(tmp_path)]) == 2
        assert f"in use by process {holder.pid} " in capsys.readouterr().err
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / LOCK).exists()
    assert compare(tmp_path, "--force") == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert not (tmp_path / LOCK).exists()


def test_a_folder_is_free_again_at_the_end_and_after_an_error(tmp_path):
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError), locked(tmp_path, fail):
            with pytest.raises(CompareError, match="in use"), locked(tmp_path, fail):
                pass
            raise ZeroDivisionError
        assert not any(tmp_path.iterdir())


def count_up(out, counter, times):
    for _ in range(times):
        while True:
            try:
                with locked(out, fail):
                    number = int(counter.read_text())
                    counter.write_text(str(number + 1))
                break
            except CompareError:
                pass


@pytest.mark.exhaustive
@pytest.mark.long
def test_processes_that_contend_hold_the_folder_one_after_the_other(tmp_path):
    out, counter = tmp_path / "out", tmp_path / "counter"
    out.mkdir()
    counter.write_text("0")
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=count_up, args=(out, counter, 300)) for _ in range(3)]
    for process in others:
        process.start()
    for process in others:
        process.join()
        assert process.exitcode == 0
    assert counter.read_text() == "900"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_that_outlives_the_run_does_not_hold_its_folder(tmp_path):
    with locked(tmp_path, fail):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with locked(tmp_path, fail):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, capsys):
    def no_locks(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert compare(tmp_path) == 0
    assert "cannot be locked here: nothing keeps a second run out of it" in capsys.readouterr().out
    assert not (tmp_path / LOCK).exists()


def foreign_settings(out):
    (out / "settings.json").write_text('{"editor": "vi"}')
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "model.pt").write_bytes(b"somebody's weights")


def foreign_list(out):
    (out / "settings.json").write_text("[1]")


def foreign_bytes(out):
    (out / "settings.json").write_bytes(b"\xff\xfe{")


def foreign_checkpoints(out):
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "model.pt").write_bytes(b"somebody's weights")


def foreign_hidden(out):
    (out / ".git").mkdir()


@pytest.mark.parametrize(
    ("put", "named"),
    [
        (foreign_settings, "settings.json"),
        (foreign_list, "settings.json"),
        (foreign_bytes, "settings.json"),
        (foreign_checkpoints, "checkpoints"),
        (foreign_hidden, ".git"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--force"], ["--resume"]], ids=str)
def test_a_folder_that_is_not_klfasts_is_refused_untouched(tmp_path, capsys, put, named, arguments):
    put(tmp_path)
    before, names = contents(tmp_path), sorted(tmp_path.rglob("*"))
    assert main(["compare", "--out", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    if arguments != ["--resume"]:
        assert f"no folder of python -m lab compare, which did not write its {named};" in error
    assert error.count("\n") == 1
    assert contents(tmp_path) == before
    assert sorted(tmp_path.rglob("*")) == names


def test_an_earlier_run_is_refused_untouched_without_force(copy, capsys):
    before = contents(copy)
    assert compare(copy) == 2
    error = capsys.readouterr().err
    assert f"{copy} holds an earlier run: go on with it (--resume)" in error
    assert "(--force)" in error
    assert contents(copy) == before


def test_with_force_an_earlier_run_is_moved_and_the_new_one_takes_its_place(finished, copy, capsys):
    (copy / "notes.txt").write_text("mine")
    for count in (1, 2):
        assert compare(copy, "--force") == 0
        printed = capsys.readouterr().out
        places = sorted((copy / "earlier").iterdir())
        assert len(places) == count
        assert any(f"The earlier run is kept in {place}\n" in printed for place in places)
    kept = [(place / "metrics.jsonl").read_bytes() for place in places]
    assert (finished / "metrics.jsonl").read_bytes() in kept
    assert {path.name for path in places[0].iterdir()} == {p.name for p in finished.iterdir()}
    assert (copy / "notes.txt").read_text() == "mine"


def test_without_its_settings_a_folder_of_a_run_is_refused_untouched(copy, capsys):
    (copy / "settings.json").unlink()
    before = contents(copy)
    for arguments in ([], ["--force"], ["--resume"]):
        assert main(["compare", "--out", str(copy), *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert contents(copy) == before


@pytest.mark.parametrize("left", [["settings.json"], ["settings.json", "metrics.jsonl"]], ids=len)
def test_a_beginning_is_an_earlier_run(copy, capsys, left):
    for path in contents(copy):
        if path.name not in left:
            path.unlink()
    before = contents(copy)
    assert compare(copy) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert contents(copy) == before
    assert main(["compare", "--resume", "--no-bench", "--out", str(copy)]) == 0
    assert not (copy / "earlier").exists()


def test_force_in_an_empty_folder_moves_nothing(tmp_path):
    assert compare(tmp_path, "--force") == 0
    assert not (tmp_path / "earlier").exists()


def test_force_and_resume_exclude_each_other(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare(tmp_path, "--force", "--resume")
    assert "not allowed with" in capsys.readouterr().err


def test_a_run_killed_while_it_was_moved_can_be_moved(copy, monkeypatch):
    """The file of settings goes last, and says to the end that the folder is klfast's."""
    rename = folder.Path.rename

    def killed_at_settings(path, target):
        if path.name == "settings.json":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(folder.Path, "rename", killed_at_settings)
    with pytest.raises(KeyboardInterrupt):
        folder.set_aside(copy)
    monkeypatch.undo()
    assert {path.name for path in copy.iterdir()} == {"settings.json", "earlier"}
    assert compare(copy, "--force") == 0


def test_what_kill_9_leaves_of_a_beginning_is_no_foreign_file(tmp_path):
    for name in (LOCK, ".settings.json.abcdefgh", ".writable.abcdefgh"):
        (tmp_path / name).write_text("process 1 on a host since long ago")
    assert compare(tmp_path) == 0


def test_a_run_of_another_version_is_klfasts(copy):
    record = json.loads((copy / "settings.json").read_text())
    (copy / "settings.json").write_text(json.dumps({**record, "version": run.VERSION - 1}))
    assert compare(copy, "--force") == 0


def test_no_folder_is_no_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        compare("")
    assert "argument --out: must name a folder, got ''" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_folder_that_is_there_may_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare(".") == 0
    assert (tmp_path / "report.html").exists()
