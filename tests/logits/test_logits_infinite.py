"""Infinite and NaN logits. A model may exclude token ids. Other bad logits show in the result."""

import math

import agreement_logits as al
import pytest
import torch

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")
NAN, INF = math.nan, math.inf
PLACES = (0, 40, 1499)  # token ids of a vocabulary of 1,500
NOT_NUMBERS = [*((at, poison) for at in PLACES for poison in (NAN, INF)), (slice(None), -INF)]


def top(logits, count):
    """Logits after top-k sampling."""
    least = logits.topk(count).values[..., -1:]
    return torch.where(logits >= least, logits, -INF)


def filtered(x, y):
    """Rows of each kind of filter, [5, V]. The first model excludes more ids than the second."""
    words = torch.arange(x.shape[-1])
    last = words >= x.shape[-1] - 3
    few = top(x[1], 10) == -INF
    first = [top(x[0], 10), top(x[1], 10), top(x[2], 3)]
    first += [torch.where(words == 0, -INF, x[3]), torch.where(last, x[4], -INF)]
    second = [y[0], torch.where(few, -INF, y[1]), *y[2:]]
    return torch.stack(first), torch.stack(second)


def divergence_and_grads(backend, logits, ref_logits, direction, reduction="none", **options):
    inputs = al.leaves(logits, ref_logits)
    found = klfast.kl_divergence(
        *inputs, direction=direction, reduction=reduction, backend=backend, **options
    )
    return found.detach(), *torch.autograd.grad(found.sum(), inputs, retain_graph=True)


@pytest.mark.parametrize("words", [37, 1500])
@al.every_direction
def test_words_that_a_model_leaves_out(backend, direction, words):
    """A finite divergence comes from the other ids, and excluded ids have no gradient."""
    for dtype in al.FLOATS if words == 37 else al.FLOATS[:1]:
        logits, ref_logits = filtered(*al.random_logits(5, words, dtype=dtype))
        if direction == "forward":
            logits, ref_logits = ref_logits, logits
        for reduction in ("none", "token-mean"):
            options = {"direction": direction, "reduction": reduction}
            al.assert_divergence_agrees(backend, logits, ref_logits, **options)
            _, *grads = divergence_and_grads(backend, logits, ref_logits, **options)
            for grad, own in zip(grads, (logits, ref_logits), strict=True):
                assert not grad[own == -INF].any()


@pytest.mark.parametrize("at", PLACES)
def test_the_reference_leaves_out_what_the_policy_says(backend, at):
    """Only this row's KL and gradient are infinite, and only in this direction."""
    logits, ref_logits = al.random_logits(1, 3, 1500)
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
            assert not al.wrong(backend, "kl_divergence", own, **given, **options)
            other = "forward" if direction == "reverse" else "reverse"
            assert klfast.kl_divergence(*models, direction=other, backend=backend).isfinite().all()
        for direction in al.DIRECTIONS[2:]:
            options = {"direction": direction, "reduction": reduction}
            al.assert_divergence_agrees(backend, logits, ref_logits, **options)


@pytest.mark.grid
@pytest.mark.parametrize(("at", "poison"), NOT_NUMBERS)
@pytest.mark.parametrize("sides", [(0,), (1,), (0, 1)], ids=str)
@al.every_direction
def test_what_is_no_number_shows_in_its_row_alone(backend, direction, sides, at, poison):
    """No result or gradient of another row changes. A row of -inf is no distribution."""
    models = al.random_logits(1, 3, 1500)
    ids = al.random_ids(models[0])
    clean = al.everything(backend, *models, ids, direction)
    for side in sides:
        models[side][0, 1, at] = poison
    dirty = al.everything(backend, *models, ids, direction)
    al.assert_same([t[:, ::2] for t in dirty], [t[:, ::2] for t in clean])
    assert dirty[0].isnan().tolist() == [[False, True, False]]
    of_tokens, of_both = dirty[-3:], dirty[3:-3]
    if 0 in sides:
        assert all(found[0, 1].isnan().all() for found in of_tokens)
    if poison != -INF:
        assert all(grad[0, 1].isnan().all() for grad in of_both)


@al.every_direction
def test_nan_beats_whatever_hides_it(backend, direction):
    """The NaN stands beside -inf of either model, or beside an excluded id."""
    logits, ref_logits = al.random_logits(5, 1500)
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


@pytest.mark.parametrize("dtype", al.FLOATS[:1] + al.FLOATS[2:], ids=str)
def test_the_lowest_number_is_as_good_as_infinity(backend, dtype):
    """Code that excludes ids may use the lowest number. No KL is NaN."""
    lowest = torch.finfo(dtype).min
    plain = al.random_logits(2, 3, 50, dtype=dtype)
    for sides in ((0,), (1,), (0, 1)):
        models = [t.clone() for t in plain]
        for side in sides:
            models[side][..., ::3] = lowest
        for direction in al.DIRECTIONS:
            says_more = {"reverse": (1,), "forward": (0,)}.get(direction)
            found, *grads = divergence_and_grads(backend, *models, direction)
            if sides == says_more:
                assert (found > 100).all()
                continue
            al.assert_divergence_agrees(backend, *models, direction=direction)
            assert all(not grads[side][..., ::3].any() for side in sides)
            same = klfast.kl_divergence(models[0], models[0], direction=direction, backend=backend)
            torch.testing.assert_close(same, torch.zeros(2, 3), rtol=0, atol=1e-15)
        tokens = models[0].argmax(-1)
        al.assert_tokens_agree(backend, models[0], tokens)
