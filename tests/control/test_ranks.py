"""Controllers across ranks take one all-reduce an update, and have the same bits on each rank."""

import copy
import datetime
import json
import pickle
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kinds import READERS, STEERING, make, optimizer_of, warned
from ranks import counted_all_reduces, here, of_ranks, on_ranks
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import klfast
from klfast import DualKLController, KLStats
from klfast.distributed.ranks import Ranks
from klfast.training import penalty as penalty_module

STEPS, SEQUENCES, TOKENS = 9, 8, 6
DEVICES = (None, "cpu")
on_two_and_four = pytest.mark.parametrize(
    "size", [2, pytest.param(4, marks=pytest.mark.exhaustive)]
)


def batch(step):
    """(logprobs, ref_logprobs, mask) of all sequences. The later ones are empty from step 4 on."""
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


def own_part(of):
    rank, size, _ = here()
    return slice(rank * of // size, (rank + 1) * of // size)


def own_stats(step):
    return stats_of(step, own_part(SEQUENCES))


def dual(**options):
    return DualKLController(0.5, 6.0, **options)


def grouped_dual(targets, **options):
    return klfast.GroupedKLController(DualKLController, 0.5, targets, **options)


def assert_same(value):
    assert of_ranks(value) == [value] * here()[1]


@pytest.mark.parametrize("kind", [*STEERING, "fixed"])
@on_two_and_four
@on_ranks
def test_every_rank_has_the_bits_of_one_process_with_the_whole_batch(size, kind):
    """Some ranks have no token from step 4 on, and contribute zeros."""
    _, _, group = here()
    alone, values = READERS[kind](), []
    on_host, on_device = (READERS[kind](device=d, process_group=group) for d in DEVICES)
    for step in range(STEPS):
        for controller in (on_host, on_device):
            calls = counted_all_reduces(partial(controller.update, own_stats(step)))
            assert calls == [(torch.float64, 6 * size)]
        values.append(on_host.value)
        assert on_host.value == pytest.approx(float(alone.update(stats_of(step))), rel=1e-12)
        assert on_device.value.item() == on_host.value
    assert kind in ("fixed", "doubling") or len({*values}) == STEPS
    assert_same((values, on_host.state_dict(), on_device.state_dict()))


@on_two_and_four
@on_ranks
def test_numbers_and_groups_weigh_by_their_sequences(size):
    """Rank 1 has no sequence, and its mean is NaN.

    Even ranks have the group chat, the last rank has maths, and no rank has code.
    """
    rank, _, group = here()
    counts, kls = [30, 0, 2, 100][:size], [4.0, 0.0, 6.0, 7.0][:size]
    mean = sum(n * kl for n, kl in zip(counts, kls, strict=True)) / sum(counts)
    expected = klfast.AdaptiveKLController(0.5, 6.0).update(mean, sum(counts))
    for device in DEVICES:
        controller = klfast.AdaptiveKLController(0.5, 6.0, device=device, process_group=group)
        controller.update(float("nan") if rank == 1 else kls[rank], counts[rank])
        assert (float(controller.value), int(controller.skipped)) == (expected, 0)

    controller = grouped_dual({"chat": 6.0, "maths": 20.0, "code": 1.0}, process_group=group)
    given = {"chat": 6.0 + rank} if rank % 2 == 0 else {}
    if rank == size - 1:
        given["maths"] = 30.0
    of_the_first = (torch.int64, 2 * size)  # the groups that ranks have
    for expected in ([of_the_first], []):
        other = copy.deepcopy(controller)
        calls = counted_all_reduces(lambda: controller.update(given, 8))
        assert calls == [*expected, (torch.float64, 3 * 6 * size)]
    assert other.skipped == dict.fromkeys(other.value, 0)
    assert other.value == {
        "chat": dual().update(6.0 if size == 2 else 7.0),
        "maths": DualKLController(0.5, 20.0).update(30.0),
        "code": 0.5,
    }


@on_ranks
def test_watchers_see_the_mean_of_all_ranks():
    """All ranks go by the mean. On it every rank is over its target."""
    rank, _, group = here()
    alone, watch = (klfast.KLMonitor(6.0, window=3, process_group=g) for g in (None, group))
    statuses = []
    for step in range(STEPS):
        scale = 10 if step % 5 > 2 else 1
        (status, expected), _ = warned(
            lambda step=step, scale=scale: [
                reader.update(stats._replace(kl=stats.kl * scale))
                for reader, stats in ((watch, own_stats(step)), (alone, stats_of(step)))
            ]
        )
        assert status == expected
        statuses.append(status)
    assert {*statuses} >= {"ok", "high"}
    assert_same(watch.state_dict())
    assert watch.state_dict()["values"] == pytest.approx(alone.state_dict()["values"], rel=1e-12)

    high = 10.0 if rank == 0 else 0.0
    stop = klfast.KLEarlyStop(0.1, process_group=group)
    rate = klfast.KLAdaptiveLR(optimizer_of(1e-3), 0.1, process_group=group)
    rate.step(high)
    assert rate.last_lr == [pytest.approx(1e-3 / 1.5)]
    assert (stop.update(high), stop.update(0.0)) == (True, False)
    assert klfast.ReferenceReset(budget=0.15, process_group=group).update(high) == "budget"


def error_of(function, *arguments):
    with pytest.raises(RuntimeError) as error:
        function(*arguments)
    return str(error.value)


@on_two_and_four
@on_ranks
def test_ranks_that_differ_hear_of_it_on_every_rank(size):
    """Rank 1 has another coefficient, groups, state or metric."""
    rank, _, group = here()
    is_other = rank == 1
    first = 0.5 + 2**-53 * is_other
    controller = DualKLController(first, 6.0, process_group=group)
    said = error_of(controller.update, 9.0)
    assert "DualKLController's value must be the same on every rank" in said
    assert f"on rank 1; 1 of {size} ranks differ from rank 0" in said
    assert controller.value == first

    targets = {"chat": 6.0, "maths": 20.0}
    for other, what in (
        ({**targets, "code": 1.0}, "the number of groups"),
        ({"chat": 6.0, "code": 20.0}, "the checksum of the groups"),
        (dict([*targets.items()][::-1]), "the checksum of the groups"),
    ):
        controller = grouped_dual(other if is_other else targets, process_group=group)
        said = error_of(controller.update, {"chat": 1.0}, 8)
        assert said.startswith(f"{what} in targets must be the same")

    resets, rates = [], [1e-3, 2e-3 if is_other else 1e-3]
    reset = klfast.ReferenceReset(resets.append, interval=3, plateau=3, process_group=group)
    rate = klfast.KLAdaptiveLR(optimizer_of(*rates), 0.1, process_group=group)
    for reader, state in (
        (reset, {"updates": 2}),
        (klfast.KLMonitor(6.0, process_group=group), {"values": [1.0, -1.0]}),
        (klfast.KLEarlyStop(0.1, process_group=group), {"stops": 1}),
        (rate, {}),
    ):
        if is_other:
            reader.load_state_dict({**reader.state_dict(), **state})
        said = error_of(rate.step if reader is rate else reader.update, 1.0)
        text = "goes by must be the same on every rank, got another on rank 1"
        assert f"{type(reader).__name__} {text}" in said
    assert (resets, rate.get_lr()) == ([], rates)  # the error comes before any action

    for metric in (1.0, None, float("nan"), 0.0):
        reset = klfast.ReferenceReset(plateau=1, process_group=group)
        said = error_of(reset.update, 1.0, metric if is_other else 0.5)
        assert "must be the same on every rank" in said
    klfast.ReferenceReset(plateau=1, process_group=group).update(1.0, float("nan"))


@on_ranks
def test_a_penaltys_statistics_go_where_the_collectives_of_the_group_are():
    """With NCCL alone they stay on the GPU. Here an index tells the group's device apart."""
    penalty, seen, merged = klfast.KLPenalty(controller=dual()), [], penalty_module._merged
    penalty(*batch(1))

    def watched(parts, where):
        seen.append(where)
        return merged(parts, where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penalty_module, "_merged", watched)
        patch.setattr(Ranks, "device", torch.device("cpu", 0))
        penalty.step(here()[2])
    assert seen == [torch.device("cpu", 0)]


@on_ranks
def test_what_is_no_kl_on_one_rank_is_skipped_on_all():
    """Rank 0 has NaN, float64 cannot hold the count, or no token is kept."""
    rank, _, group = here()
    adaptive = partial(klfast.AdaptiveKLController, 0.5, 6.0, horizon=100)
    for made, arguments in (
        (dual, [float("nan") if rank == 0 else 9.0]),
        (adaptive, [6.0, 10**308]),
        (dual, [KLStats(*torch.zeros(8, 2))]),
    ):
        for device in DEVICES:
            controller = made(device=device, process_group=group)
            _, said = warned(controller.update, *arguments)
            assert len(said) == 1  # on every rank
            assert (float(controller.value), controller.skipped) == (0.5, 1)


@on_two_and_four
@on_ranks
def test_shards_of_sequences_add_up_to_whole_ones(size):
    """With context parallelism each rank has some tokens of every sequence."""
    expected, part = stats_of(3), stats_of(3, tokens=own_part(TOKENS))
    whole = part.all_reduce(here()[2], sharded=True)
    torch.testing.assert_close([*whole], [*expected], rtol=1e-14, atol=1e-14)
    assert_same([field.tolist() for field in whole])
    assert expected.max_abs_log_ratio.unique().numel() > 1


@on_two_and_four
@on_ranks
def test_groups_copies_and_chosen_sums(size):
    """Each process group has two ranks."""
    rank, _, group = here()
    pairs = [torch.distributed.new_group([at, at + 1]) for at in range(0, size, 2)]
    expected = dual().update(sum(9.0 + rank // 2 * 2 + i for i in (0, 1)) / 2)
    assert dual(process_group=pairs[rank // 2]).update(9.0 + rank) == expected
    of_k3 = DualKLController(0.5, 0.1).update(stats_of(1), kl="k3")
    for device in DEVICES:
        controller = DualKLController(0.5, 0.1, device=device, process_group=group)
        for other in (copy.copy(controller), copy.deepcopy(controller)):
            found = float(other.update(own_stats(1), kl="k3"))
            assert found == pytest.approx(of_k3, rel=1e-12)
            assert_same(found)
        assert float(controller.value) == 0.5
        with pytest.raises(TypeError, match="process_group must be None for a controller to be pi"):
            pickle.dumps(controller)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@on_ranks
def test_statistics_of_dtensors_are_of_all_sequences_already(placement):
    _, size, group = here()
    mesh = init_device_mesh("cpu", (size,))
    parts = [distribute_tensor(tensor, mesh, [placement]) for tensor in batch(2)]
    _, stats = klfast.kl_penalty(*parts, estimator="k2", return_stats=True)
    monitor = klfast.KLMonitor(6.0)
    monitor.update(stats)
    found = [float(dual(device=device).update(stats)) for device in DEVICES]
    found.append(grouped_dual({"a": 6.0}).update({"a": stats})["a"])
    found.append(dual().update(monitor.state_dict()["values"][0]))
    assert found == [dual().update(stats_of(2))] * 4
    for reader, current in (
        (grouped_dual({"a": 6.0}, process_group=group), {"a": stats}),
        *((dual(device=device, process_group=group), stats) for device in DEVICES),
        (klfast.KLMonitor(6.0, process_group=group), stats),
    ):
        with pytest.raises(ValueError, match="process_group must be None for statistics of DT"):
            reader.update(current)


@on_two_and_four
@on_ranks
def test_rank_0_says_what_all_ranks_know(size):
    """The target is in the other unit, and later the KL stays off. Rank 0 warns, with a KL of 0."""
    rank, _, group = here()
    stats = own_stats(1)
    if rank == 0:
        stats = stats._replace(kl=stats.kl * 0)
    mean = (stats_of(1).kl[SEQUENCES // size :].sum() / SEQUENCES).item()
    longer = stats._replace(length=stats.length * 20)
    controller = DualKLController(0.5, mean / 30, process_group=group, max_coef=0.51)
    grouped = grouped_dual({"a": mean / 30, "b": 1.0}, process_group=group)
    monitor = klfast.KLMonitor(6.0, window=1, process_group=group)
    wrong_unit = "did you mean unit='token'?"
    for reader, currents, text in (
        (controller, [longer] * 3, wrong_unit),
        (controller, [1000.0] * 150, "at its bound max_coef=0.51"),
        (grouped, [{"a": longer}] * 3, wrong_unit),
        (monitor, [60.0] * 2, "mean KL of the last"),
    ):
        _, caught = warned(lambda r=reader, c=currents: [*map(r.update, c)])
        said = [str(each.message) for each in caught]
        assert [text in one for one in said] == [True] * (rank == 0)
        assert reader is not grouped or all(
            one.startswith("DualKLController of 'a'") for one in said
        )
    assert monitor.status == "high"
    assert_same(controller.state_dict())


@on_ranks
def test_ranks_resume_amid_a_batch_under_names_of_their_own(tmp_path):
    rank, _, _ = here()
    penalty, resumed = (klfast.KLPenalty("k2", controller=dual()) for _ in range(2))
    for sequences in (3, 1 + rank):
        penalty(-torch.rand(sequences, 3), torch.full((sequences, 3), -0.5))
    name = f"penalty of rank {rank}"
    checkpoint.save({name: penalty.state_dict()}, checkpoint_id=tmp_path)
    state = {name: resumed.state_dict()}
    assert state[name] != penalty.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path)
    assert state[name] == penalty.state_dict()
    first, other = of_ranks(penalty.state_dict())
    assert first != other


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


def resumable(**options):
    kinds = ("adaptive", "nupi", "pid-lagrangian")
    return {
        f"{kind} {d}": make(kind, 0.5, 6.0, device=d, **options) for kind in kinds for d in DEVICES
    }


def states_of(things):
    return {name: thing.state_dict() for name, thing in things.items()}


@on_ranks
def test_a_run_resumes_on_another_number_of_ranks(tmp_path):
    """The run begins on two ranks and ends on one, with the numbers of one process."""
    _, _, group = here()
    alone, together = resumable(), resumable(process_group=group)
    for step in range(6):
        if step == 3:
            checkpoint.save(states_of(together), checkpoint_id=tmp_path)
            together = resumable()
            states = states_of(together)
            checkpoint.load(states, checkpoint_id=tmp_path)
            for name, thing in together.items():
                thing.load_state_dict(states[name])
        for name, thing in together.items():
            thing.update(4.0 + 3 * (step % 3), 64 if step >= 3 else 32)
            alone[name].update(4.0 + 3 * (step % 3), 64)
    assert states_of(together) == states_of(alone)


@on_ranks
def test_without_a_rank_the_others_raise_and_the_saved_state_is_valid():
    """The others raise after the timeout. A rank that dies closes its connections at once."""
    rank, _, _ = here()
    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=4))
    torch.distributed.barrier()
    controller = klfast.NuPIKLController(0.5, 6.0, process_group=group)
    controller.update(9.0 + rank)
    if rank == 0:
        state, begun = json.dumps(controller.state_dict()), time.monotonic()
        error_of(controller.update, 9.0)
        assert time.monotonic() - begun < 30
        assert json.dumps(controller.state_dict()) == state
        logits = torch.ones(2, 3, 4)
        error_of(partial(klfast.kl_divergence, logits, logits, group=group))
        resumed = klfast.NuPIKLController(0.5, 6.0)
        resumed.load_state_dict(json.loads(state))
        assert resumed.value == klfast.NuPIKLController(0.5, 6.0).update(9.5)
    torch.distributed.barrier()
