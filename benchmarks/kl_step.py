"""The speed of the KL step, as ``python -m lab compare`` shows it at its end."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import Case
from benchmarks.measure import Plan, measure
from benchmarks.tokens import OPS

STEPS = {"forward": OPS["forward"], "forward+backward": OPS["one-read"]}
LARGE = (512, 8192)
PLAN = Plan(with_compile=False)
KEYS = ("impl", "median_ms", "min_ms", "ratio")


def time_kl_step(shape: tuple[int, int]) -> list[dict[str, Any]]:
    """Times the k3 penalty, fp32, on random tensors of a run's shape and of [512, 8192].

    There are two steps, the forward to per-sequence sums and the forward+backward of the mean over
    tokens. The two implementations, klfast and the frameworks' eager formula, are interleaved and
    first checked against float64. ``python -m benchmarks`` has ``torch.compile`` too, whose
    compiler takes longer than the rest.

    Returns:
        A dict for each case and implementation. It has ``case``, ``impl``, ``median_ms`` and
        ``min_ms`` of a call, and ``ratio`` (the median over klfast's). ``busy`` tells whether other
        processes took more of the cores' time than allowed (None if that is not known).

    Raises:
        benchmarks.check.WrongResult: an implementation computes something else.
    """
    rows = []
    for label, size in ((f"{list(shape)} of this run", shape), (str(list(LARGE)), LARGE)):
        for step, op in STEPS.items():
            measured = measure(Case(op, "fp32", size), PLAN)
            busy = None if measured.load is None else not measured.load.is_idle
            for row in measured.rows:
                if row["ratio"] is not None:  # but for plain reads
                    numbers = {key: row[key] for key in KEYS}
                    rows.append({"case": f"{step} {label}", **numbers, "busy": busy})
    return rows
