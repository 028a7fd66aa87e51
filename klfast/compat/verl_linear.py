"""verl's functions from hidden states: ``FusedLinearForPPO`` and ``FusedLinearForPPOFunction`` of
``verl.utils.experimental.torch_functional``, ``linear_cross_entropy`` of ``verl.utils.kernel``.

All are ``klfast.linear_token_logprobs`` of logits / temperature, logits = hidden @ weight.T, by
verl's calls, and break the graph of ``torch.compile``.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_world_size

from klfast.checks.arguments import check_choice
from klfast.compat.hidden import check_words
from klfast.compat.logits import IGNORED
from klfast.dtypes import arithmetic_dtype
from klfast.linear.api import linear_token_logprobs
from klfast.linear.chunks import length_of
from klfast.logits.outputs import TokenLogprobs

BACKENDS = ("torch", "liger")
"""verl's names of its own ways to compute it."""


class FusedLinearForPPOFunction:
    """Log-probs and entropies from hidden states, called as verl's."""

    @staticmethod
    def apply(
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float | Tensor = 1.0,
        chunk_size: int = 512,
        *,
        exact: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """``(log_probs, entropy)`` in nats, each in the shape of ``input_ids``.

        Args:
            hidden_states: [T, D] or [B, T, D]; fp64, fp32, bf16 or fp16.
            vocab_weights: [V, D], of the head. Gradients reach both in their own dtypes.
            input_ids: [T] or [B, T], the words whose log-probs are asked for.
            temperature: a number > 0; or a tensor, as of ``klfast.linear_token_logprobs``.
            chunk_size: tokens at a time, where klfast would have more: it has as many as fill 600
                MiB with logits on a GPU, 64 MiB on a CPU (verl holds several times its chunk).
            exact: entropies in the dtype of ``hidden_states``; log-probs are fp32, as in verl since
                0.8.

        Differs from verl: the logits are fp32 whatever the dtypes, where verl's of lower dtypes are
        rounded to these, and once more behind the division by the temperature (log-probs move by up
        to 0.1 nats), and their gradients too; the weight's gradient is summed in fp32 over all
        chunks and rounded once. Entropies of lower dtypes are fp32; fp64 stays fp64, where verl's
        is fp32. On a CPU words outside of the vocabulary are a ValueError.

        Raises:
            ValueError, TypeError: a wrong shape, dtype, device or number.
        """
        return _logprobs_and_entropies(
            hidden_states, vocab_weights, input_ids, None, temperature, chunk_size, exact
        )


class ExactFusedLinearForPPOFunction(FusedLinearForPPOFunction):
    """The same with ``exact=True``, for ``patch``."""

    apply = staticmethod(partial(FusedLinearForPPOFunction.apply, exact=True))


class FusedLinearForPPO(nn.Module):
    """:class:`FusedLinearForPPOFunction` as a module, with verl's arguments.

    Args:
        chunk_size: see there.
        impl_backend: verl's choice, since 0.9.1. Both are computed alike; under ``"liger"`` a word
            of -100 has the log-prob 0 and the entropy 0, without a gradient, as in Liger.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        check_choice("impl_backend", impl_backend, BACKENDS)
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float | Tensor = 1.0,
        *,
        exact: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """``(log_probs, entropy)`` in nats, each in the shape of ``input_ids``: [T] or [B, T]."""
        keep = input_ids != IGNORED if self.impl_backend == "liger" else None
        return _logprobs_and_entropies(
            hidden_states, vocab_weights, input_ids, keep, temperature, self.chunk_size, exact
        )


def _logprobs_and_entropies(
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    keep: Tensor | None,
    temperature: float | Tensor,
    chunk_size: int,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    check_words("input_ids", input_ids, "hidden_states", hidden_states)
    dtype = arithmetic_dtype(hidden_states, vocab_weights)
    auto = length_of(vocab_weights.shape[0], dtype, hidden_states.device)
    has_fewer = chunk_size < min(auto, input_ids.numel())
    chunk: int | Literal["auto"] = chunk_size if has_fewer else "auto"
    found = linear_token_logprobs(
        hidden_states,
        vocab_weights,
        input_ids,
        keep,
        temperature=temperature,
        return_entropy=True,
        chunk=chunk,
    )
    entropy = _of_tokens(found)
    return found.logprobs, entropy.to(hidden_states.dtype) if exact else entropy


def _of_tokens(found: TokenLogprobs) -> Tensor:
    assert found.entropy is not None
    return found.entropy


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """``(logprobs, entropy)`` in nats, of N = B * T tokens: log-probs, not a cross-entropy's sign.

    The log-probs are [N], or reduced 0-dim; the entropies are [N].

    Args:
        hidden: [B, T, D] or [N, D]; fp64, fp32, bf16 or fp16.
        weight: [V, D], of the head. Gradients reach both in their own dtypes.
        labels: [B, T] or [N], words.
        temperature: a number > 0; or a tensor, as of ``klfast.linear_token_logprobs``.
        reduction: of the log-probs, ``"none"``, ``"sum"`` or ``"mean"``, in any case of letters.
        dist_process_group: of ranks that hold shards of the vocabulary: of one process, or None.
            For several, ``klfast.linear_token_logprobs(group=)``: its gradient to ``hidden`` is
            added up over the ranks, where verl leaves each rank its own words' part.

    Differs from verl: it runs on a CPU too, at every width, on any strides. The sum and the mean
    are finite; verl's add the rows between the last token and a multiple of 16, and are infinite
    where there are any. On a CPU gradients of the logits are not rounded to lower dtypes, and
    labels outside of the vocabulary are a ValueError; verl leaves their log-prob unset.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, number or ``reduction``; a
            ``dist_process_group`` of several processes.
    """
    reduction = reduction.lower()
    check_choice("reduction", reduction, ("none", "sum", "mean"))
    if dist_process_group is not None and (ranks := get_world_size(dist_process_group)) > 1:
        raise ValueError(
            "dist_process_group must be None or of one process, which has the whole vocabulary, "
            f"got one of {ranks}; klfast.linear_token_logprobs(group=) takes shards, and adds the "
            "gradient to hidden up over the ranks, which verl does not"
        )
    if labels.shape != hidden.shape[:-1]:  # verl looks at tokens alone, in their order
        hidden, labels = hidden.flatten(0, -2), labels.flatten()
        check_words("labels", labels, "hidden", hidden)
    found = linear_token_logprobs(
        hidden, weight, labels, temperature=temperature, return_entropy=True
    )
    logprobs = found.logprobs.flatten()
    if reduction != "none":
        logprobs = logprobs.sum() if reduction == "sum" else logprobs.mean()
    return logprobs, _of_tokens(found).flatten()
