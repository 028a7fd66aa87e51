"""A head on several ranks: DDP, a weight that FSDP2 shards, and vocabulary shards."""

import pytest
import torch
from ranks import OnRanks, results_of_ranks
from torch import nn

import klfast

WIDTH, WORDS, TOKENS = 6, 24, 8


def parts(rank=None):
    """Hidden states of policy and reference; of a rank, or of all."""
    torch.manual_seed(3)
    both = torch.randn(2, TOKENS, WIDTH)
    return both if rank is None else both.chunk(2, 1)[rank]


def head():
    torch.manual_seed(4)
    return nn.Linear(WIDTH, WORDS)


class Model(nn.Module):
    def __init__(self, per_token):
        super().__init__()
        self.body, self.head, self.per_token = nn.Linear(WIDTH, WIDTH), head(), per_token

    def forward(self, states):
        hidden, ref_hidden = states
        options = {"bias": self.head.bias, "chunk": 3}
        if not self.per_token:
            options["reduction"] = "token-mean"
        weight = self.head.weight
        kl = klfast.linear_kl_divergence(self.body(hidden), weight, ref_hidden, **options)
        return kl.mean()


def model_of(per_token):
    torch.manual_seed(5)
    return Model(per_token)


def gradients(model):
    return {
        name.removeprefix("module."): (
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        ).clone()
        for name, p in model.named_parameters()
    }


def under_ddp(rank, per_token):
    model = nn.parallel.DistributedDataParallel(model_of(per_token))
    model(parts(rank)).backward()
    return gradients(model)


def under_fsdp(rank, per_token):
    """The head's weight is asked for outside of its own module: a DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(per_token)
    fully_shard(model.head, mesh=init_device_mesh("cpu", (2,)))
    model(parts(rank)).backward()
    for p in model.body.parameters():  # which is not sharded
        torch.distributed.all_reduce(p.grad)
        p.grad /= 2
    return gradients(model)


def under_fsdp_whole(rank, per_token):
    """The module that calls klfast is wrapped: its parameters' storages are freed between the
    forward and the backward, and filled again.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    seen = []
    model = model_of(per_token)
    forward = model.forward

    def noting(states):
        seen.append(model.head.weight)
        return forward(states)

    model.forward = noting
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    loss = model(parts(rank))
    assert seen[0].untyped_storage().nbytes() == 0
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("work", [under_ddp, under_fsdp, under_fsdp_whole])
def test_gradients_are_those_of_one_process(tmp_path, work, per_token):
    model = model_of(per_token)
    model(parts()).backward()
    wanted = gradients(model)
    for found in results_of_ranks(OnRanks(work, per_token), tmp_path):
        assert found.keys() == wanted.keys()
        for name, grad in found.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def test_hidden_states_in_a_dtensor_are_refused(tmp_path):
    assert results_of_ranks(OnRanks(_refused), tmp_path, world_size=1)


def _refused(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    states = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])
    with pytest.raises(TypeError, match="hidden must be a plain tensor, got DTensor"):
        klfast.linear_kl_divergence(states, torch.ones(5, 4), torch.ones(3, 4))
    return torch.ones(())


def in_shards(rank, per_token):
    """A head in two shards; the body is the same on both ranks, as are the tokens."""
    group, own = torch.distributed.group.WORLD, slice(*((0, 7), (7, WORDS))[rank])
    model = model_of(per_token)
    hidden, ref_hidden = parts()
    weight, bias = (p.detach()[own].clone().requires_grad_() for p in model.head.parameters())
    options = {"bias": bias, "chunk": 3, "group": group}
    if not per_token:
        options["reduction"] = "token-mean"
    klfast.linear_kl_divergence(model.body(hidden), weight, ref_hidden, **options).mean().backward()
    body = {f"body.{name}": p.grad for name, p in model.body.named_parameters()}
    return body, {"head.weight": weight.grad, "head.bias": bias.grad}, _apart(rank, group)


def _apart(rank, group):
    """The errors where ranks differ in one thing, and of a head in a DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    hidden, weight, ids = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)
    calls = {
        "chunk": lambda: klfast.linear_token_logprobs(
            hidden, weight, ids, chunk=2 + rank, group=group
        ),
        "requires_grad": lambda: klfast.linear_token_logprobs(
            hidden.clone().requires_grad_(rank == 0), weight, ids, group=group
        ),
        "DTensor": lambda: klfast.linear_token_logprobs(
            hidden,
            distribute_tensor(weight, init_device_mesh("cpu", (2,)), [Replicate()]),
            ids,
            group=group,
        ),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises((RuntimeError, TypeError)) as error:
            call()
        found[name] = str(error.value)
    return found


@pytest.mark.parametrize("per_token", [False, True])
def test_a_head_in_vocabulary_shards(tmp_path, per_token):
    model = model_of(per_token)
    model(parts()).backward()
    wanted = gradients(model)
    found = results_of_ranks(OnRanks(in_shards, per_token), tmp_path)
    for body, _, apart in found:
        for name, grad in body.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
        for name in ("chunk", "requires_grad"):
            assert apart[name].startswith(f"{name} must be the same on every rank of group")
        assert apart["DTensor"].startswith("weight must be a plain tensor with group")
    for name in ("head.weight", "head.bias"):
        together = torch.cat([heads[name] for _, heads, _ in found])
        torch.testing.assert_close(together, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
