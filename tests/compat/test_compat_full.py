"""The frameworks' ``full``: the KL of log-probs [..., V] of the whole vocabulary.

klfast takes them for logits, so that what it returns is the KL of distributions; the frameworks sum
what they are given. The truth is ``frameworks.full`` in float64 on the stored inputs, and what lies
between the two, which only rounding makes, follows from what the log-probs sum to.
"""

import math
from functools import partial

import frameworks
import oracle
import oracle_logits
import pytest
import torch

from klfast.compat import roll, trl

INF = math.inf
FULL = {
    "roll": partial(roll.compute_approx_kl, kl_penalty="full"),
    "trl": partial(trl.kl_penalty, kl_penalty="full"),
}
every_full = pytest.mark.parametrize("ours", FULL.values(), ids=FULL)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str
)
roll_full = FULL["roll"]
SHAPES = [(3, 4, 7), (5, 7), (2, 3, 2, 7)]


def distributions(shape, dtype=torch.float32, distance=1.0):
    """Log-probs of two distributions over the last dimension; 1 makes a KL of about 1."""
    logits = torch.randn(shape, dtype=torch.float64)
    ref_logits = logits + distance * torch.randn(shape, dtype=torch.float64)
    return [x.log_softmax(-1).to(dtype) for x in (logits, ref_logits)]


def differentiated(function, logprobs, ref_logprobs, upstream=None):
    """(value, gradient to logprobs, gradient to ref_logprobs) under an uneven upstream gradient."""
    leaves = [t.detach().requires_grad_() for t in (logprobs, ref_logprobs)]
    value = function(*leaves)
    if upstream is None:
        upstream = uneven(value.shape)
    return value.detach(), *torch.autograd.grad(value, leaves, upstream.to(value.dtype))


def uneven(shape):
    return torch.linspace(1, 1.75, math.prod(shape), dtype=torch.float64).reshape(shape)


def through_log_softmax(grad, logprobs):
    """A gradient as the backward of log_softmax hands it on to the logits."""
    return grad - logprobs.exp() * grad.sum(-1, keepdim=True)


class Truth:
    """In float64, of stored log-probs: theirs, and the KL of distributions with its tolerances.

    ``a`` and ``b`` are the logs of what the two sum to, 0 but for rounding. They are what lies
    between: theirs is e**a (KL + a - b), and at the logits the gradients differ by as little.
    """

    def __init__(self, logprobs, ref_logprobs):
        doubles = logprobs.double(), ref_logprobs.double()
        self.sums, *self.grads_of_sums = differentiated(frameworks.full, *doubles)
        upstream = uneven(self.sums.shape)
        ours = oracle_logits.kl_divergence(
            *(t.flatten(0, -2) for t in (logprobs, ref_logprobs)),
            upstream=(upstream.flatten(), None, None),
        )
        self.kl, self.tolerance = (t.reshape(upstream.shape) for t in ours[:2])
        grads = ours.grad, ours.grad_ref
        tolerances = ours.grad_tolerance, ours.grad_ref_tolerance
        self.grads = [t.reshape(logprobs.shape) for t in grads]
        self.grad_tolerances = [t.reshape(logprobs.shape) for t in tolerances]
        self.a, self.b = (t.logsumexp(-1) for t in doubles)
        apart = (self.a - self.b).abs()
        self.between = self.a.expm1().abs() * self.kl + self.a.exp() * apart
        off = torch.maximum(self.a.abs(), self.b.abs())[..., None]
        p, q = (t.softmax(-1) for t in doubles)
        terms = p * ((doubles[0] - doubles[1]).abs() + 2 * self.kl[..., None] + 1) + q
        self.grads_between = upstream[..., None] * 4 * off * terms


def rounding_in_float64(logprobs):
    """Of a sum over words of exp(logprobs) times numbers up to the largest log-prob."""
    largest = 1 + logprobs.double().abs().amax(-1)
    return 8 * (logprobs.shape[-1] + largest) * largest * oracle.unit_roundoff(torch.float64)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_full
