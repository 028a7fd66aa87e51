"""The kernel against eager PyTorch in float64: results, gradients, statistics, torch.compile.

On a GPU, or on a CPU with Triton's interpreter (TRITON_INTERPRET=1), `triton` is tested too. Errors
are at most twice the errors of eager PyTorch in fp32, plus one rounding.
"""

import os

import kernels
import pytest
import torch

klfast = kernels.get_kernel("klfast/klfast", version=0)
pytestmark = pytest.mark.kernels_ci

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_TRITON = DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
NO_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs a GPU, or TRITON_INTERPRET=1")
EPS = torch.finfo(torch.float32).eps

ESTIMATORS = {
    "k1": lambda x: x,
    "abs": torch.abs,
    "k2": lambda x: x.square() / 2,
    "k3": lambda x: torch.exp(-x) - 1 + x,
    "k3_ref": lambda x: torch.exp(x) - 1 - x,
    "r_log_r": lambda x: torch.exp(x) * x,
}
REDUCTIONS = {
    "none": lambda kl, mask: kl,
    "seq-sum": lambda kl, mask: kl.sum(1),
    "seq-mean": lambda kl, mask: kl.sum(1) / mask.sum(1).clamp(min=1),
    "token-sum": lambda kl, mask: kl.sum(),
    "token-mean": lambda kl, mask: kl.sum() / mask.sum(),
    "seq-mean-token-sum": lambda kl, mask: kl.sum() / (mask.sum(1) > 0).sum(),
    "seq-mean-token-mean": lambda kl, mask: (
        (kl.sum(1) / mask.sum(1).clamp(min=1)).sum() / (mask.sum(1) > 0).sum()
    ),
}
DIVERGENCES = {
    "reverse": lambda p, q: (p.exp() * (p - q)).sum(-1),
    "forward": lambda p, q: (q.exp() * (q - p)).sum(-1),
    "jsd": lambda p, q: jsd(p, q, torch.logaddexp(p, q) - torch.log(p.new_tensor(2.0))),
}


def jsd(p, q, middle):
    return ((p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)) / 2


@pytest.fixture(params=[pytest.param("triton", marks=NO_TRITON), "reference"])
def backend(request):
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def batch():
    """Log-probs of two models and a mask, with NaN under the mask and a sequence without tokens."""
    logprobs = -4 - 3 * torch.rand(4, 9, device=DEVICE)
    ref_logprobs = logprobs - torch.randn(4, 9, device=DEVICE)
    mask = torch.rand(4, 9, device=DEVICE) < 0.7
    mask[2] = False
    ref_logprobs[~mask] = torch.nan
    return logprobs, ref_logprobs, mask


def of_eager(formula, *inputs, dtype):
    """The value of a formula, and the gradients of its weighted sum."""
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    value = formula(*inputs)
    return value.detach(), *torch.autograd.grad((value * ramp(value)).sum(), inputs)


def ramp(value):
    """Uneven gradients for a result."""
    return torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=DEVICE).view(value.shape)


def assert_as_exact_as_eager(results, formula, *inputs):
    truths = of_eager(formula, *inputs, dtype=torch.float64)
    eager = of_eager(formula, *inputs, dtype=torch.float32)
    for result, truth, rounded in zip(results, truths, eager, strict=True):
        allowed = 2 * (rounded - truth).abs().max() + EPS * truth.abs()
        assert result.shape == truth.shape
        assert ((result - truth).abs() <= allowed).all()


def with_gradients(value, *inputs):
    return value.detach(), *torch.autograd.grad((value * ramp(value)).sum(), inputs)


