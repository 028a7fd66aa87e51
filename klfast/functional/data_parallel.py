"""The denominator of a scalar mean where gradients are averaged over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klfast.args.checks import reduction_of
from klfast.args.keywords import explains_keywords
from klfast.args.signature import Tokens
from klfast.args.values import can_be_read, check_cu_seqlens_values, check_mask_values
from klfast.distributed.ranks import folded, ranks_of
from klfast.formulas.sequences import Sequences, sum_of_sequences
from klfast.types.dtypes import wide, wide_dtype
from klfast.types.names import ReductionName

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@explains_keywords
@torch.no_grad()
def data_parallel_normalizer(
    mask: Tensor | Sequence[Tensor],
    reduction: ReductionName,
    group: ProcessGroup | None = None,
    *,
    cu_seqlens: Tensor | Sequence[Tensor] | None = None,
) -> Tensor:
    """The denominator of all ranks over their number: the ``normalizer`` under DDP and FSDP.

    DDP and FSDP *average* gradients over the W ranks. Let D be the denominator of the mean over the
    sequences of all ranks. If each rank divides its sum by D / W, the averaged gradient is the
    gradient of the whole batch's mean. If each rank divides by D, the gradient is W times too
    small. If each rank divides by its own denominator, a rank with few tokens has as much weight as
    a rank with many.

    D is what ``reduction`` divides by. For ``"token-mean"`` it is the sum of the mask. For
    ``"seq-mean-token-sum"`` and ``"seq-mean-token-mean"`` it is the number of sequences that keep a
    token.

    Args:
        mask: the mask of this rank's sequences, [B, T], or packed [N] with ``cu_seqlens``. [N]
            without it is one sequence. Its weights are boolean, integer or floating. With gradient
            accumulation, pass a list of the masks of all micro-batches in the optimizer's step.
            Every micro-batch takes the same normalizer. A rank without data passes an empty list.
        reduction: ``"token-mean"``, ``"seq-mean-token-sum"`` or ``"seq-mean-token-mean"``, as in
            :func:`klfast.kl_penalty`.
        group: the ranks over which gradients are averaged. All must call. None means all ranks if
            torch.distributed is initialised, else this process alone. The ranks must have
            different sequences. With context parallelism, where a rank has a part of every
            sequence, pass DTensors with ``Shard(1)`` to :func:`klfast.kl_penalty` instead, and no
            normalizer.
        cu_seqlens: [S+1], int32 or int64. Sequence s has the tokens
            cu_seqlens[s]:cu_seqlens[s+1]. Pass a list of them if ``mask`` is a list.

    Returns:
        A number > 0 of tokens or of sequences, with the same bits on every rank. It is 0-dim, fp64
        (fp32 on a device without it), and on the mask's device. Without any token it is 1 / W, so
        that the mean is 0. It takes one all-reduce, and waits for no device.

    Raises:
        ValueError: a reduction without a denominator, a wrong shape, device or layout, or a value
            that a mask must not hold (checked on a CPU, elsewhere under ``KLFAST_CHECK=1``).
        TypeError: an argument of the wrong type or dtype.
        RuntimeError: raised by torch.distributed if a rank has died or does not answer in time.
    """
    of = reduction_of(reduction, is_normalized=True)
    ranks = ranks_of(group)
    counts = []
    for of_batch, offsets in _batches(mask, cu_seqlens):
        length = Sequences(of_batch, offsets).sum(wide(of_batch).flatten())
        counts.append(sum_of_sequences(wide(of.denominator_terms(length))))
    where = counts[0].device if counts else None if ranks is None else ranks.device
    nothing = torch.zeros((), device=where)
    total = torch.stack([wide(nothing), *counts]).sum()
    if ranks is None:
        return torch.where(total > 0, total, 1.0)
    # Not a plain all-reduce, whose order of additions may differ between ranks.
    total = folded(ranks.gather(total))
    return torch.where(total > 0, total, 1.0) / ranks.size


def _batches(
    mask: Tensor | Sequence[Tensor], cu_seqlens: Tensor | Sequence[Tensor] | None
) -> list[tuple[Tensor, Tensor | None]]:
    """Checked pairs of a mask and its ``cu_seqlens``, one for each micro-batch."""
    masks, offsets = _listed(mask), _listed(cu_seqlens)
    if cu_seqlens is None:
        offsets = [None] * len(masks)
    elif len(offsets) != len(masks) or isinstance(cu_seqlens, Tensor) != isinstance(mask, Tensor):
        raise ValueError(
            "cu_seqlens must be a tensor for one mask, and for a list of masks a list of as many, "
            f"got {len(offsets)} for {len(masks)}"
        )
    pairs = [*zip(masks, offsets, strict=True)]
    for of_batch, of_sequences in pairs:
        Tokens.of("data_parallel_normalizer", of_batch, of_sequences)
        if can_be_read(of_batch):
            check_mask_values(of_batch, wide_dtype(of_batch.device))
            if of_sequences is not None:
                check_cu_seqlens_values(of_sequences, len(of_batch))
    return pairs


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, (list, tuple)) else [value]
