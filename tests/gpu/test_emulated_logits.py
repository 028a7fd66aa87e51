"""The emulated CUDA kernels over logits, on every kind of chip.

The tests say how many blocks read a row, that its place in memory does not matter, and what token
ids outside of the vocabulary give.
"""

from typing import NamedTuple

import agreement_logits as al
import emulated
import pytest
import torch
from agreement import same_bits
from targets import TARGETS, serving

from klfast.args.rows import ENTROPIES
from klfast.formulas.divergences import DIVERGENCES

CHIPS = ("hopper", "ampere", "small", "slice")
"""A chip with clusters of 16 blocks, one without clusters, one with clusters of 8 blocks, and one
where only two blocks ever run together.
"""
KL, JSD, TV, SKEW = map(DIVERGENCES.index, ("kl", "jsd", "tv", "skew"))
NONE, FIRST, SECOND = map(ENTROPIES.index, ("none", "first", "second"))
ENTROPIES_OF = {KL: (FIRST, SECOND), JSD: (FIRST,), TV: (FIRST,), SKEW: (FIRST, SECOND)}

pytestmark = pytest.mark.usefixtures("one_thread")
every_chip = pytest.mark.parametrize("chip", CHIPS)


@pytest.fixture(autouse=True)
def _chip(request, monkeypatch):
    emulated.ops()
    if "chip" in request.fixturenames:
        monkeypatch.setenv("KLFAST_EMULATED_CHIP", request.getfixturevalue("chip"))
    with serving(TARGETS["native-emulated"]):
        yield


def ops():
    return torch.ops.klfast_emulated


class Launch(NamedTuple):
    blocks: int
    threads: int
    of_cluster: int
    shared: int


def last_launch():
    return Launch(*ops().last_launch(torch.empty(0)).tolist())


def forward(logits, ref_logits, divergence=KL, shares=None, entropy_of=NONE):
    wanted = shares is not None
    options = (None, None, divergence, 0.3, 1.0, entropy_of, shares, wanted, wanted)
    return ops().kl_divergence_fwd(logits, ref_logits, *options)


PATHS = {
    # Vocabulary size in fp32 -> (blocks of a row, True if they also write its gradient).
    "hopper": {1: (1, True), 5120: (1, True), 5121: (2, True), 200_000: (16, True)},
    "ampere": {5120: (1, True), 200_000: (1, False)},
    "small": {15_000: (4, True), 200_000: (8, True)},
    "slice": {5120: (1, True), 200_000: (2, True)},
}


@pytest.mark.parametrize(
    ("chip", "words", "path"),
    [(chip, words, path) for chip, paths in PATHS.items() for words, path in paths.items()],
)
def test_who_reads_a_row_depends_on_its_words_and_the_chip(chip, words, path):
    """The number of rows matters too, unless a gradient is written: six rows fill these chips."""
    blocks, writes_gradient = path
    for rows, of_row in ((1, blocks), (6, 1)):
        masked = torch.zeros(rows, dtype=torch.bool)  # no row has to be read
        logits = torch.empty(1, rows, words)
        options = (logits, logits, None, masked, JSD, 0.3, 1.0, NONE)
        ops().kl_divergence_fwd(*options, None, False, False)
        assert last_launch()[0:3:2] == (rows * of_row, of_row)
        before = ops().launches(logits).item()
        ops().kl_divergence_fwd(*options, torch.ones(rows), True, True)
        assert ops().launches(logits).item() - before == (1 if writes_gradient else 2)
        if writes_gradient:
            assert last_launch()[0:3:2] == (rows * blocks, blocks)


