"""The experiment under torchrun: DDP and FSDP2 draw the curves of one process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from experiment import metrics

from klfast.stats import KLStats
from lab import compare as compare_module
from lab import folder, train
from lab.__main__ import main
from lab.compare import Options, compare
from lab.settings import CompareError
from lab.team import ALONE, Team, assembled
from lab.text import load_corpus

exhaustive = pytest.mark.exhaustive

pytestmark = pytest.mark.exhaustive

ARMS = ("fixed-high", "nupi", "corrected")
# float64: Adam makes a whole step of what the order of a sum leaves of a gradient that cancels.
SETTINGS = {"precision": "float64", "steps": 5, "pretrain_steps": 4, "arms": ARMS, "prompts": 5}
SETTINGS |= {"staleness": 2}
SMALL = {"layers": 1, "width": 16, "heads": 2, "held_out_windows": 4, "continuation_length": 8}

LAUNCHED = """
import json, os, signal, sys, time
from pathlib import Path
from lab import compare as module, run
from lab.compare import Options, compare

module.draw_pictures = lambda *of: {}
chosen, out, resume, parallel, timeout, checks, end = json.loads(sys.argv[1])
chosen |= {"arms": tuple(chosen["arms"])} if chosen else {}
run.SAVE_EVERY = 2
left = iter(range(checks))

def stop():
    if next(left, None) is not None:
        return False
    if end is None:
        return True
    if os.environ["RANK"] != "1":
        return False
    if end == "hangs":
        time.sleep(timeout + 10)
    os.kill(os.getpid(), signal.SIGKILL)

options = Options(
    chosen, Path(out), resume=resume, bench=False, parallel=parallel, timeout=timeout
)
compare(options, stop=stop)
if sys.platform == "linux" and parallel != "fsdp2":  # whose meshes torch keeps
    threads = Path("/proc/self/task").glob("*/comm")
    assert not [name for name in map(Path.read_text, threads) if "gloo" in name]
"""


def program(out, parallel="ddp", resume=False, timeout=120, checks=1000, end=None):
    """The command of a rank, which stops after ``checks`` steps, or of which rank 1 then ends."""
    path = out.parent / "launched.py"
    path.write_text(LAUNCHED)
    chosen = {} if resume else {**SETTINGS, **SMALL}
    return [str(path), json.dumps([chosen, str(out), resume, parallel, timeout, checks, end])]


def torchrun(ranks, command):
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks)),
            *command,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def launch(out, ranks, *of, **options):
    """A run of the experiment on so many processes."""
    finished = torchrun(ranks, program(out, *of, **options))
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def without_an_agent(ranks, command):
    """The ranks that torchrun would start, which nothing ends: (exit code, stderr) of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def assert_the_same_curves(found, expected):
    assert [(row["arm"], row["step"]) for row in found] == [
        (row["arm"], row["step"]) for row in expected
    ]
    for mine, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            if isinstance(value, (int, float)) and not key.endswith("_seconds"):
                assert mine[key] == pytest.approx(value, rel=1e-8, abs=1e-10), (key, mine["step"])
        assert mine["by_length"]["sequences"] == theirs["by_length"]["sequences"]
        drift = theirs.get("rollout", {})
        assert mine.get("rollout", {}) == pytest.approx(drift, rel=1e-8, abs=1e-10)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of one process's run."""
    out = tmp_path_factory.mktemp("torchrun") / "alone"
    assert compare(Options({**SETTINGS, **SMALL}, out, bench=False))
    return out


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [("ddp", 2), *(pytest.param(*other, marks=exhaustive) for other in [("fsdp2", 2), ("ddp", 3)])],
)
def test_several_processes_draw_one_process_s_curves(alone, tmp_path, parallel, ranks):
    printed = launch(tmp_path / "out", ranks, parallel)
    assert_the_same_curves(metrics(tmp_path / "out"), metrics(alone))
    assert len({row["coefficient"] for row in metrics(alone)}) > 3
    assert printed.count("Report:") == 1
    for name in ARMS:
        whole, found = (
            torch.load(out / folder.CHECKPOINTS / f"{name}.pt", weights_only=True)
            for out in (alone, tmp_path / "out")
        )
        assert found["controller"]["value"] == pytest.approx(whole["controller"]["value"], rel=1e-9)
        for key, weight in whole["policy"].items():
            torch.testing.assert_close(found["policy"][key], weight, rtol=1e-6, atol=1e-9)


@pytest.mark.long
@exhaustive
def test_a_run_goes_on_under_another_number_of_ranks_and_another_strategy(alone, tmp_path):
    out = tmp_path / "out"
    launch(out, 2, "fsdp2", checks=8)  # 4 steps of pretraining, 2 of an arm, 2 of the next
    assert len(metrics(out)) == 4
    launch(out, 1, "ddp", resume=True, checks=2)
    assert len(metrics(out)) == 6
    assert compare(Options({}, out, resume=True, bench=False))
    assert_the_same_curves(metrics(out), metrics(alone))


