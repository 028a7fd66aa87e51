"""The accuracy from 5 nats to 5e-7, at whole vocabularies, and on rows that mislead a kernel.

The truth is the reference in float64, which keeps enough digits at 5e-7 nats.
"""

import contextlib
import math

import agreement_logits as al
import hypothesis
import pytest
import torch
from eager_divergences import EAGER
from extreme_logits import assert_divergence, assert_tokens, from_hidden
from hypothesis import strategies
from shards import over_shards

import klfast

VOCABULARY = 151_936
NATS = (5.0, 0.05, 5e-5, 5e-7)
PROMISE = 2e-6

pytestmark = pytest.mark.usefixtures("one_thread")
every_fast = pytest.mark.parametrize("backend", al.FAST, indirect=True)


SHAPES = {
    "normal": lambda words: 3 * torch.randn(words, dtype=torch.float64),
    "flat": lambda words: 0.1 * torch.randn(words, dtype=torch.float64),
    "zipf": lambda words: -torch.arange(1, words + 1, dtype=torch.float64).log(),
}


def truth_of(logits, ref_logits, direction, beta=0.5):
    """The divergences."""
    wide = (logits.double(), ref_logits.double())
    options = {"direction": direction, "jsd_beta": beta, "backend": "reference"}
    return klfast.kl_divergence(*wide, **options)


def models_apart(shape, words, nats, dtype):
    """A row of two models that are about ``nats`` apart, in a dtype."""
    logits = SHAPES[shape](words).to(dtype)
    noise = (2 * nats) ** 0.5 * torch.randn(words, dtype=torch.float64)
    if dtype == torch.bfloat16 and nats < 1e-3:  # fewer words further apart: the grid is coarse
        noise = torch.where(torch.rand(words) < nats / 1e-3, noise * (1e-3 / nats) ** 0.5, 0.0)
    return logits, (logits.double() + noise).to(dtype)


def assert_promised(found, truth, what=""):
    """No value is negative, and each has a relative error of 2e-6 at most."""
    error = (found.double() - truth).abs() / truth
    assert (found >= 0).all(), what
    worst = error.argmax().item()
    assert error[worst] <= PROMISE, f"{what}: off by {error[worst]:.3g} of {truth[worst]:.3g} nats"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), ("normal", torch.bfloat16)],
    ids=str,
)
@every_fast
def test_from_5_nats_to_5e_7_at_a_whole_vocabulary(backend, shape, dtype):
    seen = []
    for nats in NATS:
        rows = [row[None] for row in models_apart(shape, VOCABULARY, nats, dtype)]
        for direction in al.DIRECTIONS:
            found = klfast.kl_divergence(*rows, direction=direction, backend=backend)
            exact = truth_of(*rows, direction)
            assert_promised(found, exact, f"{direction}, {nats} nats")
            seen.append(exact.item())
    assert min(seen) < 5e-7
    assert max(seen) > 0.3


