"""The ring (csrc/logits/cuda_ring.h) gives a KL and its gradients the bits of rows in memory.

No GPU has run it. These tests run it on the emulator, or on the interpreter of PTX.
"""

import agreement_logits as al
import emulated
import pytest
import torch
from agreement import same_bits
from targets import TARGETS, serving

INFINITY = float("inf")
MOST_OF_PART = 40 << 10
MASKED, WEIGHTLESS = (3, 8), (6, 9)  # rows of the first test
FEW_PROCESSORS = {"hopper": 16, "small": 8}
"""Chip with one processor -> the most blocks of its clusters."""

pytestmark = pytest.mark.usefixtures("one_thread")


def models(rows, words, dtype):
    """Rows of two models [1, rows, words]. A comment says what a row tests."""
    first, second = (each[0] for each in al.random_logits(1, rows, words, apart=0.02))
    own = torch.randn(words, generator=torch.Generator().manual_seed(words))
    cases = (
        lambda x, y: y.copy_(2 * own),  # far models
        lambda x, y: y[::3].fill_(-INFINITY),  # ids that one model excludes
        lambda x, y: x,  # masked
        lambda x, y: (x[::3].fill_(-INFINITY), y[::3].fill_(-INFINITY)),  # both exclude them
        lambda x, y: x[words // 2].fill_(float("nan")),
        lambda x, y: x,  # of weight 0
        lambda x, y: (x.fill_(-INFINITY), y.fill_(-INFINITY)),
        lambda x, y: x,  # masked
        lambda x, y: y[0].fill_(float("nan")),  # of weight 0
        lambda x, y: y.add_(20),  # a ratio that is an offset
        lambda x, y: x.add_(3000),  # an origin
        lambda x, y: (x[-1].add_(200), y[-1].add_(200)),  # the sample misses an entry
        lambda x, y: y.copy_(x),
    )
    for row, case in enumerate(cases):
        if row + 1 < rows:
            case(first[row + 1], second[row + 1])
    return first.to(dtype)[None], second.to(dtype)[None]


def call(pair, keep, weights, wanted, monkeypatch, *, ring):
    """The results of an op, and its last launch's blocks, blocks of a cluster and memory."""
    monkeypatch.setenv("KLFAST_RING", str(int(ring)))
    options = (None, keep, 0, 0.5, 0.8, 0, weights, *wanted)
    made = emulated.ops().kl_divergence_fwd(*pair, *options)
    last_launch = torch.ops.klfast_emulated.last_launch(torch.empty(0))
    blocks, _, of_cluster, shared = last_launch.tolist()
    return [made[0], made[3], *made[4:6]], (blocks, of_cluster, shared > MOST_OF_PART)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("chip", FEW_PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "words"), [(16, 8), (16, 2056), (15, 10_240), (15, 10_248)])
def test_the_bits_of_rows_in_memory(rows, words, dtype, chip, wanted, monkeypatch):
    monkeypatch.setenv("KLFAST_EMULATED_CHIP", chip)
    pair = models(rows, words, dtype)
    keep, weights = torch.ones(rows, dtype=torch.bool), torch.linspace(-1, 2, rows)
    keep[[*MASKED]] = False
    weights[[*WEIGHTLESS]] = 0
    blocks = 1 if words * 4 <= MOST_OF_PART else 2
    expected, _ = call(pair, keep, weights, wanted, monkeypatch, ring=False)
    found, (count, *others) = call(pair, keep, weights, wanted, monkeypatch, ring=True)
    assert others == [blocks, True]
    assert count // blocks < rows / 2  # a cluster stays for several rows
    assert all(map(same_bits, found, expected))


def test_long_rows(monkeypatch):
    monkeypatch.setenv("KLFAST_EMULATED_CHIP", "hopper")
    pair = models(3, 151_936, torch.bfloat16)
    expected, _ = call(pair, None, torch.ones(3), (True, False), monkeypatch, ring=False)
    found, launch = call(pair, None, torch.ones(3), (True, False), monkeypatch, ring=True)
    assert launch == (16, 16, True)
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_truth(direction, dtype, monkeypatch):
    monkeypatch.setenv("KLFAST_EMULATED_CHIP", "hopper")
    pair = al.random_logits(1, 7, 10_400, dtype=dtype, apart=0.5)
    *_, (*_, is_ring) = call(pair, None, torch.ones(7), (True, True), monkeypatch, ring=True)
    assert is_ring
    with serving(TARGETS["native-emulated"]):
        al.assert_divergence_agrees("native", *pair, direction=direction, reduction="token-sum")


def test_rows_that_the_ring_does_not_take(monkeypatch):
    """Unaligned rows, strides, long rows, other dtypes, and chips that cannot."""

    def is_taken(chip, pair):
        monkeypatch.setenv("KLFAST_EMULATED_CHIP", chip)
        masked = torch.zeros(pair[0].shape[1], dtype=torch.bool)  # no row has to be read
        ones = torch.ones(pair[0].shape[1])
        *_, (*_, is_ring) = call(pair, masked, ones, (True, True), monkeypatch, ring=True)
        return is_ring

    def of(words, dtype=torch.bfloat16):
        return torch.zeros(1, 2, words, dtype=dtype)

    assert is_taken("hopper", (of(163_840), of(163_840)))
    assert not is_taken("hopper", (of(163_848), of(163_848)))
    assert not is_taken("small", (of(163_840), of(163_840)))
    assert not is_taken("ampere", (of(800), of(800)))
    assert not is_taken("hopper", (of(801), of(801)))
    assert not is_taken("hopper", (of(800), of(804)[..., 4:]))
    assert not is_taken("hopper", (of(1600)[..., ::2], of(800)))
    assert not is_taken("hopper", (of(800, torch.float32), of(800, torch.float32)))
    assert not is_taken("hopper", (of(800), of(800, torch.float16)))
