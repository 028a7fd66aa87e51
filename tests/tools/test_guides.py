"""Blocks of docs/grpo.md, drop_in.md, logits.md and hidden_states.md, against textbook formulas."""

import json
from types import SimpleNamespace

import pytest
import readme
import torch
from torch import nn

import klfast

GRPO = " ".join((readme.ROOT / "docs" / "grpo.md").read_text().split())


def test_grpo_in_ten_lines():
    """Two micro-batches have the gradient of the whole batch, with clip and penalty."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.nn.Linear(5, 11, dtype=torch.float64)
    inputs = torch.randn(6, 7, 5, dtype=torch.float64, generator=generator)
    token_ids = torch.randint(11, (6, 7), generator=generator)
    mask = torch.arange(7) < torch.tensor([7, 2, 5, 1, 0, 6])[:, None]
    noise = torch.randn(2, 6, 7, dtype=torch.float64, generator=generator)
    logprobs = policy(inputs).log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]
    old_logprobs, ref_logprobs = logprobs.detach() + torch.tensor([0.3, 0.5])[:, None, None] * noise
    given = {"rewards": torch.rand(6, dtype=torch.float64), "group_size": 3, "torch": torch}
    advantages = readme.run("grpo-advantages", **given)["advantages"]
    grouped = given["rewards"].view(2, 3)
    expected = (grouped - grouped.mean(1)[:, None]) / (grouped.std(1)[:, None] + 1e-6)
    torch.testing.assert_close(advantages, expected.view(6, 1))

    ratio = (logprobs - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert not torch.equal(gain, ratio * advantages)
    x = logprobs - ref_logprobs
    loss = -gain + 0.001 * ratio.detach() * x.square() / 2
    (expected,) = torch.autograd.grad((loss[mask]).sum() / mask.sum(), policy.weight)
    batch = (inputs, token_ids, old_logprobs, ref_logprobs, advantages, mask)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    optimizer.zero_grad()
    before = policy.weight.detach().clone()
    left = readme.run(
        "grpo",
        klfast=klfast,
        torch=torch,
        policy=policy,
        micro_batches=[*zip(*(each.split([1, 5]) for each in batch), strict=True)],
        optimizer=optimizer,
    )
    torch.testing.assert_close(before - policy.weight, expected)
    assert policy.weight.grad is None
    k3 = (ratio * (torch.expm1(-x) + x))[mask].mean().item()
    assert abs(left["numbers"]["kl/token_mean"] - k3) < 1e-6 * k3
    own = logprobs.detach().requires_grad_()
    rollout_logprobs = old_logprobs + 0.4 * noise[1]
    weights = (old_logprobs - rollout_logprobs).exp().clamp(max=2.0)
    ratio = (own - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = weights * (-gain + 0.001 * ratio.detach() * (own - ref_logprobs).square() / 2)
    (expected,) = torch.autograd.grad(loss[mask].sum() / mask.sum(), own, retain_graph=True)
    given = {name: left[name] for name in ("klfast", "penalty", "normalizer")}
    given |= {"logprobs": own, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    given |= {"rollout_logprobs": rollout_logprobs, "gain": gain, "mask": mask}
    joined = readme.run("grpo-rollout", **given)["loss"]
    torch.testing.assert_close(torch.autograd.grad(joined, own)[0], expected)

    left = readme.run("grpo-controller", klfast=klfast)
    left["penalty"](logprobs, ref_logprobs, mask)
    assert left["penalty"].step()["kl/coef"] > 0.001  # the KL is above 0.05 nats per token
    free = klfast.NuPIKLController(0.001, target=0.05, unit="token")
    for controller in (free, readme.run("grpo-controller", klfast=klfast)["controller"]):
        for _ in range(60):
            controller.update(0.001, 6)
    assert controller.value == 1e-4
    assert f"move 0.001 to {free.value:.1e}".replace("e-0", "e-") in GRPO


@pytest.mark.parametrize("variant", ["sequence", "token"])
def test_gspo(variant):
    """The published formulas, sequence by sequence. NaN stands where the mask is 0."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(7) < torch.tensor([7, 2, 5, 1, 0, 6])[:, None]
    noise = torch.randn(4, 6, 7, dtype=torch.float64, generator=generator)
    logprobs = (-noise[0].square()).masked_fill(~mask, torch.nan).requires_grad_()
    steps = torch.tensor([1.0, 1, -1, -1, 1, -1], dtype=torch.float64)[:, None]
    old_logprobs = logprobs.detach() - 1e-3 * steps + 1e-5 * noise[1]
    rollout_logprobs = old_logprobs + 1e-4 * noise[2]
    rollout_logprobs[1] += 0.02
    advantages = noise[3].abs() * torch.tensor([[1.0], [1], [1], [-1], [1], [1]])
    advantages = advantages if variant == "token" else advantages[:, :1]
    code = readme.code("gspo")
    if variant == "token":
        code = code.replace("# GSPO-token, for advantages [B, T]: ", "")
    given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
    given |= {"rollout_logprobs": rollout_logprobs, "mask": mask}
    left = readme.run("gspo", code, klfast=klfast, torch=torch, **given)

    total, clipped, rejected = 0, 0, 0
    for row in range(6):
        kept = mask[row]
        if not kept.any():
            continue
        own, old, rollout = (t[row][kept] for t in (logprobs, old_logprobs, rollout_logprobs))
        weight = (old - rollout).mean().exp()
        if not 0.99 <= weight <= 1.01:
            rejected += 1
            continue
        ratio = (own - old).mean().exp()
        if variant == "token":
            ratio = ratio.detach() * own.exp() / own.exp().detach()
        of_tokens = advantages[row][kept] if variant == "token" else advantages[row]
        gain = torch.minimum(ratio * of_tokens, ratio.clamp(1 - 3e-4, 1 + 4e-4) * of_tokens)
        clipped += (gain != ratio * of_tokens).expand_as(own).sum()
        total = total - weight * gain.mean() / 5
    assert clipped == 8  # the first completion and the fourth, which move with their advantages
    assert rejected == 1
    torch.testing.assert_close(left["loss"], total)
    grads = [torch.autograd.grad(loss, logprobs)[0] for loss in (left["loss"], total)]
    torch.testing.assert_close(*(grad[mask] for grad in grads))


