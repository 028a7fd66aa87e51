"""Other libraries' kernels over logits and from hidden states, where they are installed."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from benchmarks.cases import Forward
from benchmarks.linear import BETA, sequences_of
from benchmarks.logits import JSD_BETA

Forwards = dict[str, Forward]  # Op -> its forward. Ops that a library does not have are absent.
TRL_WORDS = 32768  # vocabulary entries that TRL's trainers take at a time


def _liger() -> Forwards:
    """Liger's loss of log-probs, which torch makes of the logits. A reverse KL is its JSD at
    beta = 1; its KLDiv has no gradient to the policy.
    """
    functions = import_module("liger_kernel.transformers.functional")

    def both(logits: Tensor, ref_logits: Tensor) -> tuple[Tensor, Tensor]:
        return log_softmax(logits.float(), -1), log_softmax(ref_logits.float(), -1)

    def kl(logits: Tensor, ref_logits: Tensor) -> Any:
        logprobs, ref_logprobs = both(logits, ref_logits)
        words = functions.liger_kl_div(ref_logprobs, logprobs, reduction="none", log_target=True)
        return words.sum(-1)

    def mean(beta: float) -> Forward:
        return lambda logits, ref_logits: functions.liger_jsd(*both(logits, ref_logits), beta=beta)

    def linear_kl(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Any:
        losses = import_module("liger_kernel.chunked_loss")
        loss = losses.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0)
        labels = hidden.new_zeros(len(hidden), dtype=torch.int64)  # of the hard loss
        return loss(hidden, weight, ref_hidden, ref_weight, labels)

    def linear_grpo(hidden: Tensor, weight: Tensor, *numbers: Tensor) -> Any:
        losses = import_module("liger_kernel.chunked_loss")
        loss = losses.LigerFusedLinearGRPOLoss(beta=BETA, loss_type="bnpo")
        ids, old, ref, advantages = (each.view(sequences_of(hidden), -1) for each in numbers)
        logprobs = {"ref_per_token_logps": ref, "old_per_token_logps": old}
        rows = hidden.view(*ids.shape, -1)
        return loss(rows, weight, ids, torch.ones_like(ids), advantages[:, 0], **logprobs)[0]

    return {
        "kl": kl,
        "kl-one-read": mean(1.0),
        "jsd-one-read": mean(JSD_BETA),
        "linear-kl-loss": linear_kl,
        "linear-grpo": linear_grpo,
    }


def _trl() -> Forwards:
    """TRL's functions from logits, and from hidden states with TRL's own tile sizes."""
    module = import_module("trl.kernels.logprob_entropy")
    both: Forward = module.selective_log_softmax_and_entropy

    def logprobs(logits: Tensor, token_ids: Tensor) -> Any:
        return both(logits, token_ids)[0]

    def kl(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, *ref_weight: Tensor) -> Any:
        chunked = import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
        (ref_own,) = ref_weight or (weight,)
        return chunked.apply(hidden, weight, None, ref_hidden, ref_own, None, 1.0)[0]

    def linear_logprobs(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Any:
        chunked = import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
        return chunked.apply(hidden, weight, None, token_ids, 1.0, TRL_WORDS, None, 1.0, ())[0]

    return {
        "logprob": logprobs,
        "logprob-entropy": both,
        "logprob-two-pass": logprobs,
        "linear-kl-loss": lambda *models: kl(*models).mean(),
        "linear-kl-frozen": kl,
        "linear-logprob": linear_logprobs,
    }


def _cut_cross_entropy() -> Forwards:
    """With the gradient of every entry: by default it leaves out those of unlikely ones."""
    cross_entropy: Forward = import_module("cut_cross_entropy").linear_cross_entropy
    options = {"reduction": "none", "filter_eps": None}
    return {"linear-logprob": lambda *arguments: -cross_entropy(*arguments, **options)}


LIBRARIES: dict[str, Callable[[], Forwards]] = {
    "Liger": _liger,
    "TRL": _trl,
    "cut-cross-entropy": _cut_cross_entropy,
}


def installed() -> tuple[dict[str, Forwards], dict[str, str]]:
    """Library -> its forwards; and why the others are not here."""
    found, missing = {}, {}
    for name, load in LIBRARIES.items():
        try:
            found[name] = load()
        except Exception as error:  # with another torch or Triton an import fails in many ways
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, missing
