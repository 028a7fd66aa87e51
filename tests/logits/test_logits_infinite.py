"""Infinite and NaN logits: words that a model leaves out are nobody's error, the rest shows."""

import math

import pytest
import torch
from agreement import same_bits
from agreement_logits import (
    DIRECTIONS,
    FLOATS,
    assert_divergence_agrees,
    assert_tokens_agree,
    leaves,
    random_ids,
    random_logits,
    tensors_of,
)
from truth import wrong

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")
NAN, INF = math.nan, math.inf
POISON = {"nan": NAN, "inf": INF}
PLACES = (0, 40, 1499)
"""Among 1,500 words."""

every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
every_poison = pytest.mark.parametrize("poison", POISON.values(), ids=POISON)


def top(logits, count):
    """Logits of the likeliest words, as top-k sampling leaves them."""
    least = logits.topk(count).values[..., -1:]
    return torch.where(logits >= least, logits, -INF)


def filtered(x, y):
    """Rows of each kind of filter, [5, V]: the first model says less than the second."""
    words = torch.arange(x.shape[-1])
    last = words >= x.shape[-1] - 3
    few = top(x[1], 10) == -INF
    first = [top(x[0], 10), top(x[1], 10), top(x[2], 3)]
    first += [torch.where(words == 0, -INF, x[3]), torch.where(last, x[4], -INF)]
    second = [y[0], torch.where(few, -INF, y[1]), *y[2:]]
    return torch.stack(first), torch.stack(second)


def divergence_and_grads(backend, logits, ref_logits, direction, reduction="none", **options):
    inputs = leaves(logits, ref_logits)
    found = klfast.kl_divergence(
        *inputs, direction=direction, reduction=reduction, backend=backend, **options
    )
    return found.detach(), *torch.autograd.grad(found.sum(), inputs, retain_graph=True)


@pytest.mark.parametrize("words", [37, 1500])
@every_direction
def test_words_that_a_model_leaves_out(backend, direction, words):
    """Where the divergence is finite, it is the others', and the gradient of those words 0."""
    for dtype in FLOATS if words == 37 else FLOATS[:1]:
        logits, ref_logits = filtered(*random_logits(5, words, dtype=dtype))
        if direction == "forward":
            logits, ref_logits = ref_logits, logits
        for reduction in ("none", "token-mean"):
            options = {"direction": direction, "reduction": reduction}
            assert_divergence_agrees(backend, logits, ref_logits, **options)
            _, *grads = divergence_and_grads(backend, logits, ref_logits, **options)
            for grad, own in zip(grads, (logits, ref_logits), strict=True):
                assert not grad[own == -INF].any()


@pytest.mark.parametrize("at", PLACES)
def test_the_reference_leaves_out_what_the_policy_says(backend, at):
    """KL is infinite in that direction alone; so is its gradient, but the row's only."""
    logits, ref_logits = random_logits(1, 3, 1500)
    ref_logits[0, 1, at] = -INF
    for reduction in ("none", "token-sum"):
        for direction, models in (
            ("reverse", (logits, ref_logits)),
            ("forward", (ref_logits, logits)),
        ):
            found = divergence_and_grads(backend, *models, direction, reduction)
            if reduction == "none":
                assert found[0].isinf().tolist() == [[False, True, False]]
            assert found[0].max() == INF
            of_first = found[1 if direction == "reverse" else 2]
            assert not of_first[0, 1].isfinite().any()
            assert of_first[0, ::2].isfinite().all()
            given = dict(zip(("logits", "ref_logits"), models, strict=True))
            options = {"direction": direction, "reduction": reduction}
            own = ("ref_logits" if direction == "reverse" else "logits",)
            assert not wrong(backend, "kl_divergence", own, **given, **options)
            other = "forward" if direction == "reverse" else "reverse"
            assert klfast.kl_divergence(*models, direction=other, backend=backend).isfinite().all()
        assert_divergence_agrees(backend, logits, ref_logits, direction="jsd", reduction=reduction)


@pytest.mark.grid
@every_poison
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("side", [0, 1], ids=["policy", "reference"])
@every_direction
def test_nan_and_infinity_show_in_their_row_alone(backend, direction, side, at, poison):
    models = list(random_logits(1, 3, 1500))
    clean = divergence_and_grads(backend, *models, direction)
    models[side][0, 1, at] = poison
    dirty = divergence_and_grads(backend, *models, direction)
    others = (slice(None), [0, 2])
    assert all(same_bits(a[others], b[others]) for a, b in zip(clean, dirty, strict=True))
    assert dirty[0][0, 1].isnan()
    assert all(grad[0, 1].isnan().all() for grad in dirty[1:])
    one_read = divergence_and_grads(backend, *models, direction, "token-sum")
    assert one_read[0].isnan()
    assert all(grad[0, 1].isnan().all() for grad in one_read[1:])
    assert all(
        same_bits(a[others], b[others]) for a, b in zip(clean[1:], one_read[1:], strict=True)
    )


