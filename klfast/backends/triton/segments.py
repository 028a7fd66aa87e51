"""Segments, and how every kernel over log-probs reads and writes their tokens.

A sequence is cut into segments of ``SEGMENT`` tokens, and a program runs over one segment, tile by
tile. Shapes: S sequences, P slots for segments, one program each.

- padded [S, T]: slot s * ceil(T / SEGMENT) + i is segment i of row s;
- packed [N]: slot cu_seqlens[s] // SEGMENT + s + i is. This rises strictly and stays below
  N // SEGMENT + S, so that the grid is known without reading cu_seqlens. Slots between the last
  segment of a sequence and the first of the next stay unused.

A sequence's results depend only on its own tokens. Floating sums are pairwise trees over
positions, because ``tl.sum`` of more than two elements adds in an order that the compiler chooses
with the layout. Kernels are launched without fusion of multiplications and additions, so that every
compiled variant computes the same bits. The values of cu_seqlens are not trusted: no value makes an
access leave the tensors.

Doubles are passed as the int64 of their bits, because Triton rounds a float argument to fp32.
"""

import inspect

import triton
import triton.language as tl

TILE = tl.constexpr(1024)
SEGMENT = tl.constexpr(4096)
"""Tokens; both shape the sums."""


@triton.jit
def number(pointer, bits):
    """A double: what a 0-dim tensor holds, or the number of these bits where there is none."""
    if pointer is None:
        value = bits.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        value = tl.load(pointer).to(tl.float64)
    return value


@triton.jit
def edge(cu_seqlens, index, tokens, valid):
    """The start of sequence ``index``, inside [0, tokens]."""
    at = tl.load(cu_seqlens + index, mask=valid, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(at, 0), tokens)


@triton.jit
def find_sequence(cu_seqlens, slot, sequences, tokens):
    """The last sequence whose first slot is not behind ``slot``, by a search in 128 ways."""
    first = sequences * 0
    span = sequences
    while span > 1:
        step = tl.cdiv(span, 128)
        probe = first + tl.arange(0, 128) * step
        valid = probe < first + span
        # First slots rise strictly, so that counting those up to this one finds the place.
        slots = edge(cu_seqlens, probe, tokens, valid) // SEGMENT + probe
        before = tl.sum((valid & (slots <= slot)).to(tl.int32), axis=0)
        first += tl.maximum(before - 1, 0) * step
        span = tl.minimum(step, sequences - first)
    return first


@triton.jit
def locate(cu_seqlens, sequences, width):
    """(sequence, its first token, its length, the segment's position in it) of this program.

    ``width`` is T of a padded batch, N of a packed one.
    """
    slot = tl.program_id(0).to(tl.int64)
    if cu_seqlens is None:
        # An empty row too has a slot, whose program writes its sums of 0.
        per_sequence = tl.maximum(tl.cdiv(width, SEGMENT), 1)
        sequence = slot // per_sequence
        start = sequence * width
        length = width
        position = (slot - sequence * per_sequence) * SEGMENT
    else:
        sequence = find_sequence(cu_seqlens, slot, sequences, width)
        start = edge(cu_seqlens, sequence, width, True)
        length = edge(cu_seqlens, sequence + 1, width, True) - start
        position = (slot - start // SEGMENT - sequence) * SEGMENT
    return sequence, start, length, position


@triton.jit
def place(pointer, row, row_stride, first, stride, offset, LAYOUT: tl.constexpr):
    """Pointers to tokens first + offset of a row.

    ``LAYOUT`` describes the memory. With "aligned" a tile starts at a multiple of 8 elements and
    of 16 bytes, with "unit" tokens are contiguous, and "strided" promises nothing.
    """
    if LAYOUT == "strided":
        pointers = pointer + row * row_stride + (first + offset) * stride
    else:
        pointers = pointer + row * row_stride + first + offset
    if LAYOUT == "aligned":
        bytes_of_8: tl.constexpr = max(8, pointer.dtype.element_ty.primitive_bitwidth)
        pointers = tl.multiple_of(pointers, [min(16, bytes_of_8)])
    return pointers


@triton.jit
def load_weights(mask, row, row_stride, first, stride, offset, inside, ACC, LAYOUT: tl.constexpr):
    """(weights, where they are not 0): the mask's, ones without a mask, and zeros outside."""
    if mask is None:
        given = inside
    else:
        pointers = place(mask, row, row_stride, first, stride, offset, LAYOUT)
        given = tl.load(pointers, mask=inside, other=0)
    if given.dtype == tl.int1:
        keep = given
        weight = tl.where(keep, 1.0, 0.0).to(ACC)
    else:
        weight = given.to(ACC)
        keep = weight != 0
    return weight, keep


@triton.jit
def store(pointer, token, offset, value, inside, LAYOUT: tl.constexpr):
    """Store to a contiguous output, by way of fp32 if the output is narrower."""
    at = place(pointer, 0, 0, token, 1, offset, LAYOUT)
    if pointer.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    tl.store(at, value, mask=inside)


@triton.jit
def store_zeros(pointer, first, count):
    """Store zeros to ``count`` places of an output, if it is wanted."""
    if pointer is not None:
        zeros = tl.zeros((TILE,), pointer.dtype.element_ty)
        for tile in range(tl.cdiv(count, TILE)):
            offset = tile * TILE + tl.arange(0, TILE)
            tl.store(pointer + first + offset, zeros, mask=offset < count)


@triton.jit
def store_partial(partials, row: tl.constexpr, slots, value):
    tl.store(partials + row * slots + tl.program_id(0), value.to(tl.float64))


def kernel(function):
    """``triton.jit`` without variants for the divisibility of numbers and addresses.

    A new length or coefficient therefore never compiles anything, and ``LAYOUT`` gives the useful
    facts. Strides and numbers are separate parameters for the same reason. For a tuple, Triton
    (3.9) makes a variant for each element's value (1, divisible by 16, beyond 32 bits), and the
    decorator cannot prevent it.
    """
    parameters = inspect.signature(function).parameters.values()
    numbers = [p.name for p in parameters if p.annotation is tl.int64]
    pointers = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)


@triton.jit
def segments_of(cu_seqlens, sequence, valid, width):
    """(first slot, number of segments, number of tokens) of sequences [n]."""
    if cu_seqlens is None:
        per_sequence = tl.maximum(tl.cdiv(width, SEGMENT), 1)
        first = sequence * per_sequence
        tokens = tl.where(valid, width, 0)
    else:
        start = edge(cu_seqlens, sequence, width, valid)
        end = edge(cu_seqlens, sequence + 1, width, valid)
        first = start // SEGMENT + sequence
        tokens = tl.where(valid, tl.maximum(end - start, 0), 0)
    return first, tl.cdiv(tokens, SEGMENT), tokens
