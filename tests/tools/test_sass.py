"""The counter of machine code, on code that is short enough to count by hand."""

import json
from pathlib import Path

from klfast.backends import BACKENDS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Reads vectors in a loop, adds their series where a vote allows, and stores a sum at the end.


def test_auto_prefers_the_backend_with_fewer_instructions():
    counts = json.loads((BENCHMARKS / "results" / "sass-sm90.json").read_text())
    native = [counts["cases"][name]["loop"] for name in counts["triton"]]
    assert all(a < b for a, b in zip(native, counts["triton"].values(), strict=True))
    assert list(BACKENDS)[:2] == ["native", "triton"]
