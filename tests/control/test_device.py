"""Controllers on a device: the host's values, in place, without a sync, traced and copied."""

import copy
import io
import json
import math
import pickle
import random
import warnings

import pytest
import torch
from kinds import STEERING, make
from torch.utils._python_dispatch import TorchDispatchMode

import klfast
import klfast.compat.controllers
from klfast.controllers import rules

every_kind = pytest.mark.parametrize("kind", [*STEERING, "fixed", "schedule"])

OPTIONS = {
    "plain": {},
    "all": {"dead_band": 0.1, "ema": 0.5, "floor": 0.05, "max_coef": 3.0},
    "per-token": {"unit": "token"},
}


def made(kind, init=0.5, target=6.0, **options):
    if kind == "fixed":
        return klfast.FixedKLController(init, **{k: options[k] for k in options if k == "device"})
    if kind == "schedule":
        own = {k: options[k] for k in options if k in ("device", "unit")}
        return klfast.ScheduledKLController(init, shape="cosine", warmup=3, steps=50, **own)
    return make(kind, init, target, **options)


def stats_of(rng, device="cpu"):
    length = torch.tensor([float(rng.randrange(0, 5)) for _ in range(4)], device=device)
    kl = torch.tensor([rng.uniform(0, 20) for _ in range(4)], device=device) * (length > 0)
    return klfast.KLStats(kl, length, *[torch.zeros_like(kl)] * 6)


def currents(rng, steps):
    """KLs near the target, far from it, and not finite ones."""
    for _ in range(steps):
        kl = 6.0 * rng.lognormvariate(0, 0.5)
        yield rng.choice([kl, kl, kl, 6.0, 1e300, -1e300, math.nan, math.inf, -2.0])


