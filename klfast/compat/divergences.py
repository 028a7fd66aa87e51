"""``klfast.kl_divergence`` with the arguments of the frameworks' distillation losses and ``full``.

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

The two ends are not the limits of the values between, which go to 0 at both. No framework
multiplies by the square of the temperature.

Logits are read once (twice between 0 and 1), and only gradients of their size are made. A logit of
-inf in either model adds 0, where the frameworks' sum is NaN. The divergence is infinite only if
the other model gives that token a probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn import functional

from klfast.args.checks import check_choice, check_number
from klfast.args.estimator import Estimator
from klfast.args.values import are_tracing, checks_requested, holds_values
from klfast.compat.common import check_shapes, per_token
from klfast.functional.logits import kl_divergence
from klfast.types.names import DirectionName, ReductionName


class Interpolation(NamedTuple):
    """``direction`` and ``jsd_beta`` of ``klfast.kl_divergence``."""

    direction: DirectionName
    jsd_beta: float = 0.5


class LossOptions(TypedDict, total=False):
    """How a loss over tokens is reduced: options of ``klfast.kl_divergence``."""

    reduction: ReductionName
    normalizer: float | Tensor | None
    coef: float


FORWARD = Interpolation("forward")
REVERSE = Interpolation("reverse")


def interpolated(argument: str, number: float) -> Interpolation:
    """The divergence that a framework's b selects. Errors call b ``argument``."""
    tracing = torch.compiler.is_compiling()  # where the number may be symbolic
    b = number if tracing else check_number(argument, number, least=0)
    if b > 1:
        raise ValueError(f"{argument} must be a number between 0 and 1, got {number!r}")
    # klfast's "jsd" is not defined at its ends, where the frameworks switch to a KL.
    if b in (0, 1):
        return REVERSE if b else FORWARD
    return Interpolation("jsd", b)


def check_models(student: Tensor, teacher: Tensor, **masks: Tensor | None) -> None:
    """Check that logits have one shape [..., V] and the named per-token arguments shape [...]."""
    of_tokens = [(name, mask, "...") for name, mask in masks.items()]
    check_shapes(
        ("student_logits", student, "... V"), ("teacher_logits", teacher, "... V"), *of_tokens
    )


def distill(
    divergence: Interpolation,
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

    Gradients reach the teacher if it requires them. The result is [...] with ``"none"``, and 0-dim
    with ``"token-sum"`` and ``"token-mean"``. A ``normalizer`` may be on another device.
    """
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(student.device)
    value = kl_divergence(
        batched(student),
        batched(teacher),
        batched_mask(mask),
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


def batched_mask(mask: Tensor | None) -> Tensor | None:
    """The mask [...] of such logits."""
    return None if mask is None else batched(mask.unsqueeze(-1)).squeeze(-1)


def full_kl(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None, *, exact: bool = False
) -> Tensor:
    """The exact KL(policy || reference) of every token, [..., V] -> [...], in nats, by one read.

    The value is ``mask * sum over V of p * log(p / q)``. p and q are the distributions of the
    log-probs, which ``klfast.kl_divergence`` takes for logits. A token id that the policy excludes
    (-inf) adds 0.

    The frameworks sum ``exp(logprobs) * (logprobs - ref_logprobs)``. Let a and b be the logs of the
    sums of exp(logprobs) and exp(ref_logprobs). Then theirs is ``e**a * (KL + a - b)``. In bf16, a
    and b are up to 2**-8 times the entropies. Their sum is off by as much, and can be negative near
    on-policy. klfast makes distributions of log-probs of a part of the vocabulary too.

    The gradient is ``p * (log(p / q) - KL)``, and ``q - p`` to the reference. Theirs is
    ``p * (log(p / q) + 1)`` and ``-p``. They differ by multiples of p and of q, which the backward
    of ``log_softmax`` removes. At the logits both are the same.

    ``exact=True`` is the frameworks' own sum and gradient, with their NaN and the inputs' dtype.

    Raises:
        ValueError: there is no vocabulary dimension (log-probs of the sampled tokens alone make no
            sense here), or ``ref_logprobs`` or ``mask`` has another shape.
    """
    if logprobs.dim() < 2 or logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            "logprobs and ref_logprobs must be log-probs of the whole vocabulary, of one shape "
            f"[..., V], got {list(logprobs.shape)} and {list(ref_logprobs.shape)}"
        )
    check_shapes(("logprobs", logprobs, "... V"), ("mask", mask, "..."))
    if exact:
        # The frameworks' own op, for their NaN and their gradient.
        terms = functional.kl_div(ref_logprobs, logprobs, reduction="none", log_target=True)
        kl = terms.sum(-1)
        return kl if mask is None else kl * mask
    return distill(REVERSE, logprobs, ref_logprobs, mask)


def per_token_or_full(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kl_penalty: str,
    presets: Mapping[str, Estimator],
    mask: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """``per_token`` by the framework's name for its estimator, or ``full_kl`` by ``full``."""
    check_choice("kl_penalty", kl_penalty, (*presets, "full"))
    if kl_penalty == "full":
        return full_kl(logprobs, ref_logprobs, mask, exact=exact)
    return per_token(logprobs, ref_logprobs, presets[kl_penalty], mask, exact=exact)


def positive_count(argument: str, count: float | Tensor) -> float | Tensor:
    """The count by which a loss is divided, checked to be > 0."""
    if not isinstance(count, Tensor):
        # A check of a symbolic number would compile once per value.
        is_symbolic = torch.compiler.is_compiling() and type(count) in (int, float)
        return count if is_symbolic else check_number(argument, count, above=0)
    if count.dim() != 0:
        raise ValueError(
            f"{argument} must be a number or a 0-dim tensor, got a tensor of shape "
            f"{list(count.shape)}"
        )
    # The value of a GPU's tensor needs a sync, for which ``KLFAST_CHECK=1`` must ask.
    if holds_values(count) or (checks_requested() and not are_tracing()):
        check_number(argument, count.item(), above=0)
    return count
