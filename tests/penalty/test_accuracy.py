"""Value and gradient of every estimator to a few units in the last place, everywhere."""

import functools
import math

import mpmath
import oracle
import pytest
import torch
from agreement import penalty_and_grads

import klfast
from klfast.args.estimator import ESTIMATORS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

LAST = {torch.float64: 709.0}
"""The largest log-ratio of a sweep. It is 88 except in fp64, because exp of more overflows."""


def sweep(dtype):
    """Log-ratios of both signs from 1e-7 to the last, and points where a kernel could go wrong.

    These are 0, the switch between series at 1, the edges ln2/2 of exp's range reduction, and
    numbers close to overflow.
    """
    last = LAST.get(dtype, 88.0)
    grid = torch.logspace(-7, math.log10(last), 300, dtype=torch.float64)
    edges = torch.arange(1, int(2 * last / math.log(2))) * (math.log(2) / 2)
    special = torch.tensor([1.0, math.log(2), 0.5, 2.0, last, last - 0.5], dtype=torch.float64)
    centers = torch.cat([edges[:: max(1, len(edges) // 250)], special]).to(dtype)
    if dtype not in (torch.float32, torch.float64):
        magnitudes = torch.cat([grid.to(dtype), centers])
    else:
        around = [centers.nextafter(torch.full_like(centers, way)) for way in (0, math.inf)]
        magnitudes = torch.cat([grid.to(dtype), centers, *around])
    return torch.cat([magnitudes, -magnitudes, torch.zeros(1, dtype=dtype)])


@functools.cache
def sweep_truth(estimator, dtype):
    """(value, derivative) on the sweep."""
    x = [mpmath.mpf(x) for x in sweep(dtype).tolist()]
    f = oracle.CONTRACT[estimator]
    return exact(f(x) for x in x), exact(oracle.slope(f, x) for x in x)


def exact(numbers):
    """Numbers of mpmath as an unevaluated sum of two float64 tensors."""
    numbers = list(numbers)
    high = [float(number) for number in numbers]
    rest = [float(n - h) if math.isfinite(h) else 0.0 for n, h in zip(numbers, high, strict=True)]
    return torch.tensor(high, dtype=torch.float64), torch.tensor(rest, dtype=torch.float64)


def assert_promised(actual, truth, log_ratios, arithmetic, slack=0.0):
    """Check the relative error against the promise plus the rounding to the gradient's dtype.

    Results below the normal range are exempt. Beyond the range infinity is right.
    """
    high, rest = truth
    x = log_ratios.double()
    promised = torch.tensor([oracle.promise(x, arithmetic) for x in x.tolist()])
    if actual.dtype != arithmetic:
        promised += oracle.unit_roundoff(actual.dtype)
    error = ((actual.double() - high) - rest).abs()
    stored = torch.finfo(actual.dtype)
    least = max(torch.finfo(arithmetic).tiny, stored.tiny, float(oracle.STEP**2))
    good = error <= promised * high.abs() + slack
    good |= (high.abs() < least) & (error <= least)
    overflows = high.abs() * (1 + promised) > stored.max
    good |= overflows & (actual.double() == high.sign() * math.inf)
    relative = error / high.abs()
    worst = [(float(x[i]), float(relative[i])) for i in (~good).nonzero().flatten()[:3]]
    assert good.all(), f"(x, relative error) {worst} and {int((~good).sum())} in all"


def textbook_slack(backend, arithmetic, log_ratios):
    """The error that the reference may have beyond the promise.

    It computes in float64 whatever comes in, so it keeps the promise in fp32. In fp64 it has the
    cancellation of the textbook formulas.
    """
    textbook = backend == "reference" and arithmetic == torch.float64
    if not textbook:
        return 0.0
    errors = [oracle.textbook_error(x) for x in log_ratios.tolist()]
    return torch.tensor(errors, dtype=torch.float64)


@every_dtype
@every_estimator
def test_value_and_gradients_on_the_sweep(backend, estimator, dtype):
    """ref_logprobs are 0, so the log-ratio is exact."""
    x = sweep(dtype)
    arithmetic = torch.promote_types(dtype, torch.float32)
    slack = textbook_slack(backend, arithmetic, x)
    true_value, true_derivative = sweep_truth(estimator, dtype)

    value, (grad, grad_ref) = penalty_and_grads(backend, estimator, x, torch.zeros_like(x))
    assert value.dtype == arithmetic
    assert grad.dtype == grad_ref.dtype == dtype
    assert_promised(value, true_value, x, arithmetic, slack)
    assert_promised(grad, true_derivative, x, arithmetic, slack)
    assert_promised(-grad_ref, true_derivative, x, arithmetic, slack)


@pytest.mark.grid
@pytest.mark.parametrize("return_stats", [False, True], ids=["no-stats", "stats"])
@pytest.mark.parametrize("reduction", ["none", "token-sum"])
@every_estimator
def test_every_pass_of_a_backend_keeps_the_promise(backend, estimator, reduction, return_stats):
    """The gradient has a read of its own or comes from the forward, with or without statistics."""
    x = sweep(torch.float32)
    inside = x.abs() < 40  # so that the sum stays finite
    logprobs = x[inside].requires_grad_()
    true_value, true_derivative = (
        (high[inside], rest[inside]) for high, rest in sweep_truth(estimator, torch.float32)
    )
    options = {"reduction": reduction, "return_stats": return_stats, "backend": backend}
    result = klfast.kl_penalty(
        logprobs,
        logprobs.new_zeros(()).expand_as(logprobs).detach(),
        estimator=estimator,
        **options,
    )
    result = result[0] if return_stats else result
    (grad,) = torch.autograd.grad(result.sum(), logprobs)
    assert_promised(grad, true_derivative, logprobs.detach(), torch.float32)
    if reduction == "none":
        assert_promised(result.detach(), true_value, logprobs.detach(), torch.float32)


@pytest.mark.parametrize("estimator", ["k3", "k3_ref"])
def test_k3_of_the_reference_is_not_negative_under_any_expm1(monkeypatch, estimator):
    """A library's results may be the next number below. The gradient stays the same."""
    exact = torch.expm1

    def next_below(x):
        return exact(x) - (exact(x) - exact(x).nextafter(x - 1)).detach()

    monkeypatch.setattr(torch, "expm1", next_below)
    x = 10.0 ** -torch.arange(1, 40, dtype=torch.float64)
    x = torch.cat([x, -x])
    k3, (grad, _) = penalty_and_grads("reference", estimator, x, torch.zeros_like(x))
    assert (k3 == 0).any()
    assert (k3 >= 0).all()
    sign = 1 if estimator == "k3_ref" else -1
    torch.testing.assert_close(grad, sign * exact(sign * x), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_estimator
def test_beyond_the_range_of_exp_results_saturate(backend, estimator, dtype):
    """Results are infinite with the right sign or finite, and never NaN, for finite log-ratios."""
    magnitudes = torch.tensor([89.0, 104.0, 150.0, 710.0, 746.0, 1e4, 1e15], dtype=dtype)
    x = torch.cat([magnitudes, -magnitudes])
    f = oracle.CONTRACT[estimator]
    numbers = [mpmath.mpf(value) for value in x.tolist()]
    value, (grad, _) = penalty_and_grads(backend, estimator, x, torch.zeros_like(x))
    assert_promised(value, exact(f(number) for number in numbers), x, dtype)
    assert_promised(grad, exact(oracle.slope(f, number) for number in numbers), x, dtype)


@every_dtype
@pytest.mark.parametrize("estimator", ["k3", "k3_ref"])
def test_k3_is_not_negative_at_infinity_either(backend, estimator, dtype):
    x = torch.tensor([math.inf, -math.inf], dtype=dtype)
    k3 = klfast.kl_penalty(x, torch.zeros_like(x), estimator=estimator, backend=backend)
    assert not k3.isfinite().any()
    assert not (k3 < 0).any()


@every_dtype
def test_r_log_r_of_what_the_policy_excludes_is_0(backend, dtype):
    x = torch.tensor([-math.inf], dtype=dtype)
    value, (grad, _) = penalty_and_grads(backend, "r_log_r", x, torch.zeros_like(x))
    assert value == 0
    assert grad == 0
