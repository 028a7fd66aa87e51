"""The timed candidates: klfast, code without klfast, and ``torch.compile`` of that code.

Nothing is timed before its result is right: outputs against klfast's reference in float64.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Forward, Inputs, Op, largest
from klfast.backends import BACKENDS
from klfast.types.names import BackendName

Candidate = Callable[[Any], Any]
"""The function that a timing calls with inputs. Returns its forward's outputs, or (those, and each
of the op's gradients) with a backward."""

KLFAST = "klfast"
COMPILE = "torch.compile"
AUTOTUNED = "torch.compile max-autotune"

MODES = {COMPILE: None, AUTOTUNED: "max-autotune-no-cudagraphs"}
"""Name -> ``mode`` of ``torch.compile``. CUDA graphs are timed apart, for every candidate."""


def is_ours(name: str) -> bool:
    return name == KLFAST or name in BACKENDS


def compiled_forward(op: Op) -> Forward:
    """Compiled for one shape, and alone in dynamo's cache: the rival at its best."""
    torch.compiler.reset()
    return _compiled(op.eager())


def _compiled(forwards: Mapping[str, Forward], mode: str | None = None) -> Forward:
    first = next(iter(forwards.values()))
    compiled: Forward = torch.compile(first, fullgraph=True, dynamic=False, mode=mode)
    return compiled


def candidate(op: Op, forward: Forward) -> Candidate:
    """A forward, with the backward behind it if the op has one."""

    def run_forward(inputs: Inputs) -> Any:
        return forward(*inputs.arguments)

    def run_both(inputs: Inputs) -> Any:
        result = run_forward(inputs)
        leaves = [inputs.arguments[place] for place in op.gradients.values()]
        return result, *torch.autograd.grad(result, leaves, inputs.grad_out)

    return run_both if op.backward else run_forward


def build_candidates(op: Op, with_compile: bool) -> dict[str, Candidate]:
    """Name -> candidate; klfast first."""
    forwards = {KLFAST: op.klfast(), **op.eager()}
    if with_compile:
        forwards[COMPILE] = compiled_forward(op)
    return {name: candidate(op, forward) for name, forward in forwards.items()}


def build_gpu_candidates(
    case: Case,
    backends: Sequence[BackendName],
    modes: Sequence[str],
    others: Mapping[str, Forward],
) -> dict[str, Candidate]:
    """Name -> candidate: klfast's backends by their names, eager, compiled in each of some modes
    (keys of ``MODES``), and other libraries' forwards.
    """
    torch.compiler.reset()  # alone in dynamo's cache
    eager = case.op.eager(case.packed)
    forwards = {backend: case.op.klfast(backend) for backend in backends} | eager
    forwards |= {name: _compiled(eager, MODES[name]) for name in modes} | dict(others)
    return {name: candidate(case.op, forward) for name, forward in forwards.items()}


TOLERANCE = 1e-4  # the tolerance, relative to the largest entry; wide, as it tells wrong from right

ROUNDING = 1e-6
"""The tolerance, relative to the terms: near 0, ``exp(-x) - 1`` in fp32 has few digits."""

_NUMBERS_PER_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 22}


class WrongResult(Exception):  # noqa: N818  # said in the words of the message
    """A candidate that computes something else; its text is the whole message."""


def named_outputs(op: Op, outputs: Any) -> dict[str, Tensor]:
    if not op.backward:
        return op.named(outputs)
    result, *gradients = outputs
    return {**op.named(result), **dict(zip(op.gradients, gradients, strict=True))}


def truth(op: Op, inputs: Inputs) -> dict[str, Tensor]:
    """The outputs in float64, a block of rows at a time, as float64 graphs are large.

    Gradients are kept in fp32: of a whole vocabulary they are large, too.
    """
    call = candidate(op, op.klfast("reference", op.normalizer(inputs)))
    rows = op.rows_at_once(inputs, _numbers_per_block(inputs.arguments[0]))
    sums: dict[str, Tensor] = {}
    of_rows: dict[str, list[Tensor]] = {}
    for block in inputs.in_float64(rows):
        for name, output in named_outputs(op, call(block)).items():
            whole = output.detach()
            if not whole.dim() or op.gradients.get(name) in inputs.shared:
                sums[name] = sums[name].add_(whole) if name in sums else whole
            else:
                kept = whole.float() if name in op.gradients else whole
                of_rows.setdefault(name, []).append(kept)
    joined = {name: torch.cat(parts) for name, parts in of_rows.items()}
    gradients = {name: total.float() for name, total in sums.items() if name in op.gradients}
    return joined | sums | gradients


def _numbers_per_block(tensor: Tensor) -> int:
    return _NUMBERS_PER_BLOCK[tensor.device.type]


def tolerances(op: Op, inputs: Inputs, expected: dict[str, Tensor]) -> dict[str, float]:
    """How far each output may be from the truth, absolutely."""
    value_size, gradient_size = op.sizes(inputs)
    of_value, of_gradient = op.rounding(inputs)
    allowed = {}
    for name, want in expected.items():
        is_gradient = name in op.gradients
        relative = of_gradient if is_gradient else of_value
        size = gradient_size if is_gradient else value_size
        allowed[name] = max(TOLERANCE, relative) * largest(want) + ROUNDING * size
    return allowed


def check_outputs(
    name: str, op: Op, outputs: Any, expected: dict[str, Tensor], allowed: dict[str, float]
) -> None:
    """Raises :class:`WrongResult` if what the candidate ``name`` returned is not the truth."""
    for output, actual in named_outputs(op, outputs).items():
        try:
            for part, want in _in_blocks(actual.detach(), expected[output]):
                most = allowed[output]  # a comparison takes a tenth of assert_close's time
                if part.shape != want.shape or not ((part - want).abs() <= most).all():
                    torch.testing.assert_close(part.double(), want.double(), rtol=0, atol=most)
        except AssertionError as error:
            detail = " ".join(str(error).split())
            raise WrongResult(f"{name} computes a wrong {output} ({op.name}): {detail}") from None


def _in_blocks(actual: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of rows; the whole if there is nothing to pair or to split."""
    if actual.shape != expected.shape or expected.dim() < 2:
        yield actual, expected
        return
    rows = max(1, _numbers_per_block(expected) // max(1, expected.shape[1]))
    yield from zip(torch.split(actual, rows), torch.split(expected, rows), strict=True)