def test_the_value_is_theirs_but_for_what_the_log_probs_do_not_sum_to_one(ours, shape, dtype):
    logprobs, ref_logprobs = distributions(shape, dtype)
    value, truth = ours(logprobs, ref_logprobs), Truth(logprobs, ref_logprobs)
    assert value.dtype == oracle.arithmetic_dtype(logprobs)
    oracle.assert_within(value, truth.kl, truth.tolerance, "KL of the distributions")
    oracle.assert_within(value, truth.sums, truth.tolerance + truth.between, "value")

    as_said = truth.a.exp() * (truth.kl + truth.a - truth.b)
    assert ((truth.sums - as_said).abs() <= rounding_in_float64(ref_logprobs)).all()
    if dtype == torch.float64:  # nothing but rounding is between them
        assert (truth.between <= rounding_in_float64(ref_logprobs)).all()


@pytest.mark.parametrize("words", [7, 1000])
def test_rounded_log_probs_sum_to_one_as_far_as_is_said(words):
    logprobs, _ = distributions((50, words), torch.bfloat16)
    off = logprobs.double().logsumexp(-1).abs()
    entropy = frameworks.entropy_of(logprobs.double())
    assert off.max() > 1e-4
    assert (off <= 1.05 * 2**-8 * entropy).all()  # 1.05: exp of the rounding is no straight line


@every_full
def test_near_on_policy_bf16_leaves_a_kl_where_theirs_is_rounding(ours):
    logprobs, ref_logprobs = distributions((200, 50), torch.bfloat16, distance=0.01)
    value = ours(logprobs, ref_logprobs)
    truth = Truth(logprobs, ref_logprobs)
    assert (truth.sums < 0).any()
    assert (value >= 0).all()
    oracle.assert_within(value, truth.kl, truth.tolerance, "value")
    assert (ours(logprobs, logprobs) == 0).all()


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_full
def test_the_gradient_is_that_of_distributions_and_theirs_at_the_logits(ours, shape, dtype):
    logprobs, ref_logprobs = distributions(shape, dtype)
    truth = Truth(logprobs, ref_logprobs)
    _, *grads = differentiated(ours, logprobs, ref_logprobs)
    for grad, exact, tolerance in zip(grads, truth.grads, truth.grad_tolerances, strict=True):
        assert grad.dtype == dtype
        oracle.assert_within(grad, exact, tolerance, "gradient")

    for mine, theirs, of in zip(
        truth.grads, truth.grads_of_sums, (logprobs, ref_logprobs), strict=True
    ):
        assert (mine - theirs).abs().amax() > 0.1  # of numbers that need not sum to one
        mine, theirs = (through_log_softmax(g, of.double()) for g in (mine, theirs))
        allowed = truth.grads_between + 4 * rounding_in_float64(ref_logprobs)[..., None]
        assert ((mine - theirs).abs() <= allowed).all()


@every_full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_model_s_logits(ours, dtype):
    logits, ref_logits = torch.randn(2, 6, 5, 11, dtype=torch.float64).to(dtype)

    def of_logits(function):
        return lambda x, y: function(x.log_softmax(-1), y.log_softmax(-1))

    truth = differentiated(of_logits(frameworks.full), logits.double(), ref_logits.double())

    def errors(function):
        results = differentiated(of_logits(function), logits, ref_logits)
        return [(r - exact).norm() for r, exact in zip(results, truth, strict=True)]

    for mine, theirs, exact in zip(errors(ours), errors(frameworks.full), truth, strict=True):
        assert mine <= 2 * theirs + oracle.unit_roundoff(dtype) * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@every_full
