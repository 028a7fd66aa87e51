"""The benchmark of frameworks' functions publishes nothing that was measured under load."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import drop_in, idle, peers

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


def one_pair():
    def value(batch):
        return batch.logprobs - batch.ref_logprobs

    yield peers.Pair("nobody's", "`value`", value, value)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Its exit code and what it wrote, beside others that took a share of one core in ten."""

    def run(others, *options):
        load = idle.Load(others * 100, 100, others * 100, 1000)
        monkeypatch.setattr(idle, "since", lambda begin: load)
        monkeypatch.setitem(drop_in.PEERS, "trl", {peers.OVER_LOGPROBS: (one_pair,)})
        command = ["drop_in.py", "trl", "--quick", "--out", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", command)
        code = drop_in.main()
        file = tmp_path / "drop-in-trl.json"
        return code, json.loads(file.read_text()) if file.exists() else None

    return run


def test_an_idle_machine_is_a_condition(run):
    code, data = run(0.01)
    assert code == 0
    where = data["conditions"]
    assert (where["others_share"], where["load_allowed"]) == (0.01, False)
    assert where["inputs"] == "reused"
    assert where["memory"].startswith("left to malloc")
    assert [row["impl"] for row in data["rows"]] == ["framework", "klfast"] * 2


def test_under_load_nothing_is_written(run, capsys):
    assert run(0.5) == (3, None)
    error = capsys.readouterr().err
    assert error.startswith("nothing was written: other processes took 50% of the cores' time")
    assert "--allow-load" in error


def test_a_load_that_is_allowed_is_a_condition(run):
    code, data = run(0.5, "--allow-load")
    assert code == 0
    assert (data["conditions"]["others_share"], data["conditions"]["load_allowed"]) == (0.5, True)
