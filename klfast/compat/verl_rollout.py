"""verl's rollout correction: ``verl.trainer.ppo.rollout_corr_helper`` of 0.9 and main.

Every function takes one read of the log-probs for weights, mask and metrics, and one copy from the
device for all metrics.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from klfast.args.checks import check_choice, check_number
from klfast.args.rejection import Rejection
from klfast.formulas.rollout import chi2, ratio
from klfast.functional.rollout import rollout_correction
from klfast.stats.kl import divide
from klfast.stats.rollout import RolloutStats, RuleStats, greatest, least
from klfast.types.dtypes import wide

_PREFIX = "rollout_corr/"


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """How far the trained policy is from the rollout policy, under verl's names.

    All are [B, T], and KLs in nats per token. Without ``rollout_log_prob`` the policy's own
    perplexity alone. k3 saturates at a log-ratio of 20.

    Raises:
        ValueError: the mask keeps nothing.
    """
    rollout = old_log_prob if rollout_log_prob is None else rollout_log_prob
    _, _, stats, _ = _corrected(old_log_prob, rollout, response_mask)
    metrics = drift(stats)
    if rollout_log_prob is None:
        metrics = {name: metrics[name] for name in ("training_ppl", "training_log_ppl")}
    return floats(metrics)


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """:func:`compute_offpolicy_metrics` of the current policy, with the prefix of verl's logs.

    All are [B, T], and KLs in nats per token.
    """
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {_PREFIX + name: value for name, value in metrics.items()}


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Importance weights [B, T] of a log-ratio (policy over rollout policy), and their metrics.

    ``rollout_is`` is ``token`` or ``sequence``. ``rollout_is_threshold`` is a number or its text,
    at which weights are truncated. With ``"lower_upper"`` weights outside become 0 (IcePop). With
    ``rollout_is_batch_normalize`` the weights are divided by their mean, over all ranks if
    torch.distributed is initialized. If all weights are 0 the effective sample size is 0, and there
    is no ZeroDivisionError.

    Raises:
        ValueError: an unknown ``rollout_is``, a wrong threshold, or a mask that keeps nothing.
        TypeError: a threshold of the wrong type.
    """
    bounds = weight_bounds(rollout_is_threshold)
    given = log_ratio, _no_memory(log_ratio), response_mask, rollout_is, bounds
    weights, _, _, metrics = _corrected(*given, normalize=rollout_is_batch_normalize)
    assert weights is not None
    return weights, floats(metrics)


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask without rejected tokens, and the metrics of each criterion, under verl's names.

    ``rollout_rs`` has options separated by commas, from ``klfast.compat.verl.ROLLOUT_RULES``. A
    token must pass all of them. ``rollout_rs_threshold`` is one threshold for all or one each. For
    k1 it bounds a ratio, and a single number u means ``1/u`` to u. verl compares the *inverse*
    ratio with it, rollout over policy, and so does this function: ``"0.5_4"`` keeps x in
    [-log 4, log 2]. For k2 and k3 it is the greatest accepted value, in nats.

    Differs from verl: a log-ratio beyond 20 is limited only where an exp is taken of it. Every
    option rejects a token with a log-ratio of -inf.

    Raises:
        ValueError: an unknown option, a wrong threshold, or a mask that keeps nothing.
        TypeError: a threshold of the wrong type.
    """
    if log_ratio.shape[0] == 0:
        return response_mask, {}
    options = options_of(rollout_rs, rollout_rs_threshold)
    given = log_ratio, _no_memory(log_ratio), response_mask
    _, mask, stats, _ = _corrected(*given, options=options)
    return mask, floats(of_rejection(stats, options))


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Any, Tensor, dict[str, float]]:
    """Weights, mask and metrics of the three functions above, by one read and one copy.

    Returns:
        A ``DataProto`` with ``rollout_is_weights`` [B, T] (None without weights), the mask, and the
        metrics under ``rollout_corr/``.

    Raises:
        ValueError, TypeError: as those functions.
    """
    options = () if rollout_rs is None else options_of(rollout_rs, rollout_rs_threshold)
    level, bounds = None, None
    if rollout_is is not None and rollout_is_threshold is not None:
        level, bounds = rollout_is, weight_bounds(rollout_is_threshold)
    given = old_log_prob, rollout_log_prob, response_mask, level, bounds, options
    weights, mask, stats, of_level = _corrected(*given, normalize=rollout_is_batch_normalize)
    metrics = drift(stats) | of_level
    if options:
        metrics |= of_rejection(stats, options)
    numbers = floats(metrics, _PREFIX)
    if weights is None:
        return None, mask, numbers
    protocol: Any = importlib.import_module("verl.protocol")
    proto = protocol.DataProto.from_dict(tensors={"rollout_is_weights": weights})
    return proto, mask, numbers


def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Any
) -> tuple[Any, dict[str, float]]:
    """The same for a batch: its ``response_mask`` is replaced, and ``rollout_is_weights`` added.

    Reads ``old_log_probs``, ``rollout_log_probs`` and ``response_mask``, [B, T], of
    ``batch.batch``; ``rollout_corr_config`` is verl's, or any mapping with its names.
    """
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        batch.batch["old_log_probs"],
        batch.batch["rollout_log_probs"],
        batch.batch["response_mask"],
        rollout_corr_config.get("rollout_is", None),
        rollout_corr_config.get("rollout_is_threshold", 2.0),
        rollout_corr_config.get("rollout_is_batch_normalize", False),
        rollout_corr_config.get("rollout_rs", None),
        rollout_corr_config.get("rollout_rs_threshold", None),
    )
    batch.batch["response_mask"] = mask
    return batch if weights is None else batch.union(weights), metrics


def _corrected(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    level: str | None = None,
    bounds: dict[str, Any] | None = None,
    options: Sequence[Option] = (),
    *,
    normalize: bool = False,
) -> tuple[Tensor | None, Tensor, RolloutStats, Metrics]:
    """The weights, the mask, the statistics on the host, and the weights' metrics."""
    check_keeps(response_mask)
    if level is not None:
        check_choice("rollout_is", level, LEVELS)
    weights, mask, stats = rollout_correction(
        logprobs,
        rollout_logprobs,
        response_mask,
        weight=level,
        reject=[option.rule for option in options],
        **bounds or {},
    )
    if weights is None or level is None or bounds is None:
        return None, mask, on_host(stats, response_mask)[0], {}
    factor = None
    if normalize:
        initialized = distributed.is_available() and distributed.is_initialized()
        mean = stats.weight_mean(level, distributed.group.WORLD if initialized else None)
        # verl leaves weights alone whose mean is about 0.
        factor = torch.where(mean > LEAST_MEAN, mean, 1.0)
        weights = weights / factor.to(weights.dtype)
    copied, of_factor = on_host(stats, response_mask, factor)
    return weights, mask, copied, of_weights(copied, level, bounds) | of_factor


