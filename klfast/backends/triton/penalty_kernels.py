"""The kernels of the penalty; ``penalty_launch`` is their host side.

``segments`` says how a batch is cut and what sums depend on.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from klfast.backends.triton import statistics as stats
from klfast.backends.triton.segments import (
    SEGMENT,
    TILE,
    kernel,
    load_weights,
    locate,
    number,
    place,
    segments_of,
    store,
    store_partial,
    store_zeros,
)
from klfast.backends.triton.statistics import ALL, ALWAYS, KL, LENGTH, tree_sum
from klfast.backends.triton.tokens import evaluate_tile

LAST_KEPT = tl.constexpr(ALL.value)
"""The row after the statistics in the partial results [rows, P], which are in fp64. If a call has
statistics and weights, the row holds the sum of the weighted values. Such a call has no scores."""


class Reduced(NamedTuple):
    """The constants of a call's reduction."""

    acc: tl.constexpr  # the arithmetic's type
    own_length: tl.constexpr  # whether a sequence is divided by its length
    over: tl.constexpr  # what the denominator counts: an entry of ``DENOMINATORS``
    normalized: tl.constexpr  # whether a number replaces the denominator


@triton.jit
def denominator_term(length, OVER: tl.constexpr):
    """The part of a sequence in the denominator: its sum over the batch is the total."""
    if OVER == "tokens":
        term = length
    elif OVER == "sequences":
        term = tl.where(length > 0, 1.0, 0.0).to(tl.float64)
    else:
        term = length * 0
    return term


@triton.jit
def sequence_weight(length, total, normalizer, REDUCED: tl.constexpr):
    """The weight of a sequence's sum in the result: ``sequence_weight`` of csrc/formulas.

    It is rounded to the arithmetic's type, as the backward will read it. Every gradient of a call
    is then the same, no matter which kernel computes it.
    """
    denominator = tl.full(length.shape, 1.0, tl.float64)
    if REDUCED.over != "one":
        denominator = denominator * (normalizer if REDUCED.normalized else total)
    if REDUCED.own_length:
        denominator = denominator * length
    # A sequence without kept tokens has a denominator of 0, and adds 0.
    divisible = denominator > 0
    weight = tl.where(divisible, 1.0 / tl.where(divisible, denominator, 1.0), 0.0)
    return weight.to(REDUCED.acc).to(tl.float64)


@triton.jit
def gradient_scale(
    coef,
    weights,
    grad_out,
    grad_out_stride,
    normalizer,
    sequence,
    sequences,
    width,
    GRADIENT: tl.constexpr,
    REDUCED: tl.constexpr,
):
    """The factor of the gradient of every token of a sequence.

    ``GRADIENT``: "token", "sequence" or "scalar" is what grad_out holds. "unit" is a gradient
    without one; "unit-of-shape" also without weights, which follow from a padded batch's shape.
    """
    scale = coef
    # Nobody has written weights yet: they follow from the shape, so no kernel ran before.
    if GRADIENT == "unit-of-shape":
        length = width.to(tl.float64)
        total = sequences.to(tl.float64) * denominator_term(length, REDUCED.over)
        scale *= sequence_weight(length, total, normalizer, REDUCED)
    if GRADIENT == "unit":
        scale *= tl.load(weights + sequence).to(tl.float64)
    if GRADIENT == "sequence":
        upstream = tl.load(grad_out + sequence * grad_out_stride).to(tl.float64)
        scale *= tl.load(weights + sequence).to(tl.float64) * upstream
    if GRADIENT == "scalar":
        upstream = tl.load(grad_out).to(tl.float64)
        scale *= tl.load(weights + sequence).to(tl.float64) * upstream
    return scale.to(REDUCED.acc)


