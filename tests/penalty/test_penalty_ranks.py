"""KLPenalty, ``all_reduce`` and ``data_parallel_normalizer`` on two ranks, against one process.

All cases run in one pair of processes; the tests look at what these left behind.
"""

import warnings

import pytest
import torch
from agreement import same_bits
from ranks import WORLD_SIZE, results_of_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import klfast
from klfast import KLPenalty, KLStats

SPLITS = {"even": 3, "uneven": 5, "rank-without-a-sequence": 6}
"""How many of the six sequences are rank 0's."""
REDUCTIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
MASKS = ["bool", "weights"]
LENGTHS = [9, 4, 0, 7, 1, 8]

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)


def batch(masks="bool", dtype=torch.float32):
    """(logprobs, ref_logprobs, mask) of all sequences; x > 0, so that no gradients cancel."""
    generator = torch.Generator().manual_seed(5)
    logprobs = -3 * torch.rand(6, 9, generator=generator, dtype=torch.float64)
    ref_logprobs = logprobs - torch.rand(6, 9, generator=generator, dtype=torch.float64)
    weights = torch.rand(6, 9, generator=generator, dtype=torch.float64) + 0.1
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    mask = mask if masks == "bool" else mask * weights
    return logprobs.to(dtype), ref_logprobs.to(dtype), mask


def shard(tensors, at, rank):
    return [tensor[:at] if rank == 0 else tensor[at:] for tensor in tensors]


def controller(kind, group=None):
    if kind == "device":
        return klfast.AdaptiveKLController(0.2, 6.0, 100, device="cpu", process_group=group)
    return klfast.AdaptiveKLController(0.2, 6.0, 100, process_group=group)


def micro_batches(tensors, most=2):
    """Pieces of at most so many sequences; none of no sequences."""
    return [[tensor[i : i + most] for tensor in tensors] for i in range(0, len(tensors[0]), most)]


def packed(tensors):
    """Padded tensors, the mask last, as packed ones with their ``cu_seqlens``."""
    rows, width = tensors[0].shape
    return [tensor.flatten() for tensor in tensors], torch.arange(rows + 1) * width


# What the ranks do


def step_of(rank, at, kind, group, own_group):
    """The numbers of two steps."""
    penalty = KLPenalty("k3", controller=controller(kind, own_group))
    numbers = []
    for shift in (0.0, 0.3):
        logprobs, ref_logprobs, mask = shard(batch(), at, rank)
        for micro in micro_batches((logprobs, ref_logprobs - shift, mask)):
            penalty(*micro)
        numbers.append(penalty.step(group))
    return numbers


def gradients(rank, at, reduction, masks):
    """The average over ranks of what micro-batches leave, as DDP takes it; padded and packed."""
    logprobs, ref_logprobs, mask = shard(batch(masks, torch.float64), at, rank)
    found = {}
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    pieces = micro_batches((logprobs, ref_logprobs, mask))
    normalizer = klfast.data_parallel_normalizer([piece[-1] for piece in pieces], reduction)
    found["normalizer"] = normalizer
    penalty = KLPenalty("k3", reduction)
    for piece in pieces:
        penalty(scale * piece[0], *piece[1:], normalizer=normalizer).backward()
    found["padded"] = averaged(scale)
    scale.grad = None
    pairs = [packed(piece) for piece in pieces]
    normalizer = klfast.data_parallel_normalizer(
        [tensors[-1] for tensors, _ in pairs], reduction, cu_seqlens=[cu for _, cu in pairs]
    )
    for tensors, cu_seqlens in pairs:
        tensors[0] = scale * tensors[0]
        penalty(*tensors, normalizer=normalizer, cu_seqlens=cu_seqlens).backward()
    found["packed"] = averaged(scale)
    return found


def averaged(scale):
    gradient = torch.zeros((), dtype=torch.float64) if scale.grad is None else scale.grad.clone()
    torch.distributed.all_reduce(gradient)
    return gradient / WORLD_SIZE