@pytest.mark.parametrize("words", [1003, 30_000])
@pytest.mark.parametrize("number", [-torch.inf, torch.nan])
@every_chip
def test_a_row_whose_sample_tells_nothing_is_read_again(chip, number, words):
    """A sample is 32 chunks of 16 bytes, spread evenly over the row from its first entry on."""
    pair = al.random_logits(1, 1, words, apart=0.1)
    apart = max(1, words // 128) * 4
    sampled = torch.arange(32)[:, None] * apart + torch.arange(4)
    for logits in pair:
        logits[0, 0, sampled[sampled < words]] = number
    expected = [logits[0, 0].double().log_softmax(-1) for logits in pair]
    for divergence in range(len(DIVERGENCES)):
        alone = forward(*pair, divergence)[0].double()
        one_read = forward(*pair, divergence, torch.ones(1))
        # A host compiler chooses the sign of NaN.
        torch.testing.assert_close(one_read[0].double(), alone, rtol=0, atol=0, equal_nan=True)
        entropies = [
            forward(*pair, divergence, entropy_of=entropy_of)[-1].double()[0]
            for entropy_of in ENTROPIES_OF[divergence]
        ]
        if number != number:
            assert alone.isnan().all()
            assert all(entropy.isnan() for entropy in entropies)
            assert one_read[4].isnan().all()
            continue
        p, q = (logprobs.exp() for logprobs in expected)
        mixed, skewed = (0.7 * p + 0.3 * q).log(), (0.3 * p + 0.7 * q).log()
        terms = {
            KL: p * (expected[0] - expected[1]),
            JSD: 0.7 * p * (expected[0] - mixed) + 0.3 * q * (expected[1] - mixed),
            TV: (p - q).abs() / 2,
            SKEW: p * (expected[0] - skewed),
        }[divergence]
        torch.testing.assert_close(alone[0], terms[p > 0].sum(), rtol=2e-6, atol=1e-9)
        for entropy, truth in zip(entropies, expected, strict=False):
            exact = -(truth.exp() * truth)[truth > -torch.inf].sum()
            torch.testing.assert_close(entropy, exact, rtol=1e-6, atol=1e-6)
        assert one_read[4].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@every_chip
def test_where_a_row_lies_does_not_matter(chip, dtype):
    """A row may begin at any address, have other numbers beside it, or have gaps."""
    rows, words = 3, 1003
    logits, ref_logits = al.random_logits(1, rows, words, dtype=dtype)
    ids, shares = (
        al.random_ids(logits)[0],
        torch.rand(rows).to(torch.promote_types(dtype, torch.float32)),
    )

    def call(x, y):
        logprobs, entropy, lse = ops().token_logprobs_fwd(x, ids, None, 0.7, True)
        row_grad = shares - 0.4
        backward = (lse, logprobs, entropy, 0.7, row_grad, shares)
        outputs = [logprobs, entropy, lse, ops().token_logprobs_bwd(x, ids, None, *backward)]
        for divergence in range(len(DIVERGENCES)):
            outputs += forward(x, y, divergence)[:4:3]
            one_read = forward(x, y, divergence, shares)
            outputs += [one_read[0], *one_read[4:]]
            for entropy_of in ENTROPIES_OF[divergence]:
                beside = forward(x, y, divergence, entropy_of=entropy_of)
                inputs = (x, y, ids, None, divergence, 0.3, 1.0, entropy_of)
                saved = (one_read[0], one_read[3], beside[-1])
                sent = (row_grad, shares, shares, shares)
                outputs += [
                    beside[-1],
                    *ops().kl_divergence_bwd(*inputs, *saved, *sent, True, True),
                ]
        return outputs

    def laid_out(tensor, offset, stride):
        memory = torch.full((rows * words * stride + 64,), float("nan"), dtype=dtype)
        strides = (0, words * stride, stride)
        return memory.as_strided(tensor.shape, strides, offset).copy_(tensor)

    expected = call(logits, ref_logits)
    for offset, other_offset, stride in ((1, 0, 1), (3, 3, 1), (8, 5, 1), (2, 7, 2)):
        x, y = laid_out(logits, offset, stride), laid_out(ref_logits, other_offset, stride)
        for found, of_dense in zip(call(x, y), expected, strict=True):
            assert same_bits(found, of_dense)


@pytest.mark.parametrize("offset", range(9))
def test_a_gradient_in_place_stays_in_its_place(offset):
    """Rows may begin at any address and share a 32-bit word."""
    rows, words = 3, 301
    logits = al.random_logits(1, rows, words, dtype=torch.bfloat16)[0]
    ids, keep = al.random_ids(logits)[0], torch.tensor([True, False, True])
    logprobs, entropy, lse = ops().token_logprobs_fwd(logits, ids, keep, 1.0, True)
    options = (ids, keep, lse, logprobs, entropy, 1.0, torch.ones(rows), torch.ones(rows))
    expected = ops().token_logprobs_bwd(logits, *options)
    memory = torch.full((rows * words + 32,), 7.0, dtype=torch.bfloat16)
    inside = memory[offset : offset + logits.numel()].view_as(logits).copy_(logits)
    ops().token_logprobs_bwd_(inside, *options)
    assert same_bits(inside, expected)
    assert (memory[:offset] == 7).all()
    assert (memory[offset + logits.numel() :] == 7).all()


FEW = {"hopper": 8, "ampere": 1, "small": 8, "slice": 1}
"""Chip -> blocks of the cluster that reads one of few rows with 70,001 fp32 entries."""


@pytest.mark.parametrize(("chip", "of_cluster"), FEW.items())
def test_few_long_rows_are_read_by_clusters_with_the_same_bits(chip, of_cluster, monkeypatch):
    monkeypatch.setenv("KLFAST_EMULATED_CHIP", chip)
    logits = al.random_logits(1, 1, 70_001)[0]
    logits[0, 0, 12_345:60_000:20_000] += 40  # outside of the sample
    ids = torch.tensor([70_000])
    one = ops().token_logprobs_fwd(logits, ids, None, 1.0, True)
    assert last_launch().of_cluster == of_cluster
    many = ops().token_logprobs_fwd(logits.expand(1, 4, -1), ids.repeat(4), None, 1.0, True)
    assert last_launch()[0::2] == (4, 1)
    for found, expected in zip(many, one, strict=True):
        assert same_bits(found[..., 3:], expected)
    logprobs, entropy, _ = one
    truth = logits[0, 0].double().log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), truth[-1:], rtol=0, atol=2e-6)
    torch.testing.assert_close(
        entropy.double(), -(truth.exp() * truth).sum()[None], rtol=1e-6, atol=al.OF_ONE_WORD
    )


