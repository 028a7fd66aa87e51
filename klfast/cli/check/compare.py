"""The truth of a call, the allowed error of a result, and the values that are off by more.

The truth is the reference backend's result on the stored inputs in float64. A result may be off by

    4 rms + (promise + eps) |truth|

The rms is how far the truth moves in ``_moved``. That function adds to every token the error that
rounding in the arithmetic's dtype may cause, with random signs, as rounding errors add up. The
promise is 4e-7 in fp32 for a token's value near 0, or 2e-6 for a sum over a vocabulary. The eps
belongs to the result's dtype, because a gradient of a scalar is rounded to it twice. At a masked
token no error is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.cli.check.calls import CPU, OF_POLICY, OF_REFERENCE, Call, Tensors, run
from klfast.stats.kl import OF_TOKENS

PROMISE, OF_LOGITS = 4e-7, 2e-6
"""Relative errors in fp32: of a token's number for abs(x) <= 1, and of a sum over a vocabulary."""

# How far each run moves each kind of rounding. The squares of a kind sum to 1 over the runs, and no
# kind hides another.
ALONE = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))

# The same, with three draws of signs for each kind. Calls over a vocabulary need them: log-sum-exps
# and gradients of heads move by sums, which one draw may cancel.
TOGETHER = ((2 / 3, 2 / 3, -1 / 3), (2 / 3, -1 / 3, 2 / 3), (-1 / 3, 2 / 3, 2 / 3))

_DEVIATIONS = 4

Sign = Callable[[Tensor], Tensor]


class Wrong(NamedTuple):
    """A fault of a result: its worst entry."""

    output: str
    got: str
    expected: str
    error: str
    tolerance: str


class Results(NamedTuple):
    """Results of a backend in float64 on the CPU, and the dtypes that they had."""

    values: Tensors
    dtypes: dict[str, torch.dtype]


class Truth(NamedTuple):
    """Every output of a call in float64, its dtype, and how far each entry may be from it."""

    values: Tensors
    dtypes: dict[str, torch.dtype]
    allowed: Tensors


def found_by(call: Call, backend: str, device: torch.device = CPU) -> Results:
    """The results of a call."""
    results = run(call, backend, device)
    return Results(
        {name: t.double().cpu() for name, t in results.items()},
        {name: t.dtype for name, t in results.items()},
    )


def truth_of(call: Call) -> Truth:
    """The reference's results, and what rounding may make of them."""
    # A teacher's log-probs at some ids do not count.
    of_model = ("logits", *OF_POLICY) if call.words else ("logprobs",)
    models = [t for name, t in call.tensors.items() if name.endswith(of_model)]
    is_double = any(t.dtype == torch.float64 for t in models)
    arithmetic = torch.float64 if is_double else torch.float32
    wide = {n: t.double() if t.is_floating_point() else t for n, t in call.tensors.items()}
    values = found_by(replace(call, tensors=wide, memory="dense"), "reference").values
    squares = {name: torch.zeros((), device="cpu") for name in values}
    of_a_third = call.tensors.keys() & {"old_logprobs", "rollout_logprobs"}
    runs = TOGETHER if call.words else ALONE[: 2 + len(of_a_third)]
    for seed, sizes in enumerate(runs):
        moved = wide | _moved(call, wide, arithmetic, seed, sizes)
        for name, other in found_by(
            replace(call, tensors=moved, memory="dense"), "reference"
        ).values.items():
            # Two equal infinities differ by 0, and not by NaN.
            difference = torch.where(values[name] == other, 0.0, values[name] - other)
            squares[name] = squares[name] + difference.nan_to_num(0.0).square()
    dtypes = {name: _dtype_of(call, arithmetic, name) for name in values}
    allowed = {
        name: _allowed(call, arithmetic, name, dtypes[name], value, _DEVIATIONS * rms.sqrt())
        for (name, value), rms in zip(values.items(), squares.values(), strict=True)
    }
    return Truth(values, dtypes, allowed)


def _dtype_of(call: Call, arithmetic: torch.dtype, name: str) -> torch.dtype:
    """The dtype that an output must have."""
    if name.startswith("gradient of "):
        return call.tensors[name.removeprefix("gradient of ")].dtype
    # A mask comes back in its own dtype.
    if call.function == "rollout_correction" and name == "mask":
        return call.tensors["mask"].dtype if "mask" in call.tensors else torch.bool
    return arithmetic


