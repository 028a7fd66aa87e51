"""The host side of the kernels between sampler and trainer: what the op of ``klfast_triton`` runs.

Arguments have been checked in Python before. The kernels stay inside their tensors whatever these
hold; shapes are taken at their word.

A call launches two kernels: one over tokens, and one that combines segments to sequences. Where a
total of a sequence decides, as it does for weights of sequences and rules over sequences, a third
fills in what it has decided. Every four rules beyond four, and in fp64 every rule beyond one, take
two launches more.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.backends.triton import rollout_kernels as kernels
from klfast.backends.triton.launch import (
    ACC,
    DEFINED,
    batch_of,
    bits,
    device_of,
    layout,
    limit,
    strides,
)
from klfast.backends.triton.rollout_statistics import (
    PER_RULE,
    ROWS_OF_RULE,
    RULES_FROM,
    how_of,
    how_of_counts,
    how_of_rule,
)
from klfast.dtypes import arithmetic_dtype
from klfast.rollout.call import (
    FORMULAS,
    OUTSIDE,
    WEIGHTS,
    RolloutChoices,
    RolloutNumbers,
    RuleBounds,
    RuleChoices,
)
from klfast.rollout.formulas import EXPONENT_LIMIT
from klfast.rollout.rejection import OVER
from klfast.rollout.stats import RolloutStats, RuleStats, rows_of_table

_RULES = kernels.RULES.value
_RULES_OF = {torch.float32: _RULES, torch.float64: 1}
"""Rules of a launch: those whose accumulators registers have room for."""
_ROWS = RULES_FROM.value + _RULES * ROWS_OF_RULE.value
_FIELDS = len(RolloutStats._fields) - 1
_BLOCK = 128  # sequences of a program that combines


class _Rules(NamedTuple):
    """The rules of a launch as kernels take them."""

    formulas: tuple[str, ...]
    over: tuple[str, ...]
    outward_only: tuple[bool, ...]
    bounds: tuple[int, ...]
    """Bits of ``_RULES`` pairs of doubles."""

    @classmethod
    def of(cls, choices: tuple[RuleChoices, ...], bounds: tuple[RuleBounds, ...]) -> _Rules:
        pairs = [*bounds, *[RuleBounds(0.0, 0.0)] * (_RULES - len(bounds))]
        return cls(
            tuple(FORMULAS[rule.formula] for rule in choices),
            tuple(OVER[rule.over] for rule in choices),
            tuple(bool(rule.outward_only) for rule in choices),
            tuple(bits(limit(bound)) for pair in pairs for bound in pair),
        )


class _Spec(NamedTuple):
    """What is computed, as kernels take it."""

    weight: str
    outside: str
    numbers: tuple[int, ...]
    """Bits of ``RolloutNumbers``."""
    launches: tuple[_Rules, ...]
    """The rules of each launch over tokens; of one without rules where there are none."""

    def over(self) -> set[str]:
        """What the rules are over."""
        return {over for rules in self.launches for over in rules.over}

    def filters(self) -> bool:
        """Whether rules over tokens reject."""
        return "token" in self.over()

    def needs_totals(self) -> bool:
        """Whether a total of a sequence decides."""
        return self.weight in ("sequence", "geometric") or bool(self.over() - {"token"})


@functools.lru_cache(maxsize=256)
def _spec(
    choices: tuple[int, ...],
    numbers: tuple[float, ...],
    rules: tuple[int, ...],
    bounds: tuple[float, ...],
    most: int,
) -> _Spec:
    """``most``: rules of a launch."""
    decoded = RolloutChoices(*choices)
    of_rules = [RuleChoices(*each) for each in _pieces(rules, len(RuleChoices._fields))]
    bounds_of_rules = [RuleBounds(*each) for each in _pieces(bounds, len(RuleBounds._fields))]
    launches = zip(_pieces(of_rules, most), _pieces(bounds_of_rules, most), strict=True)
    return _Spec(
        WEIGHTS[decoded.weight],
        OUTSIDE[decoded.outside],
        _numbers(RolloutNumbers(*numbers)),
        tuple(_Rules.of(*launch) for launch in launches) or (_Rules.of((), ()),),
    )


def _numbers(given: RolloutNumbers) -> tuple[int, ...]:
    """The numbers as kernels take them: the bounds as far as a ratio, which saturates, reaches."""
    numbers = given._replace(
        floor=min(max(given.floor, math.exp(-EXPONENT_LIMIT)), given.cap),
        cap=max(min(given.cap, math.exp(EXPONENT_LIMIT)), given.floor),
    )
    return tuple(bits(limit(number)) for number in numbers)


def _pieces(items: Any, size: int) -> list[Any]:
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]


class _Call:
    """The tensors of a call, and its launches."""

    def __init__(
        self,
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        advantages: Tensor | None,
        spec: _Spec,
    ) -> None:
        self.inputs = (logprobs, rollout_logprobs, mask)
        self.advantages = advantages
        self.spec = spec
        self.batch = batch_of(logprobs, cu_seqlens)
        self.dtype = arithmetic_dtype(logprobs, rollout_logprobs)
        self.has_fractions = mask is not None and mask.dtype != torch.bool
        weighs = spec.weight != "none"
        self.weights = self.empty(*(logprobs.shape if weighs else (0,)))
        mask_dtype = torch.bool if mask is None else mask.dtype
        self.passes = self.empty(*logprobs.shape, dtype=mask_dtype)
        rules = sum(len(rules.over) for rules in spec.launches)
        self.table = self.empty(rows_of_table(rules), self.batch.sequences)
        self.decided: Tensor | None = None
        if spec.needs_totals():
            self.decided = self.empty(2, self.batch.sequences, dtype=torch.float64)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.inputs[0].device)

    def options(self, is_last: bool) -> dict[str, Any]:
        """What both kernels of a launch are compiled for."""
        spec = self.spec
        wanted = {
            "statistics": is_last,
            "filtered": spec.filters(),
            "weighs": spec.weight == "token",
        }
        return {
            "HOW": how_of(fractions=self.has_fractions, **wanted),
            "COUNTS_HOW": how_of_counts(**wanted),
            "STATISTICS": is_last,
            "OUTSIDE": spec.outside,
            "FRACTIONS": self.has_fractions,
            **DEFINED,
        }

    def read_tokens(self, rules: _Rules, partials: Tensor, is_first: bool, is_last: bool) -> None:
        """``rollout_kernel`` over the batch."""
        batch, spec = self.batch, self.spec
        advantages, of = None, "none"
        if any(rules.outward_only) and self.advantages is not None:
            advantages = self.advantages
            of = "token" if advantages.shape == self.inputs[0].shape else "sequence"
        weights = self.weights if is_last and spec.weight == "token" else None
        per_token = advantages if of == "token" else None
        is_binary = any(name.startswith("binary") for name in rules.formulas)
        # More registers per token.
        wide = self.dtype == torch.float64 or is_binary or rules.over.count("token") > 2
        how_of_rules = [how for over in rules.over for how in how_of_rule(over)[: PER_RULE.value]]
        kernels.rollout_kernel[(batch.slots,)](
            *self.inputs,
            advantages,
            batch.cu_seqlens,
            weights,
            self.passes,
            partials,
            *spec.numbers,
            *rules.bounds,
            batch.sequences,
            batch.width,
            batch.slots,
            *(stride for tensor in self.inputs for stride in strides(tensor)),
            *strides(advantages),
            **self.options(is_last),
            FOLLOWS=not is_first,
            FORMULAS=rules.formulas,
            OVER=rules.over,
            OUTWARD=rules.outward_only,
            BINARY=is_binary,
            RULES_HOW=tuple(how_of_rules),
            ADVANTAGES=of,
            ACC=ACC[self.dtype],
            LAYOUT=layout(batch, *self.inputs, per_token),
            num_warps=8 if wide else 4,
        )

    def combine(self, rules: _Rules, partials: Tensor, before: int, is_last: bool) -> None:
        """``rollout_combine_kernel``; ``before`` rules have been combined."""
        batch, spec = self.batch, self.spec
        start = _FIELDS + before * len(RuleStats._fields)
        kernels.rollout_combine_kernel[(-(-batch.sequences // _BLOCK),)](
            partials,
            batch.cu_seqlens,
            self.decided,
            self.table,
            self.table[start:],
            *spec.numbers,
            *rules.bounds,
            batch.sequences,
            batch.width,
            batch.slots,
            **self.options(is_last),
            FOLLOWS=before > 0,
            WEIGHT=spec.weight,
            OVER=rules.over,
            RULES_HOW=tuple(how for over in rules.over for how in how_of_rule(over)),
            FILTERED=spec.filters(),
            BLOCK=_BLOCK,
            num_warps=4,
        )

    def fill(self) -> None:
        """``rollout_fill_kernel``: what totals have decided."""
        batch = self.batch
        is_total = self.spec.weight in ("sequence", "geometric")
        nonfinite = self.table[RolloutStats._fields.index("nonfinite")]
        kernels.rollout_fill_kernel[(batch.slots,)](
            *self.inputs,
            batch.cu_seqlens,
            self.decided,
            nonfinite,
            self.weights if is_total else None,
            self.passes,
            batch.sequences,
            batch.width,
            *(stride for tensor in self.inputs for stride in strides(tensor)),
            ACC=ACC[self.dtype],
            LAYOUT=layout(batch, *self.inputs),
            num_warps=4,
            **DEFINED,
        )

    def run(self) -> None:
        """All launches."""
        partials = self.empty(_ROWS, self.batch.slots, dtype=torch.float64)
        launches = self.spec.launches
        before = 0
        for i, rules in enumerate(launches):
            is_last = i == len(launches) - 1
            self.read_tokens(rules, partials, i == 0, is_last)
            self.combine(rules, partials, before, is_last)
            before += len(rules.over)
        if self.decided is not None:
            self.fill()


def rollout_correction(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    advantages: Tensor | None,
    choices: list[int],
    numbers: list[float],
    rules: list[int],
    bounds: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """The op of ``klfast.ops.table``."""
    most = _RULES_OF[arithmetic_dtype(logprobs, rollout_logprobs)]
    spec = _spec(tuple(choices), tuple(numbers), tuple(rules), tuple(bounds), most)
    call = _Call(logprobs, rollout_logprobs, mask, cu_seqlens, advantages, spec)
    if call.batch.sequences == 0:
        call.weights.zero_()
        call.passes.zero_()
    else:
        with device_of(logprobs):
            call.run()
    return call.weights, call.passes, call.table
