"""How far the sampled estimators are from the exact KL, on the run's own tokens.

The exact KL at a token is a sum over the vocabulary, given the tokens before it; an estimator knows
the drawn token alone. Tokens are binned by their exact KL, which is settled before they are drawn:
within a bin an unbiased estimator's errors have mean 0 and no correlation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klfast import kl_penalty

SAMPLED = ("k1", "k2", "k3")
"""The estimators that are recorded beside the exact KL."""

EDGES = tuple(float(f"{digit}e{power}") for power in range(-8, 4) for digit in (1, 2, 5))
"""Lower ends of the bins, nats per token. A token at the first of them or below is in none."""

ENOUGH = 200
"""Tokens that a bin needs for its numbers to be shown."""

CONFIDENCE = 1.96
"""Standard errors on either side that make a band of 95 %."""

Errors = dict[str, list[float]]
"""Columns with an entry per bin that holds a token: its lower end ``low``, the number of ``tokens``
in it, and sums over these, in nats: of the ``exact`` KL, of each estimator's error (``k1``), and of
the error's square (``k1_squared``)."""


@dataclass(frozen=True)
class Accuracy:
    """One estimator in one bin, as shares of the bin's mean exact KL.

    Attributes:
        bias: the mean error.
        margin: half the width of the 95 % band around ``bias``.
        std: the standard deviation of a single token's error.
    """

    bias: float
    margin: float
    std: float


@dataclass(frozen=True)
class Bin:
    """Tokens whose exact KL is between ``low`` and ``high``, nats per token; ``exact`` its mean.

    Attributes:
        ratio: mean of reference / policy over the drawn tokens: 1 in expectation.
    """

    low: float
    high: float
    tokens: int
    exact: float
    estimators: dict[str, Accuracy]
    ratio: float


def token_errors(exact: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Errors:
    """Sums of one batch, of ``exact`` KL ``[B, T]`` and log-probs of the drawn tokens."""
    shown = mask & (exact > EDGES[0])
    kl = exact[shown].double()
    values = {"tokens": torch.ones_like(kl), "exact": kl}
    for name in SAMPLED:
        estimate = kl_penalty(logprobs, ref_logprobs, mask, estimator=name)
        error = estimate[shown].double() - kl
        values |= {name: error, f"{name}_squared": error.square()}
    bins = torch.bucketize(kl, torch.tensor(EDGES, dtype=kl.dtype)) - 1
    present = bins.unique()
    sums = {
        key: torch.bincount(bins, weights=value)[present].tolist() for key, value in values.items()
    }
    return {"low": [EDGES[i] for i in present.tolist()], **sums}


def measure(rows: Iterable[dict[str, Any]]) -> list[Bin]:
    """The bins of all steps of all arms that hold enough tokens, from low to high."""
    totals: dict[float, dict[str, float]] = {}
    for row in rows:
        errors: Errors = row["token_errors"]
        for i, low in enumerate(errors["low"]):
            total = totals.setdefault(low, {})
            for key, column in errors.items():
                total[key] = total.get(key, 0.0) + column[i]
    return [_bin(low, totals[low]) for low in sorted(totals) if totals[low]["tokens"] >= ENOUGH]


def _bin(low: float, total: dict[str, float]) -> Bin:
    above = bisect_left(EDGES, low) + 1
    count = total["tokens"]
    return Bin(
        low=low,
        high=EDGES[above] if above < len(EDGES) else math.inf,
        tokens=int(count),
        exact=total["exact"] / count,
        estimators={name: _accuracy(name, total) for name in SAMPLED},
        ratio=1 + (total["k3"] - total["k1"]) / count,
    )


def _accuracy(name: str, total: dict[str, float]) -> Accuracy:
    count, exact = total["tokens"], total["exact"] / total["tokens"]
    bias = total[name] / count
    variance = max(0.0, total[f"{name}_squared"] / count - bias**2) * count / (count - 1)
    std = math.sqrt(variance)
    return Accuracy(bias / exact, CONFIDENCE * std / math.sqrt(count) / exact, std / exact)
