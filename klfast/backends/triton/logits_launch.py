"""The host side of the Triton kernels over logits: what the ops of ``klfast_triton`` run.

Arguments have been checked in Python before, values of token ids excepted. Shapes: R rows of V
words, R = A * T of logits [A, T, V].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.backends.triton import logits_kernels as kernels
from klfast.backends.triton.launch import ACC, DEFINED, bits, device_of
from klfast.dtypes import arithmetic_dtype
from klfast.logits.call import DIVERGENCES, ENTROPIES

_TILE = 4096
"""Words of one fp32 model that a program holds at a time: what registers have room for."""
_PICKS = 64
"""Token ids of a row that are looked at together, where there may be several."""
_WARPS = 8
_STAGES = 3
"""Stages of the pipeline from memory, where 16 bytes can be fetched without a register."""
_ROOM = {} if torch.version.hip else {"maxnreg": 128}
"""Registers of kernels that finish rows, for two programs on a multiprocessor; without the cap,
ptxas targets three and spills."""
_ONE_PROGRAM = 65_536
"""A row of no more words has one program, which also writes the gradient, out of the L2 cache."""
_SEGMENT = 32_768
"""Words, at most, that a program reads of a longer row: a few rows then keep a GPU busy too."""


class _Rows(NamedTuple):
    """Logits [A, T, V] as a kernel goes through them; ``segment`` follows from V alone."""

    rows: int
    inner: int
    words: int
    segment: int
    segments: int

    @classmethod
    def of(cls, logits: Tensor) -> _Rows:
        outer, inner, words = logits.shape
        segments = 1 if words <= _ONE_PROGRAM else -(-words // _SEGMENT)
        # Of about one length, so that the programs end together.
        tiles = -(-words // (segments * _TILE))
        segment = words if segments == 1 else tiles * _TILE
        return cls(outer * inner, inner, words, segment, -(-words // segment))

    @property
    def slots(self) -> int:
        """Segments in all."""
        return self.rows * self.segments


def _strides(logits: Tensor) -> tuple[int, int, int]:
    """In elements; those of dimensions of one may be anything, and mean nothing."""
    sizes = zip(logits.stride(), logits.shape, strict=True)
    outer, inner, word = (stride if size > 1 else 0 for stride, size in sizes)
    return outer, inner, word if logits.shape[2] > 1 else 1


def _layout(*logits: Tensor) -> str:
    """The ``LAYOUT`` of kernels that read these, and write gradients of their shape."""
    aligned = logits[0].shape[2] % 8 == 0
    for tensor in logits:
        outer, inner, word = _strides(tensor)
        if word != 1:
            return "strided"
        aligned = aligned and outer % 8 == inner % 8 == 0 and tensor.data_ptr() % 16 == 0
    return "aligned" if aligned else "unit"


def form_of(dtype: torch.dtype, layout: str, models: int, divergence: str = "kl") -> kernels.Form:
    """The constants of kernels: tiles as large as registers have room for."""
    words = _TILE // models
    if divergence == "jsd":
        words //= 2
    if dtype == torch.float64:
        words //= 4
    return kernels.Form(ACC[dtype], words, layout, _STAGES if layout == "aligned" else 1)


class _Call:
    """The arguments that all ops have, and the launch of their kernels."""

    def __init__(
        self,
        temperature: float,
        inverse_temperature: Tensor | None,
        *logits: Tensor,
        divergence: str = "kl",
        token_ids: Tensor | None = None,
    ) -> None:
        self.logits = logits
        self.rows = _Rows.of(logits[0])
        self.dtype = arithmetic_dtype(*logits)
        self.inverse_temperature = (inverse_temperature, bits(1 / temperature))
        self.strides = [stride for tensor in logits for stride in _strides(tensor)]
        self.picks = token_ids.shape[1] if token_ids is not None and token_ids.dim() == 2 else 1
        form = form_of(self.dtype, _layout(*logits), len(logits), divergence)
        self.options = {
            "FORM": form._replace(
                picks=1 if token_ids is None or token_ids.dim() == 1 else _PICKS,
                has_temperatures=inverse_temperature is not None and inverse_temperature.dim() > 0,
            ),
            "num_warps": _WARPS,
            **DEFINED,
        }

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.logits[0].device)

    def result(self, wanted: bool = True) -> Tensor:
        """Per row; of shape [0] where it is not wanted."""
        return self.empty(self.rows.rows if wanted else 0)

    def gradient(self, of: Tensor, wanted: bool = True) -> Tensor:
        return self.empty(*(of.shape if wanted else (0,)), dtype=of.dtype)

    def launch(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        if programs > 0:
            with device_of(self.logits[0]):
                kernel[(programs,)](*arguments, *self.strides, **options, **self.options)

    def launch_forward(
        self, kernel: Any, tensors: Any, numbers: Any, sums: int, **options: Any
    ) -> None:
        """A program for every row, or one for every segment and then one for every row.

        ``sums`` is how many a segment has; partial sums are between the tensors and the numbers.
        """
        rows, partials, stage = self.rows, None, "row"
        if rows.segments > 1:
            partials, stage = self.empty(sums, rows.slots, dtype=torch.float64), "combine"
            arguments = (*tensors, partials, *numbers)
            self.launch(kernel, rows.slots, *arguments, STAGE="segment", **options)
        arguments = (*tensors, partials, *numbers)
        self.launch(kernel, rows.rows, *arguments, STAGE=stage, **_ROOM, **options)


def _wanted(output: Tensor) -> Tensor | None:
    """As kernels take it."""
    return output if output.numel() > 0 else None


def _exchanges(divergence: int, jsd_beta: float) -> bool:
    """Whether the models change roles: the formulas want the second's weight to be the smaller."""
    return DIVERGENCES[divergence] == "jsd" and jsd_beta > 0.5


