"""``kill -9`` at any moment of the experiment: ``--resume`` ends with an undisturbed run's metrics.

Processes are forked from one that has imported everything, so that a kill falls into the run.
"""

import contextlib
import io
import os
import random
import signal
import time

import pytest
import torch
from experiment import TINY, metrics, no_pictures, without_times

from lab import folder, run
from lab.compare import Options, compare

KILLS = 20
ARMS = ("none", "adaptive", "nupi")
SETTINGS = {**TINY, "steps": 12, "arms": ARMS, "pretrain_steps": 9}
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Pictures without drawing, and checkpoints often enough to be caught."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads does not live on in a fork
    with no_pictures() as patch:
        patch.setattr(run, "SAVE_EVERY", 3)
        patch.setattr(run, "PRETRAIN_SAVE_EVERY", 3)
        yield
    torch.set_num_threads(threads)


def forked(out):
    """The process of a run in ``out``, which goes on with what is there."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            begun = (out / folder.SETTINGS).exists()
            options = Options({} if begun else SETTINGS, out, resume=begun, bench=False)
            code = 0 if compare(options) else 1
    finally:
        os._exit(code)  # and never into pytest


def ended(process):
    """The exit code, negative for the number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def rows(out):
    return without_times(metrics(out))


def saved(out):
    """How far the checkpoints are, and what else is there."""
    names = sorted(path.name for path in out.rglob("*.pt"))
    return tuple(names), (out / folder.REPORT).exists()


@pytest.mark.long
@pytest.mark.exhaustive
def test_runs_killed_at_twenty_random_moments_end_with_an_undisturbed_runs_metrics(tmp_path):
    rng = random.Random(0)
    assert compare(Options(SETTINGS, tmp_path / "whole", bench=False))  # here, for its imports
    expected = rows(tmp_path / "whole")
    began = time.monotonic()
    assert ended(forked(tmp_path / "0")) == 0
    duration = time.monotonic() - began
    assert rows(tmp_path / "0") == expected
    assert len(expected) == len(ARMS) * SETTINGS["steps"]

    kills, seen, folders = 0, set(), 0
    while kills < KILLS:
        folders += 1
        assert folders <= KILLS
        out = tmp_path / str(folders)
        while True:
            process = forked(out)
            if kills < KILLS:
                time.sleep(rng.uniform(0, 0.6 * duration))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            code = ended(process)
            if code == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
            seen.add(saved(out) if out.exists() else None)
        assert rows(out) == expected
        for name in ARMS:
            states = [
                torch.load(place / folder.CHECKPOINTS / f"{name}.pt", weights_only=True)
                for place in (out, tmp_path / "whole")
            ]
            assert states[0]["controller"] == states[1]["controller"]
            pairs = zip(states[0]["policy"].values(), states[1]["policy"].values(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
        assert not list(out.rglob(".*"))  # nothing half written, and no lock
    assert len(seen) > 2, "the kills fell into one part of the run"


def test_what_a_killed_process_had_begun_to_write_is_removed(tmp_path):
    (tmp_path / folder.CHECKPOINTS).mkdir()
    begun = [".metrics.jsonl.ab12", ".report.html.x", ".writable.x", "checkpoints/.none.pt.q"]
    kept = ["metrics.jsonl", ".notes", "checkpoints/none.pt"]
    for name in (*begun, *kept):
        (tmp_path / name).write_text("x")
    folder.remove_temporary(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(kept)


def test_a_name_is_on_the_disk_before_a_write_returns(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*given, name=name, real=real):
            where = os.readlink(f"/proc/self/fd/{given[0]}") if name == "fsync" else given[1]
            done.append((name, str(where)))
            return real(*given)

        monkeypatch.setattr(folder.os, name, noted)
    folder.write_atomic(tmp_path / "state", b"new")
    (first, temporary), second, third = done
    assert (first, second) == ("fsync", ("replace", str(tmp_path / "state")))
    assert temporary.startswith(f"{tmp_path}/.state.")
    assert third == ("fsync", str(tmp_path))
