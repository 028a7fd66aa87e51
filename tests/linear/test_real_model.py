"""docs/real_model.md on two ranks, with a tiny model instead of transformers and peft."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import readme
import torch
import torch.distributed.checkpoint
from ranks import here, on_ranks
from torch.distributed.fsdp import fully_shard

import klfast

WRAPPERS = {"ddp": torch.nn.parallel.DistributedDataParallel, "fsdp2": fully_shard}


class Body(torch.nn.Module):
    """A bigram model with an adapter, with the attributes that the page uses."""

    def __init__(self, has_adapter=True):
        super().__init__()
        self.embed = torch.nn.Embedding(17, 6, dtype=torch.float64).requires_grad_(False)
        self.adapter = torch.nn.Linear(6, 6, dtype=torch.float64)
        self.has_adapter = has_adapter

    def forward(self, input_ids, attention_mask):
        hidden = self.embed(input_ids) * attention_mask[..., None]
        hidden = hidden + self.adapter(hidden) if self.has_adapter else hidden
        return SimpleNamespace(last_hidden_state=hidden)


class Model(torch.nn.Module):
    def __init__(self, trains_head):
        super().__init__()
        self.model = Body()
        self.lm_head = torch.nn.Linear(6, 17, bias=False, dtype=torch.float64)
        self.lm_head.requires_grad_(trains_head)

    def get_base_model(self):
        return self

    @contextlib.contextmanager
    def disable_adapter(self):
        self.model.has_adapter = False
        yield
        self.model.has_adapter = True


def make_batch():
    """(input ids, attention mask, advantages, completion mask) of six completions."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.arange(9) < torch.tensor([9, 3, 7, 2, 8, 5])[:, None]
    input_ids = torch.randint(17, (6, 9), generator=generator)
    advantages = torch.randn(6, 1, dtype=torch.float64, generator=generator)
    return input_ids, mask.long(), advantages, mask & (torch.arange(9) > 1)


def textbook(model):
    """The gradient of the whole batch's loss and its mean KL, by autograd over the logits."""
    input_ids, attention_mask, advantages, mask = make_batch()
    hidden = model.model(input_ids, attention_mask).last_hidden_state[:, :-1]
    with torch.no_grad(), model.disable_adapter():
        ref_hidden = model.model(input_ids, attention_mask).last_hidden_state[:, :-1]
    head = model.lm_head.weight
    p, q = (hidden @ head.T).log_softmax(-1), (ref_hidden @ head.detach().T).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    logprobs = p.gather(-1, input_ids[:, 1:, None])[..., 0]
    loss = (0.001 * kl - advantages * logprobs)[mask[:, 1:]].mean()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.autograd.grad(loss, trained), kl[mask[:, 1:]].mean().item()


@pytest.mark.parametrize("trains_head", [False, True], ids=["lora", "trained-head"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks
def test_the_gradient_and_the_kl_are_those_of_the_whole_batch(wrapper, trains_head):
    rank, _, _ = here()
    torch.manual_seed(1)
    model = Model(trains_head)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    expected, kl = textbook(model)
    own = [tensor[3 * rank : 3 * rank + 3] for tensor in make_batch()]
    left = readme.run(
        "model-loop",
        klfast=klfast,
        torch=torch,
        KLToReference=readme.run("model-module", torch=torch)["KLToReference"],
        model=model,
        wrap=WRAPPERS[wrapper],
        make_optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        batches=[[*zip(*(tensor.split(2) for tensor in own), strict=True)]],
    )
    after = [p for p in left["trained"].parameters() if p.requires_grad]
    after = [p.full_tensor() if wrapper == "fsdp2" else p for p in after]
    found = [old - new.detach() for old, new in zip(before, after, strict=True)]
    torch.testing.assert_close(found, [*expected], rtol=1e-9, atol=1e-12)
    assert left["numbers"]["kl/token_mean"] == pytest.approx(kl, rel=1e-9)
    assert left["numbers"]["kl/coef"] != 0.001


def made():
    """The module of the page, and its penalty, as the loop makes them."""
    controller = klfast.NuPIKLController(0.001, target=0.05, unit="token", min_coef=1e-4)
    penalty = klfast.KLPenalty(reduction="token-mean", controller=controller)
    module = readme.run("model-module", torch=torch)["KLToReference"]
    return module(Model(False).float(), penalty), penalty


def test_under_autocast_the_kl_is_that_of_bf16_matmuls_in_fp32():
    trained, _ = made()
    input_ids, attention_mask, _, mask = make_batch()
    given = {"input_ids": input_ids, "attention_mask": attention_mask, "mask": mask}
    given |= {"trained": trained, "normalizer": mask[:, 1:].sum(), "device": "cpu", "torch": torch}
    found = readme.run("model-autocast", **given)["found"]
    assert found.kl.dtype == found.logprobs.dtype == torch.float32

    model = trained.model
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids, attention_mask).last_hidden_state[:, :-1]
            with model.disable_adapter():
                ref_hidden = model.model(input_ids, attention_mask).last_hidden_state[:, :-1]
        head = model.lm_head.weight.bfloat16().double()
        p, q = ((h.bfloat16().double() @ head.T).log_softmax(-1) for h in (hidden, ref_hidden))
    kl = (p.exp() * (p - q)).sum(-1)[mask[:, 1:]].mean()
    torch.testing.assert_close(found.kl.double(), 0.001 * kl, rtol=1e-4, atol=0)
    found.kl.backward()
    assert model.model.adapter.weight.grad.dtype == torch.float32
    assert model.model.adapter.weight.grad.any()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_penalty_in_a_distributed_checkpoint(tmp_path):
    (trained, penalty), (other, resumed) = made(), made()
    penalty(torch.randn(2, 5).sub(3), torch.randn(2, 5).sub(3))
    penalty.step()
    save, load = readme.code("model-dcp").split("# in the resumed run\n")
    given = {"torch": torch, "folder": tmp_path}
    readme.run("model-dcp", save, trained=trained, penalty=penalty, **given)
    readme.run("model-dcp", load, trained=other, penalty=resumed, **given)
    assert resumed.state_dict() == penalty.state_dict()
    assert resumed.controller.value != 0.001
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
