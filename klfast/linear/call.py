"""The call object from hidden states: arguments after every check, on their way to a backend.

Shapes: R tokens of width D, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from klfast.call import Layout, PenaltyCall, Spec, of_rows
from klfast.checks.values import check_temperatures, check_token_ids
from klfast.dtypes import arithmetic_dtype
from klfast.logits.arguments import NO_ID
from klfast.logits.call import told_of_reduction, told_of_temperature
from klfast.names import DirectionName

if TYPE_CHECKING:
    from klfast.linear.chunks import Chunk
    from klfast.logits.shards import Shards


class Head(NamedTuple):
    """The output layer of a model: logits = softcap(hidden @ weight.T + bias)."""

    weight: Tensor
    """[V, D]; like the bias it may carry a graph."""
    bias: Tensor | None
    """[V]."""
    softcap: float | None
    """c of c * tanh(logits / c)."""


class Model(NamedTuple):
    """Hidden states, and the head that they meet."""

    hidden: Tensor
    """[R, D]; may carry a graph."""
    head: Head

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those that may carry a graph."""
        return self.hidden, self.head.weight, self.head.bias

    def of(self, tensors: Sequence[Tensor | None]) -> Model:
        """The same of other tensors."""
        hidden, weight, bias = tensors
        assert hidden is not None
        assert weight is not None
        return Model(hidden, Head(weight, bias, self.head.softcap))


class Divergence(NamedTuple):
    """What is asked about a reference, and how the rows' divergences are reduced."""

    reference: Model
    direction: DirectionName
    jsd_beta: float
    layout: Layout
    spec: Spec
    return_stats: bool


class LinearCall(NamedTuple):
    """Arguments of ``linear_token_logprobs``, or of ``linear_kl_divergence``, after every check."""

    policy: Model
    token_ids: Tensor | None
    """[R] or [R, K], int64, contiguous."""
    keep: Tensor | None
    """[R], bool, contiguous: the tokens that exist."""
    temperature: float
    inverse_temperature: Tensor | None
    """[R] or 0-dim, in ``wide_dtype``, in place of the temperature where that is a tensor."""
    return_entropy: bool
    chunk: int | None
    """Tokens per chunk; None for "auto"."""
    shape: torch.Size
    """The shape of results per token."""
    divergence: Divergence | None = None
    """None for ``linear_token_logprobs``."""
    detaches_entropy: bool = False
    """Whether the entropies have no gradient."""
    on_chunk: Callable[[Tensor, Chunk], None] | None = None
    """Called where numbers per token are computed, without a graph, with the policy's logits
    [n, V] of each chunk in turn, behind the softcap: for further numbers of these, at no further
    product. It may not change the logits."""
    shards: Shards | None = None
    """The vocabulary's, where the heads are those of one of them. Ids are those of all words."""

    def first(self) -> Tensor:
        """The tensor that has the device of the call."""
        return self.policy.hidden

    def models(self) -> tuple[Model, ...]:
        """The policy, and the reference where there is one."""
        return (self.policy,) if self.divergence is None else (self.policy, self.reference())

    def tensors(self) -> list[Tensor | None]:
        """Those of all models that may carry a graph."""
        return [tensor for model in self.models() for tensor in model.tensors()]

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> LinearCall:
        """The call with others in the place of ``tensors()``."""
        policy = self.policy.of(tensors[:3])
        if self.divergence is None:
            return self._replace(policy=policy)
        divergence = self.divergence._replace(reference=self.reference().of(tensors[3:]))
        return self._replace(policy=policy, divergence=divergence)

    def without_tensors(self) -> LinearCall:
        """The call with tensors of no memory, which keeps nothing alive."""
        return self.with_tensors([None if t is None else t.new_empty(0) for t in self.tensors()])

    def reference(self) -> Model:
        assert self.divergence is not None
        return self.divergence.reference

    def arithmetic(self) -> torch.dtype:
        """The dtype of logits, arithmetic and results."""
        return arithmetic_dtype(*self.tensors())

    def picks_shape(self) -> torch.Size:
        """The shape of log-probs of ``token_ids``."""
        assert self.token_ids is not None
        return self.shape + self.token_ids.shape[1:]

    def check_values(self) -> None:
        """Raise ValueError for a value of the reduction that is refused, for a temperature that is
        not > 0, and for ids that are no words.
        """
        if self.divergence is not None:
            self.reduce(self.nothing()).check_values()
        check_temperatures(self.inverse_temperature)
        if self.token_ids is not None:
            none = NO_ID if self.token_ids.dim() == 2 else None
            whole = self.shards is None
            check_token_ids(self.token_ids, self.keep, self.words(), none=none, may_be_shard=whole)

    def words(self) -> int:
        """The number of words, of all shards where these are known."""
        if self.shards is None:
            return self.policy.head.weight.shape[0]
        assert self.shards.words is not None
        return self.shards.words

    def own_ids(self, token_ids: Tensor) -> Tensor:
        """Ids as words of this rank's heads; ``NO_ID`` where these have no such word."""
        return token_ids if self.shards is None else self.shards.own_ids(token_ids, NO_ID)

    def add_up(self, grad: Tensor) -> None:
        """Add up the ranks' gradients of hidden states, in place: each is of its own words."""
        if self.shards is not None:
            self.shards.ranks.add_up(grad)

    def told(self) -> dict[str, object]:
        """What must be the same on all ranks of shards (``klfast.logits.agreement``)."""
        of, ids = self.divergence, self.token_ids
        return {
            "the function": "linear_token_logprobs" if of is None else "linear_kl_divergence",
            "the number of tokens": self.shape.numel(),
            "the shape of the tokens": tuple(self.shape),
            "the kind of device": self.first().device.type,
            "the widths of hidden states": tuple(m.hidden.shape[1] for m in self.models()),
            "the dtypes": tuple(None if t is None else t.dtype for t in self.tensors()),
            "requires_grad": tuple(t is not None and t.requires_grad for t in self.tensors()),
            "softcap": tuple(model.head.softcap for model in self.models()),
            "chunk": self.chunk,
            "the number of token_ids": 0 if ids is None else ids.numel(),
            "token_ids": ids,
            "mask": self.keep,
            **told_of_temperature(self.temperature, self.inverse_temperature),
            "return_entropy": "detached" if self.detaches_entropy else self.return_entropy,
            **({} if of is None else _told(of)),
        }

    def explain(self) -> None:
        """Raise ValueError for a number that kernels refuse."""
        if self.divergence is not None:
            self.reduce(self.nothing()).explain()

    def nothing(self) -> Tensor:
        """[R] zeros without memory, as divergences of rows."""
        zero = torch.zeros((), dtype=self.arithmetic(), device=self.first().device)
        return zero.expand(self.shape.numel())

    def reduce(self, rows: Tensor) -> PenaltyCall:
        """The call that reduces [R] divergences."""
        of = self.divergence
        assert of is not None
        return of_rows(rows.view(self.shape), of.layout, of.spec, of.return_stats)

    def compare_tokens(self, logprobs: Tensor, ref_logprobs: Tensor) -> PenaltyCall:
        """The call over log-probs of the taken tokens, for its statistics alone."""
        of = self.divergence
        assert of is not None
        both = logprobs.detach(), ref_logprobs.detach()
        return PenaltyCall(*both, None, *of.layout, of.spec, of.return_stats)


def _told(of: Divergence) -> dict[str, object]:
    return {
        "direction": of.direction,
        "the weights of mask": of.layout.mask,
        "cu_seqlens": of.layout.cu_seqlens,
        **told_of_reduction(of.spec),
    }
