"""The timed candidates: klfast, code without klfast, and ``torch.compile`` of that code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.cases import Case, Forward, Inputs, Op
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
