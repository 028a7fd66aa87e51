"""The sequences of a batch, and sums over them, whose bits depend on the sequence alone.

Log-probs are padded [B, T], packed [N] with cu_seqlens, or one sequence [N].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def number_of_sequences(logprobs: Tensor, cu_seqlens: Tensor | None) -> int:
    """S: rows of a padded batch, pieces of a packed one."""
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1
    return logprobs.shape[0] if logprobs.dim() == 2 else 1


def sequence_of_tokens(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[tokens]: the sequence of each, S for a token outside of all sequences."""
    index = torch.arange(number_of_sequences(tokens, cu_seqlens), device=tokens.device)
    if cu_seqlens is None:
        return index.repeat_interleave(tokens.shape[-1])
    # cu_seqlens is not checked on a GPU. If it is wrong, repeat_interleave would write out of
    # bounds.
    position = torch.arange(tokens.numel(), device=tokens.device, dtype=cu_seqlens.dtype)
    starts_before = torch.searchsorted(cu_seqlens.contiguous(), position, right=True)
    return (starts_before - 1) % (index.shape[0] + 1)


def per_token(numbers: Tensor, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Numbers in the shape of ``tokens``, from this shape or [S, 1]. Padded ones are not copied."""
    if numbers.shape == tokens.shape:
        return numbers
    if cu_seqlens is None:
        return (numbers if tokens.dim() == 2 else numbers[0]).expand(tokens.shape)
    with_outside = torch.nn.functional.pad(numbers.squeeze(-1), (0, 1))
    return with_outside[sequence_of_tokens(tokens, cu_seqlens)]


class Sequences:
    """The sequences of a batch, for sums over flat vectors of its tokens.

    The bits of a sum depend on the sequence's own tokens alone. No padding, layout, neighbour or
    number of threads changes them.

    Each sequence is cut into blocks of ``BLOCK`` tokens from its own start, and zeros fill the
    last block. The halves of every block are added until one number is left. The blocks' numbers
    are summed in the same way, until each sequence has one. Every step is elementwise, and no shape
    depends on a value, so nothing waits for a GPU.
    """

    # torch has no such sum. On a GPU, index_add adds in the order in which threads arrive, and the
    # order of segment_reduce depends on the segment's address. The order of sum depends on the
    # shape of the whole tensor. A difference of two cumsums has the rounding of all earlier
    # sequences.
    BLOCK = 32

    def __init__(self, tokens: Tensor, cu_seqlens: Tensor | None) -> None:
        """``tokens``: a tensor in the shape of the log-probs."""
        n, device = tokens.numel(), tokens.device
        self.number = number_of_sequences(tokens, cu_seqlens)
        self.of_token = sequence_of_tokens(tokens, cu_seqlens)
        index = torch.arange(self.number, device=device)
        if cu_seqlens is None:
            longest = tokens.shape[-1]
            starts, lengths = index * longest, torch.full_like(index, longest)
        else:
            longest = n
            starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
        # The number of steps would be a constant of a traced program, which serves any batch.
        is_traced = torch.compiler.is_compiling()
        self._blocks = None if is_traced else [*_blocks(starts, lengths, n, longest)]

    def sum(self, value: Tensor) -> Tensor:
        """[..., tokens] -> [..., S]. While torch.compile traces, the order is ``index_add``'s."""
        if self._blocks is None:
            sums = value.new_zeros((*value.shape[:-1], self.number + 1))
            return sums.index_add(-1, self.of_token, value)[..., : self.number]
        for tokens in self._blocks:
            padded = torch.nn.functional.pad(value, (0, 1))  # the zero that fills blocks
            value = torch.unflatten(padded.index_select(-1, tokens), -1, (-1, self.BLOCK))
            while value.shape[-1] > 1:
                first, second = value.chunk(2, -1)
                value = first + second
            value = value.squeeze(-1)
        return value[..., : self.number] + 0.0  # not -0

    def greatest(self, value: Tensor, none: float) -> Tensor:
        """[tokens] -> [S], at least ``none``."""
        start = value.new_full((self.number + 1,), none)
        return start.scatter_reduce(0, self.of_token, value, "amax")[: self.number]

    def spread(self, of_sequence: Tensor) -> Tensor:
        """[S] -> [tokens], 0 outside of all sequences."""
        return torch.nn.functional.pad(of_sequence, (0, 1))[self.of_token]


def _blocks(starts: Tensor, lengths: Tensor, n: int, longest: int) -> Iterator[Tensor]:
    """The indices of the numbers in all blocks, flat, for each step. n, past the end, is a zero.

    Each sequence has at least one block, so that the first S numbers are the sums after the last
    step. The number of blocks is an upper bound that needs no value; surplus blocks hold zeros.
    """
    size = Sequences.BLOCK
    within = torch.arange(size, device=starts.device)
    while True:
        blocks = ((lengths + size - 1) // size).clamp(min=1)
        ends = blocks.cumsum(0)
        number = n // size + starts.shape[0] if starts.shape[0] else 0
        # Surplus blocks come last, and take the last sequence, past whose end they lie.
        block = torch.arange(number, device=starts.device)
        sequence = torch.searchsorted(ends, block, right=True).clamp(max=starts.shape[0] - 1)
        first = ends - blocks
        position = ((block - first[sequence]) * size).unsqueeze(-1) + within
        inside = position < lengths[sequence].unsqueeze(-1)
        token = starts[sequence].unsqueeze(-1) + position
        yield torch.where(inside, token, n).clamp(0, n).flatten()
        # The numbers of the blocks are the tokens of the next step.
        starts, lengths, n, longest = first, blocks, number, -(-longest // size)
        if longest <= 1:
            return


def sum_of_sequences(value: Tensor) -> Tensor:
    """[S] -> 0-dim: a sum in the order of sequences, with any number of threads."""
    return Sequences(value, None).sum(value).squeeze(0)
