"""Hints: warnings about calls that are valid but probably a mistake.

A hint is given once per process for each function and mistake, at the line that called klfast.
Calls from klfast itself give no hint. The frameworks for which ``klfast.compat`` calls chose their
estimators, pad log-probs with positive numbers (TRL with 1.0), and have functions without a mask.
While torch.compile or torch.func traces, no hint is given and no value is read.

Values are read only where ``values.can_be_read`` allows it (on a CPU, or under ``KLFAST_CHECK=1``).
They are read in calls 1 to ``FIRST`` of each function and in every ``EVERY``-th call after these.
One read takes some 10 us, so a small call pays a fraction of a microsecond on
average.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import Coefficient, shape_text
from klfast.args.penalty import PenaltyCall, Reducing
from klfast.args.values import are_tracing, can_be_read
from klfast.formulas.sequences import Sequences
from klfast.types.callers import caller
from klfast.types.dtypes import has_float64, wide
from klfast.types.reduction import REDUCTIONS, TOKENWISE_REDUCTIONS

FIRST = 16
EVERY = 64

SAMPLE = 1024

# The greatest log-prob above 0 that rounding explains.
TOLERANCE = 1e-3

_ROWS = 8
_RUN = 16
# Up to this vocabulary size, logits may be anything, such as logits of a few classes.
_SMALL = 32
_ORDERED = 0.8
# The sum of probabilities in bf16 is 1 within 2 %.
_ROUNDING = 0.05


class _Hints(NamedTuple):
    """Which hints a function has."""

    # The tensors that of_call takes: the policy's, the reference's, and a third.
    names: tuple[str, ...]
    logprobs: tuple[str, ...] = ()  # the tensors that must hold log-probs
    logits: tuple[str, ...] = ()  # the tensors that must hold logits
    packed_dims: int = 1  # the number of dimensions of the first tensor if tokens are packed
    skips_nan: bool = False  # True if the function leaves out NaN
    has_entries: bool = False  # True if the reference gives K log-probs per token


_PENALTY = ("logprobs", "ref_logprobs", "old_logprobs")
_ROLLOUT = ("logprobs", "rollout_logprobs")
_LOGITS = ("logits", "ref_logits")
_HINTS = {
    "kl_penalty": _Hints(_PENALTY, logprobs=_PENALTY),
    "kl_rewards": _Hints(_PENALTY[:2], logprobs=_PENALTY[:2]),
    "reduce": _Hints(("values",)),
    "rollout_correction": _Hints(_ROLLOUT, logprobs=_ROLLOUT, skips_nan=True),
    "token_logprobs": _Hints(("logits",), logits=("logits",)),
    "kl_divergence": _Hints(_LOGITS, logits=_LOGITS, packed_dims=2),
    "topk_kl_divergence": _Hints(
        ("logits", "ref_logprobs"), ("ref_logprobs",), ("logits",), 2, has_entries=True
    ),
    "linear_kl_divergence": _Hints(("hidden", "ref_hidden"), packed_dims=2),
    "linear_topk_kl_divergence": _Hints(
        ("hidden", "ref_logprobs"), ("ref_logprobs",), packed_dims=2, has_entries=True
    ),
}

# The text of every mistake.
_TEXTS = {
    "weights that cancel": "the mask has one weight for all kept tokens of each sequence, and "
    "reduction {0!r} divides a sequence by the sum of its mask, so that the weights cancel; pass "
    "them as weights=, and a mask of zeros and ones",
    "vanishing gradient": "the gradient of estimator 'k1' without old_logprobs is 0 in "
    "expectation, so that it is no penalty in a loss; use 'k1+', which has the gradient of the "
    "reverse KL, or pass old_logprobs, or detach the log-probs if this is a reward",
    "differentiable weight": "an Estimator with gradient='k2' and a differentiable weight does not "
    "have the gradient of the reverse KL if old_logprobs are given; use importance='detached', as "
    "'k1+', 'k2+' and 'k3+' do, or gradient='value' with k1 or k3",
    "swapped": "{1} requires grad and {0} does not: the policy's comes first, the reference's "
    "second; are they swapped?",
    "one sequence": "{0} has shape {1} and no cu_seqlens, so that {2} takes it for one sequence; "
    "pass cu_seqlens, the boundaries of the sequences, if there are several",
    "positive log-probs": "{0} must hold log-probs, which are at most 0, got {1:.4g} at a kept "
    "token: are these {2}",
    "estimator of a reward": "only estimator 'k1' has the gradient of a KL in a reward, got {0!r}; "
    "use 'k1', or the other estimator as a loss of its own (klfast.kl_penalty)",
    "negative coefficient": "{0} should be positive for a penalty, got {1:.4g}, which rewards a "
    "distance from the reference",
    "NaN log-probs": "{0} holds NaN and there is no mask, so that results are NaN; pass mask=, "
    "which is 0 where a token does not exist",
    "mass above 1": "{0} must hold log-probs of one distribution, got K entries of a token whose "
    "probabilities sum to {1:.4g}; are they normalized over the vocabulary?",
    "probabilities as logits": "{0} of shape {1} must hold logits, got what looks like "
    "probabilities: rows in [0, 1] that sum to 1; pass the numbers before softmax, or {0}.log()",
    "log-probs as logits": "{0} of shape {1} must hold the logits of a vocabulary in each row, got "
    "what looks like log-probs of sampled tokens, [B, T]: no number is above 0, they are in no "
    "order, and the probabilities of a row do not sum to 1; klfast.kl_penalty takes log-probs",
}

_calls = {name: itertools.count() for name in _HINTS}
# (function, mistake) of every hint that has been given.
_given: set[tuple[str, str]] = set()


def of_gradient(call: PenaltyCall) -> None:
    """Warn if the estimator's expected gradient in a loss is the gradient of no divergence."""
    estimator, weighted = call.spec.estimator, call.old_logprobs is not None
    if estimator.name == "k1" and estimator.gradient == "value" and not weighted:
        mistake = "vanishing gradient"
    elif estimator.gradient == "k2" and estimator.importance == "differentiable" and weighted:
        mistake = "differentiable weight"
    else:
        return
    if (
        not torch.compiler.is_compiling()
        and call.logprobs.requires_grad
        and torch.is_grad_enabled()
        and _known(call.spec.coef) != 0  # with a coefficient of 0 the KL is only measured
    ):
        _give("kl_penalty", mistake)


