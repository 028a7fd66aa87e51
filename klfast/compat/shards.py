"""The frameworks' functions over a vocabulary in shards, one a rank of tensor parallelism.

verl and ms-swift ask ``megatron.core`` for the ranks, NeMo-RL is given them. Logits stay where they
are and as they are; lower dtypes give fp32.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed

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


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """NeMo-RL's: log-probs [B, S - 1], in nats, of each next token of ``target`` [B, S].

    Args:
        vocab_parallel_logits: [B, S or more, V_r], this rank's words.
        target: [B, S], words of the whole vocabulary, not shifted.
        vocab_start_index: of this rank, the shards in the order of ranks.
        vocab_end_index: ``vocab_start_index`` plus V_r.
        tp_group: the ranks of the vocabulary.
        inference_only: whether no gradient is wanted.
        cp_group: None, or of one rank: sequences in parts are not served.
        chunk_size: of no effect: there are no temporaries of the logits' size.
        sampling_params: None, or without ``top_k`` and ``top_p``.
        cu_seqlens_padded: of no effect without ``cp_group``.

    Differs from NeMo-RL: the last row is not read; one all-gather, where they have three
    all-reduces; 1 - p keeps its digits. Shards may differ in size.

    Raises:
        ValueError: a range that is not that of the logits, ``cp_group`` of several ranks, or
            ``sampling_params`` that leave words out.
    """
    words = vocab_parallel_logits.shape[-1]
    if vocab_end_index - vocab_start_index != words:
        raise ValueError(
            f"vocab_end_index must be vocab_start_index plus the {words} words of the logits, got "
            f"{vocab_start_index} and {vocab_end_index}"
        )
    if cp_group is not None and (ranks := distributed.get_world_size(cp_group)) > 1:
        raise ValueError(f"cp_group must be None or of one rank, got one of {ranks}")
    if _leaves_words_out(sampling_params):
        raise ValueError(
            f"sampling_params must leave no words out, by top_k or top_p, got {sampling_params}"
        )
    logits = vocab_parallel_logits[:, : target.shape[1] - 1]
    if inference_only:
        logits = logits.detach()
    return token_logprobs(logits, target[:, 1:], group=tp_group)


def _leaves_words_out(sampling_params: Any) -> bool:
    if sampling_params is None:
        return False
    top_k, top_p = (getattr(sampling_params, name, None) for name in ("top_k", "top_p"))
    return (top_k is not None and top_k > 0) or (top_p is not None and top_p < 1)