def _unit(arithmetic: torch.dtype) -> float:
    return torch.finfo(arithmetic).eps / 2


def _scaled(promise: float, arithmetic: torch.dtype) -> float:
    """A promise in fp32, in a dtype."""
    return promise * _unit(arithmetic) / _unit(torch.float32)


def _moved(
    call: Call, tensors: Tensors, arithmetic: torch.dtype, seed: int, sizes: Sequence[float]
) -> Tensors:
    """The truth after each token has moved by its allowed error times a size, with random signs."""
    generator = torch.Generator(device="cpu").manual_seed(1 + seed)
    of_kinds = iter(sizes)
    unit = _unit(arithmetic)
    # In fp64 the reference's own rounding counts as much as the backend's.
    textbook = 16 * unit if arithmetic == torch.float64 else 0.0  # what the reference cancels

    def sign(like: Tensor) -> Tensor:
        size = next(of_kinds)
        if size == 0:
            return torch.zeros((), device="cpu")
        ones = torch.randint(2, like.shape, generator=generator, device="cpu")
        return size * (2.0 * ones - 1).to(like.device)

    first = call.policy
    if call.words:
        if "hidden" in tensors:
            moved = _moved_models(tensors, unit, sign)
        else:
            moved = _moved_logits(tensors, unit, textbook, arithmetic, sign)
        ones = torch.ones(first.shape[:-1], dtype=first.dtype, device="cpu")
        mask = tensors.get("mask", ones)
        weight = 1 + _scaled(OF_LOGITS, arithmetic) * sign(mask)
        return moved | {"mask": torch.where(mask == 0, 0.0, mask * weight)}
    names = [name for name in tensors if name.endswith("logprobs")]
    first, second = (tensors[name] for name in names[:2])
    promise = _scaled(PROMISE, arithmetic)
    x = first - second
    off = promise * x.abs() + textbook * x.abs().clamp(min=1)
    a = first
    if names[1] == "rollout_logprobs":  # whose binary divergences and perplexities depend on it
        a = first * (1 + promise * sign(x))
    found = {names[0]: a, names[1]: a - x - off * sign(x)}
    if "old_logprobs" in tensors:
        log_weight = first - tensors["old_logprobs"]
        off = promise * log_weight.abs().clamp(min=1)
        found["old_logprobs"] = a - log_weight - off * sign(x)
    # Infinities stay, and no weight of a far token becomes negative.
    found = {name: torch.where(t.isfinite(), t, tensors[name]) for name, t in found.items()}
    mask = tensors.get("mask", torch.ones_like(first))
    weight = 1 + (promise + 2 * unit * x.abs()).nan_to_num(0.0).clamp(max=0.5) * sign(x)
    return found | {"mask": torch.where(mask == 0, 0.0, mask * weight)}


def _moved_logits(
    tensors: Tensors, unit: float, textbook: float, arithmetic: torch.dtype, sign: Sign
) -> Tensors:
    """Both models' logits, moved together, and log-ratios moved by themselves."""
    first = tensors["logits"]
    distance = first - first.amax(-1, keepdim=True)
    distance = torch.where(distance.isfinite(), distance.abs(), 0.0)
    # A kernel subtracts a guess of the greatest logit, so that a logit far from it loses digits.
    off = unit * (3 * distance + 16) * sign(first)
    found = {"logits": first + off}
    if "ref_logits" in tensors:
        second = tensors["ref_logits"]
        apart = second - first
        largest = torch.where(apart.isfinite(), apart.abs(), 0.0).amax(-1, keepdim=True)
        promise = _scaled(OF_LOGITS, arithmetic) * largest + textbook * (1 + distance)
        moved = second + off + promise * sign(first)
        found["ref_logits"] = torch.where(apart.isfinite(), moved, second)
    return found


def _moved_models(tensors: Tensors, unit: float, sign: Sign) -> Tensors:
    """Each model's hidden states and head, moved by the error of the logits that they make."""
    found = {}
    for of_model in (OF_POLICY, OF_REFERENCE):
        own = {name: tensors[name] for name in of_model if name in tensors}
        if own:  # one kind of rounding a model
            signs = sign(torch.cat([t.flatten() for t in own.values()]))
            parts = torch.split(signs, [t.numel() for t in own.values()])
            for (name, t), part in zip(own.items(), parts, strict=True):
                found[name] = t * (1 + 16 * unit * part.view(t.shape))
    return found


