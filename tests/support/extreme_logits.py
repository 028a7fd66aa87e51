"""Rows of logits so far from 0 that the log of a sum is lost beside their greatest; their truth.

Everything is textbook, in float64, after a row's greatest logit has been subtracted: that is exact
for logits near it. ``test_logits_extreme`` holds this to mpmath.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import oracle
import torch
from torch import Tensor

import klfast

EXTREME = (1e10, 1e14, 1e17, 1e20, 1e30, math.inf)
"""Heights of a row's greatest logits, in either sign, of dtypes that have them; infinity stands for
the largest number."""


def heights(dtype):
    """``EXTREME`` in a dtype, in both signs."""
    largest = largest_of(dtype)
    found = sorted({min(height, largest) for height in EXTREME})
    return [sign * height for height in found for sign in (1, -1)]


def largest_of(dtype):
    """In fp64 less than there is: the truth takes differences of two in it."""
    return torch.finfo(dtype).max / (4 if dtype == torch.float64 else 1)


def rows_at(height, words, dtype):
    """Rows [K, V] whose greatest logits are about ``height``."""
    largest, eps = largest_of(dtype), torch.finfo(dtype).eps
    place = torch.arange(words)
    some = 2 * torch.randn(words, dtype=torch.float64)
    level = torch.full((words,), height, dtype=torch.float64)
    lower = torch.full((words,), max(-2 * abs(height), -largest), dtype=torch.float64)
    last = place == words - 1
    grid = (1 - math.copysign(eps, height) * (place % 3)).double()
    rows = [
        level,
        torch.where(last | (place == 1), level, lower),
        torch.where(place % 3 == 1, level, -largest),
        torch.where(place % 3 == 2, level, -math.inf),
        level * grid,
    ]
    if height > 0:  # ordinary words besides
        rows += [torch.where(last, level, some), torch.where(place == 0, level, some)]
        rows += [torch.where(place % 4 == 0, level, torch.where(last, -math.inf, some))]
    return torch.stack(rows).clamp(-math.inf, largest).to(dtype)


def ordinary_rows(words, dtype):
    """Rows [K, V] that a kernel takes as they are."""
    some = 2 * torch.randn(3, words, dtype=torch.float64)
    some[1, ::3] = -largest_of(dtype)
    some[2, 1::2] = -math.inf
    return some.to(dtype)


def pairs(words, dtype):
    """(logits, ref_logits) [N, V]: extreme rows beside ordinary ones, each other and themselves."""
    plain = ordinary_rows(words, dtype)
    first, second = [], []
    for height in heights(dtype):
        own = rows_at(height, words, dtype)
        others = [plain, own, -own.clamp(min=-largest_of(dtype)), own.flip(0), 2e4 + plain]
        for other in others:
            rows = own.repeat(len(other), 1), other.repeat_interleave(len(own), 0)
            if len(other) == len(own):
                rows = own, other
            first += [*rows]
            second += [*rows[::-1]]
    return torch.cat(first), torch.cat(second)


class Model(NamedTuple):
    """Of rows, in float64."""

    logprobs: Tensor
    p: Tensor
    error: Tensor
    """By how much of itself each p may be off; one below fp32's smallest number may be missing."""
    unit: float
    """Of rounding: fp32's, and in fp64 some of its own, for what the truth itself may be off."""

    @classmethod
    def of(cls, logits, temperature, arithmetic=torch.float32):
        unit = 2.0**-47 if arithmetic == torch.float64 else 2.0**-24
        shifted = logits.double() - logits.double().amax(-1, keepdim=True)
        shifted = shifted / temperature
        logprobs = shifted - shifted.exp().sum(-1, keepdim=True).log()
        p = logprobs.exp()
        distance = (-logprobs).clamp(max=200)
        mean = (p * distance).sum(-1, keepdim=True)
        error = torch.where(p < 1e-36, 1.0, (8 + 2 * distance + 2 * mean) * unit)
        return cls(logprobs, p, error, unit)


def product(p, values):
    """The product, 0 where p is 0."""
    return torch.where(p == 0, 0.0, p * values)


def mean(p, values):
    return product(p, values).sum(-1, keepdim=True)


class Bounded(NamedTuple):
    """A number, and how far it may be off."""

    exact: Tensor
    tolerance: Tensor