def of_reward(call: PenaltyCall) -> None:
    """Warn if the expected policy gradient of the reward is not the gradient of a KL."""
    name = call.spec.estimator.name
    if name != "k1" and not torch.compiler.is_compiling() and _known(call.spec.coef) != 0:
        _give("kl_rewards", "estimator of a reward", name)


def of_call(
    function: str,
    policy: Tensor,
    reference: Tensor | None = None,
    other: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reducing: Reducing = Reducing(),  # noqa: B008 (a constant)
    by_sequence: str | None = None,
) -> None:
    """Give the other hints of a call whose arguments have been checked.

    ``_HINTS`` names the three tensors. ``by_sequence`` is an option that needs each token's
    sequence.
    """
    if torch.compiler.is_compiling():
        return
    row, (reduction, weights, cu_seqlens, _, coef, _) = _HINTS[function], reducing
    if cu_seqlens is None and policy.dim() == row.packed_dims:
        if reduction not in TOKENWISE_REDUCTIONS:
            by_sequence = f"reduction {reduction!r}"
        if by_sequence is not None:
            _give(function, "one sequence", row.names[0], shape_text(policy), by_sequence)
    if (
        reference is not None
        and reference.requires_grad
        and not policy.requires_grad
        and torch.is_grad_enabled()
        # Per-token and per-sequence values may be for logs only, although logprobs has a graph.
        and REDUCTIONS[reduction].is_scalar()
    ):
        _give(function, "swapped", *row.names[:2])
    # A step of itertools.count is atomic, so that threads need no lock.
    count = next(_calls[function])
    if count >= FIRST and count % EVERY != 0:
        return
    # Values that are no KL may have a factor of any sign.
    if function != "reduce" and (number := _known(coef)) is not None and number < 0:
        name = "kl_coef" if function == "kl_rewards" else "coef"
        _give(function, "negative coefficient", name, number)
    if mask is not None and mask.is_floating_point() and REDUCTIONS[reduction].own_length:
        _look(function, "weights that cancel", reduction, mask, cu_seqlens)
    for name, tensor in zip(row.names, (policy, reference, other), strict=False):
        if tensor is None:
            continue
        if name in row.logprobs:
            of_tokens = tensor[..., 0] if row.has_entries else tensor
            if mask is None and weights is None and not row.skips_nan:
                _look(function, "NaN log-probs", name, of_tokens)
            _look(function, "positive log-probs", name, of_tokens, mask)
            # Positive log-probs have a mass above 1 too, and one mistake gets one hint.
            if row.has_entries and (function, "positive log-probs") not in _given:
                _look(function, "mass above 1", name, tensor, mask)
        if name in row.logits and tensor.shape[-1] > 1:
            if tensor.dim() == 2:
                _look(function, "log-probs as logits", name, tensor, mask)
            _look(function, "probabilities as logits", name, tensor, mask)


