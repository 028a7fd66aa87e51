"""Controllers across ranks: real processes, one all-reduce an update, the same bits on each.

All that four and two ranks do happens in one group of processes each; the tests look at what they
left behind. A run with a rank that dies has its own.
"""

import copy
import json
import os
import pickle
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fresh import run_fresh
from kinds import STEERING, make
from ranks import results_of_ranks, run_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import klfast
from klfast import KLStats
from klfast.distributed.ranks import Ranks

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
    pytest.mark.long,
]

STEPS, SEQUENCES, TOKENS = 9, 8, 6
SIZES = (2, 4)
KINDS = (*STEERING, "fixed")
DEVICES = {"host": None, "device": "cpu"}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_size = pytest.mark.parametrize("size", SIZES)
every_device = pytest.mark.parametrize("where", DEVICES)


def controller_of(kind, **options):
    if kind == "fixed":
        return klfast.FixedKLController(0.5, **options)
    return make(kind, 0.5, 6.0, **options)


def batch(step, dtype=torch.float64):
    """(log-probs, reference's, mask) of all sequences; from step 4 on the later ones are empty."""
    generator = torch.Generator().manual_seed(step)
    logprobs, ref_logprobs = -3 * torch.rand(2, SEQUENCES, TOKENS, generator=generator, dtype=dtype)
    lengths = torch.randint(1, TOKENS + 1, (SEQUENCES, 1), generator=generator)
    lengths[2 if step >= 4 else SEQUENCES :] = 0
    return logprobs, ref_logprobs, torch.arange(TOKENS) < lengths


def stats_of(step, sequences=slice(None), tokens=slice(None)):
    tensors = (tensor[sequences, tokens] for tensor in batch(step))
    return klfast.kl_penalty(*tensors, estimator="k2", return_stats=True)[1]


