"""The benchmarks that `make gpu-check` has time for, and the name that each one's results have."""

from __future__ import annotations

BUDGET = 210
"""Seconds for the cases of one, at the most."""

OPTIONS = {
    "gpu": ["--device", "cuda"],
    "gpu-logits": [
        *("--device", "cuda", "--suite", "logits", "--dtypes", "bf16"),
        *("--shapes", "8192x151936,2048x32000"),
    ],
}
"""Name of the results -> options; ``python -m benchmarks --device cuda --suite logits`` measures
the rest."""
