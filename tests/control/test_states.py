"""States of controllers and watchers: JSON, torch.save, checkpoints, copies, earlier versions."""

import copy
import io
import json
import math
import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kinds import COEFFICIENTS, READERS, STEERING, grouped, make, optimizer_of, update
from torch.distributed import checkpoint

import klfast
from klfast.compat import verl

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

MAKERS = {
    **READERS,
    **{f"{kind}, ema": lambda kind=kind, **o: READERS[kind](ema=0.5, **o) for kind in STEERING},
    "groups": grouped,
    "controller of verl": lambda: verl.get_kl_controller(
        SimpleNamespace(type="dual", kl_coef=0.5, target_kl=6.0, horizon=500)
    ),
}
ON_DEVICE = [kind for kind in MAKERS if kind.split(",")[0] in (*COEFFICIENTS, "groups")]
PLACES = [
    *((kind, None, None) for kind in MAKERS),
    *((kind, "cpu", "cpu") for kind in ON_DEVICE),
    ("nupi", None, "cpu"),
    ("nupi", "cpu", None),
]
"""(kind, device of the saved state, device that loads it)."""


def made(kind, device=None, **options):
    return MAKERS[kind](**options, **({"device": device} if device else {}))


def feed(thing, seed=0, steps=7):
    """Update with a seed's KLs and a NaN, and return the results."""
    rng = random.Random(seed)
    kls = [6.0 * rng.lognormvariate(0, 0.7) for _ in range(steps)]
    return [update(thing, kl) for kl in (*kls, math.nan)]


def loaded(resumed, state):
    resumed.load_state_dict(state)
    return resumed


def through_torch_save(thing, weights_only):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


WAYS = {
    "JSON": lambda state, fresh: loaded(
        fresh, json.loads(json.dumps(state.state_dict(), allow_nan=False))
    ),
    "torch.save of a state": lambda thing, fresh: loaded(
        fresh, through_torch_save(thing.state_dict(), weights_only=True)
    ),
    "torch.save": lambda thing, fresh: through_torch_save(thing, weights_only=False),
    "pickle": lambda thing, fresh: pickle.loads(pickle.dumps(thing)),
    "deepcopy": lambda thing, fresh: copy.deepcopy(thing),
    "copy": lambda thing, fresh: copy.copy(thing),
}


@pytest.mark.parametrize(("kind", "place", "other"), PLACES)
def test_a_resumed_run_goes_on_bit_for_bit_and_shares_nothing(kind, place, other):
    ways = [
        ("JSON", 0),
        ("JSON", 1),
        *((way, 7) for way in WAYS if place == other or way == "JSON"),
    ]
    for way, steps in ways:
        thing, undisturbed, fresh = made(kind, place), made(kind, place), made(kind, other)
        where = getattr(fresh, "value", None)
        feed(fresh, 5, 3)  # earlier KLs do not matter
        for one in (thing, undisturbed):
            feed(one, 0, steps)
        resumed, before = WAYS[way](thing, fresh), thing.state_dict()
        assert (type(resumed), resumed.state_dict()) == (type(thing), before)
        assert repr(resumed) == repr(thing) or place != other or kind == "learning-rate"
        if resumed is fresh and other and kind != "groups":
            assert resumed.value is where  # a captured CUDA graph reads this tensor
        if kind == "learning-rate" and way == "copy":
            continue  # a copy shares the optimizer and its rate
        if kind == "learning-rate" and resumed is fresh:
            resumed.optimizer.load_state_dict(thing.optimizer.state_dict())
        feed(resumed, 1)
        assert thing.state_dict() == before
        after = resumed.state_dict()
        assert feed(thing, 2) == feed(undisturbed, 2)
        assert thing.state_dict() == undisturbed.state_dict()
        assert resumed.state_dict() == after
        if kind != "learning-rate":
            feed(loaded(undisturbed, before), 1)
            assert_near(after, undisturbed.state_dict(), exact=place == other)


@pytest.mark.parametrize("given", ["state", "object"])
def test_states_go_through_a_distributed_checkpoint(given, tmp_path):
    """One checkpoint has all kinds. The objects that load it have seen other KLs."""
    things, resumed = ({kind: made(kind) for kind in MAKERS} for _ in range(2))
    for steps, thing in enumerate(things.values()):
        feed(thing, 0, 1 + steps % 5)
    for steps, thing in enumerate(resumed.values()):
        feed(thing, 1, steps % 4)
    if given == "object":
        checkpoint.save(things, checkpoint_id=tmp_path)
        checkpoint.load(resumed, checkpoint_id=tmp_path)
    else:
        states = {kind: thing.state_dict() for kind, thing in things.items()}
        checkpoint.save(states, checkpoint_id=tmp_path)
        into = {kind: thing.state_dict() for kind, thing in resumed.items()}
        checkpoint.load(into, checkpoint_id=tmp_path)
        for kind, thing in resumed.items():
            thing.load_state_dict(into[kind])
    for kind, thing in things.items():
        assert resumed[kind].state_dict() == thing.state_dict(), kind


