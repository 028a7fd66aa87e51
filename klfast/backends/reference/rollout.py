"""The readable specification between sampler and trainer: eager float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from klfast.args.rejection import Rejection
from klfast.args.rollout import RolloutCall
from klfast.formulas import rollout as formulas
from klfast.formulas.sequences import Sequences
from klfast.stats.rollout import RolloutCorrection, RolloutStats, RuleStats
from klfast.types.dtypes import wide


@torch.no_grad()
def rollout_correction(call: RolloutCall) -> RolloutCorrection:
    """Weights, mask and statistics. See ``klfast.rollout_correction``."""
    tokens = _RolloutTokens(call)
    weight = _Weight(tokens, call)
    passed = tokens.counted
    rules = []
    for rule in call.spec.rules:
        passes, stats = _judge(rule, tokens, call)
        passed = passed & passes
        rules.append(stats)
    result = None
    if call.spec.weight != "none":
        result = weight.value.to(tokens.dtype).reshape(tokens.shape)
    given = call.mask
    passed = passed.reshape(tokens.shape)
    mask = passed if given is None else torch.where(passed, given, torch.zeros_like(given))
    return RolloutCorrection(result, mask, _stats(tokens, weight, passed.flatten(), tuple(rules)))


class _RolloutTokens:
    """The inputs as flat float64 vectors over tokens.

    ``keep``: the mask is not 0. ``counted``: x is finite too. Elsewhere log-probs are 0. ``seen``:
    counted, or x is -inf. A decision per sequence sees these tokens, with a policy's log-prob of
    -inf where x is -inf.
    """

    def __init__(self, call: RolloutCall) -> None:
        self.dtype = call.arithmetic()
        self.shape = call.logprobs.shape
        mask, cu_seqlens = call.mask, call.cu_seqlens
        weight = torch.ones_like(call.logprobs) if mask is None else mask
        self.weight = wide(weight.to(self.dtype)).flatten()
        self.keep = self.weight != 0
        a, b = (wide(t).flatten() for t in (call.logprobs, call.rollout_logprobs))
        self.counted = self.keep & (a - b).isfinite()
        self.seen = self.keep & (a - b < torch.inf)
        excluded = torch.where(a - b == -torch.inf, a - b, a)
        self.seen_pair = tuple(torch.where(self.seen, t, 0.0) for t in (excluded, b))
        self.logprobs, self.rollout_logprobs = (torch.where(self.counted, t, 0.0) for t in (a, b))
        self.x = self.logprobs - self.rollout_logprobs
        self.sequences = Sequences(call.logprobs, cu_seqlens)
        self.spread = self.sequences.spread
        self.length = self.sum(self.keep)

    def sum(self, value: Tensor) -> Tensor:
        """[tokens] -> [S], weighted by the mask."""
        return self.sequences.sum(torch.where(self.keep, self.weight * value, 0.0))

    def count(self, condition: Tensor) -> Tensor:
        """[tokens] -> [S], unweighted."""
        return self.sequences.sum(condition.to(self.weight.dtype))

    def greatest(self, value: Tensor, over: Tensor) -> Tensor:
        """[tokens] -> [S] over some tokens; 0 for a sequence without one."""
        top = self.sequences.greatest(torch.where(over, value, -torch.inf), -torch.inf)
        return torch.where(self.count(over) > 0, top, 0.0)

    def least(self, value: Tensor, over: Tensor) -> Tensor:
        """[tokens] -> [S] over some tokens; 0 for a sequence without one."""
        return 0.0 - self.greatest(-value, over)  # -0 of nothing otherwise

    def mean(self, value: Tensor) -> Tensor:
        """[tokens] -> [S] over tokens that are seen, weighted by the mask; 0 without any."""
        length = self.sum(self.seen)
        return self.sum(value) / torch.where(length > 0, length, 1.0)


class _Weight:
    """A token's weight, and on which side of which bound it was.

    Token weights are compared in the arithmetic's dtype, and torch rounds the bound to it too.
    Sequence weights are compared in float64.
    """

    def __init__(self, tokens: _RolloutTokens, call: RolloutCall) -> None:
        spec = call.spec
        seen_x = tokens.seen_pair[0] - tokens.seen_pair[1]
        # The logarithms of the weights, by the names of `weight=`.
        log = {
            "none": lambda: torch.zeros_like(tokens.x),
            "token": lambda: tokens.x,
            "sequence": lambda: tokens.spread(tokens.sum(seen_x)),
            "geometric": lambda: tokens.spread(tokens.mean(seen_x)),
        }[spec.weight]()
        low, high = spec.log_bounds()
        compared = log.to(tokens.dtype) if spec.weight == "token" else log
        self.below = tokens.counted & (compared < spec.log_least())
        self.above = tokens.counted & (compared > high)
        outside = (compared < low) | (compared > high)
        self.outside = tokens.counted & outside
        value = formulas.ratio(log)
        if spec.outside == "mask":
            value = torch.where(outside, 0.0, value)
        elif spec.floor is not None or spec.cap is not None:
            value = value.clamp(spec.floor, spec.cap)
        is_of_sequence = spec.weight in ("sequence", "geometric")
        self.value = torch.where(tokens.seen if is_of_sequence else tokens.counted, value, 0.0)


def _judge(rule: Rejection, tokens: _RolloutTokens, call: RolloutCall) -> tuple[Tensor, RuleStats]:
    """Return which tokens pass a rejection criterion, and the criterion's statistics."""
    formula = formulas.TOKEN_STATISTICS[rule.formula]
    low, high = rule.bounds
    if rule.is_of_sequence:
        value = formula(*tokens.seen_pair)
        numbers: dict[str, Callable[[Tensor], Tensor]] = {
            "seq-sum": tokens.sum,
            "seq-mean": tokens.mean,
            "seq-max": partial(tokens.greatest, over=tokens.seen),
            "seq-min": partial(tokens.least, over=tokens.seen),
        }
        return _judge_sequences(numbers[rule.over](value), low, high, tokens)
    value = formula(tokens.logprobs, tokens.rollout_logprobs)
    compared = value.to(tokens.dtype)
    below, above = (compared < low) & tokens.counted, (compared > high) & tokens.counted
    fails = below | above
    if rule.outward_only:
        fails = fails & _is_pushed_outward(tokens, call)
    bounded = torch.where(tokens.counted, value.clamp(low, high), 0.0)
    stats = RuleStats(
        total=tokens.sum(value),
        least=tokens.least(value, tokens.counted),
        greatest=tokens.greatest(value, tokens.counted),
        below=tokens.count(below),
        above=tokens.count(above),
        bounded=tokens.sum(bounded),
        bounded_squares=tokens.sum(bounded.square()),
    )
    return ~fails, _in_dtype(stats, tokens)


