"""topk_kl_divergence against the oracle: every tail, direction, reduction, layout and dtype."""

import itertools
import math

import pytest
import torch
from agreement_logits import DIRECTIONS, FLOATS, leaves, random_logits
from agreement_topk import TAILS, assert_topk_agrees, random_teacher
from oracle_topk import LEAST_TAIL

import klfast
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

pytestmark = pytest.mark.usefixtures("one_thread")

SCALARS = (
    {},
    {"coef": -0.3, "normalizer": 2.5},
    {"coef": torch.tensor(0.7), "normalizer": torch.tensor(3.0)},
)
LAYOUTS = (
    *(((2, 3), mask) for mask in (None, torch.bool, torch.bfloat16)),
    *(((6,), mask) for mask in (None, torch.int64)),
)
"""Shapes of the tokens, where one dimension is packed, and dtypes of masks."""
REDUCED = [
    (*case, LAYOUTS[i % len(LAYOUTS)], SCALARS[i % len(SCALARS)])
    for i, case in enumerate(itertools.product(DIRECTIONS, TAILS, REDUCTIONS))
]
"""Layouts and scalars in turns: each meets every direction, tail and reduction."""

every_tail = pytest.mark.parametrize("tail", TAILS)
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


@pytest.mark.grid
@pytest.mark.parametrize("ref_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_tail
@every_direction
def test_every_dtype(backend, direction, tail, dtype, ref_dtype):
    given = random_teacher(2, 3, 37, dtype=dtype, ref_dtype=ref_dtype)
    assert_topk_agrees(backend, *given, direction=direction, tail=tail)


@pytest.mark.parametrize("case", REDUCED, ids=lambda case: "-".join(case[:3]))
def test_every_reduction(backend, case):
    direction, tail, reduction, (shape, mask), scalars = case
    if reduction not in NORMALIZED_REDUCTIONS:
        scalars = {name: value for name, value in scalars.items() if name == "coef"}
    given = random_teacher(*shape, 37)
    options = {"direction": direction, "tail": tail, "reduction": reduction, **scalars}
    if len(shape) == 1:
        options["cu_seqlens"] = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    if mask is not None:
        mask = torch.tensor([1, 0, 2, 1, 1, 0]).reshape(shape).to(mask)
    assert_topk_agrees(backend, *given, mask, **options)


@pytest.mark.grid
@pytest.mark.parametrize("entries", [1, 2, 31, 64, 65, 200])
@pytest.mark.parametrize("words", [200, 2500])
@every_tail
@every_direction
def test_any_number_of_entries(backend, direction, tail, words, entries):
    if (tail, entries) == ("renormalize", 1):
        pytest.skip("is refused")
    given = random_teacher(1, 2, words, entries=entries)
    assert_topk_agrees(backend, *given, direction=direction, tail=tail, jsd_beta=0.2)


@pytest.mark.grid
@pytest.mark.parametrize("beta", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("apart", [0.0, 1e-4, 3.0])
@every_tail
def test_mixtures(backend, tail, beta, apart):
    given = random_teacher(1, 3, 37, apart=apart)
    assert_topk_agrees(backend, *given, direction="jsd", jsd_beta=beta, tail=tail)


@pytest.mark.grid
@pytest.mark.parametrize("shape", [None, (), (2, 1), (2, 3)], ids=str)
@every_tail
@every_direction
def test_temperatures(backend, direction, tail, shape):
    """Of the student; of both where both are renormalised."""
    given = random_teacher(2, 3, 37)
    temperature = 0.6 if shape is None else 0.5 + torch.rand(shape)
    assert_topk_agrees(backend, *given, direction=direction, tail=tail, temperature=temperature)


@pytest.mark.grid
@every_tail
@every_direction
def test_entries_that_do_not_exist(backend, direction, tail):
    """Their ids are not read; a token of none is masked, in numerator and denominator."""
    logits, ids, teacher = random_teacher(2, 3, 37)
    teacher[0, 0, 1:] = teacher[0, 1, ::2] = -math.inf
    teacher[0, 2] = teacher[1, 1] = -math.inf
    ids = torch.where(teacher == -math.inf, torch.tensor([-1, 10**12, 37, 5]), ids)
    logits[0, 2] = math.nan
    mask = torch.tensor([[1.0, 0.5, 1.0], [1.0, 1.0, 0.0]])
    for reduction in ("none", "token-mean", "seq-mean-token-mean"):
        options = {"direction": direction, "tail": tail, "reduction": reduction}
        assert_topk_agrees(backend, logits, ids, teacher, mask, **options)
        assert_topk_agrees(backend, logits, ids, teacher, **options)


@every_tail
@every_direction
def test_what_is_masked_does_not_exist(backend, direction, tail):
    """Whatever its logits, its ids and its log-probs are; its gradients are exactly 0."""
    logits, ids, teacher = random_teacher(2, 3, 37)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    logits[mask == 0] = torch.tensor([math.nan, math.inf, -math.inf]).repeat(13)[:37]
    teacher[mask == 0] = torch.tensor([math.nan, math.inf, -math.inf, 5.0])
    ids[mask == 0] = torch.tensor([-(2**63), 10**12, 3, 3])
    for reduction in ("none", "token-mean"):
        options = {"direction": direction, "tail": tail, "reduction": reduction}
        assert_topk_agrees(backend, logits, ids, teacher, mask, **options)
    inputs = leaves(logits, teacher)
    kl = klfast.topk_kl_divergence(
        inputs[0], ids, inputs[1], mask, direction=direction, tail=tail, backend=backend
    )
    for grad in torch.autograd.grad(kl.sum(), inputs):
        assert not grad[mask == 0].any()


@every_tail
@every_direction
def test_a_batch_of_no_entries_is_zero(backend, direction, tail):
    logits, ids, teacher = random_teacher(2, 3, 37)
    inputs = leaves(torch.full_like(logits, math.nan), torch.full_like(teacher, -math.inf))
    for reduction, shape in (("none", (2, 3)), ("seq-mean", (2,)), ("token-mean", ())):
        options = {"direction": direction, "tail": tail, "reduction": reduction}
        found = klfast.topk_kl_divergence(
            inputs[0], ids, inputs[1], return_stats=True, backend=backend, **options
        )
        assert torch.equal(found.kl, torch.zeros(shape))
        assert torch.equal(found.stats.length, torch.zeros(2))
        for grad, like in zip(torch.autograd.grad(found.kl.sum(), inputs), inputs, strict=True):
            assert torch.equal(grad, torch.zeros_like(like))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (0, 0)], ids=str)