class NoSync(TorchDispatchMode):
    """Fails on what would wait for a GPU: reading a value back, shapes that depend on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


# The host's values


def assert_near(found, state):
    """The states of a host and a device after an update from one state.

    The device's ``exp`` and ``cos`` are within 1 ulp of the host's. A product or a sum with them
    is rounded once more.
    """
    for name, value in {**state.pop("memory", {}), "value": state.pop("value")}.items():
        other = found["value"] if name == "value" else found["memory"][name]
        assert other == pytest.approx(value, rel=4 * 2**-52, abs=4 * 2**-52), name
    assert state.items() <= found.items()


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", OPTIONS)
@every_kind
@pytest.mark.filterwarnings("ignore:.*skipped a KL:RuntimeWarning")
def test_a_device_has_the_hosts_values(kind, options, seed):
    rng = random.Random(seed)
    host, device = made(kind, **OPTIONS[options]), made(kind, device="cpu", **OPTIONS[options])
    for kl in currents(rng, 150):
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


@pytest.mark.parametrize(
    ("function", "spread"),
    [(rules.exp, 1e-3), (rules.exp, 1.0), (rules.exp, 200.0), (rules.cos, 2.0)],
)
def test_functions_of_a_device_are_within_an_ulp_of_the_hosts(function, spread):
    rng = random.Random(spread)
    for _ in range(3_000):
        x = rng.uniform(-spread, spread)
        found, expected = function(torch.tensor(x, dtype=torch.float64)).item(), function(x)
        assert abs(found - expected) <= math.ulp(expected)


@pytest.mark.parametrize("x", [0.0, -0.0, 709.782712893384, 710.0, 1e308, math.inf])
def test_the_exponential_at_its_edges(x):
    for y in (x, -x):
        expected = rules.exp(y)
        got = rules.exp(torch.tensor(y, dtype=torch.float64)).item()
        assert got == pytest.approx(expected, rel=2**-52, abs=1e-300)


# In place, without a sync


@every_kind
@pytest.mark.parametrize("given", ["float", "tensor", "stats"])
def test_an_update_waits_for_nothing(kind, given):
    controller = made(kind, device="cpu", ema=0.5, dead_band=0.01, floor=0.1)
    value, skipped = controller.value, controller.skipped
    address, before = value.data_ptr(), value.clone()
    current = {
        "float": 20.0,
        "tensor": torch.tensor(20.0, requires_grad=True),
        "stats": klfast.KLStats(torch.tensor([20.0]), *[torch.ones(1)] * 7),
    }[given]
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


def test_the_mode_that_looks_for_syncs_finds_one():
    with NoSync(), pytest.raises(AssertionError, match="waits"):
        torch.tensor(1.0).item()
    with NoSync(), pytest.raises(AssertionError, match="waits"):
        klfast.DualKLController(0.5, 6.0).update(torch.tensor(9.0))


def test_nothing_is_warned_of_on_a_device():
    controller = made("nupi", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        controller.update(math.nan)
        controller.update(stats_of(random.Random(0))._replace(length=torch.zeros(4)))
    assert (controller.value.item(), controller.skipped.item()) == (0.5, 2)


@every_kind
def test_a_negative_or_bad_count_on_a_device_is_skipped(kind):
    controller = made(kind, device="cpu")
    before = controller.state_dict()
    for bad in (torch.tensor(-1), torch.tensor(math.nan), torch.tensor(math.inf)):
        controller.update(9.0, bad)
    assert controller.state_dict() == {**before, "skipped": 3}


@every_kind
@pytest.mark.parametrize("bad", ["9", None, torch.ones(2), torch.tensor(True), 1j], ids=repr)
def test_a_bad_current_is_refused_on_a_device(kind, bad):
    controller = made(kind, device="cpu")
    with pytest.raises(TypeError, match="current must be a number, a 0-dim tensor or a KLStats"):
        controller.update(bad, 8)
    assert controller.skipped.item() == 0


def test_the_factory_makes_controllers_on_a_device():
    fixed, adaptive = (
        klfast.get_kl_controller(0.5, target, device="cpu") for target in (None, 6.0)
    )
    assert fixed.update(9.0).item() == fixed.value.item() == 0.5
    expected = klfast.get_kl_controller(0.5, 6.0).update(9.0, 64)
    assert adaptive.update(9.0, 64).item() == expected > 0.5


@pytest.mark.filterwarnings("ignore:.*absorbing:RuntimeWarning")
def test_the_frameworks_controllers_stay_at_0_on_a_device():
    controller = klfast.compat.controllers.AdaptiveKLController(0.0, 6.0, device="cpu")
    for _ in range(3):
        assert controller.update(60.0, 1e4).item() == 0.0
    controller = klfast.compat.controllers.AdaptiveKLController(0.5, 6.0, device="cpu")
    assert controller.update(60.0, 64.0).item() == klfast.AdaptiveKLController(0.5, 6.0).update(
        60.0, 64
    )


@pytest.mark.parametrize("bad", [torch.ones(1), torch.tensor(True)], ids=repr)
def test_a_bad_count_is_refused_on_a_device(bad):
    with pytest.raises(TypeError, match="n_steps must be"):
        made("adaptive", device="cpu").update(9.0, bad)
    with pytest.raises(TypeError, match="n_steps must be given"):
        made("adaptive", device="cpu").update(9.0)


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["inference", "no-grad", "default-device", "autocast"],
)
@every_kind
def test_modes_around_a_controller_change_nothing(kind, mode):
    """Neither where it is made, nor where it is updated and restored."""
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


@pytest.mark.parametrize("kind", ["adaptive", "nupi", "pid-lagrangian"])
def test_the_fused_loss_takes_the_coefficient(kind):
    host, device = made(kind), made(kind, device="cpu")
    for seed in range(5):
        results = []
        for controller in (host, device):
            logprobs, ref = batch(seed)
            loss, stats = klfast.kl_penalty(
                logprobs,
                ref,
                reduction="seq-mean-token-sum",
                coef=controller.value,
                return_stats=True,
            )
            loss.backward()
            controller.update(stats)
            results.append((loss.item(), logprobs.grad))
        (loss, grad), (loss_on_device, grad_on_device) = results
        assert loss_on_device == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(grad_on_device, grad)
    assert device.value.item() == pytest.approx(host.value, rel=1e-14)


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be")
@pytest.mark.parametrize(
    "kind",
    [
        "nupi",
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in ("adaptive", "exponential", "pid-lagrangian", "scheduled")
        ),
    ],
)
def test_a_whole_step_is_one_graph_for_torch_compile(kind):
    """``fullgraph`` raises at a sync; the compiled code updates the same tensors."""
    compiled, eager = made(kind, device="cpu"), made(kind, device="cpu")

    def step(controller, logprobs, ref):
        loss, stats = klfast.kl_penalty(
            logprobs, ref, reduction="token-mean", coef=controller.value, return_stats=True
        )
        controller.update(stats)
        return loss * 1.0

    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    value = compiled.value
    for seed in range(3):
        logprobs, ref = batch(seed)
        assert traced(compiled, logprobs, ref).item() == step(eager, logprobs, ref).item()
        assert value is compiled.value
        assert value.item() == eager.value.item() != 0.5


# States and copies


@every_kind
@pytest.mark.parametrize("way", ["host-to-device", "device-to-host", "device-to-device"])
def test_states_go_between_host_and_device(kind, way):
    source, _, target = way.partition("-to-")
    devices = {"host": None, "device": "cpu"}
    first = made(kind, ema=0.5, device=devices[source])
    for kl in (9.0, 2.0, 8.0):
        first.update(kl, 64)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = made(kind, ema=0.5, device=devices[target])
    where = resumed.value
    resumed.load_state_dict(state)
    assert resumed.state_dict() == first.state_dict()
    expected = float(first.update(7.0, 64))
    assert float(resumed.update(7.0, 64)) == pytest.approx(expected, rel=1e-14)
    assert target == "host" or where is resumed.value


@every_kind
@pytest.mark.parametrize(
    "carry_over",
    [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), lambda c: saved(c)],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_copies_share_no_tensor(kind, carry_over):
    controller = made(kind, device="cpu")
    controller.update(9.0, 64)
    other = carry_over(controller)
    before = controller.value.clone()
    other.update(9.0, 6400)
    other.update(9.0, 6400)
    assert controller.value == before
    other.value.fill_(0.25)
    assert other.state_dict()["value"] == 0.25
    assert controller.value == before


def saved(controller):
    buffer = io.BytesIO()
    torch.save(controller, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@every_kind
def test_a_setting_is_not_changed_on_a_device(kind):
    controller = made(kind, device="cpu")
    for name in ("device", "min_coef", "unit"):
        before = getattr(controller, name)
        with pytest.raises(AttributeError, match=f"{name} cannot be changed on a device"):
            setattr(controller, name, 1.0)
        assert getattr(controller, name) == before


def test_a_count_that_a_device_cannot_hold_changes_nothing():
    for device in (None, "cpu"):
        controller = klfast.DualKLController(0.5, 6.0, device=device)
        before = controller.state_dict()
        with pytest.raises(ValueError, match=r"state\['skipped'\] must be within int64"):
            controller.load_state_dict({**before, "value": 0.7, "skipped": 2**63})
        assert controller.state_dict() == before


def test_repr_shows_device_and_value():
    assert "device=device(type='cpu')" in repr(made("dual", device="cpu"))