@pytest.mark.grid
@pytest.mark.parametrize("beta", [1e-4, 0.01, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("offset", [0.0, 40.0, -200.0])
@al.every_compiled
def test_nearness_and_offsets_cost_no_digits(backend, offset, beta):
    """An offset that both models share does not change a divergence."""
    for direction in al.DIRECTIONS if beta == 0.5 else ("jsd",):
        for nats in (1.0, 1e-2, 1e-4, 1e-6):
            logits, ref_logits = (
                torch.stack([offset + row for row in rows])
                for rows in zip(
                    *(models_apart("normal", 3000, nats, torch.float32) for _ in range(4)),
                    strict=True,
                )
            )
            options = {"direction": direction, "jsd_beta": beta, "backend": backend}
            found = klfast.kl_divergence(logits, ref_logits, **options)
            exact = truth_of(logits, ref_logits, direction, beta)
            assert_promised(found, exact, f"{direction}, {nats} nats")


@pytest.mark.grid
@pytest.mark.parametrize("dtype", al.FLOATS, ids=str)
@al.every_direction
def test_identical_models_are_exactly_0_apart(backend, direction, dtype):
    """The memory layouts differ. The reference's gradient has the rounding of a sum."""
    logits = 5 * torch.randn(3, 1500)
    allowed = 1500 * torch.finfo(torch.float64).eps if backend == "reference" else 0.0
    logits[1, ::3] = -torch.inf
    logits[2] += 300
    logits = logits.to(dtype)
    for temperature in (1.0, 0.7):
        both = al.leaves(logits, logits.t().contiguous().t())
        options = {"direction": direction, "temperature": temperature, "backend": backend}
        for reduction in ("none", "token-sum"):
            found = klfast.kl_divergence(*both, reduction=reduction, **options)
            assert not found.any()
            for grad in torch.autograd.grad(found.sum(), both):
                assert (grad.abs() <= allowed).all()


@pytest.mark.grid
@pytest.mark.parametrize("shift", [0.5, 16.0, -32.0, 1024.0])
@al.every_direction
def test_models_that_differ_by_a_constant_are_exactly_0_apart(
    backend, direction, shift, has_gpu_kernels
):
    """Logits lie on a grid, so every sum is exact. A GPU's kernels round a constant of
    1,024 nats or more to 2**-40 nats. Half of its square may be left.
    """
    logits = torch.randint(-512, 513, (3, 1500)) / 64
    logits[1, ::3] = -torch.inf
    found = klfast.kl_divergence(logits, logits + shift, direction=direction, backend=backend)
    assert (found <= (2**-81 if has_gpu_kernels else 0)).all()


@pytest.mark.parametrize(
    "options",
    [
        *({"direction": "jsd", "jsd_beta": beta} for beta in (0.01, 0.9)),
        {"direction": "tv"},
        *({"direction": "skew-forward", "skew_alpha": alpha} for alpha in (0.01, 0.5)),
    ],
    ids=str,
)
@al.every_compiled
def test_one_likely_word_of_models_apart_by_little_and_a_constant(backend, options):
    """The log-sum-exps then differ by a rounding, which a small divergence must not show.

    Below 1e-9 nats the reference's own log-probs, of some -20 nats, are too coarse in float64.
    """
    for apart in (1e-1, 1e-2):
        logits = torch.randn(3, 4000)
        logits[:, 7] += torch.tensor([5.0, 10.0, 15.0])
        ref_logits = logits + apart * torch.randn(3, 4000) + 0.37
        found = klfast.kl_divergence(logits, ref_logits, backend=backend, **options)
        wide = logits.double(), ref_logits.double()
        exact = klfast.kl_divergence(*wide, backend="reference", **options)
        assert_promised(found, exact, f"{apart} apart")


@al.every_direction
def test_no_divergence_is_negative(backend, direction):
    """The models are so near that fp32 log-probs hardly differ, down to one bit of a logit. The
    reference's textbook formulas do not see one bit.
    """
    logits = torch.randn(60, 300)
    near = logits + 10.0 ** torch.linspace(-9, -3, 60)[:, None] * torch.randn(60, 300)
    found = klfast.kl_divergence(logits, near, direction=direction, backend=backend)
    assert (found >= 0).all()
    torch.testing.assert_close(
        found.double(), truth_of(logits, near, direction), rtol=PROMISE, atol=2e-15
    )
    one_bit = logits.clone()
    one_bit[:, 7] = one_bit[:, 7].nextafter(torch.tensor(9.0))
    found = klfast.kl_divergence(logits, one_bit, direction=direction, backend=backend)
    assert (found >= 0).all()
    if backend == "reference":
        return
    p = logits.double().softmax(-1)[:, 7]
    apart = (one_bit.double() - logits.double())[:, 7]
    known = EAGER[direction]
    of_apart = apart if known.jumps else known.curvature * apart.square() / 2
    assert_promised(found, p * (1 - p) * of_apart)


TILES = (1, 64, 1024, 2048)  # lengths of a kernel's possible samples


def misleading_rows(words):
    """Pairs of rows whose first entries say little or something wrong about the others."""
    x = 2 * torch.randn(words)
    near = x + 0.01 * torch.randn(words)
    far = x + 2 * torch.randn(words)
    ramp = torch.arange(words) / words

    def beginning(row, end, value):
        return torch.cat([torch.full((end,), value), row[end:]])

    def word(row, at, value):
        return row.index_fill(0, torch.tensor(at % words), value)

    rows = {}
    for end in (*TILES, words - 1):
        if end >= words:
            continue
        rows |= {
            f"neither says the first {end}": (
                beginning(x, end, -torch.inf),
                beginning(near, end, -torch.inf),
            ),
            f"only the reference says the first {end}": (beginning(x, end, -torch.inf), near),
            f"the first {end} are faint": (beginning(x, end, -90.0), beginning(near, end, -90.0)),
            f"the first {end} are as nothing": (
                beginning(x, end, -1e4),
                beginning(near, end, -1e4),
            ),
            f"faint, and apart, up to {end}": (beginning(x, end, -60.0), beginning(far, end, 5.0)),
            f"alike up to {end}, then apart": (x, torch.cat([x[:end], x[end:] + 5])),
            f"apart up to {end}, then alike": (x, torch.cat([x[:end] - 50, x[end:]])),
            **{
                f"{apart} apart in the faint first {end} alone": (
                    torch.cat([x[:end] - faint, x[end:]]),
                    torch.cat([x[:end] - faint + apart, near[end:]]),
                )
                for apart, faint in ((-1.7, 12), (2.0, 25))
            },
            f"loud up to {end}": (torch.cat([x[:end] + 40, x[end:]]), near),
        }
    for at in (0, -1):
        rows |= {
            f"a peak at {at}": (word(x, at, 60.0), word(near, at, 60.0)),
            f"a peak of the policy at {at}": (word(x, at, 30.0), near),
            f"a peak of the reference at {at}": (x, word(near, at, 30.0)),
            f"a high peak of the policy at {at}": (word(x, at, 120.0), near),
            f"a high peak of the reference at {at}": (x, word(near, at, 1e4)),
            f"one word a little apart at {at}": (x, word(x, at, x[at].item() + 1e-3)),
            f"one word gone at {at}": (x, word(x, at, x[at].item() - 50)),
            f"one word far at {at}": (x, word(x, at, x[at].item() + 15)),
        }
    for shift in (25.0, -87.0, 1000.0, -1e4):
        rows[f"shifted by {shift}"] = (x, near + shift)
    for height in (45.0, 88.0, 104.0):
        rows[f"rising by {height}"] = (height * ramp, near)
        rows[f"falling by {height}"] = (-height * ramp, near)
        rows[f"crossing at {height}"] = (height * ramp, -height * ramp)
    signs = torch.randn(words).sign()
    return rows | {
        "a hundred times sharper": (100 * x, x),
        "a hundred times softer": (x, 100 * x),
        "10,000 up or down": (1e4 * signs, 1e4 * signs + near),
        "10,000 the other way": (1e4 * signs, -1e4 * signs),
        "flat": (torch.zeros(words), torch.full((words,), 3.0)),
        "far away": (x, -25 * x),
        "top 10": (torch.where(x >= x.topk(10).values[-1], x, -torch.inf), near),
    }


@al.every_direction
@al.every_compiled
def test_rows_that_mislead(backend, direction):
    """A kernel guesses a row's greatest logit from a sample, which these rows mislead."""
    rows = misleading_rows(2500)
    both = [torch.stack(models) for models in zip(*rows.values(), strict=True)]
    assert_divergence(backend, *both, direction)
    found = klfast.kl_divergence(*both, direction=direction, backend=backend)
    finite = found.isfinite()
    assert (found >= 0).all()
    given = {"logits": both[0][finite], "ref_logits": both[1][finite], "direction": direction}
    assert not al.wrong(backend, "kl_divergence", (), **given)
    for logits in both if direction == "reverse" else ():
        likely, second = logits.topk(2).indices.unbind(-1)
        assert_tokens(backend, logits, likely)
        is_said = logits.gather(-1, second[:, None])[:, 0] > -torch.inf
        assert_tokens(backend, logits, torch.where(is_said, second, likely))


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    words=strategies.sampled_from([2, 3, 31, 64, 65, 255, 1025, 2049]),
    dtype=strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    direction=strategies.sampled_from(al.DIRECTIONS),
    reduction=strategies.sampled_from(["none", "token-mean"]),
    beta=strategies.sampled_from([1e-4, 0.1, 0.9, 0.9999]),
    apart=strategies.sampled_from([1e-3, 0.5, 9.0]),
    height=strategies.sampled_from([0.0, 25.0, -300.0, 1e4]),
    temperature=strategies.sampled_from([0.1, 0.6, 1.0, 3.0, 10.0]),
    seed=strategies.integers(0, 2**31),
)
@al.every_compiled
def test_vocabularies_of_any_size(
    backend, words, dtype, direction, reduction, beta, apart, height, temperature, seed
):
    """Divergences, entropies and log-probs, with gradients, of models that a constant lifts."""
    torch.manual_seed(seed)
    lifted = height if dtype == torch.float32 else 0  # the grid of others is too coarse
    logits, ref_logits = (
        t + lifted for t in al.random_logits(1, 2, words, dtype=dtype, apart=apart)
    )
    options = {"direction": direction, "jsd_beta": beta, "temperature": temperature}
    options |= {"reduction": reduction, "return_entropy": True}
    given = {"logits": logits, "ref_logits": ref_logits, **options}
    assert not al.wrong(backend, "kl_divergence", ("logits", "ref_logits"), **given)
    given = {"logits": logits, "token_ids": torch.tensor([[0, words - 1]])}
    given |= {"temperature": temperature, "return_entropy": True}
    assert not al.wrong(backend, "token_logprobs", ("logits",), **given)


@pytest.mark.parametrize(
    ("words", "dtype"), [(32_000, torch.float32), (50_257, torch.bfloat16)], ids=str
)
@every_fast
def test_the_vocabularies_of_models(backend, words, dtype):
    logits, ref_logits = al.random_logits(1, 2, words, dtype=dtype)
    for direction in al.DIRECTIONS:
        for reduction in ("none", "token-mean"):
            given = {"logits": logits, "ref_logits": ref_logits, "reduction": reduction}
            leaves = ("logits", "ref_logits")
            assert not al.wrong(backend, "kl_divergence", leaves, **given, direction=direction)
    for ids in (torch.tensor([[0, words - 1]]), logits.topk(20).indices):
        options = {"token_ids": ids, "return_entropy": True}
        assert not al.wrong(backend, "token_logprobs", ("logits",), logits=logits, **options)


@pytest.mark.grid
@pytest.mark.parametrize("nats", [2.0, 0.1, 1e-3, 5e-7])
@al.every_direction
@al.every_compiled
def test_gradients_against_eager(backend, direction, nats):
    """The error is at most twice eager's plus a rounding, and near 0 a hundredth of eager's.

    The scale of an error is p, times the mean of abs(log(p/q)) if that is less than 1. Slopes that
    jump are as large at any nearness.
    """
    words = 3000
    logits, ref_logits = (
        torch.stack(rows)
        for rows in zip(
            *(models_apart("normal", words, nats, torch.float32) for _ in range(4)), strict=True
        )
    )
    wide = al.leaves(logits.double(), ref_logits.double())
    truths = torch.autograd.grad(truth_of(*wide, direction).sum(), wide)
    log_p, log_q = (model.detach().log_softmax(-1) for model in wide)
    u, p = (log_p - log_q).abs(), torch.maximum(log_p, log_q).exp()
    scale = p * ((log_p.exp() * u).sum(-1, keepdim=True).clamp(max=1) + u.clamp(max=1))
    if EAGER[direction].jumps:
        scale = p

    def errors(function):
        inputs = al.leaves(logits, ref_logits)
        grads = torch.autograd.grad(function(*inputs).sum(), inputs)
        return [((g - t).abs() / scale).max() for g, t in zip(grads, truths, strict=True)]

    own = errors(lambda *t: klfast.kl_divergence(*t, direction=direction, backend=backend))
    eager = errors(lambda *t: EAGER[direction].of(*t))
    for error, of_eager in zip(own, eager, strict=True):
        assert error <= 2 * of_eager + 2**-24
        if nats <= 1e-3:
            assert error <= PROMISE
        if nats <= 5e-7:
            assert error <= of_eager / 100


def test_an_unlikely_token_is_as_unlikely_as_it_is(backend):
    logits = torch.zeros(3, 50)
    logits[:, 7] = torch.tensor([-80.0, -150.0, -1e5])
    found = klfast.token_logprobs(logits, torch.full((3,), 7), backend=backend)
    expected = logits[:, 7].double() - torch.tensor(49.0).double().log()
    torch.testing.assert_close(found.double(), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.375, 0.7, 3.0])
