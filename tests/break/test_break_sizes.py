"""Sizes that fit in memory and time: millions of sequences, more than 2^31 elements.

Tensors of more than memory holds are one row seen many times.
"""

import itertools

import torch
from controls import DIRECTIONS

import klfast

CATEGORY = "sizes"


def test_many_sequences(hunt):
    count = 10_000_000 if hunt.whole else 100_000
    a, b = torch.full((count,), -1.0), torch.full((count,), -1.5)
    edges = torch.arange(count + 1, dtype=torch.int32)
    found = klfast.kl_penalty(a, b, estimator="k1", cu_seqlens=edges, reduction="seq-sum")
    hunt.check(bool((found == 0.5).all()), count, got=found)
    for reduction, value in (("token-mean", 0.5), ("seq-mean-token-sum", 0.5)):
        leaf = a.clone().requires_grad_()
        found = klfast.kl_penalty(leaf, b, estimator="k1", cu_seqlens=edges, reduction=reduction)
        found.backward()
        hunt.close(found, torch.tensor(value), 1e-6, count, reduction)
        hunt.close(leaf.grad.sum(dtype=torch.float64), torch.ones(()), 1e-5, count, reduction)
    rows = a.view(-1, 1)
    found = klfast.kl_penalty(rows, b.view(-1, 1), estimator="k2", reduction="seq-mean")
    hunt.check(bool((found == 0.125).all()), count, "rows of 1", got=found)


def test_many_empty_sequences(hunt):
    count = 30_000_000 if hunt.whole else 300_000
    edges = torch.zeros(count + 1, dtype=torch.int64)
    edges[count // 2 :] = 3
    a = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    b = torch.zeros(3)
    options = {"estimator": "k1", "cu_seqlens": edges}
    found = klfast.kl_penalty(a, b, reduction="seq-sum", **options).detach()
    hunt.check(int(found.count_nonzero()) == 1 and found.sum().item() == -6, count, got=found)
    mean = klfast.kl_penalty(a, b, reduction="seq-mean-token-mean", **options)
    hunt.equal(mean.item(), -2.0, count)
    hunt.equal(torch.autograd.grad(mean, a)[0].tolist(), [torch.tensor(1 / 3).item()] * 3, count)


def test_one_long_sequence(hunt):
    tokens = 100_000_000 if hunt.whole else 2_000_000
    a = torch.full((tokens,), -1.0, dtype=torch.bfloat16)
    b = torch.full((tokens,), -1.25, dtype=torch.bfloat16)
    exact = (torch.tensor(-0.25).double().expm1() + 0.25).item()
    for reduction, value in (("token-sum", tokens * exact), ("token-mean", exact)):
        found = klfast.kl_penalty(a, b, reduction=reduction)
        wanted = torch.tensor(value, dtype=torch.float64)
        hunt.close(found, wanted, 1e-6 * value, tokens, reduction)
    leaf = a[: tokens // 4].requires_grad_()
    klfast.kl_penalty(leaf, b[: tokens // 4], estimator="k1", reduction="token-sum").backward()
    hunt.check(bool((leaf.grad == 1).all()), tokens, "gradient")


def test_more_than_2_to_the_31_tokens(hunt):
    """Beyond the range of int32, at both ends of the row."""
    width = 2**31 + 1000 if hunt.whole else 2**22
    a = torch.full((1, 1), -1.0, dtype=torch.bfloat16).expand(1, width)
    b = torch.zeros(1, 1).expand(1, width)
    found = klfast.kl_penalty(a, b, estimator="k1", reduction="token-mean")
    hunt.equal(found.item(), -1.0, width)
    edges = torch.tensor([0, width // 2, width // 2 + 2, width])
    found = klfast.kl_penalty(a[0], b[0], estimator="k1", cu_seqlens=edges, reduction="seq-sum")
    for got, wanted in zip(found.tolist(), (-edges.diff()).tolist(), strict=True):
        hunt.check(abs(got / wanted - 1) < 1e-6, width, got=(got, wanted))


def test_more_than_2_to_the_31_logits(hunt):
    """The last rows of a tensor whose offsets leave int32."""
    words = 32_000
    rows = 2**31 // words + 5 if hunt.whole else 300
    z, r = torch.randn(words), torch.randn(words)
    many, other = (t.expand(1, rows, words) for t in (z, r))
    ids = torch.full((1, rows), 7)
    one = klfast.kl_divergence(z[None, None], r[None, None])
    mask = torch.zeros(1, rows, dtype=torch.bool)
    mask[0, -3:] = True
    for keep, count in ((mask, 3), (None, rows)):
        found = klfast.kl_divergence(many, other, keep, reduction="seq-sum")
        hunt.close(found, count * one[0].double(), 1e-5 * count, rows, count)
    found = klfast.token_logprobs(many, ids, mask=mask)
    wanted = klfast.token_logprobs(z[None], torch.tensor([7]))
    hunt.bits(found[0, -3:], wanted.expand(3), rows)
    hunt.check(not found[0, :-3].any(), rows)


def test_rows_of_every_length_around_the_blocks_of_kernels(hunt):
    lengths = sorted({n + d for n in (2**k for k in range(15)) for d in (-1, 0, 1)} - {0})
    for length, direction in hunt.some(itertools.product(lengths, DIRECTIONS), 3):
        z, r = torch.randn(1, length, 3), torch.randn(1, length, 3)
        rows = klfast.kl_divergence(z, r, direction=direction)
        total = klfast.kl_divergence(z, r, direction=direction, reduction="token-sum")
        exact = rows.sum(dtype=torch.float64)
        hunt.close(total, exact, 1e-6 * exact.abs(), length, direction)
    for length in lengths:
        a, b = torch.randn(2, length), torch.randn(2, length)
        rows = klfast.kl_penalty(a, b, estimator="k2").sum(-1, dtype=torch.float64)
        for reduction in ("seq-sum", "seq-mean"):
            found = klfast.kl_penalty(a, b, estimator="k2", reduction=reduction)
            wanted = rows / (length if reduction == "seq-mean" else 1)
            hunt.close(found, wanted, 1e-6 * wanted.abs(), length, reduction)
