"""open-instruct: ``estimate_kl``, ``log_softmax_and_gather`` and ``entropy_from_logits`` of
``open_instruct.model_utils``, and the KL of its GRPO loss.

Its main branch of August 2026. Use ``from klfast.compat.open_instruct import estimate_kl, ...`` in
place of open-instruct's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.api import kl_penalty as fused_kl_penalty
from klfast.compat import logits as over_logits
from klfast.compat.common import of_log_ratio, per_token
from klfast.compat.counts import count_of_tokens
from klfast.compat.presets import OPEN_INSTRUCT
from klfast.compat.weighted import check_weight, weighted_per_token
from klfast.estimator import Estimator

__all__ = [
    "entropy_from_logits",
    "estimate_kl",
    "kl_loss",
    "log_softmax_and_gather",
    "per_token_kl",
]

WEIGHTED = 3
"""The estimator that multiplies the log-ratio by ``exp(new_logprobs - old_logprobs)``."""


def estimate_kl(ref_logprobs_diff: Tensor, ratio: Tensor, *, exact: bool = False) -> Tensor:
    """open-instruct's four estimators of every token, in nats, stacked: [4, ...].

    ``x``, ``x**2 / 2``, ``expm1(-x) + x`` and ``ratio * x`` of x = ``ref_logprobs_diff`` [...],
    which the caller has limited to [-40, 40] (``new_logprobs - ref_logprobs``).
    :func:`per_token_kl` and :func:`kl_loss` take log-probs and make the one that is asked for.

    Differs from open-instruct: the third keeps its digits near 0; lower dtypes give fp32
    (``exact=True``: what x and the ratio promote to); a ratio of another shape than x is a
    ValueError.
    """
    check_weight("ratio", ratio, ref_logprobs_diff)
    k1, k2, k3 = (of_log_ratio(ref_logprobs_diff, Estimator(name)) for name in ("k1", "k2", "k3"))
    if exact:
        k1, k2, k3 = (each.to(ref_logprobs_diff.dtype) for each in (k1, k2, k3))
    return torch.stack([k1, k2, k3, ratio * k1])


def per_token_kl(
    new_logprobs: Tensor,
    ref_logprobs: Tensor,
    old_logprobs: Tensor | None = None,
    kl_estimator: int = 2,
    *,
    ratio: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """One estimator of every token, in nats, of the shape of ``new_logprobs``.

    ``estimate_kl(...)[kl_estimator]`` of the log-ratio limited to 40 (see
    ``presets.OPEN_INSTRUCT``), with the gradient that open-instruct's loss has: beyond the limit
    estimator 3 keeps that of its ratio. 3 needs ``old_logprobs``, and is then one read, or the
    ``ratio`` as a tensor, with whatever graph it has; both have no part in the others.

    Differs from open-instruct: digits near 0; fp32 for lower dtypes unless ``exact=True``.

    Raises:
        ValueError: an unknown ``kl_estimator``, 3 without ``old_logprobs`` and ``ratio``, or a
            wrong shape, that of the ratio too.
    """
    estimator = _estimator(kl_estimator)
    if kl_estimator == WEIGHTED and ratio is not None:
        return weighted_per_token(
            new_logprobs, ref_logprobs, estimator, ratio, argument="ratio", exact=exact
        )
    old = _old(kl_estimator, old_logprobs, "old_logprobs or ratio must be given", "neither")
    return per_token(new_logprobs, ref_logprobs, estimator, old_logprobs=old, exact=exact)


def kl_loss(
    new_logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    beta: float,
    old_logprobs: Tensor | None = None,
    kl_estimator: int = 2,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """The KL term of open-instruct's GRPO loss (0-dim, nats times ``beta``) in one read.

    ``masked_mean(beta * kl, response_mask, None, denominator)``: the sum over kept tokens, [B, T],
    divided by ``denominator``, by default the number of kept tokens (0 without any). A
    ``denominator`` of 0 is for batches that keep no token, whose loss is 0. open-instruct's is the
    number of all ranks, undivided, and its trainer multiplies the loss by the number of ranks.
    Under DDP and FSDP, which average gradients, divide it by the world size where nothing
    multiplies the loss. The KL is that of :func:`per_token_kl`.

    Differs from open-instruct: NaN under the mask has no effect.
    """
    estimator = _estimator(kl_estimator)
    old = _old(kl_estimator, old_logprobs, "old_logprobs must be given", "None")
    if denominator is not None:
        denominator = count_of_tokens("denominator", denominator)
    return fused_kl_penalty(
        new_logprobs,
        ref_logprobs,
        response_mask,
        estimator=estimator,
        reduction="token-mean",
        old_logprobs=old,
        normalizer=denominator,
        coef=beta,
    )


def _estimator(kl_estimator: object) -> Estimator:
    if type(kl_estimator) is not int or kl_estimator not in OPEN_INSTRUCT:
        choices = ", ".join(map(str, OPEN_INSTRUCT))
        raise ValueError(f"unknown kl_estimator {kl_estimator!r}; expected one of {choices}")
    return OPEN_INSTRUCT[kl_estimator]


def _old(
    kl_estimator: int, old_logprobs: Tensor | None, required: str, missing: str
) -> Tensor | None:
    """The old log-probs if the estimator takes them; else the error says what it requires."""
    if kl_estimator != WEIGHTED:
        return None
    if old_logprobs is None:
        raise ValueError(f"{required} for kl_estimator {WEIGHTED}, got {missing}")
    return old_logprobs


def log_softmax_and_gather(logits: Tensor, index: Tensor, *, exact: bool = False) -> Tensor:
    """Log-probs of the words [...] under softmax(logits), [..., V] -> [...], in nats, by one read.

    Differs from open-instruct: lower dtypes give fp32 (``exact=True``: their own). There is nothing
    to compile.
    """
    return over_logits.token_logprobs(logits, index, exact=exact)


def entropy_from_logits(logits: Tensor, *, exact: bool = False) -> Tensor:
    """Entropies of softmax(logits), [..., V] -> [...], in nats, by one read.

    Differs from open-instruct: a logit of -inf adds 0, where theirs gives NaN; lower dtypes give
    fp32 (``exact=True``: their own).
    """
    return over_logits.entropy(logits, exact=exact)
