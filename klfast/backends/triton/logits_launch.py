"""The host side of the Triton kernels over logits: what the ops of ``klfast_triton`` run.

Each ``planned`` function is the op of its name in ``klfast.ops.schemas``. Arguments have been
checked in Python before, values of token ids excepted. Shapes: R rows of V words, R = A * T of
logits [A, T, V].
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from klfast.args.rows import ENTROPIES
from klfast.backends.triton import logits_kernels as kernels
from klfast.backends.triton.divergences import DIVERGENCES as FORMULAS
from klfast.backends.triton.divergences import Divergence
from klfast.backends.triton.launch import ACC, GPU, bits
from klfast.backends.triton.plan import Recording, planned
from klfast.formulas.divergences import DIVERGENCES
from klfast.ops.schemas import SAVED_OF_PAIRS, SAVED_OF_TOKENS, Arguments, empty_outputs, or_empty
from klfast.types.dtypes import arithmetic_dtype, picks_dtype

_TILE = 4096  # entries of one fp32 model that a program holds at a time, limited by the registers
_PICKS = 64  # token ids of a row that are processed together, if there may be several
_WARPS = 8
_STAGES = 3  # stages of the pipeline from memory, where 16 bytes can be fetched without a register
_ROOM = {"maxnreg": 128} if GPU.triton == "nvidia" else {}
"""Registers of kernels that finish rows, for two programs on a multiprocessor; without the cap,
ptxas targets three and spills."""
_ONE_PROGRAM = 65_536
"""A row of at most this size has one program, which also writes the gradient from the L2 cache."""
_SEGMENT = 32_768
"""The most entries of a longer row that a program reads. A few rows then keep a GPU busy too."""


class _Cut(NamedTuple):
    """Logits [A, T, V] as a kernel goes through them; ``segment`` follows from V alone."""

    rows: int
    inner: int
    words: int
    segment: int
    segments: int

    @classmethod
    def of(cls, logits: Tensor) -> _Cut:
        outer, inner, words = logits.shape
        segments = 1 if words <= _ONE_PROGRAM else -(-words // _SEGMENT)
        # Segments have about the same length, so that the programs end together.
        tiles = -(-words // (segments * _TILE))
        segment = words if segments == 1 else tiles * _TILE
        return cls(outer * inner, inner, words, segment, -(-words // segment))

    @property
    def slots(self) -> int:
        """Segments in all."""
        return self.rows * self.segments


def _strides(logits: Tensor) -> tuple[int, int, int]:
    """The strides in elements. The stride of a dimension of size 1 is arbitrary and unused."""
    sizes = zip(logits.stride(), logits.shape, strict=True)
    outer, inner, word = (stride if size > 1 else 0 for stride, size in sizes)
    return outer, inner, word if logits.shape[2] > 1 else 1


def _layout(*logits: Tensor) -> str:
    """The ``LAYOUT`` of kernels that read these, and write gradients of their shape."""
    # 8 entries of 2 bytes are 16 bytes.
    aligned = logits[0].shape[2] % 8 == 0
    for tensor in logits:
        outer, inner, word = _strides(tensor)
        if word != 1:
            return "strided"
        aligned = aligned and outer % 8 == inner % 8 == 0 and tensor.data_ptr() % 16 == 0
    return "aligned" if aligned else "unit"


@functools.cache  # Triton takes 10 us to hash and compare the constants of a new tuple
def form_of(
    dtype: torch.dtype,
    layout: str,
    models: int,
    is_kl: bool = True,
    picks: int = 1,
    has_temperatures: bool = False,
) -> kernels.Form:
    """The constants of kernels: tiles as large as registers have room for."""
    words = _TILE // models
    # The other divergences keep more numbers of an entry in registers.
    if not is_kl:
        words //= 2
    if dtype == torch.float64:
        words //= 4
    # Only aligned rows can be fetched by 16 bytes, without a register.
    stages = _STAGES if layout == "aligned" else 1
    form = (ACC[dtype], words, layout, stages, picks, has_temperatures)
    # Triton 3.6 does not make constants of a tuple's fields.
    return kernels.Form(*map(tl.constexpr, form))


class _LogitsCall:
    """The arguments that all ops have, and the launch of their kernels."""

    def __init__(self, a: Arguments, record: Recording, *logits: Tensor, **of: bool) -> None:
        self.record = record
        self.logits = logits
        self.rows = _Cut.of(logits[0])
        self.dtype = arithmetic_dtype(*logits)
        self.inverse_temperature = (a.inverse_temperature, bits(1 / a.temperature))
        self.strides = [stride for tensor in logits for stride in _strides(tensor)]
        many = len(logits) == 1 and a.token_ids.dim() == 2
        self.picks = a.token_ids.shape[1] if many else 1
        inverse = a.inverse_temperature
        self.options = {
            "FORM": form_of(
                self.dtype,
                _layout(*logits),
                len(logits),
                **of,
                picks=_PICKS if many else 1,
                has_temperatures=inverse is not None and inverse.dim() > 0,
            ),
            "num_warps": _WARPS,
        }

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.record.empty(*shape, dtype=dtype or self.dtype)

    def result(self, wanted: bool = True) -> Tensor:
        """A per-row output, of shape [0] if it is not wanted."""
        return self.empty(self.rows.rows if wanted else 0)

    def launch(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        if programs > 0:
            arguments += tuple(self.strides)
            self.record.launch(kernel, programs, *arguments, **options, **self.options)

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


def _wanted(output: Tensor | None) -> Tensor | None:
    return None if output is None or output.numel() == 0 else output


def _divergence(a: Arguments) -> Divergence:
    return FORMULAS[DIVERGENCES[a.divergence]]


def _exchanges(a: Arguments) -> bool:
    """True if the models change roles: the formulas need the smaller weight on the second model."""
    return _divergence(a).exchanges.value and bool(a.parameter > 0.5)


_OTHER = {"none": "none", "first": "second", "second": "first"}


def _exchanged(a: Arguments, **incoming: Tensor | None) -> Arguments:
    """The same call where the models change roles."""
    other = {
        "logits": a.ref_logits,
        "ref_logits": a.logits,
        "parameter": 1 - a.parameter,
        "entropy_of": ENTROPIES.index(_OTHER[ENTROPIES[a.entropy_of]]),
        "want_grad": a.want_grad_ref,
        "want_grad_ref": a.want_grad,
    }
    return Arguments(**(vars(a) | other | incoming))


@planned
def token_logprobs_fwd(a: Arguments, record: Recording) -> tuple[Tensor, Tensor, Tensor]:
    call = _LogitsCall(a, record, a.logits)
    rows = call.rows
    dtype = picks_dtype(a.token_ids, call.dtype)
    logprobs, entropy = call.empty(a.token_ids.numel(), dtype=dtype), call.result(a.want_entropy)
    saved = call.empty(SAVED_OF_TOKENS, rows.rows, dtype=torch.float64)
    call.launch_forward(
        kernels.token_logprobs_kernel,
        (a.logits, a.token_ids, a.keep, logprobs, _wanted(entropy), saved),
        (*call.inverse_temperature, call.picks, *rows, rows.slots),
        sums=3,
    )
    return logprobs, entropy, saved


@planned
def token_logprobs_bwd(a: Arguments, record: Recording) -> Tensor:
    grad = record.empty(*a.logits.shape, dtype=a.logits.dtype)
    _token_logprobs_backward(grad, a, record)
    return grad


@planned
def token_logprobs_bwd_(a: Arguments, record: Recording) -> None:
    _token_logprobs_backward(a.logits, a, record)


def _token_logprobs_backward(grad: Tensor, a: Arguments, record: Recording) -> None:
    call = _LogitsCall(a, record, a.logits)
    call.launch(
        kernels.token_logprobs_backward_kernel,
        call.rows.slots,
        a.logits,
        a.token_ids,
        a.keep,
        a.saved,
        record.contiguous(a.logprobs),
        None if a.grad_entropy is None else a.entropy,
        record.contiguous(a.grad_logprobs),
        record.contiguous(a.grad_entropy),
        record.contiguous(a.grad_lse),
        grad,
        *call.inverse_temperature,
        call.picks,
        *call.rows,
    )


Gradients = tuple[Tensor | None, Tensor | None]
"""The memory of both models' gradients; None where none is wanted."""


