"""The kernels between sampler and trainer; ``rollout_launch`` is their host side.

``segments`` says how a batch is cut and what sums depend on, ``rollout_tokens`` what a token comes
to, ``rollout_statistics`` what is summed. A launch takes ``RULES`` rules at most, since each has
accumulators of its own; the launches of further rules go on with the mask that the first have left.
"""

import triton
import triton.language as tl

from klfast.backends.triton import rollout_statistics as stats
from klfast.backends.triton.math import clamp
from klfast.backends.triton.rollout_statistics import FIELD, PER_RULE, ROWS_OF_RULE, RULES_FROM
from klfast.backends.triton.rollout_tokens import saturated, statistic, two_events, weight_of
from klfast.backends.triton.segments import (
    SEGMENT,
    kernel,
    load_mask,
    locate,
    number,
    place,
    segments_of,
    store,
    store_partial,
    store_zeros,
    weights_of,
)

TILE = tl.constexpr(512)
"""Tokens; it shapes the sums. Half of the penalty's: a token has some 20 accumulators."""
RULES = tl.constexpr(4)
assert SEGMENT.value <= TILE.value * stats.FULL_FIELD.value  # counts of a lane fit their fields


@triton.jit
def number_as(bits, ACC: tl.constexpr):
    """The double of these bits in the dtype of arithmetic."""
    return number(None, bits).to(ACC)


@triton.jit
def four_numbers(first, second, third, fourth, ACC: tl.constexpr):
    """The bounds of the rules of a launch."""
    first, second = number_as(first, ACC), number_as(second, ACC)
    return first, second, number_as(third, ACC), number_as(fourth, ACC)


@triton.jit
def own_segment(cu_seqlens, sequences, width, LAYOUT: tl.constexpr):
    """Where this program's segment is.

    (sequence, its end among all tokens, the row that inputs have it in, the segment's position in
    the sequence, its first token in the row, its first among all tokens, number of its tokens).
    """
    sequence, start, length, position = locate(cu_seqlens, sequences, width)
    token = start + position
    count = tl.minimum(tl.maximum(length - position, 0), SEGMENT).to(tl.int32)
    if LAYOUT == "aligned":
        token = tl.multiple_of(token, 8)
        count = tl.multiple_of(count, 8)
        position = tl.multiple_of(position, 8)
    if cu_seqlens is None:
        row, first = sequence, position
    else:
        row, first = sequence * 0, token
    return sequence, start + length, row, position, first, token, count


@triton.jit
def differences(
    logprobs,
    logprobs_row,
    logprobs_stride,
    rollout_logprobs,
    rollout_logprobs_row,
    rollout_logprobs_stride,
    row,
    first,
    offset,
    inside,
    ACC,
    LAYOUT: tl.constexpr,
):
    """(logprobs, rollout_logprobs, their difference, where it is finite) of a tile."""
    at = place(logprobs, row, logprobs_row, first, logprobs_stride, offset, LAYOUT)
    a = tl.load(at, mask=inside, other=0).to(ACC)
    at = place(
        rollout_logprobs, row, rollout_logprobs_row, first, rollout_logprobs_stride, offset, LAYOUT
    )
    b = tl.load(at, mask=inside, other=0).to(ACC)
    x = a - b
    return a, b, x, tl.abs(x) < float("inf")


