"""The kernels over logits; ``logits_launch`` is their host side.

Shapes: R rows of V entries, R = A * T of logits [A, T, V]. A row is cut into segments, a segment is
read tile by tile into sums of every lane, and a pairwise tree adds the lanes up, once. Sums of
segments are added in fp64, in their order. A segment's length follows from V, and a tile's from the
arithmetic, so that a row's results depend only on the row.

A forward kernel is compiled for a ``STAGE``:

- "row": a program reads a row of one segment and finishes it.
- "segment": a program reads one segment of a row and stores its sums in partials
  [K, R * segments].
- "combine": a program adds up a row's partial sums and finishes it.

To finish a row, a program reads it again if its sums are not accurate enough, and writes the
per-row results. In stage "row" it writes the row's gradients too. The notes in ``segments`` on
fusion, divisibility and doubles apply here too.

Functions share these tuples:

- ``cut``: (entries per row, entries per segment, segments per row).
- ``x_of``: (pointer to a row, stride of its entries), and ``pair``, these of two models.
- ``picks_of``: (token ids of all rows, row, ids per row).
- ``state``: (divergence, origins, lse, shift, slope) of a finished pair of rows.
- ``incoming``: the gradients of (divergence, log-prob, log-prob under the second model,
  log-sum-exp, log-sum-exp of the second model).
- ``numbers``: (1 / temperature, parameter of the divergence).
- ``row``: the factors of an entry's gradient, for ``gradients_of`` or ``entropy_gradient``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from klfast.backends.triton.divergences import (
    LN2,
    LOG2E,
    entropy_gradient,
    entropy_of,
    entropy_row,
    exact_of,
    gradient_row,
    gradients_of,
    guess_of,
    is_excluded,
    is_good,
    is_usable,
    mixture_of,
    moment_of,
    origin_of,
    pair_of,
    pair_placed,
    pair_row,
    rounded,
    scales_of,
    word_of,
)
from klfast.backends.triton.math import clamp, exp, expm1
from klfast.backends.triton.segments import kernel, number, place, store
from klfast.backends.triton.statistics import tree_sum

NO_ID = tl.constexpr(-(2**63))  # ``klfast.args.logits.NO_ID``


class Form(NamedTuple):
    """The constants that every kernel is compiled for."""

    acc: Any  # the arithmetic's type
    tile: int
    layout: str  # see ``place``
    stages: int  # of the memory pipeline, counting the tile that is computed
    picks: int = 1  # token ids of a row that are processed together
    has_temperatures: bool = False  # one per row


@triton.jit
def program_place(segments, STAGE: tl.constexpr):
    """(row, first segment of this program, the one after its last)."""
    # A row's number times its length may pass 2^31.
    program = tl.program_id(0).to(tl.int64)
    if STAGE == "segment":
        row = program // segments
        first = program % segments
        last = first + 1
    else:
        row = program
        first = program * 0
        last = segments
    return row, first, last


@triton.jit
def words_of(logits, row, inner, outer_stride, inner_stride, word_stride):
    """(pointer to a row, stride of its entries) of logits [A, T, V], T = inner."""
    return logits + row // inner * outer_stride + row % inner * inner_stride, word_stride


@triton.jit
def is_kept(keep, row):
    """True if a row is read."""
    if keep is None:
        kept = row >= 0
    else:
        kept = tl.load(keep + row)
    return kept


@triton.jit
def bounds(i, cut, FORM: tl.constexpr):
    """(first entry, number of entries) of a segment, with ``cut`` (words, segment, segments)."""
    words, segment, _ = cut
    begin = i * segment
    count = tl.minimum(words - begin, segment).to(tl.int32)
    if FORM.layout == "aligned":
        begin = tl.multiple_of(begin, 8)
        count = tl.multiple_of(count, 8)
    return begin, count


@triton.jit
def output_place(row, words, begin, FORM: tl.constexpr):
    """The place of a row's entries in a contiguous output."""
    at = row * words + begin
    if FORM.layout == "aligned":
        at = tl.multiple_of(at, 8)
    return at


@triton.jit
def load_words(x_of, begin, offset, count, FORM: tl.constexpr):
    """Logits in the arithmetic's type. Entries beyond the last count as excluded."""
    pointer, stride = x_of
    at = place(pointer, 0, 0, begin, stride, offset, FORM.layout)
    return tl.load(at, mask=offset < count, other=float("-inf")).to(FORM.acc)


@triton.jit
def load_pair(pair, origins, begin, offset, count, FORM: tl.constexpr):
    """``load_words`` of both models, placed."""
    x = load_words(pair[0], begin, offset, count, FORM)
    return pair_placed(x, load_words(pair[1], begin, offset, count, FORM), origins)


@triton.jit
def load_logit(x_of, token, words):
    """A token's logit in fp64, or NaN if its id is outside the vocabulary."""
    pointer, stride = x_of
    is_word = (token >= 0) & (token < words)
    # No value of an id makes the load leave the row. A kernel cannot raise, so NaN tells of it.
    at = pointer + tl.where(is_word, token, 0) * stride
    return tl.load(at, mask=is_word, other=float("nan")).to(tl.float64)


