"""The example of docs/rollout.md runs, and its tables name fields and presets that exist."""

import re
from types import SimpleNamespace

import pytest
import readme
import torch
from agreement_rollout import sampled

import klfast
from klfast import Rejection, RolloutStats
from klfast.args.rollout_presets import PRESETS
from klfast.stats.rollout import RuleStats

PAGE = (readme.ROOT / "docs" / "rollout.md").read_text()


def section(title, page=PAGE):
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("rejects", [False, True], ids=["as-written", "with-rejection"])
@pytest.mark.parametrize("kind", ["bools", "integers", "floats"])
def test_the_example_divides_both_terms_by_the_count_from_before_the_rejection(kind, rejects):
    pair = sampled((8, 9), spread=0.04)
    logprobs = pair[0].clone().requires_grad_()
    keep = torch.rand(8, 9) < 0.8
    mask = {"bools": keep, "integers": keep.long(), "floats": keep.float()}[kind]
    advantages, logged = torch.randn(8, 9), []
    code = readme.code("rollout")
    rejected = "reject=klfast.Rejection('ratio', 'seq-mean', low=0.99, high=1.01)"
    left = readme.run(
        "rollout",
        code.replace("cap=2.0", f"cap=2.0, {rejected}") if rejects else code,
        klfast=klfast,
        logprobs=logprobs,
        rollout_logprobs=pair[1],
        ref_logprobs=pair[1],
        mask=mask,
        advantages=advantages,
        step=3,
        log=klfast.KLLog(SimpleNamespace(log=lambda values, step: logged.append((values, step)))),
    )
    kept = left["corrected"].mask != 0
    assert 0 < kept.sum() <= keep.sum()
    assert (kept.sum() < keep.sum()) == rejects
    x = pair[0] - pair[1]
    weights = torch.where(kept, x.exp().clamp(max=2.0), 0.0) / keep.sum()
    (grad,) = torch.autograd.grad(left["loss"], logprobs)
    torch.testing.assert_close(grad, weights * (0.01 * x - advantages))
    k3 = torch.expm1(-x) + x
    expected = (weights * (0.01 * k3 - advantages * pair[0])).sum()
    torch.testing.assert_close(left["loss"].detach(), expected)
    ((values, step),) = logged
    assert step == 3
    assert "rollout/k3" in values


def test_the_table_of_presets_is_that_of_the_code():
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| `(.*)` \|$", section("Presets"), re.MULTILINE)
    names = {"Rejection": Rejection}
    assert {name: eval(f"dict({options})", names) for name, options in rows} == {**PRESETS}
    assert eval("klfast.args.rollout_presets.PRESETS", {"klfast": klfast}) is PRESETS


def test_every_rule_of_the_table_is_one():
    rules = re.findall(r"`(Rejection\([^`]+\))`", section("Which rejection criterion"))
    assert len(rules) == 8
    for rule in rules:
        assert isinstance(eval(rule, {"Rejection": Rejection}), Rejection)


def test_the_presets_that_are_named_there_are():
    named = re.findall(r'preset="([\w-]+)"', PAGE)
    assert named
    assert {*named} <= {*PRESETS}


def test_the_numbers_to_watch_are_those_of_as_dict():
    pair = sampled((2, 3))
    logged = klfast.rollout_correction(*pair, backend="reference").stats.as_dict("")
    rows = [line for line in section("What to watch").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named <= set(logged)
    assert {"kl", "k3", "ess", "outside", "nonfinite", "rejected_tokens"} <= named


def test_the_metric_table_names_fields():
    pages = ("frameworks.md", "frameworks/verl.md", "frameworks/trl.md")
    table = "".join((readme.ROOT / "docs" / page).read_text() for page in pages)
    fields = set(re.findall(r"\bs\.(\w+)", table))
    assert fields - {"weight_mean"} <= set(RolloutStats._fields)
    of_rules = re.search(r"s\.rules\[i\]: ([^;]+);", table)[1]
    assert re.findall(r"`(\w+)`", of_rules) == [*RuleStats._fields]
