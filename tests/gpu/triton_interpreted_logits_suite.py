"""The tests that ``test_triton_interpreted`` runs of the kernels over logits.

The interpreter takes milliseconds for a tile. With tiles of 64 entries, short rows have many tiles
and several segments, so every code path runs.
"""

import agreement_logits as al
import pytest
import torch
from extreme_logits import PEAKS, assert_divergence, assert_tokens, pairs, rows_with_peaks
from shards import found_over_shards

import klfast
from klfast.backends.triton import logits_launch as launch
from klfast.backends.triton import plan
from klfast.cli.check.calls import Call
from klfast.cli.check.compare import truth_of, wrong_of

BACKEND = "triton"
VOCABULARIES = (1, 2, 31, 64, 97, 200)
"""A part of a tile, whole tiles, and tiles with a part. From 97 on a row has segments."""


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(launch, "_TILE", 64)
    monkeypatch.setattr(launch, "_SEGMENT", 64)
    monkeypatch.setattr(launch, "_ONE_PROGRAM", 96)
    _forget()
    yield
    _forget()


def _forget():
    launch.form_of.cache_clear()
    plan.PLANS.clear()


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
@pytest.mark.parametrize("words", VOCABULARIES)
@al.every_direction
def test_vocabularies(direction, words, reduction):
    logits, ref_logits = al.random_logits(2, 3, words)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    options = {"direction": direction, "reduction": reduction}
    al.assert_divergence_agrees(BACKEND, logits, ref_logits, mask, **options)
    if reduction == "none":
        al.assert_entropy_agrees(BACKEND, logits, ref_logits, mask, direction=direction)


@pytest.mark.parametrize("weight", [0.01, pytest.param(0.99, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("direction", ["jsd", "tv", "skew-reverse", "skew-forward"])
def test_mixtures(direction, weight):
    logits, ref_logits = al.random_logits(1, 1, 70, apart=3.0)
    options = {"direction": direction, "jsd_beta": weight, "skew_alpha": weight}
    al.assert_divergence_agrees(BACKEND, logits, ref_logits, **options)


@pytest.mark.parametrize("direction", ["tv", "skew-reverse"])
def test_a_shift_costs_no_digits(direction):
    """The models are nearly equal, and fp32 rounds the distance of their log-sum-exps."""
    logits = torch.randint(-800, 800, (1, 8, 60)).float() / 256
    ref_logits = logits + 0.9 + torch.randint(-1, 2, logits.shape) * 2.0**-21
    options = {"direction": direction, "skew_alpha": 0.25}
    found = klfast.kl_divergence(logits, ref_logits, backend=BACKEND, **options)
    p, apart = logits.double().softmax(-1), ref_logits.double() - logits.double()
    u = apart - (p * apart).sum(-1, keepdim=True)
    terms = p * u.abs() / 2 if direction == "tv" else p * (0.75 * u) ** 2 / 2
    torch.testing.assert_close(found.double(), terms.sum(-1), rtol=1e-5, atol=0)


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("words", [90, 190], ids=["one-program", "segments"])
@al.every_direction
def test_rows_that_say_nothing_of_their_peak(direction, words):
    """The first look is poor or useless."""
    logits, ref_logits = al.random_logits(1, 4, words)
    logits[0, 0, :40] = -torch.inf
    ref_logits[0, 0, :40] = -torch.inf
    logits[0, 1, -1] = 60.0
    ref_logits[0, 2] += 30.0
    ref_logits[0, 3, -1] = 25.0
    al.assert_divergence_agrees(BACKEND, logits, ref_logits, direction=direction)
    ref_logits[0, 0, 40:60] = -torch.inf
    given = {"logits": logits, "ref_logits": ref_logits, "direction": direction}
    of = ("ref_logits",) if direction == "reverse" else ("logits", "ref_logits")  # else infinite
    assert not al.wrong(BACKEND, "kl_divergence", of, return_entropy=True, **given)


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("step", [pytest.param(31, marks=pytest.mark.exhaustive), 123])
@pytest.mark.parametrize("words", [7, pytest.param(150, marks=pytest.mark.exhaustive)])
@al.every_direction
def test_logits_far_from_0(direction, words, step):
    """Every ``step``-th pair runs, which includes every height."""
    models = [t[::step] for t in pairs(words, torch.float32)]
    assert_divergence(BACKEND, *models, direction, temperature=0.7)
    assert_tokens(BACKEND, models[0], models[0].argmax(-1), temperature=0.7)


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("heights", [PEAKS[::3], PEAKS[1::3], PEAKS[2::3]], ids=str)
@pytest.mark.parametrize("dtype", al.FLOATS, ids=str)
@pytest.mark.parametrize("words", [90, 190], ids=["one-program", "segments"])
@al.every_direction
def test_peaks_beyond_the_guess(direction, words, dtype, heights):
    models = rows_with_peaks(words, dtype, heights=heights)
    assert_divergence(BACKEND, *models, direction)
    assert_tokens(BACKEND, models[0], models[1].argmax(-1))


@pytest.mark.parametrize("words", VOCABULARIES)
def test_tokens(words):
    """One id per token, and 70, of which some repeat and some do not exist."""
    logits, mask = al.random_logits(2, 3, words)[0], torch.tensor([[1, 0, 1], [1, 1, 1]])
    many = torch.randint(words, (2, 3, 70))
    many[..., ::9] = -100
    for ids in (al.random_ids(logits), many):
        ids[0, 1] = -100
        kept = (mask != 0) & (ids >= 0).view(2, 3, -1).any(-1)
        options = {"mask": mask, "kept": kept, "ignore_index": -100}
        options |= {"return_entropy": True, "temperature": 1.3, "inplace_backward": True}
        given = {"logits": logits, "token_ids": ids, **options}
        assert not al.wrong(BACKEND, "token_logprobs", ("logits",), **given)


@pytest.mark.parametrize("words", [60, pytest.param(190, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_shards_of_a_vocabulary(direction, words):
    """Rows have one program or segments. The last row has no probability in the first shard."""
    logits, ref_logits = al.random_logits(1, 3, 2 * words)
    logits[0, 2, :words] = ref_logits[0, 2, :words] = -torch.inf
    tensors = {"logits": logits, "ref_logits": ref_logits}
    ids = {"logits": logits, "token_ids": torch.tensor([[0, words, words + 1]])}
    options = {"return_entropy": True}
    for call in (
        Call("kl_divergence", tensors, {"direction": direction, **options}, (*tensors,)),
        Call("token_logprobs", ids, options, ("logits",)),
    ):
        assert not wrong_of(truth_of(call), found_over_shards(call, BACKEND, (words,)))
