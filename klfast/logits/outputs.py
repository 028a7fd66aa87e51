"""The results of the functions over logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from klfast.call import PenaltyCall
from klfast.names import ReturnEntropy
from klfast.stats import KLStats, with_tokens_of, without_tokens

Penalty = Callable[[PenaltyCall], tuple[Tensor, KLStats | None]]


class TokenLogprobs(NamedTuple):
    """The result of :func:`klfast.token_logprobs` with ``return_entropy``.

    Attributes:
        logprobs: of the tokens, in nats, [...].
        entropy: of the distributions, ``-sum p log p``, in nats, [...].
    """

    logprobs: Tensor
    entropy: Tensor


class KLDivergence(NamedTuple):
    """The result of :func:`klfast.kl_divergence` where more than the divergence is asked for.

    A function that torch.func transforms must return tensors: those of its fields that are not
    None.

    Attributes:
        kl: ``coef`` times the reduced divergence, in nats: what the function returns alone.
        logprobs: of the tokens in ``token_ids`` under the policy, in nats, [B, T] or [N]; None
            without ``token_ids``.
        ref_logprobs: the same under the reference.
        entropy: of the policy, in nats, [B, T] or [N]; None without ``return_entropy``.
        stats: :class:`klfast.KLStats`; None without ``return_stats``.
    """

    kl: Tensor
    logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    stats: KLStats | None = None


torch.serialization.add_safe_globals([TokenLogprobs, KLDivergence])


class BesideDivergences(NamedTuple):
    """Per-row outputs beside the divergences, [R] each; None if not asked for."""

    logprobs: Tensor | None = None
    """Log-probs of the tokens under the policy."""
    ref_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    """Entropies of the policy."""


def outputs_of_tokens(
    logprobs: Tensor, entropy: Tensor | None, return_entropy: ReturnEntropy
) -> Tensor | TokenLogprobs:
    """The result of a function over tokens: log-probs alone, or with their entropies."""
    if entropy is None:
        return logprobs
    return TokenLogprobs(logprobs, entropy.detach() if return_entropy == "detached" else entropy)


def with_detached_entropy(outputs: KLDivergence) -> KLDivergence:
    kl, logprobs, ref_logprobs, entropy, stats = outputs
    assert entropy is not None
    return KLDivergence(kl, logprobs, ref_logprobs, entropy.detach(), stats)


class OfTokens(Protocol):
    """A call whose rows are tokens, with or without ids."""

    @property
    def shape(self) -> torch.Size:
        """The shape of results per token."""

    def compare_tokens(self, logprobs: Tensor, ref_logprobs: Tensor) -> PenaltyCall:
        """The call over log-probs of the taken tokens, for its statistics alone."""


def outputs_of(
    call: OfTokens,
    reduced: tuple[Tensor, KLStats | None],
    beside: BesideDivergences,
    kl_penalty: Penalty,
) -> KLDivergence:
    """The results in the call's shapes, of the rows' and of the reduced divergence.

    What statistics say of tokens is of those that were taken, and NaN where they are not known, or
    several a token.
    """
    result, stats = reduced
    logprobs, ref_logprobs, entropies = (
        None if rows is None else rows.view(call.shape + rows.shape[1:]) for rows in beside
    )
    if stats is None:
        return KLDivergence(result, logprobs, ref_logprobs, entropies)
    if logprobs is None or ref_logprobs is None or logprobs.shape != call.shape:
        stats = without_tokens(stats)
    else:
        _, taken = kl_penalty(call.compare_tokens(logprobs, ref_logprobs))
        stats = taken and with_tokens_of(stats, taken)
    return KLDivergence(result, logprobs, ref_logprobs, entropies, stats)
