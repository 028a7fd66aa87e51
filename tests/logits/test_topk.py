"""topk_kl_divergence: any number of entries, and the edges of each tail."""

import contextlib
import math

import agreement_logits as al
import pytest
import torch
from eager_divergences import EAGER
from shards import over_shards

import klfast
from klfast.types.names import DIRECTIONS, TAILS

pytestmark = pytest.mark.usefixtures("one_thread")


every_tail = pytest.mark.parametrize("tail", TAILS)


LEAVES = ("logits", "ref_logprobs")


def wrong_topk(backend, *given, **options):
    """The divergences and gradients that are off by more than allowed."""
    names = ("logits", "ref_token_ids", "ref_logprobs")
    given = dict(zip(names, given, strict=True))
    return al.wrong(backend, "topk_kl_divergence", LEAVES, **given, **options)


@pytest.mark.grid
@pytest.mark.parametrize("entries", [1, 2, 31, 64, 65, 200])
@pytest.mark.parametrize("words", [200, 2500])
@every_tail
@al.every_direction
def test_any_number_of_entries(backend, direction, tail, words, entries):
    if (tail, entries) == ("renormalize", 1):
        pytest.skip("is refused")
    given = al.teacher(1, 2, words, entries=entries).values()
    assert not wrong_topk(backend, *given, direction=direction, tail=tail, jsd_beta=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@al.every_direction
def test_a_whole_vocabulary_is_the_divergence(backend, direction, dtype):
    """Every tail is then 0, except for the least bucket."""
    logits, ref_logits = al.random_logits(2, 3, 37, dtype=dtype)
    ids = torch.arange(37).flip(0).expand(2, 3, 37)
    logprobs = ref_logits.double().log_softmax(-1).flip(-1)
    expected = klfast.kl_divergence(
        logits, ref_logits, direction=direction, jsd_beta=0.3, backend=backend
    )
    for tail in TAILS:
        found = klfast.topk_kl_divergence(
            logits, ids, logprobs, direction=direction, tail=tail, jsd_beta=0.3, backend=backend
        )
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=4e-7)


@every_tail
@al.every_direction
def test_a_student_that_is_the_teacher_is_at_0(backend, direction, tail):
    """The gradient is 0, unless slopes jump there, which shows every rounding. Only "drop" may be
    negative by rounding.
    """
    logits = al.random_logits(4, 8, 300)[0]
    logprobs = logits.double().log_softmax(-1)
    top = logprobs.topk(5)
    leaf = logits.requires_grad_()
    kl = klfast.topk_kl_divergence(
        leaf, top.indices, top.values, direction=direction, tail=tail, backend=backend
    )
    is_rounded = tail == "drop" or EAGER[direction].jumps
    assert kl.abs().max() <= (1e-6 if is_rounded else 1e-12)
    assert tail == "drop" or kl.min() >= 0
    options = {"direction": direction, "tail": tail, "backend": backend}
    own = klfast.token_logprobs(logits.detach(), top.indices, backend=backend)
    for ref_logprobs in (own, own.transpose(0, 1).contiguous().transpose(0, 1)):
        assert not klfast.topk_kl_divergence(leaf, top.indices, ref_logprobs, **options).any()
    if not is_rounded:
        (grad,) = torch.autograd.grad(kl.sum(), leaf)
        assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("excess", [0.0, 1e-7, 1e-3])
@al.every_direction
def test_log_probs_that_sum_to_1_or_more(backend, direction, excess):
    """The sum is above 1 by rounding. The rest is 2^-24, and the result is finite."""
    logits = al.random_logits(1, 2, 37)[0]
    top = logits.log_softmax(-1).topk(3)
    ref_logprobs = torch.log_softmax(top.values, -1) + math.log1p(excess)
    assert not wrong_topk(backend, logits, top.indices, ref_logprobs, direction=direction)


def bucketed(logits, ids, ref_logprobs, direction):
    """The divergence of the entries that exist, with the student's tail from its own ids."""
    words, exist = logits.log_softmax(-1), ref_logprobs != -math.inf
    picked = torch.zeros_like(words).scatter_add_(-1, ids, exist.to(words.dtype)) > 0
    tail = words.masked_fill(picked, -math.inf).logsumexp(-1, keepdim=True)
    q = torch.cat([words.gather(-1, ids).masked_fill(~exist, 0), tail], -1)
    p = torch.cat([ref_logprobs, (-ref_logprobs.logsumexp(-1, keepdim=True).expm1()).log()], -1)
    p = p.masked_fill(p == -math.inf, 0)
    exist = torch.cat([exist, exist[..., :1]], -1)
    return EAGER[direction].terms(q, p).masked_fill(~exist, 0).sum(-1)


