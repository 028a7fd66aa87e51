"""Numbers over log-probs: masks of every dtype, odd weights, coefficients, infinities, mixtures."""

import itertools
import math
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from controls import FLOATS, FORMULAS, INF, REDUCTIONS, penalty, single

import klfast

CATEGORY = "numbers over log-probs"
NAN = math.nan
BACKENDS = ("native", "reference")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NORMALIZED = REDUCTIONS[4:]


def allowed(x, *tensors):
    """Relative error: docs/measured.md's promise, as much again for sums, masks and limits."""
    spread = x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0
    return (2 + spread) * 2.4e-7 * (1 if single(*tensors) else 1e-8)


def compare(hunt, a, b, *case, mask=None, old=None, grads=True, **options):
    """A call of kl_penalty and its gradients, beside the control."""
    backend, name, reduction = options["backend"], options["estimator"], options["reduction"]
    normal = {key: options[key] for key in ("coef", "normalizer") if key in options}
    normal = {key: float(value) for key, value in normal.items()}
    expected = penalty(a, b, mask, name, reduction, cu=options.get("cu_seqlens"), old=old, **normal)
    leaves = [t.detach().clone().requires_grad_() for t in (a, b)]
    found = klfast.kl_penalty(*leaves, mask, old_logprobs=old, **options)
    error = allowed(a.double() - b.double(), a, b, old)
    if old is not None:
        error += allowed(a.double() - old.double(), a, b, old)
    where = (backend, name, reduction, *case)
    textbook = 4e-16 if backend == "reference" else 0.0  # which its formulas lose to cancellation
    textbook *= abs(normal.get("coef", 1.0)) * (1 + expected.size.detach())
    hunt.close(found, expected.value, error * expected.size + textbook, *where, "value")
    if grads:
        actual = torch.autograd.grad(found.sum(), leaves)
        for grad, exact, leaf in zip(actual, expected[2:4], (a, b), strict=True):
            rounding = torch.finfo(leaf.dtype).eps * exact.abs()
            hunt.close(grad, exact, error * expected.steepness + rounding, *where, "gradient")


def pair(dtype=torch.float32, shape=(3, 5), spread=1.0):
    a = -2 * torch.rand(shape)
    return a.to(dtype), (a + spread * torch.randn(shape)).to(dtype)


def masks():
    """(what, mask [3, 5])."""
    pattern = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    for dtype in (torch.bool, *INTEGERS, *FLOATS):
        yield f"{dtype} ones", pattern.to(dtype)
    for byte in (2, 3, 127, 128, 255):
        odd = (pattern * byte).to(torch.uint8)
        yield f"uint8 {byte}", odd
        yield f"bool of byte {byte}", odd.view(torch.bool)
    for dtype in INTEGERS:
        yield f"{dtype} largest", pattern.to(dtype) * torch.iinfo(dtype).max
    for weight in (1e-30, 0.5, 1 / 3, 3.0, 1e20, 1e30):
        for dtype in (torch.float64, torch.float32):
            yield f"{dtype} {weight}", pattern.to(dtype) * weight
    for weight in (2.0**-24, 0.5, 60000.0):
        yield f"fp16 {weight}", pattern.half() * weight
    yield "minus zero", torch.where(pattern == 0, -0.0, 1.0)
    yield "none", torch.zeros(3, 5)
    yield "all", torch.ones(3, 5)


def test_masks_of_every_dtype_and_weight(hunt):
    a, b = pair()
    poisoned = a.clone()
    cases = itertools.product(list(masks()), FORMULAS, REDUCTIONS, BACKENDS)
    for (what, mask), name, reduction, backend in hunt.some(cases, 20):
        poisoned = torch.where(mask == 0, NAN, a)
        options = {"estimator": name, "reduction": reduction, "backend": backend}
        compare(hunt, poisoned, b, what, mask=mask, **options)


def calls(**options):
    """What takes a mask and a coefficient: (name, function of keywords)."""
    a, b = pair(shape=(2, 3))
    z, r = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    ids = torch.ones(2, 3, dtype=torch.int64)
    yield "kl_penalty", lambda **k: klfast.kl_penalty(a, b, **options, **k)
    yield "kl_divergence", lambda **k: klfast.kl_divergence(z, r, **options, **k)
    if "reduction" not in options:
        yield (
            "kl_rewards",
            lambda **k: klfast.kl_rewards(torch.ones(2), a, b, **{"kl_coef": 0.1, **options, **k}),
        )
        yield "token_logprobs", lambda **k: klfast.token_logprobs(z, ids, **options, **k)