GATHERED = {
    "nothing": (),
    "no sequence": (0,),
    "one": (1,),
    "many": (3, 0, 40),
    "a step": (2, None),
}
"""The number of sequences of each call of a penalty. None is a step."""


def penalty_after(calls, dtype=torch.float32):
    """A KLPenalty after these calls. Among many sequences one has infinite sums, one NaN."""
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


def test_a_penalty_goes_through_a_distributed_checkpoint_into_any_other(tmp_path):
    dtype = torch.float64
    pairs = [(saved, before) for saved in GATHERED for before in GATHERED]
    penalties = {f"{s} {b}": penalty_after(GATHERED[s], dtype) for s, b in pairs}
    resumed = {f"{s} {b}": penalty_after(GATHERED[b]) for s, b in pairs}
    states = {name: one.state_dict() for name, one in resumed.items()}
    saved = {name: one.state_dict() for name, one in penalties.items()}
    checkpoint.save(saved, checkpoint_id=tmp_path)
    checkpoint.load(states, checkpoint_id=tmp_path)
    assert json.loads(json.dumps(states, allow_nan=False)) == saved
    for name, penalty in penalties.items():
        resumed[name].load_state_dict(states[name])
        assert resumed[name].state_dict() == saved[name]
        for one in (penalty, resumed[name]):
            one(torch.tensor([[-1.0, -2.0]], dtype=dtype), torch.zeros(1, 2, dtype=dtype))
        assert repr(resumed[name].step()) == repr(penalty.step())  # NaN equals NaN in it


def rates(**options):
    return klfast.KLAdaptiveLR(optimizer_of(1e-3, 2e-3), 6.0, **options)


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
    "fixed": READERS["fixed"],
    "scheduled-adaptive": lambda **o: klfast.ScheduledKLController(
        0.5, 6.0, warmup=9, steps=40, start=2.0, controller=klfast.AdaptiveKLController, **o
    ),
    "schedule-linear": lambda **o: klfast.ScheduledKLController(0.5, warmup=3, steps=50, **o),
    "schedule-cosine": lambda **o: klfast.ScheduledKLController(0.5, shape="cosine", steps=50, **o),
    "groups": grouped,
    "verls-adaptive": lambda: verls("adaptive"),
    "verls-dual": lambda: verls("dual"),
    "monitor": lambda: klfast.KLMonitor(6.0, window=9),
    "monitor-token": lambda: klfast.KLMonitor(6.0, window=30, unit="token", min_updates=3),
    "drift": lambda: klfast.KLDriftAlarm(8.0, window=9),
    "early-stop": lambda: klfast.KLEarlyStop(6.0),
    "reset-plateau": lambda: klfast.ReferenceReset(plateau=4, min_delta=0.5),
    "reset-all": lambda: klfast.ReferenceReset(interval=9, budget=12.0, patience=2, plateau=7),
    "learning-rate": rates,
}
"""The controllers and watchers whose states are in ``states.json``."""
STATES = Path(__file__).with_name("states.json")
SAVED = json.loads(STATES.read_text())
"""Name -> the state after 13 updates, what 20 more return, and the state then."""
WITH_FUNCTIONS = re.compile("exponential|nupi|dual|vae|scheduled-(?!adaptive)|cosine|groups")
"""Controllers with an exponential or a cosine, whose last digit depends on the C library."""


def course(seed, steps):
    """KLs, numbers of sequences and metrics, the same on every machine."""
    rng = random.Random(seed)
    for step in range(steps):
        kl = math.nan if step == 5 else math.inf if step == 11 else rng.uniform(0, 18)
        yield kl, rng.randrange(1, 512), rng.uniform(0, 9)


def moved(thing, seed, steps):
    """The results of updates with the KLs of a seed, as JSON."""
    if isinstance(thing, klfast.ReferenceReset):
        return [thing.update(kl, metric) for kl, _, metric in course(seed, steps)]
    return [update(thing, kl, n_steps) for kl, n_steps, _ in course(seed, steps)]


def record(name):
    """The row of ``states.json`` for a name, from the code as it is now."""
    thing = RECORDED[name]()
    moved(thing, 1, 13)
    state = copy.deepcopy(thing.state_dict())
    return {"state": state, "returned": moved(thing, 2, 20), "after": thing.state_dict()}


def test_every_name_has_a_recorded_state():
    """``python tests/control/test_states.py`` adds those that are missing."""
    assert SAVED.keys() == RECORDED.keys()
    assert record("adaptive-all").items() <= SAVED["adaptive-all"].items()


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_state_goes_on_as_it_did(name):
    thing = RECORDED[name]()
    state = SAVED[name]["state"]
    thing.load_state_dict(state)
    assert thing.state_dict() == state
    if name == "learning-rate":
        for group, lr in zip(thing.optimizer.param_groups, state["lr"], strict=True):
            group["lr"] = lr
    found = {"returned": moved(thing, 2, 20), "state": thing.state_dict()}
    expected = {"returned": SAVED[name]["returned"], "state": SAVED[name]["after"]}
    assert_near(found, expected, exact=not WITH_FUNCTIONS.search(name))