def _exchanged(entropy_of: int) -> int:
    """The entropies of the same model where the models change roles."""
    return ENTROPIES.index(_OTHER[ENTROPIES[entropy_of]])


_OTHER = {"none": "none", "first": "second", "second": "first"}


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def token_logprobs_fwd(
    logits: Tensor,
    token_ids: Tensor,
    keep: Tensor | None,
    temperature: float,
    want_entropy: bool,
    inverse_temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op of ``klfast.ops.table``."""
    call = _Call(temperature, inverse_temperature, logits, token_ids=token_ids)
    rows = call.rows
    logprobs, entropy = call.empty(token_ids.numel()), call.result(want_entropy)
    saved = call.empty(2, rows.rows, dtype=torch.float64)
    call.launch_forward(
        kernels.token_logprobs_kernel,
        (logits, token_ids, keep, logprobs, _wanted(entropy), saved),
        (*call.inverse_temperature, call.picks, *rows, rows.slots),
        sums=3,
    )
    return logprobs, entropy, saved


def token_logprobs_bwd(logits: Tensor, *others: Any) -> Tensor:
    """The op of ``klfast.ops.table``."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _token_logprobs_backward(grad, logits, *others)
    return grad


def token_logprobs_bwd_(logits: Tensor, *others: Any) -> None:
    """The op of ``klfast.ops.table``."""
    _token_logprobs_backward(logits, logits, *others)


def _token_logprobs_backward(
    grad: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    keep: Tensor | None,
    saved: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    temperature: float,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    inverse_temperature: Tensor | None = None,
) -> None:
    call = _Call(temperature, inverse_temperature, logits, token_ids=token_ids)
    rows = call.rows
    call.launch(
        kernels.token_logprobs_backward_kernel,
        rows.slots,
        logits,
        token_ids,
        keep,
        saved,
        logprobs.contiguous(),
        None if grad_entropy is None else entropy,
        _contiguous(grad_logprobs),
        _contiguous(grad_entropy),
        grad,
        *call.inverse_temperature,
        call.picks,
        *rows,
    )


def kl_divergence_fwd(
    logits: Tensor,
    ref_logits: Tensor,
    token_ids: Tensor | None,
    keep: Tensor | None,
    divergence: int,
    jsd_beta: float,
    temperature: float,
    entropy_of: int,
    row_weights: Tensor | None,
    want_grad: bool,
    want_grad_ref: bool,
    inverse_temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op of ``klfast.ops.table``."""
    if _exchanges(divergence, jsd_beta):
        options = (token_ids, keep, divergence, 1 - jsd_beta, temperature, _exchanged(entropy_of))
        wants = (row_weights, want_grad_ref, want_grad)
        result, ref_logprobs, logprobs, saved, grad_ref, grad, entropy = kl_divergence_fwd(
            ref_logits, logits, *options, *wants, inverse_temperature
        )
        return result, logprobs, ref_logprobs, saved, grad, grad_ref, entropy
    call = _Call(
        temperature, inverse_temperature, logits, ref_logits, divergence=DIVERGENCES[divergence]
    )
    rows = call.rows
    has_tokens, has_entropies = token_ids is not None, ENTROPIES[entropy_of] != "none"
    result, logprobs, ref_logprobs, entropy = (
        call.result(wanted) for wanted in (True, has_tokens, has_tokens, has_entropies)
    )
    saved = call.empty(5, rows.rows, dtype=torch.float64)
    grads = call.gradient(logits, want_grad), call.gradient(ref_logits, want_grad_ref)
    written = tuple(map(_wanted, grads)) if rows.segments == 1 else (None, None)
    call.launch_forward(
        kernels.kl_divergence_kernel,
        (
            logits,
            ref_logits,
            token_ids,
            keep,
            _contiguous(row_weights),
            result,
            _wanted(logprobs),
            _wanted(ref_logprobs),
            _wanted(entropy),
            saved,
            *written,
        ),
        (*call.inverse_temperature, bits(jsd_beta), *rows, rows.slots),
        sums=7 if has_entropies else 6,
        DIVERGENCE=DIVERGENCES[divergence],
        ENTROPY=ENTROPIES[entropy_of],
    )
    if rows.segments > 1 and row_weights is not None:
        no_entropy = ENTROPIES.index("none")
        numbers = (divergence, jsd_beta, no_entropy, result, saved, None)
        incoming = (row_weights, None, None, None)
        _kl_divergence_backward(call, grads, None, keep, *numbers, *incoming)
    return result, logprobs, ref_logprobs, saved, *grads, entropy


def kl_divergence_bwd(
    logits: Tensor,
    ref_logits: Tensor,
    token_ids: Tensor | None,
    keep: Tensor | None,
    divergence: int,
    jsd_beta: float,
    temperature: float,
    entropy_of: int,
    rows: Tensor,
    saved: Tensor,
    entropy: Tensor | None,
    grad_rows: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_ref_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    want_grad: bool,
    want_grad_ref: bool,
    inverse_temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The op of ``klfast.ops.table``."""
    if _exchanges(divergence, jsd_beta):
        grad_ref, grad = kl_divergence_bwd(
            ref_logits,
            logits,
            token_ids,
            keep,
            divergence,
            1 - jsd_beta,
            temperature,
            _exchanged(entropy_of),
            rows,
            saved,
            entropy,
            grad_rows,
            grad_ref_logprobs,
            grad_logprobs,
            grad_entropy,
            want_grad_ref,
            want_grad,
            inverse_temperature,
        )
        return grad, grad_ref
    call = _Call(
        temperature, inverse_temperature, logits, ref_logits, divergence=DIVERGENCES[divergence]
    )
    grads = call.gradient(logits, want_grad), call.gradient(ref_logits, want_grad_ref)
    if grad_entropy is None:
        entropy_of, entropy = ENTROPIES.index("none"), None
    options = (divergence, jsd_beta, entropy_of, rows, saved, entropy)
    incoming = (grad_rows, grad_logprobs, grad_ref_logprobs, grad_entropy)
    _kl_divergence_backward(call, grads, token_ids, keep, *options, *incoming)
    return grads


def _kl_divergence_backward(
    call: _Call,
    grads: tuple[Tensor, Tensor],
    token_ids: Tensor | None,
    keep: Tensor | None,
    divergence: int,
    jsd_beta: float,
    entropy_of: int,
    values: Tensor,
    saved: Tensor,
    entropy: Tensor | None,
    *incoming: Tensor | None,
) -> None:
    rows = call.rows
    if any(grad.numel() > 0 for grad in grads):
        call.launch(
            kernels.kl_divergence_backward_kernel,
            rows.slots,
            *call.logits,
            token_ids,
            keep,
            values,
            saved,
            entropy,
            *map(_contiguous, incoming),
            *map(_wanted, grads),
            *call.inverse_temperature,
            bits(jsd_beta),
            *rows,
            DIVERGENCE=DIVERGENCES[divergence],
            ENTROPY=ENTROPIES[entropy_of],
        )