def kept(x, mask):
    return torch.where(mask, x, 0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_penalty(batch, backend, name, reduction):
    logprobs, ref_logprobs, mask = batch
    inputs = (logprobs.requires_grad_(), ref_logprobs.requires_grad_())
    options = {"estimator": name, "reduction": reduction, "backend": backend}
    value = klfast.kl_penalty(*inputs, mask, **options)

    def formula(logprobs, ref_logprobs):
        x = kept(logprobs, mask) - kept(ref_logprobs, mask)
        return REDUCTIONS[reduction](kept(ESTIMATORS[name](x), mask), mask)

    assert_as_exact_as_eager(with_gradients(value, *inputs), formula, *inputs)


def test_statistics(batch, backend):
    logprobs, ref_logprobs, mask = batch
    _, stats = klfast.kl_penalty(
        logprobs, ref_logprobs, mask, estimator="k2", return_stats=True, backend=backend
    )
    x = kept(logprobs - ref_logprobs, mask).double()
    assert isinstance(stats, klfast.KLStats)
    for name in ("k1", "k2", "k3"):
        torch.testing.assert_close(getattr(stats, name).double(), ESTIMATORS[name](x).sum(1))
    assert torch.equal(stats.kl, stats.k2)
    assert torch.equal(stats.length, mask.sum(1).float())
    assert torch.equal(stats.max_abs_log_ratio.double(), x.float().abs().amax(1).double())
    controller = klfast.AdaptiveKLController(0.1, target=1e-3)
    controller.update(stats)
    assert controller.value > 0.1


def test_packed_is_padded(backend):
    lengths = torch.tensor([5, 0, 3])
    kept_tokens = torch.arange(5) < lengths[:, None]
    logprobs, ref_logprobs = -torch.rand(2, 3, 5).to(DEVICE)
    kept_tokens = kept_tokens.to(DEVICE)
    edges = torch.tensor([0, 5, 5, 8], device=DEVICE)
    padded = klfast.kl_penalty(
        logprobs, ref_logprobs, kept_tokens, reduction="seq-mean", backend=backend
    )
    packed = klfast.kl_penalty(
        logprobs[kept_tokens],
        ref_logprobs[kept_tokens],
        reduction="seq-mean",
        cu_seqlens=edges,
        backend=backend,
    )
    assert torch.equal(padded, packed)


def test_kl_rewards(batch, backend):
    logprobs, ref_logprobs, mask = batch
    scores = torch.tensor([1.0, -2.0, 3.0, 0.5], device=DEVICE)
    rewards = klfast.kl_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.25, backend=backend)
    expected = -0.25 * kept(logprobs - ref_logprobs, mask)
    for row, score in enumerate(scores):
        if mask[row].any():
            expected[row, mask[row].nonzero().max()] += score
    torch.testing.assert_close(rewards, expected)


def test_token_logprobs(backend):
    logits = (3 * torch.randn(2, 3, 37, device=DEVICE)).requires_grad_()
    taken = torch.randint(37, (2, 3), device=DEVICE)
    results = klfast.token_logprobs(logits, taken, return_entropy=True, backend=backend)

    def logprobs(logits):
        return logits.log_softmax(-1).gather(-1, taken[..., None])[..., 0]

    def entropy(logits):
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    for result, formula in zip(results, (logprobs, entropy), strict=True):
        gradient = torch.autograd.grad(result, logits, ramp(result), retain_graph=True)
        assert_as_exact_as_eager((result.detach(), *gradient), formula, logits)


@pytest.mark.parametrize("direction", DIVERGENCES)
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_kl_divergence(backend, direction, reduction):
    logits, ref_logits = (
        torch.randn(2, 3, 37, device=DEVICE, requires_grad=True) for _ in range(2)
    )
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]], device=DEVICE).bool()
    options = {"direction": direction, "reduction": reduction, "backend": backend}
    value = klfast.kl_divergence(logits, ref_logits, mask, **options)

    def formula(logits, ref_logits):
        rows = DIVERGENCES[direction](logits.log_softmax(-1), ref_logits.log_softmax(-1))
        return REDUCTIONS[reduction](kept(rows, mask), mask)

    inputs = (logits, ref_logits)
    assert_as_exact_as_eager(with_gradients(value, *inputs), formula, *inputs)


