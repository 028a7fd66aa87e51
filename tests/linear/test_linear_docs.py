"""The code blocks of the page."""

import readme
import torch
from torch import nn

import klfast


def given():
    policy = nn.Module()
    policy.lm_head = nn.Linear(8, 30, bias=False)
    return {
        "klfast": klfast,
        "policy": policy,
        "hidden": torch.randn(2, 5, 8, requires_grad=True),
        "ref_hidden": torch.randn(2, 5, 8),
        "mask": torch.rand(2, 5) < 0.8,
    }


def test_a_scalar_and_log_probs():
    names = given() | {
        "ref_weight": torch.randn(30, 8),
        "token_ids": torch.randint(30, (2, 5)),
        "advantages": torch.randn(2, 5),
    }
    left = readme.run("hidden-states", **names)
    logits, ref_logits = (
        names["hidden"] @ names["policy"].lm_head.weight.T,
        names["ref_hidden"] @ names["ref_weight"].T,
    )
    wanted = klfast.kl_divergence(logits, ref_logits, names["mask"], reduction="token-mean")
    torch.testing.assert_close(left["loss_kl"], wanted)
    assert left["policy_loss"].requires_grad
    assert names["hidden"].grad.any()


def test_a_loss_of_your_own():
    names = given() | {"token_ids": torch.randint(30, (2, 5)), "torch": torch, "normalizer": 7.0}
    names |= {name: -torch.rand(2, 5) for name in ("old_logprobs", "ref_logprobs")}
    names["advantages"] = torch.randn(2, 1)
    left = readme.run("token-loss", **names)
    assert left["stats"].length.sum() == names["mask"].sum()
    head = names["policy"].lm_head.weight
    logprobs = klfast.linear_token_logprobs(names["hidden"], head, names["token_ids"])
    inputs = names["old_logprobs"], names["ref_logprobs"], names["advantages"].expand(2, 5)
    values = left["grpo"](logprobs, *inputs)
    wanted = klfast.reduce(values, names["mask"], reduction="token-mean", normalizer=7.0)
    torch.testing.assert_close(left["loss"], wanted)
    grads = torch.autograd.grad(wanted, [names["hidden"], head])
    torch.testing.assert_close([names["hidden"].grad, head.grad], [*grads], rtol=1e-5, atol=1e-7)


def test_numbers_per_token_under_a_frozen_head():
    names = given() | {"weights": torch.rand(2, 5)}
    left = readme.run("hidden-states-lora", **names)
    assert left["kl"].shape == (2, 5)
    assert names["hidden"].grad.any()
    assert names["policy"].lm_head.weight.grad is None