def assert_near(found, expected, exact):
    """Check that two results are equal, exactly or up to the last digits of numbers."""
    if exact or not isinstance(expected, (dict, list, float)):
        assert found == expected
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_near(found[key], value, exact)
    elif isinstance(expected, list):
        for pair in zip(found, expected, strict=True):
            assert_near(*pair, exact)
    else:
        assert found == pytest.approx(expected, rel=1e-13)


def test_settings_stay_those_of_the_resuming_object():
    controller = klfast.AdaptiveKLController(0.1, 6.0)
    controller.load_state_dict(klfast.AdaptiveKLController(0.5, 12.0, 500).state_dict())
    assert controller.update(9.0, 64) == 0.5 * (1 + 0.2 * 64 / 10_000)
    assert controller.state_dict()["target"] == 6.0


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


def damaged(kind, state):
    """(the entry, the damaged state, the error)."""
    yield from (("state must be a dict", bad, TypeError) for bad in (None, [], "state", 0.1))
    bad_values = {
        "kind": ((None, ValueError), ("other", ValueError), (1, ValueError)),
        "version": ((2, ValueError), (True, ValueError), ("1", ValueError)),
        "skipped": ((-1, ValueError), (2**63, ValueError), (1.0, TypeError), (None, TypeError)),
        "unit": (("tokens", ValueError), (None, ValueError), (1, ValueError)),
        "target": ((0.0, ValueError), (math.nan, ValueError), ("6", TypeError), (None, TypeError)),
        "value": (
            *((bad, ValueError) for bad in (math.nan, math.inf, -0.1, 2**5000)),
            *((bad, TypeError) for bad in ("0.2", True, None, [0.1])),
        ),
        "values": (
            *(([6.0, bad], ValueError) for bad in (math.nan, math.inf)),
            *((bad, TypeError) for bad in ([6.0, "nan"], [6.0, "6"], [True], (1.0,), 6.0, None)),
        ),
        "lr": (([], ValueError), ([-1.0], ValueError), (["1"], TypeError), (1e-3, TypeError)),
        "stops": ((-1, ValueError), (1.0, TypeError)),
        "best": ((math.nan, ValueError), ("1", TypeError)),
        "groups": ((None, TypeError), ({}, ValueError)),
        "memory": ((None, TypeError), ([], TypeError), ({"more": 1.0}, ValueError)),
    }
    for key in bad_values.keys() & state.keys():
        for bad, error in bad_values[key]:
            yield key, {**state, key: bad}, error
    if "groups" in state:  # a bad group leaves all groups unchanged
        bad = {**state["groups"]["b"], "value": math.nan}
        yield "value", {**state, "groups": {**state["groups"], "b": bad}}, ValueError
    for name in state.get("memory", ()):
        wrong = ((math.nan, ValueError), ("0", TypeError), (True, TypeError), (-1.0, ValueError))
        for bad, error in wrong[: 4 if name in ("step", "errors", "measured", "waited") else 3]:
            yield "memory", {**state, "memory": {**state["memory"], name: bad}}, error
        if not (name in ("kl_ema", "measured") and len(state["memory"]) <= 2):
            yield "memory", {**state, "memory": without(state["memory"], name)}, ValueError
    spare = {"unit", "target", *(["memory"] if "ema" in kind else [])}
    yield from (("state", without(state, key), ValueError) for key in state.keys() - spare)
    yield "keys", {**state, "more": 1}, ValueError


@pytest.mark.parametrize("kind", MAKERS)
def test_a_damaged_state_changes_nothing(kind):
    source, thing = made(kind), made(kind)
    feed(source)
    before = thing.state_dict()
    for entry, state, error in damaged(kind, source.state_dict()):
        with pytest.raises(error, match=entry) as caught:
            thing.load_state_dict(state)
        assert "\n" not in str(caught.value)
        assert thing.state_dict() == before
    thing.load_state_dict({**source.state_dict()})  # a good state loads
    for other in ("monitor", "early-stop", "fixed"):
        if READERS[other]()._kind != before["kind"]:
            with pytest.raises(ValueError, match=rf"state\['kind'\] must be '{before['kind']}'"):
                thing.load_state_dict(READERS[other]().state_dict())


@pytest.mark.parametrize("kind", [*READERS, "groups"])
def test_a_state_of_another_unit_is_refused_whole(kind):
    if kind == "fixed":
        return
    thing, source = made(kind, unit="token"), made(kind, unit="sequence")
    feed(source)
    if kind == "schedule":  # a schedule has no unit
        assert loaded(thing, source.state_dict()).state_dict().keys().isdisjoint({"unit", "target"})
        return
    before = thing.state_dict()
    with pytest.raises(ValueError, match=r"state\['unit'\] must be 'token', .* got 'sequence'"):
        thing.load_state_dict(source.state_dict())
    assert thing.state_dict() == before
    if kind != "groups":
        bare = without(without(source.state_dict(), "unit"), "target")
        assert loaded(made(kind, unit="sequence"), bare).state_dict() == source.state_dict()


if __name__ == "__main__":
    rows = {name: SAVED.get(name) or record(name) for name in RECORDED}
    lines = (f'  "{name}": {json.dumps(row)}' for name, row in rows.items())
    STATES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
