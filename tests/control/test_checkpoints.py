"""States of all that has one: JSON, torch.save, torch.distributed.checkpoint, other rank counts.

And copies, whose states are their own.
"""

import copy
import io
import json
import math
import random
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kinds import STEERING, make
from ranks import OnRanks, results_of_ranks
from torch.distributed import checkpoint

import klfast
from klfast.compat import verl

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
    pytest.mark.filterwarnings("ignore:mean KL of the last:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:KL is (over|drifting):RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def learning_rate(**options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    return klfast.KLAdaptiveLR(optimizer, 6.0, **options)


MAKERS = {
    **{kind: lambda kind=kind, **o: make(kind, 0.5, 6.0, ema=0.5, **o) for kind in STEERING},
    "fixed": lambda **o: klfast.FixedKLController(0.5, **o),
    "schedule": lambda **o: klfast.ScheduledKLController(0.5, warmup=3, steps=50, **o),
    "monitor": lambda **o: klfast.KLMonitor(6.0, window=3, **o),
    "drift": lambda **o: klfast.KLDriftAlarm(6.0, window=9, **o),
    "early-stop": lambda **o: klfast.KLEarlyStop(6.0, **o),
    "reset": lambda **o: klfast.ReferenceReset(interval=3, budget=9.0, **o),
    "learning-rate": learning_rate,
}
ON_DEVICE = (*STEERING, "fixed", "schedule")


def feed(thing, seed=0, steps=7):
    """Updates with the KLs of a seed; what they return."""
    rng = random.Random(seed)
    update = thing.step if isinstance(thing, klfast.KLAdaptiveLR) else thing.update
    results = []
    for _ in range(steps):
        result = update(6.0 * rng.lognormvariate(0, 0.7), n_steps=64)
        results.append(result.item() if isinstance(result, torch.Tensor) else result)
    return results


every_kind = pytest.mark.parametrize("kind", MAKERS)


@every_kind
def test_a_state_is_strict_json_and_goes_on_bit_for_bit(kind):
    thing = MAKERS[kind]()
    feed(thing)
    state = json.loads(json.dumps(thing.state_dict(), allow_nan=False))
    resumed = MAKERS[kind]()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == thing.state_dict() == state
    if kind == "learning-rate":  # the optimizer's own state holds its learning rates
        resumed.optimizer.load_state_dict(thing.optimizer.state_dict())
    assert feed(resumed, 1) == feed(thing, 1)
    assert resumed.state_dict() == thing.state_dict()


@every_kind
def test_a_state_goes_through_torch_save(kind):
    thing = MAKERS[kind]()
    feed(thing)
    buffer = io.BytesIO()
    torch.save(thing.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == thing.state_dict()


@pytest.mark.parametrize("given", ["state", "object"])
@pytest.mark.parametrize(
    ("kind", "device"), [*((kind, None) for kind in MAKERS), *((kind, "cpu") for kind in ON_DEVICE)]
)
def test_a_state_goes_through_a_distributed_checkpoint(kind, device, given, tmp_path):
    options = {"device": device} if device else {}
    thing, resumed = MAKERS[kind](**options), MAKERS[kind](**options)
    feed(thing)
    if given == "object":
        checkpoint.save({"thing": thing}, checkpoint_id=tmp_path)
        checkpoint.load({"thing": resumed}, checkpoint_id=tmp_path)
    else:
        checkpoint.save({"thing": thing.state_dict()}, checkpoint_id=tmp_path)
        state = {"thing": resumed.state_dict()}
        checkpoint.load(state, checkpoint_id=tmp_path)
        resumed.load_state_dict(state["thing"])
    assert resumed.state_dict() == thing.state_dict()
    assert resumed.state_dict() != MAKERS[kind](**options).state_dict() or kind == "fixed"


def test_groups_go_through_a_distributed_checkpoint(tmp_path):
    def fresh():
        return klfast.GroupedKLController(klfast.NuPIKLController, 0.5, {"a": 6.0, "b.c": 1.0})

    grouped, resumed = fresh(), fresh()
    grouped.update({"a": 9.0, "b.c": 9.0})
    checkpoint.save({"thing": grouped}, checkpoint_id=tmp_path)
    checkpoint.load({"thing": resumed}, checkpoint_id=tmp_path)
    assert resumed.state_dict() == grouped.state_dict() != fresh().state_dict()


GATHERED = {
    "nothing": (),
    "no sequence": (0,),
    "one": (1,),
    "many": (3, 0, 40),
    "a step": (2, None),
}
"""The sequences of each call of a penalty; None for a step."""


def penalty_after(calls, dtype=torch.float32):
    """A penalty; of many sequences, one has infinite sums and one NaN."""
    penalty = klfast.KLPenalty("k2", controller=klfast.NuPIKLController(0.1, 1.0))
    generator = torch.Generator().manual_seed(3)
    for sequences in calls:
        if sequences is None:
            penalty.step()
            continue
        logprobs = -torch.rand(sequences, 3, generator=generator, dtype=dtype)
        logprobs[3:4], logprobs[4:5] = -math.inf, math.nan
        penalty(logprobs, torch.full_like(logprobs, -0.5))
    return penalty


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("before", GATHERED)
@pytest.mark.parametrize("saved", GATHERED)
@pytest.mark.filterwarnings("ignore:NuPIKLController skipped a KL of:RuntimeWarning")
def test_a_penalty_goes_through_a_distributed_checkpoint_into_any_other(
    saved, before, dtype, tmp_path
):
    penalty = penalty_after(GATHERED[saved], dtype)
    resumed = penalty_after(GATHERED[before])
    state = {"penalty": resumed.state_dict()}
    checkpoint.save({"penalty": penalty.state_dict()}, checkpoint_id=tmp_path)
    checkpoint.load(state, checkpoint_id=tmp_path)
    resumed.load_state_dict(state["penalty"])
    expected = penalty.state_dict()
    assert resumed.state_dict() == expected
    assert json.loads(json.dumps(state["penalty"], allow_nan=False)) == expected
    for one in (penalty, resumed):
        one(torch.tensor([[-1.0, -2.0]], dtype=dtype), torch.zeros(1, 2, dtype=dtype))
    assert repr(resumed.step()) == repr(penalty.step())  # NaN equals NaN


def penalties_of_ranks(rank, folder):
    """Each rank saves what it has gathered under a name of its own, and resumes with that."""
    penalty, resumed = penalty_after((3, 1 + rank)), penalty_after(())
    name = f"penalty of rank {rank}"
    checkpoint.save({name: penalty.state_dict()}, checkpoint_id=folder)
    state = {name: resumed.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    return penalty.state_dict(), state[name]


def test_ranks_resume_amid_a_batch_under_names_of_their_own(tmp_path):
    results = results_of_ranks(OnRanks(penalties_of_ranks, tmp_path / "saved"), tmp_path)
    for saved, loaded in results:
        assert loaded == saved
    assert results[0] != results[1]


@pytest.mark.parametrize(
    ("state", "make_it"),
    [
        (
            {"kind": "adaptive", "version": 1, "skipped": 2, "value": 0.25},
            lambda **o: klfast.AdaptiveKLController(0.5, 6.0, **o),
        ),
        (
            {"kind": "exponential", "version": 1, "skipped": 0, "value": 0.25},
            lambda **o: klfast.ExponentialKLController(0.5, 6.0, **o),
        ),
        (
            {"kind": "fixed", "version": 1, "skipped": 0, "value": 0.25},
            lambda **o: klfast.FixedKLController(0.5, **o),
        ),
    ],
    ids=["adaptive", "exponential", "fixed"],
)
@pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "device"])
def test_states_of_earlier_releases_load(state, make_it, device):
    controller = make_it(device=device)
    controller.load_state_dict(state)
    assert (float(controller.value), int(controller.skipped)) == (0.25, state["skipped"])
    now = controller.state_dict()
    assert now.keys() - state.keys() == (set() if state["kind"] == "fixed" else {"unit", "target"})
    assert {key: now[key] for key in state} == state


@pytest.mark.parametrize("kind", STEERING)
def test_an_average_may_begin_or_end_with_a_checkpoint(kind):
    with_average, without = make(kind, 0.5, 6.0, ema=0.5), make(kind, 0.5, 6.0)
    feed(without)
    with_average.load_state_dict(without.state_dict())
    assert with_average.value == without.value
    assert with_average.update(9.0, 64) == without.update(9.0, 64)  # the first of the average
    feed(with_average)
    without.load_state_dict(with_average.state_dict())
    assert without.value == with_average.value
    assert without.state_dict() == make(kind, 0.5, 6.0).state_dict() | without.state_dict()


# States of the release before the controllers were written anew


def groups(**options):
    return klfast.GroupedKLController(klfast.NuPIKLController, 0.5, {"a": 6.0, "b": 1.0}, **options)


def learning_rates(**options):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    rates = [{"params": [p], "lr": lr} for p, lr in zip(parameters, (1e-3, 2e-3), strict=True)]
    return klfast.KLAdaptiveLR(torch.optim.SGD(rates), 6.0, **options)


def verls(kind):
    config = SimpleNamespace(type=kind, kl_coef=0.5, target_kl=6.0, horizon=500)
    return verl.get_kl_controller(config)


RECORDED = {
    **{
        f"{kind}-{name}": lambda kind=kind, options=options, **o: make(
            kind, 0.5, 6.0, **options, **o
        )
        for kind in STEERING
        for name, options in {
            "plain": {},
            "all": {"dead_band": 0.1, "ema": 0.5, "floor": 0.05, "max_coef": 3.0},
            "token": {"unit": "token"},
        }.items()
    },
    "fixed": lambda **o: klfast.FixedKLController(0.5, **o),
    "scheduled-adaptive": lambda **o: klfast.ScheduledKLController(
        0.5, 6.0, warmup=9, steps=40, start=2.0, controller=klfast.AdaptiveKLController, **o
    ),
    "schedule-linear": lambda **o: klfast.ScheduledKLController(0.5, warmup=3, steps=50, **o),
    "schedule-cosine": lambda **o: klfast.ScheduledKLController(0.5, shape="cosine", steps=50, **o),
    "groups": groups,
    "verls-adaptive": lambda: verls("adaptive"),
    "verls-dual": lambda: verls("dual"),
    "monitor": lambda: klfast.KLMonitor(6.0, window=9),
    "monitor-token": lambda: klfast.KLMonitor(6.0, window=30, unit="token", min_updates=3),
    "drift": lambda: klfast.KLDriftAlarm(8.0, window=9),
    "early-stop": lambda: klfast.KLEarlyStop(6.0),
    "reset-plateau": lambda: klfast.ReferenceReset(plateau=4, min_delta=0.5),
    "reset-all": lambda: klfast.ReferenceReset(interval=9, budget=12.0, patience=2, plateau=7),
    "learning-rate": learning_rates,
}
"""The controllers and watchers whose states are in ``states.json``."""
SAVED = json.loads(Path(__file__).with_name("states.json").read_text())
"""Name -> the state after 13 updates, what 20 more return, and the state then."""
WITH_FUNCTIONS = re.compile("exponential|nupi|dual|vae|scheduled-(?!adaptive)|cosine|groups")
"""Those with an exponential or a cosine, whose last digit is the C library's."""


def course(seed, steps):
    """KLs, numbers of sequences and metrics, the same on every machine."""
    rng = random.Random(seed)
    for step in range(steps):
        kl = math.nan if step == 5 else math.inf if step == 11 else rng.uniform(0, 18)
        yield kl, rng.randrange(1, 512), rng.uniform(0, 9)


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, None) for name in RECORDED), *((n, "cpu") for n in RECORDED if SAVED[n]["device"])],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_recorded_state_goes_on_as_it_did(name, device):
    thing = RECORDED[name](**({"device": device} if device else {}))
    state = SAVED[name]["state"]
    thing.load_state_dict(state)
    assert thing.state_dict() == state
    if name == "learning-rate":
        for group, lr in zip(thing.optimizer.param_groups, state["lr"], strict=True):
            group["lr"] = lr
    found = {"returned": moved(thing, 2, 20), "state": thing.state_dict()}
    expected = {"returned": SAVED[name]["returned"], "state": SAVED[name]["after"]}
    if WITH_FUNCTIONS.search(name):
        assert_near(found, expected)
    else:
        assert found == expected


