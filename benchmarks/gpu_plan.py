"""The benchmarks on a GPU, and the name that each one's results have."""

from __future__ import annotations

BUDGET = 210
"""Seconds for the cases of one in `make gpu-check`, at the most."""

OPTIONS = {
    "gpu": ["--device", "cuda"],
    "gpu-logits": [
        *("--device", "cuda", "--suite", "logits", "--dtypes", "bf16"),
        *("--shapes", "8192x151936,2048x32000"),
    ],
}
"""Name of the results -> options; ``python -m benchmarks --device cuda --suite logits`` measures
the rest."""

ALONE = {
    "gpu-topk": ["--device", "cuda", "--suite", "topk"],
    "gpu-linear": ["--device", "cuda", "--suite", "linear", "--dtypes", "bf16"],
}
"""The same of those that `make gpu-check` has no time for."""