def bad_masks():
    for dtype, weight in itertools.product(FLOATS, (NAN, -1.0, INF, -INF, -6e-5)):
        yield dtype, weight
    yield torch.float64, 1e39
    for dtype in INTEGERS[1:]:
        yield dtype, -1
        yield dtype, torch.iinfo(dtype).min


def test_bad_masks_are_refused(hunt):
    places = list(itertools.product(range(2), range(3)))
    cases = itertools.product(bad_masks(), places, BACKENDS)
    for (dtype, weight), at, backend in hunt.some(cases, 4):
        mask = torch.ones(2, 3, dtype=dtype)
        mask[at] = weight
        for name, call in calls(backend=backend):
            hunt.refuses(lambda c=call, m=mask: c(mask=m), "mask", name, dtype, weight, at, backend)
    for reduction, backend in itertools.product(REDUCTIONS, BACKENDS):
        for name, call in calls(backend=backend, reduction=reduction):
            mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, NAN, 1.0]])
            hunt.refuses(lambda c=call, m=mask: c(mask=m), "mask", name, reduction, backend)


BAD_NUMBERS = {
    "nan": NAN,
    "inf": INF,
    "-inf": -INF,
    "1e39": 1e39,
    "-1e39": -1e39,
    "huge int": 2**5000,
    "huge fraction": Fraction(2**5000, 3),
    "text": "1",
    "bytes": b"1",
    "true": True,
    "complex": 1j,
    "decimal": Decimal(1),
    "list": [1.0],
    "tuple": (1.0,),
    "dict": {},
    "object": object(),
    "[1]": torch.ones(1),
    "[1, 1]": torch.ones(1, 1),
    "[0]": torch.ones(0),
    "bool tensor": torch.tensor(True),
    "complex tensor": torch.tensor(1j),
    "float8": torch.tensor(1.0).to(torch.float8_e4m3fn),
    "nan tensor": torch.tensor(NAN),
    "inf tensor": torch.tensor(INF),
    "1e39 tensor": torch.tensor(1e39, dtype=torch.float64),
    "nan bf16": torch.tensor(NAN, dtype=torch.bfloat16),
    "inf fp16": torch.tensor(INF, dtype=torch.float16),
    "meta": torch.ones((), device="meta"),
    "sparse": torch.ones(()).to_sparse(),
}
NOT_POSITIVE = {
    "zero": 0,
    "minus zero": -0.0,
    "minus one": -1,
    "tiny minus": -1e-300,
    "fraction": Fraction(-1, 3),
    "zero tensor": torch.tensor(0.0),
    "minus tensor": torch.tensor(-2),
    "uint8 zero": torch.tensor(0, dtype=torch.uint8),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_coefficients_and_normalizers_are_refused(hunt, backend):
    for (what, value), reduction in itertools.product(BAD_NUMBERS.items(), REDUCTIONS):
        for name, call in calls(backend=backend, reduction=reduction):
            hunt.refuses(lambda c=call, v=value: c(coef=v), "coef", name, what, reduction)
    for what, value in {**BAD_NUMBERS, "none": None}.items():
        _, _, (_, rewards), _ = calls(backend=backend)
        hunt.refuses(lambda v=value, r=rewards: r(kl_coef=v), "kl_coef", what)
    normalizers = {**BAD_NUMBERS, **NOT_POSITIVE}
    for of_double in ("1e39", "1e39 tensor"):
        del normalizers[of_double]
    for (what, value), reduction in itertools.product(normalizers.items(), NORMALIZED):
        for name, call in calls(backend=backend, reduction=reduction):
            hunt.refuses(lambda c=call, v=value: c(normalizer=v), "normalizer", name, what)
    for reduction in REDUCTIONS[:4]:
        for name, call in calls(backend=backend, reduction=reduction):
            hunt.refuses(lambda c=call: c(normalizer=1.0), "normalizer", name, reduction)


COEFFICIENTS = (0, 1, -1, 0.3, 1e-30, 1e30, -1e-3, Fraction(1, 3), torch.tensor(0.25))
NORMALIZERS = (1, 7, 1e-3, 1e10, Fraction(7, 3), torch.tensor(5), torch.tensor(2.5).double())


def test_coefficients_and_normalizers(hunt):
    a, b = pair()
    dtypes = (torch.uint8, torch.int64, *FLOATS)
    coefs = [*COEFFICIENTS, *(torch.tensor(3, dtype=dtype) for dtype in dtypes)]
    for coef, name, reduction, backend in hunt.some(
        itertools.product(coefs, FORMULAS, REDUCTIONS, BACKENDS), 10
    ):
        options = {"estimator": name, "reduction": reduction, "backend": backend}
        compare(hunt, a, b, repr(coef), coef=coef, **options)
    for normalizer, name, reduction, backend in hunt.some(
        itertools.product(NORMALIZERS, FORMULAS, NORMALIZED, BACKENDS), 10
    ):
        options = {"estimator": name, "reduction": reduction, "backend": backend}
        compare(hunt, a, b, repr(normalizer), normalizer=normalizer, coef=0.5, **options)


ODD = (0.0, -0.0, -1.0, -1e-30, -1e-6, -88.0, -1e4, 1e4, -INF, INF, NAN)


def test_infinite_log_ratios(hunt):
    """Values everywhere, gradients where the value is finite; the reference says that it has none
    of k3's at infinity.
    """
    for (p, q), name, dtype, backend in hunt.some(
        itertools.product(itertools.product(ODD, ODD), FORMULAS, FLOATS, BACKENDS), 10
    ):
        if backend == "reference" and name in ("k3", "k3_ref") and math.isinf(p - q):
            continue
        if name == "r_log_r" and q == INF:
            continue  # the limit 0 is that of a policy which excludes, and no log-prob is inf
        a, b = torch.tensor([[p]], dtype=dtype), torch.tensor([[q]], dtype=dtype)
        value = penalty(a, b, None, name).value
        options = {"estimator": name, "reduction": "token-sum", "backend": backend}
        finite = value.abs().max().item() < 1e38 and (a - b).isfinite().all().item()
        compare(hunt, a, b, p, q, dtype, grads=bool(finite), **options)


def test_half_precision_at_its_ends(hunt):
    """Gradients that leave fp16's range become its infinity, values are fp32's."""
    ends = (-65504.0, 65504.0, -6e-8, 6e-5, 0.0, -11.0)
    for (p, q), name, coef, reduction in hunt.some(
        itertools.product(
            itertools.product(ends, ends), ("k1", "abs", "k2"), (1.0, 1e6, 1e-6), REDUCTIONS
        ),
        10,
    ):
        a, b = torch.full((2, 2), p).half(), torch.full((2, 2), q).half()
        options = {"estimator": name, "reduction": reduction, "coef": coef, "backend": "native"}
        compare(hunt, a, b, p, q, coef, **options)


def test_mixed_dtypes_with_gradients(hunt):
    for first, second, third, name, reduction, backend in hunt.some(
        itertools.product(FLOATS, FLOATS, (None, *FLOATS), FORMULAS, REDUCTIONS, BACKENDS), 20
    ):
        a, b = pair()
        a, b = a.to(first), b.to(second)
        old = None if third is None else (a.float() + 0.1 * torch.randn(3, 5)).to(third)
        options = {"estimator": name, "reduction": reduction, "backend": backend}
        compare(hunt, a, b, first, second, third, old=old, **options)


def test_packed_batches(hunt):
    """The same tokens packed, with empty sequences anywhere."""
    for edges, name, reduction, backend in hunt.some(
        itertools.product(
            ([0, 15], [0, 0, 15], [0, 4, 4, 15, 15], [0, 1, 2, 14, 15], [0, *range(16)]),
            FORMULAS,
            REDUCTIONS,
            BACKENDS,
        ),
        10,
    ):
        a, b = pair(shape=(15,))
        mask = torch.rand(15) < 0.6
        options = {"estimator": name, "reduction": reduction, "backend": backend}
        for dtype in (torch.int32, torch.int64):
            cu = torch.tensor(edges, dtype=dtype)
            compare(hunt, a, b, edges, dtype, mask=mask, cu_seqlens=cu, **options)