def moved(thing, seed, steps):
    """The results of updates with the KLs of a seed, as JSON."""
    returned = []
    for kl, n_steps, metric in course(seed, steps):
        if isinstance(thing, klfast.KLAdaptiveLR):
            thing.step(kl)
            result = thing.last_lr
        elif isinstance(thing, klfast.ReferenceReset):
            result = thing.update(kl, metric)
        elif isinstance(thing, klfast.GroupedKLController):
            result = thing.update({"a": kl, "b": kl / 6}, n_steps)
            result = {name: float(value) for name, value in result.items()}
        else:
            result = thing.update(kl, n_steps)
        returned.append(result.item() if isinstance(result, torch.Tensor) else result)
    return returned


def assert_near(found, expected):
    """Equal but for the last digits of numbers."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_near(found[key], value)
    elif isinstance(expected, list):
        for pair in zip(found, expected, strict=True):
            assert_near(*pair)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-13)
    else:
        assert found == expected


UNITS = {"sequence": "token", "token": "sequence"}
GOES_BY_A_UNIT = [kind for kind in MAKERS if kind not in ("fixed", "schedule")]


@pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "device"])
@pytest.mark.parametrize("kind", GOES_BY_A_UNIT)
def test_a_state_of_another_unit_is_refused_whole(kind, device):
    options = {"device": device} if device and kind in ON_DEVICE else {}
    thing, source = MAKERS[kind](unit="token", **options), MAKERS[kind](unit="sequence", **options)
    feed(source)
    before = thing.state_dict()
    with pytest.raises(ValueError, match=r"state\['unit'\] must be 'token', .* got 'sequence'"):
        thing.load_state_dict(source.state_dict())
    assert thing.state_dict() == before


@pytest.mark.parametrize("kind", GOES_BY_A_UNIT)
def test_a_state_without_unit_and_target_loads_as_before(kind):
    thing, resumed = MAKERS[kind](), MAKERS[kind]()
    feed(thing)
    state = thing.state_dict()
    resumed.load_state_dict({k: v for k, v in state.items() if k not in ("unit", "target")})
    assert resumed.state_dict() == state


def test_a_group_of_another_unit_changes_none():
    def grouped(**options):
        return klfast.GroupedKLController(klfast.DualKLController, 0.5, {"a": 6.0}, **options)

    thing = grouped(unit="token")
    before = thing.state_dict()
    assert before["groups"]["a"]["unit"] == "token"
    with pytest.raises(ValueError, match=r"state\['unit'\] must be 'token'"):
        thing.load_state_dict(grouped().state_dict())
    assert thing.state_dict() == before


def test_a_schedule_of_the_coefficient_goes_by_no_unit():
    thing = klfast.ScheduledKLController(0.5, unit="token")
    thing.load_state_dict(klfast.ScheduledKLController(0.5, unit="sequence").state_dict())
    assert thing.state_dict().keys().isdisjoint({"unit", "target"})


COPIED = {
    **MAKERS,
    "groups": groups,
    **{f"{kind}-device": lambda kind=kind: MAKERS[kind](device="cpu") for kind in ON_DEVICE},
    "groups-device": lambda: groups(device="cpu"),
}


def move(thing, seed):
    """Updates with the KLs of a seed, one of which is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(thing, klfast.GroupedKLController):
            for kl in (9.0 + seed, 3.0, math.nan):
                thing.update({"a": kl, "b": kl}, n_steps=64)
            return
        feed(thing, seed)
        update = thing.step if isinstance(thing, klfast.KLAdaptiveLR) else thing.update
        update(math.nan, n_steps=64)


