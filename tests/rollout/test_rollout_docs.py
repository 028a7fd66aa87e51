"""docs/rollout.md: its example runs, and what its tables name there is."""

import re

import readme
import torch
from agreement_rollout import sampled

import klfast
from klfast import Rejection, RolloutStats
from klfast.rollout.presets import PRESETS
from klfast.rollout.stats import RuleStats

PAGE = (readme.ROOT / "docs" / "rollout.md").read_text()


def section(title):
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_example_divides_by_the_count_from_before_the_rejection():
    pair = sampled((8, 9), spread=0.04)
    logprobs = pair[0].clone().requires_grad_()
    mask = torch.rand(8, 9) < 0.8
    advantages = torch.randn(8, 9)
    left = readme.run(
        "rollout",
        torch=torch,
        klfast=klfast,
        logprobs=logprobs,
        rollout_logprobs=pair[1],
        ref_logprobs=pair[1],
        mask=mask,
        advantages=advantages,
    )
    kept = left["corrected"].mask
    assert 0 < kept.sum() < mask.sum()
    ratio = (pair[0] - pair[1]).exp().clamp(max=2.0)
    expected = torch.where(kept, -ratio * advantages, 0.0) / mask.sum()
    penalty = klfast.kl_penalty(pair[0], pair[1], kept, reduction="token-sum") / mask.sum()
    (grad,) = torch.autograd.grad(left["loss"], logprobs)
    slope = -0.01 * torch.expm1(pair[1] - pair[0]) * kept / mask.sum()
    torch.testing.assert_close(grad, expected + slope)
    torch.testing.assert_close(left["loss"].detach(), (expected * pair[0]).sum() + 0.01 * penalty)
    assert "rollout/k3" in left["log"]


def test_every_rule_of_the_table_is_one():
    rules = re.findall(r"`(Rejection\([^`]+\))`", section("Which rule"))
    assert len(rules) == 8
    for rule in rules:
        assert isinstance(eval(rule, {"Rejection": Rejection}), Rejection)


def test_the_presets_that_are_named_there_are():
    for name in re.findall(r'PRESETS\["([\w-]+)"\]', PAGE):
        assert name in PRESETS


def test_the_numbers_to_watch_are_those_of_as_dict():
    pair = sampled((2, 3))
    logged = klfast.rollout_correction(*pair, backend="reference").stats.as_dict("")
    rows = [line for line in section("What to watch").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named <= set(logged)
    assert {"kl", "k3", "ess", "outside", "nonfinite", "rejected_tokens"} <= named


def test_the_metric_table_names_fields():
    table = section("Their metrics")
    fields = set(re.findall(r"\bs\.(\w+)", table))
    assert fields - {"weight_mean"} <= set(RolloutStats._fields)
    of_rules = re.search(r"s\.rules\[i\]: ([^;]+);", table)[1]
    assert re.findall(r"`(\w+)`", of_rules) == [*RuleStats._fields]