def test_a_controller_that_a_checkpoint_leaves_out(tmp_path):
    control = klfast.compat.verl.AdaptiveKLController(0.001, target_kl=0.1, horizon=100)
    resumed = klfast.compat.verl.AdaptiveKLController(0.001, target_kl=0.1, horizon=100)
    control.update(current_kl=0.3, n_steps=64)
    trainer = SimpleNamespace(kl_ctrl_in_reward=control)
    save, load = readme.code("controller-state").split("# in the resumed run")
    left = readme.run("controller-state", save, json=json, folder=tmp_path, trainer=trainer)
    trainer.kl_ctrl_in_reward = resumed
    readme.run("controller-state", load, json=json, file=left["file"], trainer=trainer)
    assert resumed.value == control.value != 0.001


def test_the_shift_by_one_of_packed_sequences():
    """The truth is each sequence alone in float64."""
    cu_seqlens = torch.tensor([0, 5, 8, 12], dtype=torch.int32)
    input_ids, (logits, ref_logits) = torch.randint(30, (12,)), torch.randn(2, 12, 30)
    given = {"logits": logits, "ref_logits": ref_logits, "cu_seqlens": cu_seqlens, "torch": torch}
    left = readme.run("packed-shift", klfast=klfast, input_ids=input_ids, **given)
    logprobs, kl = [], []
    for start, end in ((0, 5), (5, 8), (8, 12)):
        p, q = (z[start : end - 1].double().log_softmax(-1) for z in (logits, ref_logits))
        logprobs.append(p.gather(-1, input_ids[start + 1 : end, None])[:, 0])
        kl.append((p.exp() * (p - q)).sum(-1))
    torch.testing.assert_close(left["logprobs"][left["mask"]], torch.cat(logprobs).float())
    torch.testing.assert_close(left["kl"], torch.cat(kl).mean().float())


def test_a_head_with_an_adapter_or_a_scale():
    torch.manual_seed(0)
    hidden, base = torch.randn(4, 8), torch.randn(32, 8)
    lora_a, lora_b = torch.randn(2, 8, requires_grad=True), torch.randn(32, 2)
    token_ids = torch.tensor([1, 2, 3, 31])
    given = {"klfast": klfast, "hidden": hidden, "token_ids": token_ids}
    left = readme.run(
        "lora-head",
        head=SimpleNamespace(weight=base),
        scaling=0.5,
        lora_a=lora_a,
        lora_b=lora_b,
        **given,
    )
    logits = hidden @ base.T + 0.5 * (hidden @ lora_a.T) @ lora_b.T
    expected = klfast.token_logprobs(logits, token_ids)
    torch.testing.assert_close(left["logprobs"], expected)
    grads = [torch.autograd.grad(x.sum(), lora_a)[0] for x in (left["logprobs"], expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    options = {"logit_scale": 0.25, "softcap": 3.0, "temperature": 0.7}
    left = readme.run("logit-scale", weight=base, **options, **given)
    logits = 3.0 * torch.tanh(0.25 * (hidden @ base.T) / 3.0) / 0.7
    torch.testing.assert_close(left["logprobs"], klfast.token_logprobs(logits, token_ids))


def test_special_tokens_leave_the_kl_and_stay_in_its_denominator():
    token_ids, mask = (
        torch.tensor([[4, 5, 2], [4, 2, 0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0]]) != 0,
    )
    x = torch.tensor([[0.5, -0.25, 8.0], [0.125, 8.0, 8.0]])
    penalty = klfast.KLPenalty("k1", "token-mean")
    given = {"logprobs": x - 8, "ref_logprobs": torch.full((2, 3), -8.0), "mask": mask}
    given |= {"special_ids": torch.tensor([0, 2]), "token_ids": token_ids, "penalty": penalty}
    left = readme.run("special-tokens", torch=torch, **given)
    torch.testing.assert_close(left["loss_kl"], torch.tensor(0.375 / 5))
    assert penalty.step()["kl/token_mean"] == pytest.approx(0.125)


@pytest.mark.parametrize(("beta", "direction"), [(1e-5, "forward"), (1 - 1e-5, "reverse")])
def test_the_jsd_vanishes_towards_the_ends_of_its_beta(beta, direction):
    """Divided by b (1 - b), its value and gradient are those of the KL that the page names."""
    logits = torch.randn(4, 20, dtype=torch.float64, requires_grad=True)
    ref_logits = torch.randn(4, 20, dtype=torch.float64)
    of_jsd = {"direction": "jsd", "jsd_beta": beta, "coef": 1 / (beta * (1 - beta))}
    options = of_jsd, {"direction": direction}
    values = [klfast.kl_divergence(logits, ref_logits, **each).sum() for each in options]
    torch.testing.assert_close(*values, rtol=1e-3, atol=0)
    grads = [torch.autograd.grad(value, logits)[0] for value in values]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


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