def _known(coef: Coefficient | None) -> float | None:
    """A coefficient's number. None if there is none, or if it is a tensor that must not be read."""
    number: Any = getattr(coef, "value", coef)
    if isinstance(number, Tensor):
        return number.detach().item() if can_be_read(number) else None
    return None if number is None else float(number)


def _look(
    function: str, mistake: str, name: str, tensor: Tensor, other: Tensor | None = None
) -> None:
    """Warn if a tensor shows a mistake. ``other`` is its mask or cu_seqlens, and ``name`` the
    argument or choice that the text names.
    """
    if (
        (function, mistake) in _given
        or tensor.numel() == 0
        or not can_be_read(tensor)
        or not (other is None or can_be_read(other))
    ):
        return
    words = _SIGNS[mistake](name, tensor.detach(), None if other is None else other.detach())
    if words is not None:
        _give(function, mistake, name, *words)


def _give(function: str, mistake: str, *words: object) -> None:
    if (function, mistake) in _given or are_tracing():
        return
    who = caller()
    if who.is_internal:
        return
    _given.add((function, mistake))
    text = _TEXTS[mistake].format(*words)
    warnings.warn(f"klfast.{function}: {text}", UserWarning, stacklevel=who.stacklevel)


# Signs of mistakes. Each function reads at most SAMPLE numbers of a tensor, evenly spread, and more
# only in rows that look like a mistake. It returns what the text names besides the argument, or
# None without a sign. Tensors are not empty. A mask is 0 where a token does not exist.

_Words = tuple[object, ...] | None


def _cancel(_: str, mask: Tensor, cu_seqlens: Tensor | None) -> _Words:
    """A sign if a mask has weights other than 0 and 1, but in no sequence two of them."""
    kept = mask != 0
    if bool((~kept | (mask == 1)).all()):
        return None
    sequences, weights = Sequences(mask, cu_seqlens), wide(mask.flatten())
    greatest = sequences.spread(sequences.greatest(weights, 0.0))
    return () if bool((~kept.flatten() | (weights == greatest)).all()) else None


def _are_positive(name: str, logprobs: Tensor, mask: Tensor | None) -> _Words:
    """The greatest kept number, if it is above 0 by more than rounding, and what it may be."""
    sample = _spread(logprobs)
    if sample.max().item() <= TOLERANCE:  # most often; never with a NaN
        return None
    is_number = ~sample.isnan()
    if mask is not None:
        is_number &= _spread(mask) != 0
    kept = sample[is_number]
    if not (kept > TOLERANCE).any():
        return None
    least, greatest = kept.min().item(), kept.max().item()
    guess = "logits? klfast.token_logprobs makes log-probs of them"
    if least >= 0:
        guess = f"-log p? None is below 0; -{name} has the log-probs. Are they {guess}"
    if least >= 0 and greatest <= 1:
        guess = (
            f"probabilities? All lie in [0, 1]; {name}.log() has their log-probs, or -{name} if "
            "they are -log p"
        )
    return greatest, guess


