"""Logits over vocabularies of any size, in every dtype and direction, with gradients."""

import itertools
import warnings

import pytest
import torch
from controls import DIRECTIONS, FLOATS, divergence, single, tokens

import klfast
from klfast.functional import hints

CATEGORY = "sizes of the vocabulary"
SMALL = [*range(1, 34), 48, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 511, 512, 513]
LARGE = [1000, 1023, 1024, 1025, 2047, 2049, 4095, 4096, 4097, 8191, 8193, 16384, 16385]
REAL = [32000, 32001, 50257, 65535, 65537, 100277, 128256, 151936, 152064]


def error(*models):
    """The 2e-6 of docs/logits.md for fp32, and what the control itself rounds for fp64."""
    return 2e-6 if single(*models) else 1e-12


def compare_divergence(hunt, z, r, direction, backend, *case):
    expected = divergence(z, r, direction)
    case = (backend, *case)
    leaves = [t.detach().clone().requires_grad_() for t in (z, r)]
    found = klfast.kl_divergence(*leaves, direction=direction, backend=backend)
    tolerance = error(z, r) * expected.value.abs() + 1e-14 * (1 + expected.size)
    hunt.close(found, expected.value, tolerance, direction, *case, "value")
    grads = torch.autograd.grad(found.sum(), leaves)
    exact, steep = expected[2:4], expected[4:]
    for grad, wanted, terms in zip(grads, exact, steep, strict=True):
        allowed = error(z, r) * terms + 1e-15
        hunt.close(grad, wanted, allowed, direction, *case, "gradient")


def compare_tokens(hunt, z, ids, *case):
    exact = tokens(z, ids)
    p = torch.softmax(z.double(), -1)
    leaf = z.detach().clone().requires_grad_()
    found = klfast.token_logprobs(leaf, ids, return_entropy=True)
    scale = 1 + exact[1].abs() + exact[0].abs()
    for what, value, wanted, slope in zip(
        ("log-prob", "entropy"), found, exact[:2], exact[2:], strict=True
    ):
        hunt.close(value, wanted, error(z) * scale, *case, what)
        (grad,) = torch.autograd.grad(value.sum(), leaf, retain_graph=True)
        allowed = error(z) * (slope.abs() + scale[..., None] * p) + 1e-15
        hunt.close(grad, slope, allowed, *case, f"gradient of the {what}")


def models(rows, words, dtype, apart):
    z = (3 * torch.randn(rows, words)).to(dtype)
    return z, (z.double() + apart * torch.randn(rows, words)).to(dtype)


@pytest.mark.parametrize("words", [SMALL, LARGE, REAL], ids=["small", "large", "real"])
def test_divergences(hunt, words):
    cases = itertools.product(words, FLOATS, DIRECTIONS, (0.01, 1.0))
    for v, dtype, direction, apart in hunt.some(cases, 12):
        z, r = models(2, v, dtype, apart)
        compare_divergence(hunt, z, r, direction, "native", v, dtype, apart)


@pytest.mark.parametrize("words", [SMALL, LARGE, REAL], ids=["small", "large", "real"])
def test_tokens(hunt, words):
    for v, dtype in hunt.some(itertools.product(words, FLOATS), 4):
        z, _ = models(3, v, dtype, 1.0)
        compare_tokens(hunt, z, torch.tensor([0, v // 2, v - 1]), v, dtype)


def test_the_reference(hunt):
    for v, dtype, direction in hunt.some(itertools.product(SMALL, FLOATS, DIRECTIONS), 12):
        z, r = models(2, v, dtype, 1.0)
        compare_divergence(hunt, z, r, direction, "reference", v, dtype)


def test_mixed_dtypes(hunt):
    cases = itertools.product((1, 37, 1000), FLOATS, FLOATS, DIRECTIONS)
    for v, first, second, direction in hunt.some(cases, 4):
        z, r = models(2, v, torch.float32, 1.0)
        compare_divergence(hunt, z.to(first), r.to(second), direction, "native", v, first, second)


def test_equal_logits_diverge_by_nothing(hunt):
    cases = itertools.product([*SMALL, *LARGE], FLOATS, DIRECTIONS)
    for v, dtype, direction in hunt.some(cases, 10):
        z, _ = models(2, v, dtype, 1.0)
        found = klfast.kl_divergence(z, z.clone(), direction=direction)
        hunt.check(not found.any(), v, dtype, direction, got=found)


def are_hinted_at(logits, monkeypatch):
    """Whether a process that has seen nothing else is told that these are log-probs of tokens."""
    monkeypatch.setattr(hints, "_given", set())
    monkeypatch.setattr(hints, "_calls", {name: itertools.count() for name in hints._calls})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        klfast.kl_divergence(logits, logits)
    return any("log-probs of taken tokens" in str(warning.message) for warning in caught)


OF_MODELS = {
    "logits": lambda z: z,
    "log-probs": lambda z: z.log_softmax(-1),
    "the greatest is 0": lambda z: z - z.amax(-1, keepdim=True),
    "far below 0": lambda z: z - 100,
    "top words": lambda z: z.log_softmax(-1).topk(-(-z.shape[-1] // 2)).values,
    "top words, least first": lambda z: z.log_softmax(-1).topk(-(-z.shape[-1] // 2)).values.flip(1),
    "top words, renormalised": lambda z: z.topk(-(-z.shape[-1] // 2)).values.log_softmax(-1),
}


def test_what_models_give_is_not_taken_for_logprobs_of_tokens(hunt, monkeypatch):
    cases = itertools.product([*SMALL, *LARGE], OF_MODELS, (torch.float32, torch.bfloat16), (1, 9))
    for v, kind, dtype, rows in hunt.some(cases, 10):
        logits = OF_MODELS[kind](3 * torch.randn(rows, v)).to(dtype)
        hunt.check(not are_hinted_at(logits, monkeypatch), v, kind, dtype, rows)


def test_logits_of_a_few_classes_may_lie_anywhere(hunt, monkeypatch):
    cases = itertools.product(range(1, 33), (-20, -8, -5, -3, -1, 0), (0.1, 1.0), (1, 9))
    for v, middle, spread, rows in hunt.some(cases, 10):
        logits = middle + spread * torch.randn(rows, v)
        hunt.check(not are_hinted_at(logits, monkeypatch), v, middle, spread, rows)


def test_logprobs_of_tokens_are_found_among_them(hunt, monkeypatch):
    cases = itertools.product((33, 64, 100, 128, 129, 1000, 4096), (0.1, 0.5, 1.0), (1, 4, 64))
    for width, mean, sequences in hunt.some(cases, 10):
        taken = -mean * torch.empty(sequences, width).exponential_()
        hunt.check(are_hinted_at(taken, monkeypatch), width, mean, sequences)