@kernel
def kl_penalty_kernel(
    logprobs,
    ref_logprobs,
    old_logprobs,
    mask,
    weighting,
    cu_seqlens,
    coef_tensor,
    normalizer_tensor,
    grad_out,
    weights,
    value,
    grad_logprobs,
    grad_ref_logprobs,
    partials,
    result,
    statistics,
    coef: tl.int64,
    normalizer: tl.int64,
    cap: tl.int64,
    log_cap: tl.int64,
    low: tl.int64,
    high: tl.int64,
    tail: tl.int64,
    clip: tl.int64,
    sequences: tl.int64,
    width: tl.int64,
    slots: tl.int64,
    logprobs_row: tl.int64,
    logprobs_stride: tl.int64,
    ref_logprobs_row: tl.int64,
    ref_logprobs_stride: tl.int64,
    old_logprobs_row: tl.int64,
    old_logprobs_stride: tl.int64,
    mask_row: tl.int64,
    mask_stride: tl.int64,
    weighting_row: tl.int64,
    weighting_stride: tl.int64,
    grad_out_row: tl.int64,
    grad_out_stride: tl.int64,
    VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    SUM: tl.constexpr,
    FORM: tl.constexpr,
    REDUCED: tl.constexpr,
    LAYOUT: tl.constexpr,
    WEIGHTING: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATISTICS: tl.constexpr,
    REWARDS: tl.constexpr,
    FINISHES: tl.constexpr,
):
    """Read a segment once for per-token values, gradients and partial sums (None: not wanted).

    ``weighting`` holds the weights of a call, whose layout is ``WEIGHTING``. They multiply values
    and gradients, and are in no statistic.
    weights is [S]. This kernel writes them if there are no sums, because then no kernel follows.
    With ``FINISHES`` a sequence is one segment. Then this kernel writes result [S] and statistics
    too, with the bits of ``combine_kernel``.
    """
    ACC: tl.constexpr = REDUCED.acc
    sequence, start, length, position = locate(cu_seqlens, sequences, width)
    token = start + position  # among all tokens, as outputs are laid out
    count = tl.minimum(tl.maximum(length - position, 0), SEGMENT).to(tl.int32)
    if LAYOUT == "aligned":
        token = tl.multiple_of(token, 8)
        count = tl.multiple_of(count, 8)
    if cu_seqlens is None:
        row, first = sequence, position
    else:
        row, first = sequence * 0, token

    coef = number(coef_tensor, coef)
    if REWARDS:
        coef = -coef  # a penalty is taken off the score
    normalizer = number(normalizer_tensor, normalizer)
    scale = gradient_scale(
        coef,
        weights,
        grad_out,
        grad_out_stride,
        normalizer,
        sequence,
        sequences,
        width,
        GRADIENT,
        REDUCED,
    )
    wide_coef = coef
    coef = coef.to(ACC)
    limits = (
        number(None, low).to(ACC),
        number(None, high).to(ACC),
        number(None, tail).to(ACC),
        number(None, clip).to(ACC),
        number(None, cap).to(ACC),
        number(None, log_cap).to(ACC),
    )

    COUNT: tl.constexpr = ALL if STATISTICS else ALWAYS
    sums = stats.empty(COUNT, TILE, ACC)
    last_kept = tl.full((TILE,), -1, tl.int32)
    weighted_sum = tl.zeros((TILE,), ACC)
    for done in range(0, count, TILE):
        offset = done + tl.arange(0, TILE)
        inside = offset < count
        weight, keep = load_weights(
            mask, row, mask_row, first, mask_stride, offset, inside, ACC, LAYOUT
        )
        at = place(logprobs, row, logprobs_row, first, logprobs_stride, offset, LAYOUT)
        logprob = tl.load(at, mask=inside, other=0).to(ACC)
        # Selected, never multiplied: NaN under the mask has no effect.
        if ref_logprobs is None:
            x = tl.where(keep, logprob, 0.0)
        else:
            at = place(
                ref_logprobs, row, ref_logprobs_row, first, ref_logprobs_stride, offset, LAYOUT
            )
            x = tl.where(keep, logprob - tl.load(at, mask=inside, other=0).to(ACC), 0.0)
        log_importance = x
        if FORM.weighs:
            at = place(
                old_logprobs, row, old_logprobs_row, first, old_logprobs_stride, offset, LAYOUT
            )
            old_logprob = tl.load(at, mask=inside, other=0).to(ACC)
            log_importance = tl.where(keep, logprob - old_logprob, 0.0)

        weighted, grad, grad_ref, limited = evaluate_tile(
            x, log_importance, weight, keep, limits, VALUE, DERIVATIVE, SUM, FORM
        )
        of_statistics = weighted
        if weighting is not None:
            # A packed batch too may have one weight for each sequence.
            at = place(
                weighting, sequence, weighting_row, first, weighting_stride, offset, WEIGHTING
            )
            factor = tl.load(at, mask=inside, other=0).to(ACC)
            keep = keep & (factor != 0)  # the statistics need it no more
            weighted = tl.where(keep, factor * weighted, 0.0)
            grad = factor * grad
            grad_ref = factor * grad_ref
            if STATISTICS:
                weighted_sum += weighted
            else:
                of_statistics = weighted
        if value is not None:
            store(value, token, offset, tl.where(keep, coef * weighted, 0.0), inside, LAYOUT)
        upstream = tl.full((TILE,), 1.0, ACC)
        if GRADIENT == "token":
            at = place(grad_out, row, grad_out_row, first, grad_out_stride, offset, LAYOUT)
            upstream = tl.load(at, mask=inside, other=0).to(ACC)
        if grad_logprobs is not None:
            # An infinite or NaN incoming gradient must not reach a masked token.
            grad = tl.where(keep, scale * grad * upstream, 0.0)
            store(grad_logprobs, token, offset, grad, inside, LAYOUT)
        if grad_ref_logprobs is not None:
            grad_ref = tl.where(keep, -scale * grad_ref * upstream, 0.0)
            store(grad_ref_logprobs, token, offset, grad_ref, inside, LAYOUT)

        sums = stats.add(sums, stats.terms(of_statistics, weight, x, limited, COUNT), COUNT)
        if REWARDS:
            last_kept = tl.where(keep, offset, last_kept)

    if cu_seqlens is not None:
        if (sequence == sequences - 1) & (position == 0):
            # Clear the part of the buffer after the last sequence.
            end = start + length
            store_zeros(value, end, width - end)
            store_zeros(grad_logprobs, end, width - end)
            store_zeros(grad_ref_logprobs, end, width - end)

    if FINISHES:
        # Only a scalar needs a total over sequences, and combine_kernel finishes scalars.
        tokens = stats.as_one(sums, LENGTH, TILE, ACC) if mask is not None else width.to(tl.float64)
        weight = sequence_weight(tokens, tokens * 0, normalizer, REDUCED)
        if weights is not None:
            tl.store(weights + sequence, weight)
        if result is not None:
            kl = stats.as_one(sums, KL, TILE, ACC)
            if STATISTICS and weighting is not None:
                kl = tree_sum(weighted_sum, TILE)
            tl.store(result + sequence, wide_coef * tl.where(tokens > 0, weight * kl, 0.0))
        if STATISTICS:
            for i in tl.static_range(COUNT):
                one = tokens if i == LENGTH else stats.as_one(sums, i, TILE, ACC)
                tl.store(statistics + i * sequences + sequence, one)
    elif partials is None:
        # No kernel follows this one to write the weights, which are 1 for per-token results.
        if value is not None and weights is not None and position == 0:
            tl.store(weights + sequence, 1.0)
    else:
        for i in tl.static_range(COUNT):
            if i != LENGTH or mask is not None:
                store_partial(partials, i, slots, stats.as_one(sums, i, TILE, ACC))
        if REWARDS:
            last = tl.max(last_kept, axis=0)
            # Partial results are doubles, which hold every position exactly.
            store_partial(partials, LAST_KEPT, slots, tl.where(last < 0, -1, token + last))
        elif STATISTICS and weighting is not None:
            store_partial(partials, LAST_KEPT, slots, tree_sum(weighted_sum, TILE))


