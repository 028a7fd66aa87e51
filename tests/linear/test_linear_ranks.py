"""A head on several ranks: DDP, a weight that FSDP2 shards, and vocabulary shards."""

import pytest
import torch
from ranks import here, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import klfast

WIDTH, WORDS, TOKENS = 6, 24, 8


def parts():
    """Hidden states of policy and reference."""
    torch.manual_seed(3)
    return torch.randn(2, TOKENS, WIDTH)


def reduction_of(per_token):
    return "none" if per_token else "token-mean"


class Model(nn.Module):
    def __init__(self, per_token):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.reduction = reduction_of(per_token)

    def forward(self, states):
        hidden, ref_hidden = states
        options = {"bias": self.head.bias, "chunk": 3, "reduction": self.reduction}
        kl = klfast.linear_kl_divergence(self.body(hidden), self.head.weight, ref_hidden, **options)
        return kl.mean()


def model_of(per_token):
    torch.manual_seed(5)
    return Model(per_token)


def gradients(model):
    return {
        name.removeprefix("module."): getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for name, p in model.named_parameters()
    }


def of_one_process(per_token):
    model = model_of(per_token)
    model(parts()).backward()
    return gradients(model)


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
@on_ranks
def test_gradients_under_ddp_and_fsdp_are_those_of_one_process(per_token):
    """FSDP shards only the head, whose weight another module uses. Or FSDP shards the whole model,
    and frees the storages between the forward and the backward.
    """
    rank, size, _ = here()
    own, expected = parts().chunk(size, 1)[rank], of_one_process(per_token)
    model = nn.parallel.DistributedDataParallel(model_of(per_token))
    model(own).backward()
    assert_near(gradients(model), expected)

    mesh = init_device_mesh("cpu", (size,))
    model = model_of(per_token)
    fully_shard(model.head, mesh=mesh)
    model(own).backward()
    for p in model.body.parameters():  # which is not sharded
        torch.distributed.all_reduce(p.grad)
        p.grad /= size
    assert_near(gradients(model), expected)

    seen, model = [], model_of(per_token)
    model.register_forward_pre_hook(lambda module, _: seen.append(module.head.weight))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    loss = model(own)
    assert type(seen[0]) is nn.Parameter
    assert seen[0].untyped_storage().nbytes() == 0
    loss.backward()
    assert_near(gradients(model), expected)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("per_token", [False, True])
@on_ranks
def test_a_head_in_vocabulary_shards(per_token, size):
    """Two ranks have a shard each and the same tokens. Four ranks are two such pairs under DDP. A
    gradient is not multiplied by the number of ranks. A checkpoint's backward runs the collectives
    again.
    """
    pairs = size // 2
    mesh = init_device_mesh("cpu", (pairs, 2), mesh_dim_names=("dp", "tp"))
    dp, group = mesh["dp"].get_group(), mesh["tp"].get_group()
    at, shard = mesh.get_coordinate()
    own, expected = slice(*((0, 7), (7, WORDS))[shard]), of_one_process(per_token)
    hidden, ref_hidden = parts().chunk(pairs, 1)[at]
    options = {"reduction": reduction_of(per_token), "chunk": 3, "group": group}

    def mean(states, weight, bias):
        kl = klfast.linear_kl_divergence(states, weight, ref_hidden, bias=bias, **options)
        return kl.mean()

    for checkpoints in (False, True):
        model = model_of(per_token)
        model.body = nn.parallel.DistributedDataParallel(model.body, process_group=dp)
        head = [p.detach()[own].clone().requires_grad_() for p in model.head.parameters()]

        arguments = model.body(hidden), *head
        loss = (
            checkpoint(mean, *arguments, use_reentrant=False) if checkpoints else mean(*arguments)
        )
        loss.backward()
        for p in head:
            torch.distributed.all_reduce(p.grad, group=dp)
        found = {f"body.{name}": p.grad for name, p in model.body.module.named_parameters()}
        found |= {
            f"head.{n}": p.grad / pairs for n, p in zip(("weight", "bias"), head, strict=True)
        }
        assert_near(found, {n: g[own] if "head" in n else g for n, g in expected.items()})