@triton.jit
def inverse_of(inverse_temperature_at, inverse_temperature, row, FORM: tl.constexpr):
    """1 / temperature of a row, in fp64; NaN if a tensor holds a temperature that is not > 0."""
    if FORM.has_temperatures:
        inverse = tl.load(inverse_temperature_at + row)
    else:
        inverse = number(inverse_temperature_at, inverse_temperature)
    return tl.where(inverse > 0, inverse, float("nan"))


@triton.jit
def load_picks(token_ids, row, picks, done, FORM: tl.constexpr):
    """(places among all picks, ids, whether they are there) of picks of a row, from ``done`` on."""
    pick = done + tl.arange(0, FORM.picks)
    at = row * picks + pick
    return at, tl.load(token_ids + at, mask=pick < picks, other=NO_ID), pick < picks


@triton.jit
def are_none(ids, FORM: tl.constexpr):
    """True at a place without an id. A row's only id is always there."""
    if FORM.picks == 1:
        none = ids != ids
    else:
        none = ids == NO_ID
    return none


@triton.jit
def greatest_pick(x_of, picks_of, words, FORM: tl.constexpr):
    """The greatest logit of a row's picks, ignoring NaN; -infinity if no pick is in the vocabulary.

    Sums leave the picks out and add their terms in fp64. In fp32 a term near 1 would take digits
    from all others, and 1 minus the probability of the picks would have none.
    """
    token_ids, row, picks = picks_of
    largest = tl.full((), float("-inf"), tl.float64)
    for done in range(0, picks, FORM.picks):
        _, ids, _ = load_picks(token_ids, row, picks, done, FORM)
        logits = load_logit(x_of, ids, words)
        logits = tl.where(logits == logits, logits, float("-inf"))
        largest = tl.maximum(largest, tl.max(logits, axis=0))
    return largest


@triton.jit
def without_picks(x, picks_of, first, FORM: tl.constexpr):
    """A tile of logits that starts at the entry ``first``, with -infinity for the picks."""
    token_ids, row, picks = picks_of
    offset = tl.arange(0, FORM.tile)
    for done in range(0, picks, FORM.picks):
        _, ids, _ = load_picks(token_ids, row, picks, done, FORM)
        is_here = (ids >= first) & (ids < first + FORM.tile)
        # An id beyond the tile gets the place after its end, where the search below stops.
        places = tl.where(is_here, ids - first, FORM.tile).to(tl.int32)
        place = tl.min(places, axis=0)
        while place < FORM.tile:  # in the order of the row
            x = tl.where(offset == place, float("-inf"), x)
            place = tl.min(tl.where(places > place, places, FORM.tile), axis=0)
    return x


@triton.jit
def are_first(at, ids, picks_of, FORM: tl.constexpr):
    """True for picks without the same id at an earlier place of the row."""
    token_ids, row, picks = picks_of
    earlier = tl.zeros((FORM.picks,), tl.int32)
    for done in range(0, picks, FORM.picks):
        places, others, _ = load_picks(token_ids, row, picks, done, FORM)
        is_earlier = (ids[:, None] == others[None, :]) & (places[None, :] < at[:, None])
        earlier += tl.sum(is_earlier.to(tl.int32), axis=1)
    return earlier == 0


@triton.jit
def load_double(pointer, row):
    """A row's number in fp64, or 0 if there is none."""
    if pointer is None:
        value = tl.zeros((), tl.float64)
    else:
        value = tl.load(pointer + row).to(tl.float64)
    return value


