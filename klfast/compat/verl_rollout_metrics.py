"""The metrics of verl's rollout correction, of ``RolloutStats``.

They are computed on the host, in fp64, of one copy of the statistics. verl's means over sequences
have those without a token too, as 0; its metrics of a rule do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from klfast.compat.verl_rollout_options import Option
from klfast.dtypes import wide
from klfast.rollout.formulas import chi2, ratio
from klfast.rollout.stats import RolloutStats, RuleStats, divide, greatest, least

Metrics = dict[str, Tensor]

LEAST_MEAN = 1e-8
"""The least divisor of verl's means of weights; and its addend in the sample size."""


def drift(stats: RolloutStats) -> Metrics:
    """``compute_offpolicy_metrics``."""
    length = stats.length
    mean_logprob = divide(stats.logprobs, length)
    mean_x = divide(stats.k1, length)
    rollout = mean_logprob - mean_x
    total = length.sum()
    return {
        "training_ppl": torch.exp(-mean_logprob).mean(),
        "training_log_ppl": -mean_logprob.mean(),
        "kl": -divide(stats.k1.sum(), total),
        "k3_kl": divide(stats.k3.sum(), total),
        "rollout_ppl": torch.exp(-rollout).mean(),
        "rollout_log_ppl": -rollout.mean(),
        "log_ppl_diff": -mean_x.mean(),
        "log_ppl_abs_diff": mean_x.abs().mean(),
        "log_ppl_diff_max": -mean_x.min(),
        "log_ppl_diff_min": -mean_x.max(),
        "ppl_ratio": torch.exp(-mean_x).mean(),
        "chi2_token": divide(stats.chi2.sum(), total),
        "chi2_seq": chi2(stats.k1).mean(),
    }


def of_weights(stats: RolloutStats, level: str, bounds: Mapping[str, Any]) -> Metrics:
    """``compute_is_metrics``."""
    upper = bounds["cap"]
    lower = bounds.get("floor", 1 / upper)
    length, tokens = stats.length, stats.tokens.sum()
    k1, counted = stats.k1, stats.tokens > stats.nonfinite
    mean = divide(stats.weight.sum(), length.sum())
    square = divide(stats.weight_squares.sum(), length.sum())
    from_1 = divide(stats.weight_deviation.sum(), length.sum())
    variance = torch.where(mean > 0.5, from_1 - (mean - 1).square(), square - mean.square())
    if level == "sequence":
        raw = torch.where(length > 0, ratio(k1), 0.0)
        metrics = {
            "rollout_is_max": ratio(k1.max()),
            "rollout_is_min": torch.exp(k1.min()),
            "rollout_is_ratio_fraction_high": _share(k1 > math.log(upper)),
            "rollout_is_ratio_fraction_low": _share(k1 < math.log(lower)),
        }
    else:
        raw = divide(stats.ratio, length)
        metrics = {
            "rollout_is_max": greatest(stats.max_weight, counted),
            "rollout_is_min": least(stats.min_weight, counted),
            "rollout_is_ratio_fraction_high": divide(stats.above.sum(), tokens),
            "rollout_is_ratio_fraction_low": divide(stats.below.sum(), tokens),
        }
    of_sequence = divide(stats.weight, length)
    metrics |= {
        "rollout_is_mean": mean,
        "rollout_is_std": _deviation(variance, tokens),
        "rollout_is_eff_sample_size": divide((mean + LEAST_MEAN).square(), square),
        "rollout_is_seq_mean": of_sequence.mean(),
        "rollout_is_seq_std": _spread(of_sequence),
        "rollout_is_seq_max": of_sequence.max(),
        "rollout_is_seq_min": of_sequence.min(),
        "rollout_is_seq_max_deviation": (of_sequence - 1).abs().max(),
        "rollout_is_seq_fraction_high": _share(raw > upper),
        "rollout_is_seq_fraction_low": _share(raw < lower),
    }
    if bounds.get("outside") == "mask":
        metrics["rollout_is_oob_ratio"] = divide(stats.outside.sum(), tokens)
    return metrics


