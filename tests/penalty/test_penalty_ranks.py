"""KLPenalty and ``all_reduce`` on two ranks, against one process."""

import warnings

import pytest
import torch
from agreement import same_bits
from ranks import assert_same_on_ranks, here, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import klfast
from klfast import KLPenalty, KLStats

DEVICES = (None, "cpu")
every_split = pytest.mark.parametrize(
    "at", [3, 5, 6], ids=["even", "uneven", "rank-without-a-sequence"]
)
"""The number of rank 0's sequences, of six."""


PAIRS, STRIDES = ([0, 1], [2, 3]), ([0, 2], [1, 3])
"""Of four ranks: those that share a vocabulary, and those with different sequences."""


def batch(dtype=torch.float32):
    """(logprobs, ref_logprobs, mask) of all sequences."""
    generator = torch.Generator().manual_seed(5)
    logprobs = -3 * torch.rand(6, 9, generator=generator, dtype=torch.float64)
    ref_logprobs = logprobs - torch.rand(6, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([9, 4, 0, 7, 1, 8])[:, None]
    return logprobs.to(dtype), ref_logprobs.to(dtype), mask


def own_part(tensors, at):
    return [tensor[:at] if here()[0] == 0 else tensor[at:] for tensor in tensors]


def controller(device=None, group=None):
    return klfast.AdaptiveKLController(0.2, 6.0, 100, device=device, process_group=group)


def numbers_of(tensors, device, group=None, own_group=None, most=2):
    """The numbers of two steps, ``most`` sequences a micro-batch. The second has a higher KL."""
    penalty, numbers = KLPenalty("k3", controller=controller(device, own_group)), []
    logprobs, ref_logprobs, mask = tensors
    for shift in (0.0, 0.3):
        for i in range(0, len(mask), most):
            micro = slice(i, i + most)
            penalty(logprobs[micro], ref_logprobs[micro] - shift, mask[micro])
        numbers.append(penalty.step(group))
    return numbers


@every_split
@on_ranks
def test_statistics_of_all_ranks_are_those_of_one_process(at):
    found, expected = (
        klfast.kl_penalty(*tensors, return_stats=True)[1]
        for tensors in (own_part(batch(), at), batch())
    )
    for one, exact in zip(found.all_reduce(here()[2]), expected, strict=True):
        assert same_bits(one, exact)


@pytest.mark.parametrize("device", DEVICES)
@every_split
@on_ranks
def test_ranks_and_micro_batches_step_as_one_process(at, device):
    """The group is the step's, all ranks, or the controller's own."""
    rank, _, group = here()
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    own, expected = own_part(batch(), at), numbers_of(batch(), device, alone, most=6)
    assert numbers_of(own, device) == numbers_of(own, device, group) == expected
    for numbers, exact in zip(numbers_of(own, device, None, group), expected, strict=True):
        assert numbers == pytest.approx(exact, rel=1e-6)
        assert_same_on_ranks(*map(torch.tensor, numbers.values()))


@on_ranks
def test_dtensors_step_as_one_process():
    """Statistics of DTensors already cover all sequences, on every rank."""
    _, size, group = here()
    mesh = init_device_mesh("cpu", (size,))
    parts = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in batch()]
    for device in DEVICES:
        penalty = KLPenalty("k3", controller=controller(device))
        penalty(*parts)
        with pytest.raises(ValueError, match="must be None for statistics of DTensors"):
            penalty.step(group)
        assert penalty.step() == numbers_of(own_part(batch(), 3), device)[0]


def almost(numbers):
    """Numbers up to rounding. Exact divergences have no statistics of tokens."""
    return pytest.approx(numbers, rel=1e-6, nan_ok=True)


