"""Each preset against its source, in plain torch."""

import pytest
import torch
from agreement_rollout import sampled

import klfast
from klfast.args.rollout_presets import PRESETS


def inside(value, low, high):
    return (value >= low) & (value <= high)


def binary_kl(p, q):
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


def truncated(cap):
    return lambda p, q, a: (p / q).clamp(max=cap)


def masked(low, high):
    return lambda p, q, a: (p / q) * inside(p / q, low, high)


def plain(p, q, a):
    return p / q


def product(p, q):
    return (p / q).prod(1, keepdim=True)


def geometric(p, q):
    return (p / q).log().mean(1, keepdim=True).exp()


def everything(p, q, a):
    return torch.ones_like(p, dtype=torch.bool)


def away(p, q, a):
    """The ratio has moved in the direction of the advantage."""
    return ((a > 0) & (p > q)) | ((a <= 0) & (p < q))


EXPECTED = {  # weights and mask from probabilities p, rollout probabilities q, advantages a
    "tis": (truncated(2), everything),
    "mis": (masked(0.5, 2), everything),
    "icepop": (masked(0.5, 5), everything),
    "icepop-prime-rl": (masked(0.2, 5), everything),
    "seq-tis": (lambda p, q, a: product(p, q).clamp(max=2).expand_as(p), everything),
    "seq-mis": (
        lambda p, q, a: product(p, q).clamp(max=2).expand_as(p),
        lambda p, q, a: inside(product(p, q), 0.5, 2),
    ),
    "trl": (lambda p, q, a: (product(p, q) * (product(p, q) <= 3)).expand_as(p), everything),
    "geo-mask": (None, lambda p, q, a: inside(geometric(p, q), 0.999, 1.001)),
    "geo-mask-tis": (truncated(2), lambda p, q, a: inside(geometric(p, q), 0.999, 1.001)),
    "geo-mask-skyrl": (None, lambda p, q, a: inside(geometric(p, q), 0.99, 1.01)),
    "seq-mask-tis": (plain, lambda p, q, a: inside(geometric(p, q), 0.999, 1.002)),
    "k3-mask": (None, lambda p, q, a: (p / q - 1 - (p / q).log()).mean(1, keepdim=True) <= 0.01),
    "veto": (truncated(2), lambda p, q, a: ((p / q) >= 1e-4).all(1, keepdim=True)),
    "kpop": (plain, lambda p, q, a: torch.maximum(binary_kl(p, q), binary_kl(q, p)) <= 0.1),
    "dppo-tv": (truncated(20), lambda p, q, a: ~(away(p, q, a) & ((p - q).abs() > 0.15))),
    "dppo-kl": (truncated(20), lambda p, q, a: ~(away(p, q, a) & (binary_kl(p, q) > 0.05))),
    "prime-rl": (truncated(1e4), lambda p, q, a: (p - q).abs() <= 0.3),
    "prime-rl-2026-08": (plain, lambda p, q, a: (p - q).abs() <= 0.1),
    "prime-rl-distillation": (plain, lambda p, q, a: ~(p - q < -0.2)),
    "areal": (plain, lambda p, q, a: p / q <= 5),
}
SPREADS = {
    "seq": 0.2,
    "trl": 0.5,
    "geo": 0.002,
    "geo-mask-skyrl": 0.03,
    "k3": 0.14,
    "seq-mask": 0.002,
}


def test_every_preset_is_stated_here():
    assert set(EXPECTED) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset(backend, name):
    near = max((key for key in SPREADS if name.startswith(key)), key=len, default=None)
    spread = SPREADS.get(near, 1.0)
    logprobs, rollout_logprobs = sampled((40, 9), torch.float64, spread=spread)
    if name == "veto":
        logprobs[::4, 3] -= 12
    if name == "prime-rl":  # the cap limits these tokens and the criterion keeps them
        rollout_logprobs[::4, 3] -= 12
    advantages = torch.randn(40, 9)
    options = {"advantages": advantages} if name.startswith("dppo") else {}
    weights, mask, _ = klfast.rollout_correction(
        logprobs, rollout_logprobs, backend=backend, preset=name, **options
    )
    of_weights, of_mask = EXPECTED[name]
    probabilities = logprobs.exp(), rollout_logprobs.exp(), advantages
    expected = of_mask(*probabilities).expand_as(mask)
    assert torch.equal(mask, expected)
    if of_mask is not everything:
        assert 0.05 < expected.double().mean() < 0.99
    if of_weights is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights, of_weights(*probabilities), rtol=1e-9, atol=1e-12)


def test_an_option_beside_a_preset_wins_also_where_it_is_the_default(backend):
    pair = torch.tensor([[1.0, -1.0]]), torch.zeros(1, 2)
    weights, _, _ = klfast.rollout_correction(*pair, preset="icepop", cap=2.0, backend=backend)
    assert not weights.any()  # e is inside of the preset's [0.5, 5]
