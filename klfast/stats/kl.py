"""Per-sequence statistics that come out of the same read as the penalty."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.values import holds_values
from klfast.distributed import full_tensor, is_dtensor
from klfast.distributed.ranks import Ranks, check_same, folded
from klfast.stats.transfer import are_readable, fields_of, finite_floats, line_of, parts_of
from klfast.types.dtypes import wide

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OF_TOKENS = ("k1", "k2", "k3", "max_abs_log_ratio")
"""The statistics of the log-ratio. Exact divergences have them only with ``token_ids``."""


class KLStats(NamedTuple):
    """Statistics of the policy from one read of the log-probs, one entry per sequence.

    Every field is a tensor of shape [S] in the arithmetic's dtype (fp32, or fp64 for fp64 input),
    on the inputs' device, without gradient. ``x`` is the unclipped log-ratio in nats. Sums are over
    kept tokens, weighted by the mask. Counts and maxima are over kept tokens, unweighted.

    Attributes:
        kl: sum of the chosen estimator with its weight and limits, before ``coef``; nats per
            sequence.
        length: sum of the mask (the number of kept tokens for a boolean mask).
        k1: sum of x.
        k2: sum of x**2 / 2.
        k3: sum of expm1(-x) + x.
        max_abs_log_ratio: max of abs(x); 0 for an empty sequence, NaN if a kept x is NaN.
        clipped: number of tokens where ``log_ratio_clip``, ``kl_clip`` or ``importance_cap`` acted.
        nonfinite: number of tokens whose x, or whose term of ``kl``, is NaN or infinite. The term
            of k3 is infinite in fp32 from x = -89 on; ``linear_tail`` and ``log_ratio_clip`` of
            :class:`klfast.Estimator` keep it finite.

    With :func:`klfast.kl_divergence`, ``kl`` sums the exact divergences, and ``nonfinite`` counts
    the tokens whose divergence is NaN or infinite. ``k1``, ``k2``, ``k3`` and
    ``max_abs_log_ratio`` are statistics of the tokens in ``token_ids``, and NaN without them.
    ``clipped`` is 0.

    ``torch.load(weights_only=True)`` loads statistics that ``torch.save`` wrote, once klfast is
    imported.
    """

    kl: Tensor
    length: Tensor
    k1: Tensor
    k2: Tensor
    k3: Tensor
    max_abs_log_ratio: Tensor
    clipped: Tensor
    nonfinite: Tensor

    def token_mean(self) -> Tensor:
        """Sum of ``kl`` over sum of ``length``, in nats per token, 0-dim; 0 if no token is kept."""
        return divide(self.kl.sum(), self.length.sum())

    def sequence_mean(self) -> Tensor:
        """Mean of ``kl`` over the sequences that keep a token, in nats per sequence, 0-dim."""
        return divide(self.kl.sum(), (self.length > 0).sum())

    @staticmethod
    def cat(stats: Sequence[KLStats]) -> KLStats:
        """Concatenate the statistics of several batches; ``a + b`` concatenates two.

        The statistics of all micro-batches are bit for bit the statistics of the whole batch. They
        must be on one device.

        Raises:
            ValueError: ``stats`` is empty.
            TypeError: ``stats`` holds something else.
        """
        return _of_table(torch.cat([torch.stack(part) for part in parts_of(KLStats, stats)], 1))

    def __add__(self, other: object) -> KLStats:
        return KLStats.cat([self, other]) if isinstance(other, KLStats) else NotImplemented

    def all_reduce(self, group: ProcessGroup, *, sharded: bool = False) -> KLStats:
        """The statistics of all ranks of ``group``; every rank gets the same bits.

        By default every rank has its own sequences, any number of them (data parallelism). The
        result concatenates them in the order of ranks, as :meth:`cat` does. It is bit for bit the
        result of one process with all sequences.

        With ``sharded=True`` every rank has the same S sequences, and its own tokens of each, or
        none (sequence and context parallelism). For each sequence, sums and counts are added in
        fp64, by halves of the ranks, and the greatest maximum is taken. The result is [S].

        For both, reduce over the shards first, and then over the ranks with different sequences.
        The function cannot detect a wrong ``sharded``. A wrong value counts a sequence several
        times, or merges several sequences into one.

        The result is fp64 if a rank's statistics are fp64. The function takes two all-reduces, one
        for shapes and one for statistics, and waits for the first.

        Args:
            group: the ranks, all of which must call.
            sharded: whether ranks have the same sequences. It must be the same on every rank.

        Raises:
            TypeError: ``group`` is not a process group that this process is in.
            RuntimeError: ``sharded`` differs between ranks, or S does with ``sharded=True`` (raised
                on every rank). torch.distributed raises it if a rank has died or does not answer in
                time.
        """
        ranks, table = Ranks(group, "group"), torch.stack(self)
        told = ranks.tell(table, sharded)
        check_same("sharded", told.sharded)
        check_same("the number of statistics of a sequence", told.rows)
        if not sharded:
            return _of_table(ranks.side_by_side(table, told))
        check_same("with sharded=True, the number of sequences", told.columns)
        tables = ranks.gather(wide(table))
        whole = folded(tables)
        # A sequence's tokens are on several ranks: its sums add up, its maxima do not.
        whole[_MAXIMA] = tables[:, _MAXIMA].amax(0)
        return _of_table(whole.to(torch.float64 if any(told.is_double) else table.dtype))

    def as_dict(self, prefix: str = "kl/") -> dict[str, Tensor]:
        """A flat dict of 0-dim tensors for a logger, without a transfer from the device.

        Names begin with ``prefix``. ``k1``, ``k2`` and ``k3`` are means per token, ``length`` the
        mean over sequences, ``max_abs_log_ratio`` the maximum, ``clipped`` and ``nonfinite`` the
        totals.
        """
        sums = torch.stack((*self, self.length.sign())).sum(1)
        sequences = self.kl.numel()
        for row in _MAXIMA if sequences else ():
            sums[row] = self[row].max()
        if sums.dtype in _CODES and holds_values(self.kl):
            # On the host floats are 4 times faster than torch ops. Quotients of fp32 numbers have
            # the same bits, rounded from fp64.
            of = [*sums.tolist(), sequences]
            quotients = [
                of[row] if by is None else of[row] / of[by] if of[by] > 0 else 0.0
                for row, by in _QUOTIENTS
            ]
            memory = array(_CODES[sums.dtype], quotients)
            scalars = [*torch.frombuffer(memory, dtype=sums.dtype).unbind()]
        else:
            totals = [*sums.unbind(), sums.new_full((), sequences)]
            scalars = [
                totals[row] if by is None else divide(totals[row], totals[by])
                for row, by in _QUOTIENTS
            ]
        return {prefix + name: value for name, value in zip(LOGGED, scalars, strict=True)}

    def to_floats(self, prefix: str = "kl/") -> dict[str, float]:
        """The numbers of :meth:`as_dict` as floats that JSON can hold, with one transfer.

        Names begin with ``prefix``. Unknown numbers are left out: ``k1``, ``k2``, ``k3`` and
        ``max_abs_log_ratio`` of exact divergences without ``token_ids``, and numbers that are NaN
        or infinite, which ``nonfinite`` counts.
        """
        return finite_floats(self.as_dict(prefix))

    def __repr__(self) -> str:
        if not are_readable(self):
            return fields_of(self)
        logged, unknown = self.as_dict(""), OF_TOKENS if is_without_tokens(self) else ()
        shown = {label: logged[name] for name, label in _LABELS.items() if name not in unknown}
        return line_of("KLStats", {"sequences": self.kl.numel(), **shown})


torch.serialization.add_safe_globals([KLStats])


def gathered(value: Any) -> Any:
    """Replace a DTensor, or the DTensors in ``KLStats``, by plain tensors; return others unchanged.

    Nothing is sent if every rank already has the whole tensor, as with statistics.
    """
    if isinstance(value, KLStats):
        return KLStats(*map(full_tensor, value)) if is_dtensor(value.kl) else value
    return full_tensor(value)


def without_tokens(stats: KLStats) -> KLStats:
    """Statistics of exact divergences without sampled tokens: the fields ``OF_TOKENS`` are NaN."""
    return stats._replace(**dict.fromkeys(OF_TOKENS, torch.full_like(stats.kl, torch.nan)))


def is_without_tokens(stats: KLStats) -> Tensor:
    """True if :func:`without_tokens` returned these statistics, 0-dim."""
    return stats.k1.isnan().all() & ~stats.nonfinite.any() & (stats.k1.numel() > 0)


def with_tokens_of(stats: KLStats, taken: KLStats) -> KLStats:
    """Statistics of exact divergences, with the fields ``OF_TOKENS`` from ``taken``."""
    return stats._replace(**{name: getattr(taken, name) for name in OF_TOKENS})


def _of_table(table: Tensor) -> KLStats:
    return KLStats(*table.unbind(0))


LOGGED = {
    "token_mean": ("kl", "per token"),
    "sequence_mean": ("kl", "per kept sequence"),
    "k1": ("k1", "per token"),
    "k2": ("k2", "per token"),
    "k3": ("k3", "per token"),
    "length": ("length", "per sequence"),
    "max_abs_log_ratio": ("max_abs_log_ratio", "maximum"),
    "clipped": ("clipped", "total"),
    "nonfinite": ("nonfinite", "total"),
}
"""The names of ``as_dict`` -> a field of ``KLStats``, and how the sequences' numbers are combined.
A field that is logged as a maximum is a maximum over ranks too. The others are sums."""

_FIELDS = KLStats._fields
_DIVISORS = {
    "per token": _FIELDS.index("length"),
    "per kept sequence": len(_FIELDS),
    "per sequence": len(_FIELDS) + 1,
}
# By name of LOGGED: the indices of numerator and denominator among the totals.
_QUOTIENTS = tuple((_FIELDS.index(field), _DIVISORS.get(how)) for field, how in LOGGED.values())
_MAXIMA = [_FIELDS.index(field) for field, how in LOGGED.values() if how == "maximum"]

_METHODS = ("token_mean", "sequence_mean")
_BY = {"per token": "{}/length", "per sequence": "{}/sequences"}
# The expressions of fields and methods that repr shows, by name of as_dict.
_LABELS = {
    name: f"{name}()" if name in _METHODS else _BY.get(how, "{}").format(field)
    for name, (field, how) in LOGGED.items()
}

# The dtypes of arithmetic -> the type codes of Python's arrays.
_CODES = {torch.float32: "f", torch.float64: "d"}


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, 0 where the denominator is 0."""
    present = denominator > 0
    return torch.where(present, numerator / torch.where(present, denominator, 1), 0)
