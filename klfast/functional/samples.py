"""A sample of a tensor, to tell log-probs of tokens from logits.

Every function reads at most ``SAMPLE`` numbers of a tensor, evenly spread, and waits for them; more
only of rows that look like a mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.types.dtypes import has_float64

SAMPLE = 1024

TOLERANCE = 1e-3
"""How far above 0 rounding may leave a log-prob."""

_ROWS = 8
_RUN = 16
_ROWS_OF_LOGITS = 8
_SMALL = 32
"""The most words of a vocabulary whose logits may be anything, such as those of a few classes."""
_ORDERED = 0.8


def positive(logprobs: Tensor, mask: Tensor | None) -> tuple[float, float] | None:
    """The least and greatest kept number, if rounding does not make the latter of a log-prob of 0.

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


def are_of_taken_tokens(logits: Tensor, mask: Tensor | None) -> bool:
    """Whether [N, V] are rather log-probs of taken tokens, [B, T].

    Most rows of these have over 32 numbers in no order, none of which is above 0, and probabilities
    that do not sum to 1. Log-probs of a vocabulary sum to 1, and a part of them to less; a
    teacher's top ones come in order of size, perhaps after the token that was taken. Other logits
    have numbers above 0, or are all far below it, or have one 0, where their maximum was
    subtracted; of a few classes they are often all a little below it.

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
    """[N]: whether nine of ten neighbours that differ do so in one direction; equal numbers too."""
    before, after = rows[:, :-1], rows[:, 1:]
    rises, falls = (after > before).sum(-1), (after < before).sum(-1)
    return (rises - falls).abs() >= _ORDERED * (rises + falls)


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
