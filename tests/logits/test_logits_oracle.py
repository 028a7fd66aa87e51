"""The oracle over logits against the textbook in mpmath, differentiated by quotients."""

import mpmath
import oracle_divergences
import pytest
import torch
from mpmath import mpf
from oracle_divergences import Pair, Words

STEP = mpf(10) ** -30
INF = torch.inf

PAIRS = {
    "ordinary": ([0.5, -1.0, 2.0, 0.25, -3.0], [0.0, -1.5, 2.5, 1.0, -2.0]),
    "one-word": ([3.0], [-2.0]),
    "near": ([0.5, -1.0, 2.0, 0.25, -3.0], [0.5001, -1.0002, 2.0003, 0.25, -3.0001]),
    "nearer-and-shifted": ([0.5, -1.0, 2.0, 0.25, -3.0], [8.5, 7.0, 10.0, 8.25, 5 + 1e-6]),
    "equal-but-for-a-shift": ([0.5, -1.0, 2.0], [-999.5, -1001.0, -998.0]),
    "far": ([40.0, 0.0, -3.0, 1.0], [-20.0, 3.0, -50.0, 30.0]),
    "peaked-and-flat": ([90.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
    "flat-and-peaked": ([0.0, 0.0, 0.0, 0.0], [0.0, 90.0, 0.0, 0.0]),
    "policy-leaves-out": ([1.0, -INF, 2.0, -INF], [0.5, 0.0, 2.0, 3.0]),
    "both-leave-out": ([1.0, -INF, 2.0, -INF], [0.5, -INF, 2.5, 1.0]),
}
BOTH_WAYS = ("policy-leaves-out", "both-leave-out")
KINDS = {"kl": ("kl", 0.5), **{f"jsd-{b}": ("jsd", b) for b in (1e-4, 0.1, 0.5, 0.9, 0.9999)}}

every_pair = pytest.mark.parametrize(("x", "y"), PAIRS.values(), ids=PAIRS)
every_kind = pytest.mark.parametrize(("kind", "b"), KINDS.values(), ids=KINDS)


def softmax(logits, temperature):
    """Probabilities; 0 for -inf."""
    weights = [mpmath.exp(x / mpf(temperature)) if x != -INF else mpf(0) for x in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def kl(p, q):
    return sum(a * mpmath.log(a / b) for a, b in zip(p, q, strict=True) if a)


def textbook(kind, b, x, y, temperature):
    p, q = softmax(x, temperature), softmax(y, temperature)
    if kind == "kl":
        return kl(p, q)
    b = mpf(b)
    m = [(1 - b) * a + b * c for a, c in zip(p, q, strict=True)]
    return (1 - b) * kl(p, m) + b * kl(q, m)


def slopes(function, x):
    """The gradient of a function of a list by difference quotients; 0 at -inf."""
    found = []
    for i, number in enumerate(x):
        ends = [function([*x[:i], number + step, *x[i + 1 :]]) for step in (STEP, -STEP)]
        found.append((ends[0] - ends[1]) / (2 * STEP) if number != -INF else mpf(0))
    return found


def exact(numbers):
    return [mpf(number) if number != -INF else number for number in numbers]


def row(numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def assert_close(actual, expected, scale=0.0):
    """To 1e-12 of itself, or of a scale that it is a difference on."""
    expected = torch.tensor([float(number) for number in expected], dtype=torch.float64)
    torch.testing.assert_close(actual.flatten(), expected, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@every_kind
@every_pair
def test_divergences_and_gradients(x, y, kind, b, temperature):
    """Each gradient to 1e-12 of the divergence's own scale: p times the mean of abs(log(p/q))."""
    pair = Pair(row(x), row(y), temperature, torch.float64)
    found = oracle_divergences.divergence(pair, kind, b, temperature)
    x, y = exact(x), exact(y)
    value = textbook(kind, b, x, y, temperature)
    # A shift of 8 or 1000 leaves so many digits of differences that are stored as 1e-6.
    shift = float(abs(pair.second.lse - pair.first.lse))
    spread = float(pair.u[pair.u.isfinite()].abs().max())
    lost = shift / spread if spread > 1e-12 else 0.0
    if spread <= 1e-12:  # but for rounding in float64, equal
        assert abs(float(value)) < 1e-24
        assert 0 <= found.value.item() < 1e-24
        return
    torch.testing.assert_close(found.value.item(), float(value), rtol=1e-12 * (1 + lost), atol=0)
    of_x = slopes(lambda x: textbook(kind, b, x, y, temperature), x)
    of_y = slopes(lambda y: textbook(kind, b, x, y, temperature), y)
    scale = (1 + lost) * spread
    assert_close(found.grad_first, of_x, scale)
    assert_close(found.grad_second, of_y, scale)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("x", [pair[0] for pair in PAIRS.values()], ids=PAIRS)
def test_log_probs_and_entropies(x, temperature):
    words = Words(row(x), temperature, torch.float64)
    for k, logit in enumerate(x):
        if logit == -INF:
            continue
        found = oracle_divergences.tokens(words, torch.tensor([k]), temperature)

        def logprob(x, k=k):
            return mpmath.log(softmax(x, temperature)[k])

        def entropy(x):
            return -sum(p * mpmath.log(p) for p in softmax(x, temperature) if p)

        numbers = exact(x)
        assert_close(found.logprobs, [logprob(numbers)])
        assert_close(found.entropy, [entropy(numbers)])
        assert_close(found.grad, slopes(logprob, numbers), 1.0)
        assert_close(found.entropy_grad, slopes(entropy, numbers), 1.0)


def test_a_word_that_the_reference_excludes_is_infinitely_far():
    pair = Pair(row([1.0, 2.0]), row([0.0, -INF]), 1.0, torch.float64)
    assert oracle_divergences.kl(pair)[0] == INF
    assert torch.isfinite(oracle_divergences.jsd(pair, 0.5)[0])


def test_tolerances_would_not_forgive_a_wrong_word():
    """Of fp32 inputs a hundred-thousandth of a gradient, and the promise of a value."""
    x = torch.randn(4, 50)
    pair = Pair(x, x + 0.3 * torch.randn(4, 50), 1.0, torch.float32)
    for kind in ("kl", "jsd"):
        found = oracle_divergences.divergence(pair, kind, 0.5, 1.0)
        assert (found.value_tolerance < 1e-5 * found.value).all()
        for grad, tolerance in (found[2:4], found[4:6]):
            assert (tolerance < 2e-5 * grad.abs().amax(-1, keepdim=True)).all()
