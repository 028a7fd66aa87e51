"""Hints: warnings of calls that are valid, and likely not what was meant.

A hint is given once a process for each function and mistake, at the line that called klfast. Calls
that klfast itself makes give none: the frameworks for which ``klfast.compat`` calls chose their
estimators, pad log-probs with positive numbers (TRL with 1.0), and have functions without a mask.
Nothing is said or read while torch.compile or torch.func traces.

Values are read where that is allowed (``values.can_be_read``: on a CPU, or under
``KLFAST_CHECK=1``), in calls 1 to ``FIRST`` of each function and every ``EVERY``-th after these. A
look (``samples``) takes some 10 us, and so a small call a fraction of a microsecond on average.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klfast.args.checks import shape_text
from klfast.args.coefficient import Coefficient, value_of
from klfast.args.values import are_tracing, can_be_read
from klfast.functional.samples import are_of_taken_tokens, positive
from klfast.types.callers import caller
from klfast.types.reduction import REDUCTIONS, TOKENWISE_REDUCTIONS

if TYPE_CHECKING:
    from klfast.args.estimator import Estimator

FIRST = 16
EVERY = 64

_FUNCTIONS = (
    "kl_penalty",
    "kl_rewards",
    "token_logprobs",
    "kl_divergence",
    "topk_kl_divergence",
    "linear_topk_kl_divergence",
    "rollout_correction",
)

_calls = {name: itertools.count() for name in _FUNCTIONS}
_given: set[tuple[str, str]] = set()
"""(function, mistake) of every hint that has been given."""


def of_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    estimator: Estimator,
    reduction: str,
    cu_seqlens: Tensor | None,
    old_logprobs: Tensor | None,
    coef: Coefficient,
) -> None:
    """All hints of a call of ``kl_penalty``, like those below after its arguments were checked."""
    if torch.compiler.is_compiling():
        return
    of_gradient = _hint_of_gradient(estimator, weighted=old_logprobs is not None)
    if (
        of_gradient is not None
        and logprobs.requires_grad
        and torch.is_grad_enabled()
        and not _is_zero(coef)  # where the KL is only measured
    ):
        of_gradient("kl_penalty")
    if ref_logprobs.requires_grad and not logprobs.requires_grad:
        _of_roles("kl_penalty", "logprobs", "ref_logprobs", reduction)
    if cu_seqlens is None and logprobs.dim() == 1 and reduction not in TOKENWISE_REDUCTIONS:
        _of_one_sequence("kl_penalty", "logprobs", logprobs, f"reduction {reduction!r}")
    if _is_due("kl_penalty"):
        _of_logprobs(
            "kl_penalty",
            mask,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            old_logprobs=old_logprobs,
        )


def of_rewards(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None) -> None:
    """All hints of a call of ``kl_rewards``."""
    if not torch.compiler.is_compiling() and _is_due("kl_rewards"):
        _of_logprobs("kl_rewards", mask, logprobs=logprobs, ref_logprobs=ref_logprobs)


def of_reduce(values: Tensor, reduction: str, cu_seqlens: Tensor | None) -> None:
    """All hints of a call of ``reduce``."""
    if torch.compiler.is_compiling():
        return
    if cu_seqlens is None and values.dim() == 1 and reduction not in TOKENWISE_REDUCTIONS:
        _of_one_sequence("reduce", "values", values, f"reduction {reduction!r}")


def of_rollout(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    by_sequence: str | None,
) -> None:
    """All hints of a call of ``rollout_correction``; ``by_sequence``: an option that asks which
    sequence a token belongs to.
    """
    if torch.compiler.is_compiling():
        return
    if by_sequence is not None and cu_seqlens is None and logprobs.dim() == 1:
        _of_one_sequence("rollout_correction", "logprobs", logprobs, by_sequence)
    if _is_due("rollout_correction"):
        _of_logprobs(
            "rollout_correction", mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs
        )


def of_token_logprobs(logits: Tensor, mask: Tensor | None) -> None:
    """All hints of a call of ``token_logprobs``."""
    if not torch.compiler.is_compiling() and _is_due("token_logprobs"):
        _of_logits("token_logprobs", mask, logits=logits)


def of_divergence(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    reduction: str,
    cu_seqlens: Tensor | None,
) -> None:
    """All hints of a call of ``kl_divergence``."""
    if torch.compiler.is_compiling():
        return
    if ref_logits.requires_grad and not logits.requires_grad:
        _of_roles("kl_divergence", "logits", "ref_logits", reduction)
    _of_one_sequence_of_rows("kl_divergence", logits, reduction, cu_seqlens)
    if _is_due("kl_divergence"):
        _of_logits("kl_divergence", mask, logits=logits, ref_logits=ref_logits)


def of_linear_divergence(
    hidden: Tensor, ref_hidden: Tensor, reduction: str, cu_seqlens: Tensor | None
) -> None:
    """All hints of a call of ``linear_kl_divergence``."""
    if ref_hidden.requires_grad and not hidden.requires_grad:
        _of_roles("linear_kl_divergence", "hidden", "ref_hidden", reduction)
    _of_one_sequence_of_rows("linear_kl_divergence", hidden, reduction, cu_seqlens, "hidden")


def of_linear_topk_divergence(
    hidden: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    reduction: str,
    cu_seqlens: Tensor | None,
) -> None:
    """All hints of a call of ``linear_topk_kl_divergence``."""
    function = "linear_topk_kl_divergence"
    _of_one_sequence_of_rows(function, hidden, reduction, cu_seqlens, "hidden")
    if _is_due(function):
        _of_logprobs(function, mask, ref_logprobs=ref_logprobs[..., 0])


def of_topk_divergence(
    logits: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    reduction: str,
    cu_seqlens: Tensor | None,
) -> None:
    """All hints of a call of ``topk_kl_divergence``."""
    if torch.compiler.is_compiling():
        return
    if ref_logprobs.requires_grad and not logits.requires_grad:
        _of_roles("topk_kl_divergence", "logits", "ref_logprobs", reduction)
    _of_one_sequence_of_rows("topk_kl_divergence", logits, reduction, cu_seqlens)
    if _is_due("topk_kl_divergence"):
        first = ref_logprobs[..., 0]  # the likeliest, most often
        _of_logprobs("topk_kl_divergence", mask, ref_logprobs=first)
        _of_logits("topk_kl_divergence", mask, logits=logits)


def _is_zero(coef: Coefficient) -> bool:
    """Whether a coefficient is known to be 0; a tensor's is where it can be read."""
    now = value_of(coef)
    if isinstance(now, Tensor) and not can_be_read(now):
        return False
    return bool(now == 0)


