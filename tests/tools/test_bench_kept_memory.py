"""The two states of memory that timings are made in: kept by the process, or given back."""

import ctypes
import json
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import allocator, timing
from benchmarks.__main__ import main
from benchmarks.timing import interleave

pytestmark = pytest.mark.exhaustive

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

GRADIENTS = {"17 MB": 17_000_000, "262 MB": 262_000_000}
"""As of [512, 8192] and of [2048, 32000], in fp32."""
LARGE_PAGE = 2 << 20
"""Memory that is new costs a page fault for each large page at the least."""


def fill_faults(keep):
    """Page faults of a fill of a new gradient of each size, in a process of its own."""
    code = (
        "import json, torch; from benchmarks import allocator, timing\n"
        f"if {keep}: allocator.keep_memory()\n"
        "def call(size): return torch.empty(size, dtype=torch.uint8).fill_(1)\n"
        "def faults(size):\n"
        f"    timings = timing.interleave({{'a': call, 'b': call}}, [size], 3, settle={keep})\n"
        "    return max(t.median_faults for t in timings.values())\n"
        f"print(json.dumps({{name: faults(size) for name, size in {GRADIENTS}.items()}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@on_glibc
@pytest.mark.long
def test_kept_memory_is_taken_again_without_page_faults():
    assert max(fill_faults(keep=True).values()) < 8


@on_glibc
@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "given-back"])
def test_every_candidate_of_the_command_meets_the_same_memory(tmp_path, keep):
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "benchmarks", "--ops", "one-read", "--dtypes", "fp32"]
    command += ["--shapes", "320x32768", "--rounds", "5", "--no-compile", "--reuse-inputs"]
    command += ["--allow-load", "--out", str(out), *["--keep-memory"] * keep]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    data = json.loads(out.read_text())
    state = allocator.KEPT if keep else allocator.GIVEN_BACK
    assert data["conditions"]["memory"] == state
    assert f"memory: {state}." in done.stdout
    faults = {row["impl"]: row["page_faults"] for row in data["rows"]}
    assert set(faults) == {"klfast", "eager", "read", "read + fill"}
    assert faults["read"] < 8
    if keep:
        assert all(count < 8 for count in faults.values()), faults
    else:  # one gradient may find room at the heap's end, but not all of eager's tensors
        assert faults["eager"] >= (40 << 20) // LARGE_PAGE - 1


@pytest.mark.parametrize(
    ("libc", "message"),
    [
        (SimpleNamespace(), "--keep-memory needs glibc: this system's C library has no mallopt"),
        (
            SimpleNamespace(mallopt=lambda parameter, value: 0),
            "--keep-memory needs glibc's malloc, and another allocator is in its place",
        ),
        (
            SimpleNamespace(mallopt=lambda parameter, value: 1),  # and does nothing
            "--keep-memory needs glibc's malloc, and another allocator is in its place",
        ),
    ],
    ids=["no-mallopt", "refused", "without-effect"],
)
def test_an_allocator_that_keeps_nothing_is_a_mistake(monkeypatch, capsys, libc, message):
    faults = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(allocator, "page_faults", lambda: next(faults))
    assert main(["--quick", "--keep-memory"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"python -m benchmarks: error: {message}\n"


@pytest.mark.parametrize(
    ("new_pages", "rounds"),
    [
        ([9999, 5000, 64, 0, 1, 9999], 5),
        ([0, 0, 0], 3),
        ([0, 0, 65, 0, 0, 0], 6),
        ([65] * 99, timing.SETTLING_ROUNDS),
    ],
    ids=["settles", "at-once", "once-more", "never"],
)
def test_kept_memory_settles_before_the_first_round(monkeypatch, new_pages, rounds):
    readings = iter(sum(new_pages[: n // 2 + n % 2]) for n in range(2 * len(new_pages)))
    calls = []
    monkeypatch.setattr(timing, "page_faults", lambda: next(readings))
    slow = {"a": lambda inputs: calls.append(1) or sum(range(400_000))}
    interleave(slow, [0], 0, settle=True)
    assert len(calls) == 2 + rounds  # two calls come first in any case