class Truth(NamedTuple):
    """Of rows: a divergence and its gradients; ``held`` is KL of log-ratios that are held at the
    largest number of the arithmetic.
    """

    value: Bounded
    held: Tensor
    grads: tuple[Bounded, Bounded]


def kl(first: Model, second: Model, temperature, largest) -> Truth:
    p, q, unit = first.p, second.p, first.unit
    said = (first.logprobs > -math.inf) & (second.logprobs == -math.inf)
    u = torch.where(p == 0, 0.0, second.logprobs - first.logprobs)
    value = -mean(p, u)
    value = torch.where(said.any(-1, keepdim=True), math.inf, value)
    held = -mean(p, u.clamp(-largest, largest))
    off_u = 8 * unit * u.abs()
    off = mean(p, first.error * (1 + u.abs()) + off_u) + mean(q, second.error) + 32 * unit
    centered = -u - value
    grad = product(p, centered)
    grad_off = product(p, first.error * centered.abs() + off_u + off + 4 * unit * value.abs())
    change_off = p * first.error + q * second.error + 4 * unit * (p + q)
    return Truth(
        Bounded(value[:, 0], off[:, 0] + 8 * unit * held.abs()[:, 0]),
        held[:, 0],
        (
            Bounded(grad / temperature, grad_off / temperature),
            Bounded((q - p) / temperature, change_off / temperature),
        ),
    )


def jsd(first: Model, second: Model, temperature, b=0.5) -> Truth:
    p, q = first.p, second.p
    unit = first.unit
    m = (1 - b) * p + b * q
    log_m = torch.logaddexp(first.logprobs + math.log(1 - b), second.logprobs + math.log(b))
    ratios = [
        torch.where(own == 0, 0.0, model.logprobs - log_m)
        for own, model in ((p, first), (q, second))
    ]
    value = (1 - b) * mean(p, ratios[0]) + b * mean(q, ratios[1])
    off = mean(p, first.error) + mean(q, second.error) + 32 * unit
    grads = []
    for own, model, weight, ratio in ((p, first, 1 - b, ratios[0]), (q, second, b, ratios[1])):
        centered = ratio - mean(own, ratio)
        # Beyond 80 nats one model is as nothing beside the other.
        slack = off / min(b, 1 - b) + 8 * unit * (1 + ratio.abs()) + model.error * (1 + ratio.abs())
        other = first.error if model is second else second.error
        slack = slack + torch.where(m == 0, 0.0, other.clamp(max=1) * (m - weight * own) / m)
        grads.append(
            Bounded(weight * own * centered / temperature, weight * own * slack / temperature)
        )
    return Truth(Bounded(value[:, 0], off[:, 0]), value[:, 0], tuple(grads))


def divergence(logits, ref_logits, direction, temperature=1.0) -> Truth:
    """The truth of ``klfast.kl_divergence`` of rows [N, V]."""
    arithmetic = oracle.arithmetic_dtype(logits, ref_logits)
    largest = torch.finfo(arithmetic).max
    models = [Model.of(t, temperature, arithmetic) for t in (logits, ref_logits)]
    if direction == "jsd":
        return jsd(*models, temperature)
    if direction == "reverse":
        return kl(*models, temperature, largest)
    truth = kl(*models[::-1], temperature, largest)
    return truth._replace(grads=truth.grads[::-1])


class Tokens(NamedTuple):
    """Of rows: log-probs of tokens, entropies, and the gradients of either."""

    logprobs: Bounded
    entropy: Bounded
    grad: Bounded
    entropy_grad: Bounded


def tokens(logits, token_ids, temperature=1.0) -> Tokens:
    model = Model.of(logits, temperature, oracle.arithmetic_dtype(logits))
    p, logprobs, unit = model.p, model.logprobs, model.unit
    taken = logprobs.gather(-1, token_ids[:, None])[:, 0]
    one = torch.zeros_like(p).scatter(-1, token_ids[:, None], 1.0)
    entropy = -mean(p, logprobs)
    finite = torch.where(p == 0, 0.0, logprobs)
    off = mean(p, model.error * (1 + finite.abs())) + 16 * unit * (1 + entropy)
    centered = finite + entropy
    return Tokens(
        Bounded(taken, 4 * unit * (1 + taken.abs()) + mean(p, model.error)[:, 0]),
        Bounded(entropy[:, 0], off[:, 0]),
        Bounded((one - p) / temperature, (p * model.error + 4 * unit * one) / temperature),
        Bounded(
            -p * centered / temperature,
            p * (model.error * centered.abs() + 8 * unit * finite.abs() + off) / temperature,
        ),
    )


