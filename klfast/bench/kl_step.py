"""The speed of the KL step, as ``klfast compare`` shows it at its end."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from klfast.bench.cases import OPS, Case, Op, copy_inputs, make_inputs
from klfast.bench.measure import Plan, as_speed_rows, rotation, time_inputs

LARGE = (512, 8192)
STEPS = {"forward": OPS["forward"], "forward+backward": OPS["one-read"]}


def time_kl_step(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, plan: Plan | None = None
) -> list[dict[str, Any]]:
    """Times the k3 penalty on these tensors and on random ones of [512, 8192], fp32.

    Two steps: forward to per-sequence sums, and forward+backward of the mean over tokens. Three
    implementations, interleaved: klfast, the frameworks' eager formula, ``torch.compile`` of it. All
    are checked against float64 first.

    Args:
        logprobs: [B, T].
        ref_logprobs: [B, T].
        mask: [B, T], boolean.
        plan: how to measure; the default is 20 rounds over rotating copies.

    Returns:
        One dict for each case and implementation: ``case`` (such as ``"forward [512, 8192]"``),
        ``impl`` (``"klfast"``, ``"eager"``, ``"torch.compile"``), ``median_ms`` and ``min_ms`` of a
        call, and ``ratio``: the median over klfast's median, that is how many times faster klfast is
        (1 for klfast itself).

    Raises:
        klfast.bench.check.WrongResult: an implementation computes something else.
    """
    plan = plan or Plan()
    rows: list[dict[str, Any]] = []
    for name, op in STEPS.items():
        copies = rotation(logprobs.nbytes + ref_logprobs.nbytes + mask.nbytes)
        own = copy_inputs(op, logprobs, ref_logprobs, mask, copies)
        timings = time_inputs(op, own, plan)
        rows += as_speed_rows(f"{name}, this run's {list(logprobs.shape)}", timings)
    for name, op in STEPS.items():
        rows += as_speed_rows(f"{name} {list(LARGE)}", _time_large(op, plan))
    return rows
