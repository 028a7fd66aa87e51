"""Nothing is timed before its result is right: outputs against klfast's reference in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import klfast
from klfast.bench.cases import Inputs, Op

TOLERANCE = 1e-4
"""Of the largest entry. Wide: it tells wrong from right, not good from better."""

ROUNDING = 1e-6
"""Of the terms: ``exp(-x) - 1`` in fp32 has lost its digits where x is small, and is not wrong."""

_TOKENS_PER_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 22}


class WrongResult(Exception):  # noqa: N818  # said in the words of the message
    """A candidate that computes something else; its text is the whole message."""


def named_outputs(op: Op, outputs: Any) -> dict[str, Tensor]:
    """What a candidate returned, by name."""
    if op.backward:
        return {"penalty": outputs[0], "gradient": outputs[1]}
    if op.stats:
        return {"penalty": outputs[0], **outputs[1]._asdict()}
    return {"penalty": outputs}


def truth(op: Op, inputs: Inputs) -> dict[str, Tensor]:
    """The outputs in float64, a block of rows at a time, as float64 graphs are large."""
    normalizer = inputs.mask.sum() if op.reduction == "token-mean" else None
    if inputs.cu_seqlens is not None:
        return _truth_of_rows(op, inputs, slice(None), normalizer)
    per_block = _TOKENS_PER_BLOCK[inputs.mask.device.type]
    rows = max(1, per_block // max(1, inputs.mask.shape[1]))
    blocks = [
        _truth_of_rows(op, inputs, slice(first, first + rows), normalizer)
        for first in range(0, inputs.mask.shape[0], rows)
    ]
    joined = {name: [block[name] for block in blocks] for name in blocks[0]}
    return {
        name: torch.cat(parts) if parts[0].dim() else torch.stack(parts).sum()
        for name, parts in joined.items()
    }


def _truth_of_rows(
    op: Op, inputs: Inputs, rows: slice, normalizer: Tensor | None
) -> dict[str, Tensor]:
    logprobs = inputs.logprobs[rows].detach().double().requires_grad_(op.backward)
    outputs = klfast.kl_penalty(  # type: ignore[call-overload]  # return_stats is no literal
        logprobs,
        inputs.ref_logprobs[rows].double(),
        inputs.mask[rows],
        reduction=op.reduction,
        cu_seqlens=inputs.cu_seqlens,
        normalizer=normalizer,
        return_stats=op.stats,
        backend="reference",
    )
    if not op.backward:
        return named_outputs(op, outputs)
    grad_out = None if inputs.grad_out is None else inputs.grad_out[rows].double()
    gradient = torch.autograd.grad(outputs, logprobs, grad_out)[0]
    return named_outputs(op, (outputs.detach(), gradient))


def tolerances(op: Op, inputs: Inputs, expected: dict[str, Tensor]) -> dict[str, float]:
    """How far each output may be from the truth, absolutely."""
    value_size, gradient_size = _sizes(op, inputs)
    allowed = {}
    for name, want in expected.items():
        is_gradient = name == "gradient"
        relative = torch.finfo(inputs.logprobs.dtype).eps if is_gradient else 0.0
        largest = float(want.abs().max()) if want.numel() else 0.0
        size = gradient_size if is_gradient else value_size
        allowed[name] = max(TOLERANCE, relative) * largest + ROUNDING * size
    return allowed


def _sizes(op: Op, inputs: Inputs) -> tuple[float, float]:
    """How large the terms are that a penalty or a statistic, and a gradient, is made of."""
    x = torch.where(inputs.mask, inputs.logprobs.detach() - inputs.ref_logprobs, 0)
    term = 1 + float(x.abs().max())
    if op.reduction == "token-mean":
        return term, 1 / max(1, int(inputs.mask.sum()))
    grad_out = 1.0 if inputs.grad_out is None else float(inputs.grad_out.abs().max())
    packed = inputs.cu_seqlens
    longest = inputs.mask.sum(-1) if packed is None else packed.diff()
    return term * int(longest.max()), grad_out


def check_outputs(
    name: str,
    op: Op,
    outputs: Any,
    expected: dict[str, Tensor],
    allowed: dict[str, float],
) -> None:
    """Raises :class:`WrongResult` if what the candidate ``name`` returned is not the truth."""
    for output, actual in named_outputs(op, outputs).items():
        try:
            torch.testing.assert_close(
                actual.detach().double(), expected[output], rtol=0, atol=allowed[output]
            )
        except AssertionError as error:
            detail = " ".join(str(error).split())
            raise WrongResult(f"{name} computes a wrong {output} ({op.name}): {detail}") from None