def test_exact_is_their_own_sum_gradient_and_dtype(ours, dtype):
    logprobs, ref_logprobs = distributions((5, 7), dtype)
    exact = partial(ours, exact=True)
    assert exact(logprobs, ref_logprobs).dtype == dtype
    doubles = [logprobs.double(), ref_logprobs.double()]
    truth = differentiated(frameworks.full, *doubles)
    for result, true in zip(differentiated(exact, *doubles), truth, strict=True):
        torch.testing.assert_close(result, true, rtol=1e-13, atol=1e-15)


@every_full
def test_a_word_that_the_policy_never_says_adds_nothing(ours):
    logprobs, ref_logprobs = distributions((4, 6))
    logprobs[:, 2] = -INF
    ref_logprobs[2:, 2] = -INF
    value, grad, grad_ref = differentiated(ours, logprobs, ref_logprobs)
    assert value.isfinite().all()
    assert (grad[:, 2] == 0).all()
    assert (grad_ref[2:, 2] == 0).all()
    assert frameworks.full(logprobs, ref_logprobs).isnan().any()
    assert ours(logprobs, ref_logprobs, exact=True)[2:].isnan().all()
    # Where neither says it, it might as well not be there: but for sums in another order.
    kept = [0, 1, 3, 4, 5]
    few = differentiated(ours, logprobs[2:, kept], ref_logprobs[2:, kept], uneven((4,))[2:])
    for result, other in zip((value[2:], grad[2:, kept], grad_ref[2:, kept]), few, strict=True):
        torch.testing.assert_close(result, other)


def test_it_is_infinite_where_the_reference_never_says_what_the_policy_says():
    logprobs, ref_logprobs = distributions((2, 3))
    ref_logprobs[0, 1] = -INF
    kl = roll_full(logprobs, ref_logprobs)
    assert kl[0] == INF
    assert kl[1].isfinite()


MASKS = {
    "boolean": torch.tensor([True, False, True, True, False]),
    "integers": torch.tensor([1, 0, 1, 0, 0]),
    "weights": torch.tensor([1.0, 0.25, 0.0, 2.0, 0.5]),
}


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 3, 5, 7), (5, 7)], ids=str)
def test_masks_and_weights(shape, mask, exact):
    logprobs, ref_logprobs = distributions(shape)
    mask, ones = mask.expand(shape[:-1]), torch.ones(shape[:-1])
    function = partial(roll_full, exact=exact)
    unmasked = differentiated(function, logprobs, ref_logprobs, ones)
    masked = differentiated(partial(function, action_mask=mask), logprobs, ref_logprobs, ones)
    assert torch.equal(masked[0], mask * unmasked[0])
    for result, plain in zip(masked[1:], unmasked[1:], strict=True):
        torch.testing.assert_close(result, mask[..., None] * plain)
        assert (result[mask == 0] == 0).all()


@pytest.mark.parametrize("garbage", [math.nan, INF], ids=str)
def test_garbage_under_the_mask_stays_there_unless_exact(garbage):
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    clean = distributions((2, 3, 4))
    dirty = [torch.where(mask[..., None] == 0, garbage, t) for t in clean]
    ours = partial(roll_full, action_mask=mask)
    expected = differentiated(ours, *clean)
    for result, unharmed in zip(differentiated(ours, *dirty), expected, strict=True):
        assert torch.equal(result, unharmed)
    exact = roll_full(*dirty, mask, exact=True)
    assert torch.equal(exact.isnan(), mask == 0)


def test_a_vocabulary_of_one_shape_is_needed():
    whole = torch.zeros(2, 3, 4)
    for ours in FULL.values():
        with pytest.raises(ValueError, match="whole vocabulary"):
            ours(torch.zeros(3), torch.zeros(3))
        with pytest.raises(ValueError, match=r"\[2, 3, 4\] and \[2, 3\]"):
            ours(whole, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"mask must have the shape .*\[2, 3\], got \[2, 3, 4\]"):
        roll_full(whole, whole, whole)
    with pytest.raises(ValueError, match=r"mask must have the shape .*\[3\], got \[4, 3\]"):
        roll_full(torch.zeros(3, 4), torch.zeros(3, 4), torch.ones(4, 3))
