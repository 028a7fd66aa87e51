"""How far the sampled estimators were from the exact KL: bias and noise, and what they say.

The exact KL at a token sums over the vocabulary, given the tokens before it; an estimator knows the
drawn token alone. Errors are summed over tokens that are alike in their exact KL. As that is
settled before the token is drawn, binning by it leaves an unbiased estimator unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from klfast import EstimatorName, kl_penalty
from lab.folder import Row
from lab.words import number

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


ENOUGH_TOKENS, ENOUGH_STEPS = 1000, 10
"""The least tokens of a bin that is shown, and the least steps that they come from."""

Sums = dict[str, float]
"""The columns of :data:`Errors`, for one bin."""

_CONFIDENCE = 1.96  # standard errors on either side that make a band of 95 %
_LOST = 0.1  # nats of k3's mean whose loss is worth a sentence


@dataclass(frozen=True)
class Accuracy:
    """One estimator in one bin, as shares of the bin's mean exact KL.

    Attributes:
        bias: mean error.
        margin: half the width of the 95 % band around ``bias``.
        std: standard deviation of a single token's error.
    """

    bias: float
    margin: float
    std: float

    @property
    def is_biased(self) -> bool:
        """Whether 0 is outside of the band."""
        return abs(self.bias) > self.margin


@dataclass(frozen=True)
class Bin:
    """Tokens whose exact KL lies between ``low`` and ``high``, in nats; ``exact`` is its mean.

    Attributes:
        ratio: mean of reference / policy over the drawn tokens, in expectation 1; k3 - k1 is one
            token's ratio - 1.
    """

    low: float
    high: float
    tokens: int
    steps: int
    exact: float
    estimators: dict[str, Accuracy]
    ratio: float


def measure(rows: Iterable[Row]) -> list[Bin]:
    """The bins that hold enough tokens, over all steps of all arms, from low to high."""
    by_bin: dict[float, dict[int, Sums]] = {}
    for row in rows:
        if "token_errors" not in row:  # its tokens are not the policy's
            continue
        errors: Errors = row["token_errors"]
        for i, low in enumerate(errors["low"]):
            by_step = by_bin.setdefault(low, {})
            sums = {key: column[i] for key, column in errors.items()}
            by_step[row["step"]] = _added([by_step.get(row["step"], {}), sums])
    bins = [_bin(low, list(by_bin[low].values())) for low in sorted(by_bin)]
    return [b for b in bins if b.tokens >= ENOUGH_TOKENS and b.steps >= ENOUGH_STEPS]


def _added(parts: Iterable[Sums]) -> Sums:
    total: Sums = {}
    for sums in parts:
        for key, value in sums.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _bin(low: float, by_step: list[Sums]) -> Bin:
    total = _added(by_step)
    count = total["tokens"]
    return Bin(
        low=low,
        high=next((edge for edge in EDGES if edge > low), math.inf),
        tokens=int(count),
        steps=len(by_step),
        exact=total["exact"] / count,
        estimators={name: _accuracy(name, by_step) for name in SAMPLED},
        ratio=1 + (total["k3"] - total["k1"]) / count,
    )


def _accuracy(name: str, by_step: list[Sums]) -> Accuracy:
    """A step is one draw, however many arms: all draw with the same random numbers."""
    total = _added(by_step)
    count, kl = total["tokens"], total["exact"]
    bias = total[name] / count
    variance = max(0.0, total[f"{name}_squared"] / count - bias**2)
    deviations = (sums[name] - bias * sums["tokens"] for sums in by_step)
    correction = len(by_step) / max(1, len(by_step) - 1)
    margin = _CONFIDENCE * math.sqrt(correction * sum(d * d for d in deviations))
    return Accuracy(total[name] / kl, margin / kl, math.sqrt(variance) * count / kl)


def read_accuracy(bins: list[Bin]) -> list[str]:
    """The bins in plain words: every statement follows from the numbers, none is pre-written."""
    if not bins:
        return [
            f"No bin holds {ENOUGH_TOKENS:,} tokens of {ENOUGH_STEPS} steps: "
            "too few to tell bias from noise."
        ]
    sentences = [_extent(bins), *(_estimator(name, bins) for name in SAMPLED)]
    sentences += [_crossing(bins), _lost(bins)]
    return [sentence for sentence in sentences if sentence]


def _extent(bins: list[Bin]) -> str:
    tokens = sum(b.tokens for b in bins)
    bounds = f"between {number(bins[0].low)} and {number(bins[-1].high)} nats"
    return (
        f"{tokens:,} tokens had an exact KL {bounds}, in {_bins(len(bins))}. "
        "Noise alone leaves a 95% band once in 20 bins."
    )


def _estimator(name: str, bins: list[Bin]) -> str:
    return f"{name}: {_bias(name, bins)}. {_noise(name, bins)}."


def _bias(name: str, bins: list[Bin]) -> str:
    biased = [b for b in bins if b.estimators[name].is_biased]
    if not biased:
        return f"no bias can be told from noise (95% bands in {_bins(len(bins))})"
    worst = max(biased, key=lambda b: abs(b.estimators[name].bias))
    accuracy = worst.estimators[name]
    return (
        f"its mean is off the exact KL by more than the 95% band in {len(biased)} of "
        f"{_bins(len(bins))}, most at {number(worst.exact)} nats: by {accuracy.bias:+.1%} "
        f"± {accuracy.margin:.1%}"
    )


def _noise(name: str, bins: list[Bin]) -> str:
    ends = bins if len(bins) == 1 else (bins[0], bins[-1])
    noise = " and ".join(
        f"{b.estimators[name].std:,.0%} of the exact KL at {number(b.exact)} nats" for b in ends
    )
    return f"A single token's error scatters by {noise}"


def _crossing(bins: list[Bin]) -> str:
    """Where k3 is the less noisy estimator, and where k1 is."""
    quiet = [b for b in bins if b.estimators["k3"].std < b.estimators["k1"].std]
    if not quiet:
        return "k3 was nowhere less noisy than k1."
    if len(quiet) == len(bins):
        return "k3 was less noisy than k1 everywhere."
    if quiet == bins[: len(quiet)]:
        upto = number(quiet[-1].high)
        return f"k3 was less noisy than k1 up to {upto} nats per token, and noisier beyond."
    return f"k3 was less noisy than k1 in {len(quiet)} of {_bins(len(bins))}."


def _lost(bins: list[Bin]) -> str:
    """The part of k3's mean that is missed, as the tokens that carry it were not drawn."""
    worst = min(bins, key=lambda b: b.ratio)
    if worst.ratio > 1 - _LOST:
        return ""
    return (
        f"At {number(worst.exact)} nats the mean of reference / policy over the drawn tokens, in "
        f"expectation 1, was {number(worst.ratio)}: the tokens that make k3 unbiased are so rare "
        f"there that too few were drawn, which left it {number(1 - worst.ratio)} nats below k1."
    )


def _bins(count: int) -> str:
    return f"{count} bins" if count > 1 else "1 bin"