def _hint_of_gradient(estimator: Estimator, *, weighted: bool) -> Callable[[str], None] | None:
    """The hint of an estimator in a loss whose expected gradient is that of no divergence."""
    if estimator.name == "k1" and estimator.gradient == "value" and not weighted:
        return _of_vanishing_gradient
    if estimator.gradient == "k2" and estimator.importance == "differentiable" and weighted:
        return _of_differentiable_weight
    return None


def _of_vanishing_gradient(function: str) -> None:
    _give(
        function,
        "vanishing gradient",
        "the gradient of estimator 'k1' without old_logprobs is 0 in expectation: in a loss it is "
        "no penalty; take 'k1+', which has the gradient of the reverse KL, or give old_logprobs, "
        "or, for a reward, detach the log-probs",
    )


def _of_differentiable_weight(function: str) -> None:
    _give(
        function,
        "differentiable weight",
        "the gradient of an Estimator with gradient='k2' and a differentiable weight is in "
        "expectation not that of the reverse KL where old_logprobs are given; take "
        "importance='detached', as 'k1+', 'k2+' and 'k3+' have it, or gradient='value' with k1 or "
        "k3",
    )


def _of_roles(function: str, policy: str, reference: str, reduction: str) -> None:
    """The hint of a policy in the place of its reference, in a loss: numbers per token or sequence
    may be measured only, of log-probs that belong to a graph.
    """
    if torch.is_grad_enabled() and REDUCTIONS[reduction].is_scalar():
        _give(
            function,
            "swapped",
            f"{reference} requires grad and {policy} does not: the policy's comes first, the "
            "reference's second; are they swapped?",
        )


def _of_one_sequence(function: str, name: str, tokens: Tensor, option: str) -> None:
    _give(
        function,
        "one sequence",
        f"{name} of shape {shape_text(tokens)} without cu_seqlens are one sequence to {option}; "
        "give cu_seqlens, the boundaries of the sequences, if there are several",
    )


def _of_one_sequence_of_rows(
    function: str,
    rows: Tensor,
    reduction: str,
    cu_seqlens: Tensor | None,
    name: str = "logits",
) -> None:
    if cu_seqlens is None and rows.dim() == 2 and reduction not in TOKENWISE_REDUCTIONS:
        _of_one_sequence(function, name, rows, f"reduction {reduction!r}")


def _of_logprobs(function: str, mask: Tensor | None, **logprobs: Tensor | None) -> None:
    for name, tensor in logprobs.items():
        if tensor is None or not _may_look(function, "positive log-probs", tensor, mask):
            continue
        if (found := positive(tensor, mask)) is not None:
            least, greatest = found
            guess = "logits? klfast.token_logprobs makes log-probs of them"
            if least >= 0 and greatest <= 1:
                guess = f"probabilities? All lie in [0, 1]; {name}.log() has their log-probs"
            _give(
                function,
                "positive log-probs",
                f"{name} must hold log-probs, which are at most 0, got {greatest:.4g} at a kept "
                f"token: are these {guess}",
            )


def _of_logits(function: str, mask: Tensor | None, **logits: Tensor) -> None:
    for name, tensor in logits.items():
        if tensor.dim() != 2 or tensor.shape[1] < 2:
            continue
        if not _may_look(function, "log-probs as logits", tensor, mask):
            continue
        if are_of_taken_tokens(tensor, mask):
            _give(
                function,
                "log-probs as logits",
                f"{name} of shape {shape_text(tensor)} must hold the logits of a vocabulary in "
                "each row, got what looks like log-probs of taken tokens, [B, T]: no number is "
                "above 0, they are in no order, and the probabilities of a row do not sum to 1; "
                "klfast.kl_penalty takes log-probs",
            )


def _is_due(function: str) -> bool:
    """Counts a call of a function; whether the values of this one are looked at."""
    call = next(_calls[function])
    return call < FIRST or call % EVERY == 0


def _may_look(function: str, mistake: str, tensor: Tensor, mask: Tensor | None) -> bool:
    return (
        (function, mistake) not in _given
        and tensor.numel() > 0
        and can_be_read(tensor)
        and (mask is None or can_be_read(mask))
    )


def _give(function: str, mistake: str, text: str) -> None:
    if (function, mistake) in _given or are_tracing():
        return
    who = caller()
    if who.is_internal:
        return
    _given.add((function, mistake))
    warnings.warn(f"klfast.{function}: {text}", UserWarning, stacklevel=who.stacklevel)