def _no_memory(tensor: Tensor) -> Tensor:
    """Zeros in the shape of a tensor that take no memory: a sampler whose log-ratio is there."""
    return tensor.new_zeros(()).expand(tensor.shape)


# ``rollout_is``, ``rollout_rs`` and their thresholds


LEVELS = ("token", "sequence")  # ``rollout_is``

ROLLOUT_RULES = {
    **{f"token_{name}": (name, "token") for name in ("k1", "k2", "k3")},
    **{f"seq_sum_{name}": (name, "seq-sum") for name in ("k1", "k2", "k3")},
    **{f"seq_mean_{name}": (name, "seq-mean") for name in ("k1", "k2", "k3")},
    **{f"seq_max_{name}": (name, "seq-max") for name in ("k2", "k3")},
}
"""``rollout_rs`` -> (statistic, over)."""


class Option(NamedTuple):
    """One of ``rollout_rs`` with its threshold."""

    name: str
    rule: Rejection
    # -1 for k1: verl's is log(rollout / policy), klfast's x the opposite.
    sign: int

    def bounds(self) -> tuple[float, float]:
        """(low, high) of verl's statistic, infinite where there is none."""
        low, high = self.rule.bounds
        return (low, high) if self.sign > 0 else (-high, -low)


def weight_bounds(threshold: str | float) -> dict[str, Any]:
    """``floor``, ``cap`` and ``outside`` of ``rollout_is_threshold``."""
    low, high = _pair("rollout_is_threshold", threshold)
    if low is None:
        return {"cap": high}
    return {"floor": low, "cap": high, "outside": "mask"}


def _pair(argument: str, threshold: object) -> tuple[float | None, float]:
    """(lower, upper) of ``"lower_upper"``; (None, upper) of a number or its text."""
    if not isinstance(threshold, str):
        return None, check_number(argument, threshold, above=0)
    try:
        numbers = [float(part) for part in threshold.strip().split("_", 1)]
    except ValueError:
        raise ValueError(
            f"{argument} must be a number or 'lower_upper', got {threshold!r}"
        ) from None
    low, high = (None, numbers[0]) if len(numbers) == 1 else numbers
    for number in numbers:
        check_number(argument, number, above=0)
    if low is not None and low > high:
        raise ValueError(f"{argument} must have lower <= upper, got {threshold!r}")
    return low, high


