"""The call objects over logits: arguments after every check, on their way to a backend.

Shapes: rows are [A, T, V], any strides; R = A * T.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from klfast.call import Layout, PenaltyCall, Spec, layout_of, of_rows
from klfast.checks.arguments import (
    check_choice,
    check_device,
    check_integer,
    check_reduction,
    shape_text,
)
from klfast.checks.values import (
    are_tracing,
    check_keeping_mask,
    check_temperatures,
    check_token_ids,
)
from klfast.coefficient import Coefficient
from klfast.dtypes import INTEGERS, MASKS, arithmetic_dtype
from klfast.logits.arguments import (
    NO_ID,
    Temperature,
    check_logits,
    check_per_token,
    check_picks,
    check_sequences,
    flat_ids,
    jsd_beta_of,
    kept,
    picked,
    rows_of,
    spec_of,
    temperature_of,
    wants_entropy,
)
from klfast.logits.inplace import check_inplace
from klfast.names import DIRECTIONS, DirectionName, ReductionName, ReturnEntropy

if TYPE_CHECKING:
    from klfast.logits.shards import Shards

OF_ONE_MODEL = ("logits", "token_ids", "mask")
OF_TWO_MODELS = ("logits or ref_logits", "logits or ref_logits", *OF_ONE_MODEL[1:])
"""The names of a call's tensors in the public functions. The direction orders two models."""

DIVERGENCES = ("kl", "jsd")
"""The divergences of the ops, in the order of ``Divergence`` in ``csrc/logits/call.h``."""
ENTROPIES = ("none", "first", "second")
"""The model whose entropies these ops return, in the order of ``EntropyOf`` in
``csrc/formulas/entropy.h``."""


class TokenLogprobsCall(NamedTuple):
    """Arguments of ``token_logprobs`` after every check."""

    logits: Tensor
    """[A, T, V]; the only one with a graph."""
    token_ids: Tensor
    """[R] or [R, K], int64, contiguous; in [R, K] ``NO_ID`` for an entry that does not exist."""
    keep: Tensor | None
    """[R], bool, contiguous: which rows are read."""
    temperature: float
    inverse_temperature: Tensor | None
    """[R] or 0-dim, in ``wide_dtype``, in place of the temperature where that is a tensor or a
    symbol of torch.compile; 1 in rows that are not read."""
    return_entropy: bool
    inplace_backward: bool
    shape: torch.Size
    """The shape of the log-probs."""
    rows_shape: torch.Size
    """The shape of the entropies."""
    ids_argument: str = "token_ids"
    """The name that the ids have in the public function."""
    shards: Shards | None = None
    """The vocabulary's, where these are the logits of one of them. Ids are those of all words."""

    def first(self) -> Tensor:
        """The tensor that has the device of the call."""
        return self.logits

    def check_values(self) -> None:
        """Raise ValueError if a kept token's id is no word, or its temperature not > 0."""
        check_temperatures(self.inverse_temperature)
        none = NO_ID if self.token_ids.dim() == 2 else None
        check_token_ids(
            self.token_ids,
            self.keep,
            self.words(),
            none=none,
            argument=self.ids_argument,
            may_be_shard=self.shards is None and self.ids_argument == "token_ids",
        )

    def words(self) -> int:
        """The number of words, of all shards where these are known."""
        return _words(self)

    def told(self) -> dict[str, object]:
        """What must be the same on all ranks of shards (``klfast.logits.agreement``)."""
        return {
            **_told("token_logprobs", self.logits, self.rows_shape),
            "the number of token_ids": self.token_ids.numel(),
            "token_ids": self.token_ids,
            "mask, with ignore_index,": self.keep,
            **told_of_temperature(self.temperature, self.inverse_temperature),
            "return_entropy": self.return_entropy,
        }

    def explain(self) -> None:
        """Raise ValueError for a value that kernels refuse on a CPU."""
        if not are_tracing() and self.logits.device.type == "cpu":
            self.check_values()