@kernel
def lengths_kernel(
    mask,
    cu_seqlens,
    partials,
    sequences: tl.int64,
    width: tl.int64,
    slots: tl.int64,
    mask_row: tl.int64,
    mask_stride: tl.int64,
    ACC: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Sums of the mask, in their row of the partials, added as ``kl_penalty_kernel`` does."""
    sequence, start, length, position = locate(cu_seqlens, sequences, width)
    count = tl.minimum(tl.maximum(length - position, 0), SEGMENT).to(tl.int32)
    if LAYOUT == "aligned":
        count = tl.multiple_of(count, 8)
        position = tl.multiple_of(position, 8)
    if cu_seqlens is None:
        row, first = sequence, position
    else:
        row, first = sequence * 0, start + position
    lengths = tl.zeros((TILE,), ACC)
    for done in range(0, count, TILE):
        offset = done + tl.arange(0, TILE)
        weight, _ = load_weights(
            mask, row, mask_row, first, mask_stride, offset, offset < count, ACC, LAYOUT
        )
        lengths += weight
    store_partial(partials, LENGTH, slots, tree_sum(lengths, TILE))


@triton.jit
def add_segments(
    partials,
    first,
    segments,
    slots,
    MASKED: tl.constexpr,
    SUMMED: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The statistics [BLOCK] of sequences in fp64; lengths and values where they were summed."""
    COUNT: tl.constexpr = ALL if STATISTICS else ALWAYS
    sums = ()
    for row in tl.static_range(COUNT):
        sums = sums + (tl.full((BLOCK,), stats.EMPTY[row], tl.float64),)
    if partials is not None:
        most = tl.max(segments, axis=0)
        for i in tl.range(0, most, loop_unroll_factor=1 if STATISTICS else 4):
            here = i < segments
            combined = ()
            for row in tl.static_range(COUNT):
                part = sums[row]
                if (row != LENGTH or MASKED) and (row != KL or SUMMED):
                    at = partials + row * slots + first + i
                    loaded = tl.load(at, mask=here, other=stats.EMPTY[row])
                    part = stats.combine(part, loaded, row)
                combined = combined + (part,)
            sums = combined
    return sums


@triton.jit
def sum_of_weighted(partials, first, segments, slots, BLOCK: tl.constexpr):
    """The sums [BLOCK] of the weighted values of sequences, if a call has statistics too."""
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(tl.max(segments, axis=0)):
        at = partials + LAST_KEPT * slots + first + i
        total += tl.load(at, mask=i < segments, other=0.0)
    return total


@triton.jit
def last_kept_of(partials, first, segments, slots, BLOCK: tl.constexpr):
    """The last kept token [BLOCK] of sequences, -1 where there is none."""
    last_kept = tl.full((BLOCK,), -1.0, tl.float64)
    for i in range(tl.max(segments, axis=0)):
        at = partials + LAST_KEPT * slots + first + i
        last_kept = stats.greater(last_kept, tl.load(at, mask=i < segments, other=-1.0))
    return last_kept


@kernel
def combine_kernel(
    partials,
    cu_seqlens,
    coef_tensor,
    normalizer_tensor,
    scores,
    weights,
    statistics,
    result,
    sums,
    coef: tl.int64,
    normalizer: tl.int64,
    sequences: tl.int64,
    width: tl.int64,
    slots: tl.int64,
    REDUCED: tl.constexpr,
    SCALAR: tl.constexpr,
    MASKED: tl.constexpr,
    SUMMED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine segments into sequences: weights (if ``WEIGHTS``), statistics, result (or None).

    A scalar result needs all sequences in one program. With more than BLOCK sequences,
    ``total_kernel`` continues from sums [2, S], which stores lengths and values.
    """
    sequence = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = sequence < sequences
    first, segments, tokens = segments_of(cu_seqlens, sequence, valid, width)
    of_sequence = add_segments(partials, first, segments, slots, MASKED, SUMMED, STATISTICS, BLOCK)
    kl = of_sequence[KL]
    if WEIGHTED and STATISTICS:
        kl = sum_of_weighted(partials, first, segments, slots, BLOCK)
    length = of_sequence[LENGTH] if MASKED else tokens.to(tl.float64)
    if sums is not None:
        tl.store(sums + sequence, length, mask=valid)
        tl.store(sums + sequences + sequence, kl, mask=valid)
    else:
        total = tl.zeros((), tl.float64)
        if SCALAR and REDUCED.over != "one":
            total = tree_sum(tl.where(valid, denominator_term(length, REDUCED.over), 0.0), BLOCK)
        normalizer = number(normalizer_tensor, normalizer)
        weight = sequence_weight(length, total, normalizer, REDUCED)
        if WEIGHTS:
            tl.store(weights + sequence, weight, mask=valid)
        if result is not None:
            coef = number(coef_tensor, coef)
            term = tl.where(length > 0, weight * kl, 0.0)
            if SCALAR:
                tl.store(result, coef * tree_sum(term, BLOCK))
            elif scores is None:
                tl.store(result + sequence, coef * term, mask=valid)
    if STATISTICS:
        for row in tl.static_range(ALL):
            value = length if row == LENGTH else of_sequence[row]
            tl.store(statistics + row * sequences + sequence, value, mask=valid)
    if scores is not None:
        last_kept = last_kept_of(partials, first, segments, slots, BLOCK)
        kept = last_kept >= 0
        at = result + tl.where(kept, last_kept, 0.0).to(tl.int64)
        score = tl.load(scores + sequence, mask=kept, other=0).to(REDUCED.acc)
        tl.store(at, tl.load(at, mask=kept, other=0.0) + score, mask=kept)


@kernel
def total_kernel(
    sums,
    coef_tensor,
    normalizer_tensor,
    weights,
    result,
    coef: tl.int64,
    normalizer: tl.int64,
    sequences: tl.int64,
    REDUCED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce sequences to a scalar result in one program; ``combine_kernel`` does it for few."""
    # The batch is gone over twice, because a sequence's weight needs the total of all.
    total = tl.zeros((BLOCK,), tl.float64)
    for done in range(0, sequences, BLOCK):
        sequence = done + tl.arange(0, BLOCK)
        valid = sequence < sequences
        length = tl.load(sums + sequence, mask=valid, other=0.0)
        total += tl.where(valid, denominator_term(length, REDUCED.over), 0.0)
    total = tree_sum(total, BLOCK)
    normalizer = number(normalizer_tensor, normalizer)
    terms = tl.zeros((BLOCK,), tl.float64)
    for done in range(0, sequences, BLOCK):
        sequence = done + tl.arange(0, BLOCK)
        valid = sequence < sequences
        length = tl.load(sums + sequence, mask=valid, other=0.0)
        kl = tl.load(sums + sequences + sequence, mask=valid, other=0.0)
        weight = sequence_weight(length, total, normalizer, REDUCED)
        if WEIGHTS:
            tl.store(weights + sequence, weight, mask=valid)
        terms += tl.where(length > 0, weight * kl, 0.0)
    if result is not None:
        tl.store(result, number(coef_tensor, coef) * tree_sum(terms, BLOCK))


@kernel
def scale_kernel(tensor, factor, size: tl.int64, ACC: tl.constexpr, LAYOUT: tl.constexpr):
    """A tensor [size] *= factor, by any number of programs; nothing where factor is 1."""
    factor = tl.load(factor).to(ACC)
    if factor != 1:
        begin = tl.program_id(0).to(tl.int64) * TILE
        for first in range(begin, size, tl.num_programs(0) * TILE):
            offset = tl.arange(0, TILE)
            left = size - first
            if LAYOUT == "aligned":
                left = tl.multiple_of(left, 8)
            inside = offset < left
            at = place(tensor, 0, 0, first, 1, offset, LAYOUT)
            value = tl.load(at, mask=inside, other=0).to(ACC)
            # 0 stays 0: a masked token has no gradient, not even from an infinite loss.
            tl.store(at, tl.where(value == 0, value, value * factor), mask=inside)
