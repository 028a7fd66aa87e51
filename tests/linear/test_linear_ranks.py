"""A head on several ranks: DDP, a weight that FSDP2 shards, and vocabulary shards."""

import pytest
import torch
from ranks import here, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import klfast

WIDTH, WORDS, TOKENS = 6, 24, 8


def head():
    torch.manual_seed(4)
    return nn.Linear(WIDTH, WORDS)


def parts():
    """Hidden states of policy and reference."""
    torch.manual_seed(3)
    return torch.randn(2, TOKENS, WIDTH)


class Model(nn.Module):
    def __init__(self, per_token):
        super().__init__()
        self.body, self.head, self.per_token = nn.Linear(WIDTH, WIDTH), head(), per_token

    def forward(self, states):
        hidden, ref_hidden = states
        weight, reduction = self.head.weight, "none" if self.per_token else "token-mean"
        options = {"bias": self.head.bias, "chunk": 3, "reduction": reduction}
        kl = klfast.linear_kl_divergence(self.body(hidden), weight, ref_hidden, **options)
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
    """FSDP shards the head alone, and another module asks for its weight. Or it shards the whole
    model, and frees the storages between the forward and the backward.
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
    assert seen[0].untyped_storage().nbytes() == 0
    loss.backward()
    assert_near(gradients(model), expected)


@pytest.mark.parametrize("per_token", [False, True])
@on_ranks
def test_a_head_in_vocabulary_shards(per_token):
    """The body is the same on both ranks, as are the tokens."""
    rank, _, group = here()
    own, model = slice(*((0, 7), (7, WORDS))[rank]), model_of(per_token)
    hidden, ref_hidden = parts()
    weight, bias = (p.detach()[own].clone().requires_grad_() for p in model.head.parameters())
    options = {"reduction": "none" if per_token else "token-mean", "chunk": 3, "group": group}
    kl = klfast.linear_kl_divergence(model.body(hidden), weight, ref_hidden, bias=bias, **options)
    kl.mean().backward()
    expected = of_one_process(per_token)
    for name, p in model.body.named_parameters():
        assert_near(p.grad, expected[f"body.{name}"])
    assert_near(weight.grad, expected["head.weight"][own])
    assert_near(bias.grad, expected["head.bias"][own])
