"""``all_reduce`` and ``normalize`` over the ranks of a data-parallel run, on two real ranks."""

import itertools

import pytest
import torch
from agreement import same_bits
from ranks import here, on_ranks
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection

RULES = (Rejection("ratio", low=0.7, high=1.4), Rejection("k3", "seq-mean", high=0.045))


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


@pytest.mark.parametrize("at", [2, 3, 4], ids=["even", "uneven", "rank-without-a-sequence"])
@on_ranks
def test_statistics_and_weights_are_those_of_one_process(at):
    """Rank 0 has the first ``at`` of the four sequences."""
    rank, _, group = here()
    own = slice(at) if rank == 0 else slice(at, None)
    tensors = [tensor[own] for tensor in batch()]
    stats = correct(tensors, "token").stats.all_reduce(group)
    expected = correct(batch(), "token").stats
    for found, exact in zip(tree_leaves(stats), tree_leaves(expected), strict=True):
        assert same_bits(found, exact)
    levels = ("token", "sequence", "geometric"), ("token", "sequence")
    for weight, normalize in itertools.product(*levels):
        found = correct(tensors, weight, normalize, process_group=group).weights
        torch.testing.assert_close(found, correct(batch(), weight, normalize).weights[own])
        if at != 4:
            assert not torch.allclose(found, correct(tensors, weight, normalize).weights)


@on_ranks
def test_ranks_with_other_rules_all_hear_of_it():
    rank, _, group = here()
    for rules in ((RULES[:1], ()), (RULES[:1], RULES), ((), RULES)):
        stats = klfast.rollout_correction(*batch(), reject=rules[rank]).stats
        first, second = map(len, rules)
        with pytest.raises(RuntimeError) as error:
            stats.all_reduce(group)
        assert str(error.value) == (
            "the number of rules in reject must be the same on every rank, got "
            f"{first} on rank 0 and {second} on rank 1; 1 of 2 ranks differ from rank 0"
        )


def test_a_group_must_be_one():
    with pytest.raises(TypeError, match=r"^group must be a"):
        correct(batch(), "token").stats.all_reduce("world")
