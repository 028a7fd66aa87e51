"""Controllers across ranks: real processes, one all-reduce an update, the same bits on each.

All that two ranks do happens in one pair of processes, and all that four do in one group; the tests
look at what they left behind. A run with a rank that dies has its own.
"""

import copy
import json
import os
import pickle
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kinds import READERS, STEERING, make, optimizer_of, warned
from ranks import OnRanks, results_of_ranks, run_rank
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import klfast
from klfast import DualKLController, KLStats
from klfast.distributed.ranks import Ranks

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
    pytest.mark.long,
]

STEPS, SEQUENCES, TOKENS = 9, 8, 6
KINDS = (*STEERING, "fixed")
DEVICES = (None, "cpu")


def batch(step):
    """(log-probs, reference's, mask) of all sequences; from step 4 on the later ones are empty."""
    generator = torch.Generator().manual_seed(step)
    logprobs, ref_logprobs = -3 * torch.rand(
        2, SEQUENCES, TOKENS, generator=generator, dtype=torch.float64
    )
    lengths = torch.randint(1, TOKENS + 1, (SEQUENCES, 1), generator=generator)
    lengths[2 if step >= 4 else SEQUENCES :] = 0
    return logprobs, ref_logprobs, torch.arange(TOKENS) < lengths


def stats_of(step, sequences=slice(None), tokens=slice(None)):
    tensors = (tensor[sequences, tokens] for tensor in batch(step))
    return klfast.kl_penalty(*tensors, estimator="k2", return_stats=True)[1]


