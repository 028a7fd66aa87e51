"""Controllers with a coefficient on a device: the host's values, in a tensor that they fill."""

import math
import random

import pytest
import torch
from kinds import COEFFICIENTS, READERS

import klfast
import klfast.compat.controllers

every_kind = pytest.mark.parametrize("kind", COEFFICIENTS)
OPTIONS = {
    "plain": {},
    "all": {"dead_band": 0.1, "ema": 0.5, "floor": 0.05, "max_coef": 3.0},
    "per-token": {"unit": "token"},
}


def made(kind, **options):
    if kind in ("fixed", "schedule"):
        options = {name: options[name] for name in options if name == "device"}
    return READERS[kind](**options)


def stats_of(rng):
    length = torch.tensor([float(rng.randrange(0, 5)) for _ in range(4)])
    kl = torch.tensor([rng.uniform(0, 20) for _ in range(4)]) * (length > 0)
    return klfast.KLStats(kl, length, *[torch.zeros_like(kl)] * 6)


@pytest.mark.parametrize("options", OPTIONS)
@every_kind
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_device_has_the_hosts_values_in_one_tensor(kind, options):
    rng = random.Random(0)
    host, device = made(kind, **OPTIONS[options]), made(kind, device="cpu", **OPTIONS[options])
    value = device.value
    assert (value.dim(), value.dtype, value.requires_grad) == (0, torch.float64, False)
    for _ in range(100):
        near = 6.0 * rng.lognormvariate(0, 0.5)
        kl = rng.choice([near, near, near, 6.0, 1e300, -1e300, math.nan, math.inf, -2.0])
        given = [stats_of(rng)] if rng.random() < 0.3 else [kl, rng.choice([0, 1, 512, 10**6])]
        assert device.update(*given) is device.value is value
        assert value.item() == host.update(*given)
    assert device.state_dict() == host.state_dict()
    device.load_state_dict({**host.state_dict(), "value": 0.5})
    assert value.item() == 0.5
    assert "device=device(type='cpu')" in repr(device)


MODES = {
    "inference": torch.inference_mode,
    "no-grad": torch.no_grad,
    "default-device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@every_kind
def test_modes_around_a_controller_change_nothing(kind, mode):
    """The mode may surround the constructor, the update or the loading of a state."""
    expected = made(kind)
    expected.update(9.0, 64)
    expected.update(8.0, 64)
    with mode():
        first, state = made(kind, device="cpu"), made(kind, device="cpu").state_dict()
        first.load_state_dict(state)
        first.update(9.0, 64)
    first.update(8.0, 64)
    second = made(kind, device="cpu")
    second.update(9.0, 64)
    with mode():
        second.update(8.0, 64)
    assert first.state_dict() == second.state_dict()
    assert first.state_dict()["value"] == pytest.approx(expected.value, rel=1e-14)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref_logprobs = -torch.rand(2, 4, 16, generator=generator)
    return logprobs.clone().requires_grad_(), ref_logprobs


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be")
@pytest.mark.parametrize("of", [lambda c: c.value, lambda c: c], ids=["value", "controller"])
def test_a_compiled_step_reads_the_new_value_without_another_compilation(of):
    controller = made("nupi", device="cpu")

    def step(logprobs, ref_logprobs):
        return klfast.kl_penalty(
            *(logprobs, ref_logprobs), reduction="token-mean", coef=of(controller)
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    coefficients = set()
    for seed in range(3):
        with torch.compiler.set_stance("default" if seed == 0 else "fail_on_recompile"):
            assert compiled(*batch(seed)).item() == step(*batch(seed)).item()
        coefficients.add(controller.update(9.0).item())
    assert len(coefficients) == 3
