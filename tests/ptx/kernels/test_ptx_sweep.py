"""Random calls compare the PTX with the CPU's kernels, in combinations that no other test has.

A case is a number, which determines the dtypes and the mask, so consecutive cases go through all
pairs of them. The layouts, scalars and estimators are random.
"""

import random
import warnings
from typing import get_args

import pytest
import torch
from ptx_against import FLOATS, MASKS_OR_NONE, check, flat, gradients

import klfast
from klfast.types import names

# Chips with clusters, and chips without some kind of cluster, which read rows twice.
CHIPS = ("h200", "h200", "mig", "a100", "rtx5090")
REDUCTIONS = get_args(names.ReductionName)
ESTIMATORS = (*names.ESTIMATORS, *names.PLUS)


class Draw(random.Random):
    """The random choices of a case."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number
        self.dtype = FLOATS[number % len(FLOATS)]
        self.mask_dtype = MASKS_OR_NONE[number // len(FLOATS) % len(MASKS_OR_NONE)]
        self.is_mixed = self.random() < 0.3
        self.tensors = torch.Generator().manual_seed(number)

    def floats(self):
        """The dtype of one input. In most calls all inputs have one dtype."""
        return self.choice(FLOATS) if self.is_mixed else self.dtype

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.tensors)

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.tensors)

    def laid_out(self, tensor):
        """The same values in a dense, sliced, strided or transposed tensor."""
        how = self.choice(("dense", "dense", "sliced", "strided", "transposed"))
        if how == "sliced":
            start = self.randrange(1, 9)
            wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + start)
            wide[..., start:] = tensor
            return wide[..., start:]
        if how == "strided":
            return torch.stack([tensor, tensor], -1)[..., 0]
        if how == "transposed":
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        return tensor

    def scalar(self, value):
        """A number, or a tensor of any dtype."""
        if self.random() < 0.3:
            return value
        return torch.tensor(value, dtype=self.choice(FLOATS))

    def mask(self, shape):
        if self.mask_dtype is None:
            return None
        kept = (self.uniform(*shape) < 0.7).to(self.mask_dtype)
        if self.mask_dtype.is_floating_point and self.random() < 0.5:
            kept = kept * 0.5
        return self.laid_out(kept)

    def packing(self, tokens):
        """The ends of sequences. One sequence is empty."""
        ends = sorted(self.randrange(tokens + 1) for _ in range(3))
        dtype = self.choice((torch.int32, torch.int64))
        return torch.tensor([0, *ends, ends[-1], tokens], dtype=dtype)

    def shape(self, sizes):
        """A padded or a packed batch of tokens, with its cu_seqlens."""
        size = self.choice(sizes)
        if self.random() < 0.35:
            return (size,), self.packing(size)
        return (self.choice((1, 2) if size > 300 else (1, 2, 5)), size), None


def _tokens(draw, count=3):
    spread = draw.choice((0.05, 0.5, 3.0))
    shape, cu_seqlens = draw.shape((1, 5, 33, 300, 300, 1100, 1100, 2500, 9000))
    base = -3 * draw.uniform(*shape)
    inputs = [
        draw.laid_out((base + spread * draw.normal(*shape)).to(draw.floats())) for _ in range(count)
    ]
    return inputs, draw.mask(shape), cu_seqlens


def penalty(draw):
    (logprobs, ref, old), mask, cu_seqlens = _tokens(draw)
    limits = draw.choice(
        ({}, {}, {"kl_clip": 0.5}, {"log_ratio_clip": 1.5}, {"clip_weighted": True, "kl_clip": 0.5})
    )
    estimator = klfast.Estimator(draw.choice(ESTIMATORS), **limits)
    reduction = draw.choice(REDUCTIONS)
    options = {"coef": draw.scalar(1.5), "return_stats": draw.random() < 0.5}
    if reduction.startswith("token-mean"):
        options["normalizer"] = draw.choice((None, draw.scalar(3.0)))
    if draw.random() < 0.3:
        options["old_logprobs"] = old
    leaves = [each.detach().requires_grad_() for each in (logprobs, ref)]

    def call():
        made = klfast.kl_penalty(
            *leaves,
            mask,
            estimator=estimator,
            reduction=reduction,
            cu_seqlens=cu_seqlens,
            backend="native",
            **options,
        )
        return flat(made) + gradients(made, leaves)

    return call


def rewards(draw):
    (logprobs, ref, _), mask, cu_seqlens = _tokens(draw)
    shape = logprobs.shape
    coef, estimator = draw.scalar(0.3), klfast.Estimator(draw.choice(ESTIMATORS[:6]))
    scores = draw.normal(shape[0] if cu_seqlens is None else len(cu_seqlens) - 1).to(draw.floats())
    return lambda: flat(
        klfast.kl_rewards(
            scores,
            logprobs,
            ref,
            mask,
            kl_coef=coef,
            estimator=estimator,
            cu_seqlens=cu_seqlens,
            backend="native",
        )
    )


def _logits(draw):
    words = draw.choice((1, 3, 8, 31, 64, 257, 1024, 3001, 20000))
    rows = draw.choice((1, 3)) if words > 2000 else draw.choice((2, 5))
    packed = draw.random() < 0.35
    shape = (rows,) if packed else (1, rows)
    cu_seqlens = torch.tensor([0, rows]) if packed else None
    logits = draw.choice((0.3, 3.0)) * draw.normal(*shape, words)
    if draw.random() < 0.2 and words > 3:
        logits[..., ::3] = -float("inf")
    if draw.random() < 0.15:
        logits[..., 0] = 500.0
    others = logits + draw.choice((0.01, 1.0)) * draw.normal(*shape, words)
    ids = torch.randint(0, words, shape, generator=draw.tensors)
    ids = ids.to(draw.choice((torch.int64, torch.int32)))
    pair = [draw.laid_out(each.to(draw.floats())) for each in (logits, others)]
    return pair, ids, draw.mask(shape), cu_seqlens


def divergence(draw):
    pair, ids, mask, cu_seqlens = _logits(draw)
    options = {
        "direction": draw.choice(names.DIRECTIONS),
        "reduction": draw.choice(REDUCTIONS),
        "temperature": draw.choice((1.0, 0.8)),
        "coef": draw.scalar(1.5),
        "return_entropy": draw.random() < 0.4,
        "return_stats": draw.random() < 0.3,
    }
    if draw.random() < 0.3:
        options["token_ids"] = ids
    leaves = [each.detach().requires_grad_() for each in pair]

    def call():
        made = klfast.kl_divergence(
            *leaves, mask, cu_seqlens=cu_seqlens, backend="native", **options
        )
        return flat(made) + gradients(made, leaves)

    return call


def weights(draw):
    """Divergences of small vocabularies and many tokens test the masks."""
    shape, cu_seqlens = draw.shape((1, 33, 100, 300))
    logits = draw.normal(*shape, 4)
    pair = [
        (logits + 0.3 * draw.normal(*shape, 4)).to(draw.dtype).requires_grad_() for _ in range(2)
    ]
    mask = draw.mask(shape)
    reduction = draw.choice(REDUCTIONS[1:])
    options = {"coef": draw.scalar(1.5)}
    if reduction.startswith("token-mean"):
        options["normalizer"] = draw.choice((None, draw.scalar(3.0)))

    def call():
        made = klfast.kl_divergence(
            *pair,
            mask,
            reduction=reduction,
            cu_seqlens=cu_seqlens,
            backend="native",
            **options,
        )
        return flat(made) + gradients(made, pair)

    return call


def tokens(draw):
    (logits, _), ids, mask, _ = _logits(draw)
    leaf = logits.detach().requires_grad_()
    entropy, temperature = draw.random() < 0.5, draw.choice((1.0, 0.8))

    def call():
        made = klfast.token_logprobs(
            leaf, ids, mask, temperature=temperature, return_entropy=entropy, backend="native"
        )
        return flat(made) + gradients(made, [leaf])

    return call


KINDS = {each.__name__: each for each in (divergence, weights, penalty, tokens, rewards)}
CASES = len(FLOATS) * len(MASKS_OR_NONE)
CALLS = 12  # of a case


@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_the_cpus(kind, number, monkeypatch):
    warnings.simplefilter("ignore")
    for i in range(CALLS):
        draw = Draw(number + CASES * i)
        check(KINDS[kind](draw), monkeypatch, chip=draw.choice(CHIPS))