def exact(penalty, first, last, group=None):
    """Call with the exact KL of some of eight sequences, of this rank's shard with a group."""
    generator = torch.Generator().manual_seed(7)
    logits, ref_logits = torch.randn(2, 8, 3, 10, generator=generator)[:, first:last]
    rank, entries = here()[0] % 2, slice(None)
    if group is not None:
        entries = slice(0, 7) if rank == 0 else slice(7, 10)
    if first % 4:  # through an identity as the head
        heads = [torch.eye(10)[entries]] * 2
        models = logits, heads[0], ref_logits, heads[1]
        return penalty.from_hidden(*models, **({} if group is None else {"group": group}))
    models = (model[..., entries] for model in (logits, ref_logits))
    return penalty.from_logits(*models, **({} if group is None else {"group": group}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", [False, True], ids=["step's group", "controller's group"])
@on_ranks
def test_a_sequence_counts_once_however_many_ranks_share_its_vocabulary(own, device):
    """Also beside calls whose sequences each rank has of its own, and from a saved state."""
    rank, _, group = here()
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    whole, shared, resumed = (
        KLPenalty(controller=controller(device, group if own and i else None)) for i in range(3)
    )
    for shift in range(2):
        for first in (0, 1):
            exact(shared, first, first + 1, group)
        exact(shared, 2 + rank, 3 + rank)  # another sequence on each rank
        resumed.load_state_dict(shared.state_dict())
        exact(whole, 0, 4)
        numbers, expected = shared.step(), whole.step(alone)
        assert numbers == almost(expected), shift
        assert_same_on_ranks(*map(torch.tensor, numbers.values()))
        assert resumed.step() == almost(numbers)
    exact(shared, 0, 4, group)  # nothing is left out of a step that has one rank of the vocabulary
    if not own:
        exact(whole, 0, 4)
        assert shared.step(alone) == almost(whole.step(alone))


@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize("over", ["all", "data"])
@on_ranks
def test_shards_and_data_parallelism_step_as_one_process(over, size):
    """Two pairs of ranks share a vocabulary. The step is over all ranks or one of each pair."""
    rank = here()[0]
    pairs, firsts = ([torch.distributed.new_group(r) for r in of] for of in (PAIRS, STRIDES))
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    whole, shared = (KLPenalty(controller=controller()) for _ in range(2))
    exact(shared, 4 * (rank // 2), 4 * (rank // 2) + 4, pairs[rank // 2])
    exact(whole, 0, 8)
    numbers = shared.step(firsts[rank % 2] if over == "data" else None)
    assert numbers == almost(whole.step(alone))
    assert_same_on_ranks(*map(torch.tensor, numbers.values()))


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks
def test_ranks_of_two_dtypes_have_the_bits_of_the_wider_one(sharded):
    """One rank has fp32, the other fp64: other sequences, or other tokens of the same sequences."""
    rank, _, group = here()
    tensors = own_part(batch((torch.float32, torch.float64)[rank]), 3)
    stats = klfast.kl_penalty(*tensors, return_stats=True)[1].all_reduce(group, sharded=sharded)
    assert {field.dtype for field in stats} == {torch.float64}
    assert_same_on_ranks(*stats)


@on_ranks
def test_ranks_that_call_otherwise_all_hear_of_it():
    rank, _, group = here()
    one, two = KLStats(*torch.ones(8, 1)), KLStats(*torch.ones(8, 2))
    rollout = klfast.rollout_correction(-torch.ones(1, 2), -torch.ones(1, 2)).stats
    apart = "must be the same on every rank, got"
    sequences = f"with sharded=True, the number of sequences {apart} 1 on rank 0 and 2 on rank 1"
    shards = f"sharded {apart} False on rank 0 and True on rank 1; 1 of 2 ranks differ from rank 0"
    fields = (
        f"the number of statistics of a sequence {apart} {len(one)} on rank 0 and 23 on rank 1",
        "the number of rules in reject must be the same",
    )
    for calls, text in (
        ([(one, {"sharded": True}), (two, {"sharded": True})], sequences),
        ([(one, {}), (one, {"sharded": True})], shards),
        ([(one, {}), (two, {"sharded": True})], shards),
        ([(one, {}), (rollout, {})], fields[rank]),
    ):
        stats, options = calls[rank]
        with pytest.raises(RuntimeError, match=f"^{text}"):
            stats.all_reduce(group, **options)
    added = one.all_reduce(group, sharded=True)
    assert all(field.tolist() == [2.0] for field in added[:5])


@on_ranks
def test_a_step_of_another_group_and_of_nothing():
    _, _, group = here()
    penalty = KLPenalty(controller=controller(None, group))
    other = torch.distributed.new_group([0, 1])
    penalty(*batch())
    with pytest.raises(ValueError, match="group must be the controller's process_group"):
        penalty.step(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        nothing = KLPenalty(controller=controller()).step()
    assert (nothing["kl/skipped"], nothing["kl/coef"]) == (1, 0.2)


@pytest.mark.parametrize("options", [{}, {"sharded": True}], ids=str)
def test_a_group_must_be_one(options):
    with pytest.raises(TypeError, match=r"^group must be a torch\.distributed"):
        KLStats(*torch.ones(8, 2)).all_reduce(None, **options)
