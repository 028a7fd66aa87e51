"""The reference over logits against the textbook in mpmath, differentiated by quotients."""

from functools import partial

import mpmath
import pytest
import torch
from agreement_logits import differentiated, every_direction, leaves
from extreme_logits import EXTREME, heights, pairs
from mpmath import mpf

import klfast
from klfast.types.names import DIRECTIONS

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
WEIGHTS = (1e-4, 0.1, 0.5, 0.9, 0.9999)
KINDS = {
    "reverse": ("reverse", {}),
    "tv": ("tv", {}),
    **{f"jsd-{b}": ("jsd", {"jsd_beta": b}) for b in WEIGHTS},
    **{f"skew-{a}": ("skew-reverse", {"skew_alpha": a}) for a in (1e-30, *WEIGHTS)},
    "skew-forward": ("skew-forward", {"skew_alpha": 0.3}),
}


@pytest.fixture(autouse=True)
def _digits():
    with mpmath.workdps(100):
        yield


every_pair = pytest.mark.parametrize(("x", "y"), PAIRS.values(), ids=PAIRS)
every_kind = pytest.mark.parametrize(("direction", "parameter"), KINDS.values(), ids=KINDS)


def softmax(logits, temperature):
    """Probabilities; 0 for -inf."""
    weights = [mpmath.exp(x / mpf(temperature)) if x != -INF else mpf(0) for x in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def kl(p, q):
    """An entry's term."""
    return p * mpmath.log(p / q) if p and q else mpmath.inf if p else mpf(0)


def term(direction, parameter, p, q):
    """The term of an entry with these probabilities."""
    (b,) = map(mpf, parameter.values() or (0,))
    formulas = {
        "reverse": lambda: kl(p, q),
        "forward": lambda: kl(q, p),
        "jsd": lambda: (1 - b) * kl(p, (1 - b) * p + b * q) + b * kl(q, (1 - b) * p + b * q),
        "tv": lambda: abs(p - q) / 2,
        "skew-reverse": lambda: kl(p, b * p + (1 - b) * q),
        "skew-forward": lambda: kl(q, b * q + (1 - b) * p),
    }
    return formulas[direction]()


def textbook(direction, parameter, x, y, temperature):
    both = softmax(x, temperature), softmax(y, temperature)
    return sum(term(direction, parameter, *of) for of in zip(*both, strict=True))


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
    """The error is at most 1e-12 of the number or of ``scale``."""
    expected = torch.tensor([float(number) for number in expected], dtype=torch.float64)
    torch.testing.assert_close(actual.flatten(), expected, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [1.0, 0.1, 10.0])
@every_kind
@every_pair
def test_divergences_and_gradients(x, y, direction, parameter, temperature):
    """Errors are at most 1e-12 relative, or a rounding of 1 in float64."""
    options = {"direction": direction, **parameter}
    found, *grads = differentiated(
        lambda x, y: klfast.kl_divergence(
            x, y, temperature=temperature, backend="reference", **options
        ).sum(),
        row(x),
        row(y),
    )
    x, y = exact(x), exact(y)
    size = 1 + max(abs(float(a - c)) for a, c in zip(x, y, strict=True) if -INF not in (a, c))
    value = float(textbook(direction, parameter, x, y, temperature))
    assert abs(found.item() - value) <= 1e-12 * value + 1e-15 * size
    of_x = slopes(lambda x: textbook(direction, parameter, x, y, temperature), x)
    of_y = slopes(lambda y: textbook(direction, parameter, x, y, temperature), y)
    for grad, slope in zip(grads, (of_x, of_y), strict=True):
        assert_close(grad, slope, size * 1e-2)


def gradients(direction, parameter, p, q):
    """The gradients of both models' logits, from quotients in the probabilities."""
    of, up, down = partial(term, direction, parameter), 1 + STEP, 1 - STEP
    of_p = [(of(a * up, b) - of(a * down, b)) / (2 * STEP) for a, b in zip(p, q, strict=True)]
    of_q = [(of(a, b * up) - of(a, b * down)) / (2 * STEP) for a, b in zip(p, q, strict=True)]
    for own, slopes in ((p, of_p), (q, of_q)):
        total = sum(slopes)
        yield [slope - share * total for slope, share in zip(slopes, own, strict=True)]


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.exhaustive), 4.0])
@every_direction
def test_logits_up_to_the_largest_number(direction, temperature):
    """At 1,300 bits every difference of two fp32 logits is exact."""
    models = leaves(*(t[::3].double() for t in pairs(4, torch.float32)))
    parameter = {"skew_alpha": 0.1} if "skew" in direction else {}
    parameter = {"jsd_beta": 0.5} if direction == "jsd" else parameter
    options = {"direction": direction, "temperature": temperature, "backend": "reference"}
    ids = models[0].argmin(-1)
    found = klfast.kl_divergence(*models, token_ids=ids, **options, **parameter)
    grads = torch.autograd.grad(found.kl.sum(), models)
    columns = (t.tolist() for t in (*models, ids, *found[:2], *grads))
    with mpmath.workprec(1300):
        for x, y, token_id, kl, logprob, *of_models in zip(*columns, strict=True):
            p, q = softmax(exact(x), temperature), softmax(exact(y), temperature)
            value = float(sum(map(partial(term, direction, parameter), p, q)))
            assert kl == pytest.approx(value, rel=1e-12, abs=1e-14)
            assert logprob == pytest.approx(float(mpmath.log(p[token_id])), rel=1e-12)
            if value == INF:
                continue
            for of, truth in zip(of_models, gradients(direction, parameter, p, q), strict=True):
                scaled = [float(slope / temperature) for slope in truth]
                assert of == pytest.approx(scaled, rel=1e-11, abs=1e-14 * max(1, value))
    assert len({*heights(torch.float32)}) == 2 * len(EXTREME)


@pytest.mark.parametrize("temperature", [0.1, 0.7])
@pytest.mark.parametrize("x", [pair[0] for pair in PAIRS.values()], ids=PAIRS)
def test_log_probs_and_entropies(x, temperature):
    numbers = exact(x)
    for k in (k for k, logit in enumerate(x) if logit != -INF):
        functions = {
            "logprobs": lambda x, k=k: mpmath.log(softmax(x, temperature)[k]),
            "entropy": lambda x: -sum(p * mpmath.log(p) for p in softmax(x, temperature) if p),
        }
        options = {"temperature": temperature, "return_entropy": True, "backend": "reference"}
        for name, textbook_of in functions.items():
            found, grad = differentiated(
                lambda x, k=k, name=name, options=options: getattr(
                    klfast.token_logprobs(x, torch.tensor([k]), **options), name
                ),
                row(x),
            )
            assert_close(found, [textbook_of(numbers)], 1e-2)
            assert_close(grad, slopes(textbook_of, numbers), 1.0)


def test_log_probs_and_entropies_are_each_models_in_every_direction():
    """The reference is the first model of a forward KL, skewed or not."""
    x, y, ids = torch.randn(3, 7), torch.randn(3, 7), torch.tensor([1, 0, 6])
    p, q = (model.log_softmax(-1) for model in (x, y))
    for direction in DIRECTIONS:
        options = {"direction": direction, "return_entropy": True, "backend": "reference"}
        found = klfast.kl_divergence(x, y, token_ids=ids, **options)
        torch.testing.assert_close(found.logprobs, p.gather(-1, ids[:, None])[:, 0])
        torch.testing.assert_close(found.ref_logprobs, q.gather(-1, ids[:, None])[:, 0])
        torch.testing.assert_close(found.entropy, -(p.exp() * p).sum(-1))