@planned
def kl_divergence_fwd(a: Arguments, record: Recording) -> tuple[Tensor, ...]:
    grads: Gradients = record.outputs(empty_outputs("kl_divergence_bwd", a))
    rows, logprobs, ref_logprobs, saved, entropy = _kl_divergence_forward(a, record, grads)
    return rows, logprobs, ref_logprobs, saved, *record.outputs(or_empty(rows, *grads)), entropy


@planned
def kl_divergence_fwd_(a: Arguments, record: Recording) -> tuple[Tensor, Tensor]:
    of_rows, grads = _of_rows_alone(a), _gradients_in_place(a)
    rows, _, _, saved, _ = _kl_divergence_forward(of_rows, record, grads)
    return rows, saved


@planned
def kl_divergence_bwd(a: Arguments, record: Recording) -> Gradients:
    grads: Gradients = record.outputs(empty_outputs("kl_divergence_bwd", a))
    _kl_divergence_backward(a, record, grads)
    return grads


@planned
def kl_divergence_bwd_(a: Arguments, record: Recording) -> None:
    _kl_divergence_backward(_of_rows_alone(a), record, _gradients_in_place(a))


def _gradients_in_place(a: Arguments) -> Gradients:
    return a.logits if a.want_grad else None, a.ref_logits if a.want_grad_ref else None


