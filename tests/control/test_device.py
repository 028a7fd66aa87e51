"""Controllers on a device: the host's values in place, no sync, traces and copies."""

import math
import random

import pytest
import torch
from kinds import COEFFICIENTS, READERS
from torch.utils._python_dispatch import TorchDispatchMode

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


class NoSync(TorchDispatchMode):
    """Fail on ops that wait for a GPU: they read a value, or their shapes depend on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def assert_near(found, state):
    """Compare the states of a device and a host after an update from one state.

    The device's ``exp`` and ``cos`` are within 1 ulp of the host's. A product or a sum with them is
    rounded once more.
    """
    for name, value in {**state.pop("memory", {}), "value": state.pop("value")}.items():
        other = found["value"] if name == "value" else found["memory"][name]
        assert other == pytest.approx(value, rel=4 * 2**-52, abs=4 * 2**-52), name
    assert state.items() <= found.items()


@pytest.mark.parametrize("options", OPTIONS)
@every_kind
@pytest.mark.filterwarnings("ignore:.*skipped a KL:RuntimeWarning")
def test_a_device_has_the_hosts_values(kind, options):
    rng = random.Random(0)
    host, device = made(kind, **OPTIONS[options]), made(kind, device="cpu", **OPTIONS[options])
    for _ in range(150):
        near = 6.0 * rng.lognormvariate(0, 0.5)
        kl = rng.choice([near, near, near, 6.0, 1e300, -1e300, math.nan, math.inf, -2.0])
        n_steps = rng.choice([0, 1, 64, 512, 10**6])
        if rng.random() < 0.3:
            stats = stats_of(rng)
            host.update(stats)
            device.update(stats)
        else:
            host.update(kl, n_steps)
            device.update(torch.tensor(kl, dtype=torch.float64), torch.tensor(n_steps))
        assert_near(device.state_dict(), host.state_dict())
        device.load_state_dict(host.state_dict())


@every_kind
def test_an_update_waits_for_nothing_and_says_nothing(kind):
    for current in (
        20.0,
        torch.tensor(20.0, requires_grad=True),
        klfast.KLStats(torch.tensor([20.0]), *[torch.ones(1)] * 7),
    ):
        controller = made(kind, device="cpu", ema=0.5, dead_band=0.01, floor=0.1)
        value, skipped = controller.value, controller.skipped
        address, before = value.data_ptr(), value.clone()
        with NoSync():
            for _ in range(4):
                returned = controller.update(current, torch.tensor(64))
                controller.update(torch.tensor(math.nan), 64)
        assert returned is controller.value is value
        assert controller.skipped is skipped
        assert (value.dim(), value.dtype, value.requires_grad) == (0, torch.float64, False)
        assert value.data_ptr() == address
        assert skipped.item() == 4
        assert kind == "fixed" or value != before
    assert "device=device(type='cpu')" in repr(controller)
    for name in ("device", "min_coef", "unit"):
        before = getattr(controller, name)
        with pytest.raises(AttributeError, match=f"{name} cannot be changed on a device"):
            setattr(controller, name, 1.0)
        assert getattr(controller, name) == before


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


# A step with the loss


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref_logprobs = -torch.rand(2, 4, 16, generator=generator)
    return logprobs.clone().requires_grad_(), ref_logprobs


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be")
def test_a_whole_step_is_one_graph_for_torch_compile():
    """``fullgraph`` raises at a sync. The compiled code updates the same tensors."""
    compiled, eager = made("nupi", device="cpu"), made("nupi", device="cpu")

    def step(controller, logprobs, ref):
        loss, stats = klfast.kl_penalty(
            logprobs, ref, reduction="token-mean", coef=controller.value, return_stats=True
        )
        controller.update(stats)
        return loss * 1.0

    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    value = compiled.value
    for seed in range(3):
        losses = [run(c, *batch(seed)).item() for run, c in ((traced, compiled), (step, eager))]
        assert losses[0] == losses[1]
        assert value is compiled.value
        assert value.item() == eager.value.item() != 0.5
