"""The speed of the KL step, as ``python -m lab compare`` shows it at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.cases import Case, make_inputs
from benchmarks.measure import Plan, rows_of, time_inputs
from benchmarks.tokens import OPS, TokenInputs, TokensOp, copy_inputs
from klfast.selfcheck.clock import rotation

LARGE = (512, 8192)
STEPS = {"forward": OPS["forward"], "forward+backward": OPS["one-read"]}
KEYS = ("impl", "median_ms", "min_ms", "ratio")


def time_kl_step(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    plan: Plan | None = None,
    large: tuple[int, int] = LARGE,
) -> list[dict[str, Any]]:
    """Times the k3 penalty on these tensors and on random ones of [512, 8192], fp32.

    Two steps: forward to per-sequence sums, and forward+backward of the mean over tokens. Three
    implementations, interleaved: klfast, the frameworks' eager formula, ``torch.compile`` of it.
    All are checked against float64 first.

    Args:
        logprobs: [B, T].
        ref_logprobs: [B, T].
        mask: [B, T], boolean.
        plan: how to measure; the default is 20 rounds over rotating copies.
        large: the shape of the random tensors.

    Returns:
        One dict for each case and implementation: ``case`` (such as ``"forward [512, 8192]"``),
        ``impl`` (``"klfast"``, ``"eager"``, ``"torch.compile"``), ``median_ms`` and ``min_ms`` of a
        call, ``ratio``: the median over klfast's median, that is how many times faster klfast
        is (1 for klfast itself), and ``busy``: whether other processes took more of the cores' time
        than they may (None where that is not known).

    Raises:
        benchmarks.check.WrongResult: an implementation computes something else.
    """

    def own(op: TokensOp) -> list[TokenInputs]:
        copies = rotation(logprobs.nbytes + ref_logprobs.nbytes + mask.nbytes)
        return copy_inputs(op, logprobs, ref_logprobs, mask, copies)

    def random(op: TokensOp) -> list[TokenInputs]:
        case = Case(op, "fp32", large)
        return make_inputs(case, rotation(case.input_bytes))

    rows: list[dict[str, Any]] = []
    for label, make in {
        f"{list(logprobs.shape)} of this run": own,
        str(list(large)): random,
    }.items():
        rows += _rows(label, make, plan or Plan())
    return rows


def _rows(
    label: str, make: Callable[[TokensOp], list[TokenInputs]], plan: Plan
) -> list[dict[str, Any]]:
    rows = []
    for step, op in STEPS.items():
        inputs = make(op)
        sequences, tokens = inputs[0].mask.shape
        case = Case(op, "fp32", (sequences, tokens))
        timings, load = time_inputs(op, inputs, plan)
        busy = None if load is None else not load.is_idle
        for row in rows_of(case, timings):
            numbers = {key: getattr(row, key) for key in KEYS}
            rows.append({"case": f"{step} {label}", **numbers, "busy": busy})
    return rows
