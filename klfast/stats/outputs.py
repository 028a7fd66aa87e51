"""The results of the functions over rows of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.args.penalty import PenaltyCall
from klfast.args.rows import Rows, RowsArgs
from klfast.stats.kl import KLStats, with_tokens_of, without_tokens


class TokenLogprobs(NamedTuple):
    """The result of :func:`klfast.token_logprobs` with ``return_entropy``.

    Attributes:
        logprobs: log-probs of the tokens, in nats, [...].
        entropy: entropies of the distributions, ``-sum p log p``, in nats, [...].
    """

    logprobs: Tensor
    entropy: Tensor


class KLDivergence(NamedTuple):
    """The result of :func:`klfast.kl_divergence` if you ask for more than the divergence.

    A function that torch.func transforms must return tensors: return the fields that are not None.

    Attributes:
        kl: ``coef`` times the reduced divergence, in nats. The function returns it alone if you ask
            for nothing else.
        logprobs: log-probs of the tokens in ``token_ids`` under the policy, in nats, [B, T] or [N];
            None without ``token_ids``.
        ref_logprobs: the same under the reference.
        entropy: entropies of the policy, in nats, [B, T] or [N]; None without ``return_entropy``.
        stats: :class:`klfast.KLStats`; None without ``return_stats``.
    """

    kl: Tensor
    logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    stats: KLStats | None = None


class TokenLoss(NamedTuple):
    """The result of :func:`klfast.linear_token_loss`.

    Attributes:
        loss: the reduced loss, 0-dim. It alone has a gradient.
        logprobs: log-probs of the tokens, in nats, [B, T] or [N], 0 where masked.
        entropy: entropies of the distributions, in nats, [B, T] or [N]; None without
            ``return_entropy``.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None = None


torch.serialization.add_safe_globals([TokenLogprobs, TokenLoss, KLDivergence])


class Outputs(NamedTuple):
    """A backend's results of a call: the fields of ``KLDivergence``, None if not requested."""

    kl: Tensor | None
    logprobs: Tensor | None
    ref_logprobs: Tensor | None
    entropy: Tensor | None
    stats: KLStats | None = None

    def of_tokens(self) -> Tensor | TokenLogprobs:
        """The result of a function over tokens."""
        assert self.logprobs is not None
        if self.entropy is None:
            return self.logprobs
        return TokenLogprobs(self.logprobs, self.entropy)

    def of_loss(self) -> TokenLoss:
        """The result of a caller's loss."""
        assert self.kl is not None
        assert self.logprobs is not None
        return TokenLoss(self.kl, self.logprobs.detach(), self.entropy)

    def of_divergence(self, asks_for_more: bool) -> Tensor | KLDivergence:
        """The result of a divergence: alone, or with the other requested outputs."""
        assert self.kl is not None
        return KLDivergence(self.kl, *self[1:]) if asks_for_more else self.kl


def outputs_of(
    args: RowsArgs, rows: Rows, kl_penalty: Callable[[PenaltyCall], tuple[Tensor, KLStats | None]]
) -> Outputs:
    """The outputs in the call's shapes, from the computed values of each token.

    A first step reduces the divergences. A second step computes the statistics of the sampled
    tokens, which are NaN if the tokens are not known.
    """
    if args.teacher is not None:
        assert rows.logprobs is not None
        rows = Rows(args.divergence_of_entries(rows.logprobs))
    elif args.rounds_logprobs:
        first, second = (None if x is None else x.to(args.dtype) for x in rows[1:3])
        rows = rows._replace(logprobs=first, second_logprobs=second)
    if rows.kl is None:
        return _shaped(args, rows, None, None)
    result, stats = kl_penalty(args.reduction_call(rows.kl))
    if stats is not None:
        call = args.compare_tokens(rows)
        taken = None if call is None else kl_penalty(call)[1]
        stats = without_tokens(stats) if taken is None else with_tokens_of(stats, taken)
    return _shaped(args, rows, result, stats)


def outputs_of_scalar(
    args: RowsArgs,
    result: Tensor,
    stats: KLStats | None,
    logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Outputs:
    """The outputs of a divergence or a loss that is already reduced."""
    stats = None if stats is None else without_tokens(stats)
    return _shaped(args, Rows(logprobs=logprobs, entropy=entropy), result, stats)


def _shaped(args: RowsArgs, rows: Rows, result: Tensor | None, stats: KLStats | None) -> Outputs:
    _, first, second, entropy = rows
    policy, reference = (second, first) if args.policy else (first, second)
    if entropy is not None:
        entropy = entropy.view(args.shape)
        entropy = entropy.detach() if args.return_entropy == "detached" else entropy
    shape = args.shape if args.token_ids is None else args.shape + args.token_ids.shape[1:]
    return Outputs(
        result,
        None if policy is None else policy.view(shape),
        None if reference is None else reference.view(shape),
        entropy,
        stats,
    )
