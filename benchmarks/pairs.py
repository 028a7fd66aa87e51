"""What ``drop_in.py`` times: a framework's function and klfast's in its place, on one batch."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import KEPT, SPREAD

TESTS = Path(__file__).parents[1] / "tests"


class Batch(NamedTuple):
    """[B, T] each; the mask keeps each sequence's beginning, ``KEPT`` of all tokens."""

    logprobs: Tensor
    ref_logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor


class Vocabulary(NamedTuple):
    """Log-probs [B, T, V] of the whole vocabulary, which are logits too; [B, T] all kept."""

    logprobs: Tensor
    ref_logprobs: Tensor
    labels: Tensor
    mask: Tensor


Function = Callable[[Any], Any]


class Pair(NamedTuple):
    """The framework's way and klfast's to the same result.

    Attributes:
        framework: whose function it is.
        what: its name, and what is timed.
        theirs, ours: from a batch to a tensor or a tuple of tensors.
    """

    framework: str
    what: str
    theirs: Function
    ours: Function


def make_batch(shape: tuple[int, ...], dtype: torch.dtype) -> Batch:
    logprobs = -4 * torch.rand(shape)
    ref_logprobs = logprobs - SPREAD * torch.randn(shape)
    old_logprobs = logprobs + SPREAD * torch.randn(shape)
    lengths = torch.linspace(2 * KEPT - 1, 1, shape[0]) * shape[1]
    mask = torch.arange(shape[1]) < lengths[:, None]
    return Batch(logprobs.to(dtype), ref_logprobs.to(dtype), old_logprobs.to(dtype), mask.long())


def make_vocabulary(shape: tuple[int, ...], dtype: torch.dtype) -> Vocabulary:
    logits = 2.5 * torch.randn(shape)
    ref_logprobs = (logits + SPREAD * torch.randn(shape)).log_softmax(-1).to(dtype)
    labels = torch.randint(shape[-1], shape[:-1])
    return Vocabulary(
        logits.log_softmax(-1).to(dtype), ref_logprobs, labels, torch.ones_like(labels)
    )


def gradient(loss: Callable[[Tensor, Any], Tensor]) -> Function:
    """(loss, its gradient to the log-probs): forward and backward."""

    def both(batch: Any) -> tuple[Tensor, Tensor]:
        leaf = batch.logprobs.detach().requires_grad_()
        value = loss(leaf, batch)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    return both


def from_tests(name: str) -> types.ModuleType:
    """A module of the tests' folders."""
    path = next(TESTS.rglob(f"{name}.py"))
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(name)