@triton.jit
def load_advantage(
    advantages,
    row_stride,
    stride,
    sequence,
    row,
    first,
    offset,
    inside,
    ADVANTAGES: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The advantages of a tile, or of its sequence; anything where there are none."""
    advantage = inside
    if ADVANTAGES == "sequence":
        advantage = tl.load(advantages + sequence * stride)
    if ADVANTAGES == "token":
        at = place(advantages, row, row_stride, first, stride, offset, LAYOUT)
        advantage = tl.load(at, mask=inside, other=0)
    return advantage


@triton.jit
def apply_rules(
    mask,
    counted,
    a,
    b,
    x,
    k3,
    advantage,
    lows,
    highs,
    FORMULAS: tl.constexpr,
    OVER: tl.constexpr,
    OUTWARD: tl.constexpr,
    BINARY: tl.constexpr,
    FRACTIONS: tl.constexpr,
):
    """(terms of all rules, where no rule over tokens rejects, counts in fields of ``FIELD`` bits).

    a, b and x are 0 where the token is not counted.
    """
    events = two_events(a, b) if BINARY else None
    added = ()
    counts = tl.zeros(x.shape, tl.int32)
    passed = counted
    for i in tl.static_range(len(FORMULAS)):
        low, high = lows[i], highs[i]
        value = statistic(x, k3, events, FORMULAS, i)
        added = added + stats.rule_terms(
            mask, counted, value, clamp(value, low, high), OVER, i, FRACTIONS
        )
        if OVER[i] == "token":
            is_below = counted & (value < low)
            is_above = counted & (value > high)
            fails = is_below | is_above
            if OUTWARD[i]:
                fails = fails & tl.where(advantage > 0, x > 0, x < 0)
            passed = passed & (fails == 0)
            counts += is_below.to(tl.int32) << (2 * FIELD * i)
            counts += is_above.to(tl.int32) << (2 * FIELD * i + FIELD)
    return added, passed, counts


@triton.jit
def store_count(partials, row: tl.constexpr, slots, counts, PLACE: tl.constexpr):
    """The sum of the field at ``PLACE`` of a tile's counts."""
    field = (counts >> (PLACE * FIELD)) & stats.FULL_FIELD
    store_partial(partials, row, slots, tl.sum(field, axis=0))


@kernel
def rollout_kernel(
    logprobs,
    rollout_logprobs,
    mask,
    advantages,
    cu_seqlens,
    weights,
    passes,
    partials,
    low: tl.int64,
    high: tl.int64,
    least: tl.int64,
    floor: tl.int64,
    cap: tl.int64,
    low_0: tl.int64,
    high_0: tl.int64,
    low_1: tl.int64,
    high_1: tl.int64,
    low_2: tl.int64,
    high_2: tl.int64,
    low_3: tl.int64,
    high_3: tl.int64,
    sequences: tl.int64,
    width: tl.int64,
    slots: tl.int64,
    logprobs_row: tl.int64,
    logprobs_stride: tl.int64,
    rollout_logprobs_row: tl.int64,
    rollout_logprobs_stride: tl.int64,
    mask_row: tl.int64,
    mask_stride: tl.int64,
    advantages_row: tl.int64,
    advantages_stride: tl.int64,
    STATISTICS: tl.constexpr,
    FOLLOWS: tl.constexpr,
    OUTSIDE: tl.constexpr,
    HOW: tl.constexpr,
    COUNTS_HOW: tl.constexpr,
    FORMULAS: tl.constexpr,
    OVER: tl.constexpr,
    OUTWARD: tl.constexpr,
    BINARY: tl.constexpr,
    RULES_HOW: tl.constexpr,
    ADVANTAGES: tl.constexpr,
    FRACTIONS: tl.constexpr,
    ACC: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One read of a segment: weights if each token has its own, the mask as rules over tokens leave
    it, partial sums. low, high, ... are those of the weight, low_0, ... those of the rules.

    The last launch has ``STATISTICS``; one that ``FOLLOWS`` finds in passes what the others left.
    ``ADVANTAGES``: "token" or "sequence" is what they are of.
    """
    sequence, end, row, position, first, token, count = own_segment(
        cu_seqlens, sequences, width, LAYOUT
    )
    low, high = number_as(low, ACC), number_as(high, ACC)
    least, floor, cap = number_as(least, ACC), number_as(floor, ACC), number_as(cap, ACC)
    lows = four_numbers(low_0, low_1, low_2, low_3, ACC)
    highs = four_numbers(high_0, high_1, high_2, high_3, ACC)

    parts = stats.empty(HOW, stats.ALL, TILE, ACC)
    of_rules = stats.empty(RULES_HOW, len(RULES_HOW), TILE, ACC)
    counts = tl.zeros((TILE,), tl.int32)
    rule_counts = tl.zeros((TILE,), tl.int32)
    for done in range(0, count, TILE):
        offset = done + tl.arange(0, TILE)
        inside = offset < count
        given = load_mask(mask, row, mask_row, first, mask_stride, offset, inside, LAYOUT)
        share, keep = weights_of(given, ACC)
        a, b, x, is_finite = differences(
            logprobs,
            logprobs_row,
            logprobs_stride,
            rollout_logprobs,
            rollout_logprobs_row,
            rollout_logprobs_stride,
            row,
            first,
            offset,
            inside,
            ACC,
            LAYOUT,
        )
        # Selected, never multiplied: NaN under the mask has no effect.
        counted = keep & is_finite
        a = tl.where(counted, a, 0.0)
        b = tl.where(counted, b, 0.0)
        x = tl.where(counted, x, 0.0)
        ratio, ratio_minus_1, k3 = saturated(x)
        advantage = load_advantage(
            advantages,
            advantages_row,
            advantages_stride,
            sequence,
            row,
            first,
            offset,
            inside,
            ADVANTAGES,
            LAYOUT,
        )
        of_token, passed, fields = apply_rules(
            share,
            counted,
            a,
            b,
            x,
            k3,
            advantage,
            lows,
            highs,
            FORMULAS,
            OVER,
            OUTWARD,
            BINARY,
            FRACTIONS,
        )
        of_rules = stats.add(of_rules, of_token, RULES_HOW, len(RULES_HOW))
        rule_counts += fields
        at = place(passes, 0, 0, token, 1, offset, LAYOUT)
        if FOLLOWS:
            passed = passed & (tl.load(at, mask=inside, other=0) != 0)
        tl.store(at, tl.where(passed, given, tl.zeros((TILE,), given.dtype)), mask=inside)

        weight, off, is_below, is_above = weight_of(
            x, ratio, ratio_minus_1, counted, low, high, least, floor, cap, OUTSIDE
        )
        if weights is not None:
            store(weights, token, offset, weight, inside, LAYOUT)
        added = stats.terms(
            share,
            counted,
            passed,
            a,
            x,
            weight,
            off,
            ratio,
            ratio_minus_1,
            k3,
            STATISTICS,
            FRACTIONS,
        )
        parts = stats.add(parts, added, HOW, stats.ALL)
        flags = (keep, keep & (counted == 0), keep & (passed == 0), is_below, is_above)
        for i in tl.static_range(stats.COUNTS_OF_CALL):
            if COUNTS_HOW[i] != "absent":
                counts += flags[i].to(tl.int32) << (FIELD * i)

    if cu_seqlens is not None:
        if (sequence == sequences - 1) & (position == 0):
            # What follows the last sequence, in a buffer longer than its sequences.
            store_zeros(weights, end, width - end)
            store_zeros(passes, end, width - end)

    for i in tl.static_range(stats.ALL):
        if HOW[i] != "absent":
            store_partial(partials, i, slots, stats.as_one(parts, HOW, i, TILE))
    for i in tl.static_range(stats.COUNTS_OF_CALL):
        if COUNTS_HOW[i] != "absent":
            store_count(partials, stats.ALL + i, slots, counts, i)
    rules = partials + RULES_FROM * slots
    for i in tl.static_range(len(OVER)):
        for j in tl.static_range(PER_RULE):
            if RULES_HOW[PER_RULE * i + j] != "absent":
                one = stats.as_one(of_rules, RULES_HOW, PER_RULE * i + j, TILE)
                store_partial(rules, ROWS_OF_RULE * i + j, slots, one)
        if OVER[i] == "token":
            for side in tl.static_range(2):
                store_count(
                    rules, ROWS_OF_RULE * i + PER_RULE + side, slots, rule_counts, 2 * i + side
                )


@triton.jit
def load_parts(partials, slots, here, sums, HOW: tl.constexpr, COUNT: tl.constexpr):
    """Sums of sequences, with the parts of a segment of each where that is there."""
    combined = ()
    for row in tl.static_range(COUNT):
        sum_so_far = sums[row]
        if HOW[row] != "absent":
            part = tl.load(partials + row * slots, mask=here, other=stats.neutral(HOW, row))
            sum_so_far = stats.combine(sum_so_far, part, HOW, row)
        combined = combined + (sum_so_far,)
    return combined


@kernel
def rollout_combine_kernel(
    partials,
    cu_seqlens,
    decided,
    table,
    rule_table,
    low: tl.int64,
    high: tl.int64,
    least: tl.int64,
    floor: tl.int64,
    cap: tl.int64,
    low_0: tl.int64,
    high_0: tl.int64,
    low_1: tl.int64,
    high_1: tl.int64,
    low_2: tl.int64,
    high_2: tl.int64,
    low_3: tl.int64,
    high_3: tl.int64,
    sequences: tl.int64,
    width: tl.int64,
    slots: tl.int64,
    STATISTICS: tl.constexpr,
    FOLLOWS: tl.constexpr,
    WEIGHT: tl.constexpr,
    OUTSIDE: tl.constexpr,
    HOW: tl.constexpr,
    COUNTS_HOW: tl.constexpr,
    OVER: tl.constexpr,
    RULES_HOW: tl.constexpr,
    FILTERED: tl.constexpr,
    FRACTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From segments to sequences: rows of a table [23 + 7 * rules, S], and what was decided.

    decided [2, S], in fp64, None if no total decides: whether a sequence passes the rules over
    sequences, of this launch and of those that it ``FOLLOWS``; the weight of its counted tokens.
    rule_table starts at the first rule of this launch.
    """
    sequence = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = sequence < sequences
    first, segments, _ = segments_of(cu_seqlens, sequence, valid, sequences, width)
    parts = stats.empty(HOW, stats.ALL, BLOCK, tl.float64)
    counts = stats.empty(COUNTS_HOW, stats.COUNTS_OF_CALL, BLOCK, tl.float64)
    of_rules = stats.empty(RULES_HOW, len(RULES_HOW), BLOCK, tl.float64)
    for i in range(tl.max(segments, axis=0)):
        here = i < segments
        at = partials + first + i
        parts = load_parts(at, slots, here, parts, HOW, stats.ALL)
        at += stats.ALL * slots
        counts = load_parts(at, slots, here, counts, COUNTS_HOW, stats.COUNTS_OF_CALL)
        at += stats.COUNTS_OF_CALL * slots
        of_rules = load_parts(at, slots, here, of_rules, RULES_HOW, len(RULES_HOW))

    lows = four_numbers(low_0, low_1, low_2, low_3, tl.float64)
    highs = four_numbers(high_0, high_1, high_2, high_3, tl.float64)
    length, _, _, counted = stats.mask_sums(parts, counts, FRACTIONS)
    passes = valid
    if FOLLOWS:
        if decided is not None:
            passes = tl.load(decided + sequence, mask=valid, other=0) != 0
    for i in tl.static_range(len(OVER)):
        of_rule = ()
        for j in tl.static_range(ROWS_OF_RULE):
            of_rule = of_rule + (of_rules[ROWS_OF_RULE * i + j],)
        fields, passes_rule = stats.rule_rows(of_rule, lows[i], highs[i], length, counted, OVER, i)
        passes = passes & passes_rule
        for row in tl.static_range(len(fields)):
            at = rule_table + (len(fields) * i + row) * sequences + sequence
            tl.store(at, fields[row], mask=valid)
    if decided is not None:
        tl.store(decided + sequence, tl.where(passes, 1.0, 0.0), mask=valid)
    if STATISTICS:
        log = tl.zeros((BLOCK,), tl.float64)
        if WEIGHT == "sequence" or WEIGHT == "geometric":
            log = parts[stats.K1]
        if WEIGHT == "geometric":
            log = log / tl.where(length > 0, length, 1.0)
        fields, weight = stats.rows(
            parts,
            counts,
            passes,
            log,
            number(None, low),
            number(None, high),
            number(None, least),
            number(None, floor),
            number(None, cap),
            OUTSIDE,
            WEIGHT == "token",
            FILTERED,
            FRACTIONS,
        )
        for row in tl.static_range(len(fields)):
            tl.store(table + row * sequences + sequence, fields[row], mask=valid)
        if decided is not None:
            tl.store(decided + sequences + sequence, weight, mask=valid)


@kernel
def rollout_fill_kernel(
    logprobs,
    rollout_logprobs,
    mask,
    cu_seqlens,
    decided,
    nonfinite,
    weights,
    passes,
    sequences: tl.int64,
    width: tl.int64,
    logprobs_row: tl.int64,
    logprobs_stride: tl.int64,
    rollout_logprobs_row: tl.int64,
    rollout_logprobs_stride: tl.int64,
    mask_row: tl.int64,
    mask_stride: tl.int64,
    ACC: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """What totals have decided: the weight of a sequence at its counted tokens, if weights are
    wanted, and zeros in the mask of a sequence that was rejected.

    nonfinite is that row of the table: where it is 0, log-probs are not read again.
    """
    sequence, end, row, position, first, token, count = own_segment(
        cu_seqlens, sequences, width, LAYOUT
    )
    if weights is not None:
        weight = tl.load(decided + sequences + sequence).to(ACC)
        is_finite = tl.load(nonfinite + sequence) == 0
        for done in range(0, count, TILE):
            offset = done + tl.arange(0, TILE)
            inside = offset < count
            given = load_mask(mask, row, mask_row, first, mask_stride, offset, inside, LAYOUT)
            _, counted = weights_of(given, ACC)
            if is_finite == 0:
                of_tokens = differences(
                    logprobs,
                    logprobs_row,
                    logprobs_stride,
                    rollout_logprobs,
                    rollout_logprobs_row,
                    rollout_logprobs_stride,
                    row,
                    first,
                    offset,
                    inside,
                    ACC,
                    LAYOUT,
                )
                counted = counted & of_tokens[3]
            store(weights, token, offset, tl.where(counted, weight, 0.0), inside, LAYOUT)
        if cu_seqlens is not None:
            if (sequence == sequences - 1) & (position == 0):
                store_zeros(weights, end, width - end)
    if tl.load(decided + sequence) == 0:
        store_zeros(passes, token, count)
