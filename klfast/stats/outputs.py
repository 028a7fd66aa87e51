"""The results of the functions over rows of a vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.stats.kl import KLStats


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
        assert self.logprobs is not None
        if self.entropy is None:
            return self.logprobs
        return TokenLogprobs(self.logprobs, self.entropy)

    def of_loss(self) -> TokenLoss:
        assert self.kl is not None
        assert self.logprobs is not None
        return TokenLoss(self.kl, self.logprobs.detach(), self.entropy)

    def of_divergence(self) -> Tensor | KLDivergence:
        """The result of a divergence: alone, or with the other requested outputs."""
        kl, logprobs, _, entropy, stats = self
        assert kl is not None
        is_alone = logprobs is None and entropy is None and stats is None
        return kl if is_alone else KLDivergence(kl, *self[1:])