def assert_close(found, truth: Bounded, rows, what):
    """Within the tolerance, and a rounding to the dtype; ``rows``: [N, ...] that count."""
    found_rows, exact, tolerance = (t[rows] for t in (found.detach(), *truth))
    limits = torch.finfo(found.dtype)
    fits = exact.abs() <= limits.max
    expected = torch.where(fits, exact, exact.sign() * math.inf)
    off = (found_rows.double() - expected).abs()
    allowed = tolerance + limits.eps * exact.abs() + limits.smallest_normal * limits.eps
    # At the very end of the range, rounding decides between the largest number and infinity.
    at_end = (exact.abs() + allowed >= limits.max) & (
        found_rows.double().abs() >= 0.99 * limits.max
    )
    good = (off <= allowed) | (found_rows.double() == expected) | at_end
    worst = (~good).nonzero()
    assert good.all(), (
        f"{what}: {len(worst)} wrong, first at {worst[0].tolist()}: "
        f"{found_rows[tuple(worst[0])].item()} for {expected[tuple(worst[0])].item()}, "
        f"allowed {allowed[tuple(worst[0])].item()}"
    )


def assert_divergence(backend, logits, ref_logits, direction, temperature=1.0):
    """Values, bounds, tokens' log-probs and both gradients."""
    inputs = [t.clone().requires_grad_() for t in (logits, ref_logits)]
    options = {"direction": direction, "temperature": temperature, "backend": backend}
    found = klfast.kl_divergence(*inputs, **options)
    truth = divergence(logits, ref_logits, direction, temperature)
    value, held, largest = truth.value, truth.held, torch.finfo(found.dtype).max
    representable = torch.isclose(value.exact, held, rtol=1e-6) | value.exact.isinf()
    assert_close(found, value, representable, direction)
    assert not found.isnan().any()
    assert (found >= -1e-15).all()  # 0, but for the reference
    assert (found >= held * (1 - 1e-5)).logical_or(found.isinf())[~representable].all()
    if direction == "jsd":
        assert (found <= torch.tensor(math.log(2) + 1e-15, dtype=found.dtype)).all()
    finite = representable & (value.exact < largest / 4)
    upstream = finite.to(found.dtype)
    outcomes = torch.autograd.grad(found, inputs, upstream)
    (together,) = torch.autograd.grad(
        klfast.kl_divergence(
            inputs[0][finite], ref_logits[finite], reduction="token-sum", **options
        ),
        inputs[0],
    )
    for grad, of in zip((*outcomes, together), (*truth.grads, truth.grads[0]), strict=True):
        assert_close(grad, of, finite, f"gradient of {direction}")

    ids = logits.argmin(-1).where(torch.arange(len(logits)) % 2 == 0, ref_logits.argmax(-1))
    found = klfast.kl_divergence(*inputs, token_ids=ids, **options)
    logprobs = (found.logprobs, found.ref_logprobs)
    for leaf, own, model in zip(inputs, logprobs, (logits, ref_logits), strict=True):
        of = tokens(model, ids, temperature)
        everywhere = torch.ones(len(model), dtype=torch.bool)
        assert_close(own, of.logprobs, everywhere, "log-prob")
        possible = of.logprobs.exact > -largest
        (grad,) = torch.autograd.grad(own, leaf, possible.to(own.dtype), retain_graph=True)
        assert_close(grad, of.grad, possible, "gradient of log-prob")


def assert_tokens(backend, logits, token_ids, temperature=1.0):
    """Log-probs, entropies and the gradients of both."""
    leaf = logits.clone().requires_grad_()
    options = {"temperature": temperature, "return_entropy": True, "backend": backend}
    logprobs, entropy = klfast.token_logprobs(leaf, token_ids, **options)
    truth = tokens(logits, token_ids, temperature)
    everywhere = torch.ones(len(logits), dtype=torch.bool)
    assert_close(logprobs, truth.logprobs, everywhere, "log-prob")
    assert_close(entropy, truth.entropy, everywhere, "entropy")
    for output, of in ((logprobs, truth.grad), (entropy, truth.entropy_grad)):
        ones = torch.ones_like(output)
        (grad,) = torch.autograd.grad(output, leaf, ones, retain_graph=True)
        assert_close(grad, of, everywhere, "gradient")
