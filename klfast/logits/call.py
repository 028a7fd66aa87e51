"""The call objects over logits: arguments after every check, on their way to a backend.

Shapes: rows are [A, T, V], any strides; R = A * T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.call import AS_IT_IS, Layout, LogProbs, PenaltyCall, Spec, Values, layout_of
from klfast.checks.arguments import (
    check_choice,
    check_cu_seqlens,
    check_device,
    check_normalizer,
    check_number,
    check_reduction,
    check_tensor,
    shape_text,
    shown,
)
from klfast.checks.values import (
    are_tracing,
    check_keeping_mask,
    check_temperatures,
    check_token_ids,
)
from klfast.coefficient import Coefficient, coef_argument
from klfast.dtypes import FLOATS, INTEGERS, MASKS, arithmetic_dtype
from klfast.logits.inplace import check_inplace
from klfast.names import DIRECTIONS, DirectionName, ReductionName
from klfast.reduction import REDUCTIONS

MOST_WORDS_ON_GPU = 2**30
"""The CUDA kernels' places in a row are 32-bit numbers."""
_NO_VOCABULARY = "logits without the vocabulary"
DIVERGENCES = ("kl", "jsd")
"""The divergences of the ops, in the order of ``Divergence`` in ``csrc/logits/call.h``."""
ENTROPIES = ("none", "first", "second")
"""The model whose entropies these ops return, in the order of ``EntropyOf`` in
``csrc/formulas/entropy.h``."""
NO_ID = -(2**63)
"""In place of a token id: there is none. ``kNoId`` in ``csrc/logits/call.h``."""

Temperature = float | Tensor
"""A number; or a tensor of no dimensions, or of the first dimensions of the tokens' shape."""


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
    """[R] or 0-dim, float64, in place of the temperature where that is a tensor or a symbol of
    torch.compile."""
    return_entropy: bool
    inplace_backward: bool
    shape: torch.Size
    """The shape of the log-probs."""
    rows_shape: torch.Size
    """The shape of the entropies."""

    def first(self) -> Tensor:
        """The tensor that has the device of the call."""
        return self.logits

    def check_values(self) -> None:
        """Raise ValueError if a kept token's id is no word, or its temperature not > 0."""
        check_temperatures(self.inverse_temperature, self.keep)
        none = NO_ID if self.token_ids.dim() == 2 else None
        check_token_ids(self.token_ids, self.keep, self.logits.shape[-1], none=none)

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

    def first(self) -> Tensor:
        """The tensor that has the device of the call."""
        return self.logits

    def check_values(self) -> None:
        """Raise ValueError for a value of the reduction that is refused, for a temperature that is
        not > 0, and for ids that are no words.
        """
        self.reduce_zeros().check_values()
        check_temperatures(self.inverse_temperature, self.keep)
        if self.token_ids is not None:
            check_token_ids(self.token_ids, self.keep, self.logits.shape[-1])

    def explain(self) -> None:
        """Raise ValueError for a value that kernels refuse: in tensors on a CPU, and in numbers."""
        if not are_tracing() and self.logits.device.type == "cpu":
            self.check_values()
        self.reduce_zeros().explain()

    def reduce(self, rows: Tensor) -> PenaltyCall:
        """The call that reduces [R] divergences."""
        source = Values(rows.view(self.shape), of_rows=True)
        return PenaltyCall(source, self.layout, self.spec, self.return_stats)

    def reduce_zeros(self) -> PenaltyCall:
        """The call that reduces divergences of 0, for the checks of its arguments."""
        arithmetic = arithmetic_dtype(self.logits, self.ref_logits)
        zero = torch.zeros((), dtype=arithmetic, device=self.logits.device)
        return self.reduce(zero.expand(self.shape.numel()))

    def compare_tokens(self, logprobs: Tensor, ref_logprobs: Tensor) -> PenaltyCall:
        """The call over log-probs of the taken tokens, for its statistics alone."""
        source = LogProbs(logprobs.detach(), ref_logprobs.detach())
        return PenaltyCall(source, self.layout, self.spec, self.return_stats)


