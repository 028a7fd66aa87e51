"""Samples of a tensor, to distinguish log-probs of tokens from logits.

Every function reads at most ``SAMPLE`` numbers of a tensor, evenly spread, and waits for them. It
reads more only in rows that look like a mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.types.dtypes import has_float64

SAMPLE = 1024

TOLERANCE = 1e-3
"""The greatest log-prob above 0 that rounding explains."""

_ROWS = 8
_RUN = 16
_ROWS_OF_LOGITS = 8
_SMALL = 32
"""Up to this vocabulary size, logits may be anything, such as logits of a few classes."""
_ORDERED = 0.8
_ROUNDING = 0.05
"""The sum of probabilities in bf16 is 1 within 2 %."""


def positive(logprobs: Tensor, mask: Tensor | None) -> tuple[float, float] | None:
    """The least and greatest kept number, if the greatest is above 0 by more than rounding.

    Args:
        logprobs: [B, T] or [N], not empty.
        mask: the same; 0 where a token does not exist. None keeps all.
    """
    sample = _spread(logprobs.detach())
    if sample.max().item() <= TOLERANCE:  # most often; never with a NaN
        return None
    is_number = ~sample.isnan()
    if mask is not None:
        is_number &= _spread(mask.detach()) != 0
    kept = sample[is_number]
    if not (kept > TOLERANCE).any():
        return None
    return kept.min().item(), kept.max().item()


def has_nan(logprobs: Tensor) -> bool:
    """True if a number of [B, T] or [N], not empty, is NaN."""
    return bool(_spread(logprobs.detach()).isnan().any())


def are_probabilities(logits: Tensor, mask: Tensor | None) -> bool:
    """True if each row of [..., V] logits is in [0, 1] and sums to 1.

    Args:
        logits: [..., V], V > 1, not empty.
        mask: [...]; 0 where a row does not exist. None keeps all.
    """
    rows = _few(logits.detach(), logits.dim() - 1)
    sample = rows[..., : SAMPLE // (2 * _ROWS)]
    if mask is not None:
        kept = _few(mask.detach(), mask.dim()) != 0
        sample, rows = sample[kept], rows[kept]
    if not ((sample >= 0) & (sample <= 1)).all():  # most often
        return False
    total = rows.sum(-1, dtype=torch.float32)
    return total.numel() > 0 and bool(
        ((total - 1).abs() < _ROUNDING).all() and ((rows >= 0) & (rows <= 1)).all()
    )


def mass_above_1(logprobs: Tensor, mask: Tensor | None) -> float | None:
    """The greatest sum of a token's K probabilities, if it is above 1 by more than rounding.

    Args:
        logprobs: [..., K], not empty.
        mask: [...]; 0 where a token does not exist. None keeps all.
    """
    rows = _few(logprobs.detach(), logprobs.dim() - 1)
    total = rows.float().expm1().sum(-1) + rows.shape[-1]  # not exp: see _are_no_vocabulary
    total = torch.where(total > 1 + _ROUNDING, total, 0)
    if mask is not None:
        total = torch.where(_few(mask.detach(), mask.dim()) != 0, total, 0)
    return total.max().item() or None


def are_of_taken_tokens(logits: Tensor, mask: Tensor | None) -> bool:
    """True if [N, V] logits are probably log-probs of sampled tokens, [B, T].

    Most rows of such log-probs have over 32 numbers in no order, none of which is above 0, and
    their probabilities do not sum to 1. The probabilities of a vocabulary sum to 1, and a part of
    them to less. A teacher's top log-probs come in order of size, perhaps after the sampled token.
    Other logits have numbers above 0, are all far below 0, or have one 0 if their maximum was
    subtracted. Logits of a few classes are often all a little below 0.

    Args:
        logits: [N, V], V > 1, not empty.
        mask: [N]; 0 where a row does not exist. None keeps all.
    """
    if logits.shape[1] <= _SMALL:
        return False
    step = -(-logits.shape[0] // _ROWS_OF_LOGITS)
    rows = logits.detach()[::step]
    sample = rows[:, : SAMPLE // _ROWS_OF_LOGITS]
    if mask is None and sample.max().item() > TOLERANCE:  # most often
        return False
    if mask is not None:
        kept = mask.detach()[::step] != 0
        sample, rows = sample[kept], rows[kept]
    is_part = sample.shape[1] < rows.shape[1]
    return _are_no_vocabulary(sample, is_part=is_part) and (
        not is_part or _are_no_vocabulary(rows, is_part=False)
    )


def _are_no_vocabulary(rows: Tensor, *, is_part: bool) -> bool:
    if not has_float64(rows.device):
        rows = rows.cpu()
    if not ((rows <= TOLERANCE) & (rows > -torch.inf)).all():
        return False
    # Not exp: MKL's takes threads for a few numbers, which a forked process has lost.
    total = rows.double().expm1().sum(-1) + rows.shape[1]
    is_off = total > 1.1  # log-probs in bf16 sum to 1 within 2 %
    if not is_part:
        is_off |= (total > 1e-3) & (total < 0.9)
    zeros = (rows == 0).sum(-1)
    is_off &= (zeros != 1) & (zeros != rows.shape[1]) & ~_are_in_order(rows)
    return bool(2 * is_off.sum() > rows.shape[0])


def _are_in_order(rows: Tensor) -> Tensor:
    """[N]: True if nine of ten unequal neighbours go in one direction, or if all are equal."""
    before, after = rows[:, :-1], rows[:, 1:]
    rises, falls = (after > before).sum(-1), (after < before).sum(-1)
    return (rises - falls).abs() >= _ORDERED * (rises + falls)


def _few(tensor: Tensor, dims: int) -> Tensor:
    """A view of some 9 entries, evenly spread over the first ``dims`` dimensions."""
    most = 3 if dims > 1 else _ROWS
    steps = (slice(None, None, max(-(-n // most), 1)) for n in tensor.shape[:dims])
    return tensor[tuple(steps)]


def _spread(tensor: Tensor) -> Tensor:
    """A view of tokens of [B, T] or [N], in runs of neighbours, which are in one cache line."""
    if tensor.numel() <= SAMPLE:
        return tensor
    columns = SAMPLE
    if tensor.dim() == 2:
        rows = max(_ROWS, SAMPLE // tensor.shape[1])
        tensor = tensor[:: -(-tensor.shape[0] // rows)]
        columns = SAMPLE // tensor.shape[0]
    if tensor.shape[-1] <= columns:
        return tensor
    room = tensor.shape[-1] - _RUN
    return tensor.unfold(-1, _RUN, -(-room // (columns // _RUN - 1)))
