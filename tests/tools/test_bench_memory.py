"""The peak of a CPU's memory: of known calls, and of the candidates in processes of their own."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import measure, memory
from benchmarks.__main__ import main
from benchmarks.cases import Case
from benchmarks.suites import OPS

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells"),
]

MIB = 1 << 20
NOISE = 4 * MIB
"""Of the allocator, and of the kernel's count of pages."""


KNOWN = {
    "None": 0,
    "ones(64 * MIB)": 64 * MIB,  # the result counts
    "ones(64 * MIB).amax()": 64 * MIB,  # and what was freed
    "ones(64 * MIB).add(1).add(1)": 128 * MIB,  # but not all that ever was
}
"""Call -> its peak."""


def test_known_peaks_are_found():
    calls = ", ".join(f"peak_of(lambda: {call})" for call in KNOWN)
    code = (
        "import torch; from benchmarks.memory import peak_of; MIB = 1 << 20\n"
        "def ones(size): return torch.ones(size, dtype=torch.uint8)\n"
        f"print([{calls}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for found, (call, expected) in zip(json.loads(done.stdout), KNOWN.items(), strict=True):
        assert abs(found - expected) < NOISE, call


@pytest.fixture
def every_size(monkeypatch):
    monkeypatch.setattr(memory, "SMALLEST_INPUTS", 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("op", "klfast", "eager"),
    [pytest.param("kl", 0, 3, marks=pytest.mark.exhaustive), ("kl-one-read", 1, 5)],
)
def test_klfast_takes_its_gradient_and_eager_takes_several(every_size, op, klfast, eager):
    """In tensors of the logits' size."""
    case = Case(OPS[op], "fp32", (256, 20001))
    size = case.numbers * 4
    assert abs(memory.peak_bytes(case, "klfast") - klfast * size) < NOISE
    assert memory.peak_bytes(case, "eager") > eager * size - NOISE


def test_small_inputs_have_no_peak(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("a process"))
    assert memory.peak_bytes(Case(OPS["kl"], "fp32", (8, 1000)), "klfast") is None


def test_the_command_shows_and_writes_peaks(monkeypatch, tmp_path, capsys):
    peaks = {"klfast": 1_000_000, "eager": None, "selective": 2_345_000}
    monkeypatch.setattr(measure, "peak_bytes", lambda case, name: peaks[name])
    out = tmp_path / "bench.json"
    options = ["--suite", "logits", "--ops", "logprob", "--dtypes", "bf16", "--out", str(out)]
    options += ["--shapes", "9x70000"]
    assert main(["--quick", "--no-compile", "--allow-load", *options]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[-2:] == ["MB", "flags"]
    unflagged = [re.sub("( +(noisy|busy|noisy, busy))?$", "", line) for line in lines]
    assert unflagged[0].endswith(" 1.0")
    assert unflagged[2].endswith(" 2.3")
    rows = json.loads(out.read_text())["rows"]
    assert {row["impl"]: row["peak_bytes"] for row in rows} == {**peaks, "read": None}