def of_rejection(stats: RolloutStats, options: Sequence[Option]) -> Metrics:
    """``compute_rs_metrics`` of all options, and the fractions that they reject together."""
    metrics: Metrics = {}
    for option, seen in zip(options, stats.rules, strict=True):
        metrics |= {
            f"rollout_rs_{option.name}_{name}": value
            for name, value in _of_rule(option, seen, stats).items()
        }
    length = stats.length.sum()
    metrics["rollout_rs_masked_fraction"] = divide(length - stats.kept.sum(), length)
    metrics["rollout_rs_seq_masked_fraction"] = _share(stats.rejected > 0)
    return metrics


def _of_rule(option: Option, seen: RuleStats, stats: RolloutStats) -> Metrics:
    """``compute_rs_metrics`` of one option."""
    length = stats.length
    is_there = length > 0
    sequences = wide(is_there.sum())
    is_of_tokens = not option.rule.is_of_sequence
    total, low, high, below, above, bounded, squares = (field for field in seen)
    if option.sign < 0:
        total, low, high, below, above = -total, -high, -low, above, below
    numbers = divide(total, length) if is_of_tokens else total
    weight = torch.ones_like(length) if is_of_tokens else length  # sums have it already
    whole = stats.tokens.sum() if is_of_tokens else sequences
    failed = below + above
    lower, upper = option.bounds()
    if not is_of_tokens:  # in fp64 from the one number
        bounded = torch.where(is_there, numbers.clamp(lower, upper), 0.0)
        squares = bounded.square()
    mean, square = (divide((weight * t).sum(), length.sum()) for t in (bounded, squares))

    def fraction(condition: Tensor) -> Tensor:
        return divide(wide((condition & is_there).sum()), sequences)

    own_mean = divide(torch.where(is_there, numbers, 0.0).sum(), sequences)
    off = torch.where(is_there, (numbers - own_mean).square(), 0.0).sum()
    metrics = {
        "mean": divide((weight * total).sum(), length.sum()),
        "max": greatest(high, is_there),
        "min": least(low, is_there),
        "fraction_high": divide(above.sum(), whole),
        "fraction_low": divide(below.sum(), whole),
        "std": _deviation(square - mean.square(), stats.tokens.sum()),
        "seq_mean": own_mean,
        "seq_std": divide(off, sequences - 1).sqrt(),
        "seq_max": greatest(numbers, is_there),
        "seq_min": least(numbers, is_there),
        "seq_max_deviation": greatest(numbers.abs(), is_there),
        "seq_fraction_high": fraction(numbers > upper),
        "masked_fraction": divide((failed * (1 if is_of_tokens else length)).sum(), length.sum()),
        "seq_masked_fraction": fraction(failed > 0),
    }
    if option.sign < 0:
        metrics["seq_fraction_low"] = fraction(numbers < lower)
    return metrics


def _share(condition: Tensor) -> Tensor:
    """The share of all sequences."""
    return wide(condition).mean()


def _deviation(variance: Tensor, tokens: Tensor) -> Tensor:
    """The standard deviation of so many numbers of this variance; 0 of one."""
    return torch.where(tokens > 1, variance.clamp(min=0).sqrt(), 0.0)


def _spread(values: Tensor) -> Tensor:
    """The sample's standard deviation; 0 of one."""
    return values.std() if values.numel() > 1 else values.new_zeros(())


def check_keeps(mask: Tensor, tokens: float = 1.0) -> None:
    """Raise ValueError if nothing is kept: of a mask without elements, or by its count."""
    if mask.numel() == 0 or tokens == 0:
        raise ValueError("response_mask must keep a token, got none")


def on_host(
    stats: RolloutStats, mask: Tensor, factor: Tensor | None = None
) -> tuple[RolloutStats, Metrics]:
    """The statistics in fp64 by one copy from the device, and what the weights were divided by.

    Raises:
        ValueError: the mask keeps nothing.
    """
    table = wide(stats.table())
    shape = table.shape
    table = table.flatten()
    if factor is not None:
        table = torch.cat([table, wide(factor).reshape(1)])
    table = table.cpu()
    copied = RolloutStats.of_table(table[: shape.numel()].view(shape))
    check_keeps(mask, float(copied.tokens.sum()))
    return copied, {} if factor is None else {"rollout_is_batch_norm_factor": table[-1]}


def floats(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Metrics as verl returns them."""
    names = (prefix + name for name in metrics)
    return dict(zip(names, torch.stack(list(metrics.values())).tolist(), strict=True))
