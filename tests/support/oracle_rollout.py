"""The truth of ``rollout_correction``: probabilities, products and loops in exact arithmetic.

Nothing here is shared with klfast. klfast computes with log-ratios. The oracle computes with the
ratio r = p / q of two probabilities. k3 is r - 1 - log r, a sequence's weight is the product of its
ratios, and a binary divergence is a sum over two events. Tolerances follow ``oracle``: the promised
error of every term, and the rounding of sums. A test may not choose a number so near a bound that
rounding decides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mpmath
import oracle
import torch
from mpmath import mpf
from torch import Tensor

SATURATION = mpf(20)  # nats
LEAST_COMPLEMENT = mpf("1e-8")
ONE = mpf(1)


class Token(NamedTuple):
    """A kept token with finite log-probs. In a sequence the policy's log-prob may be -inf."""

    a: mpf
    b: mpf
    mask: float

    def log_ratio(self):
        return self.a - self.b

    def ratio(self):
        return saturated(self.a - self.b) if mpmath.isfinite(self.a) else mpf(0)


def saturated(log, below=SATURATION):
    """E to the log, which is limited to 20 nats."""
    return mpmath.exp(min(max(log, -below), SATURATION))


def _events(log):
    """The probabilities of this token and of any other."""
    p = min(mpmath.exp(log), ONE)
    return p, max(1 - p, LEAST_COMPLEMENT)


def _binary_kl(of, to):
    events = zip(_events(of), _events(to), strict=True)
    if mpmath.exp(to) == 0 < mpmath.exp(of):
        return mpmath.inf
    terms = [p * mpmath.log(p / q) for p, q in events if p]
    return max(sum(terms), mpf(0))


STATISTICS = {
    "ratio": Token.ratio,
    "k1": lambda t: mpmath.log(mpmath.exp(t.a) / mpmath.exp(t.b)),
    "abs": lambda t: max(t.a, t.b) - min(t.a, t.b),
    "k2": lambda t: (t.a - t.b) * (t.a - t.b) / 2,
    "k3": lambda t: (r := saturated(t.log_ratio(), mpmath.inf)) - 1 - mpmath.log(r),
    "binary_kl": lambda t: _binary_kl(t.b, t.a),
    "binary_kl_reverse": lambda t: _binary_kl(t.a, t.b),
    "binary_tv": lambda t: abs(_events(t.a)[0] - _events(t.b)[0]),
    "difference": lambda t: _events(t.a)[0] - _events(t.b)[0],
}


def over_sequence(statistic, over, tokens):
    """The number of a sequence that a criterion over sequences compares."""
    length = math.fsum(t.mask for t in tokens)
    if statistic == "ratio" and over in ("seq-sum", "seq-mean"):
        product = mpmath.fprod((mpmath.exp(t.a) / mpmath.exp(t.b)) ** t.mask for t in tokens)
        return product if over == "seq-sum" else product ** (1 / mpf(length))
    values = [STATISTICS[statistic](t) for t in tokens]
    total = sum(t.mask * v for t, v in zip(tokens, values, strict=True))
    of = {"seq-max": max(values), "seq-min": min(values), "seq-sum": total}
    return of.get(over, total / length)


def is_within(value, low, high):
    """True if low <= value <= high. Rounding must not decide."""
    for bound in (low, high):
        if bound is not None and value != bound:
            assert abs(value - bound) > 1e-5 * abs(bound), f"{value} is too near {bound}"
    return (low is None or value >= low) and (high is None or value <= high)


class Truth(NamedTuple):
    """Results in float64, each with the allowed error of a backend."""

    weights: Tensor
    weights_tolerance: Tensor
    mask: Tensor
    stats: dict[str, Tensor]
    tolerance: dict[str, Tensor]
    rules: list[dict[str, Tensor]]