@every_tail
def test_empty_batches(backend, tail, shape):
    inputs = leaves(torch.zeros(*shape, 5), torch.zeros(*shape, 2))
    ids = torch.zeros(*shape, 2, dtype=torch.int64)
    for options in ({}, {"direction": "jsd"}, {"reduction": "token-sum"}):
        kl = klfast.topk_kl_divergence(
            inputs[0], ids, inputs[1], tail=tail, backend=backend, **options
        )
        assert torch.equal(kl, torch.zeros(() if "reduction" in options else shape))
        grads = torch.autograd.grad(kl.sum(), inputs)
        assert [grad.shape for grad in grads] == [t.shape for t in inputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_direction
def test_a_whole_vocabulary_is_the_divergence(backend, direction, dtype):
    """Every tail is then nothing, but for the floor of the bucket's."""
    logits, teacher = random_logits(2, 3, 37, dtype=dtype)
    ids = torch.arange(37).flip(0).expand(2, 3, 37)
    logprobs = teacher.double().log_softmax(-1).flip(-1)
    expected = klfast.kl_divergence(
        logits, teacher, direction=direction, jsd_beta=0.3, backend=backend
    )
    for tail in TAILS:
        found = klfast.topk_kl_divergence(
            logits, ids, logprobs, direction=direction, tail=tail, jsd_beta=0.3, backend=backend
        )
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=4e-7)


@every_direction
def test_a_bucket_is_at_most_the_divergence_of_all_words(backend, direction):
    logits, teacher = random_logits(4, 8, 300)
    top = teacher.log_softmax(-1).topk(5)
    given = (logits, top.indices, top.values)
    bucket = klfast.topk_kl_divergence(*given, direction=direction, backend=backend)
    of_all = klfast.kl_divergence(logits, teacher, direction=direction, backend=backend)
    assert (bucket >= 0).all()
    assert (bucket <= of_all * (1 + 1e-6) + 1e-7).all()


@every_tail
@every_direction
def test_a_student_that_is_the_teacher_is_at_0(backend, direction, tail):
    """And is drawn nowhere; not below 0 by rounding, but for "drop", which may be."""
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
    for teacher in (own, own.transpose(0, 1).contiguous().transpose(0, 1)):
        assert not klfast.topk_kl_divergence(leaf, top.indices, teacher, **options).any()
    if tail != "drop":
        (grad,) = torch.autograd.grad(kl.sum(), leaf)
        assert grad.abs().max() < 1e-6


@every_direction
def test_a_dropped_tail_may_be_negative(backend, direction):
    """As verl's, which clamps it: half of the teacher's mass, all of the student's."""
    logits = torch.tensor([[[4.0, 0.0, 0.0]]])
    ids, logprobs = torch.tensor([[[0]]]), torch.tensor([[[math.log(0.5)]]])
    options = {"direction": direction, "backend": backend}
    found = klfast.topk_kl_divergence(logits, ids, logprobs, tail="drop", **options)
    assert (found.item() < 0) == (direction == "forward")
    assert klfast.topk_kl_divergence(logits, ids, logprobs, **options).item() > 0