def shard(rank, size):
    return slice(rank * SEQUENCES // size, (rank + 1) * SEQUENCES // size)


def dual(**options):
    return DualKLController(0.5, 6.0, **options)


def grouped_dual(targets, **options):
    return klfast.GroupedKLController(DualKLController, 0.5, targets, **options)


# What the ranks do: ``work`` calls each of these, whose results the tests look at


def counted_all_reduces(function):
    """The all-reduces that ``function`` makes, as dtypes and numbers of elements."""
    calls, original = [], torch.distributed.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append((tensor.dtype, tensor.numel()))
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counting
    try:
        function()
    finally:
        torch.distributed.all_reduce = original
    return calls


def steered(rank, size, group):
    """The values and the state of every controller."""
    found = {}
    for kind in KINDS:
        for device in DEVICES:
            controller, values = READERS[kind](device=device, process_group=group), []
            for step in range(STEPS):
                stats = stats_of(step, shard(rank, size))
                calls = counted_all_reduces(partial(controller.update, stats))
                assert calls == [(torch.float64, 6 * size)]
                values.append(float(controller.value))
            found[kind, device] = values, controller.state_dict()
    return found


def texts_of(update, *currents):
    """The warnings of a series of updates."""
    _, caught = warned(lambda: [update(current) for current in currents])
    return [str(each.message) for each in caught]


def diagnosis(rank, size, group):
    """The target is in the other unit; then the KL stays off it; one rank's batch shows neither."""
    stats = stats_of(1, shard(rank, size))
    if rank == 0:
        stats = stats._replace(kl=stats.kl * 0)
    mean = (stats_of(1).kl[SEQUENCES // size :].sum() / SEQUENCES).item()
    controller = DualKLController(0.5, mean / 30, process_group=group, max_coef=0.51)
    longer = stats._replace(length=stats.length * 20)
    grouped = grouped_dual({"a": mean / 30, "b": 1.0}, process_group=group)
    monitor = klfast.KLMonitor(6.0, window=1, process_group=group)
    said = [
        texts_of(controller.update, *[longer] * 3),
        texts_of(controller.update, *[1000.0] * 150),
        texts_of(grouped.update, *[{"a": longer}] * 3),
        texts_of(monitor.update, 60.0, 60.0),
    ]
    return said, controller.state_dict(), monitor.status


def dtensors(rank, size, group):
    """Statistics of sharded batches are of all sequences on every rank, and not added over them."""
    mesh, found = init_device_mesh("cpu", (size,)), []
    for placement in (Shard(0), Shard(1), Replicate()):
        parts = [distribute_tensor(tensor, mesh, [placement]) for tensor in batch(2)]
        _, stats = klfast.kl_penalty(*parts, estimator="k2", return_stats=True)
        found += [float(dual(device=device).update(stats)) for device in DEVICES]
        found.append(grouped_dual({"a": 6.0}).update({"a": stats})["a"])
        monitor = klfast.KLMonitor(6.0)
        monitor.update(stats)
        found.append(dual().update(monitor.state_dict()["values"][0]))
        for reader, current in (
            (grouped_dual({"a": 6.0}, process_group=group), {"a": stats}),
            *((dual(device=device, process_group=group), stats) for device in DEVICES),
            (klfast.KLMonitor(6.0, process_group=group), stats),
        ):
            with pytest.raises(ValueError, match="process_group must be None for statistics of DT"):
                reader.update(current)
    return found


def copies(rank, size, group):
    """A copy measures with the same group, which cannot go into a file."""
    found = []
    for device in DEVICES:
        controller = dual(device=device, process_group=group)
        for other in (copy.copy(controller), copy.deepcopy(controller)):
            found.append(float(other.update(9.0)))
        found.append(float(controller.value))
        with pytest.raises(TypeError, match="process_group must be None for a controller to be pi"):
            pickle.dumps(controller)
    return found


def numbers(rank, size, group):
    """Means of different numbers of sequences; rank 1 has none, and NaN for their mean."""
    values = []
    for device in DEVICES:
        controller = klfast.AdaptiveKLController(0.5, 6.0, device=device, process_group=group)
        controller.update(float("nan") if rank == 1 else 4.0 + rank, [30, 0, 2, 100][rank])
        values.append((float(controller.value), int(controller.skipped)))
    return values


def grouped(rank, size, group):
    """Even ranks have chat, the last has maths; nobody has code. One all-reduce for all."""
    controller = grouped_dual({"chat": 6.0, "maths": 20.0, "code": 1.0}, process_group=group)
    given = {"chat": 6.0 + rank} if rank % 2 == 0 else {}
    if rank == size - 1:
        given["maths"] = 30.0
    of_the_first = (torch.int64, 2 * size)  # which groups the ranks have
    for expected in ([of_the_first], []):
        other = copy.deepcopy(controller)
        calls = counted_all_reduces(lambda: controller.update(given, 8))
        assert calls == [*expected, (torch.float64, 3 * 6 * size)]
    return other.value, other.skipped


def monitor(rank, size, group):
    watch, statuses = klfast.KLMonitor(6.0, window=3, process_group=group), []
    for step in range(STEPS):
        stats = stats_of(step, shard(rank, size) if group else slice(None))
        statuses.append(watch.update(stats._replace(kl=stats.kl * (10 if step % 5 > 2 else 1))))
    return statuses, watch.state_dict()


def others(rank, size, group):
    """An early stop, a learning rate and a reset go by the mean of all ranks."""
    stop = klfast.KLEarlyStop(0.1, process_group=group)
    rate = klfast.KLAdaptiveLR(optimizer_of(1e-3), 0.1, process_group=group)
    reset = klfast.ReferenceReset(budget=0.15, process_group=group)
    high = 10.0 if rank == 0 else 0.0  # on the mean, every rank is over its target
    rate.step(high)
    return stop.update(high), stop.update(0.0), rate.last_lr, reset.update(high)


def error_of(function, *arguments):
    """The error of a call, or None."""
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    return None


def apart(rank, size, group):
    """Rank 1 has another coefficient, groups, state or metric: all ranks hear of it."""
    first = 0.5 if rank != 1 else 0.5 + 2**-53
    controller = DualKLController(first, 6.0, process_group=group)
    on_device = DualKLController(first, 6.0, device="cpu", process_group=group)
    said = {"value": error_of(controller.update, 9.0)}
    assert controller.value == first
    for _ in range(2):
        on_device.update(9.0)
    said["device"] = error_of(on_device.state_dict)

    targets = {"chat": 6.0, "maths": 20.0}
    others = {
        "renamed": {"chat": 6.0, "code": 20.0},
        "added": {**targets, "code": 1.0},
        "reordered": dict([*targets.items()][::-1]),
    }
    for name, other in others.items():
        grouped = grouped_dual(other if rank == 1 else targets, process_group=group)
        said[name] = error_of(grouped.update, {"chat": 1.0}, 8)

    resets, rates = [], [1e-3, 2e-3 if rank == 1 else 1e-3]
    reset = klfast.ReferenceReset(resets.append, interval=3, plateau=3, process_group=group)
    monitor = klfast.KLMonitor(6.0, process_group=group)
    stop = klfast.KLEarlyStop(0.1, process_group=group)
    rate = klfast.KLAdaptiveLR(optimizer_of(*rates), 0.1, process_group=group)
    if rank == 1:
        reset.load_state_dict({**reset.state_dict(), "updates": 2})
        monitor.load_state_dict({**monitor.state_dict(), "values": [1.0, -1.0]})
        stop.load_state_dict({**stop.state_dict(), "stops": 1})
    for reader in (reset, monitor, stop, rate):
        act = rate.step if reader is rate else reader.update
        said[type(reader).__name__] = error_of(act, 1.0)
    assert (resets, rate.get_lr()) == ([], rates)  # told before anything is done

    for metric in (1.0, None, float("nan"), 0.0):
        reset = klfast.ReferenceReset(plateau=1, process_group=group)
        said[f"metric {metric}"] = error_of(reset.update, 1.0, metric if rank == 1 else 0.5)
    reset = klfast.ReferenceReset(plateau=1, process_group=group)
    assert error_of(reset.update, 1.0, float("nan")) is None  # on every rank
    return said


def skipped(rank, size, group):
    """NaN on rank 0; bad counts on rank 1; more sequences than float64 holds; no token anywhere."""
    found = []

    def add(make_it, *arguments, **options):
        for device in options.pop("devices", DEVICES):
            controller = make_it(device=device, process_group=group, **options)
            _, said = warned(controller.update, *arguments)
            assert len(said) == (device is None)  # on every rank
            found.append((float(controller.value), int(controller.skipped)))

    adaptive = partial(klfast.AdaptiveKLController, 0.5, 6.0, horizon=100)
    add(dual, float("nan") if rank == 0 else 9.0)
    for count in (-4.0, float("nan")):
        for current in (6.0 if rank == 0 else 100.0, stats_of(1)):
            add(adaptive, current, torch.tensor(count if rank == 1 else 8.0), devices=["cpu"])
    add(adaptive, 6.0, 10**308, devices=[None])
    add(dual, KLStats(*torch.zeros(8, 2)))
    return found


def chosen(rank, size, group):
    """The sums of k3 of all ranks."""
    controllers = [DualKLController(0.5, 0.1, device=d, process_group=group) for d in DEVICES]
    return [float(c.update(stats_of(1, shard(rank, size)), kl="k3")) for c in controllers]


def shards_of_sequences(rank, size, group):
    """Context parallelism: each rank has some of every sequence's tokens."""
    tokens = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    whole = stats_of(3, tokens=tokens).all_reduce(group, sharded=True)
    return [field.clone() for field in whole]


def subgroup(rank, size, group):
    """Only the last two ranks measure; the first two have a group of their own."""
    halves = [torch.distributed.new_group([first, first + 1]) for first in {0, size - 2}]
    return dual(process_group=halves[rank >= size - 2 if size > 2 else 0]).update(9.0 + rank)


def pending(rank, size, group, folder):
    """Each rank saves what it has gathered under a name of its own, and resumes with that."""
    penalty, resumed = (klfast.KLPenalty("k2", controller=dual()) for _ in range(2))
    for sequences in (3, 1 + rank):
        penalty(-torch.rand(sequences, 3), torch.full((sequences, 3), -0.5))
    name, folder = f"penalty of rank {rank}", folder / "pending"
    checkpoint.save({name: penalty.state_dict()}, checkpoint_id=folder)
    state = {name: resumed.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    return penalty.state_dict(), state[name]


PARTS = (
    *(steered, diagnosis, dtensors, copies, numbers, grouped, monitor, others, apart, skipped),
    *(chosen, shards_of_sequences, subgroup),
)


def work(rank, folder):
    size, group = torch.distributed.get_world_size(), torch.distributed.group.WORLD
    done = {part.__name__: part(rank, size, group) for part in PARTS}
    return {**done, "pending": pending(rank, size, group, folder)}


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)], ids=["two", "four"]
)
def ranks(request, tmp_path_factory):
    """What each rank has done."""
    folder = tmp_path_factory.mktemp("ranks")
    return results_of_ranks(OnRanks(work, folder), folder, request.param, timeout=60)


# The tests compare their results with one process


def test_every_rank_has_the_bits_of_one_process_with_the_whole_batch(ranks):
    """Ranks without a token, from step 4 on, contribute zeros."""
    first, *rest = (done["steered"] for done in ranks)
    assert all(other == first for other in rest)
    for kind in KINDS:
        controller = READERS[kind]()
        alone = [float(controller.update(stats_of(step))) for step in range(STEPS)]
        values, _ = first[kind, None]
        assert values == pytest.approx(alone, rel=1e-12)
        assert values[0] == pytest.approx(first[kind, "cpu"][0][0], rel=1e-13)
        assert kind in ("fixed", "doubling") or len({*values}) == STEPS


def test_numbers_and_groups_weigh_by_their_sequences(ranks):
    counts, kls = [30, 0, 2, 100][: len(ranks)], [4.0, 0.0, 6.0, 7.0][: len(ranks)]
    total = sum(counts)
    mean = sum(n * kl for n, kl in zip(counts, kls, strict=True)) / total
    value = klfast.AdaptiveKLController(0.5, 6.0).update(mean, total)
    of_groups = {
        "chat": dual().update(6.0 if len(ranks) == 2 else 7.0),
        "maths": DualKLController(0.5, 20.0).update(30.0),
        "code": 0.5,
    }
    for done in ranks:
        assert done["numbers"] == [(value, 0)] * 2
        assert done["grouped"] == (of_groups, dict.fromkeys(of_groups, 0))


@pytest.mark.filterwarnings("ignore:mean KL of the last:RuntimeWarning")
def test_watchers_see_the_mean_of_all_ranks(ranks):
    statuses, state = monitor(0, 1, None)
    assert {*statuses} >= {"ok", "high"}
    for done in ranks:
        assert done["others"] == (True, False, [pytest.approx(1e-3 / 1.5)], "budget")
        assert done["monitor"] == ranks[0]["monitor"]
        assert done["monitor"][0] == statuses
        assert done["monitor"][1]["values"] == pytest.approx(state["values"], rel=1e-12)


def test_ranks_that_differ_hear_of_it_on_every_rank(ranks):
    for done in ranks:
        said = {**done["apart"]}
        assert "DualKLController's value must be the same on every rank" in said["value"]
        assert f"on rank 1; 1 of {len(ranks)} ranks differ from rank 0" in said["value"]
        assert "got different ones in 2 updates" in said["device"]
        assert said["added"].startswith("the number of groups in targets must be the same on ev")
        for name in ("renamed", "reordered"):
            assert said[name].startswith("the checksum of the groups in targets must be the same")
        for name in ("ReferenceReset", "KLMonitor", "KLEarlyStop", "KLAdaptiveLR"):
            text = f"{name} goes by must be the same on every rank, got another on rank 1"
            assert text in said[name]
        metrics = [text for name, text in said.items() if name.startswith("metric")]
        assert all("must be the same on every rank" in text for text in metrics)


def test_what_is_no_kl_on_one_rank_is_skipped_on_all(ranks):
    for done in ranks:
        assert done["skipped"] == [(0.5, 1)] * 9


def test_shards_of_sequences_add_up_to_whole_ones(ranks):
    expected = stats_of(3)
    for done in ranks:
        for got, field, first in zip(
            done["shards_of_sequences"], expected, ranks[0]["shards_of_sequences"], strict=True
        ):
            torch.testing.assert_close(got, field, rtol=1e-14, atol=1e-14)
            assert torch.equal(got, first)
    assert expected.max_abs_log_ratio.unique().numel() > 1


def test_a_group_is_not_the_world(ranks):
    halves = [[0, 1], [len(ranks) - 2, len(ranks) - 1]]
    for rank, done in enumerate(ranks):
        own = halves[rank >= len(ranks) - 2]
        assert done["subgroup"] == dual().update(sum(9.0 + other for other in own) / 2)


def test_dtensors_copies_and_chosen_sums(ranks):
    whole, moved = dual().update(stats_of(2)), dual().update(9.0)
    of_k3 = DualKLController(0.5, 0.1).update(stats_of(1), kl="k3")
    for done in ranks:
        assert done["dtensors"] == [whole] * 12
        assert done["copies"] == [moved, moved, 0.5] * 2
        assert done["chosen"] == ranks[0]["chosen"] == [pytest.approx(of_k3, rel=1e-12)] * 2


def test_rank_0_says_what_all_ranks_know(ranks):
    first, *others = (done["diagnosis"] for done in ranks)
    (unit, bound, group, high), state, status = first
    assert [text.endswith("did you mean unit='token'?") for text in (*unit, *group)] == [True] * 2
    assert group[0].startswith("DualKLController of 'a': ")
    assert len(bound) == len(high) == 1
    assert "at its bound max_coef=0.51" in bound[0]
    assert status == "high"
    for other in others:
        assert other == ([[]] * 4, state, status)


def test_ranks_resume_amid_a_batch_under_names_of_their_own(ranks):
    for done in ranks:
        saved, loaded = done["pending"]
        assert loaded == saved
    assert ranks[0]["pending"] != ranks[1]["pending"]


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


# On another number of ranks


def resumable(**options):
    kinds = ("adaptive", "nupi", "pid-lagrangian")
    return {
        f"{kind} {d}": make(kind, 0.5, 6.0, device=d, **options) for kind in kinds for d in DEVICES
    }


def steer(rank, folder, load, save):
    """Resume, take three steps with all ranks, and save."""
    things = resumable(process_group=torch.distributed.group.WORLD)
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
    alone = resumable()
    for _ in range(3):
        for step in range(3):
            for thing in alone.values():
                thing.update(4.0 + 3 * step, 64)
    assert before == {name: thing.state_dict() for name, thing in alone.items()}


# A rank that dies, or does not answer

TIMEOUT = 4


def work_with_a_death(rank, end, path):
    """Rank 1 ends before its second update; what the other one then sees, and when."""
    controller = klfast.NuPIKLController(0.5, 6.0, process_group=torch.distributed.group.WORLD)
    controller.update(9.0 + rank)
    state = controller.state_dict()
    if rank == 1:
        time.sleep(0 if end == "dies" else TIMEOUT + 3)
        os._exit(0)
    path.write_text(json.dumps(state))
    begun = time.monotonic()
    said = error_of(controller.update, 9.0)
    return said, time.monotonic() - begun, controller.state_dict() == state


@pytest.mark.parametrize("end", ["dies", pytest.param("hangs", marks=pytest.mark.exhaustive)])
def test_without_a_rank_the_others_raise_and_the_saved_state_is_valid(tmp_path, end):
    path = tmp_path / "state.json"
    spawn = torch.multiprocessing.get_context("spawn")
    arguments = (OnRanks(work_with_a_death, end, path), str(tmp_path), 2, TIMEOUT)
    processes = [spawn.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert not any(process.is_alive() for process in processes)
    said, seconds, unchanged = torch.load(tmp_path / "0.pt")
    assert said is not None
    assert seconds < TIMEOUT + 2
    assert unchanged
    resumed = klfast.NuPIKLController(0.5, 6.0)
    resumed.load_state_dict(json.loads(Path(path).read_text()))
    assert resumed.value == klfast.NuPIKLController(0.5, 6.0).update(9.5)