def _of_rows_alone(a: Arguments) -> Arguments:
    """The call, with the arguments added that a call for divergences alone does not have."""
    nothing = ("token_ids", "entropy", "grad_logprobs", "grad_ref_logprobs", "grad_entropy")
    own = {"entropy_of": ENTROPIES.index("none"), **dict.fromkeys(nothing)}
    return Arguments(**(vars(a) | own))


def _kl_divergence_forward(
    a: Arguments, record: Recording, grads: Gradients
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, log-probs under both models, saved values and entropies; writes the gradients."""
    if _exchanges(a):
        result, ref_logprobs, logprobs, saved, entropy = _kl_divergence_forward(
            _exchanged(a), record, grads[::-1]
        )
        return result, logprobs, ref_logprobs, saved, entropy
    call = _LogitsCall(a, record, a.logits, a.ref_logits, is_kl=_divergence(a).is_kl.value)
    rows = call.rows
    has_tokens, has_entropies = a.token_ids is not None, ENTROPIES[a.entropy_of] != "none"
    result, logprobs, ref_logprobs, entropy = (
        call.result(wanted) for wanted in (True, has_tokens, has_tokens, has_entropies)
    )
    saved = call.empty(SAVED_OF_PAIRS, rows.rows, dtype=torch.float64)
    # The results of a row in segments are known when its programs have ended. Then another launch
    # writes its gradients.
    written = tuple(map(_wanted, grads)) if rows.segments == 1 else (None, None)
    call.launch_forward(
        kernels.kl_divergence_kernel,
        (
            a.logits,
            a.ref_logits,
            a.token_ids,
            a.keep,
            record.contiguous(a.row_weights),
            result,
            _wanted(logprobs),
            _wanted(ref_logprobs),
            _wanted(entropy),
            saved,
            *written,
        ),
        (*call.inverse_temperature, bits(a.parameter), *rows, rows.slots),
        sums=7 if has_entropies else 6,
        DIVERGENCE=_divergence(a),
        ENTROPY=ENTROPIES[a.entropy_of],
    )
    if rows.segments > 1 and a.row_weights is not None:
        known = {"rows": result, "saved": saved, "grad_rows": a.row_weights}
        nothing = dict.fromkeys(("grad_lse", "grad_ref_lse"))
        alone = _of_rows_alone(Arguments(**(vars(a) | known | nothing)))
        _launch_gradients(call, grads, alone)
    return result, logprobs, ref_logprobs, saved, entropy


def _kl_divergence_backward(a: Arguments, record: Recording, grads: Gradients) -> None:
    if _exchanges(a):
        other = {
            "grad_logprobs": a.grad_ref_logprobs,
            "grad_ref_logprobs": a.grad_logprobs,
            "grad_lse": a.grad_ref_lse,
            "grad_ref_lse": a.grad_lse,
        }
        _kl_divergence_backward(_exchanged(a, **other), record, grads[::-1])
        return
    call = _LogitsCall(a, record, a.logits, a.ref_logits, is_kl=_divergence(a).is_kl.value)
    _launch_gradients(call, grads, a)


_INCOMING = (
    *("grad_rows", "grad_logprobs", "grad_ref_logprobs", "grad_entropy"),
    *("grad_lse", "grad_ref_lse"),
)


def _launch_gradients(call: _LogitsCall, grads: Gradients, a: Arguments) -> None:
    incoming = [getattr(a, name) for name in _INCOMING]
    if any(_wanted(grad) is not None for grad in grads):
        call.launch(
            kernels.kl_divergence_backward_kernel,
            call.rows.slots,
            *call.logits,
            a.token_ids,
            a.keep,
            a.rows,
            a.saved,
            None if a.grad_entropy is None else a.entropy,
            *map(call.record.contiguous, incoming),
            *map(_wanted, grads),
            *call.inverse_temperature,
            bits(a.parameter),
            *call.rows,
            DIVERGENCE=_divergence(a),
            ENTROPY="none" if a.grad_entropy is None else ENTROPIES[a.entropy_of],
        )