def _judge_sequences(
    number: Tensor, low: float, high: float, tokens: _RolloutTokens
) -> tuple[Tensor, RuleStats]:
    """A sequence without a token that is seen has no number, and passes."""
    has_number = tokens.count(tokens.seen) > 0
    below, above = (number < low) & has_number, (number > high) & has_number
    bounded = torch.where(has_number, number.clamp(low, high), 0.0)
    stats = RuleStats(
        total=number,
        least=number,
        greatest=number,
        below=below,
        above=above,
        bounded=bounded,
        bounded_squares=bounded.square(),
    )
    return tokens.spread(~(below | above)), _in_dtype(stats, tokens)


def _is_pushed_outward(tokens: _RolloutTokens, call: RolloutCall) -> Tensor:
    assert call.advantages is not None
    advantages = call.advantages.to(tokens.x.dtype)
    if advantages.shape != tokens.shape:
        advantages = tokens.spread(advantages)
    rises = advantages.flatten() > 0
    return torch.where(rises, tokens.x > 0, tokens.x < 0)


def _in_dtype(stats: RuleStats, tokens: _RolloutTokens) -> RuleStats:
    return RuleStats(*(field.to(tokens.dtype) for field in stats))


def _stats(
    tokens: _RolloutTokens, weight: _Weight, passed: Tensor, rules: tuple[RuleStats, ...]
) -> RolloutStats:
    token = formulas.Token(tokens.logprobs, tokens.x, weight.value, tokens.counted)
    fields = {
        **{name: tokens.sum(row.term(token)) for name, row in formulas.SUMS.items()},
        "length": tokens.length,
        "tokens": tokens.count(tokens.keep),
        "nonfinite": tokens.count(tokens.keep & ~tokens.counted),
        "kept": tokens.sum(passed),
        "rejected": tokens.count(tokens.keep & ~passed),
        "min_log_ratio": tokens.least(token.x, tokens.counted),
        "max_log_ratio": tokens.greatest(token.x, tokens.counted),
        "min_weight": tokens.least(weight.value, tokens.counted),
        "max_weight": tokens.greatest(weight.value, tokens.counted),
        "below": tokens.count(weight.below),
        "above": tokens.count(weight.above),
        "outside": tokens.count(weight.outside),
    }
    return RolloutStats(
        **{name: field.to(tokens.dtype) for name, field in fields.items()}, rules=rules
    )
