"""OpenRLHF 0.10 to 0.11.2: ``openrlhf.models.utils`` and its controllers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from klfast import backends
from klfast.args.estimator import Estimator
from klfast.args.penalty import Reducing, reduce_call
from klfast.compat import common
from klfast.compat.common import choose, per_token
from klfast.compat.controllers import AdaptiveKLController, FixedKLController
from klfast.compat.patching.on_import import hook_of_workers
from klfast.compat.presets import OPENRLHF

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "compute_approx_kl",
    "compute_approx_kl_unweighted",
    "compute_entropy",
    "compute_reward",
    "log_probs_from_logits",
    "setup_worker",
]

setup_worker = hook_of_workers("openrlhf")

UNBIASED = Estimator("k2", importance="detached", importance_cap=10)
"""Its gradient w * x * dx, with w = min(exp(log_probs - log_probs_old), 10)."""


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    log_probs_old: Tensor | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
) -> Tensor:
    """The per-token KL of 0.11.1 on, fp32, in nats, shaped as ``log_probs``, within [-10, 10].

    ``kl_estimator``: ``k1``, ``k2`` or ``k3`` (see ``presets.OPENRLHF``). ``unbiased_gradient``:
    the same value with the gradient of ``w * x**2 / 2``, where x is the log-ratio and
    ``w = min(exp(log_probs - log_probs_old), 10)`` a constant, 1 without ``log_probs_old``.

    As there, the gradient is 0 where the limit acts (k3: once x < -2.61), unless it is the unbiased
    one. Before 0.11.2 theirs of k3 is NaN once x < -88.
    """
    if log_probs_old is not None and not isinstance(log_probs_old, Tensor):
        raise TypeError(f"log_probs_old must be a torch.Tensor or None, got {log_probs_old!r}")
    estimator = choose("kl_estimator", kl_estimator, OPENRLHF)
    if not unbiased_gradient:
        return per_token(log_probs, log_probs_base, estimator)
    if log_probs_old is None:
        return per_token(log_probs, log_probs_base, replace(estimator, gradient="k2"))
    value = per_token(log_probs, log_probs_base, replace(estimator, gradient="none"))
    surrogate = per_token(log_probs, log_probs_base, UNBIASED, old_logprobs=log_probs_old)
    # The value of one and the gradient of the other.
    return value.detach() + (surrogate - surrogate.detach())


def compute_approx_kl_unweighted(
    log_probs: Tensor, log_probs_base: Tensor, kl_estimator: str = "k1"
) -> Tensor:
    """``compute_approx_kl`` as OpenRLHF has it up to 0.11.0 and on its main branch: in nats.

    The result has the shape of ``log_probs``. There is no ``log_probs_old``, whose weight came with
    0.11.1, so the third argument is ``kl_estimator``.
    """
    return compute_approx_kl(log_probs, log_probs_base, kl_estimator=kl_estimator)


def compute_reward(
    r: Tensor | float,
    kl_coef: float,
    kl: Tensor,
    action_mask: Tensor | None = None,
    reward_clip_range: tuple[float, float] | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """OpenRLHF's per-token reward: ``-kl_coef * kl``, plus ``r[b]`` at the last action token.

    ``r`` is [B] or one number for all. ``kl`` in nats and ``action_mask`` are [B, T]. A ``kl_coef``
    <= 0 counts as 0. ``r`` is first clipped to ``reward_clip_range``. No gradient.

    Differs from OpenRLHF: the reward is 0 where masked, and ``-kl_coef * kl`` there with
    ``exact=True``. A sequence without an action token has no reward (theirs gives ``r[b]`` to its
    last slot).
    """
    scores = torch.as_tensor(r, device=kl.device).expand(kl.shape[0])
    if reward_clip_range:
        scores = scores.clamp(*reward_clip_range)
    kl_coef = max(kl_coef, 0.0)
    call = reduce_call(kl.detach(), action_mask, Reducing(coef=kl_coef))
    call = call._replace(scores=scores.detach())
    rewards: Tensor = backends.kl_penalty("auto", call)[0]
    if not exact:
        return rewards
    if action_mask is not None:
        # OpenRLHF subtracts the KL of masked tokens too.
        rewards = torch.where(action_mask != 0, rewards, -kl_coef * kl.detach())
    return rewards.to(kl.dtype)


def log_probs_from_logits(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, *, exact: bool = False
) -> Tensor:
    """Log-probs of the labels [...] under softmax(logits / temperature), [..., V], in nats.

    A label of -100 gives 0 and no gradient, as in OpenRLHF with flash-attn; without it OpenRLHF
    fails. The logits are divided by the temperature in place, as theirs are, only with
    ``exact=True``.
    """
    if exact and temperature != 1.0:
        # A caller that reads the logits afterwards finds them divided, as with OpenRLHF.
        logits, temperature = logits.div_(temperature), 1.0
    return common.token_logprobs(
        logits, labels, ignore_index=common.IGNORED, temperature=temperature, exact=exact
    )


def compute_entropy(logits: Tensor, *, exact: bool = False) -> Tensor:
    """Entropies of softmax(logits), [..., V] -> [...], in nats. There is nothing to compile."""
    return common.entropy(logits, exact=exact)