def shard(rank, size):
    return slice(rank * SEQUENCES // size, (rank + 1) * SEQUENCES // size)


# What the ranks do


def counted_all_reduces(function):
    """(what ``function`` returns, how many all-reduces and of how many bytes it made)."""
    calls, original = [], torch.distributed.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append((tensor.dtype, tensor.numel()))
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counting
    try:
        return function(), calls
    finally:
        torch.distributed.all_reduce = original


def steer(kind, where, rank, size, group):
    controller = controller_of(kind, device=DEVICES[where], process_group=group)
    values = []
    for step in range(STEPS):
        stats = stats_of(step, shard(rank, size))
        _, calls = counted_all_reduces(lambda stats=stats: controller.update(stats))
        assert calls == [(torch.float64, 6 * size)]
        values.append(float(controller.value))
    return values, controller.state_dict()


def work(rank):
    world = torch.distributed.group.WORLD
    size = torch.distributed.get_world_size()
    done = {
        (kind, where): steer(kind, where, rank, size, world) for kind in KINDS for where in DEVICES
    }
    done["numbers"] = numbers(rank, world)
    done["grouped"] = grouped(rank, size, world)
    done["groups apart"] = groups_apart(rank, world)
    done["monitor"] = monitor(rank, size, world)
    done["others"] = others(rank, world)
    done["apart"] = apart(rank, world)
    done["states apart"] = states_apart(rank, world)
    done["metrics apart"] = metrics_apart(rank, world)
    done["bad counts"] = bad_counts(rank, world)
    done["nan"] = nan_on_one_rank(rank, world)
    done["nothing"] = nothing_anywhere(world)
    done["shards"] = shards_of_sequences(rank, size, world)
    done["subgroup"] = subgroup(rank, size)
    done["copies"] = copies(world)
    done["dtensors"] = dtensors(size)
    done["diagnosis"] = diagnosis(rank, size, world)
    done["chosen"] = chosen(rank, size, world)
    return done


def texts_of(update, *currents):
    """The warnings of a series of updates."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for current in currents:
            update(current)
    return [str(each.message) for each in caught]


def diagnosis(rank, size, group):
    """The target is in the other unit; then the KL stays off it; one rank's batch shows neither."""
    stats = stats_of(1, shard(rank, size))
    if rank == 0:
        stats = stats._replace(kl=stats.kl * 0)
    mean = (stats_of(1).kl[SEQUENCES // size :].sum() / SEQUENCES).item()
    controller = klfast.DualKLController(0.5, mean / 30, process_group=group, max_coef=0.51)
    longer = stats._replace(length=stats.length * 20)
    said = [texts_of(controller.update, *[longer] * 3)]
    said.append(texts_of(controller.update, *[1000.0] * 150))
    grouped = klfast.GroupedKLController(
        klfast.DualKLController, 0.5, {"a": mean / 30, "b": 1.0}, process_group=group
    )
    said.append(texts_of(grouped.update, *[{"a": longer}] * 3))
    monitor = klfast.KLMonitor(6.0, window=1, process_group=group)
    said.append(texts_of(monitor.update, 60.0, 60.0))
    return said, controller.state_dict(), monitor.status


def chosen(rank, size, group):
    """The sums of k1 of all ranks."""
    found = []
    for device in DEVICES.values():
        controller = klfast.DualKLController(0.5, 0.1, device=device, process_group=group)
        controller.update(stats_of(1, shard(rank, size)), kl="k3")
        found.append(float(controller.value))
    return found


def dtensors(size):
    """Statistics of sharded batches are of all sequences on every rank."""
    mesh, found = init_device_mesh("cpu", (size,)), []
    for placement in (Shard(0), Shard(1), Replicate()):
        whole = batch(2)
        parts = [distribute_tensor(tensor, mesh, [placement]) for tensor in whole]
        _, stats = klfast.kl_penalty(*parts, estimator="k2", return_stats=True)
        controllers = [klfast.DualKLController(0.5, 6.0, device=d) for d in DEVICES.values()]
        grouped = klfast.GroupedKLController(klfast.DualKLController, 0.5, {"a": 6.0})
        found += [float(controller.update(stats)) for controller in controllers]
        found.append(grouped.update({"a": stats})["a"])
        dtensors_with_a_group(stats)
        monitor = klfast.KLMonitor(6.0)
        monitor.update(stats)
        found.append(klfast.DualKLController(0.5, 6.0).update(monitor.state_dict()["values"][0]))
    return found


def dtensors_with_a_group(stats):
    """What every rank has whole is not added over the ranks."""
    world = torch.distributed.group.WORLD
    grouped = klfast.GroupedKLController(
        klfast.DualKLController, 0.5, {"a": 6.0}, process_group=world
    )
    controllers = [
        klfast.DualKLController(0.5, 6.0, device=d, process_group=world) for d in DEVICES.values()
    ]
    monitor = klfast.KLMonitor(6.0, process_group=world)
    for reader, current in (
        (grouped, {"a": stats}),
        *((c, stats) for c in (*controllers, monitor)),
    ):
        with pytest.raises(ValueError, match="process_group must be None for statistics of DT"):
            reader.update(current)


def copies(group):
    """A copy measures with the same group, which cannot go into a file."""
    found = []
    for device in DEVICES.values():
        controller = klfast.DualKLController(0.5, 6.0, device=device, process_group=group)
        for other in (copy.copy(controller), copy.deepcopy(controller)):
            found.append(float(other.update(9.0)))
        found.append(float(controller.value))
        try:
            pickle.dumps(controller)
        except TypeError as error:
            found.append(str(error))
    return found


def numbers(rank, group):
    """Means of different numbers of sequences; rank 1 has none, and NaN for their mean."""
    values = []
    for device in DEVICES.values():
        controller = klfast.AdaptiveKLController(0.5, 6.0, device=device, process_group=group)
        count = [30, 0, 2, 100][rank]
        controller.update(float("nan") if rank == 1 else 4.0 + rank, count)
        values.append(float(controller.value))
        assert int(controller.skipped) == 0
    return values


def grouped(rank, size, group):
    """Even ranks have chat, the last has maths; nobody has code."""
    controller = klfast.GroupedKLController(
        klfast.DualKLController,
        0.5,
        {"chat": 6.0, "maths": 20.0, "code": 1.0},
        process_group=group,
    )
    given = {"chat": 6.0 + rank} if rank % 2 == 0 else {}
    if rank == size - 1:
        given["maths"] = 30.0
    of_the_first = (torch.int64, 2 * size)  # which groups the ranks have
    for expected in ([of_the_first], []):
        other = copy.deepcopy(controller)
        _, calls = counted_all_reduces(lambda: controller.update(given, 8))
        assert calls == [*expected, (torch.float64, 3 * 6 * size)]
    return other.value, other.skipped


def groups_apart(rank, group):
    """Rank 1 has another group, one more, or the same in another order."""
    targets = {"chat": 6.0, "maths": 20.0}
    others = ({"chat": 6.0, "code": 20.0}, {**targets, "code": 1.0}, dict([*targets.items()][::-1]))
    said = []
    for other in others:
        controller = klfast.GroupedKLController(
            klfast.DualKLController, 0.5, other if rank == 1 else targets, process_group=group
        )
        said.append(said_by(lambda controller=controller: controller.update({"chat": 1.0}, 8)))
    return said


def monitor(rank, size, group):
    watch = klfast.KLMonitor(6.0, window=3, process_group=group)
    statuses = []
    for step in range(STEPS):
        stats = stats_of(step, shard(rank, size))
        statuses.append(watch.update(stats._replace(kl=stats.kl * (10 if step % 5 > 2 else 1))))
    return statuses, watch.state_dict()


def others(rank, group):
    """An early stop, a learning rate and a reset go by the mean of all ranks."""
    stop = klfast.KLEarlyStop(0.1, process_group=group)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    rate = klfast.KLAdaptiveLR(optimizer, 0.1, process_group=group)
    reset = klfast.ReferenceReset(budget=0.15, process_group=group)
    high = 10.0 if rank == 0 else 0.0  # on the mean, every rank is over its target
    rate.step(high)
    return stop.update(high), stop.update(0.0), optimizer.param_groups[0]["lr"], reset.update(high)


def apart(rank, group):
    """Rank 1 begins with another coefficient: all ranks hear of it."""
    said = []
    first = 0.5 if rank != 1 else 0.5 + 2**-53
    controller = klfast.DualKLController(first, 6.0, process_group=group)
    try:
        controller.update(9.0)
    except RuntimeError as error:
        said.append(str(error))
    said.append(controller.value == first)
    on_device = klfast.DualKLController(first, 6.0, device="cpu", process_group=group)
    on_device.update(9.0)
    on_device.update(9.0)
    try:
        on_device.state_dict()
    except RuntimeError as error:
        said.append(str(error))
    return said


def said_by(function):
    """The error of a call, or None."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return None


def states_apart(rank, group):
    """Rank 1 goes on from another state than the others, which differs in one number."""
    parameters = [[torch.nn.Parameter(torch.zeros(1))] for _ in range(2)]
    rates = [1e-3, 2e-3 if rank == 1 else 1e-3]
    optimizer = torch.optim.SGD(
        [{"params": own, "lr": lr} for own, lr in zip(parameters, rates, strict=True)]
    )
    resets = []
    reset = klfast.ReferenceReset(resets.append, interval=3, plateau=3, process_group=group)
    monitor = klfast.KLMonitor(6.0, process_group=group)
    stop = klfast.KLEarlyStop(0.1, process_group=group)
    if rank == 1:
        reset.load_state_dict({**reset.state_dict(), "updates": 2})
        monitor.load_state_dict({**monitor.state_dict(), "values": [1.0, -1.0]})
        stop.load_state_dict({**stop.state_dict(), "stops": 1})
    rate = klfast.KLAdaptiveLR(optimizer, 0.1, process_group=group)
    calls = (
        lambda: reset.update(1.0),
        lambda: reset.update(1.0, 0.5),
        lambda: monitor.update(1.0),
        lambda: stop.update(1.0),
        lambda: rate.step(1.0),
    )
    said = [said_by(call) for call in calls]
    return said, resets, [group["lr"] for group in optimizer.param_groups] == rates


def metrics_apart(rank, group):
    """Rank 1 has another metric than the others, or none."""
    said = []
    for metric in (1.0, None, float("nan"), 0.0):
        reset = klfast.ReferenceReset(plateau=1, process_group=group)
        given = metric if rank == 1 else 0.5
        said.append(said_by(lambda reset=reset, given=given: reset.update(1.0, given)))
    reset = klfast.ReferenceReset(plateau=1, process_group=group)
    reset.update(1.0, float("nan"))  # on every rank
    return said, reset.state_dict()["updates"]


def bad_counts(rank, group):
    """Rank 1 says that it has -4 or NaN sequences; then all together more than float64 holds."""
    found = []
    for count in (-4.0, float("nan")):
        for current in (6.0 if rank == 0 else 100.0, stats_of(1)):
            controller = klfast.AdaptiveKLController(
                0.5, 6.0, horizon=100, device="cpu", process_group=group
            )
            controller.update(current, torch.tensor(count if rank == 1 else 8.0))
            found.append((float(controller.value), int(controller.skipped)))
    controller = klfast.AdaptiveKLController(0.5, 6.0, process_group=group)
    with pytest.warns(RuntimeWarning, match="skipped"):
        controller.update(6.0, 10**308)
    found.append((controller.value, controller.skipped))
    return found


def nan_on_one_rank(rank, group):
    found = []
    for device in DEVICES.values():
        controller = klfast.DualKLController(0.5, 6.0, device=device, process_group=group)
        if device is None and rank >= 0:
            with pytest.warns(RuntimeWarning, match="skipped a KL of nan"):
                controller.update(float("nan") if rank == 0 else 9.0)
        else:
            controller.update(float("nan") if rank == 0 else 9.0)
        found.append((float(controller.value), int(controller.skipped)))
    return found


def nothing_anywhere(group):
    controller = klfast.DualKLController(0.5, 6.0, process_group=group)
    empty = KLStats(*torch.zeros(8, 2))
    with pytest.warns(RuntimeWarning, match="skipped"):
        controller.update(empty)
    return controller.value, controller.skipped


def shards_of_sequences(rank, size, group):
    """Context parallelism: each rank has some of every sequence's tokens."""
    tokens = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    whole = stats_of(3, tokens=tokens).all_reduce(group, sharded=True)
    return [field.clone() for field in whole]


def subgroup(rank, size):
    """Only the last two ranks measure; the first two have a group of their own."""
    halves = [
        torch.distributed.new_group([0, 1]),
        torch.distributed.new_group([size - 2, size - 1]),
    ]
    own = halves[rank >= size - 2] if size > 2 else halves[0]
    controller = klfast.DualKLController(0.5, 6.0, process_group=own)
    return controller.update(9.0 + rank)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Number of ranks -> what each of them has done."""
    return {
        size: results_of_ranks(work, tmp_path_factory.mktemp(f"ranks{size}"), size)
        for size in SIZES
    }


# What one process does


def alone(kind):
    """The values with the whole batch in one process."""
    controller = controller_of(kind)
    return [float(controller.update(stats_of(step))) for step in range(STEPS)]


@every_size
@every_device
@every_kind
def test_every_rank_has_the_same_coefficient_bit_for_bit(ranks, kind, where, size):
    first, *rest = (done[kind, where] for done in ranks[size])
    assert all(other == first for other in rest)
    assert first[0] == pytest.approx(ranks[size][0][kind, "host"][0], rel=1e-13)


@every_size
@every_kind
def test_the_ranks_together_are_one_process_with_the_whole_batch(ranks, kind, size):
    """Ranks without a token, from step 4 on, contribute zeros."""
    values, _ = ranks[size][0][kind, "host"]
    assert values == pytest.approx(alone(kind), rel=1e-12)
    assert kind in ("fixed", "doubling") or len({*values}) == STEPS


@every_size
def test_numbers_weigh_by_their_sequences(ranks, size):
    counts, kls = [30, 0, 2, 100][:size], [4.0, 0.0, 6.0, 7.0][:size]
    total = sum(counts)
    mean = sum(n * kl for n, kl in zip(counts, kls, strict=True)) / total
    expected = klfast.AdaptiveKLController(0.5, 6.0).update(mean, total)
    for done in ranks[size]:
        assert done["numbers"] == [expected, expected]


@every_size
def test_ranks_with_other_groups_of_data_all_hear_of_it(ranks, size):
    for done in ranks[size]:
        renamed, added, reordered = done["groups apart"]
        assert added.startswith("the number of groups in targets must be the same on every rank")
        for said in (renamed, reordered):
            assert said.startswith("the checksum of the groups in targets must be the same on ev")


@every_size
def test_groups_of_data_take_one_all_reduce(ranks, size):
    expected = {
        "chat": klfast.DualKLController(0.5, 6.0).update(6.0 if size == 2 else 7.0),
        "maths": klfast.DualKLController(0.5, 20.0).update(30.0),
        "code": 0.5,
    }
    for done in ranks[size]:
        assert done["grouped"] == (expected, dict.fromkeys(expected, 0))


@every_size
@pytest.mark.filterwarnings("ignore:mean KL of the last:RuntimeWarning")
def test_a_monitor_sees_the_mean_of_all_ranks(ranks, size):
    watch, statuses = klfast.KLMonitor(6.0, window=3), []
    for step in range(STEPS):
        stats = stats_of(step)
        statuses.append(watch.update(stats._replace(kl=stats.kl * (10 if step % 5 > 2 else 1))))
    for done in ranks[size]:
        got, state = done["monitor"]
        assert got == statuses
        assert state["values"] == pytest.approx(watch.state_dict()["values"], rel=1e-12)
        assert state == ranks[size][0]["monitor"][1]
    assert {*statuses} >= {"ok", "high"}


@every_size
def test_ranks_stop_slow_down_and_reset_together(ranks, size):
    for done in ranks[size]:
        assert done["others"] == (True, False, pytest.approx(1e-3 / 1.5), "budget")


@every_size
def test_ranks_that_differ_in_the_last_bit_are_reported_on_every_rank(ranks, size):
    for done in ranks[size]:
        on_host, unchanged, on_device = done["apart"]
        assert "DualKLController's value must be the same on every rank" in on_host
        assert f"on rank 1; 1 of {size} ranks differ from rank 0" in on_host
        assert unchanged
        assert "got different ones in 2 updates" in on_device


@every_size
def test_ranks_whose_states_differ_are_told_before_anything_is_done(ranks, size):
    for done in ranks[size]:
        said, resets, rates_are_kept = done["states apart"]
        kinds = ("ReferenceReset",) * 2 + ("KLMonitor", "KLEarlyStop", "KLAdaptiveLR")
        for name, text in zip(kinds, said, strict=True):
            assert text is not None, name
            assert f"{name} goes by must be the same on every rank, got another on rank 1" in text
            assert f"1 of {size} ranks differ from rank 0" in text
        assert resets == []
        assert rates_are_kept


@every_size
def test_ranks_whose_metrics_differ_are_told(ranks, size):
    for done in ranks[size]:
        said, updates = done["metrics apart"]
        assert all("must be the same on every rank" in text for text in said)
        assert updates == 1


@every_size
def test_a_bad_count_on_one_rank_skips_the_update_on_all(ranks, size):
    for done in ranks[size]:
        assert done["bad counts"] == [(0.5, 1)] * 5


@every_size
def test_nan_on_one_rank_is_skipped_on_all(ranks, size):
    for done in ranks[size]:
        assert done["nan"] == [(0.5, 1), (0.5, 1)]
        assert done["nothing"] == (0.5, 1)


@every_size
def test_shards_of_sequences_add_up_to_whole_ones(ranks, size):
    expected = stats_of(3)
    for done in ranks[size]:
        for got, field, first in zip(
            done["shards"], expected, ranks[size][0]["shards"], strict=True
        ):
            torch.testing.assert_close(got, field, rtol=1e-14, atol=1e-14)
            assert torch.equal(got, first)
    assert expected.max_abs_log_ratio.unique().numel() > 1


@every_size
def test_a_group_is_not_the_world(ranks, size):
    halves = [[0, 1], [size - 2, size - 1]]
    for rank, done in enumerate(ranks[size]):
        own = halves[rank >= size - 2] if size > 2 else halves[0]
        mean = sum(9.0 + other for other in own) / 2
        assert done["subgroup"] == klfast.DualKLController(0.5, 6.0).update(mean)


@every_size
def test_statistics_of_dtensors_are_read_on_every_rank(ranks, size):
    expected = klfast.DualKLController(0.5, 6.0).update(stats_of(2))
    for done in ranks[size]:
        assert done["dtensors"] == [expected] * 12


@every_size
def test_copies_share_the_group_and_cannot_be_pickled(ranks, size):
    moved = klfast.DualKLController(0.5, 6.0).update(9.0)
    said = "process_group must be None for a controller to be pickled"
    for done in ranks[size]:
        for values in (done["copies"][:4], done["copies"][4:]):
            assert values[:3] == [moved, moved, 0.5]
            assert values[3].startswith(said)


@every_size
def test_rank_0_says_what_all_ranks_know(ranks, size):
    first, *others = (done["diagnosis"] for done in ranks[size])
    (unit, bound, group, high), state, status = first
    assert [text.endswith("did you mean unit='token'?") for text in (*unit, *group)] == [True] * 2
    assert group[0].startswith("DualKLController of 'a': ")
    assert len(bound) == 1
    assert "at its bound max_coef=0.51" in bound[0]
    assert len(high) == 1
    assert status == "high"
    for other in others:
        assert other == ([[]] * 4, state, status)


@every_size
def test_the_sums_that_are_chosen_are_those_of_all_ranks(ranks, size):
    expected = klfast.DualKLController(0.5, 0.1).update(stats_of(1), kl="k3")
    for done in ranks[size]:
        assert done["chosen"] == [pytest.approx(expected, rel=1e-12)] * 2
        assert done["chosen"] == ranks[size][0]["chosen"]


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "cuda:3"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("xpu:xccl", "xpu:3"),
    ],
)
def test_host_numbers_go_where_the_backend_takes_them(monkeypatch, backends, expected):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    module = SimpleNamespace(current_device=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    ranks = Ranks.__new__(Ranks)
    ranks.group = None
    assert ranks.device == torch.device(expected)


def test_a_group_that_is_none_is_refused():
    for bad in ("world", 0, torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed"):
            klfast.AdaptiveKLController(0.5, 6.0, process_group=bad)
    with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed"):
        stats_of(0).all_reduce(None)


# A rank that dies, or does not answer

TIMEOUT = 4


def work_with_a_death(rank):
    """Rank 1 ends before its second update; what the other one then sees, and when."""
    controller = klfast.NuPIKLController(0.5, 6.0, process_group=torch.distributed.group.WORLD)
    controller.update(9.0 + rank)
    state = controller.state_dict()
    if rank == 1:
        if os.environ["KLFAST_TEST_END"] == "dies":
            os._exit(0)
        time.sleep(TIMEOUT + 3)
        os._exit(0)
    Path(os.environ["KLFAST_TEST_STATE"]).write_text(json.dumps(state))
    begun = time.monotonic()
    try:
        controller.update(9.0)
    except RuntimeError as error:
        return str(error), time.monotonic() - begun, controller.state_dict() == state
    return "nothing", time.monotonic() - begun, False


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_without_a_rank_the_others_raise_and_the_saved_state_is_valid(tmp_path, monkeypatch, end):
    path = tmp_path / "state.json"
    monkeypatch.setenv("KLFAST_TEST_STATE", str(path))
    monkeypatch.setenv("KLFAST_TEST_END", end)
    spawn = torch.multiprocessing.get_context("spawn")
    arguments = (work_with_a_death, str(tmp_path), 2, TIMEOUT)
    processes = [spawn.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert not any(process.is_alive() for process in processes)
    said, seconds, unchanged = torch.load(tmp_path / "0.pt")
    assert said != "nothing"
    assert seconds < TIMEOUT + 2
    assert unchanged
    resumed = klfast.NuPIKLController(0.5, 6.0)
    resumed.load_state_dict(json.loads(path.read_text()))
    assert resumed.value == klfast.NuPIKLController(0.5, 6.0).update(9.5)


ONE_RANK = """
import atexit, sys
from ranks import run_rank
atexit.register(print, "Python's end")
run_rank(0, str, sys.argv[1], 1, 30)
"""


def test_a_rank_ends_before_python_does(tmp_path):
    """A thread of gloo that gives a tensor back while Python ends aborts the process."""
    path = os.pathsep.join(sys.path)
    assert run_fresh(ONE_RANK, arguments=[str(tmp_path)], PYTHONPATH=path) == ""
    assert torch.load(tmp_path / "0.pt") == "0"
