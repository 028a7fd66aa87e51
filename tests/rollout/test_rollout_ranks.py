"""``all_reduce`` and ``normalize`` over the ranks of a data-parallel run, on two real ranks."""

import pytest
import torch
from agreement import same_bits
from ranks import WORLD_SIZE, results_of_ranks
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection

SPLITS = {"even": 2, "uneven": 3, "rank-without-a-sequence": 4}
"""How many of the four sequences are rank 0's."""

WEIGHTS = ["token", "sequence", "geometric"]
NORMALIZE = ["token", "sequence"]
RULES = (Rejection("ratio", low=0.7, high=1.4), Rejection("k3", "seq-mean", high=0.045))

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)


def batch():
    """(logprobs, rollout_logprobs, mask) of all sequences; one keeps nothing."""
    generator = torch.Generator().manual_seed(3)
    rollout = -3 * torch.rand(4, 12, generator=generator)
    logprobs = rollout + 0.3 * torch.randn(4, 12, generator=generator)
    mask = torch.arange(12) < torch.tensor([12, 5, 0, 7])[:, None]
    return logprobs, rollout, mask


def correct(tensors, weight, normalize=None, **options):
    return klfast.rollout_correction(
        *tensors, weight=weight, normalize=normalize, reject=RULES, backend="reference", **options
    )


def work(rank):
    """This rank's weights under each normalization, and the statistics of all ranks."""
    group = torch.distributed.group.WORLD
    results = {}
    for name, at in SPLITS.items():
        own = [t[:at] if rank == 0 else t[at:] for t in batch()]
        stats = correct(own, "token").stats.all_reduce(group)
        results[name, "stats"] = tree_leaves(stats)
        results[name, "logged"] = stats.as_dict()
        for weight in WEIGHTS:
            for normalize in NORMALIZE:
                corrected = correct(own, weight, normalize, process_group=group)
                results[name, weight, normalize] = corrected.weights
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("split", SPLITS)
def test_every_rank_has_the_statistics_of_all_sequences(ranks, split):
    expected = correct(batch(), "token").stats
    for results in ranks:
        leaves = zip(results[split, "stats"], tree_leaves(expected), strict=True)
        assert all(same_bits(a, b) for a, b in leaves)
        logged = expected.as_dict()
        assert results[split, "logged"].keys() == logged.keys()
        assert all(same_bits(results[split, "logged"][name], logged[name]) for name in logged)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("split", SPLITS)
def test_weights_are_divided_by_the_mean_of_all_ranks(ranks, split, weight, normalize):
    assert len(ranks) == WORLD_SIZE
    together = torch.cat([results[split, weight, normalize] for results in ranks])
    torch.testing.assert_close(together, correct(batch(), weight, normalize).weights)
    own = correct([t[: SPLITS[split]] for t in batch()], weight, normalize).weights
    if split != "rank-without-a-sequence":
        assert not torch.allclose(own, ranks[0][split, weight, normalize])


def test_a_group_must_be_one():
    stats = correct(batch(), "token").stats
    with pytest.raises(TypeError, match="process_group must be a"):
        stats.all_reduce("world")
    with pytest.raises(TypeError, match="process_group must be a"):
        correct(batch(), "token", "token", process_group="world")


def with_other_rules(rank):
    """What a rank hears if another one has other rules."""
    world, found = torch.distributed.group.WORLD, []
    for rules in ((RULES[:1], ()), (RULES[:1], RULES), ((), RULES)):
        stats = klfast.rollout_correction(*batch(), reject=rules[rank]).stats
        try:
            found.append(stats.all_reduce(world).length.tolist())
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_ranks_with_other_rules_all_hear_of_it(tmp_path):
    for found in results_of_ranks(with_other_rules, tmp_path):
        for said, (first, second) in zip(found, ((1, 0), (1, 2), (0, 2)), strict=True):
            assert said == (
                "the number of rules in reject must be the same on every rank, got "
                f"{first} on rank 0 and {second} on rank 1; 1 of 2 ranks differ from rank 0"
            )


def dtensor_error(rank):
    """What the error says that a DTensor is refused with."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    logprobs, rollout_logprobs, _ = (distribute_tensor(t, mesh, [Shard(0)]) for t in batch())
    try:
        klfast.rollout_correction(logprobs, rollout_logprobs)
    except TypeError as error:
        return str(error)
    return None


def test_dtensors_are_refused_with_what_to_do(tmp_path):
    for said in results_of_ranks(dtensor_error, tmp_path):
        assert "logprobs must be a plain tensor, got DTensor" in said
