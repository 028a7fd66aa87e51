"""ROLL: the KL and the log-probs of ``roll.utils.functionals``, ``roll.utils.kl_controller``, and
the distillation losses of ``roll.pipeline.distill``.

ROLL is installed from source; its tags v0.1.0 to v0.3.0 and its main branch have the same code. Use
``from klfast.compat.roll import compute_approx_kl, ...`` in place of ROLL's own, or
``klfast.compat.patch("roll")``.
"""

from __future__ import annotations

from torch import Tensor

from klfast.compat import logits as over_logits
from klfast.compat.common import per_token_or_full
from klfast.compat.controllers import FixedKLController
from klfast.compat.controllers import TokenAdaptiveKLController as AdaptiveKLController
from klfast.compat.presets import ROLL
from klfast.compat.roll_distillation import VariousDivergence, op_compute_various_divergence

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "VariousDivergence",
    "compute_approx_kl",
    "entropy_from_logits",
    "get_kl_controller",
    "log_probs_from_logits",
    "op_compute_various_divergence",
]


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    action_mask: Tensor | None = None,
    kl_penalty: str = "kl",
    *,
    exact: bool = False,
) -> Tensor:
    """ROLL's per-token KL, in nats, of the shape of ``log_probs``, 0 where masked.

    ``kl_penalty``: ``kl``, ``abs``, ``mse`` or ``k3`` (limited to 10; see ``presets.ROLL``), or
    ``full``: the exact KL(policy || reference) of log-probs [..., V] of the whole vocabulary, of
    shape [...], by one read (see ``common.full_kl``).

    Differs from ROLL, unless ``exact=True``: the gradient of k3 is 0, not NaN, where exp overflows
    (log-ratios below -88 in fp32); NaN under the mask has no effect; lower dtypes give fp32.
    ``full`` is the KL of distributions, also where rounding lets log-probs miss a sum of one; its
    gradient is the same at the logits. Besides, k3 keeps its digits near 0. Like ROLL's, its
    gradient is 0 once x < -2.61.

    Raises:
        ValueError: an unknown ``kl_penalty``; ``full`` of tensors without a vocabulary dimension,
            or whose mask does not have the shape [...] (ROLL sums over the wrong dimension there).
    """
    return per_token_or_full(log_probs, log_probs_base, kl_penalty, ROLL, action_mask, exact=exact)


def log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs of the labels [...] under softmax(logits), [..., V] -> [...], fp32, in nats.

    By one read, where ROLL makes two copies of the logits. Differs from ROLL: fp64 stays fp64.
    """
    return over_logits.token_logprobs(logits, labels)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropies of softmax(logits), [..., V] -> [...], fp32, in nats, by one read.

    Differs from ROLL: a logit of -inf adds 0, where theirs gives NaN; fp64 stays fp64.
    """
    return over_logits.entropy(logits)


def get_kl_controller(
    init_kl_coef: float, target_kl: float | None = None, kl_horizon: float | None = None
) -> AdaptiveKLController | FixedKLController:
    """Fixed if ``target_kl`` is None, else adaptive; the horizon is 10,000 if None.

    ``target_kl`` is in nats per token.

    Raises:
        TypeError, ValueError: as the controllers.
    """
    if target_kl is None:
        return FixedKLController(init_kl_coef)
    return AdaptiveKLController(
        init_kl_coef, target_kl, 10_000 if kl_horizon is None else kl_horizon
    )