def test_one_word_is_certain(backend, temperature):
    """Its logit may be large, and its temperature may round."""
    logits = torch.tensor([[0.5], [25.154], [-1000.3]], requires_grad=True)
    ids = torch.zeros(3, dtype=torch.int64)
    options = {"temperature": temperature, "backend": backend}
    outputs = klfast.token_logprobs(logits, ids, return_entropy=True, **options)
    divergence = klfast.kl_divergence(logits, logits * 2, token_ids=ids, **options)
    for found in (*outputs, *al.tensors_of(divergence)):
        torch.testing.assert_close(found, torch.zeros(3), rtol=0, atol=al.OF_ONE_WORD)
    (grad,) = torch.autograd.grad([found.sum() for found in outputs], logits)
    torch.testing.assert_close(grad, torch.zeros(3, 1), rtol=0, atol=4e-7)


def confident_rows(margin, words, rows=20):
    """(logits, the likely token ids, their exact log-probs) of rows [N, V]."""
    logits = torch.randn(rows, words)
    ids = torch.randint(words, (rows, 1))
    logits.scatter_(-1, ids, logits.amax(-1, keepdim=True) + margin)
    apart = logits.double() - logits.gather(-1, ids).double()
    return logits, ids[:, 0], -apart.exp().scatter(-1, ids, 0.0).sum(-1).log1p()


