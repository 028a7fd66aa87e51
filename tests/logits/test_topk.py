"""topk_kl_divergence: any number of entries, and the edges of each tail."""

import math

import pytest
import torch
from agreement_logits import (
    every_direction,
    leaves,
    random_logits,
    teacher,
    wrong,
)

import klfast
from klfast.types.names import TAILS

pytestmark = pytest.mark.usefixtures("one_thread")


every_tail = pytest.mark.parametrize("tail", TAILS)


LEAVES = ("logits", "ref_logprobs")


def wrong_topk(backend, *given, **options):
    """The divergences and gradients that are off by more than allowed."""
    names = ("logits", "ref_token_ids", "ref_logprobs")
    given = dict(zip(names, given, strict=True))
    return wrong(backend, "topk_kl_divergence", LEAVES, **given, **options)


@pytest.mark.grid
@pytest.mark.parametrize("entries", [1, 2, 31, 64, 65, 200])
@pytest.mark.parametrize("words", [200, 2500])
@every_tail
@every_direction
def test_any_number_of_entries(backend, direction, tail, words, entries):
    if (tail, entries) == ("renormalize", 1):
        pytest.skip("is refused")
    given = teacher(1, 2, words, entries=entries).values()
    assert not wrong_topk(backend, *given, direction=direction, tail=tail, jsd_beta=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_direction
def test_a_whole_vocabulary_is_the_divergence(backend, direction, dtype):
    """Every tail is then 0, except for the least bucket."""
    logits, ref_logits = random_logits(2, 3, 37, dtype=dtype)
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
@every_direction
def test_a_student_that_is_the_teacher_is_at_0(backend, direction, tail):
    """The gradient is 0. Only "drop" may be negative by rounding."""
    logits = random_logits(4, 8, 300)[0]
    logprobs = logits.double().log_softmax(-1)
    top = logprobs.topk(5)
    leaf = logits.requires_grad_()
    kl = klfast.topk_kl_divergence(
        leaf, top.indices, top.values, direction=direction, tail=tail, backend=backend
    )
    assert kl.abs().max() <= (1e-6 if tail == "drop" else 1e-12)
    assert tail == "drop" or kl.min() >= 0
    options = {"direction": direction, "tail": tail, "backend": backend}
    own = klfast.token_logprobs(logits.detach(), top.indices, backend=backend)
    for ref_logprobs in (own, own.transpose(0, 1).contiguous().transpose(0, 1)):
        assert not klfast.topk_kl_divergence(leaf, top.indices, ref_logprobs, **options).any()
    if tail != "drop":
        (grad,) = torch.autograd.grad(kl.sum(), leaf)
        assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("excess", [0.0, 1e-7, 1e-3])
@every_direction
def test_log_probs_that_sum_to_1_or_more(backend, direction, excess):
    """The sum is above 1 by rounding. The rest is 2^-24, and the result is finite."""
    logits = random_logits(1, 2, 37)[0]
    top = logits.log_softmax(-1).topk(3)
    ref_logprobs = torch.log_softmax(top.values, -1) + math.log1p(excess)
    assert not wrong_topk(backend, logits, top.indices, ref_logprobs, direction=direction)


def bucketed(logits, ids, ref_logprobs, direction):
    """The divergence of three entries, with the student's tail from its own words."""
    words = logits.log_softmax(-1)
    tail = words[..., 3:].logsumexp(-1, keepdim=True)
    q = torch.cat([words.gather(-1, ids), tail], -1)
    p = torch.cat([ref_logprobs, (-ref_logprobs.logsumexp(-1, keepdim=True).expm1()).log()], -1)
    m = torch.logaddexp(p, q) - math.log(2)
    pairs = {"forward": [(p, q)], "reverse": [(q, p)], "jsd": [(p, m), (q, m)]}[direction]
    return sum((x.exp() * (x - y)).sum(-1) for x, y in pairs) / len(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("margin", [8.0, 12.0, 15.0])
@every_direction
def test_a_tail_of_the_student_near_nothing_has_its_gradient(backend, direction, margin, dtype):
    """The clamps of other frameworks end the gradient. 1 - Q is 1e-7 at a margin of 15."""
    logits = torch.zeros(1, 2, 37, dtype=dtype)
    logits[..., :3] = torch.tensor([margin + 1, margin + 1.5, margin])
    ref_logprobs = torch.tensor([0.4, 0.3, 0.2]).log().expand(1, 2, 3)
    ids = torch.tensor([2, 0, 1]).expand(1, 2, 3)
    (leaf,), (wide,) = leaves(logits), leaves(logits.double())
    kl = klfast.topk_kl_divergence(leaf, ids, ref_logprobs, direction=direction, backend=backend)
    exact = bucketed(wide, ids, ref_logprobs.double(), direction)
    results = [
        (value.detach(), *torch.autograd.grad(value.sum(), inputs))
        for value, inputs in ((kl, leaf), (exact, wide))
    ]
    rest = 1 - logits.double().softmax(-1)[0, 0, :3].sum()
    for found, exact in zip(*results, strict=True):  # 1 less log-probs that round
        allowed = (2**-22 / rest + torch.finfo(found.dtype).eps) * exact.abs()
        assert ((found - exact).abs() <= allowed + 2**-24 * (exact.abs().amax())).all()
    grad = results[0][1]
    assert (grad[..., 3:] < 0).all()  # towards the words that the student leaves out


@every_direction
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
    logits, ids, ref_logprobs = teacher(1, 2, 37).values()
    logits[0, 0, ids[0, 0, :words]] = -math.inf
    options = {"tail": tail, "backend": backend}
    forward = klfast.topk_kl_divergence(logits, ids, ref_logprobs, **options)
    assert forward[0, 0] == math.inf
    assert forward[0, 1].isfinite()
    inputs = leaves(logits, ref_logprobs)
    for direction in ("reverse", "jsd"):
        kl = klfast.topk_kl_divergence(inputs[0], ids, inputs[1], direction=direction, **options)
        assert kl.isfinite().all()
        grads = torch.autograd.grad(kl.sum(), inputs)
        assert all(grad.isfinite().all() for grad in grads)
        assert words == 1 or not grads[0][0, 0].any()  # no share of the student can move
        given = (logits, ids, ref_logprobs)
        assert not wrong_topk(backend, *given, direction=direction, tail=tail)
