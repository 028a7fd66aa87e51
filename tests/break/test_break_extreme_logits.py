"""Rows of every extreme kind against rows of every other."""

import itertools
import math

import pytest
import torch
from controls import DIRECTIONS, FLOATS, divergence, log_softmax, single, tokens

import klfast

CATEGORY = "extreme logits"
NAN, INF = math.nan, math.inf
WORDS = 40


def rows(dtype):
    """Name -> a row of each kind, in a dtype."""
    info = torch.finfo(dtype)
    plain = torch.linspace(-3, 3, WORDS).sin()

    def put(value, at=7, base=plain):
        row = base.double().clone()
        row[at] = value
        return row.to(dtype)

    def full(value):
        return torch.full((WORDS,), value, dtype=torch.float64).to(dtype)

    huge = min(1e20, info.max / 4)
    return {
        "plain": plain.to(dtype),
        "flat": full(0.0),
        "one +inf": put(INF),
        "all +inf": full(INF),
        "one -inf": put(-INF),
        "half -inf": torch.where(torch.arange(WORDS) % 2 == 0, plain, -INF).to(dtype),
        "all but one -inf": put(1.0, base=full(-INF)),
        "all -inf": full(-INF),
        "one NaN": put(NAN),
        "one largest": put(info.max),
        "one least": put(info.min),
        "all largest": full(info.max),
        "all least": full(info.min),
        "all but one least": put(1.0, base=full(info.min)),
        "lead of 1e20": put(huge),
        "lead of 1e4": put(1e4),
        "all 1e4": full(1e4),
        "all 1e20": full(huge),
        "spread of 1e4": (plain * 1e4).to(dtype),
        "denormal": (plain.double() * info.smallest_normal / 8).to(dtype),
    }


def says_nothing(row):
    """A row that is no distribution."""
    return bool(row.isnan().any() or (row == INF).any() or (row == -INF).all())


def expected_value(z, r, direction, beta):
    found = divergence(z[None], r[None], direction, beta)
    nothing = says_nothing(z) or says_nothing(r)
    return found, torch.full_like(found.value, NAN) if nothing else found.value


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_divergences(hunt, dtype, backend):
    kinds = rows(dtype)
    cases = itertools.product(itertools.product(kinds, kinds), DIRECTIONS)
    for (first, second), direction in hunt.some(cases, 10):
        z, r = kinds[first], kinds[second]
        exact, value = expected_value(z, r, direction, 0.3)
        leaves = [row.clone()[None].requires_grad_() for row in (z, r)]
        found = klfast.kl_divergence(*leaves, direction=direction, jsd_beta=0.3, backend=backend)
        error = 2e-6 if single(z) else 1e-12
        case = (backend, direction, first, second)
        textbook = 1e-14 * (1 + torch.nan_to_num(exact.size, 0.0, 0.0, 0.0))
        hunt.close(found, value, error * value.abs().nan_to_num() + textbook, *case, "value")
        if direction == "jsd" and value.isfinite().all():
            hunt.check(0 <= found.item() <= math.log(2) * (1 + 1e-6), *case, got=found)
        if value.abs().item() < torch.finfo(dtype).max / 100:
            grads = torch.autograd.grad(found.sum(), leaves)
            for grad, wanted, terms in zip(grads, exact[2:4], exact[4:], strict=True):
                hunt.close(grad, wanted, error * terms + 1e-14, *case, "gradient")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_tokens(hunt, dtype, backend):
    kinds = rows(dtype)
    for kind, at in itertools.product(kinds, hunt.some(range(WORDS), 4)):
        row, ids = kinds[kind][None], torch.tensor([at])
        leaf = row.clone().requires_grad_()
        found = klfast.token_logprobs(leaf, ids, return_entropy=True, backend=backend)
        exact = tokens(row, ids)
        nothing = says_nothing(row[0])
        error = 2e-6 if single(row) else 1e-12
        excluded = row[0, at] == -INF
        p = log_softmax(row).exp()
        for what, value, wanted, slope in zip(
            ("log-prob", "entropy"), found, exact[:2], exact[2:], strict=True
        ):
            wanted = torch.full_like(wanted, NAN) if nothing else wanted
            scale = 1 + exact[1] + wanted.abs().nan_to_num(0.0, 0.0)
            case = (backend, kind, at, what)
            hunt.close(value, wanted, error * scale, *case)
            if not nothing and not (excluded and what == "log-prob"):
                (grad,) = torch.autograd.grad(value.sum(), leaf, retain_graph=True)
                allowed = error * (slope.abs() + scale[..., None] * p) + 1e-14
                hunt.close(grad, slope, allowed, *case, "gradient")


def test_rows_do_not_touch_their_neighbours(hunt):
    """A row of any kind, among plain ones, changes no bit of theirs."""
    for dtype, direction in itertools.product(FLOATS, DIRECTIONS):
        kinds = rows(dtype)
        z, r = torch.randn(2, 3, WORDS).to(dtype)
        clean = klfast.kl_divergence(z, r, direction=direction)
        for first, second in hunt.some(itertools.product(kinds, kinds), 20):
            z[1], r[1] = kinds[first], kinds[second]
            found = klfast.kl_divergence(z, r, direction=direction)
            hunt.bits(found[[0, 2]], clean[[0, 2]], dtype, direction, first, second)
