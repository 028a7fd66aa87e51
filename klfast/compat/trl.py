"""TRL 1.10 to 1.16: ``GRPOTrainer``, ``RLOOTrainer``, the functions over logits of
``trl.trainer.utils``, and the distillation losses of GKD, SDFT and SDPO; ``PPOTrainer`` of 0.6 to
0.11.

TRL 1.x writes its KL inline. There are two ways to get klfast's KL. Make a trainer with
``class Trainer(klfast.compat.trl.GRPOMixin, trl.GRPOTrainer): pass``, or call
``klfast.compat.patch("trl")``. The patch serves GRPO and RLOO, the trainers that take log-probs
from logits (GRPO and RLOO never have logits), GKD, SDFT and SDPO. It also serves GRPO's correction
for vLLM's log-probs, and ``RLOOSamplingMixin`` gives RLOO such a correction. ``AdaptiveKLCallback``
steers the ``beta`` of GRPO and RLOO, patched or not. All of these use the functions here.

The functions over logits have ``temperature`` and ``row_mask`` since TRL 1.14, which also added the
function with both results. They make nothing of the logits' size but the gradient, and do not round
the logits after the division by the temperature.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klfast.compat import common
from klfast.compat.controllers import AdaptiveKLController, FixedKLController
from klfast.compat.trl_distillation import (
    add_tail_bucket,
    add_tail_bucket_and_mask,
    compute_divergence,
    compute_full_logit_self_distillation_loss,
    compute_topk_self_distillation_loss,
    generalized_jsd_loss,
    iw_opd_generalized_jsd_loss,
)
from klfast.compat.trl_losses import (
    LEVELS,
    REDUCTIONS,
    importance_sampling_ratio,
    kl_loss,
    kl_penalty,
    per_token_kl,
    sequence_kl,
)
from klfast.compat.trl_trainers import GRPOMixin, RLOOSamplingMixin
from klfast.functional.logits import token_logprobs

if TYPE_CHECKING:
    from klfast.compat.trl_callback import AdaptiveKLCallback

__all__ = [
    "LEVELS",
    "REDUCTIONS",
    "AdaptiveKLCallback",
    "AdaptiveKLController",
    "FixedKLController",
    "GRPOMixin",
    "RLOOSamplingMixin",
    "add_tail_bucket",
    "add_tail_bucket_and_mask",
    "compute_divergence",
    "compute_full_logit_self_distillation_loss",
    "compute_topk_self_distillation_loss",
    "entropy_from_logits",
    "generalized_jsd_loss",
    "importance_sampling_ratio",
    "iw_opd_generalized_jsd_loss",
    "kl_loss",
    "kl_penalty",
    "per_token_kl",
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
    "sequence_kl",
]

LATER = {"AdaptiveKLCallback": "trl_callback"}
"""Classes that need transformers, imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(f"klfast.compat.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Over logits [..., V]


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """Log-probs of token ids under softmax(logits / temperature), in nats, shaped as ``index``.

    Args:
        logits: [..., V].
        index: [...], a token id of each row; or [..., K], several.
        temperature: a number > 0.
        row_mask: of the shape of ``index``. Where it is 0, the result and its gradient are 0 for
            any logits and index. A row with nothing kept is not read.
        exact: in the dtype of ``logits``.
    """
    if index.dim() == logits.dim():
        logprobs = _several(logits, index, temperature, row_mask)
        return logprobs.to(logits.dtype) if exact else logprobs
    return common.token_logprobs(logits, index, mask=row_mask, temperature=temperature, exact=exact)


def _several(logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None) -> Tensor:
    """Log-probs of K ids of each row."""
    keep = None
    if row_mask is not None:
        keep = (row_mask != 0).any(-1)
        index = torch.where(row_mask != 0, index, 0)
    # The read gives the most likely id's log-prob, and the others subtract their distance from it.
    # Both are <= 0, so nothing cancels.
    arithmetic = torch.promote_types(logits.dtype, torch.float32)
    chosen = logits.gather(-1, index).to(arithmetic) / temperature
    best = chosen.detach().argmax(-1, keepdim=True)
    top = chosen.gather(-1, best)
    distance = torch.where(top == -torch.inf, 0.0, chosen - top)
    likeliest = token_logprobs(
        logits, index.gather(-1, best).squeeze(-1), mask=keep, temperature=temperature
    )
    logprobs = likeliest.unsqueeze(-1) + distance
    return logprobs if row_mask is None else logprobs.masked_fill(row_mask == 0, 0.0)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128, *, exact: bool = False) -> Tensor:
    """Entropies of softmax(logits), [..., V] -> [...], in nats.

    There is no temporary that a ``chunk_size`` could make smaller.
    """
    return common.entropy(logits, exact=exact)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of softmax(logits / temperature), [..., V], [...] -> ([...], [...]).

    In nats. The arguments are as in :func:`selective_log_softmax`. With
    ``entropy_requires_grad=False`` no gradient comes from the entropies.
    """
    results = token_logprobs(
        logits, index, mask=row_mask, temperature=temperature, return_entropy=True
    )
    logprobs, entropy = (r.to(logits.dtype) for r in results) if exact else results
    return logprobs, entropy if entropy_requires_grad else entropy.detach()