def rollout_correction(
    logprobs,
    rollout_logprobs,
    mask=None,
    *,
    weight="token",
    floor=None,
    cap=2.0,
    outside="truncate",
    reject=(),
    normalize=None,
    cu_seqlens=None,
    advantages=None,
) -> Truth:
    """The results of klfast.rollout_correction. The weights are 1 for ``weight=None``."""
    dtype = oracle.arithmetic_dtype(logprobs, rollout_logprobs)
    shape, count = logprobs.shape, logprobs.numel()
    a, b = (t.double().flatten().tolist() for t in (logprobs, rollout_logprobs))
    m = [1.0] * count if mask is None else mask.double().flatten().tolist()
    sequences = oracle.sequences_of(shape, cu_seqlens)
    advantage = _advantage_of_token(advantages, shape, sequences)
    reject = reject if isinstance(reject, tuple) else (reject,)
    bounds = (floor, cap, outside) if weight else (None, None, outside)
    weights, relative, kept = [0.0] * count, [0.0] * count, [False] * count
    stats, tolerance, rules = [], [], [[] for _ in reject]
    for sequence in sequences:
        there = [t for t in sequence if m[t]]
        tokens = {t: Token(mpf(a[t]), mpf(b[t]), m[t]) for t in there if math.isfinite(a[t] - b[t])}
        # A token that the policy excludes counts in its sequence, with a ratio of 0.
        minus = mpf("-inf")
        excluded = {t: Token(minus, mpf(b[t]), m[t]) for t in there if a[t] - b[t] == -math.inf}
        length = math.fsum(m[t] for t in there)
        passed = dict.fromkeys(tokens, True)
        for rule, seen in zip(reject, rules, strict=True):
            judged = tokens if rule.over == "token" else tokens | excluded
            seen.append(_apply(rule, judged, passed, advantage))
        weighed = tokens | excluded if weight in ("sequence", "geometric") else tokens
        of_weights = {t: _weight(weighed, t, weight, bounds, dtype) for t in weighed}
        for t, of in of_weights.items():
            weights[t], relative[t], kept[t] = of.value, of.relative, passed.get(t, False)
        row = _statistics(there, tokens, length, of_weights, passed, m, dtype)
        stats.append({name: value for name, (value, _) in row.items()})
        tolerance.append({name: error for name, (_, error) in row.items()})
    mean = _mean_weight(normalize, stats)
    if normalize:
        relative = [error + max(relative) + 32 * oracle.unit_roundoff(dtype) for error in relative]
    return Truth(
        _vector([w / mean for w in weights]).reshape(shape),
        _vector([e * w / mean for e, w in zip(relative, weights, strict=True)]).reshape(shape),
        torch.tensor(kept, dtype=torch.bool).reshape(shape),
        _columns(stats),
        _columns(tolerance),
        [_columns(seen) for seen in rules],
    )


class Weight(NamedTuple):
    """A token's weight, its allowed relative error, and the bounds that it exceeded."""

    value: mpf
    relative: float
    below: bool
    above: bool
    outside: bool


def _weight(tokens, t, level, bounds, dtype):
    floor, cap, outside = bounds
    length = math.fsum(token.mask for token in tokens.values())
    of = {None: {}, "token": {t: tokens[t]}}.get(level, tokens)
    power = 1 / mpf(length) if level == "geometric" else ONE
    masks = {s: ONE if level == "token" else mpf(token.mask) for s, token in of.items()}
    product = mpmath.fprod(
        (mpmath.exp(token.a) / mpmath.exp(token.b)) ** (masks[s] * power) for s, token in of.items()
    )
    exponents = sum(abs(masks[s] * power * token.log_ratio()) for s, token in of.items())
    u = oracle.unit_roundoff(dtype)
    if product == 0:  # the weight is exp(-20)
        exponents = SATURATION
    log = min(abs(mpmath.log(product)), mpmath.mpf(1e6)) if product else SATURATION
    error = float(oracle.promise(max(ONE, log), dtype) + 20 * u * exponents)
    value = saturated(mpmath.log(product))
    below = not is_within(product, floor, None)
    above = not is_within(product, None, cap)
    if below or above:
        value = mpf(0) if outside == "mask" else mpf(floor if below else cap)
    if level and floor is None and cap is not None:  # counted, and nothing acts
        return Weight(value, error, not is_within(product, 1 / mpf(cap), None), above, above)
    return Weight(value, error, below, above, below or above)


def _apply(rule, tokens, passed, advantage):
    """The numbers of a criterion in one sequence. It removes rejected tokens from ``passed``."""
    numbers = {t: STATISTICS[rule.statistic](token) for t, token in tokens.items()}
    if tokens and rule.over != "token":
        of_all = over_sequence(rule.statistic, rule.over, list(tokens.values()))
        numbers = {"all": of_all}
    for t, number in numbers.items():
        if not is_within(number, rule.low, rule.high) and _counts(rule, tokens, t, advantage):
            passed.update(dict.fromkeys(passed, False) if t == "all" else {t: False})
    masks = {t: 1.0 if t == "all" else tokens[t].mask for t in numbers}
    low, high = rule.low, rule.high
    if rule.statistic == "ratio":  # the stats have its logarithm
        numbers = {t: mpmath.log(number) for t, number in numbers.items()}
        low, high = (None if bound is None else mpmath.log(bound) for bound in (low, high))
    bounded = {
        t: min(max(v, -mpmath.inf if low is None else low), mpmath.inf if high is None else high)
        for t, v in numbers.items()
    }
    return {
        "total": sum(masks[t] * v for t, v in numbers.items()),
        "least": min(numbers.values(), default=0),
        "greatest": max(numbers.values(), default=0),
        "below": sum(low is not None and v < low for v in numbers.values()),
        "above": sum(high is not None and v > high for v in numbers.values()),
        "bounded": sum(masks[t] * v for t, v in bounded.items()),
        "bounded_squares": sum(masks[t] * v * v for t, v in bounded.items()),
    }