def others(rank, world):
    """Errors, nothing anywhere, numbers of all-reduces."""
    found = {}
    penalty = KLPenalty(controller=controller("host", world))
    other = torch.distributed.new_group([0, 1])
    penalty(*batch())
    try:
        penalty.step(other)
    except ValueError as error:
        found["other group"] = str(error)
    penalty = KLPenalty(controller=controller("host"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found["nothing"] = penalty.step()
    found["nothing to divide by"] = [
        klfast.data_parallel_normalizer(mask, "token-mean") for mask in ([], torch.zeros(2, 3))
    ]
    calls, original = [], torch.distributed.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counting
    klfast.data_parallel_normalizer([torch.ones(2, 3), torch.ones(1, 2)], "token-mean", world)
    torch.distributed.all_reduce = original
    found["all-reduces"] = calls
    return found


def dtensors(world):
    """Statistics of sharded batches are of all sequences on every rank already."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    parts = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in batch()]
    found = []
    for kind in ("host", "device"):
        penalty = KLPenalty("k3", controller=controller(kind))
        penalty(*parts)
        with pytest.raises(ValueError, match="must be None for statistics of DTensors"):
            penalty.step(world)
        found.append(penalty.step())
    with pytest.raises(TypeError, match="mask must be a plain tensor, got DTensor"):
        klfast.data_parallel_normalizer(parts[-1], "token-mean")
    return found


def mixed(rank, world):
    """fp32 on one rank, fp64 on the other: of other sequences, and of other tokens of the same."""
    dtype = torch.float64 if rank else torch.float32
    tensors = shard(batch(dtype=dtype), 3, rank)
    stats = klfast.kl_penalty(*tensors, return_stats=True)[1]
    return [*stats.all_reduce(world)], [*stats.all_reduce(world, sharded=True)]


def unlike(rank):
    """What a rank hears where the other one calls otherwise, and what it gets after that."""
    world = torch.distributed.group.WORLD
    one, two = KLStats(*torch.ones(8, 1)), KLStats(*torch.ones(8, 2))
    rollout = klfast.rollout_correction(-torch.ones(1, 2), -torch.ones(1, 2)).stats
    calls = {
        "other sequences": lambda: (two if rank else one).all_reduce(world, sharded=True),
        "sharded on one": lambda: one.all_reduce(world, sharded=rank == 1),
        "sharded on one, other sequences": lambda: (two if rank else one).all_reduce(
            world, sharded=rank == 1
        ),
        "other statistics": lambda: (rollout if rank else one).all_reduce(world),
        "like": lambda: one.all_reduce(world, sharded=True),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = [*call()]
        except RuntimeError as error:
            found[name] = str(error)
    return found


def work(rank):
    world = torch.distributed.group.WORLD
    found = {"others": others(rank, world), "mixed": mixed(rank, world)}
    found["dtensors"] = dtensors(world)
    for name, at in SPLITS.items():
        stats = klfast.kl_penalty(*shard(batch(), at, rank), return_stats=True)[1]
        found[name, "stats"] = [*stats.all_reduce(world)]
        for kind in ("host", "device"):
            found[name, kind, "all"] = step_of(rank, at, kind, None, None)
            found[name, kind, "group"] = step_of(rank, at, kind, world, None)
            found[name, kind, "own"] = step_of(rank, at, kind, None, world)
        for reduction in REDUCTIONS:
            for masks in MASKS:
                found[name, reduction, masks] = gradients(rank, at, reduction, masks)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of_ranks(work, tmp_path_factory.mktemp("ranks"))


# What one process does


def single_process(kind):
    penalty = KLPenalty("k3", controller=controller(kind))
    numbers = []
    for shift in (0.0, 0.3):
        logprobs, ref_logprobs, mask = batch()
        penalty(logprobs, ref_logprobs - shift, mask)
        numbers.append(penalty.step())
    return numbers


every_split = pytest.mark.parametrize("split", SPLITS)


@every_split
def test_statistics_of_all_ranks_are_those_of_one_process(ranks, split):
    expected = klfast.kl_penalty(*batch(), return_stats=True)[1]
    for results in ranks:
        assert all(same_bits(a, b) for a, b in zip(results[split, "stats"], expected, strict=True))


@pytest.mark.parametrize("way", ["all", "group"])
@pytest.mark.parametrize("kind", ["host", "device"])
@every_split
def test_ranks_and_micro_batches_step_as_one_process(ranks, split, kind, way):
    for results in ranks:
        assert results[split, kind, way] == single_process(kind)


@pytest.mark.parametrize("kind", ["host", "device"])
@every_split
def test_a_controllers_own_group_steps_as_one_process(ranks, split, kind):
    for results in ranks:
        assert results[split, kind, "own"] == ranks[0][split, kind, "own"]
        for numbers, expected in zip(
            results[split, kind, "own"], single_process(kind), strict=True
        ):
            assert numbers == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@every_split
def test_averaged_gradients_are_those_of_one_process(ranks, split, reduction, masks):
    logprobs, ref_logprobs, mask = batch(masks, torch.float64)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    klfast.kl_penalty(scale * logprobs, ref_logprobs, mask, reduction=reduction).backward()
    assert scale.grad.abs() > 0.1
    for results in ranks:
        found = results[split, reduction, masks]
        for way in ("padded", "packed"):
            torch.testing.assert_close(found[way], scale.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@every_split
def test_the_normalizer_is_the_denominator_over_the_ranks(ranks, split, reduction, masks):
    _, _, mask = batch(masks)
    count = mask.double().sum() if reduction == "token-mean" else (mask != 0).any(-1).sum()
    for results in ranks:
        found = results[split, reduction, masks]["normalizer"]
        assert (found.dim(), found.dtype) == (0, torch.float64)
        assert same_bits(found, ranks[0][split, reduction, masks]["normalizer"])
        torch.testing.assert_close(found, count.double() / WORLD_SIZE, rtol=1e-15, atol=0)


def test_dtensors_step_as_one_process(ranks):
    for results in ranks:
        for kind, numbers in zip(("host", "device"), results["dtensors"], strict=True):
            assert numbers == single_process(kind)[0]


@pytest.mark.parametrize("way", [0, 1], ids=["other sequences", "sharded"])
def test_ranks_of_two_dtypes_have_the_bits_of_the_wider_one(ranks, way):
    for results in ranks:
        assert {field.dtype for field in results["mixed"][way]} == {torch.float64}
        of_both = zip(results["mixed"][way], ranks[0]["mixed"][way], strict=True)
        assert all(same_bits(a, b) for a, b in of_both)


def test_ranks_that_call_otherwise_all_hear_of_it(tmp_path):
    first, second = results_of_ranks(unlike, tmp_path)
    apart = "must be the same on every rank, got"
    shards = f"sharded {apart} False on rank 0 and True on rank 1; 1 of 2 ranks differ from rank 0"
    for found in (first, second):
        assert found["other sequences"].startswith(
            f"with sharded=True, the number of sequences {apart} 1 on rank 0 and 2 on rank 1"
        )
        assert found["sharded on one"] == found["sharded on one, other sequences"] == shards
        assert all(field.tolist() == [2.0] for field in found["like"][:5])
    fields = f"the number of statistics of a sequence {apart} 8 on rank 0 and 23 on rank 1"
    assert first["other statistics"].startswith(fields)
    assert second["other statistics"].startswith("the number of rules in reject must be the same")


def test_what_else_ranks_are_told(ranks):
    for results in ranks:
        found = results["others"]
        assert found["other group"].startswith("group must be the controller's process_group")
        assert found["nothing"]["kl/skipped"] == 1
        assert found["nothing"]["kl/coef"] == 0.2
        assert [n.item() for n in found["nothing to divide by"]] == [1 / WORLD_SIZE] * 2
        assert found["all-reduces"] == [WORLD_SIZE]


# In one process


def test_without_ranks_it_is_the_denominator():
    mask = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0], [0.25, 0.0, 0.0]])
    for reduction, expected in zip(REDUCTIONS, (1.75, 2.0, 2.0), strict=True):
        assert klfast.data_parallel_normalizer(mask, reduction).item() == expected
        assert klfast.data_parallel_normalizer([mask, mask], reduction).item() == 2 * expected
        flat, cu_seqlens = mask.flatten(), torch.tensor([0, 3, 3, 6, 9], dtype=torch.int32)
        one = klfast.data_parallel_normalizer(flat, reduction, cu_seqlens=cu_seqlens)
        assert one.item() == expected
        several = klfast.data_parallel_normalizer(
            (flat, flat), reduction, cu_seqlens=(cu_seqlens, cu_seqlens)
        )
        assert several.item() == 2 * expected
        sequence = klfast.data_parallel_normalizer(mask[0], reduction)
        assert sequence.item() == (1.5 if reduction == "token-mean" else 1.0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (2, 3)], ids=str)
def test_of_any_mask(dtype, shape):
    mask = torch.ones(shape, dtype=dtype)
    expected = max(1, mask.numel())
    assert klfast.data_parallel_normalizer(mask, "token-mean").item() == expected


def test_counts_beyond_the_integers_of_fp32():
    mask = torch.ones(1, dtype=torch.bool).expand(2**24 + 1)
    assert klfast.data_parallel_normalizer(mask, "token-mean").item() == 2**24 + 1


OFFSETS = torch.tensor([0, 3])
WRONG = {
    "sum": (torch.ones(3), {"reduction": "token-sum"}, ValueError, "unknown reduction 'token-sum'"),
    "number": (3, {}, TypeError, r"mask must be a torch\.Tensor, got int"),
    "complex": (torch.ones(3) * 1j, {}, TypeError, "mask must have one of"),
    "3-d": (torch.ones(1, 2, 3), {}, ValueError, r"shape \[B, T\] or \[N\]"),
    "padded": (torch.ones(1, 3), {"cu_seqlens": OFFSETS}, ValueError, "be packed"),
    "negative": (-torch.ones(3), {}, ValueError, "mask must hold finite weights"),
    "offsets": (torch.ones(4), {"cu_seqlens": OFFSETS}, ValueError, "must end at"),
    "list": ([torch.ones(3)], {"cu_seqlens": OFFSETS}, ValueError, "for each mask"),
    "fewer": ([torch.ones(3)] * 2, {"cu_seqlens": [OFFSETS]}, ValueError, "got 1 for 2"),
    "group": (torch.ones(3), {"group": "all"}, TypeError, "group must be a torch"),
    "gradient": (torch.ones(3, requires_grad=True), {}, ValueError, "mask must be a constant"),
}


@pytest.mark.parametrize(("mask", "options", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(mask, options, error, text):
    with pytest.raises(error, match=text):
        klfast.data_parallel_normalizer(mask, **{"reduction": "token-mean", **options})


@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"sharded": False}], ids=str)
def test_a_group_must_be_one(options):
    with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed"):
        KLStats(*torch.ones(8, 2)).all_reduce(None, **options)