def wrong_of(truth: Truth, found: Results) -> list[Wrong]:
    """The results that are further from the truth than allowed."""
    if missing := truth.values.keys() ^ found.values.keys():
        return [Wrong(name, "missing, or unasked for", "-", "-", "-") for name in sorted(missing)]
    outcomes = (_wrong_in(truth, name, found) for name in truth.values)
    return [wrong for wrong in outcomes if wrong is not None]


def _wrong_in(truth: Truth, name: str, found: Results) -> Wrong | None:
    got, expected, dtype = found.values[name], truth.values[name], found.dtypes[name]
    if got.shape != expected.shape:
        return Wrong(name, f"shape {list(got.shape)}", f"shape {list(expected.shape)}", "-", "-")
    if dtype != truth.dtypes[name]:
        return Wrong(name, str(dtype), str(truth.dtypes[name]), "-", "-")
    allowed = truth.allowed[name]
    error = (got - expected).abs()
    # Else inf - inf, a NaN, would decide.
    right = expected.isfinite() & (error <= allowed)
    right |= (got == expected) | (got.isnan() & expected.isnan())
    if dtype.is_floating_point:  # beyond its range, infinity of the right sign
        beyond = expected.abs() + allowed > torch.finfo(dtype).max
        right |= beyond & got.isinf() & (got.sign() == expected.sign())
    if bool(right.all()):
        return None
    # The entry that is furthest off in tolerances, because entries differ in size.
    excess = torch.where(right, -1.0, (error / allowed).nan_to_num(torch.inf, torch.inf))
    at = tuple(torch.unravel_index(excess.argmax(), got.shape)) if got.dim() else ()
    where = f"{name}{[int(i) for i in at] if at else ''}, {int((~right).sum())} of {right.numel()}"
    numbers = (float(t[at]) for t in (got, expected, error, allowed))
    return Wrong(where, *(f"{number:.9g}" for number in numbers))


def _allowed(
    call: Call,
    arithmetic: torch.dtype,
    name: str,
    dtype: torch.dtype,
    value: Tensor,
    moved: Tensor,
) -> Tensor:
    """How far a result of a dtype may be from a value that moves so far."""
    expected = value.nan_to_num(0.0)
    info = torch.finfo(dtype if dtype.is_floating_point else arithmetic)
    relative = _scaled(OF_LOGITS if call.words else PROMISE, arithmetic) + info.eps
    if name.endswith(("hidden", "weight")) and expected.numel():  # a gradient: a row's entries are
        moved = moved.amax(-1, keepdim=True)  # sums of terms of one size, which a draw may cancel
    allowed = moved + relative * expected.abs()
    allowed += info.smallest_normal * info.eps + 1e3 * torch.finfo(torch.float32).tiny  # underflow
    unit = _unit(arithmetic)
    if expected.numel():  # the reference's own rounding
        allowed += 64 * _unit(torch.float64) * (1 + expected.abs().amax())
    if call.words:
        allowed += unit * _absolute(call, name)
    if call.words and name.startswith("gradient") and expected.numel():  # autograd adds outputs'
        allowed += info.eps * expected.abs().amax(-1, keepdim=True)
        if "ref_token_ids" in call.tensors and name.endswith(("weight", "bias")):
            # Rounded gradients of K log-probs reach every row of a head, where their sum may be 0.
            allowed += info.eps * expected.abs().amax()
    kept = call.kept
    if kept is not None and kept.dim() and expected.shape[: kept.dim()] == kept.shape:
        allowed[~kept] = 0.0
    return allowed


def _absolute(call: Call, name: str) -> float:
    """The absolute error of log-probs, entropies and per-token statistics, in units."""
    # log(1 + small) has no more digits than 1.
    if name.endswith(("logprobs", "entropy")) and "gradient" not in name:
        return 8.0
    # A log-ratio of tokens has the error of two log-probs.
    if name.removeprefix("stats.") in OF_TOKENS:
        return 64.0 * max(1, math.prod(call.policy.shape[:-1]))
    return 0.0