@pytest.mark.long
def test_an_error_of_the_first_rank_ends_all_with_one_sentence(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    finished = torchrun(2, ["-m", "lab", "compare", "--out", str(out)])
    assert finished.returncode != 0
    assert finished.stderr.count("python -m lab compare: error:") == 1
    assert "did not write its notes.txt" in finished.stderr
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


TIMEOUT = 15


@pytest.mark.long
@exhaustive
@pytest.mark.parametrize(
    ("parallel", "end"), [("ddp", "dies"), ("fsdp2", "dies"), ("ddp", "hangs")]
)
def test_without_a_rank_the_other_raises_and_the_run_goes_on_from_its_checkpoint(
    alone, tmp_path, parallel, end
):
    """In the second arm's second step, whose first one is recorded and in no checkpoint."""
    out = tmp_path / "out"
    (code, said), (of_the_end, _) = without_an_agent(
        2, program(out, parallel, timeout=TIMEOUT, checks=7, end=end)
    )
    assert of_the_end == -signal.SIGKILL
    assert code == 1
    assert "RuntimeError" in said
    assert ("Timed out" if end == "hangs" else "Connection") in said
    assert len(metrics(out)) == 3
    checkpoint = torch.load(out / folder.CHECKPOINTS / f"{ARMS[0]}.pt", weights_only=True)
    assert len(checkpoint["rows"]) == 2
    assert not (out / folder.CHECKPOINTS / f"{ARMS[1]}.pt").exists()
    assert compare(Options({}, out, resume=True, bench=False))
    assert_the_same_curves(metrics(out), metrics(alone))
    assert not list(out.rglob(".*"))  # nothing half written, and no lock


@pytest.mark.long
@exhaustive
def test_torchrun_ends_with_its_dead_rank_and_goes_on_with_three(alone, tmp_path):
    out = tmp_path / "out"
    finished = torchrun(2, program(out, checks=7, end="dies"))
    assert finished.returncode != 0
    assert "Signal 9 (SIGKILL)" in finished.stderr
    launch(out, 3, resume=True)
    assert_the_same_curves(metrics(out), metrics(alone))


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds(tmp_path, timeout):
    with pytest.raises(CompareError, match="timeout must be a number of seconds > 0 and <= 1e"):
        compare(Options({}, tmp_path / "out", timeout=timeout))
    assert not (tmp_path / "out").exists()


def test_without_torchrun_there_is_nothing_to_be_parallel(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(CompareError, match="--parallel fsdp2 needs several processes: torchrun"):
        compare(Options({}, tmp_path / "out", parallel="fsdp2"))
    assert not (tmp_path / "out").exists()
    with assembled(None) as team:
        assert team is ALONE


def test_a_mistake_that_one_rank_alone_finds_is_said_by_it(tmp_path, monkeypatch, capsys):
    """A folder that is not shared, say: only the first rank has the run."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert main(["compare", "--resume", "--out", str(tmp_path)]) == 2
    assert "python -m lab compare: error on rank 1: nothing to resume" in capsys.readouterr().err


def test_more_processes_than_prompts_are_refused(tmp_path, monkeypatch):
    team = Team()
    team.size = 6
    monkeypatch.setattr(compare_module, "assembled", lambda *of: contextlib.nullcontext(team))
    with pytest.raises(CompareError, match="with 5 prompts needs at most as many processes, got 6"):
        compare(Options({"prompts": 5}, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("size", "count"), [(1, 10), (2, 10), (3, 10), (4, 3)])
def test_shares_are_all_of_the_batch(size, count):
    rows = []
    for rank in range(size):
        team = Team()
        team.rank, team.size = rank, size
        share = team.share(count, each=4)
        assert share.total == 4 * count
        rows += range(share.total)[share.rows]
    assert rows == list(range(4 * count))


def test_a_shares_samples_are_those_of_the_whole_batch():
    corpus = load_corpus()
    settings = train.Settings(**{**SMALL, "prompts": 4, "group": 2, "pretrain_steps": 1})
    from lab.pretrain import new_pretraining

    world = train.build_world(corpus, new_pretraining(corpus, settings).model, settings)
    whole = train.sample_batch(train.new_arm("none", world, settings), world, settings)
    team = Team()
    team.rank, team.size = 1, 2
    part = train.sample_batch(
        train.new_arm("none", world, settings), world, settings, team.share(4, each=2)
    )
    assert torch.equal(part.continuations, whole.continuations[4:])
    assert torch.equal(part.prompts, whole.prompts[2:])


def test_one_process_gathers_what_it_has():
    stats = KLStats(*torch.rand(8, 3))
    assert ALONE.gather_stats(stats, ALONE.share(3)) == stats
    assert ALONE.any(True)
    assert not ALONE.any(False)
