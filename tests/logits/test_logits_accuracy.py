"""How many digits: from 5 nats to 5e-7, at whole vocabularies, on rows made to mislead a kernel."""

import agreement_logits
import oracle
import oracle_divergences
import pytest
import torch
from agreement_logits import COMPILED, DIRECTIONS, FAST, assert_divergence_agrees, leaves
from oracle_divergences import PROMISE, Pair, Words

import klfast

VOCABULARY = 151_936
NATS = (5.0, 0.05, 5e-5, 5e-7)

pytestmark = pytest.mark.usefixtures("one_thread")
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
every_compiled = pytest.mark.parametrize("backend", COMPILED, indirect=True)
every_fast = pytest.mark.parametrize("backend", FAST, indirect=True)


SHAPES = {
    "normal": lambda words: 3 * torch.randn(words, dtype=torch.float64),
    "flat": lambda words: 0.1 * torch.randn(words, dtype=torch.float64),
    "zipf": lambda words: -torch.arange(1, words + 1, dtype=torch.float64).log(),
}


def pair_of(logits, ref_logits, direction):
    """The models in the order of KL's arguments."""
    models = (ref_logits, logits) if direction == "forward" else (logits, ref_logits)
    return Pair(*models, 1.0, oracle.arithmetic_dtype(logits, ref_logits))


def value_of(pair, direction, beta=0.5):
    """(the oracle's divergences, their tolerances), [R]."""
    found = (
        oracle_divergences.jsd(pair, beta) if direction == "jsd" else oracle_divergences.kl(pair)
    )
    return [t[:, 0] for t in found]


def truth_of(logits, ref_logits, direction):
    """The oracle's divergences and gradients."""
    kind = "jsd" if direction == "jsd" else "kl"
    return oracle_divergences.divergence(pair_of(logits, ref_logits, direction), kind, 0.5, 1.0)


def models_apart(shape, words, nats, dtype):
    """A row each of two models that are about so many nats apart, as stored in a dtype."""
    logits = SHAPES[shape](words).to(dtype)
    noise = (2 * nats) ** 0.5 * torch.randn(words, dtype=torch.float64)
    if dtype == torch.bfloat16 and nats < 1e-3:  # fewer words further apart: the grid is coarse
        noise = torch.where(torch.rand(words) < nats / 1e-3, noise * (1e-3 / nats) ** 0.5, 0.0)
    return logits, (logits.double() + noise).to(dtype)


def assert_promised(found, truth, what=""):
    """Never negative, and 2e-6 of each."""
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
        models = [row[None] for row in models_apart(shape, VOCABULARY, nats, dtype)]
        for direction in DIRECTIONS:
            found = klfast.kl_divergence(*models, direction=direction, backend=backend)
            exact, _ = value_of(pair_of(*models, direction), direction)
            assert_promised(found, exact, f"{direction}, {nats} nats")
            seen.append(exact.item())
    assert min(seen) < 5e-7
    assert max(seen) > 0.3


