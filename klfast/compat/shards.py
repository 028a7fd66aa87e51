"""The frameworks' functions over a vocabulary in shards, one a rank of tensor parallelism.

verl and ms-swift ask ``megatron.core`` for the ranks. Logits stay where they are and as they are;
lower dtypes give fp32.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torch import Tensor

from klfast.compat.logits import entropy
from klfast.logits.api import kl_divergence, token_logprobs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _tensor_parallel_group() -> ProcessGroup:
    """The ranks among which Megatron cuts the vocabulary.

    Raises:
        ImportError: there is no ``megatron.core``.
    """
    state = importlib.import_module("megatron.core.parallel_state")
    group: ProcessGroup = state.get_tensor_model_parallel_group()
    return group


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """verl's: log-probs of the labels [...] of logits [..., V / ranks], in nats, on every rank.

    The ranks are those of Megatron's tensor parallelism. Differs from verl: the logits are left as
    they are, where Megatron's cross entropy overwrites fp32 ones; 1 - p keeps its digits; one
    all-gather, where Megatron makes three all-reduces. A label that is no word is a ValueError on a
    CPU and NaN on a GPU.
    """
    return token_logprobs(logits, labels, group=_tensor_parallel_group())


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """verl's: entropies of softmax(logits), [..., V / ranks] -> [...], in nats, on every rank.

    Differs from verl: a logit of -inf adds 0, where theirs gives NaN; lower dtypes give fp32, and
    the backward writes into nothing but its gradient, where theirs changes the logits for a while.
    """
    return entropy(vocab_parallel_logits, group=_tensor_parallel_group())


def vocab_parallel_entropy_with_chunking(
    vocab_parallel_logits: Tensor, chunk_size: int = 2048
) -> Tensor:
    """verl's: the same in nats, [N, V / ranks] -> [N], without temporaries that need chunks."""
    return vocab_parallel_entropy(vocab_parallel_logits)


def vocab_parallel_kl_div(input_log_probs: Tensor, target_log_probs: Tensor) -> Tensor:
    """ms-swift's: KL(target || input) of log-probs [..., V / ranks], [...], in nats, on every rank.

    The ranks are those of Megatron's tensor parallelism. Differs from ms-swift: never negative, and
    0 for equal distributions; -inf under both adds 0, where theirs is NaN. Gradients are those at
    the log-probs' own logits: behind a log-softmax both are the same.
    """
    rows = input_log_probs.shape[:-1]
    one_sequence = [x.reshape(1, -1, x.shape[-1]) for x in (input_log_probs, target_log_probs)]
    group = _tensor_parallel_group()
    return kl_divergence(*one_sequence, direction="forward", group=group).view(rows)