class KLDivergenceCall(NamedTuple):
    """Arguments of ``kl_divergence`` after every check."""

    logits: Tensor
    """[A, T, V], like ``ref_logits``; both may carry a graph."""
    ref_logits: Tensor
    token_ids: Tensor | None
    """[R], int64, contiguous."""
    keep: Tensor | None
    """[R], bool, contiguous: which rows are read."""
    direction: DirectionName
    jsd_beta: float
    temperature: float
    inverse_temperature: Tensor | None
    """As in ``TokenLogprobsCall``."""
    shape: torch.Size
    """The shape of results per token."""
    layout: Layout
    spec: Spec
    """How the rows' divergences are reduced; its estimator is k1 of values."""
    return_stats: bool
    return_entropy: bool
    """Whether the policy's entropies are returned."""
    shards: Shards | None = None
    """As in ``TokenLogprobsCall``."""

    def first(self) -> Tensor:
        """The tensor that has the device of the call."""
        return self.logits

    def check_values(self) -> None:
        """Raise ValueError for a value of the reduction that is refused, for a temperature that is
        not > 0, and for ids that are no words.
        """
        self.reduce_zeros().check_values()
        check_temperatures(self.inverse_temperature)
        if self.token_ids is not None:
            whole = self.shards is None
            check_token_ids(self.token_ids, self.keep, self.words(), may_be_shard=whole)

    def words(self) -> int:
        """As of ``TokenLogprobsCall``."""
        return _words(self)

    def told(self) -> dict[str, object]:
        """As of ``TokenLogprobsCall``."""
        return {
            **_told("kl_divergence", self.logits, self.shape),
            "the dtype of ref_logits": self.ref_logits.dtype,
            "direction": self.direction,
            "token_ids": self.token_ids,
            "mask": self.layout.mask,
            "cu_seqlens": self.layout.cu_seqlens,
            **told_of_temperature(self.temperature, self.inverse_temperature),
            **told_of_reduction(self.spec),
            "return_entropy": self.return_entropy,
        }

    def explain(self) -> None:
        """Raise ValueError for a value that kernels refuse: in tensors on a CPU, and in numbers."""
        if not are_tracing() and self.logits.device.type == "cpu":
            self.check_values()
        self.reduce_zeros().explain()

    def reduce(self, rows: Tensor) -> PenaltyCall:
        """The call that reduces [R] divergences."""
        return of_rows(rows.view(self.shape), self.layout, self.spec, self.return_stats)

    def reduce_zeros(self) -> PenaltyCall:
        """The call that reduces divergences of 0, for the checks of its arguments."""
        arithmetic = arithmetic_dtype(self.logits, self.ref_logits)
        zero = torch.zeros((), dtype=arithmetic, device=self.logits.device)
        return self.reduce(zero.expand(self.shape.numel()))

    def compare_tokens(self, logprobs: Tensor, ref_logprobs: Tensor) -> PenaltyCall:
        """The call over log-probs of the taken tokens, for its statistics alone."""
        both = logprobs.detach(), ref_logprobs.detach()
        return PenaltyCall(*both, None, *self.layout, self.spec, self.return_stats)


def _words(call: TokenLogprobsCall | KLDivergenceCall) -> int:
    if call.shards is None:
        return call.logits.shape[-1]
    assert call.shards.words is not None  # values are checked where it is known
    return call.shards.words


def _told(function: str, logits: Tensor, tokens: torch.Size) -> dict[str, object]:
    return {
        "the function": function,
        "the number of tokens": tokens.numel(),
        "the shape of the tokens": tuple(tokens),
        "the dtype of logits": logits.dtype,
        "the kind of device": logits.device.type,
    }


def told_of_temperature(temperature: float, inverse: Tensor | None) -> dict[str, object]:
    """The temperature that must be the same on all ranks; of a tensor its inverse."""
    return {"temperature": temperature if inverse is None else inverse}