@pytest.mark.parametrize("divergence", range(len(DIVERGENCES)), ids=DIVERGENCES)
def test_any_number_of_blocks_gives_a_row_the_same_bits(divergence, monkeypatch):
    """The row has 16 parts. Six rows fill a chip, and a block then reads all parts of one."""
    pair = al.random_logits(1, 1, 41_000, apart=0.1)
    many = [logits.expand(1, 6, -1) for logits in pair]
    found = []
    for chip, blocks in {"hopper": 16, "small": 8, "slice": 2, "ampere": 1}.items():
        monkeypatch.setenv("KLFAST_EMULATED_CHIP", chip)
        alone = forward(*pair, divergence)[0]
        assert last_launch().of_cluster == blocks
        among_others = forward(*many, divergence)[0]
        assert last_launch().of_cluster == 1
        value, *_, first, second, _ = forward(*pair, divergence, torch.ones(1))
        found.append((torch.stack([alone, among_others[5:], value]), first, second))
    for values, *gradients in found:
        assert same_bits(values, found[0][0][:1].expand(3, -1))
        assert all(map(same_bits, gradients, found[0][1:]))


@every_chip
def test_every_chip_gives_the_truth(chip):
    words = 5000
    for dtype, direction, reduction in (
        (torch.float32, "reverse", "none"),
        (torch.float32, "jsd", "none"),
        (torch.bfloat16, "forward", "token-sum"),
    ):
        models = al.random_logits(1, 2, words, dtype=dtype)
        options = {"direction": direction, "reduction": reduction}
        al.assert_divergence_agrees("native", *models, **options)
        al.assert_entropy_agrees("native", *models, **options)
        al.assert_tokens_agree("native", models[0], torch.tensor([[0, words - 1]]))


@every_chip
def test_a_row_on_any_chip_is_the_same_in_any_company(chip):
    logits, ref_logits = al.random_logits(1, 3, 5000)
    ids = al.random_ids(logits)
    together = al.everything("native", logits, ref_logits, ids, "reverse")
    for row in range(3):
        own = slice(row, row + 1)
        alone = al.everything("native", logits[:, own], ref_logits[:, own], ids[:, own], "reverse")
        al.assert_same(alone, [t[:, own] for t in together])


ABSURD = [-1, 50, 2**31, 2**62, -(2**63)]


@every_chip
def test_an_id_that_is_no_word_is_nan_and_read_from_nowhere(chip):
    """GPUs do not check ids. Only its log-prob is NaN, and no entry's gradient has the 1."""
    logits, ref_logits = al.random_logits(1, len(ABSURD) + 1, 50)
    ids, good = torch.tensor([3, *ABSURD]), torch.full((len(ABSURD) + 1,), 3)
    found, entropy, saved = ops().token_logprobs_fwd(logits, ids, None, 1.0, True)
    expected, *others = ops().token_logprobs_fwd(logits, good, None, 1.0, True)
    assert found.isnan().tolist() == [False] + [True] * len(ABSURD)
    assert found[0] == expected[0]
    for of_row, expected_of_row in zip((entropy, saved), others, strict=True):
        # The sum leaves the id's entry out, and adds it in double.
        torch.testing.assert_close(of_row, expected_of_row, rtol=2e-7, atol=0)
    ones = torch.ones(len(ids))
    backward = [
        ops().token_logprobs_bwd(logits, of, None, saved, expected, entropy, 1.0, ones, None)[0]
        for of in (ids, good)
    ]
    no_word = torch.zeros_like(backward[0])
    no_word[1:, 3] = 1
    torch.testing.assert_close(backward[0], backward[1] - no_word, rtol=0, atol=2e-7)

    for divergence in range(len(DIVERGENCES)):
        inputs = (logits, ref_logits, ids, None, divergence, 0.5, 1.0, NONE)
        rows, logprobs, ref_logprobs, saved, *_ = ops().kl_divergence_fwd(
            *inputs, None, False, False
        )
        assert rows.isfinite().all()
        assert logprobs.isnan().tolist() == ref_logprobs.isnan().tolist() == found.isnan().tolist()
        sent = (None, ones, ones, ones, None)
        grads = ops().kl_divergence_bwd(*inputs, rows, saved, *sent, True, True)
        assert all(grad.isfinite().all() for grad in grads)
        assert all((grad.sum(-1)[0, 1:] < -0.9).all() for grad in grads)
