"""Estimators under a weight that is a tensor of its own: NeMo-RL, slime and open-instruct pass one.

``klfast.kl_penalty`` takes ``old_logprobs`` and makes the weight ``exp(logprobs - old_logprobs)``
itself, value and gradient, in the one read. A weight that comes as a tensor may depend on anything:
its graph is autograd's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from klfast.compat.common import per_token
from klfast.estimator import Estimator


def weighted_per_token(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: Estimator,
    weight: Tensor | None,
    *,
    argument: str,
    exact: bool = False,
) -> Tensor:
    """``weight * f`` of every token, in nats, where f is the estimator's; f alone without a weight.

    The gradient to ``logprobs`` is ``weight * df/dx`` plus f times what flows through the weight's
    own graph. With ``clip_weighted`` the estimator's ``kl_clip`` c limits the product: beyond it
    the value is c or -c and nothing has a gradient; and where ``log_ratio_clip`` acts the weight
    has none. A weight of NaN gives NaN, an infinite one c (and NaN at f = 0).

    Args:
        logprobs: of the taken tokens under the policy, [T], [B, T], [..., T].
        ref_logprobs: under the reference, like the weight of the same shape.
        estimator: which one.
        weight: of every token, or None.
        argument: the framework's name for the weight.
        exact: the order of the frameworks, see ``common.per_token``; the result has the dtype that
            the inputs and the weight promote to.

    Raises:
        TypeError, ValueError: the weight is no tensor, or has another shape.
    """
    if weight is None:
        return per_token(logprobs, ref_logprobs, estimator, exact=exact)
    check_weight(argument, weight, logprobs)
    limit = None
    if estimator.clip_weighted:
        weight = _without_gradient_where_clipped(logprobs, ref_logprobs, estimator, weight)
        limit = estimator.kl_clip
        estimator = replace(estimator, kl_clip=None, clip_weighted=False)
    if limit is None:
        return weight * per_token(logprobs, ref_logprobs, estimator, exact=exact)
    if exact:
        product = weight * per_token(logprobs, ref_logprobs, estimator, exact=True)
        return product.clamp(-limit, limit)
    with torch.no_grad():
        product = weight * per_token(logprobs, ref_logprobs, estimator)
    inside = product.abs() <= limit
    # Only tokens inside are differentiated: f may be infinite at the others, and 0 * inf is NaN.
    kept = torch.where(inside, weight, 0.0) * per_token(logprobs, ref_logprobs, estimator, inside)
    return torch.where(inside, kept, product.clamp(-limit, limit))


def check_weight(argument: str, weight: object, logprobs: Tensor) -> None:
    """A weight is a tensor of the shape of the log-probs."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(weight).__name__}")
    if weight.shape != logprobs.shape:
        raise ValueError(
            f"{argument} must have a number for every token, of shape {list(logprobs.shape)}, got "
            f"{list(weight.shape)}"
        )


def _without_gradient_where_clipped(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator, weight: Tensor
) -> Tensor:
    """The weight, detached where ``log_ratio_clip`` acts."""
    if estimator.log_ratio_clip is None or not weight.requires_grad:
        return weight
    low, high = estimator.log_ratio_bounds
    arithmetic = torch.promote_types(logprobs.dtype, torch.float32)
    log_ratio = logprobs.detach().to(arithmetic) - ref_logprobs.detach()
    return torch.where((log_ratio >= low) & (log_ratio <= high), weight, weight.detach())
