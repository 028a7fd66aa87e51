"""The pairs of ``drop_in.py`` over logits of the whole vocabulary.

A scalar of each row's result stands for what training makes of it. What frameworks hand to kernels
that run on GPUs alone (flash-attn, Triton) they do in PyTorch here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.pairs import Function, Pair, from_tests, gradient
from klfast import compat

Logprobs = Callable[[Tensor, Tensor], Tensor]
FORWARD_BACKWARD = ", forward + backward"


def _logprobs(function: Logprobs) -> Function:
    return lambda b: function(b.logprobs, b.labels)


def _logprobs_gradient(function: Logprobs) -> Function:
    return gradient(lambda x, b: function(x, b.labels).sum())


def _entropy_gradient(function: Callable[[Tensor], Tensor]) -> Function:
    return gradient(lambda x, b: function(x).sum())


def _sum_of(function: Callable[..., Any], logits: Tensor, ids: Tensor) -> Any:
    """The sum of its results."""
    return sum(function(logits, ids))


def verl_pairs() -> Iterator[Pair]:
    os.environ["VERL_DISABLE_FLASH_ATTN_CE"] = "1"  # what stands in for it computes nothing
    from verl.utils import torch_functional as theirs

    ours = compat.verl
    name = "`logprobs_from_logits`"
    both = (theirs.logprobs_from_logits, ours.logprobs_from_logits)
    yield Pair("verl", name, *map(_logprobs, both))
    yield Pair("verl", name + FORWARD_BACKWARD, *map(_logprobs_gradient, both))
    yield Pair(
        "verl",
        "`entropy_from_logits`" + FORWARD_BACKWARD,
        *map(_entropy_gradient, (theirs.entropy_from_logits, ours.entropy_from_logits)),
    )


def openrlhf_pairs() -> Iterator[Pair]:
    sys.modules["flash_attn.ops.triton.cross_entropy"] = None  # type: ignore[assignment]
    from openrlhf.models import utils as theirs

    ours = compat.openrlhf
    both = (theirs.log_probs_from_logits, ours.log_probs_from_logits)
    name = "`log_probs_from_logits`" + FORWARD_BACKWARD
    yield Pair("OpenRLHF", name, *map(_logprobs_gradient, both))
    yield Pair(
        "OpenRLHF",
        "`compute_entropy`, which it compiles" + FORWARD_BACKWARD,
        *map(_entropy_gradient, (theirs.compute_entropy, ours.compute_entropy)),
    )


def roll_pairs() -> Iterator[Pair]:
    theirs, ours = from_tests("frameworks"), compat.roll

    def logprobs(logits: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = theirs.logprobs_of(logits.float(), labels)
        return result

    def full(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return ours.compute_approx_kl(logprobs, ref_logprobs, kl_penalty="full")

    def of_logits(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
        return gradient(lambda x, b: function(x.log_softmax(-1), b.ref_logprobs).sum())

    both = (logprobs, ours.log_probs_from_logits)
    name = "`log_probs_from_logits`" + FORWARD_BACKWARD
    yield Pair("ROLL", name, *map(_logprobs_gradient, both))
    yield Pair(
        "ROLL",
        "`compute_approx_kl`, `full`",
        lambda b: theirs.full(b.logprobs, b.ref_logprobs),
        lambda b: full(b.logprobs, b.ref_logprobs),
    )
    name = "the same of `log_softmax`" + FORWARD_BACKWARD
    yield Pair("ROLL", name, of_logits(theirs.full), of_logits(full))


def trl_pairs() -> Iterator[Pair]:
    from trl.trainer import utils as theirs

    ours = compat.trl
    name = "`selective_log_softmax`"
    both = (theirs.selective_log_softmax, ours.selective_log_softmax)
    yield Pair("TRL", name, *map(_logprobs, both))
    yield Pair("TRL", name + FORWARD_BACKWARD, *map(_logprobs_gradient, both))
    joint = (theirs.selective_log_softmax_and_entropy, ours.selective_log_softmax_and_entropy)
    yield Pair(
        "TRL",
        "`selective_log_softmax_and_entropy`" + FORWARD_BACKWARD,
        *(_logprobs_gradient(partial(_sum_of, of)) for of in joint),
    )
    yield Pair(
        "TRL",
        "`entropy_from_logits`",
        lambda b: theirs.entropy_from_logits(b.logprobs),
        lambda b: ours.entropy_from_logits(b.logprobs),
    )
