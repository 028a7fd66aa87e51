"""verl's rollout correction: ``verl.trainer.ppo.rollout_corr_helper`` of 0.9 and main.

Every function takes one read of the log-probs for weights, mask and metrics, and one copy from the
device for all metrics.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, distributed

from klfast.checks.arguments import check_choice
from klfast.compat.common import zeros_like
from klfast.compat.verl_rollout_metrics import (
    LEAST_MEAN,
    check_keeps,
    drift,
    floats,
    of_rejection,
    of_weights,
    on_host,
)
from klfast.compat.verl_rollout_options import LEVELS, Option, options_of, weight_bounds
from klfast.rollout.api import rollout_correction
from klfast.rollout.stats import RolloutStats

_PREFIX = "rollout_corr/"


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """How far the trained policy is from the rollout policy, under verl's names.

    All are [B, T], and KLs in nats per token. Without ``rollout_log_prob`` the policy's own
    perplexity alone.

    Differs from verl: near on-policy k3 and chi-square keep their digits; NaN under the mask has no
    effect; k3 saturates at a log-ratio of 20.

    Raises:
        ValueError: the mask keeps nothing.
    """
    check_keeps(response_mask)
    rollout = old_log_prob if rollout_log_prob is None else rollout_log_prob
    stats = rollout_correction(old_log_prob, rollout, response_mask, weight=None).stats
    metrics = drift(on_host(stats, response_mask)[0])
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

    ``rollout_is``: ``token`` or ``sequence``. ``rollout_is_threshold``: a number or its text
    truncates at it; ``"lower_upper"`` makes weights outside 0 (IcePop). With
    ``rollout_is_batch_normalize`` the weights are divided by their mean, over all ranks where
    torch.distributed is initialized.

    Differs from verl: lower dtypes give fp32; where all weights are 0 the effective sample size is
    0, and no ZeroDivisionError; NaN under the mask has no effect.

    Raises:
        ValueError: an unknown ``rollout_is``, a wrong threshold, or a mask that keeps nothing.
        TypeError: a threshold of the wrong type.
    """
    check_keeps(response_mask)
    check_choice("rollout_is", rollout_is, LEVELS)
    bounds = weight_bounds(rollout_is_threshold)
    weights, _, stats = rollout_correction(
        log_ratio, zeros_like(log_ratio), response_mask, weight=rollout_is, **bounds
    )
    assert weights is not None
    factor = None
    if rollout_is_batch_normalize:
        weights, factor = _normalized(weights, stats, rollout_is)
    copied, of_factor = on_host(stats, response_mask, factor)
    return weights, floats(of_weights(copied, rollout_is, bounds) | of_factor)


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask without what fails a rule, and what each rule saw, under verl's names.

    ``rollout_rs``: options separated by commas, of ``klfast.compat.verl.ROLLOUT_RULES``; all must
    hold. ``rollout_rs_threshold``: one for all or one each. Of k1 it bounds a ratio, and a single
    number u stands for ``1/u`` to u; verl compares the *inverse* ratio with it, rollout over
    policy, and so does this: ``"0.5_4"`` keeps x in [-log 4, log 2]. Of k2 and k3 it is the
    greatest number, in nats.

    Differs from verl: a log-ratio beyond 20 is limited where an exp is taken of it alone. NaN under
    the mask has no effect. Every option rejects a token with a log-ratio of -inf.

    Raises:
        ValueError: an unknown option, a wrong threshold, or a mask that keeps nothing.
        TypeError: a threshold of the wrong type.
    """
    if log_ratio.shape[0] == 0:
        return response_mask, {}
    options = options_of(rollout_rs, rollout_rs_threshold)
    _, mask, stats = rollout_correction(
        log_ratio,
        zeros_like(log_ratio),
        response_mask,
        weight=None,
        reject=[option.rule for option in options],
    )
    return mask, floats(of_rejection(on_host(stats, response_mask)[0], options))


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
    check_keeps(response_mask)
    level = rollout_is if rollout_is_threshold is not None else None
    bounds: dict[str, Any] = {}
    if level is not None:
        check_choice("rollout_is", level, LEVELS)
        assert rollout_is_threshold is not None
        bounds = weight_bounds(rollout_is_threshold)
    options: tuple[Option, ...] = ()
    if rollout_rs is not None:
        options = options_of(rollout_rs, rollout_rs_threshold)
    weights, mask, stats = rollout_correction(
        old_log_prob,
        rollout_log_prob,
        response_mask,
        weight=level,
        reject=[option.rule for option in options],
        **bounds,
    )
    factor = None
    if weights is not None and level is not None and rollout_is_batch_normalize:
        weights, factor = _normalized(weights, stats, level)
    copied, of_factor = on_host(stats, response_mask, factor)
    metrics = drift(copied)
    if level is not None:
        metrics |= of_weights(copied, level, bounds) | of_factor
    if options:
        metrics |= of_rejection(copied, options)
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


def _normalized(weights: Tensor, stats: RolloutStats, level: str) -> tuple[Tensor, Tensor]:
    """The weights divided by their mean, and the divisor."""
    initialized = distributed.is_available() and distributed.is_initialized()
    mean = stats.weight_mean(level, distributed.group.WORLD if initialized else None)
    factor = torch.where(mean > LEAST_MEAN, mean, 1.0)
    return weights / factor.to(weights.dtype), factor