@pytest.mark.parametrize("excess", [0.0, 1e-7, 1e-3])
@every_direction
def test_log_probs_that_sum_to_1_or_more(backend, direction, excess):
    """By rounding: what is left is 2^-24, and finite."""
    logits = random_logits(1, 2, 37)[0]
    top = logits.log_softmax(-1).topk(3)
    teacher = torch.log_softmax(top.values, -1) + math.log1p(excess)
    assert_topk_agrees(backend, logits, top.indices, teacher, direction=direction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("margin", [8.0, 12.0, 15.0])
@every_direction
def test_a_tail_of_the_student_near_nothing_has_its_gradient(backend, direction, margin, dtype):
    """Where peers' clamps have ended it: 1 - Q is 1e-7 at a margin of 15."""
    logits = torch.zeros(1, 2, 37, dtype=dtype)
    logits[..., :3] = torch.tensor([margin + 1, margin + 1.5, margin])
    teacher = torch.tensor([0.4, 0.3, 0.2]).log().expand(1, 2, 3)
    ids = torch.tensor([2, 0, 1]).expand(1, 2, 3)
    assert_topk_agrees(backend, logits, ids, teacher, direction=direction)
    leaf = logits.requires_grad_()
    kl = klfast.topk_kl_divergence(leaf, ids, teacher, direction=direction, backend=backend)
    (grad,) = torch.autograd.grad(kl.sum(), leaf)
    assert (grad[..., 3:] < 0).all()  # towards the words that the student leaves out


@every_direction
def test_a_tail_beyond_the_least_is_the_least(backend, direction):
    """The value is stated: finite, as of a rest of 2^-24, and no gradient flows through that."""
    logits = torch.zeros(1, 1, 37)
    logits[..., 5] = 40.0
    ids, teacher = torch.tensor([[[5]]]), torch.tensor([[[math.log(0.75)]]])
    assert_topk_agrees(backend, logits, ids, teacher, direction=direction)
    if direction == "forward":
        kl = klfast.topk_kl_divergence(logits, ids, teacher, backend=backend)
        truth = 0.75 * math.log(0.75) + 0.25 * math.log(0.25 / LEAST_TAIL)
        torch.testing.assert_close(kl.item(), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("words", [1, 4], ids=["one", "all"])
@every_tail
def test_words_that_the_student_never_says(backend, tail, words):
    """Infinite where the teacher says it, nothing where it is the student that is asked."""
    if (tail, words) == ("renormalize", 4):
        pytest.skip("has no student")
    logits, ids, teacher = random_teacher(1, 2, 37)
    logits[0, 0, ids[0, 0, :words]] = -math.inf
    options = {"tail": tail, "backend": backend}
    forward = klfast.topk_kl_divergence(logits, ids, teacher, **options)
    assert forward[0, 0] == math.inf
    assert forward[0, 1].isfinite()
    inputs = leaves(logits, teacher)
    for direction in ("reverse", "jsd"):
        kl = klfast.topk_kl_divergence(inputs[0], ids, inputs[1], direction=direction, **options)
        assert kl.isfinite().all()
        grads = torch.autograd.grad(kl.sum(), inputs)
        assert all(grad.isfinite().all() for grad in grads)
        assert words == 1 or not grads[0][0, 0].any()  # no share of the student can move
        assert_topk_agrees(backend, logits, ids, teacher, direction=direction, tail=tail)


def test_the_student_s_own_words_serve(backend):
    """Its likeliest, and the teacher's log-probs there."""
    logits, teacher = random_logits(2, 3, 300)
    ids = logits.topk(16).indices
    logprobs = klfast.token_logprobs(teacher, ids, backend=backend)
    for tail in TAILS:
        assert_topk_agrees(backend, logits, ids, logprobs, direction="reverse", tail=tail)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_ids_of_any_dtype_and_layout(backend, dtype):
    logits, ids, teacher = random_teacher(2, 3, 100)
    expected = klfast.topk_kl_divergence(logits, ids, teacher, backend=backend)
    narrow = ids.to(dtype)
    for own in (narrow, narrow.transpose(0, 2).contiguous().transpose(0, 2)):
        assert torch.equal(
            klfast.topk_kl_divergence(logits, own, teacher, backend=backend), expected
        )
    wide = torch.stack([logits, logits], -1)[..., 0]
    strided = torch.stack([teacher, teacher], -1)[..., 1]
    assert_topk_agrees(backend, wide, ids, strided)
