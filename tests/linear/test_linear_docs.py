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


def test_numbers_per_token_under_a_frozen_head():
    names = given() | {"weights": torch.rand(2, 5)}
    left = readme.run("hidden-states-lora", **names)
    assert left["kl"].shape == (2, 5)
    assert names["hidden"].grad.any()
    assert names["policy"].lm_head.weight.grad is None