def _counts(rule, tokens, t, advantage):
    """True if the advantage pushes the token further from the rollout policy."""
    if not rule.outward_only:
        return True
    rise = tokens[t].a - tokens[t].b
    return rise > 0 if advantage[t] > 0 else rise < 0


def _statistics(there, tokens, length, of_weights, passed, mask, dtype):
    """Name -> (value, allowed error of a backend), for one sequence."""
    u = oracle.unit_roundoff(dtype)
    values, weights = list(tokens.values()), [of_weights[t] for t in tokens]
    cancelled = sum(t.mask * oracle.textbook_error(t.log_ratio()) for t in values)
    losses = sum(w.relative * w.value * mask[t] for t, w in of_weights.items())

    def total(of, relative=None):
        terms = [t.mask * of(t) for t in values]
        allowed = sum(
            ((oracle.promise(2 * t.log_ratio(), dtype) if relative is None else relative) + 20 * u)
            * abs(term)
            for t, term in zip(values, terms, strict=True)
        )
        return sum(terms), allowed + cancelled * (dtype == torch.float64)

    def extreme(function, numbers, relative):
        value = function(numbers, default=mpf(0))
        return value, relative * abs(value)

    def count(number):
        return mpf(number), 0

    largest = max((w.relative for w in of_weights.values()), default=0)
    shares = [(mask[t], w.value) for t, w in of_weights.items()]
    return {
        "length": (mpf(length), 20 * u * length),
        "tokens": count(len(there)),
        "nonfinite": count(len(there) - len(tokens)),
        "kept": (
            mpf(math.fsum(token.mask for t, token in tokens.items() if passed[t])),
            20 * u * length,
        ),
        "rejected": count(len(there) - sum(passed.values())),
        "logprobs": total(lambda t: t.a, 0),
        "k1": total(STATISTICS["k1"], u),
        "abs": total(STATISTICS["abs"], u),
        "k2": total(STATISTICS["k2"]),
        "k3": total(STATISTICS["k3"]),
        "ratio": total(Token.ratio),
        "chi2": total(lambda t: t.ratio() ** 2 - 1),
        "error": total(lambda t: max(t.ratio(), 1 / t.ratio()) - 1),
        "min_log_ratio": extreme(min, [t.log_ratio() for t in values], 2 * u),
        "max_log_ratio": extreme(max, [t.log_ratio() for t in values], 2 * u),
        "weight": (sum(m * w for m, w in shares), losses + 20 * u * sum(m * w for m, w in shares)),
        "weight_squares": (
            sum(m * w * w for m, w in shares),
            (2 * largest + largest**2 + 20 * u) * sum(m * w * w for m, w in shares),
        ),
        "weight_deviation": _deviation(there, tokens, of_weights, mask, dtype),
        "min_weight": extreme(min, [w.value for w in weights], largest),
        "max_weight": extreme(max, [w.value for w in weights], largest),
        "below": count(sum(w.below for w in weights)),
        "above": count(sum(w.above for w in weights)),
        "outside": count(sum(w.outside for w in weights)),
    }


def _deviation(there, tokens, of_weights, mask, dtype):
    """The sum of (weight - 1)^2. A token that is not finite has the weight 0."""
    u = oracle.unit_roundoff(dtype)
    value, allowed = mpf(0), mpf(0)
    for t in there:
        of = of_weights.get(t)
        off, error = (of.value - 1, of.relative * of.value) if of else (mpf(-1), 0)
        value += mask[t] * off * off
        allowed += mask[t] * (2 * abs(off) * error + error**2 + 20 * u * off * off)
    return value, allowed


def _mean_weight(normalize, stats):
    if normalize is None:
        return 1
    if normalize == "token":
        pairs = [(row["weight"], row["length"]) for row in stats]
    else:
        pairs = [(row["weight"] / row["length"], 1) for row in stats if row["length"]]
    total, count = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
    return total / count if total else 1


def _advantage_of_token(advantages, shape, sequences):
    if advantages is None:
        return None
    flat = advantages.double().flatten().tolist()
    if advantages.shape == shape:
        return flat
    return {t: flat[s] for s, sequence in enumerate(sequences) for t in sequence}


def _columns(rows):
    """A dict of vectors over sequences, of a dict per sequence."""
    names = rows[0] if rows else ()
    return {name: _vector([row[name] for row in rows]) for name in names}


def _vector(numbers):
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)