@pytest.mark.parametrize("kind", COPIED)
def test_a_copy_goes_on_by_itself(kind):
    thing = COPIED[kind]()
    move(thing, 0)
    twin = copy.copy(thing)
    before = thing.state_dict()
    assert type(twin) is type(thing)
    assert twin.state_dict() == before
    assert repr(twin) == repr(thing)
    move(thing, 1)
    assert thing.state_dict() != before
    assert twin.state_dict() == before
    after = thing.state_dict()
    move(twin, 2)
    assert thing.state_dict() == after
    twin.load_state_dict(before)
    assert thing.state_dict() == after


@pytest.mark.parametrize("kind", [kind for kind in COPIED if kind != "learning-rate"])
def test_a_copy_goes_on_as_the_original_would(kind):
    """A learning rate's is the optimizer's, which a copy has in common."""
    thing, undisturbed = COPIED[kind](), COPIED[kind]()
    for one in (thing, undisturbed):
        move(one, 0)
    twin = copy.copy(thing)
    move(thing, 1)
    for one in (twin, undisturbed):
        move(one, 2)
    assert twin.state_dict() == undisturbed.state_dict()


DAMAGED = [
    ({"memory": None}, TypeError),
    ({"memory": {}}, ValueError),
    ({"memory": {"xi": 0.1}}, ValueError),
    ({"memory": {"xi": 0.1, "errors": 1.0, "kl_ema": 1.0}}, ValueError),
    ({"memory": {"xi": math.nan, "errors": 1.0}}, ValueError),
    ({"memory": {"xi": "0.1", "errors": 1.0}}, TypeError),
    ({"memory": {"xi": 0.1, "errors": 1.0, "more": 1.0}}, ValueError),
]


@pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "device"])
@pytest.mark.parametrize(("damage", "error"), DAMAGED, ids=lambda value: str(value))
def test_a_damaged_memory_is_refused_whole(damage, error, device):
    controller = klfast.NuPIKLController(0.5, 6.0, device=device)
    before = controller.state_dict()
    with pytest.raises(error, match="memory") as caught:
        controller.load_state_dict({**before, "value": 0.2, "skipped": 3, **damage})
    assert "\n" not in str(caught.value)
    assert controller.state_dict() == before


@pytest.mark.parametrize("kind", ["early-stop", "reset", "learning-rate"])
@pytest.mark.parametrize(
    "damage", [{"kind": "adaptive"}, {"version": 2}, {"skipped": -1}, {"more": 1}], ids=str
)
def test_a_damaged_state_of_the_others_is_refused(kind, damage):
    thing = MAKERS[kind]()
    before = thing.state_dict()
    with pytest.raises(ValueError, match="state"):
        thing.load_state_dict({**before, **damage})
    assert thing.state_dict() == before


# On another number of ranks

KINDS = ("adaptive", "nupi", "pid-lagrangian")


def controllers(**options):
    return {
        f"{kind}-{device}": make(kind, 0.5, 6.0, device=device, **options)
        for kind in KINDS
        for device in (None, "cpu")
    }


