"""Nothing is published that was measured while other processes ran."""

import json
import subprocess
import sys

import pytest

from benchmarks import idle, measure
from benchmarks.__main__ import main
from benchmarks.idle import LIMIT, NOTHING, SLACK, Load, Reading, between, parse_stat
from benchmarks.measure import ATTEMPTS, Plan, time_idle

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ["--quick", "--no-compile", "--rounds", "1", "--ops", "forward"]
CASES = ["forward fp32 16x256", "forward bf16 16x256"]
BUSY = Load(others=3.0, capacity=10.0, all_others=3.0, all_capacity=20.0)
IDLE = Load(others=0.1, capacity=10.0, all_others=0.1, all_capacity=20.0)

STAT = """\
cpu  30 6 12 400 9 3 0 60 0 0
cpu0 10 2 4 300 7 1 2 20 5 5
cpu11 20 4 8 100 2 2 0 40 0 0
intr 1 2
"""


def test_busy_time_is_all_but_idle_waiting_and_guests_twice():
    assert parse_stat(STAT, ticks=100) == {0: pytest.approx(0.39), 11: pytest.approx(0.74)}


def test_others_are_the_busy_time_without_the_process():
    begin = Reading(clock=5.0, own=1.0, busy={0: 10.0, 1: 20.0, 2: 30.0})
    end = Reading(clock=9.0, own=4.0, busy={0: 13.5, 1: 20.0, 2: 32.0})
    assert between(begin, end, {0, 1}) == Load(0.5, 8.0, 2.5, 12.0)
    assert between(begin, end, {0, 1, 2}).share == pytest.approx(2.5 / 12)


@pytest.mark.parametrize(
    ("load", "share", "is_idle"),
    [
        (NOTHING, 0, True),
        (Load(-0.01, 1, -0.01, 2), 0, True),  # counts come in ticks
        (Load(0.04, 0.08, 0.04, 0.16), 0.5, True),  # too little to tell
        (Load(0.07, 0.08, 0.07, 0.16), 0.875, False),
        (Load(LIMIT * 10 + SLACK - 0.01, 10, 0, 20), LIMIT + 0.004, True),
        (Load(LIMIT * 10 + SLACK + 0.01, 10, 0, 20), LIMIT + 0.006, False),
        (Load(0, 10, LIMIT * 20 + SLACK + 0.1, 20), LIMIT + 0.0075, False),  # on other cores
    ],
)
def test_idle_is_less_than_the_limit_on_its_cores_and_on_all(load, share, is_idle):
    assert load.share == pytest.approx(share)
    assert load.is_idle == is_idle


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/stat")
def test_a_busy_process_is_seen_within_a_second():
    spin = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        spin.stdout.readline()
        load = idle.sample()
    finally:
        spin.kill()
        spin.communicate()
    assert not load.is_idle
    assert load.all_others > 0.3


@pytest.fixture
def no_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(idle, "_STAT", tmp_path / "stat")


def test_without_proc_nothing_is_known_and_nothing_written(no_proc, tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert idle.sample(0.0) is None
    assert main([*QUICK, "--out", str(out)]) == 3
    assert "take is not known here" in capsys.readouterr().err
    assert not out.exists()
    assert main([*QUICK, "--out", str(out), "--allow-load"]) == 0
    assert json.loads(out.read_text())["conditions"]["others_share"] is None
    assert "NOT IDLE: what other processes took is not known here" in capsys.readouterr().out


@pytest.fixture
def loads(monkeypatch):
    """What ``idle`` finds: before anything is measured, and in the rounds of each attempt."""
    found = {"before": IDLE, "rounds": [IDLE], "looked": 0}

    def since(begin):
        found["looked"] += 1
        rounds = found["rounds"]
        return rounds.pop(0) if len(rounds) > 1 else rounds[0]

    monkeypatch.setattr(idle, "sample", lambda: found["before"])
    monkeypatch.setattr(idle, "since", since)
    return found


def test_an_idle_machine_is_a_condition(loads, tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert main([*QUICK, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert (data["conditions"]["others_share"], data["conditions"]["load_allowed"]) == (0.01, False)
    assert data["loads"] == dict.fromkeys(CASES, 0.01)
    assert "idle: other processes took 1.0% of the cores' time" in capsys.readouterr().out


def test_a_load_before_is_refused_before_anything_is_measured(loads, tmp_path, capsys):
    loads["before"] = BUSY
    out = tmp_path / "bench.json"
    assert main([*QUICK, "--out", str(out)]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"python -m benchmarks: error: {out} cannot be written: other processes take 30% of the "
        "cores' time; measure when they are done, or pass --allow-load, which the file will say\n"
    )
    assert (loads["looked"], out.exists()) == (0, False)


@pytest.mark.parametrize("earlier", [None, '{"rows": ["of before"]}'], ids=["new", "earlier"])
def test_a_load_in_the_rounds_leaves_the_file_as_it_was(loads, tmp_path, capsys, earlier):
    loads["rounds"] = [IDLE, BUSY]
    out = tmp_path / "bench.json"
    if earlier is not None:
        out.write_text(earlier)
    assert main([*QUICK, "--out", str(out), "--force"]) == 3
    assert (out.read_text() if out.exists() else None) == earlier
    printed = capsys.readouterr()
    assert all(case in printed.out for case in CASES)
    reason = (
        "other processes took 16% of the cores' time, 30% in forward bf16 16x256, and more than "
        "5% in 1 of 2 cases"
    )
    assert f"NOT IDLE: {reason}. These numbers are not to be published." in printed.out
    assert f"{out} was not written: {reason}; measure when" in printed.err
    assert loads["looked"] == 1 + ATTEMPTS


def test_the_rows_that_met_a_load_are_flagged(loads, capsys):
    loads["rounds"] = [IDLE, BUSY]
    assert main(QUICK) == 0
    printed = capsys.readouterr().out
    table, notes = printed.split("busy: ")
    lines = table.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(CASES[1]))
    assert not any("busy" in line for line in lines[:begin])
    assert [line.endswith("busy") for line in lines[begin:]] == [True, True]
    assert notes.startswith("beside 2 of 4 rows other processes took more than 5% of the cores'")


def test_rounds_that_met_a_load_are_repeated(loads, monkeypatch):
    loads["rounds"] = [BUSY, IDLE]
    timings = iter("abc")
    monkeypatch.setattr(measure, "interleave", lambda *args, **options: next(timings))
    assert time_idle({}, [], Plan(attempts=3)) == ("b", IDLE)
    assert next(timings) == "c"
