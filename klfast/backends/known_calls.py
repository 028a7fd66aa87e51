"""The calls whose answers are known: small ones, which run the kernels that most calls run.

Inputs are integers from a formula, divided by a power of 2 and exact in bf16: the same numbers on
every machine, without a generator. Every second run of 256 tokens has log-probs with |x| <= 1, as
near a reference. In the others |x| reaches 4. A sequence of 9,001 tokens has two segments, and
starts off the addresses of vectors if it is the second. Rows of 15,101 entries in fp32 need a
cluster of blocks.

``tests/support/known_answers.py`` writes what the reference says of them in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from klfast.args.estimator import Estimator
from klfast.args.logits import Chosen, Logits
from klfast.args.penalty import PenaltyCall, Reducing, penalty_call, rewards_call
from klfast.args.rollout import RolloutCall
from klfast.args.rows import RowsArgs
from klfast.args.signature import Tokens
from klfast.autograd import penalty as over_logprobs
from klfast.backends.backend import Call
from klfast.backends.compiled import rows
from klfast.ops.schemas import Ops

Place: TypeAlias = Callable[[Tensor], Tensor]
"""Puts a tensor made on the CPU where the call is to run."""

Known: TypeAlias = dict[str, tuple[Call, tuple[int, ...]]]
"""Calls by name. Each has a seed of the incoming gradient per differentiable result; () is no
gradient."""

Run: TypeAlias = Callable[[Any], Any]  # the results of a call

BF16, FP32 = torch.bfloat16, torch.float32


def integers(shape: Sequence[int], seed: int, least: int, past: int) -> Tensor:
    """Integers from ``least`` on, below ``past``."""
    i = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu") + 1000 * seed
    # The low bits of a product repeat early.
    mixed = (i * i * 40503 + i * 2654435761) >> 12
    return (mixed % (past - least) + least).view(*shape)


def incoming(output: Tensor, seed: int) -> Tensor:
    """The incoming gradient. A scalar's is a power of 2, which rounds no gradient in bf16."""
    grad = integers(output.shape, seed, 32, 96) / 64 if output.dim() else torch.tensor(0.5)
    return grad.to(output)


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