def _are_probabilities(_: str, logits: Tensor, mask: Tensor | None) -> _Words:
    """A sign if each row is in [0, 1] and sums to 1."""
    rows = _few(logits, logits.dim() - 1)
    sample = rows[..., : SAMPLE // (2 * _ROWS)]
    if mask is not None:
        kept = _few(mask, mask.dim()) != 0
        sample, rows = sample[kept], rows[kept]
    if not ((sample >= 0) & (sample <= 1)).all():  # most often
        return None
    total = rows.sum(-1, dtype=torch.float32)
    are_1 = (total - 1).abs() < _ROUNDING
    is_sign = total.numel() > 0 and bool(are_1.all() and ((rows >= 0) & (rows <= 1)).all())
    return (shape_text(logits),) if is_sign else None


def _have_mass_above_1(_: str, logprobs: Tensor, mask: Tensor | None) -> _Words:
    """The greatest sum of a token's K probabilities, if it is above 1 by more than rounding."""
    rows = _few(logprobs, logprobs.dim() - 1)
    total = rows.float().expm1().sum(-1) + rows.shape[-1]  # not exp: see _are_no_vocabulary
    total = torch.where(total > 1 + _ROUNDING, total, 0)
    if mask is not None:
        total = torch.where(_few(mask, mask.dim()) != 0, total, 0)
    mass = total.max().item()
    return (mass,) if mass else None


def _are_of_tokens(_: str, logits: Tensor, mask: Tensor | None) -> _Words:
    """A sign if [N, V] logits are probably log-probs of sampled tokens, [B, T].

    Most rows of such log-probs have over 32 numbers in no order, none of which is above 0, and
    their probabilities do not sum to 1. The probabilities of a vocabulary sum to 1, and a part of
    them to less. A teacher's top log-probs come in order of size, perhaps after the sampled token.
    Other logits have numbers above 0, are all far below 0, or have one 0 if their maximum was
    subtracted. Logits of a few classes are often all a little below 0.
    """
    if logits.shape[1] <= _SMALL:
        return None
    step = -(-logits.shape[0] // _ROWS)
    rows = logits[::step]
    sample = rows[:, : SAMPLE // _ROWS]
    if mask is None and sample.max().item() > TOLERANCE:  # most often
        return None
    if mask is not None:
        kept = mask[::step] != 0
        sample, rows = sample[kept], rows[kept]
    is_part = sample.shape[1] < rows.shape[1]
    is_sign = _are_no_vocabulary(sample, is_part=is_part) and (
        not is_part or _are_no_vocabulary(rows, is_part=False)
    )
    return (shape_text(logits),) if is_sign else None


_SIGNS: dict[str, Callable[[str, Tensor, Tensor | None], _Words]] = {
    "weights that cancel": _cancel,
    "NaN log-probs": lambda _, logprobs, __: () if bool(_spread(logprobs).isnan().any()) else None,
    "positive log-probs": _are_positive,
    "mass above 1": _have_mass_above_1,
    "log-probs as logits": _are_of_tokens,
    "probabilities as logits": _are_probabilities,
}


def _are_no_vocabulary(rows: Tensor, *, is_part: bool) -> bool:
    if not has_float64(rows.device):
        rows = rows.cpu()
    if not ((rows <= TOLERANCE) & (rows > -torch.inf)).all():
        return False
    # Not exp: MKL's takes threads for a few numbers, which a forked process has lost.
    total = rows.double().expm1().sum(-1) + rows.shape[1]
    is_off = total > 1.1  # log-probs in bf16 sum to 1 within 2 %
    if not is_part:  # which may have any mass below 1
        is_off |= (total > 1e-3) & (total < 0.9)
    zeros = (rows == 0).sum(-1)
    is_off &= (zeros != 1) & (zeros != rows.shape[1]) & ~_are_in_order(rows)
    return bool(2 * is_off.sum() > rows.shape[0])


def _are_in_order(rows: Tensor) -> Tensor:
    """[N]: True if nine of ten unequal neighbours go in one direction, or if all are equal."""
    before, after = rows[:, :-1], rows[:, 1:]
    rises, falls = (after > before).sum(-1), (after < before).sum(-1)
    return (rises - falls).abs() >= _ORDERED * (rises + falls)


def _few(tensor: Tensor, dims: int) -> Tensor:
    """A view of some 9 entries, evenly spread over the first ``dims`` dimensions."""
    most = 3 if dims > 1 else _ROWS
    steps = (slice(None, None, max(-(-n // most), 1)) for n in tensor.shape[:dims])
    return tensor[tuple(steps)]


def _spread(tensor: Tensor) -> Tensor:
    """A view of tokens of [B, T] or [N], in runs of neighbours, which are in one cache line."""
    if tensor.numel() <= SAMPLE:
        return tensor
    columns = SAMPLE
    if tensor.dim() == 2:
        rows = max(_ROWS, SAMPLE // tensor.shape[1])
        tensor = tensor[:: -(-tensor.shape[0] // rows)]
        columns = SAMPLE // tensor.shape[0]
    if tensor.shape[-1] <= columns:
        return tensor
    room = tensor.shape[-1] - _RUN
    return tensor.unfold(-1, _RUN, -(-room // (columns // _RUN - 1)))
