"""Temperatures, mixtures, ids and shapes without anything in them, over logits."""

import itertools
import math
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from controls import DIRECTIONS, FLOATS, REDUCTIONS, divergence, single, tokens

import klfast

CATEGORY = "temperature, jsd_beta, ids, empty shapes"
BACKENDS = ("native", "reference")
BAD = {
    "zero": 0,
    "minus one": -1.0,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "text": "1",
    "none": None,
    "true": True,
    "complex": 1j,
    "decimal": Decimal("0.5"),
    "tensor": torch.tensor(0.5),
    "list": [0.5],
    "huge int": 2**5000,
    "tiny fraction": Fraction(1, 2**5000),
}
BAD_TEMPERATURES = BAD | {"tensor": torch.tensor(-0.5)}
"""A temperature may be a tensor."""
INDICES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def logits(dtype=torch.float32, words=11):
    z = 2 * torch.randn(2, 3, words)
    return z.to(dtype), (z + 0.5 * torch.randn(2, 3, words)).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperatures(hunt, backend):
    hot = (1e-3, 0.1, 0.5, 0.7, 1, 2, 10.0, 1e3, 1e6, Fraction(1, 3))
    for temperature, dtype, direction in hunt.some(itertools.product(hot, FLOATS, DIRECTIONS), 4):
        z, r = logits(dtype)
        t = float(temperature)
        options = {"temperature": temperature, "backend": backend}
        exact = divergence(z, r, direction, temperature=t)
        leaves = [x.clone().requires_grad_() for x in (z, r)]
        found = klfast.kl_divergence(*leaves, direction=direction, **options)
        error = (2e-6 if single(z) else 1e-12) * (1 + 0.1 / t)
        # A log-ratio near 0 is a difference of logits, each of which rounds; a divergence near 0
        # is as its square.
        rounded = (z.double() - r.double()).abs().max().item() / t
        rounded *= torch.finfo(torch.float32 if single(z) else torch.float64).eps / 2
        allowed = error * exact.value + rounded**2 / 2 + 1e-14 / min(t, 1) * (1 + exact.size)
        hunt.close(found, exact.value, allowed, backend, t, dtype, direction)
        grads = torch.autograd.grad(found.sum(), leaves)
        for grad, wanted, terms in zip(grads, exact[2:4], exact[4:], strict=True):
            allowed = error * terms + rounded / t + 1e-14 / t
            hunt.close(grad, wanted, allowed, backend, t, dtype, direction)
        ids = torch.randint(11, (2, 3))
        logprob, entropy, slope, _ = tokens(z, ids, t)
        leaf = z.clone().requires_grad_()
        value = klfast.token_logprobs(leaf, ids, return_entropy=True, **options)
        for what, wanted in zip(value, (logprob, entropy), strict=True):
            hunt.close(what, wanted, error * (1 + wanted.abs()), backend, t, dtype, "tokens")
        (grad,) = torch.autograd.grad(value[0].sum(), leaf)
        hunt.close(grad, slope, 4 * error / t, backend, t, dtype, "tokens' gradient")


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixtures(hunt, backend):
    betas = (1e-30, 1e-6, 0.01, 0.25, 0.5, 0.9, 1 - 1e-6, Fraction(2, 3))
    for beta, dtype in hunt.some(itertools.product(betas, FLOATS), 4):
        z, r = logits(dtype)
        exact = divergence(z, r, "jsd", float(beta))
        leaves = [x.clone().requires_grad_() for x in (z, r)]
        found = klfast.kl_divergence(*leaves, direction="jsd", jsd_beta=beta, backend=backend)
        error = 4e-6 if single(z) else 1e-10
        hunt.close(found, exact.value, error * exact.value + 1e-14, backend, beta, dtype)
        grads = torch.autograd.grad(found.sum(), leaves)
        for grad, wanted, terms in zip(grads, exact[2:4], exact[4:], strict=True):
            hunt.close(grad, wanted, error * terms + 1e-14, backend, beta, dtype, "gradient")


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_temperatures_and_mixtures_are_refused(hunt, backend):
    z, r = logits()
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for (what, bad), reduction in itertools.product(BAD.items(), REDUCTIONS):
        options = {"backend": backend, "reduction": reduction}
        for direction in DIRECTIONS:
            cold = BAD_TEMPERATURES[what]
            hunt.refuses(
                lambda b=cold, d=direction, o=options: klfast.kl_divergence(
                    z, r, direction=d, temperature=b, **o
                ),
                "temperature",
                what,
                direction,
                reduction,
            )
        hunt.refuses(
            lambda b=bad, o=options: klfast.kl_divergence(z, r, direction="jsd", jsd_beta=b, **o),
            "jsd_beta",
            what,
            reduction,
        )
    for what, bad in {**BAD_TEMPERATURES, "1e39": 1e39, "1e-39": 1e-39, "denormal": 5e-324}.items():
        hunt.refuses(
            lambda b=bad: klfast.token_logprobs(z, ids, temperature=b, backend=backend),
            "temperature",
            what,
        )
    for bad in (1, 1.0, 2, Fraction(3, 2), 1 + 1e-15):
        hunt.refuses(
            lambda b=bad: klfast.kl_divergence(z, r, jsd_beta=b, backend=backend), "jsd_beta", bad
        )
    for name, argument in itertools.product(("jsd_", "JSD", "", "kl", None, 0), ("direction",)):
        hunt.refuses(
            lambda n=name: klfast.kl_divergence(z, r, direction=n, backend=backend), argument, name
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids(hunt, backend):
    """Of every integer dtype; what is masked or ignored may be any number."""
    for dtype, words in itertools.product(INDICES, (1, 2, 11, 100)):
        z, _ = logits(words=words)
        ids = torch.randint(words, (2, 3)).to(dtype)
        exact = tokens(z, ids)[0]
        found = klfast.token_logprobs(z, ids, backend=backend)
        hunt.close(found, exact, 2e-6 * (1 + exact.abs()), backend, dtype, words)
        for wild in (torch.iinfo(dtype).max, torch.iinfo(dtype).min):
            masked = ids.clone()
            masked[1, 1] = wild
            keep = torch.ones(2, 3, dtype=torch.bool)
            keep[1, 1] = False
            expected = torch.where(keep, found, 0.0)
            got = klfast.token_logprobs(z, masked, mask=keep, backend=backend)
            hunt.bits(got, expected, backend, dtype, words, wild, "masked")
            if 0 <= wild < words:
                continue
            got = klfast.token_logprobs(z, masked, ignore_index=wild, backend=backend)
            hunt.bits(got, expected, backend, dtype, words, wild, "ignored")
            for ignore in (-1, -100):
                if wild != ignore:
                    hunt.refuses(
                        lambda i=ignore, m=masked, z=z: klfast.token_logprobs(
                            z, m, ignore_index=i, backend=backend
                        ),
                        "token_ids",
                        dtype,
                        words,
                        wild,
                    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_ids_are_refused(hunt, backend):
    z, r = logits()
    for bad, at in itertools.product((11, -1, -100, 2**31, 2**40, 2**63 - 1, -(2**63)), range(6)):
        ids = torch.zeros(6, dtype=torch.int64)
        ids[at] = bad
        ids = ids.view(2, 3)
        hunt.refuses(
            lambda i=ids: klfast.token_logprobs(z, i, backend=backend), "token_ids", bad, at
        )
        for reduction in REDUCTIONS:
            hunt.refuses(
                lambda i=ids, n=reduction: klfast.kl_divergence(
                    z, r, token_ids=i, reduction=n, backend=backend
                ),
                "token_ids",
                bad,
                at,
                reduction,
            )
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for bad in (2**63, -(2**63) - 1, 2**70, 2**5000, 1.0, True, "0", [0], torch.tensor(0), 1j):
        hunt.refuses(
            lambda b=bad: klfast.token_logprobs(z, ids, ignore_index=b, backend=backend),
            "ignore_index",
            type(bad),
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_shapes(hunt, backend):
    """What has no tokens has no KL, and gradients of its shape."""
    for shape, reduction, dtype in itertools.product(
        ((0,), (0, 5), (3, 0), (0, 0)), REDUCTIONS, FLOATS
    ):
        a = torch.zeros(shape, dtype=dtype, requires_grad=True)
        found, stats = klfast.kl_penalty(
            a, a.detach(), reduction=reduction, backend=backend, return_stats=True
        )
        hunt.check(not found.any(), shape, reduction, dtype, got=found)
        hunt.check(not any(field.any() for field in stats), shape, reduction, dtype, got=stats)
        (grad,) = torch.autograd.grad(found.sum(), a)
        hunt.equal(tuple(grad.shape), shape, reduction, dtype)
        z = torch.zeros(*shape, 7, dtype=dtype, requires_grad=True)
        for direction in DIRECTIONS:
            found = klfast.kl_divergence(
                z, z.detach(), reduction=reduction, direction=direction, backend=backend
            )
            hunt.check(not found.any(), shape, reduction, dtype, direction, got=found)
            (grad,) = torch.autograd.grad(found.sum(), z)
            hunt.equal(tuple(grad.shape), (*shape, 7), reduction, dtype, direction)
    for shape in ((0,), (0, 5), (3, 0), (2, 0, 3), (0, 2, 3, 4)):
        z = torch.zeros(*shape, 7, requires_grad=True)
        found = klfast.token_logprobs(z, torch.zeros(shape, dtype=torch.int64), backend=backend)
        hunt.equal(tuple(found.shape), shape, backend)
        hunt.equal(tuple(torch.autograd.grad(found.sum(), z)[0].shape), (*shape, 7), backend)
    for shape in ((0,), (3, 0), (2, 3, 0)):
        z = torch.zeros(shape)
        ids = torch.zeros(shape[:-1], dtype=torch.int64)
        hunt.refuses(lambda z=z, i=ids: klfast.token_logprobs(z, i), "logits", shape)
        hunt.refuses(lambda z=z: klfast.kl_divergence(z, z), "logits", shape)
    found = klfast.kl_penalty(
        torch.zeros(0), torch.zeros(0), cu_seqlens=torch.tensor([0]), reduction="seq-sum"
    )
    hunt.equal(tuple(found.shape), (0,), "no sequence")