def told_of_reduction(spec: Spec) -> dict[str, object]:
    """The options of a reduction that must be the same on all ranks."""
    return {"reduction": spec.reduction, "coef": spec.coef, "normalizer": spec.normalizer}


def token_logprobs_call(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    ignore_index: int | None,
    temperature: Temperature,
    return_entropy: ReturnEntropy,
    inplace_backward: bool,
    of_shard: bool = False,
) -> TokenLogprobsCall:
    """The arguments of ``token_logprobs`` after every check that needs no data.

    ``of_shard``: whether the logits are those of a shard of the vocabulary, which may have no word.
    """
    check_logits("logits", logits, least_words=0 if of_shard else 1)
    check_picks(token_ids, logits)
    if mask is not None:
        check_per_token("mask", mask, logits, MASKS)
        check_keeping_mask(mask, arithmetic_dtype(logits))
    if ignore_index is not None:
        ignore_index = check_integer("ignore_index", ignore_index, "an integer or None")
    ids, exist = picked(token_ids, logits, ignore_index)
    keep = kept(mask, exist)
    number, inverse_temperature = temperature_of(temperature, logits, keep)
    if inplace_backward:
        check_inplace(logits)
    return TokenLogprobsCall(
        rows_of(logits),
        ids,
        keep,
        number,
        inverse_temperature,
        wants_entropy(return_entropy),
        inplace_backward,
        token_ids.shape,
        logits.shape[:-1],
    )


def refuse_jsd(direction: str) -> None:
    """Raise ValueError for a divergence that is no sum over shards of a vocabulary."""
    if direction == "jsd":
        raise ValueError(
            "direction must be 'reverse' or 'forward' with group, got 'jsd': the mixture has "
            "another weight in every shard, so that its divergence is no sum over shards"
        )


def kl_divergence_call(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    direction: DirectionName,
    jsd_beta: float,
    temperature: Temperature,
    reduction: ReductionName,
    cu_seqlens: Tensor | None,
    normalizer: float | Tensor | None,
    coef: Coefficient,
    token_ids: Tensor | None,
    return_stats: bool,
    return_entropy: ReturnEntropy,
    of_shard: bool = False,
) -> KLDivergenceCall:
    """The arguments of ``kl_divergence`` after every check that needs no data.

    ``of_shard``: whether the logits are those of a shard of the vocabulary, which may have no word.
    """
    check_choice("direction", direction, DIRECTIONS)
    if of_shard:
        refuse_jsd(direction)
    check_reduction(reduction, normalizer)
    check_logits("logits", logits, least_words=0 if of_shard else 1)
    check_sequences(logits, cu_seqlens)
    check_logits("ref_logits", ref_logits, least_words=0 if of_shard else 1)
    if ref_logits.shape != logits.shape:
        least, remedy = min(logits.shape[-1], ref_logits.shape[-1]), ""
        if ref_logits.shape[:-1] == logits.shape[:-1] and not of_shard:
            remedy = f": slice both to the common vocabulary, logits[..., :{least}]"
        raise ValueError(
            f"ref_logits must have the shape of logits, {shape_text(logits)}, got "
            f"{shape_text(ref_logits)}{remedy}"
        )
    check_device("ref_logits", ref_logits, logits, "logits")
    if mask is not None:
        check_per_token("mask", mask, logits, MASKS)
    if token_ids is not None:
        check_per_token("token_ids", token_ids, logits, INTEGERS)
    spec = spec_of(logits, reduction, normalizer, coef)
    keep = kept(mask)
    number, inverse_temperature = temperature_of(temperature, logits, keep)
    return KLDivergenceCall(
        rows_of(logits),
        rows_of(ref_logits),
        None if token_ids is None else flat_ids(token_ids),
        keep,
        direction,
        jsd_beta_of(jsd_beta),
        number,
        inverse_temperature,
        logits.shape[:-1],
        layout_of(mask, cu_seqlens),
        spec,
        return_stats,
        wants_entropy(return_entropy),
    )