def as_heads_logits(logits, *entries, **options):
    """The divergence from hidden states that are the logits, under a head that changes nothing."""
    head = torch.eye(logits.shape[-1], dtype=logits.dtype).requires_grad_(options.pop("trained"))
    return klfast.linear_topk_kl_divergence(logits, head, *entries, **options)


SOURCES = ("logits", "shards", "trained-head", "frozen-head")


@pytest.mark.grid
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entries", [3, 70])
@pytest.mark.parametrize("margin", [8.0, 12.0, 15.0, 18.0])
@al.every_direction
def test_a_tail_of_the_student_near_nothing_keeps_its_digits(
    backend, direction, margin, entries, dtype, source
):
    """1 - Q is 1e-7 at a margin of 18, where other frameworks end the gradient. The value is right
    to an fp32 rounding, and so is the gradient of every entry beside the greatest and the value.
    The gradients of the tail's entries are right to 1e-5.
    """
    words = 12 * entries
    ids = torch.stack([torch.randperm(words)[: entries + 2] for _ in range(2)])[None]
    logits = torch.zeros(1, 2, words)
    logits.scatter_(-1, ids[..., :entries], margin + torch.rand(1, 2, entries))
    logits = logits.to(dtype)
    ref_logprobs = torch.rand(1, 2, entries).log_softmax(-1) + math.log(0.9)
    ref_logprobs = torch.nn.functional.pad(ref_logprobs, (0, 2), value=-math.inf)
    (leaf,), (wide,) = al.leaves(logits), al.leaves(logits.double())
    function, options = klfast.topk_kl_divergence, {"direction": direction, "backend": backend}
    if source.endswith("head"):
        function, options["trained"] = as_heads_logits, source == "trained-head"
    with over_shards((words // 3,)) if source == "shards" else contextlib.nullcontext():
        if source == "shards":
            function = klfast.topk_kl_divergence
        kl = function(leaf, ids, ref_logprobs, **options)
        (grad,) = torch.autograd.grad(kl.sum(), leaf)
    exact = bucketed(wide, ids, ref_logprobs.double(), direction)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    assert ((kl - exact).abs() <= 2**-23 * exact.abs()).all()
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    # A gradient is a probability times the difference of a log-ratio and the value.
    terms = slope.abs().amax(-1, keepdim=True) + exact.abs()[..., None]
    assert ((grad - slope).abs() <= eps * slope.abs() + 2**-23 * terms).all()
    tail = torch.ones_like(grad, dtype=torch.bool).scatter_(-1, ids[..., :entries], False)
    assert ((grad - slope).abs() <= (eps + 1e-5) * slope.abs())[tail].all()


@al.every_direction
def test_a_tail_beyond_the_least_is_the_least(backend, direction):
    """The value is finite, for a rest of 2^-24, which has no gradient."""
    logits = torch.zeros(1, 1, 37)
    logits[..., 5] = 40.0
    ids, ref_logprobs = torch.tensor([[[5]]]), torch.tensor([[[math.log(0.75)]]])
    assert not wrong_topk(backend, logits, ids, ref_logprobs, direction=direction)
    if direction == "forward":
        kl = klfast.topk_kl_divergence(logits, ids, ref_logprobs, backend=backend)
        truth = 0.75 * math.log(0.75) + 0.25 * math.log(0.25 * 2**24)
        torch.testing.assert_close(kl.item(), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("words", [1, 4], ids=["one", "all"])
@every_tail
def test_words_that_the_student_never_says(backend, tail, words):
    """The forward KL is infinite, and the reverse KL has no term."""
    if (tail, words) == ("renormalize", 4):
        pytest.skip("has no student")
    logits, ids, ref_logprobs = al.teacher(1, 2, 37).values()
    logits[0, 0, ids[0, 0, :words]] = -math.inf
    options = {"tail": tail, "backend": backend}
    forward = klfast.topk_kl_divergence(logits, ids, ref_logprobs, **options)
    assert forward[0, 0] == math.inf
    assert forward[0, 1].isfinite()
    inputs = al.leaves(logits, ref_logprobs)
    for direction in (each for each in DIRECTIONS if each != "forward"):
        kl = klfast.topk_kl_divergence(inputs[0], ids, inputs[1], direction=direction, **options)
        assert kl.isfinite().all()
        grads = torch.autograd.grad(kl.sum(), inputs)
        assert all(grad.isfinite().all() for grad in grads)
        assert words == 1 or not grads[0][0, 0].any()  # no share of the student can move
        given = (logits, ids, ref_logprobs)
        assert not wrong_topk(backend, *given, direction=direction, tail=tail)