@triton.jit
def first_maximum(x_of, cut, FORM: tl.constexpr):
    """A finite guess of a row's greatest logit, from its first entries."""
    begin, count = bounds(cut[0] * 0, cut, FORM)
    largest = tl.max(load_words(x_of, begin, tl.arange(0, FORM.tile // 2), count, FORM), axis=0)
    # Infinity minus an infinite guess would be NaN.
    return tl.where(tl.abs(largest) < float("inf"), largest, 0.0)


@triton.jit
def row_maximum(x_of, cut, FORM: tl.constexpr):
    """A row's greatest logit."""
    largest = tl.full((FORM.tile,), float("-inf"), FORM.acc)
    for i in range(cut[2]):
        begin, count = bounds(i, cut, FORM)
        for done in tl.range(0, count, FORM.tile, num_stages=FORM.stages):
            offset = done + tl.arange(0, FORM.tile)
            largest = tl.maximum(largest, load_words(x_of, begin, offset, count, FORM))
    return tl.max(largest, axis=0)


@triton.jit
def add_up(partials, k, row, segments, slots):
    """The sum of a row's partial results, added in their order."""
    at = partials + k * slots + row * segments
    total = tl.load(at)
    for i in range(1, segments):
        total += tl.load(at + i)
    return total


@triton.jit
def log_prob(scaled, lse):
    """The log-prob in fp64; never above 0."""
    return tl.where(scaled > lse, 0.0, scaled - lse)


@triton.jit
def offset_of(token, begin, count):
    """A token's offset in a segment, or -1 if it is not in the segment."""
    offset = token - begin
    return tl.where((offset >= 0) & (offset < count), offset, -1).to(tl.int32)


@triton.jit
def write_zeros(pointer, at, count, FORM: tl.constexpr):
    """Write zeros to entries of a gradient, if it is wanted."""
    if pointer is not None:
        for done in range(0, count, FORM.tile):
            offset = done + tl.arange(0, FORM.tile)
            zeros = tl.zeros((FORM.tile,), tl.float32)
            store(pointer, at, offset, zeros, offset < count, FORM.layout)


@triton.jit
def sum_words(
    x_of, scale, largest, picks_of, cut, first, last, ENTROPY: tl.constexpr, FORM: tl.constexpr
):
    """(sum of 2^s, sum of s 2^s if wanted), s = scale (x - largest), over segments of a row.

    The picks are not in the sums.
    """
    total = tl.zeros((), tl.float64)
    moment = tl.zeros((), tl.float64)
    for i in range(first, last):
        begin, count = bounds(i, cut, FORM)
        place = (begin * 0 - 1).to(tl.int32)
        if FORM.picks == 1:
            place = offset_of(tl.load(picks_of[0] + picks_of[1]), begin, count)
        masses = tl.zeros((FORM.tile,), FORM.acc)
        moments = tl.zeros((FORM.tile,), FORM.acc)
        for done in tl.range(0, count, FORM.tile, num_stages=FORM.stages):
            offset = done + tl.arange(0, FORM.tile)
            x = load_words(x_of, begin, offset, count, FORM)
            if FORM.picks == 1:
                x = tl.where(tl.arange(0, FORM.tile) == place - done, float("-inf"), x)
            else:
                x = without_picks(x, picks_of, begin + done, FORM)
            mass, product = word_of(x, scale, largest)
            masses += mass
            if ENTROPY:
                moments += product
        total += tree_sum(masses, FORM.tile)
        if ENTROPY:
            moment += tree_sum(moments, FORM.tile)
    return total, moment


@triton.jit
def with_picks(x_of, picks_of, scale, largest, total, moment, words, FORM: tl.constexpr):
    """The sums with the terms of the picks that they left out, each once."""
    token_ids, row, picks = picks_of
    for done in range(0, picks, FORM.picks):
        at, ids, _ = load_picks(token_ids, row, picks, done, FORM)
        counts = (ids >= 0) & (ids < words)
        if FORM.picks != 1:
            # An id that a row has twice is one entry of the vocabulary.
            counts = counts & are_first(at, ids, picks_of, FORM)
        logits = load_logit(x_of, ids, words)
        mass, product = word_of(logits, scale.to(tl.float64), largest.to(tl.float64))
        total += tl.sum(tl.where(counts, mass, 0.0), axis=0)
        moment += tl.sum(tl.where(counts, product, 0.0), axis=0)
    return total, moment


@triton.jit
def finish_words(
    x_of, scale, largest, picks_of, total, moment, cut, ENTROPY: tl.constexpr, FORM: tl.constexpr
):
    """(a logit, log-sum-exp minus the logit, entropy) of a row in fp64, summed again if needed.

    The sums are relative to the logit. csrc/formulas/passes.h says when the native kernels sum a
    row again. Here the first guess is always finite. The sums leave out the picks.
    """
    total, moment = with_picks(x_of, picks_of, scale, largest, total, moment, cut[0], FORM)
    if ~is_good(total):
        if is_usable(total):
            # The sums are usable, so that they give the row's log-sum-exp. No guess is better.
            nearer = largest.to(tl.float64) + tl.log(total) / LN2 / scale.to(tl.float64)
            largest = nearer.to(FORM.acc)
        else:
            # Sums that left the range say nothing, so the greatest logit is searched.
            largest = row_maximum(x_of, cut, FORM)
            # If every logit is -infinity the sum is 0. A NaN makes it NaN.
            largest = tl.where(largest == float("-inf"), 0.0, largest)
        total, moment = sum_words(x_of, scale, largest, picks_of, cut, 0, cut[2], ENTROPY, FORM)
        total, moment = with_picks(x_of, picks_of, scale, largest, total, moment, cut[0], FORM)
    return largest.to(tl.float64), tl.log(total), entropy_of(total, moment)


@kernel
def token_logprobs_kernel(
    logits,
    token_ids,
    keep,
    logprobs,
    entropy,
    saved,
    partials,
    inverse_temperature_at,
    inverse_temperature: tl.int64,
    picks: tl.int64,
    rows: tl.int64,
    inner: tl.int64,
    words: tl.int64,
    segment: tl.int64,
    segments: tl.int64,
    slots: tl.int64,
    outer_stride: tl.int64,
    inner_stride: tl.int64,
    word_stride: tl.int64,
    STAGE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Log-probs of picks [R, K], entropies [R] (None: not wanted), and values for a backward.

    A backward needs a logit, and the row's log-sum-exp minus the logit, [2, R].
    """
    row, first, last = program_place(segments, STAGE)
    cut = (words, segment, segments)
    ENTROPY: tl.constexpr = entropy is not None
    if is_kept(keep, row):
        x_of = words_of(logits, row, inner, outer_stride, inner_stride, word_stride)
        inverse = inverse_of(inverse_temperature_at, inverse_temperature, row, FORM)
        scale = (inverse * LOG2E).to(FORM.acc)
        picks_of = (token_ids, row, picks)
        if STAGE == "combine":
            largest = tl.load(partials + row * segments).to(FORM.acc)
            total = add_up(partials, 1, row, segments, slots)
            moment = total
            if ENTROPY:
                moment = add_up(partials, 2, row, segments, slots)
        else:
            # If a pick has most of the mass, a row with a lower guess would be summed again.
            largest = first_maximum(x_of, cut, FORM)
            own = greatest_pick(x_of, picks_of, words, FORM).to(FORM.acc)
            largest = tl.where((own > largest) & (own < float("inf")), own, largest)
            total, moment = sum_words(
                x_of, scale, largest, picks_of, cut, first, last, ENTROPY, FORM
            )
        if STAGE == "segment":
            at = partials + tl.program_id(0)
            tl.store(at, largest.to(tl.float64))
            tl.store(at + slots, total)
            if ENTROPY:
                tl.store(at + 2 * slots, moment)
        else:
            base, log_total, entropy_of_row = finish_words(
                x_of, scale, largest, picks_of, total, moment, cut, ENTROPY, FORM
            )
            own_scale = scale.to(tl.float64) * LN2
            tl.store(saved + row, base)
            tl.store(saved + rows + row, log_total)
            for done in range(0, picks, FORM.picks):
                at, ids, are_there = load_picks(token_ids, row, picks, done, FORM)
                scaled = (load_logit(x_of, ids, words) - base) * own_scale
                value = tl.where(are_none(ids, FORM), 0.0, log_prob(scaled, log_total))
                tl.store(logprobs + at, value, mask=are_there)
            if ENTROPY:
                tl.store(entropy + row, entropy_of_row)
    elif STAGE != "segment":
        # The outputs were allocated without values.
        tl.store(saved + row, 0.0)
        tl.store(saved + rows + row, 0.0)
        for done in range(0, picks, FORM.picks):
            at, _, are_there = load_picks(token_ids, row, picks, done, FORM)
            tl.store(logprobs + at, tl.zeros((FORM.picks,), tl.float32), mask=are_there)
        if ENTROPY:
            tl.store(entropy + row, 0.0)


@triton.jit
def load_incoming(grad_logprobs, at, mask):
    """The incoming gradients of picks in fp64, or 0 if there are none."""
    if grad_logprobs is None:
        value = at.to(tl.float64) * 0
    else:
        value = tl.load(grad_logprobs + at, mask=mask, other=0).to(tl.float64)
    return value


@triton.jit
def incoming_of_row(grad_logprobs, token_ids, row, picks, FORM: tl.constexpr):
    """The sum of the incoming gradients of a row's log-probs."""
    total = tl.zeros((), tl.float64)
    for done in range(0, picks, FORM.picks):
        at, ids, are_there = load_picks(token_ids, row, picks, done, FORM)
        counts = are_there & ~are_none(ids, FORM)
        total += tl.sum(load_incoming(grad_logprobs, at, counts), axis=0)
    return total


@triton.jit
def incoming_of(ids, grad_logprobs, token_ids, row, picks, FORM: tl.constexpr):
    """The summed incoming gradients of a row's log-probs for each of these ids."""
    total = tl.zeros((FORM.picks,), tl.float64)
    for done in range(0, picks, FORM.picks):
        at, others, are_there = load_picks(token_ids, row, picks, done, FORM)
        incoming = load_incoming(grad_logprobs, at, are_there)
        total += tl.sum(tl.where(ids[:, None] == others[None, :], incoming[None, :], 0.0), axis=1)
    return total


@triton.jit
def has_incoming(grad_logprobs, grad_entropy, grad_lse, token_ids, row, picks, FORM: tl.constexpr):
    """True if a row has an incoming gradient that is not 0. Otherwise its gradient is 0, whatever
    the row holds.
    """
    some = (load_double(grad_entropy, row) != 0) | (load_double(grad_lse, row) != 0)
    for done in range(0, picks, FORM.picks):
        at, _ids, are_there = load_picks(token_ids, row, picks, done, FORM)
        incoming = load_incoming(grad_logprobs, at, are_there)
        some |= tl.max((incoming != 0).to(tl.int32), axis=0) > 0
    return some


@kernel
def token_logprobs_backward_kernel(
    logits,
    token_ids,
    keep,
    saved,
    logprobs,
    entropy,
    grad_logprobs,
    grad_entropy,
    grad_lse,
    grad,
    inverse_temperature_at,
    inverse_temperature: tl.int64,
    picks: tl.int64,
    rows: tl.int64,
    inner: tl.int64,
    words: tl.int64,
    segment: tl.int64,
    segments: tl.int64,
    outer_stride: tl.int64,
    inner_stride: tl.int64,
    word_stride: tl.int64,
    FORM: tl.constexpr,
):
    """The gradient of a segment of a row; ``grad`` may be the logits' own memory."""
    row, i, _ = program_place(segments, "segment")
    begin, count = bounds(i, (words, segment, segments), FORM)
    at = output_place(row, words, begin, FORM)
    some = has_incoming(grad_logprobs, grad_entropy, grad_lse, token_ids, row, picks, FORM)
    if is_kept(keep, row) & some:
        inverse = inverse_of(inverse_temperature_at, inverse_temperature, row, FORM)
        scale = (inverse * LOG2E).to(FORM.acc)
        x_of = words_of(logits, row, inner, outer_stride, inner_stride, word_stride)
        base = tl.load(saved + row).to(FORM.acc)
        exact_shift = tl.load(saved + rows + row) * LOG2E
        shift, factor = rounded(exact_shift, FORM.acc)
        # An entry's gradient is -p (slope log2(p) + constant). Picks have further terms.
        of_picks = incoming_of_row(grad_logprobs, token_ids, row, picks, FORM)
        of_picks = inverse * (of_picks - load_double(grad_lse, row))
        of_entropy = inverse * load_double(grad_entropy, row)
        rest = (shift.to(tl.float64) - exact_shift) * LN2
        constant = (of_picks + of_entropy * (rest + load_double(entropy, row))).to(FORM.acc)
        slope = (of_entropy * LN2).to(FORM.acc)
        for done in tl.range(0, count, FORM.tile, num_stages=FORM.stages):
            offset = done + tl.arange(0, FORM.tile)
            x = load_words(x_of, begin, offset, count, FORM)
            power = tl.fma(x - base, scale, -shift)
            p = tl.exp2(power) * factor
            if grad_entropy is None:
                value = -p * constant
            else:
                # An entry of probability 0 has no gradient, and its power may be -infinity.
                value = tl.where(p == 0, 0.0, -p * tl.fma(power, slope, constant))
            store(grad, at, offset, value, offset < count, FORM.layout)
        tl.debug_barrier()  # picks overwrite values written above
        for done in range(0, picks, FORM.picks):
            pick, ids, _are_there = load_picks(token_ids, row, picks, done, FORM)
            own = inverse * incoming_of(ids, grad_logprobs, token_ids, row, picks, FORM)
            is_own = (ids >= begin) & (ids < begin + count)
            log_p = tl.load(logprobs + pick, mask=is_own, other=0).to(tl.float64)
            p = exp(log_p)
            value = -own * expm1(log_p) - (of_picks - own) * p
            if grad_entropy is not None:
                of_word = of_entropy * p * (log_p + load_double(entropy, row))
                value = tl.where(p == 0, value, value - of_word)
            tl.store(grad + at + (ids - begin), value.to(FORM.acc), mask=is_own)
    else:
        write_zeros(grad, at, count, FORM)


@triton.jit
def first_guess(x, y, inverse_temperature, FORM: tl.constexpr):
    """(the origins for the greatest logits, ``guess_of`` these logits)."""
    origins = (origin_of(x, inverse_temperature), origin_of(y, inverse_temperature))
    _, _, inverse = scales_of(inverse_temperature, FORM.acc)
    x, y = pair_placed(x.to(tl.float64), y.to(tl.float64), origins)
    ratio = (y - x) * inverse
    return origins, guess_of(x * inverse, ratio, inverse_temperature, FORM.acc)


@triton.jit
def sum_pairs(
    pair,
    origins,
    guess,
    cut,
    first,
    last,
    EXCLUDES: tl.constexpr,
    ENTROPY: tl.constexpr,
    FORM: tl.constexpr,
):
    """(sums of ``pair_of``, sum of ``moment_of``, is any entry excluded) over a row's segments."""
    mass = tl.zeros((), tl.float64)
    spread = tl.zeros((), tl.float64)
    slope = tl.zeros((), tl.float64)
    other = tl.zeros((), tl.float64)
    excluded = tl.zeros((), tl.int32)
    moment = tl.zeros((), tl.float64)
    for i in range(first, last):
        begin, count = bounds(i, cut, FORM)
        masses = tl.zeros((FORM.tile,), FORM.acc)
        spreads = tl.zeros((FORM.tile,), FORM.acc)
        slopes = tl.zeros((FORM.tile,), FORM.acc)
        others = tl.zeros((FORM.tile,), FORM.acc)
        exclusions = tl.zeros((FORM.tile,), tl.int32)
        moments = tl.zeros((FORM.tile,), FORM.acc)
        for done in tl.range(0, count, FORM.tile, num_stages=FORM.stages):
            offset = done + tl.arange(0, FORM.tile)
            x, y = load_pair(pair, origins, begin, offset, count, FORM)
            word_mass, word_spread, word_slope, word_other, excludes = pair_of(
                x, y, guess, EXCLUDES
            )
            masses += word_mass
            spreads += word_spread
            slopes += word_slope
            others += word_other
            if EXCLUDES:
                exclusions |= excludes.to(tl.int32)
            if ENTROPY != "none":
                moments += moment_of(x, y, word_mass, word_other, guess, ENTROPY)
        mass += tree_sum(masses, FORM.tile)
        spread += tree_sum(spreads, FORM.tile)
        slope += tree_sum(slopes, FORM.tile)
        other += tree_sum(others, FORM.tile)
        if EXCLUDES:
            excluded |= tl.max(exclusions, axis=0)
        if ENTROPY != "none":
            moment += tree_sum(moments, FORM.tile)
    return (mass, spread, slope, other), moment, excluded != 0


@triton.jit
def entropy_of_pairs(sums, moment, ENTROPY: tl.constexpr):
    """The entropy of the model that ``ENTROPY`` names, or 0 for none."""
    # A mass and a moment must be relative to one guess. sums[0] is the first model's mass relative
    # to its guess, and sums[3] is the second's relative to its own.
    if ENTROPY == "none":
        entropy = moment
    elif ENTROPY == "first":
        entropy = entropy_of(sums[0], moment)
    else:
        entropy = entropy_of(sums[3], moment)
    return entropy


@triton.jit
def sum_terms(pair, origins, exact, mixture, cut, DIVERGENCE: tl.constexpr, FORM: tl.constexpr):
    """(the divergence, the mean under p of the first slope) of a row."""
    value = tl.zeros((), tl.float64)
    slope = tl.zeros((), tl.float64)
    for i in range(cut[2]):
        begin, count = bounds(i, cut, FORM)
        values = tl.zeros((FORM.tile,), FORM.acc)
        slopes = tl.zeros((FORM.tile,), FORM.acc)
        for done in tl.range(0, count, FORM.tile, num_stages=FORM.stages):
            offset = done + tl.arange(0, FORM.tile)
            x, y = load_pair(pair, origins, begin, offset, count, FORM)
            part, p, _, first_slope, _ = DIVERGENCE.terms(x, y, exact, mixture)
            counts = ~(is_excluded(x) & is_excluded(y))  # else the log-ratio is NaN
            values += tl.where(counts, part, 0.0)
            slopes += tl.where(counts, p * first_slope, 0.0)
        value += tree_sum(values, FORM.tile)
        slope += tree_sum(slopes, FORM.tile)
    return value, slope


@triton.jit
def finish_pairs(
    pair,
    origins,
    guess,
    sums,
    moment,
    cut,
    numbers,
    DIVERGENCE: tl.constexpr,
    ENTROPY: tl.constexpr,
    FORM: tl.constexpr,
):
    """((divergence, origins, lse, shift, slope), entropy) of a row in fp64.

    ``sum_terms`` defines the slope. The entropy is NaN if the divergence is. The row is read up to
    two more times if needed. csrc/formulas/passes.h says when the native kernels read a row again.
    Here the first guess is always finite. If the sums relative to the greatest logits are useless
    too, the row is summed once more.
    """
    inverse_temperature, parameter = numbers
    value, lse, shift, usable, exact = pair_row(sums, False, guess)
    entropy = entropy_of_pairs(sums, moment, ENTROPY)
    looks = 1
    while (looks < 3) & ~exact & ((looks == 1) | (lse > float("-inf"))):
        better = guess_of(lse, shift, inverse_temperature, FORM.acc)
        if (looks == 1) & ~usable:
            x = row_maximum(pair[0], cut, FORM)
            y = row_maximum(pair[1], cut, FORM)
            # If every logit is -infinity the sums are 0. A NaN makes them NaN.
            are_excluded = (x == float("-inf")) & (y == float("-inf"))
            x = tl.where(are_excluded, 0.0, x)
            y = tl.where(are_excluded, 0.0, y)
            origins, better = first_guess(x, y, inverse_temperature, FORM)
        again, moment, excluded = sum_pairs(
            pair, origins, better, cut, 0, cut[2], True, ENTROPY, FORM
        )
        value, lse, shift, usable, exact = pair_row(again, excluded, better)
        entropy = entropy_of_pairs(again, moment, ENTROPY)
        looks += 1
    slope = tl.zeros((), tl.float64)
    if not DIVERGENCE.is_kl:
        row = exact_of(lse, shift, inverse_temperature, FORM.acc)
        mixture = mixture_of(parameter, FORM.acc)
        value, slope = sum_terms(pair, origins, row, mixture, cut, DIVERGENCE, FORM)
        _, _, most = DIVERGENCE.row(parameter)
        value = tl.where(lse == lse, clamp(value, 0.0, most), lse)  # NaN if all is excluded
        slope = tl.where(value == value, slope, value)  # so that the first model's gradient is NaN
    return (value, origins, lse, shift, slope), tl.where(value == value, entropy, value)


@triton.jit
def write_gradients(
    pair,
    grad_first,
    grad_second,
    where,
    token,
    state,
    incoming,
    entropy,
    numbers,
    DIVERGENCE: tl.constexpr,
    ENTROPY: tl.constexpr,
    FORM: tl.constexpr,
):
    """Write the gradients of a row's entries, except gradients that are None.

    ``where`` has the entries' place in the gradients, the first and their number. ``state`` comes
    from ``finish_pairs``, and ``entropy`` has the entropy and its gradient, all in fp64. Tiles are
    processed from the last to the first, because the last tiles read are likely still in the cache.
    """
    at, begin, count = where
    inverse_temperature, parameter = numbers
    value, origins, lse, shift, slope = state
    grad, of_token, ref_of_token, of_lse, of_ref_lse = incoming
    exact = exact_of(lse, shift, inverse_temperature, FORM.acc)
    grad *= inverse_temperature
    of_token *= inverse_temperature
    ref_of_token *= inverse_temperature
    # A log-prob subtracts its model's log-sum-exp.
    of_lse = of_token - of_lse * inverse_temperature
    of_ref_lse = ref_of_token - of_ref_lse * inverse_temperature
    of_token = of_token.to(FORM.acc)
    ref_of_token = ref_of_token.to(FORM.acc)
    mixture = mixture_of(parameter, FORM.acc)
    row = gradient_row(value, slope, grad, of_lse, of_ref_lse, parameter, DIVERGENCE, FORM.acc)
    if ENTROPY != "none":
        of_entropy = entropy_row(
            exact, lse, shift, entropy[1] * inverse_temperature, entropy[0], ENTROPY, FORM.acc
        )
    tiles = tl.cdiv(count, FORM.tile)
    for tile in tl.range(tiles, num_stages=FORM.stages):
        offset = (tiles - 1 - tile) * FORM.tile + tl.arange(0, FORM.tile)
        inside = offset < count
        x, y = load_pair(pair, origins, begin, offset, count, FORM)
        by_x, by_y = gradients_of(x, y, exact, mixture, row, DIVERGENCE)
        if grad_first is not None:
            if ENTROPY == "first":
                by_x += entropy_gradient(x, exact, of_entropy)
            by_x += tl.where(offset == token, of_token, 0.0)
            store(grad_first, at, offset, by_x, inside, FORM.layout)
        if grad_second is not None:
            if ENTROPY == "second":
                by_y += entropy_gradient(y, exact, of_entropy)
            by_y += tl.where(offset == token, ref_of_token, 0.0)
            store(grad_second, at, offset, by_y, inside, FORM.layout)


@kernel
def kl_divergence_kernel(
    first,
    second,
    token_ids,
    keep,
    row_weights,
    values,
    logprobs,
    ref_logprobs,
    entropies,
    saved,
    grad_first,
    grad_second,
    partials,
    inverse_temperature_at,
    inverse_temperature: tl.int64,
    parameter: tl.int64,
    rows: tl.int64,
    inner: tl.int64,
    words: tl.int64,
    segment: tl.int64,
    segments: tl.int64,
    slots: tl.int64,
    first_outer_stride: tl.int64,
    first_inner_stride: tl.int64,
    first_word_stride: tl.int64,
    second_outer_stride: tl.int64,
    second_inner_stride: tl.int64,
    second_word_stride: tl.int64,
    STAGE: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    ENTROPY: tl.constexpr,
    FORM: tl.constexpr,
):
    """Divergences, log-probs of tokens, entropies of the model that ``ENTROPY`` names [R], values
    for a backward [5, R], and gradients.

    Unwanted outputs are None. Stage "row" writes the gradients of sum(row_weights * values).
    """
    row, i, end = program_place(segments, STAGE)
    cut = (words, segment, segments)
    at = output_place(row, words, words * 0, FORM)
    inverse = inverse_of(inverse_temperature_at, inverse_temperature, row, FORM)
    if is_kept(keep, row):
        x_of = words_of(
            first, row, inner, first_outer_stride, first_inner_stride, first_word_stride
        )
        y_of = words_of(
            second, row, inner, second_outer_stride, second_inner_stride, second_word_stride
        )
        pair, numbers = (x_of, y_of), (inverse, number(None, parameter))
        if STAGE == "combine":
            # The programs of a row's segments all guessed from its first entries.
            x = tl.load(partials + row * segments).to(FORM.acc)
            y = tl.load(partials + slots + row * segments).to(FORM.acc)
            origins, guess = first_guess(x, y, inverse, FORM)
            sums = (
                add_up(partials, 2, row, segments, slots),
                add_up(partials, 3, row, segments, slots),
                add_up(partials, 4, row, segments, slots),
                add_up(partials, 5, row, segments, slots),
            )
            moment = sums[0]
            if ENTROPY != "none":
                moment = add_up(partials, 6, row, segments, slots)
        else:
            x = first_maximum(x_of, cut, FORM)
            y = first_maximum(y_of, cut, FORM)
            origins, guess = first_guess(x, y, inverse, FORM)
            # KL's sums are not finite if q excludes an entry that p allows. Then read again.
            sums, moment, _ = sum_pairs(
                pair, origins, guess, cut, i, end, not DIVERGENCE.is_kl, ENTROPY, FORM
            )
        if STAGE == "segment":
            partials += tl.program_id(0)
            tl.store(partials, x.to(tl.float64))
            tl.store(partials + slots, y.to(tl.float64))
            for k in tl.static_range(4):
                tl.store(partials + (2 + k) * slots, sums[k])
            if ENTROPY != "none":
                tl.store(partials + 6 * slots, moment)
        else:
            state, entropy = finish_pairs(
                pair, origins, guess, sums, moment, cut, numbers, DIVERGENCE, ENTROPY, FORM
            )
            value, origins, lse, shift, slope = state
            if ENTROPY != "none":
                tl.store(entropies + row, entropy)
            first_origin, second_origin = origins
            tl.store(values + row, value)
            tl.store(saved + row, lse)
            tl.store(saved + rows + row, shift)
            tl.store(saved + 2 * rows + row, slope)
            tl.store(saved + 3 * rows + row, first_origin)
            tl.store(saved + 4 * rows + row, second_origin)
            if token_ids is not None:
                token = tl.load(token_ids + row)
                _, _, own_scale = scales_of(inverse, FORM.acc)
                x, y = pair_placed(
                    load_logit(x_of, token, words), load_logit(y_of, token, words), origins
                )
                tl.store(logprobs + row, log_prob(x * own_scale, lse))
                tl.store(ref_logprobs + row, log_prob(y * own_scale, lse + shift))
            if grad_first is not None or grad_second is not None:
                begin, count = bounds(i, cut, FORM)
                value = value.to(FORM.acc).to(tl.float64)  # as a backward will read it
                weight, zero = load_double(row_weights, row), load_double(None, row)
                if weight != 0:
                    write_gradients(
                        pair,
                        grad_first,
                        grad_second,
                        (at, begin, count),
                        -1,
                        (value, origins, lse, shift, slope),
                        (weight, zero, zero, zero, zero),
                        (zero, zero),
                        numbers,
                        DIVERGENCE,
                        "none",
                        FORM,
                    )
                else:  # the row may hold NaN
                    write_zeros(grad_first, at, words.to(tl.int32), FORM)
                    write_zeros(grad_second, at, words.to(tl.int32), FORM)
    elif STAGE != "segment":
        # The outputs were allocated without values.
        tl.store(values + row, 0.0)
        for k in tl.static_range(5):
            tl.store(saved + k * rows + row, 0.0)
        if token_ids is not None:
            tl.store(logprobs + row, 0.0)
            tl.store(ref_logprobs + row, 0.0)
        if ENTROPY != "none":
            tl.store(entropies + row, 0.0)
        write_zeros(grad_first, at, words.to(tl.int32), FORM)
        write_zeros(grad_second, at, words.to(tl.int32), FORM)


@kernel
def kl_divergence_backward_kernel(
    first,
    second,
    token_ids,
    keep,
    values,
    saved,
    entropies,
    grad_rows,
    grad_logprobs,
    grad_ref_logprobs,
    grad_entropies,
    grad_lse,
    grad_ref_lse,
    grad_first,
    grad_second,
    inverse_temperature_at,
    inverse_temperature: tl.int64,
    parameter: tl.int64,
    rows: tl.int64,
    inner: tl.int64,
    words: tl.int64,
    segment: tl.int64,
    segments: tl.int64,
    first_outer_stride: tl.int64,
    first_inner_stride: tl.int64,
    first_word_stride: tl.int64,
    second_outer_stride: tl.int64,
    second_inner_stride: tl.int64,
    second_word_stride: tl.int64,
    DIVERGENCE: tl.constexpr,
    ENTROPY: tl.constexpr,
    FORM: tl.constexpr,
):
    """The gradients of a segment of a row."""
    row, i, _ = program_place(segments, "segment")
    begin, count = bounds(i, (words, segment, segments), FORM)
    at = output_place(row, words, begin, FORM)
    incoming = (
        load_double(grad_rows, row),
        load_double(grad_logprobs, row),
        load_double(grad_ref_logprobs, row),
        load_double(grad_lse, row),
        load_double(grad_ref_lse, row),
    )
    some = load_double(grad_entropies, row) != 0
    for k in tl.static_range(5):
        some |= incoming[k] != 0
    if is_kept(keep, row) & some:  # without, the gradient is 0, whatever the row holds
        token = -1
        if token_ids is not None:
            token = offset_of(tl.load(token_ids + row), begin, count)
        x_of = words_of(
            first, row, inner, first_outer_stride, first_inner_stride, first_word_stride
        )
        y_of = words_of(
            second, row, inner, second_outer_stride, second_inner_stride, second_word_stride
        )
        lse = load_double(saved, row)
        shift = load_double(saved, rows + row)
        slope = load_double(saved, 2 * rows + row)
        first_origin = load_double(saved, 3 * rows + row).to(FORM.acc)
        second_origin = load_double(saved, 4 * rows + row).to(FORM.acc)
        inverse = inverse_of(inverse_temperature_at, inverse_temperature, row, FORM)
        write_gradients(
            (x_of, y_of),
            grad_first,
            grad_second,
            (at, begin, count),
            token,
            (load_double(values, row), (first_origin, second_origin), lse, shift, slope),
            incoming,
            (load_double(entropies, row), load_double(grad_entropies, row)),
            (inverse, number(None, parameter)),
            DIVERGENCE,
            ENTROPY,
            FORM,
        )
    else:
        write_zeros(grad_first, at, count, FORM)
        write_zeros(grad_second, at, count, FORM)
