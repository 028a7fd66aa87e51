"""Shared by the distillation losses: ``klfast.kl_divergence`` by their arguments.

With p = softmax(student / temperature), q = softmax(teacher / temperature) and b the framework's
number (TRL's and ms-swift's ``beta``, the ``alpha`` of TRL's self-distillation), which all three
define alike:

======== ==================================================================================
b        per token, in nats
======== ==================================================================================
0        forward: KL(q || p) = sum q log(q / p)
1        reverse: KL(p || q) = sum p log(p / q)
between  Jensen-Shannon: (1 - b) KL(p || m) + b KL(q || m), m = (1 - b) p + b q
======== ==================================================================================

The two ends are not the limits of what lies between, which goes to 0 at both. No framework
multiplies by the square of the temperature.

Logits are read once (twice between 0 and 1), and nothing of their size is made but gradients.

Differs from TRL and ms-swift: lower dtypes give fp32, and near 0 every digit is right, where their
sums are rounding (never negative, exactly 0 for equal logits); a logit of -inf in either model adds
0, where theirs is NaN, and the divergence is infinite only where the other model says that word.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.checks.arguments import check_number
from klfast.compat.logits import IGNORED
from klfast.logits.api import kl_divergence
from klfast.names import DirectionName, ReductionName


class Divergence(NamedTuple):
    """``direction`` and ``jsd_beta`` of ``klfast.kl_divergence``."""

    direction: DirectionName
    jsd_beta: float = 0.5


FORWARD = Divergence("forward")
REVERSE = Divergence("reverse")


def interpolated(argument: str, number: float) -> Divergence:
    """The divergence that a framework's b stands for; the errors call it ``argument``."""
    tracing = torch.compiler.is_compiling()  # where the number may be symbolic
    b = number if tracing else check_number(argument, number, least=0)
    if b > 1:
        raise ValueError(f"{argument} must be a number between 0 and 1, got {number!r}")
    if b in (0, 1):
        return REVERSE if b else FORWARD
    return Divergence("jsd", b)


def distill(
    divergence: Divergence,
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduction: ReductionName = "none",
    normalizer: float | Tensor | None = None,
    coef: float = 1.0,
) -> Tensor:
    """``klfast.kl_divergence`` of a student and a teacher, logits or log-probs, [..., V].

    Args:
        divergence: which one.
        student: the logits whose softmax is p; any number of dimensions before the last.
        teacher: of the same shape, for q. Gradients reach it if it requires them.
        mask: [...], see ``klfast.kl_divergence``, like the rest.
        temperature: see there.
        reduction: ``"none"``, [...], ``"token-sum"`` or ``"token-mean"``, 0-dim.
        normalizer: see there; a tensor may be on another device.
        coef: see there.
    """
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(student.device)
    value = kl_divergence(
        batched(student),
        batched(teacher),
        None if mask is None else batched(mask.unsqueeze(-1)).squeeze(-1),
        direction=divergence.direction,
        jsd_beta=divergence.jsd_beta,
        temperature=temperature,
        reduction=reduction,
        normalizer=normalizer,
        coef=coef,
    )
    return value.view(student.shape[:-1]) if reduction == "none" else value


def batched(logits: Tensor) -> Tensor:
    """[..., V] as [N, V] or [B, T, V]: a view wherever strides allow one."""
    if logits.dim() == 1:
        return logits.unsqueeze(0)
    return logits.flatten(0, -3) if logits.dim() > 3 else logits


def kept(labels: Tensor) -> Tensor:
    """Which tokens exist, [...]: those whose label is not -100."""
    return labels != IGNORED


def check_same_shape(argument: str, teacher: Tensor, of: str, student: Tensor) -> None:
    """Two models' numbers are of one vocabulary, [..., V]."""
    if student.dim() < 1 or student.shape != teacher.shape:
        raise ValueError(
            f"{argument} must have the shape of {of}, [..., V], {list(student.shape)}, got "
            f"{list(teacher.shape)}"
        )


def check_per_token(argument: str, value: Tensor, of: str, logits: Tensor) -> None:
    """A number for each token."""
    if value.shape != logits.shape[:-1]:
        raise ValueError(
            f"{argument} must have the shape of {of} without the vocabulary, "
            f"{list(logits.shape[:-1])}, got {list(value.shape)}"
        )


def check_k_words(of: str, logits: Tensor, **words: Tensor) -> None:
    """What is known of K words of each token is [..., K], of as many words each."""
    ends = {each.shape[-1:] for each in words.values()}
    if len(ends) > 1 or any(each.shape[:-1] != logits.shape[:-1] for each in words.values()):
        tokens = "".join(f"{size}, " for size in logits.shape[:-1])
        raise ValueError(
            f"{' and '.join(words)} must be [{tokens}K], K words of each token of {of}, got "
            f"{' and '.join(str(list(each.shape)) for each in words.values())}"
        )


def with_one_vocabulary(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [..., V] and [..., W] with the words that either lacks taken from the other.

    Where V and W differ that is a copy of the narrower, in its dtype.
    """
    words, others = student.shape[-1], teacher.shape[-1]
    if words < others:
        student = torch.cat([student, teacher[..., words:].to(student.dtype)], -1)
    elif others < words:
        teacher = torch.cat([teacher, student[..., others:].to(teacher.dtype)], -1)
    return student, teacher
