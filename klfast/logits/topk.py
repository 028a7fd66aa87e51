"""The call of ``topk_kl_divergence``: its arguments after every check.

Shapes: R tokens, K entries a token, [R, K].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.call import Layout, PenaltyCall, Spec, layout_of, of_rows
from klfast.checks.arguments import check_choice, check_reduction, shape_text
from klfast.checks.values import check_distinct
from klfast.coefficient import Coefficient
from klfast.dtypes import FLOATS, INTEGERS, MASKS, arithmetic_dtype, wide
from klfast.logits.arguments import (
    NO_ID,
    Temperature,
    check_entries,
    check_logits,
    check_per_token,
    check_sequences,
    ids_of_k,
    jsd_beta_of,
    kept,
    rows_of,
    spec_of,
    temperature_of,
)
from klfast.logits.call import TokenLogprobsCall
from klfast.logits.entries import divergence_of_entries, without_missing
from klfast.names import DIRECTIONS, TAILS, DirectionName, ReductionName, TailName


class TopKCall(NamedTuple):
    """Arguments of ``topk_kl_divergence`` after every check that needs no data."""

    picks: TokenLogprobsCall
    """Of the student's log-probs at the entries' words, [R, K]."""
    ref_logprobs: Tensor
    """[R, K], in ``wide_dtype``, with its graph."""
    direction: DirectionName
    tail: TailName
    jsd_beta: float
    layout: Layout
    """Its mask leaves out the tokens that have no entry."""
    spec: Spec
    shape: torch.Size
    """The shape of results per token."""
    return_stats: bool

    def check_values(self) -> None:
        """Raise ValueError for a word that a kept token has twice."""
        check_distinct("ref_token_ids", self.picks.token_ids, self.picks.keep, none=NO_ID)

    def rows(self, logprobs: Tensor) -> Tensor:
        """[R] divergences, of the student's log-probs [R, K]."""
        exist = self.picks.token_ids != NO_ID
        if self.picks.keep is not None:
            exist = exist & self.picks.keep[:, None]
        student = wide(logprobs)
        teacher = self.ref_logprobs
        if self.tail == "renormalize":  # a server's tail has a temperature that is not known
            teacher = _divided(teacher, self.picks)
        rows = divergence_of_entries(
            teacher, student, exist, self.direction, self.tail, self.jsd_beta
        )
        return rows.to(arithmetic_dtype(self.picks.logits, logprobs))

    def reduce(self, rows: Tensor) -> PenaltyCall:
        """The call that reduces [R] divergences."""
        return of_rows(rows.view(self.shape), self.layout, self.spec, self.return_stats)


def topk_call(
    logits: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    direction: DirectionName,
    tail: TailName,
    jsd_beta: float,
    temperature: Temperature,
    reduction: ReductionName,
    cu_seqlens: Tensor | None,
    normalizer: float | Tensor | None,
    coef: Coefficient,
    return_stats: bool,
) -> TopKCall:
    """The arguments of ``topk_kl_divergence`` after every check that needs no data."""
    check_choice("direction", direction, DIRECTIONS)
    check_choice("tail", tail, TAILS)
    check_reduction(reduction, normalizer)
    check_logits("logits", logits)
    check_sequences(logits, cu_seqlens)
    check_entries("ref_token_ids", ref_token_ids, logits, INTEGERS)
    check_entries("ref_logprobs", ref_logprobs, logits, FLOATS)
    if ref_logprobs.shape != ref_token_ids.shape:
        raise ValueError(
            f"ref_logprobs must have the shape of ref_token_ids, {shape_text(ref_token_ids)}, got "
            f"{shape_text(ref_logprobs)}"
        )
    if tail == "renormalize" and ref_token_ids.shape[-1] == 1:
        raise ValueError(
            "tail must not be 'renormalize' where a token has one entry: each model's only "
            f"probability is then 1, and the divergence 0, got {shape_text(ref_token_ids)}"
        )
    if mask is not None:
        check_per_token("mask", mask, logits, MASKS)
    exist = ref_logprobs.detach() != -torch.inf
    ids = ids_of_k(ref_token_ids, exist)
    keep = kept(mask, exist.reshape(ids.shape).any(-1))
    number, inverse_temperature = temperature_of(temperature, logits, keep)
    picks = TokenLogprobsCall(
        rows_of(logits),
        ids,
        keep,
        number,
        inverse_temperature,
        return_entropy=False,
        inplace_backward=False,
        shape=ids.shape,
        rows_shape=logits.shape[:-1],
        ids_argument="ref_token_ids",
    )
    return TopKCall(
        picks,
        wide(ref_logprobs).reshape(ids.shape),
        direction,
        tail,
        jsd_beta_of(jsd_beta),
        layout_of(without_missing(mask, exist), cu_seqlens),
        spec_of(logits, reduction, normalizer, coef),
        logits.shape[:-1],
        return_stats,
    )


def _divided(logprobs: Tensor, picks: TokenLogprobsCall) -> Tensor:
    """Log-probs [R, K] over the temperature."""
    inverse = picks.inverse_temperature
    if inverse is None:
        return logprobs / picks.temperature
    return logprobs * (inverse if inverse.dim() == 0 else inverse[:, None])
