"""The result of ``rollout_correction``, and its per-sequence statistics, from one read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from klfast.distributed.ranks import Ranks, check_same, folded
from klfast.formulas.rollout import SUMS, chi2
from klfast.stats.kl import divide
from klfast.stats.transfer import are_readable, fields_of, finite_floats, line_of, parts_of
from klfast.types.dtypes import wide

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RuleStats(NamedTuple):
    """The numbers that one rejection criterion compared, one entry per sequence. The fields are
    tensors of shape [S], in nats for statistics of x.

    A criterion over tokens compares a number for each kept token. A criterion over sequences
    compares one number for each sequence. All fields except the counts are then this number (0 if a
    sequence has none).

    Attributes:
        total: sum of the statistic, weighted by the mask; for a sequence its number.
        least: the least number.
        greatest: the greatest number.
        below: how many numbers are below ``low``.
        above: how many numbers are above ``high``.
        bounded: sum of the statistic moved into [low, high], weighted by the mask.
        bounded_squares: sum of the squares of the moved statistic, weighted by the mask.
    """

    total: Tensor
    least: Tensor
    greatest: Tensor
    below: Tensor
    above: Tensor
    bounded: Tensor
    bounded_squares: Tensor


class RolloutStats(NamedTuple):
    """Statistics of policy and rollout policy from one read, one entry per sequence.

    Every field except ``rules`` is a tensor of shape [S] in the arithmetic's dtype (fp32, or fp64
    for fp64 input), on the inputs' device, without gradient. ``x = logprobs - rollout_logprobs`` in
    nats. Kept tokens are the tokens whose mask is not 0, before any rejection. Sums are weighted by
    the mask, counts and extremes are not. A kept token whose x is NaN or infinite is in ``length``,
    ``tokens``, ``nonfinite`` and ``rejected``, and adds nothing to any other field, but 1 to
    ``weight_deviation``. Only weights and criteria of sequences use an x of -inf. ``weight``,
    ``weight_squares`` and ``weight_deviation`` then have such weights. Exponentials saturate at 20
    nats (see ``klfast.formulas.rollout``). Weights are weights before ``normalize``, and 1
    without weights.

    Attributes:
        length: sum of the mask before rejection.
        tokens: number of kept tokens.
        nonfinite: number of kept tokens whose x is NaN or infinite.
        kept: sum of the mask after rejection.
        rejected: number of kept tokens that were rejected.
        logprobs: sum of the policy's log-probs.
        k1: sum of x.
        abs: sum of abs(x).
        k2: sum of x**2 / 2.
        k3: sum of expm1(x) - x, for KL(rollout || policy).
        ratio: sum of exp(x).
        chi2: sum of exp(2x) - 1.
        error: sum of exp(abs(x)) - 1.
        min_log_ratio: least x; 0 for a sequence without a finite kept token.
        max_log_ratio: greatest x; 0 for such a sequence.
        weight: sum of the weights.
        weight_squares: sum of their squares.
        weight_deviation: sum of (weight - 1)**2, and 1 for a token without a weight. Near on-policy
            it holds the variance, whose digits the sum of squares loses.
        min_weight: least weight; 0 for such a sequence.
        max_weight: greatest weight; 0 for such a sequence.
        below: number of tokens whose weight was below ``floor``; without a floor, below 1 /
            ``cap``, although no bound acts there.
        above: number of tokens whose weight was above ``cap``.
        outside: number of tokens whose weight was truncated or masked.
        rules: :class:`~klfast.stats.rollout.RuleStats` of each criterion in ``reject``, in order.
    """

    length: Tensor
    tokens: Tensor
    nonfinite: Tensor
    kept: Tensor
    rejected: Tensor
    logprobs: Tensor
    k1: Tensor
    abs: Tensor
    k2: Tensor
    k3: Tensor
    ratio: Tensor
    chi2: Tensor
    error: Tensor
    min_log_ratio: Tensor
    max_log_ratio: Tensor
    weight: Tensor
    weight_squares: Tensor
    weight_deviation: Tensor
    min_weight: Tensor
    max_weight: Tensor
    below: Tensor
    above: Tensor
    outside: Tensor
    rules: tuple[RuleStats, ...] = ()

    def table(self) -> Tensor:
        """All fields as rows, [fields, S], in their order, and the criteria's fields last."""
        *fields, rules = self
        return torch.stack([*fields, *(field for rule in rules for field in rule)])

    @classmethod
    def of_table(cls, table: Tensor) -> RolloutStats:
        """The statistics with this ``table``."""
        rows = table.unbind(0)
        names, each = cls._fields[:-1], len(RuleStats._fields)
        starts = range(len(names), len(rows), each)
        rules = tuple(RuleStats(*rows[start : start + each]) for start in starts)
        return cls(**dict(zip(names, rows, strict=False)), rules=rules)

    @staticmethod
    def cat(stats: Sequence[RolloutStats]) -> RolloutStats:
        """Concatenate the statistics of several micro-batches; ``a + b`` concatenates two.

        The result is bit for bit the statistics of the whole batch. All must be on one device.

        Raises:
            ValueError: ``stats`` is empty, or ``reject`` had more criteria in one call than in
                another.
            TypeError: ``stats`` holds something else.
        """
        parts = parts_of(RolloutStats, stats)
        rules = {len(part.rules) for part in parts}
        if len(rules) > 1:
            raise ValueError(f"stats must have the same rules, got {sorted(rules)} of them")
        return RolloutStats.of_table(torch.cat([part.table() for part in parts], 1))

    def __add__(self, other: object) -> RolloutStats:
        return (
            RolloutStats.cat([self, other]) if isinstance(other, RolloutStats) else NotImplemented
        )

    def all_reduce(self, group: ProcessGroup) -> RolloutStats:
        """The statistics of the sequences of all ranks, in the order of ranks.

        It is for data parallelism: each rank has its own sequences, any number of them. Every rank
        gets the same bits. The function takes two all-reduces, one for shapes and one for
        statistics, and waits for the first. ``KLStats.all_reduce`` also takes sequences whose
        tokens are on several ranks. Here a sequence must be on one rank, because its total decides
        before the statistics are made.

        Args:
            group: the ranks, all of which must call, with statistics of the same criteria in the
                same order. Only their number is checked.

        Raises:
            TypeError: ``group`` is not a process group that this process is in.
            RuntimeError: ``reject`` had more criteria on one rank than on another (raised on every
                rank). torch.distributed raises it if a rank has died or does not answer in time.
        """
        ranks, table = Ranks(group, "group"), self.table()
        told = ranks.tell(table)
        rules = [(rows - rows_of_table(0)) // len(RuleStats._fields) for rows in told.rows]
        check_same("the number of rules in reject", rules)
        return RolloutStats.of_table(ranks.side_by_side(table, told))

    def weight_mean(self, over: str, group: ProcessGroup | None = None) -> Tensor:
        """The mean of the weights, 0-dim, in ``wide_dtype``, over tokens, or over sequences that
        keep a token.

        Args:
            over: ``"token"``: sum of the weights over the sum of the mask. ``"sequence"``: mean of
                the sequences' own means.
            group: the ranks whose sequences enter the mean, or None for this process alone.
        """
        weight, length = wide(self.weight), wide(self.length)
        if over == "sequence":
            weight, length = divide(weight, length), wide(length > 0)
        sums = torch.stack([weight.sum(), length.sum()])
        if group is not None:
            sums = folded(Ranks(group, "group").gather(sums))
        return divide(sums[0], sums[1])

    def as_dict(self, prefix: str = "rollout/") -> dict[str, Tensor]:
        """A flat dict of 0-dim tensors for a logger, without a transfer from the device.

        Names begin with ``prefix``. Means are per token (over the sum of the mask) unless the name
        says otherwise. Means over sequences leave out sequences without a kept token. A mean over
        nothing is 0.

        =========================== ===============================================================
        name                        value
        =========================== ===============================================================
        kl, k2, k3                  means of -x, x**2 / 2, expm1(x) - x: KL(rollout || policy), nats
        abs_log_ratio               mean of abs(x)
        min_log_ratio               least x
        max_log_ratio               greatest x
        error                       mean of exp(abs(x)) - 1
        policy_ppl, rollout_ppl     means over sequences of exp(-mean log-prob)
        log_ppl_diff                mean over sequences of -mean x, log(policy_ppl / rollout_ppl)
        chi2_token, chi2_sequence   means of exp(2x) - 1, and of exp(2 sum x) - 1
        ess                         effective sample size of the weights over tokens, in [0, 1]
        weight_mean, _min, _max     of the weights before ``normalize``
        outside                     fraction of tokens whose weight was truncated or masked
        above, below                fractions beyond ``cap``, and below ``floor`` (or 1 / cap)
        rejected_tokens             fraction of tokens that were rejected
        rejected_sequences          fraction of sequences that kept no token
        touched_sequences           fraction of sequences that lost a token
        tokens, kept_tokens         the sum of the mask before and after rejection
        nonfinite                   number of tokens whose x was NaN or infinite
        =========================== ===============================================================
        """
        is_there, length = self.length > 0, self.length.sum()
        counted = self.tokens > self.nonfinite
        tokens = self.tokens.sum()

        def mean(sums: Tensor) -> Tensor:
            return divide(sums.sum(), length)

        def fraction(counts: Tensor) -> Tensor:
            return divide(counts.sum(), tokens)

        def of_sequences(values: Tensor) -> Tensor:
            number = is_there.sum().to(self.length.dtype)
            return divide(torch.where(is_there, values.to(self.length.dtype), 0).sum(), number)

        mean_x = divide(self.k1, self.length)
        mean_logprob = divide(self.logprobs, self.length)
        scalars = {
            "kl": mean(-self.k1),
            **{row.mean: mean(getattr(self, name)) for name, row in SUMS.items() if row.mean},
            "min_log_ratio": least(self.min_log_ratio, counted),
            "max_log_ratio": greatest(self.max_log_ratio, counted),
            "policy_ppl": of_sequences(torch.exp(-mean_logprob)),
            "rollout_ppl": of_sequences(torch.exp(mean_x - mean_logprob)),
            "log_ppl_diff": of_sequences(-mean_x),
            "chi2_sequence": of_sequences(chi2(self.k1)),
            "ess": divide(self.weight.sum().square(), length * self.weight_squares.sum()),
            "weight_min": least(self.min_weight, counted),
            "weight_max": greatest(self.max_weight, counted),
            "outside": fraction(self.outside),
            "above": fraction(self.above),
            "below": fraction(self.below),
            "rejected_tokens": divide(length - self.kept.sum(), length),
            "rejected_sequences": of_sequences(self.rejected == self.tokens),
            "touched_sequences": of_sequences(self.rejected > 0),
            "tokens": length,
            "kept_tokens": self.kept.sum(),
            "nonfinite": self.nonfinite.sum(),
        }
        return {prefix + name: value for name, value in scalars.items()}

    def to_floats(self, prefix: str = "rollout/") -> dict[str, float]:
        """The numbers of :meth:`as_dict` as floats that JSON can hold, with one transfer.

        Names begin with ``prefix``. Numbers that are NaN or infinite are left out.
        """
        return finite_floats(self.as_dict(prefix))

    def __repr__(self) -> str:
        if not are_readable(self[:-1]):
            return fields_of(self)
        logged = self.as_dict("")
        main = {name: logged[name] for name in _MAIN_NUMBERS}
        return line_of("RolloutStats", {"sequences": self.length.numel(), **main})


class RolloutCorrection(NamedTuple):
    """Weights, mask and statistics: ``weights, mask, stats = rollout_correction(...)``.

    Attributes:
        weights: per token in the shape of the log-probs, in the arithmetic's dtype, without
            gradient. They are 0 where masked or where x is not finite, and None with
            ``weight=None``. A rejected token keeps its weight, and only the mask leaves it out.
        mask: the given mask in its own dtype, with 0 for rejected tokens; a boolean mask if none
            was given.
        stats: :class:`RolloutStats`.
    """

    weights: Tensor | None
    mask: Tensor
    stats: RolloutStats

    @property
    def token_weights(self) -> Tensor:
        """The weights times the mask, 0 where a token is masked or rejected, for other losses than
        klfast's. Without weights, the mask.

        ``(correction.token_weights * loss).sum() / correction.stats.length.sum()`` is the corrected
        loss, if no loss under the mask is NaN or infinite.
        """
        mask = self.mask.to(self.stats.length.dtype)
        if self.weights is None:
            return mask
        return torch.where(self.mask != 0, self.weights * mask, 0.0)


# The names of as_dict that repr shows.
_MAIN_NUMBERS = ("tokens", "k3", "ess", "weight_mean", "outside", "rejected_tokens", "nonfinite")


torch.serialization.add_safe_globals([RolloutCorrection, RolloutStats, RuleStats])


def rows_of_table(rules: int) -> int:
    """The number of rows in the table of ``RolloutStats`` with this many criteria."""
    return len(RolloutStats._fields) - 1 + rules * len(RuleStats._fields)


def least(values: Tensor, counted: Tensor) -> Tensor:
    """The least value of the counted sequences; 0 without any."""
    return 0.0 - greatest(-values, counted)  # not -0


def greatest(values: Tensor, counted: Tensor) -> Tensor:
    """The greatest value of the counted sequences; 0 without any."""
    if values.numel() == 0:
        return values.new_zeros(())
    top = torch.where(counted, values, -torch.inf).amax()
    return torch.where(counted.any(), top, 0.0)