def _padded(seed: int, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 log-probs of two models [2, 9001], and a mask."""
    shape = (2, 9001)
    return *_log_probs(shape, seed, BF16, place), place(integers(shape, seed + 3, 0, 5) > 0)


def _packed(seed: int, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 log-probs of two models [12289], off the addresses of vectors, and cu_seqlens."""
    first, second = _log_probs((12290,), seed, FP32, place)
    ends = torch.tensor([0, 5, 5, 9001, 12289], dtype=torch.int32, device="cpu")
    return first[1:], second[1:], place(ends)


def _penalty_calls(place: Place) -> Known:
    first, second, mask = _padded(1, place)
    old = _log_probs((2, 9001), 5, BF16, place)[0]
    packed, packed_ref, ends = _packed(9, place)
    scores = place(integers((2,), 15, 32, 96).to(FP32) / 64)
    # Limits that no input meets exactly, where a rounding would decide.
    clipped = Estimator("k3", log_ratio_clip=2.01, kl_clip=4.1, importance_cap=2.5)
    of_tokens = (first, second, mask)
    reducing = Reducing("token-mean", coef=0.5, return_stats=True)
    token_mean = penalty_call(*of_tokens, "k3", reducing)
    reducing = Reducing("seq-mean", cu_seqlens=ends)
    seq_mean = penalty_call(packed, packed_ref, None, "k3", reducing)
    reducing = Reducing("seq-mean-token-mean", return_stats=True)
    weighted = penalty_call(*of_tokens, clipped, reducing, old)
    rewards = rewards_call(scores, *of_tokens, "k1", Reducing(coef=0.25, return_stats=True))
    return {
        "bf16, padded, token-mean": (token_mean, (0,)),
        "fp32, packed, seq-mean": (seq_mean, (14,)),
        "bf16, weighted and clipped, seq-mean-token-mean": (weighted, (0,)),
        "bf16, rewards": (rewards, ()),
    }


def _token_calls(place: Place) -> Known:
    logits, _ = _logits((3, 9001), 16, BF16, place)
    warm, _ = _logits((2, 4096), 18, FP32, place)
    ids = place(integers((3,), 20, 0, 9001))
    mask = place(torch.tensor([True, False, True], device="cpu"))
    tokens = Tokens.of("token_logprobs", logits)
    entropies = RowsArgs.of(
        tokens, Logits.of(tokens), mask=mask, token_ids=ids, return_entropy=True
    )
    tokens = Tokens.of("token_logprobs", warm)
    in_place = RowsArgs.of(
        tokens, Logits.of(tokens), mask=None, temperature=0.5, token_ids=ids[:2] % 4096
    )._replace(inplace_backward=True)
    return {
        "bf16, with entropies": (entropies, (21, 22)),
        "fp32, in place": (in_place, (23,)),
    }


def _divergence_calls(place: Place) -> Known:
    first, second = _logits((5, 4001), 24, BF16, place)
    wide, wide_ref = _logits((2, 15101), 26, FP32, place)
    mask = place(torch.tensor([True, True, False, True, True], device="cpu"))
    ids = place(integers((2,), 28, 0, 15101))
    tokens, kl = Tokens.of("kl_divergence", first), Chosen.of("reverse")
    source, reducing = Logits.of(tokens, second, kl), Reducing("token-mean")
    token_mean = RowsArgs.of(tokens, source, mask=mask, chosen=kl, reducing=reducing)
    tokens, jsd = Tokens.of("kl_divergence", wide), Chosen.of("jsd")
    with_tokens = RowsArgs.of(
        tokens,
        Logits.of(tokens, wide_ref, jsd),
        mask=None,
        token_ids=ids,
        return_entropy=True,
        chosen=jsd,
        reducing=Reducing(),
    )
    return {
        "bf16, KL, token-mean": (token_mean, (0,)),
        "fp32, JSD, with tokens and entropies": (with_tokens, (30, 31, 32, 33)),
    }


def _token_logprobs(args: RowsArgs, ops: Ops) -> tuple[Tensor | None, Tensor | None]:
    outputs = rows(args, ops)
    return outputs.logprobs, outputs.entropy


FUNCTIONS: dict[str, tuple[Callable[[Place], Known], Callable[..., Any]]] = {
    "kl_penalty": (_penalty_calls, over_logprobs.kl_penalty),
    "token_logprobs": (_token_calls, _token_logprobs),
    "kl_divergence": (_divergence_calls, rows),
}
"""By the name of the public function: its calls, and the results of a call by ``ops``."""


def ops_of(call: Call) -> tuple[tuple[str, ...], Sequence[Tensor | None]]:
    """The functions whose kernels a call takes, and its tensors that may have a gradient."""
    if isinstance(call, RolloutCall):
        return (), ()
    if isinstance(call, PenaltyCall):
        return ("kl_penalty",), () if call.scores is not None else call.tensors()[:2]
    return call.families(), call.source.tensors


def results(calls: Known, run: Run) -> dict[str, Tensor]:
    """The results of calls by name, without gradient."""
    with torch.no_grad():
        return named({name: run(call) for name, (call, _) in calls.items()})


def gradients(calls: Known, run: Run, ops: Ops | None = None) -> dict[str, Tensor]:
    """The gradients of calls and the first result of each, by name. ``ops`` adds the gradients that
    the ops in place make.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, (call, seeds) in calls.items():
        if not seeds:
            continue
        outputs = [*named(run(call)).values()]
        graded = [output for output in outputs if output.requires_grad]
        sent = [incoming(output, seed) for output, seed in zip(graded, seeds, strict=True)]
        inputs = [tensor for tensor in ops_of(call)[1] if tensor is not None]
        grads = zip(("grad", "grad_ref"), gradients_of(graded, sent, inputs), strict=False)
        found[name] = {"result": outputs[0], **dict(grads)}
        if ops is not None and isinstance(call, RowsArgs) and outputs[0].dim() == 0:
            found[name] |= _in_place(call, sent[0], ops)
    return {name: tensor.detach() for name, tensor in named(found).items()}


def gradients_of(
    outputs: Sequence[Tensor], sent: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients by one backward, for those that come in."""
    # One scalar needs no grad_outputs, for whose shapes torch imports sympy.
    products = [(output * grad).flatten() for output, grad in zip(outputs, sent, strict=True)]
    return torch.autograd.grad(torch.cat(products).sum(), inputs, materialize_grads=True)


def named(value: Any, name: str = "", separator: str = ": ") -> dict[str, Tensor]:
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
        tensors |= named(field, f"{name}{separator}{key}" if name else str(key), separator)
    return tensors


@torch.no_grad()
def _in_place(call: RowsArgs, factor: Tensor, ops: Ops) -> dict[str, Tensor]:
    """A scalar KL by the ops that leave gradients in the memory of the logits."""
    options = call.keep, *call.options()
    both = (True, True, call.inverse_temperature)
    like = torch.zeros(call.shape, dtype=call.dtype, device=call.device)
    reducer = over_logprobs.RowReducer(call.reduction_call(like), ops)
    weights = reducer.weights(call.dtype)
    first, again = ([t.clone() for t in call.source.tensors if t is not None] for _ in range(2))
    kl, saved = ops.kl_divergence_fwd_(*first, *options, weights, *both)
    for grad in first:
        ops.scale_(grad, factor)
    ops.kl_divergence_bwd_(*again, *options, kl, saved, weights * factor, *both)
    result, _ = reducer.reduce(kl)
    return dict(zip(IN_PLACE, (result, *first, *again), strict=True))


IN_PLACE = {
    "result in place": "result",
    "grad in place": "grad",
    "grad_ref in place": "grad_ref",
    "grad again": "grad",
    "grad_ref again": "grad_ref",
}
"""The results of the ops in place, and the expected results."""