@pytest.mark.parametrize("outside", ["truncate", "mask"])
@pytest.mark.parametrize("weight", ["token", "sequence", "geometric"])
def test_rollout_correction(batch, weight, outside):
    logprobs, rollout_logprobs, mask = batch
    options = {"weight": weight, "outside": outside, "floor": 0.5, "cap": 2.0}
    options["backend"] = "reference"  # it serves every device
    corrected = klfast.rollout_correction(
        logprobs, rollout_logprobs, mask, reject=klfast.Rejection("abs", high=1.5), **options
    )
    x = kept(logprobs - rollout_logprobs, mask).double()
    total = x.sum(1, keepdim=True)
    means = total / mask.sum(1, keepdim=True).clamp(min=1)
    u = {"token": x, "sequence": total.expand_as(x), "geometric": means.expand_as(x)}[weight]
    inside = (u.exp() >= 0.5) & (u.exp() <= 2.0)
    weights = u.exp().clamp(0.5, 2.0) if outside == "truncate" else kept(u.exp(), inside)
    torch.testing.assert_close(corrected.weights, kept(weights, mask).float())
    assert torch.equal(corrected.mask, mask & (x.abs() <= 1.5))
    assert torch.equal(corrected.stats.length, mask.sum(1).float())


CALLS = {
    "kl_penalty": lambda a, b, ids, backend: klfast.kl_penalty(
        a[..., 0], b[..., 0], reduction="token-mean", return_stats=True, backend=backend
    ),
    "token_logprobs": lambda a, b, ids, backend: klfast.token_logprobs(a, ids, backend=backend),
    "kl_divergence": lambda a, b, ids, backend: klfast.kl_divergence(
        a, b, reduction="token-mean", backend=backend
    ),
    "rollout_correction": lambda a, b, ids, backend: klfast.rollout_correction(
        a[..., 0], b[..., 0], backend="reference"
    )[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_breaks_no_graph(backend, name):
    """Forward and backward are one graph. Another batch of the same shape makes no new graph."""

    def step(a, b, ids):
        result = CALLS[name](a, b, ids, backend)
        return result[0] if isinstance(result, tuple) else result

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for stance in ("default", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            a, b = (-torch.rand(2, 3, 37, device=DEVICE) for _ in range(2))
            a.requires_grad_()
            ids = torch.randint(37, (2, 3), device=DEVICE)
            results = [function(a, b, ids) for function in (compiled, step)]
            torch.testing.assert_close(*results)
            if results[0].requires_grad:
                gradients = [torch.autograd.grad(result.sum(), a) for result in results]
                torch.testing.assert_close(*gradients)


def test_ops_are_in_the_namespace_of_the_build():
    """`kernels` has loaded the module under the same name."""
    assert hasattr(getattr(torch.ops, klfast.__name__), "kl_penalty_fwd")
    assert klfast.__name__.startswith("_klfast_")


def test_what_cannot_run_says_so():
    logprobs = -torch.rand(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match="unknown backend 'native'; expected one of 'auto', "):
        klfast.kl_penalty(logprobs, logprobs, backend="native")
    with pytest.raises(ValueError, match=r"ref_logprobs must have the shape"):
        klfast.kl_penalty(logprobs, logprobs[:1])
    with pytest.raises(RuntimeError, match=f"backend 'triton' cannot run on {DEVICE.type}: "):
        klfast.rollout_correction(logprobs, logprobs, backend="triton")
    if not HAS_TRITON:
        with pytest.raises(RuntimeError, match="backend 'triton' cannot run on cpu: "):
            klfast.kl_penalty(logprobs, logprobs, backend="triton")
        with pytest.warns(RuntimeWarning, match="slow reference backend on cpu") as warned:
            klfast.KLPenalty()(logprobs, logprobs)
        assert warned[0].filename == __file__
