"""The recorded counts of machine instructions support the order of ``auto``."""

import json
from pathlib import Path

from klfast.backends import BACKENDS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_auto_prefers_the_backend_with_fewer_instructions():
    counts = json.loads((BENCHMARKS / "results" / "sass-sm90.json").read_text())
    native = [counts["cases"][name]["loop"] for name in counts["triton"]]
    assert all(a < b for a, b in zip(native, counts["triton"].values(), strict=True))
    assert list(BACKENDS)[:2] == ["native", "triton"]