@pytest.mark.grid
@pytest.mark.parametrize("beta", [1e-4, 0.01, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("offset", [0.0, 40.0, -200.0])
@every_compiled
def test_nearness_and_offsets_cost_no_digits(backend, offset, beta):
    """Of models of one offset: what both share is in no divergence."""
    for direction in DIRECTIONS if beta == 0.5 else ("jsd",):
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
            exact, _ = value_of(pair_of(logits, ref_logits, direction), direction, beta)
            assert_promised(found, exact, f"{direction}, {nats} nats")


@pytest.mark.grid
@pytest.mark.parametrize("dtype", agreement_logits.FLOATS, ids=str)
@every_direction
def test_identical_models_are_exactly_0_apart(backend, direction, dtype):
    """In memory of any layout. The reference's gradient is off by the rounding of a sum."""
    logits = 5 * torch.randn(3, 1500)
    allowed = 1500 * torch.finfo(torch.float64).eps if backend == "reference" else 0.0
    logits[1, ::3] = -torch.inf
    logits[2] += 300
    logits = logits.to(dtype)
    for temperature in (1.0, 0.7):
        both = leaves(logits, logits.t().contiguous().t())
        options = {"direction": direction, "temperature": temperature, "backend": backend}
        for reduction in ("none", "token-sum"):
            found = klfast.kl_divergence(*both, reduction=reduction, **options)
            assert not found.any()
            for grad in torch.autograd.grad(found.sum(), both):
                assert (grad.abs() <= allowed).all()


@pytest.mark.grid
@pytest.mark.parametrize("shift", [0.5, 16.0, -32.0, 1024.0])
@every_direction
def test_models_that_differ_by_a_constant_are_exactly_0_apart(backend, direction, shift):
    """Logits on a grid, so that every sum is exact; the constant is in no probability."""
    logits = torch.randint(-512, 513, (3, 1500)) / 64
    logits[1, ::3] = -torch.inf
    found = klfast.kl_divergence(logits, logits + shift, direction=direction, backend=backend)
    assert not found.any()


@pytest.mark.parametrize("beta", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("height", [5.0, 10.0, 15.0])
@every_compiled
def test_one_likely_word_of_models_apart_by_little_and_a_constant(backend, height, beta):
    """The log-sum-exps are then apart by what float rounds, which a small JSD must not show."""
    for apart in (1e-1, 1e-2, 1e-3):
        logits = torch.randn(3, 4000)
        logits[:, 7] += height
        ref_logits = logits + apart * torch.randn(3, 4000) + 0.37
        found = klfast.kl_divergence(
            logits, ref_logits, direction="jsd", jsd_beta=beta, backend=backend
        )
        exact, _ = value_of(pair_of(logits, ref_logits, "jsd"), "jsd", beta)
        assert_promised(found, exact, f"{apart} apart")


@every_direction
def test_no_divergence_is_negative(backend, direction):
    """Models are nearer than fp32 could tell by subtracting log-probs, down to one bit. The
    reference's textbook formulas do not see one bit.
    """
    logits = torch.randn(60, 300)
    apart = 10.0 ** torch.linspace(-9, -3, 60)[:, None] * torch.randn(60, 300)
    found = klfast.kl_divergence(logits, logits + apart, direction=direction, backend=backend)
    exact, allowed = value_of(pair_of(logits, logits + apart, direction), direction)
    assert (found >= 0).all()
    oracle.assert_within(found, exact, allowed + 1e-15 * (backend == "reference"), "divergence")
    one_bit = logits.clone()
    one_bit[:, 7] = one_bit[:, 7].nextafter(torch.tensor(9.0))
    found = klfast.kl_divergence(logits, one_bit, direction=direction, backend=backend)
    assert (found >= 0).all()
    if backend == "reference":
        return
    assert (found > 0).all()
    assert_promised(found, value_of(pair_of(logits, one_bit, direction), direction)[0])


TILES = (1, 16, 64, 300, 1024, 2048)
"""Where a kernel's first look might end."""


def misleading_rows(words):
    """Pairs of rows whose first words say nothing, or something wrong, of the others."""
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
                for apart, faint in ((0.3, 12), (-1.7, 6), (-1.7, 12), (2.0, 25))
            },
            f"loud up to {end}": (torch.cat([x[:end] + 40, x[end:]]), near),
        }
    for at in (0, 5, words // 2, -1):
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
    for height in (45.0, 70.0, 88.0, 89.0, 104.0, 300.0):
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


@every_direction
@every_compiled
def test_rows_that_mislead(backend, direction):
    rows = misleading_rows(2500)
    logits, ref_logits = (torch.stack(models) for models in zip(*rows.values(), strict=True))
    inputs = leaves(logits, ref_logits)
    found = klfast.kl_divergence(*inputs, direction=direction, backend=backend)
    grads = torch.autograd.grad(found.sum(), inputs)
    exact = truth_of(logits, ref_logits, direction)
    truths = (exact.grad_first, exact.grad_second)
    allowed = (exact.grad_first_tolerance, exact.grad_second_tolerance)
    if direction == "forward":
        truths, allowed = truths[::-1], allowed[::-1]
    for row, name in enumerate(rows):
        value = found[row].detach()
        oracle.assert_within(value, exact.value[row], exact.value_tolerance[row], name)
        assert value >= 0, name
        if value == torch.inf:
            continue
        for grad, of, tolerance in zip(grads, truths, allowed, strict=True):
            oracle.assert_within(grad[row], of[row], tolerance[row], f"grad of {name}")


@every_direction
@every_compiled
def test_pieces_at_any_height(backend, direction):
    """Rows of pieces, each somewhere else: whatever is guessed from the first, few are like it."""
    pieces, size = 10, 300
    heights = torch.tensor([0.0, 0.0, 3.0, -20.0, 20.0, -60.0, 60.0, 95.0, -150.0, 1e3])
    picked = heights[torch.randint(len(heights), (2, 20, pieces))].repeat_interleave(size, -1)
    logits = picked[0] + torch.randn(20, pieces * size)
    ref_logits = picked[torch.randint(2, (20,)), torch.arange(20)] + torch.randn_like(logits)
    assert_divergence_agrees(backend, logits, ref_logits, direction=direction)


def eager_divergence(logits, ref_logits, direction, beta=0.5):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    if direction == "reverse":
        return (p.exp() * (p - q)).sum(-1)
    if direction == "forward":
        return (q.exp() * (q - p)).sum(-1)
    m = torch.logaddexp(p + torch.tensor(1 - beta).log(), q + torch.tensor(beta).log())
    return (1 - beta) * (p.exp() * (p - m)).sum(-1) + beta * (q.exp() * (q - m)).sum(-1)


@pytest.mark.grid
@pytest.mark.parametrize("nats", [2.0, 0.1, 1e-3, 5e-7])
@every_direction
@every_compiled
def test_gradients_against_eager(backend, direction, nats):
    """At most twice eager's error, and a rounding; near 0 a hundredth of it.

    An error's scale is p, times the mean of abs(log(p/q)) where that is less than 1.
    """
    words = 3000
    logits, ref_logits = (
        torch.stack(rows)
        for rows in zip(
            *(models_apart("normal", words, nats, torch.float32) for _ in range(4)), strict=True
        )
    )
    exact, pair = truth_of(logits, ref_logits, direction), pair_of(logits, ref_logits, direction)
    truths = (exact.grad_first, exact.grad_second)
    if direction == "forward":
        truths = truths[::-1]
    mean = oracle_divergences.total(pair.p * pair.u.abs()).clamp(max=1)
    scale = torch.maximum(pair.p, pair.q) * (mean + pair.u.abs().clamp(max=1))

    def errors(function):
        inputs = leaves(logits, ref_logits)
        grads = torch.autograd.grad(function(*inputs).sum(), inputs)
        return [((g - t).abs() / scale).max() for g, t in zip(grads, truths, strict=True)]

    own = errors(lambda *t: klfast.kl_divergence(*t, direction=direction, backend=backend))
    eager = errors(lambda *t: eager_divergence(*t, direction))
    for error, of_eager in zip(own, eager, strict=True):
        assert error <= 2 * of_eager + 2**-24
        if nats <= 1e-3:
            assert error <= PROMISE
        if nats <= 5e-7:
            assert error <= of_eager / 100


TOKEN_ROWS = {
    **SHAPES,
    "peaked": lambda words: torch.cat([torch.tensor([40.0]), torch.randn(words - 1)]).double(),
    "peaked-at-the-end": lambda words: SHAPES["normal"](words).sort().values * 8,
    "equal": lambda words: torch.zeros(words, dtype=torch.float64),
    "offset": lambda words: SHAPES["normal"](words) + 1000,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("backend", "words"),
    [(name, VOCABULARY if name in FAST else 3000) for name in COMPILED],
    indirect=["backend"],
)
def test_log_probs_and_entropies_against_eager(backend, words, dtype):
    """At most twice the error of eager, in fp32 whatever the dtype, and a rounding."""
    logits = torch.stack([make(words) for make in TOKEN_ROWS.values()]).to(dtype)
    # Likely and unlikely ones; words of probability 1e-30 are nobody's tokens.
    for ids in (logits.argmax(-1), torch.full((len(TOKEN_ROWS),), words // 2)):
        found, entropy = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
        truth = oracle_divergences.tokens(Words(logits, 1.0, torch.float32), ids, 1.0)
        eager = logits.float().log_softmax(-1)
        eager_entropy = -(eager.exp() * eager).sum(-1)
        eager = eager.gather(-1, ids[:, None])[:, 0]
        for value, of_eager, exact in (
            (found, eager, truth.logprobs),
            (entropy, eager_entropy, truth.entropy),
        ):
            # Eager's luck in one row is not asked for: its error is that of like rows.
            scale = 1 + exact.abs()
            off = ((value - exact).abs() / scale).max()
            of_eager = ((of_eager - exact).abs() / scale).max()
            assert off <= 2 * of_eager + 2**-24
        assert (entropy >= 0).all()
        flat = list(TOKEN_ROWS).index("equal")
        torch.testing.assert_close(
            entropy[flat].double(), torch.tensor(float(words)).double().log()
        )
