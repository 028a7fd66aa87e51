"""The calls whose answers are known: small ones, which run the kernels that most calls run.

Inputs are integers from a formula, divided by a power of 2 and exact in bf16: the same numbers on
every machine, without a generator. Of log-probs every other 256 tokens have |x| <= 1, as near a
reference; the others reach 4. A sequence of 9,001 tokens has two segments, and starts off the
addresses of vectors if it is the second. Rows of 15,101 words in fp32 need a cluster of blocks.

``tests/support/known_answers.py`` writes what the reference says of them in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from klfast.call import PenaltyCall, penalty_call, rewards_call
from klfast.calls import Call
from klfast.estimator import Estimator
from klfast.linear.call import LinearCall
from klfast.logits import autograd as over_logits
from klfast.logits.call import (
    DIVERGENCES,
    ENTROPIES,
    KLDivergenceCall,
    TokenLogprobsCall,
    kl_divergence_call,
    token_logprobs_call,
)
from klfast.ops import autograd as over_logprobs
from klfast.ops import rollout
from klfast.ops.table import Ops
from klfast.rollout.call import RolloutCall, rollout_call
from klfast.rollout.rejection import Rejection

Place = Callable[[Tensor], Tensor]
"""Puts a tensor made on the CPU where the call is to run."""

BF16, FP32 = torch.bfloat16, torch.float32


class KnownCall(NamedTuple):
    """A call, and the gradients that come in where it is differentiated."""

    name: str
    call: Call
    incoming: tuple[Tensor, ...] = ()
    """One per result that is not None, of those that have a gradient; () is no gradient."""


def integers(shape: tuple[int, ...], seed: int, least: int, past: int) -> Tensor:
    """Integers from ``least`` on, below ``past``."""
    i = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu") + 1000 * seed
    mixed = (i * i * 40503 + i * 2654435761) >> 12
    return (mixed % (past - least) + least).view(shape)


def _log_probs(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype, place: Place
) -> tuple[Tensor, Tensor]:
    first = integers(shape, seed, -192, -64)
    near = first + integers(shape, seed + 1, -63, 64)
    is_near = torch.arange(shape[-1], device="cpu") // 256 % 2 == 0
    second = torch.where(is_near, near, integers(shape, seed + 2, -255, 1))
    return place(first.to(dtype) / 64), place(second.to(dtype) / 64)


def _logits(shape: tuple[int, ...], seed: int, dtype: torch.dtype, place: Place) -> list[Tensor]:
    first = integers(shape, seed, -96, 96)
    second = first + integers(shape, seed + 1, -32, 32)
    return [place(model.to(dtype) / 16) for model in (first, second)]


def _incoming(shape: tuple[int, ...], seed: int, place: Place) -> Tensor:
    return place(integers(shape, seed, 32, 96).to(FP32) / 64)


def _factor(place: Place) -> Tensor:
    """A scalar's incoming gradient: by a power of 2 no gradient in bf16 is rounded again."""
    return place(torch.tensor(0.5, device="cpu"))