def assert_as_exact_as_eager(found, logits, ids, exact):
    """The error is at most twice eager's and a rounding, and no log-prob is above 0.

    Eager's error is the greatest of the rows, because it may be 0 in some row by chance.
    """
    eager = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    allowed = 2 * (eager - exact).abs().max() + torch.finfo(found.dtype).eps * exact.abs()
    allowed += 2 * torch.finfo(torch.float64).eps  # which rounds 1 + a small number
    assert (found <= 0).all()
    assert ((found - exact).abs() <= allowed).all()


CONFIDENT = pytest.mark.parametrize("margin", [2, 5, 10, 17, 25, 40])


@CONFIDENT
@pytest.mark.parametrize("words", [2, 37, 3000])
def test_the_log_prob_of_a_confident_token(backend, words, margin):
    """The token is alone, or between K - 1 unlikely ids."""
    logits, ids, exact = confident_rows(margin, words)
    others = torch.randint(words, (len(ids), 6))
    for picks in (ids[:, None], torch.cat([others[:, :3], ids[:, None], others[:, 3:]], -1)):
        found = klfast.token_logprobs(logits, picks, backend=backend)
        assert_as_exact_as_eager(found[:, picks.shape[-1] // 2], logits, ids, exact)


@CONFIDENT
@pytest.mark.parametrize("words", [2, 37, 3000])
@pytest.mark.parametrize("function", [klfast.kl_divergence, from_hidden], ids=["logits", "hidden"])
def test_the_log_prob_of_a_confident_token_beside_a_divergence(
    backend, function, words, margin, has_gpu_kernels
):
    """It is as exact as alone. A GPU's kernels may sum the token's term in fp32 against a guess up
    to 32 bits below it, whose rounding is ln 2 * 2**-20 nats. Triton's guess is up to 22.4 bits
    below it here: the greatest error is 7.0e-7, of which this rounding is 5.9e-7.
    """
    off = al.OF_ONE_WORD + (math.log(2) * 2**-20 if has_gpu_kernels else 0)
    logits, ids, exact = confident_rows(margin, words)
    others = logits.roll(1, 0)
    for direction in al.DIRECTIONS:
        options = {"direction": direction, "token_ids": ids, "backend": backend}
        near = function(logits, logits + 0.1, **options)
        found = (near.logprobs, function(logits, others, **options).logprobs)
        found += (near.ref_logprobs, function(others, logits, **options).ref_logprobs)
        for i, logprobs in enumerate(found):
            if not has_gpu_kernels:
                model = logits + 0.1 if i == 2 else logits
                assert_as_exact_as_eager(logprobs, model, ids, exact)
            assert (logprobs <= 0).all()
            assert ((logprobs - exact).abs() <= off * (1 + exact.abs())).all()


@pytest.mark.parametrize("margin", [5, 17, 25])
@pytest.mark.parametrize(("edges", "place"), [(None, 30), ((20,), 3), ((20,), 36)], ids=str)
@al.every_compiled
def test_the_gradient_of_a_confident_token(backend, edges, place, margin):
    """1 - p keeps its digits, wherever the rest of the probability is."""
    logits = torch.randn(1, 4, 37)
    logits[..., place] = logits.amax(-1) + margin
    (leaf,) = al.leaves(logits)
    with over_shards(edges) if edges else contextlib.nullcontext():
        klfast.token_logprobs(leaf, torch.full((1, 4), place), backend=backend).sum().backward()
    others = torch.cat([logits[..., :place], logits[..., place + 1 :]], -1).double().logsumexp(-1)
    rest = torch.sigmoid(others - logits[..., place].double())
    torch.testing.assert_close(leaf.grad[..., place].double(), rest, rtol=1e-3, atol=0)