def options_of(names: str, thresholds: str | float | None) -> tuple[Option, ...]:
    """The options of ``rollout_rs``, each once, with the thresholds of ``rollout_rs_threshold``."""
    if not isinstance(names, str) or not names.strip(", "):
        raise ValueError(f"rollout_rs must name an option, got {names!r}")
    if thresholds is None:
        raise ValueError("rollout_rs_threshold must be given with rollout_rs, got None")
    # An option that is named twice counts once.
    chosen = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    for name in chosen:
        check_choice("rollout_rs", name, tuple(ROLLOUT_RULES))
    if isinstance(thresholds, str):
        each: Sequence[object] = [part.strip() for part in thresholds.split(",") if part.strip()]
    else:
        each = [thresholds]
    if len(each) == 1:
        each = [*each] * len(chosen)
    if len(each) != len(chosen):
        raise ValueError(
            f"rollout_rs_threshold must be one threshold, or {len(chosen)} as rollout_rs, got "
            f"{thresholds!r}"
        )
    return tuple(_option(name, threshold) for name, threshold in zip(chosen, each, strict=True))


def _option(name: str, threshold: object) -> Option:
    statistic, over = ROLLOUT_RULES[name]
    low, high = _pair("rollout_rs_threshold", threshold)
    if statistic == "k1":
        low = 1 / high if low is None else low
        if low > high:
            raise ValueError(
                f"rollout_rs_threshold must be >= 1 for {name!r}, whose lower bound is 1 / "
                f"threshold, got {threshold!r}"
            )
        # verl bounds the ratio rollout / policy, whose log is klfast's x with the other sign.
        rule = Rejection("k1", over, low=-math.log(high), high=-math.log(low))
        return Option(name, rule, -1)
    if low is not None:
        raise ValueError(f"rollout_rs_threshold must be one number for {name!r}, got {threshold!r}")
    return Option(name, Rejection(statistic, over, high=high), 1)


# The metrics


# Metrics are computed on the host, in fp64, from one copy of ``RolloutStats``. verl's means over
# sequences count a sequence without a token as 0. Its metrics of a rejection criterion leave it
# out.
Metrics = dict[str, Tensor]

LEAST_MEAN = 1e-8  # the least divisor of verl's means of weights; and its addend in the sample size


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
    # Near 1 the mean of squares less the squared mean has no digits left.
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
    spread = of_sequence.std() if length.numel() > 1 else length.new_zeros(())
    metrics |= {
        "rollout_is_mean": mean,
        "rollout_is_std": _deviation(variance, tokens),
        "rollout_is_eff_sample_size": divide((mean + LEAST_MEAN).square(), square),
        "rollout_is_seq_mean": of_sequence.mean(),
        "rollout_is_seq_std": spread,
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
    length = stats.length
    is_there = length > 0
    sequences = wide(is_there.sum())
    is_of_tokens = not option.rule.is_of_sequence
    total, low, high, below, above, bounded, squares = (field for field in seen)
    if option.sign < 0:
        # With the sign of x turned, the extremes and the two sides change places.
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
    return wide(condition).mean()


def _deviation(variance: Tensor, tokens: Tensor) -> Tensor:
    """The standard deviation of so many numbers of this variance; 0 of one."""
    return torch.where(tokens > 1, variance.clamp(min=0).sqrt(), 0.0)


def check_keeps(mask: Tensor, tokens: float = 1.0) -> None:
    """Raise ValueError if nothing is kept: of a mask without elements, or by its count."""
    if mask.numel() == 0 or tokens == 0:
        raise ValueError("response_mask must keep a token, got none")


def on_host(
    stats: RolloutStats, mask: Tensor, factor: Tensor | None = None
) -> tuple[RolloutStats, Metrics]:
    """The statistics in fp64 by one copy from the device, and what the weights were divided by."""
    table = wide(stats.table())
    shape = table.shape
    table = table.flatten()
    if factor is not None:
        # One copy from the device, so that a GPU is waited for once.
        table = torch.cat([table, wide(factor).reshape(1)])
    table = table.cpu()
    copied = RolloutStats.of_table(table[: shape.numel()].view(shape))
    check_keeps(mask, float(copied.tokens.sum()))
    return copied, {} if factor is None else {"rollout_is_batch_norm_factor": table[-1]}


def floats(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Metrics as verl returns them."""
    names = (prefix + name for name in metrics)
    return dict(zip(names, torch.stack(list(metrics.values())).tolist(), strict=True))
