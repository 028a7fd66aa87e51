"""Per-sequence statistics that come out of the same read as the penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from klfast.ranks import Ranks, folded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OF_TOKENS = ("k1", "k2", "k3", "max_log_ratio")
"""The statistics of the log-ratio, which of distributions only the tokens in ``token_ids`` have."""


class KLStats(NamedTuple):
    """What one read of the log-probs says about the policy, one entry per sequence.

    Every field is a tensor of shape [S] in the arithmetic's dtype (fp32, or fp64 for fp64 input),
    on the inputs' device, without gradient. ``x`` is the unclipped log-ratio in nats; sums are over
    kept tokens, weighted by the mask; counts and maxima are over kept tokens, unweighted.

    Attributes:
        kl: sum of the chosen estimator with its weight and limits, before ``coef``; nats per
            sequence.
        length: sum of the mask (the number of kept tokens for a boolean mask).
        k1: sum of x.
        k2: sum of x**2 / 2.
        k3: sum of expm1(-x) + x.
        max_log_ratio: max of abs(x); 0 for an empty sequence, NaN if a kept x is NaN.
        clipped: number of tokens where ``log_ratio_clip``, ``kl_clip`` or ``importance_cap`` acted.
        nonfinite: number of tokens whose x is NaN or infinite.

    Of :func:`klfast.kl_divergence`, ``kl`` sums the exact divergences and ``nonfinite`` counts the
    tokens whose divergence is NaN or infinite; ``k1``, ``k2``, ``k3`` and ``max_log_ratio`` are of
    the tokens in ``token_ids``, and NaN without them; ``clipped`` is 0.

    ``torch.load(weights_only=True)`` loads statistics that ``torch.save`` wrote, once klfast is
    imported.
    """

    kl: Tensor
    length: Tensor
    k1: Tensor
    k2: Tensor
    k3: Tensor
    max_log_ratio: Tensor
    clipped: Tensor
    nonfinite: Tensor

    def token_mean(self) -> Tensor:
        """Sum of ``kl`` over sum of ``length``: nats per token, 0-dim; 0 when nothing is kept."""
        return per_token(self.kl, self.length)

    def sequence_mean(self) -> Tensor:
        """Mean of ``kl`` over the sequences that keep a token: nats per sequence, 0-dim."""
        return _ratio(self.kl.sum(), (self.length > 0).sum())

    def of_distributions(self) -> KLStats:
        """Those of exact divergences, where no token was taken: NaN for what is said of tokens."""
        return self._replace(**dict.fromkeys(OF_TOKENS, torch.full_like(self.kl, torch.nan)))

    def with_tokens(self, taken: KLStats) -> KLStats:
        """These with what ``taken`` says of the tokens that were taken."""
        return self._replace(**{name: getattr(taken, name) for name in OF_TOKENS})

    def all_reduce(self, group: ProcessGroup) -> KLStats:
        """The statistics of whole sequences, whose tokens are sharded over the ranks of ``group``.

        For sequence and context parallelism: every rank has the same S sequences, and of each its
        own tokens, or none. Sums are added in fp64 in the order of ranks' halves, maxima are taken;
        every rank gets the same bits, from one all-reduce. For different sequences on the ranks
        (data parallelism), give the controller a ``process_group`` instead; for both, the group of
        the ranks with different sequences alone.

        Raises:
            TypeError: ``group`` is not a process group that this process is in.
            RuntimeError: of torch.distributed, where a rank has died or does not answer in time.
        """
        table = Ranks(group).gather(torch.stack([field.double() for field in self]))
        sums, largest = folded(table), table.amax(0)
        at = self._fields.index("max_log_ratio")
        whole = [*sums[:at], largest[at], *sums[at + 1 :]]
        fields = zip(whole, self, strict=True)
        return KLStats(*(new.to(old.dtype) for new, old in fields))

    def as_dict(self, prefix: str = "kl/") -> dict[str, Tensor]:
        """A flat dict of 0-dim tensors for a logger; reading them is left to the logger.

        ``k1``, ``k2`` and ``k3`` are means per token, ``length`` the mean over sequences,
        ``max_log_ratio`` the maximum, ``clipped`` and ``nonfinite`` the totals.
        """
        empty = self.kl.numel() == 0
        largest = self.max_log_ratio.new_zeros(()) if empty else self.max_log_ratio.max()
        scalars = {
            "token_mean": self.token_mean(),
            "sequence_mean": self.sequence_mean(),
            "k1": per_token(self.k1, self.length),
            "k2": per_token(self.k2, self.length),
            "k3": per_token(self.k3, self.length),
            "length": _ratio(self.length.sum(), torch.full_like(self.length, 1).sum()),
            "max_log_ratio": largest,
            "clipped": self.clipped.sum(),
            "nonfinite": self.nonfinite.sum(),
        }
        return {prefix + name: value for name, value in scalars.items()}


torch.serialization.add_safe_globals([KLStats])


def per_token(total: Tensor, length: Tensor) -> Tensor:
    """Sum of per-sequence totals over the sum of lengths, 0-dim; 0 when nothing is kept."""
    return _ratio(total.sum(), length.sum())


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator > 0, numerator / denominator, torch.zeros_like(numerator))
