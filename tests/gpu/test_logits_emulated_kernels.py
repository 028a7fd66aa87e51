"""The CUDA kernels over logits as emulated: on every kind of chip, and with ids nobody checked."""

import emulated
import pytest
import torch
from agreement import same_bits
from agreement_logits import (
    DIRECTIONS,
    assert_divergence_agrees,
    assert_entropy_agrees,
    assert_tokens_agree,
    leaves,
    random_ids,
    random_logits,
    tensors_of,
)
from targets import TARGETS, serving

import klfast
from klfast.args.rows import DIVERGENCES, ENTROPIES

CHIPS = ("hopper", "ampere", "small", "slice")
"""With clusters, without, one whose clusters rows of a few thousand words fill, and one on which
large clusters never fit.
"""
KL, JSD = map(DIVERGENCES.index, ("kl", "jsd"))
NONE = ENTROPIES.index("none")
SIZES = (40, 5000)

pytestmark = pytest.mark.usefixtures("one_thread")
every_chip = pytest.mark.parametrize("chip", CHIPS)


@pytest.fixture(autouse=True)
def _chip(request, monkeypatch):
    with serving(TARGETS["native-emulated"]):
        if "chip" in request.fixturenames:
            monkeypatch.setenv("KLFAST_EMULATED_CHIP", request.getfixturevalue("chip"))
        yield


@pytest.mark.parametrize("words", SIZES)
@every_chip
def test_every_chip_gives_the_truth(chip, words):
    for dtype in (torch.float32, torch.bfloat16):
        logits, ref_logits = random_logits(1, 2, words, dtype=dtype)
        for direction, reduction in (
            ("reverse", "none"),
            ("jsd", "none"),
            ("forward", "token-sum"),
        ):
            options = {"direction": direction, "reduction": reduction}
            assert_divergence_agrees("native", logits, ref_logits, **options)
            assert_entropy_agrees("native", logits, ref_logits, **options)
        assert_tokens_agree("native", logits, torch.tensor([[0, words - 1]]))


@pytest.mark.exhaustive
@every_chip
def test_every_chip_looks_again_where_it_must(chip):
    """At rows whose first words say nothing of the others, wherever their parts begin."""
    words = 5000
    x, y = random_logits(words, apart=0.1)
    logits, ref_logits = x.expand(8, words).clone(), y.expand(8, words).clone()
    for row, end in enumerate((1, 700, 3000, words - 1)):
        logits[row, :end] = ref_logits[row, :end] = -torch.inf
    for row, at in enumerate((0, 2499, words - 1), 4):
        logits[row, at] += 70
    ref_logits[7] += torch.linspace(-60, 60, words)
    for direction in DIRECTIONS:
        assert_divergence_agrees("native", logits, ref_logits, direction=direction)
        assert_entropy_agrees("native", logits, ref_logits, direction=direction)


@every_chip
def test_a_row_on_any_chip_is_the_same_in_any_company(chip):
    words = 5000
    logits, ref_logits = random_logits(1, 3, words)
    ids = random_ids(logits)

    def call(rows):
        models = leaves(logits[:, rows], ref_logits[:, rows])
        found = tensors_of(klfast.kl_divergence(*models, token_ids=ids[:, rows], backend="native"))
        one_read = klfast.kl_divergence(*models, reduction="token-sum", backend="native")
        grads = torch.autograd.grad([t.sum() for t in found], models)
        return [t.detach() for t in (*found, *grads, *torch.autograd.grad(one_read, models))]

    together = call(slice(0, 3))
    for row in range(3):
        alone = call(slice(row, row + 1))
        pairs = zip(alone, together, strict=True)
        assert all(same_bits(a, b[:, row : row + 1]) for a, b in pairs)


ABSURD = [-1, 50, 2**31, 2**62, -(2**63)]


@every_chip
def test_an_id_that_is_no_word_is_nan_and_read_from_nowhere(chip):
    """As on a GPU, where nobody looks: its log-prob alone, and no word's gradient has the 1."""
    emulated.ops()
    ops = torch.ops.klfast_emulated
    logits, ref_logits = random_logits(1, len(ABSURD) + 1, 50)
    ids, good = torch.tensor([3, *ABSURD]), torch.full((len(ABSURD) + 1,), 3)
    found, entropy, saved = ops.token_logprobs_fwd(logits, ids, None, 1.0, True)
    expected, *others = ops.token_logprobs_fwd(logits, good, None, 1.0, True)
    assert found.isnan().tolist() == [False] + [True] * len(ABSURD)
    assert found[0] == expected[0]
    for of_row, expected_of_row in zip((entropy, saved), others, strict=True):
        # A sum leaves a word out, and takes it in double.
        torch.testing.assert_close(of_row, expected_of_row, rtol=2e-7, atol=0)
    ones = torch.ones(len(ids))
    backward = [
        ops.token_logprobs_bwd(logits, of, None, saved, expected, entropy, 1.0, ones, None)[0]
        for of in (ids, good)
    ]
    no_word = torch.zeros_like(backward[0])
    no_word[1:, 3] = 1
    torch.testing.assert_close(backward[0], backward[1] - no_word, rtol=0, atol=2e-7)

    for divergence in (KL, JSD):
        inputs = (logits, ref_logits, ids, None, divergence, 0.5, 1.0, NONE)
        rows, logprobs, ref_logprobs, saved, *_ = ops.kl_divergence_fwd(*inputs, None, False, False)
        assert rows.isfinite().all()
        assert logprobs.isnan().tolist() == ref_logprobs.isnan().tolist() == found.isnan().tolist()
        sent = (None, ones, ones, ones, None)
        grads = ops.kl_divergence_bwd(*inputs, rows, saved, *sent, True, True)
        assert all(grad.isfinite().all() for grad in grads)
        assert all((grad.sum(-1)[0, 1:] < -0.9).all() for grad in grads)


def test_an_absurd_id_under_the_mask_is_nothing():
    emulated.ops()
    logits, _ = random_logits(1, len(ABSURD), 50)
    keep = torch.zeros(len(ABSURD), dtype=torch.bool)
    outputs = torch.ops.klfast_emulated.token_logprobs_fwd(
        logits, torch.tensor(ABSURD), keep, 1.0, True
    )
    assert not any(output.any() for output in outputs)