def _padded(seed: int, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 log-probs of two models [2, 9001], and a mask."""
    shape = (2, 9001)
    return *_log_probs(shape, seed, BF16, place), place(integers(shape, seed + 3, 0, 5) > 0)


def _packed(seed: int, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 log-probs of two models [12289], off the addresses of vectors, and cu_seqlens."""
    first, second = _log_probs((12290,), seed, FP32, place)
    ends = torch.tensor([0, 5, 5, 9001, 12289], dtype=torch.int32, device="cpu")
    return first[1:], second[1:], place(ends)


def _penalty_calls(place: Place) -> list[KnownCall]:
    first, second, mask = _padded(1, place)
    old = _log_probs((2, 9001), 5, BF16, place)[0]
    packed, packed_ref, ends = _packed(9, place)
    clipped = Estimator("k3", log_ratio_clip=2.01, kl_clip=4.1, importance_cap=2.5)
    return [
        KnownCall(
            "bf16, padded, token-mean",
            penalty_call(first, second, mask, "k3", "token-mean", None, None, None, 0.5, True),
            (_factor(place),),
        ),
        KnownCall(
            "fp32, packed, seq-mean",
            penalty_call(packed, packed_ref, None, "k3", "seq-mean", ends, None, None, 1.0, False),
            (_incoming((4,), 14, place),),
        ),
        KnownCall(
            "bf16, weighted and clipped, seq-mean-token-mean",
            penalty_call(
                first, second, mask, clipped, "seq-mean-token-mean", None, old, None, 1.0, True
            ),
            (_factor(place),),
        ),
        KnownCall(
            "bf16, rewards",
            rewards_call(_incoming((2,), 15, place), first, second, mask, 0.25, "k1", None, True),
        ),
    ]


def _token_calls(place: Place) -> list[KnownCall]:
    logits, _ = _logits((3, 9001), 16, BF16, place)
    warm, _ = _logits((2, 4096), 18, FP32, place)
    ids, mask = integers((3,), 20, 0, 9001), torch.tensor([True, False, True], device="cpu")
    in_place = token_logprobs_call(warm, place(ids[:2] % 4096), None, None, 0.5, False, False)
    return [
        KnownCall(
            "bf16, with entropies",
            token_logprobs_call(logits, place(ids), place(mask), None, 1.0, True, False),
            (_incoming((3,), 21, place), _incoming((3,), 22, place)),
        ),
        KnownCall(
            "fp32, in place",
            in_place._replace(inplace_backward=True),
            (_incoming((2,), 23, place),),
        ),
    ]


def _divergence_calls(place: Place) -> list[KnownCall]:
    first, second = _logits((5, 4001), 24, BF16, place)
    wide, wide_ref = _logits((2, 15101), 26, FP32, place)
    mask = place(torch.tensor([True, True, False, True, True], device="cpu"))
    ids = place(integers((2,), 28, 0, 15101))
    packed = (None, None, 1.0)  # cu_seqlens, normalizer, coef
    return [
        KnownCall(
            "bf16, KL, token-mean",
            kl_divergence_call(
                first, second, mask, "reverse", 0.5, 1.0, "token-mean", *packed, None, False, False
            ),
            (_factor(place),),
        ),
        KnownCall(
            "fp32, JSD, with tokens and entropies",
            kl_divergence_call(
                wide, wide_ref, None, "jsd", 0.5, 1.0, "none", *packed, ids, False, True
            ),
            tuple(_incoming((2,), seed, place) for seed in (30, 31, 32, 33)),
        ),
    ]


def _rollout_calls(place: Place) -> list[KnownCall]:
    first, second, mask = _padded(34, place)
    packed, packed_ref, ends = _packed(38, place)
    rules = (Rejection("k3", high=2.1), Rejection("ratio", "seq-mean", low=0.3, high=3.3))
    return [
        KnownCall(
            "bf16, weights of tokens, rules",
            rollout_call(
                first, second, mask, "token", None, 2.2, "truncate", rules, None, None, None
            ),
        ),
        KnownCall(
            "fp32, packed, geometric weights",
            rollout_call(
                packed, packed_ref, None, "geometric", 0.3, 3.3, "mask", (), None, ends, None
            ),
        ),
    ]


CALLS: dict[str, Callable[[Place], list[KnownCall]]] = {
    "kl_penalty": _penalty_calls,
    "token_logprobs": _token_calls,
    "kl_divergence": _divergence_calls,
    "rollout_correction": _rollout_calls,
}
"""By the name of the public function, which two families have: with gradients, and without."""


def ops_of(call: Call) -> tuple[tuple[str, ...], Sequence[Tensor | None]]:
    """The names in ``CALLS`` of the kernels of a call, and its tensors that may have a gradient."""
    if isinstance(call, RolloutCall):
        return ("rollout_correction",), ()
    if isinstance(call, PenaltyCall):
        return ("kl_penalty",), () if call.scores is not None else call.tensors()[:2]
    if isinstance(call, TokenLogprobsCall):
        return ("token_logprobs",), (call.logits,)
    if isinstance(call, LinearCall):
        return ("token_logprobs", "kl_divergence"), call.tensors()
    return ("kl_divergence",), (call.logits, call.ref_logits)


def results(op: str, calls: list[KnownCall], ops: Ops) -> dict[str, Tensor]:
    """The results of calls by name, without autograd where gradients are off."""
    return named({known.name: FORWARDS[op](known.call, ops) for known in calls})


def gradients(op: str, calls: list[KnownCall], ops: Ops) -> dict[str, Tensor]:
    """The gradients of calls, and the results that come with them, by name.

    Autograd has no part in it: it would call a user's hooks of saved tensors, and checkpointing
    counts these.
    """
    return named({k.name: GRADIENTS[op](k, ops) for k in calls if k.incoming})


def named(value: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors in dicts and tuples, by the names or places that lead there."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, dict):
        fields = value
    elif isinstance(value, tuple):
        fields = dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        return {}
    tensors: dict[str, Tensor] = {}
    for key, field in fields.items():
        tensors |= named(field, f"{name}: {key}" if name else str(key))
    return tensors


FORWARDS: dict[str, Callable[[Any, Ops], Any]] = {
    "kl_penalty": over_logprobs.kl_penalty,
    "token_logprobs": over_logits.token_logprobs,
    "kl_divergence": over_logits.kl_divergence,
    "rollout_correction": rollout.rollout_correction,
}
"""The results of a call by ops; without autograd where gradients are off."""


def _penalty_gradients(known: KnownCall, ops: Ops) -> dict[str, Tensor]:
    call = cast(PenaltyCall, known.call)
    (grad_out,) = known.incoming
    arguments = *call.tensors(), *call.spec.encoded()
    if call.spec.reduction.is_scalar():
        result, _, _, *grads = ops.kl_penalty_fwd(*arguments, None, False, True, True, False)
        _scale(grads, grad_out, ops)
    else:
        result, weights, *_ = ops.kl_penalty_fwd(*arguments, None, True, False, False, False)
        grads = [*ops.kl_penalty_bwd(*arguments, grad_out, weights, True, True)]
    return {"result": result, "grad": grads[0], "grad_ref": grads[1]}


def _token_gradients(known: KnownCall, ops: Ops) -> dict[str, Tensor]:
    call = cast(TokenLogprobsCall, known.call)
    tensors, inverse = (call.logits, call.token_ids, call.keep), call.inverse_temperature
    result, entropy, saved = ops.token_logprobs_fwd(
        *tensors, call.temperature, call.return_entropy, inverse
    )
    of_entropy = known.incoming[1] if call.return_entropy else None
    rest = saved, result, entropy, call.temperature, known.incoming[0], of_entropy, inverse
    if not call.inplace_backward:
        return {"result": result, "grad": ops.token_logprobs_bwd(*tensors, *rest)}
    ops.token_logprobs_bwd_(*tensors, *rest)
    return {"result": result, "grad": call.logits}


def _divergence_gradients(known: KnownCall, ops: Ops) -> dict[str, Tensor]:
    call = cast(KLDivergenceCall, known.call)
    divergence = DIVERGENCES.index("jsd" if call.direction == "jsd" else "kl")
    entropy_of = ENTROPIES.index("first" if call.return_entropy else "none")
    tensors = call.logits, call.ref_logits, call.token_ids, call.keep
    arguments = *tensors, divergence, call.jsd_beta, call.temperature, entropy_of
    is_one_read, inverse = call.spec.reduction.is_scalar(), call.inverse_temperature
    weights = over_logits.row_weights(call, ops) if is_one_read else None
    rows, _, _, saved, *grads, entropy = ops.kl_divergence_fwd(
        *arguments, weights, is_one_read, is_one_read, inverse
    )
    if is_one_read:
        _scale(grads, known.incoming[0], ops)
    else:
        incoming = rows, saved, entropy, *known.incoming
        grads = [*ops.kl_divergence_bwd(*arguments, *incoming, True, True, inverse)]
    result, _ = over_logprobs.kl_penalty(call.reduce(rows), ops)
    found = {"result": result, "grad": grads[0], "grad_ref": grads[1]}
    if weights is None:
        return found
    return found | _in_place(call, weights, known.incoming[0], ops)


def _in_place(
    call: KLDivergenceCall, weights: Tensor, factor: Tensor, ops: Ops
) -> dict[str, Tensor]:
    """The same of a one-read call by the ops that leave gradients in the memory of the logits."""
    divergence = DIVERGENCES.index("jsd" if call.direction == "jsd" else "kl")
    options = call.keep, divergence, call.jsd_beta, call.temperature
    both = (True, True, call.inverse_temperature)
    first, again = ([t.clone() for t in (call.logits, call.ref_logits)] for _ in range(2))
    rows, saved = ops.kl_divergence_fwd_(*first, *options, weights, *both)
    _scale(first, factor, ops)
    ops.kl_divergence_bwd_(*again, *options, rows, saved, weights * factor, *both)
    result, _ = over_logprobs.kl_penalty(call.reduce(rows), ops)
    named = zip(ALONE, (result, *first, *again), strict=True)
    return dict(named)


ALONE = {
    "result in place": "result",
    "grad in place": "grad",
    "grad_ref in place": "grad_ref",
    "grad again": "grad",
    "grad_ref again": "grad_ref",
}
"""What the ops in place say of a call, and the results that these must be."""


def _scale(grads: list[Tensor], factor: Tensor, ops: Ops) -> None:
    for grad in grads:
        ops.scale_(grad, factor)


GRADIENTS: dict[str, Callable[[KnownCall, Ops], dict[str, Tensor]]] = {
    "kl_penalty": _penalty_gradients,
    "token_logprobs": _token_gradients,
    "kl_divergence": _divergence_gradients,
}
"""By ops alone, the gradients of a call, and the result that comes with them."""
