"""The sampled estimators' errors, summed over tokens that are alike in their exact KL.

The exact KL at a token sums over the vocabulary, given the tokens before it; an estimator knows the
drawn token alone. As the exact KL is settled before the token is drawn, binning by it leaves an
unbiased estimator unbiased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast import EstimatorName, kl_penalty

SAMPLED: tuple[EstimatorName, ...] = ("k1", "k2", "k3")
"""The estimators that are recorded beside the exact KL."""

EDGES = tuple(float(f"{digit}e{power}") for power in range(-8, 4) for digit in (1, 2, 5))
"""Where the bins begin, in nats per token. A token at the first edge or below is in none."""

Errors = dict[str, list[float]]
"""Columns with one entry for each bin that holds a token: where it begins (``low``), how many
``tokens`` it holds, and sums over these, in nats: of the ``exact`` KL, of each estimator's error
(``k1``, ...) and of the error's square (``k1_squared``, ...)."""


def token_errors(exact: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Errors:
    """Those of one batch, from the exact KL and the log-probs of the drawn tokens, ``[B, T]``."""
    logprobs = logprobs.detach()
    binned = mask & (exact > EDGES[0])
    kl = exact[binned].double()
    values = {"tokens": torch.ones_like(kl), "exact": kl}
    for name in SAMPLED:
        estimate = kl_penalty(logprobs, ref_logprobs, mask, estimator=name)
        error = estimate[binned].double() - kl
        values |= {name: error, f"{name}_squared": error.square()}
    bins = torch.bucketize(kl, torch.tensor(EDGES, dtype=kl.dtype)) - 1
    present = torch.bincount(bins).nonzero()[:, 0]
    sums = {
        key: torch.bincount(bins, weights=value)[present].tolist() for key, value in values.items()
    }
    return {"low": [EDGES[i] for i in present.tolist()], **sums}