def token_logprobs_call(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    ignore_index: int | None,
    temperature: Temperature,
    return_entropy: bool,
    inplace_backward: bool,
) -> TokenLogprobsCall:
    """The arguments of ``token_logprobs`` after every check that needs no data."""
    _check_logits("logits", logits)
    _check_picks(token_ids, logits)
    if mask is not None:
        _check_per_token("mask", mask, logits, MASKS)
        check_keeping_mask(mask, arithmetic_dtype(logits))
    if ignore_index is not None and (
        isinstance(ignore_index, bool) or not isinstance(ignore_index, int)
    ):
        raise TypeError(f"ignore_index must be an integer or None, got {ignore_index!r}")
    if ignore_index is not None and not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must be within int64, got {shown(ignore_index)}")
    number, inverse_temperature = _temperature(temperature, logits)
    if inplace_backward:
        check_inplace(logits)
    ids, exist = _picked(token_ids, logits, ignore_index)
    return TokenLogprobsCall(
        _rows(logits),
        ids,
        _keep(mask, exist),
        number,
        inverse_temperature,
        return_entropy,
        inplace_backward,
        token_ids.shape,
        logits.shape[:-1],
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
    return_entropy: bool,
) -> KLDivergenceCall:
    """The arguments of ``kl_divergence`` after every check that needs no data."""
    check_choice("direction", direction, DIRECTIONS)
    check_reduction(reduction, normalizer)
    _check_logits("logits", logits)
    if logits.dim() not in (2, 3):
        raise ValueError(f"logits must have shape [B, T, V] or [N, V], got {shape_text(logits)}")
    if cu_seqlens is not None:
        if logits.dim() != 2:
            raise ValueError(
                f"logits must be packed, of shape [N, V], with cu_seqlens, got {shape_text(logits)}"
            )
        check_cu_seqlens(cu_seqlens, logits, of="logits")
    _check_logits("ref_logits", ref_logits)
    if ref_logits.shape != logits.shape:
        raise ValueError(
            f"ref_logits must have the shape of logits, {shape_text(logits)}, got "
            f"{shape_text(ref_logits)}"
        )
    check_device("ref_logits", ref_logits, logits, "logits")
    if mask is not None:
        _check_per_token("mask", mask, logits, MASKS)
    if token_ids is not None:
        _check_per_token("token_ids", token_ids, logits, INTEGERS)
    spec = Spec(
        AS_IT_IS,
        REDUCTIONS[reduction],
        coef_argument("coef", coef, logits, of="logits"),
        check_normalizer(normalizer, logits, of="logits"),
    )
    number, inverse_temperature = _temperature(temperature, logits)
    return KLDivergenceCall(
        _rows(logits),
        _rows(ref_logits),
        None if token_ids is None else _flat_ids(token_ids),
        _keep(mask),
        direction,
        _jsd_beta(jsd_beta),
        number,
        inverse_temperature,
        logits.shape[:-1],
        layout_of(mask, cu_seqlens),
        spec,
        return_stats,
        return_entropy,
    )


def _check_logits(argument: str, logits: Tensor) -> None:
    check_tensor(argument, logits, FLOATS)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(
            f"{argument} must have shape [..., V] with at least one word, got {shape_text(logits)}"
        )
    if logits.is_cuda and logits.shape[-1] > MOST_WORDS_ON_GPU:
        raise ValueError(
            f"{argument} must have at most {MOST_WORDS_ON_GPU} words on a GPU, got "
            f"{logits.shape[-1]}"
        )