def steer(rank, folder, load, save):
    """Resume, take three steps with all ranks, and save."""
    things = controllers(process_group=torch.distributed.group.WORLD)
    if load:
        states = {name: thing.state_dict() for name, thing in things.items()}
        checkpoint.load(states, checkpoint_id=folder / load)
        for name, thing in things.items():
            thing.load_state_dict(states[name])
    begun = {name: thing.state_dict() for name, thing in things.items()}
    for step in range(3):
        for thing in things.values():
            thing.update(4.0 + 3 * step, 64 // torch.distributed.get_world_size())
    ended = {name: thing.state_dict() for name, thing in things.items()}
    checkpoint.save(ended, checkpoint_id=folder / save)
    return begun, ended


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_run_resumes_on_another_number_of_ranks(tmp_path):
    """Two ranks, then four, then one: as one process from the beginning to the end."""
    before = None
    for size, load, save in ((2, None, "first"), (4, "first", "second"), (1, "second", "third")):
        folder = tmp_path / str(size)
        folder.mkdir()
        results = results_of_ranks(OnRanks(steer, tmp_path, load, save), folder, size)
        assert all(result == results[0] for result in results)
        begun, ended = results[0]
        assert before is None or begun == before
        before = ended
    alone = controllers()
    for _ in range(3):
        for step in range(3):
            for thing in alone.values():
                thing.update(4.0 + 3 * step, 64)
    assert before == {name: thing.state_dict() for name, thing in alone.items()}