@every_direction
def test_nan_beats_whatever_hides_it(backend, direction):
    """Beside -inf of the same model, of the other, and beside an excluded word."""
    logits, ref_logits = random_logits(5, 1500)
    logits[0, ::2] = -INF
    logits[0, 77] = NAN
    ref_logits[1, 100:] = -INF
    logits[1, 1400] = NAN
    logits[2, :1400] = -INF
    ref_logits[2, 5] = NAN
    logits[3, 5], ref_logits[3, 5] = -INF, NAN
    logits[4, 5], ref_logits[4, 5] = NAN, -INF
    found = klfast.kl_divergence(logits, ref_logits, direction=direction, backend=backend)
    assert found.isnan().all()


@pytest.mark.grid
@every_direction
@pytest.mark.parametrize("side", [0, 1, 2], ids=["policy", "reference", "both"])
def test_a_row_of_nothing_is_nan(backend, direction, side):
    models = list(random_logits(1, 2, 9))
    for own in (0, 1):
        if side in (own, 2):
            models[own][0, 1] = -INF
    found = divergence_and_grads(backend, *models, direction)
    assert found[0].isnan().tolist() == [[False, True]]
    assert found[0][0, 0].isfinite()
    assert all(grad[0, 0].isfinite().all() for grad in found[1:])
    ids, options = torch.tensor([[3, 3]]), {"return_entropy": True, "backend": backend}
    for output in klfast.token_logprobs(models[side % 2], ids, **options):
        assert output.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("at", [0, 5, 36])
def test_a_token_that_was_left_out_has_no_log_prob(backend, at):
    logits, _ = random_logits(2, 37)
    logits[1, at] = -INF
    ids = torch.full((2,), at)
    found, entropy = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
    assert found[1] == -INF
    assert found[0].isfinite()
    assert entropy.isfinite().all()
    kl, logprobs, ref_logprobs = tensors_of(
        klfast.kl_divergence(logits, logits.clone(), token_ids=ids, backend=backend)
    )
    assert torch.equal(kl, torch.zeros(2))
    assert same_bits(logprobs, ref_logprobs)
    torch.testing.assert_close(logprobs, found, rtol=2**-22, atol=0)  # other sums, of other kernels


@every_poison
@pytest.mark.parametrize("at", PLACES)
def test_nan_and_infinity_show_in_their_token_alone(backend, at, poison):
    logits, _ = random_logits(3, 1500)
    ids = random_ids(logits)

    def call(logits):
        (leaf,) = leaves(logits)
        outputs = klfast.token_logprobs(leaf, ids, return_entropy=True, backend=backend)
        grads = [torch.autograd.grad(o.sum(), leaf, retain_graph=True)[0] for o in outputs]
        return [*(o.detach() for o in outputs), *grads]

    clean = call(logits)
    logits[1, at] = poison
    dirty = call(logits)
    assert all(same_bits(a[[0, 2]], b[[0, 2]]) for a, b in zip(clean, dirty, strict=True))
    assert all(found[1].isnan().all() for found in dirty)


@pytest.mark.parametrize("dtype", FLOATS[:1] + FLOATS[2:], ids=str)
def test_the_lowest_number_is_as_good_as_infinity(backend, dtype):
    """As logits of words that must not be said: they have no probability, and no KL is NaN."""
    lowest = torch.finfo(dtype).min
    plain = random_logits(2, 3, 50, dtype=dtype)
    for sides in ((0,), (1,), (0, 1)):
        models = [t.clone() for t in plain]
        for side in sides:
            models[side][..., ::3] = lowest
        for direction in DIRECTIONS:
            says_more = {"reverse": (1,), "forward": (0,)}.get(direction)
            found, *grads = divergence_and_grads(backend, *models, direction)
            if sides == says_more:
                assert (found > 100).all()
                continue
            assert_divergence_agrees(backend, *models, direction=direction)
            assert all(not grads[side][..., ::3].any() for side in sides)
            same = klfast.kl_divergence(models[0], models[0], direction=direction, backend=backend)
            torch.testing.assert_close(same, torch.zeros(2, 3), rtol=0, atol=1e-15)
        tokens = models[0].argmax(-1)
        assert_tokens_agree(backend, models[0], tokens)