def _check_per_token(
    argument: str, value: Tensor, logits: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    check_tensor(argument, value, dtypes)
    if value.shape != logits.shape[:-1]:
        raise ValueError(
            f"{argument} must have the shape of {_NO_VOCABULARY}, {list(logits.shape[:-1])}, got "
            f"{shape_text(value)}"
        )
    check_device(argument, value, logits, "logits")


def _jsd_beta(jsd_beta: float) -> float:
    if torch.compiler.is_compiling() and not isinstance(jsd_beta, bool):
        return jsd_beta  # may be symbolic
    number = check_number("jsd_beta", jsd_beta, above=0)
    if number >= 1:
        raise ValueError(f"jsd_beta must be a number between 0 and 1, got {jsd_beta!r}")
    return number


def _check_picks(token_ids: Tensor, logits: Tensor) -> None:
    """Raise unless these are token ids, one a token or K."""
    check_tensor("token_ids", token_ids, INTEGERS)
    tokens = list(logits.shape[:-1])
    if list(token_ids.shape[: len(tokens)]) != tokens or token_ids.dim() > len(tokens) + 1:
        raise ValueError(
            f"token_ids must have the shape of {_NO_VOCABULARY}, {tokens}, or K ids a token, "
            f"{shape_of_k(tokens)}, got {shape_text(token_ids)}"
        )
    check_device("token_ids", token_ids, logits, "logits")


def shape_of_k(tokens: list[int]) -> str:
    """The shape of K numbers a token, as messages show it."""
    return f"[{', '.join(map(str, [*tokens, 'K']))}]"


def _temperature(temperature: Temperature, logits: Tensor) -> tuple[float, Tensor | None]:
    """A checked temperature: a number as (number, None), a tensor or what torch.compile holds as a
    symbol as (1, inverse).
    """
    if isinstance(temperature, Tensor):
        return 1.0, _inverse_of(temperature, logits)
    if torch.compiler.is_compiling() and type(temperature) in (int, float):
        # May be symbolic. As a tensor it stays so, and a new value needs no new compilation.
        one = torch.ones((), dtype=torch.float64, device=logits.device)
        return 1.0, one / temperature
    number = check_number("temperature", temperature, above=0)
    if not torch.finfo(torch.float32).tiny < 1 / number < torch.finfo(torch.float32).max:
        raise ValueError(f"temperature must have a reciprocal within fp32, got {temperature!r}")
    return number, None


def _inverse_of(temperature: Tensor, logits: Tensor) -> Tensor:
    """1 / temperature, float64: 0-dim, or one a row, [R]."""
    check_tensor("temperature", temperature, (*INTEGERS, *FLOATS))
    check_device("temperature", temperature, logits, "logits")
    tokens = logits.shape[:-1]
    fits = [own in (1, of) for own, of in zip(temperature.shape, tokens, strict=False)]
    if temperature.dim() > len(tokens) or not all(fits):
        raise ValueError(
            "temperature must be a number, a 0-dim tensor, or have the first dimensions of "
            f"{_NO_VOCABULARY}, {list(tokens)}, or 1 in their place, got {shape_text(temperature)}"
        )
    inverse = temperature.detach().to(torch.float64).reciprocal()
    if inverse.dim() == 0:
        return inverse
    missing = (1,) * (len(tokens) - inverse.dim())
    return inverse.reshape(*inverse.shape, *missing).expand(tokens).reshape(-1).contiguous()


def _rows(logits: Tensor) -> Tensor:
    """[..., V] as [A, T, V]: a view wherever strides allow one."""
    if logits.dim() > 3:
        return logits.flatten(0, -3)
    return logits.reshape((1,) * (3 - logits.dim()) + tuple(logits.shape))


def _flat_ids(token_ids: Tensor) -> Tensor:
    return token_ids.detach().to(torch.int64).reshape(-1).contiguous()


def _picked(
    token_ids: Tensor, logits: Tensor, ignore_index: int | None
) -> tuple[Tensor, Tensor | None]:
    """The ids, [R] or [R, K], and which rows have one, [R]; None for all."""
    ids = _flat_ids(token_ids)
    has_k = token_ids.dim() == logits.dim()
    exist = None if ignore_index is None else ids != ignore_index
    if not has_k:
        return ids, exist
    # An id as low as NO_ID is a wrong one.
    ids = ids.clamp(min=NO_ID + 1).view(-1, token_ids.shape[-1])
    if exist is None:
        return ids, None
    exist = exist.view_as(ids)
    return torch.where(exist, ids, NO_ID), exist.any(-1)


def _keep(mask: Tensor | None, exist: Tensor | None = None) -> Tensor | None:
    """Which rows are read, [R] bool; None for all."""
    keep = None if mask is None else _as_bool(mask.detach()).reshape(-1).contiguous()
    if keep is None or exist is None:
        return exist if keep is None else keep
    return keep & exist


def _as_bool(mask: Tensor) -> Tensor:
    """Where a mask is not 0: itself if it is boolean. Autograd saves no inference tensor, which is
    copied, and torch.compile knows none.
    """
    is_saved = mask.dtype == torch.bool and (
        torch.compiler.is_compiling() or not mask.is_inference()
    )
    return mask if is_saved else mask != 0
