"""The example of docs/rollout.md runs, and its tables name fields and presets that exist."""

import re
import statistics
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
    assert len(rules) == 9
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


def test_one_head_precision():
    """The tokens are drawn from the exact model, and the server only reports their log-probs."""
    hidden, weight = torch.randn(64, 128).bfloat16(), (0.35 * torch.randn(8192, 128)).bfloat16()
    exact = hidden.float() @ weight.float().T
    token_ids = exact.softmax(-1).multinomial(1)[:, 0]
    of_server = {
        head: logits.float().log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
        for head, logits in (("fp32", exact), ("bf16", exact.bfloat16()))
    }
    of_trainer = {
        "`linear_token_logprobs`": klfast.linear_token_logprobs(hidden, weight, token_ids),
        "`token_logprobs` of bf16 logits": klfast.token_logprobs(exact.bfloat16(), token_ids),
    }
    rows = re.findall(r"^\| (fp32|bf16) \| (.+) \| (.+) \|$", section("One head precision"), re.M)
    assert len(rows) == 3
    for head, trainer, shown in rows:
        pair = of_trainer[trainer][None], of_server[head][None]
        k3 = klfast.rollout_correction(*pair).stats.to_floats()["rollout/k3"]
        below = re.fullmatch(r"below (.+)", shown)
        assert k3 < float(below[1]) if below else float(shown) / 3 < k3 < float(shown) * 3


def categorical(size=12):
    """Log-probs of a policy, with a gradient, and of its sampler, over a vocabulary."""
    logits = torch.randn(size, dtype=torch.float64).requires_grad_()
    noise = 0.3 * torch.randn(size, dtype=torch.float64)
    return logits, logits.log_softmax(-1), (logits.detach() + noise).log_softmax(-1)


def test_a_kl_to_the_sampler():
    """Over all tokens, weighted by the sampler: the value and gradient of each divergence."""
    logits, p, q = categorical()
    left = readme.run(
        "sampler-kl",
        readme.code("sampler-kl").replace("mask,", "mask, weights=q.exp()[None],"),
        klfast=klfast,
        logprobs=p[None],
        rollout_logprobs=q[None],
        mask=None,
        normalizer=1.0,
        tau=0.7,
        q=q,
    )
    expected = {
        "forward": (q.exp() * (q - p)).sum(),
        "reverse": (p.exp() * (p - q)).sum(),
        "squared": (0.7 * q.exp() * (p - q).square()).sum(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(left[name], value)
        grads = (torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (left[name], value))
        torch.testing.assert_close(*grads)


def test_score_centering_by_enumeration():
    """The expected gradient over the sampler's tokens, each of which is drawn once."""

    def expected_gradient(rewards, k):
        """Of the block, with a completion of one token for each token."""
        best = [*q.sort(descending=True).indices[:k].tolist()]
        outputs = [
            [{i: SimpleNamespace(logprob=q[i].item()) for i in dict.fromkeys([y, *best])}]
            for y in range(12)
        ]
        left = readme.run(
            "score-centering",
            readme.code("score-centering").replace("outputs, 8", f"outputs, {k}"),
            torch=torch,
            klfast=klfast,
            outputs=outputs,
            logits=logits.expand(12, 1, 12),
            advantages=12 * q.exp()[:, None] * rewards[:, None],
        )
        return torch.autograd.grad(left["loss"], logits)[0]

    drift, ones = [], torch.ones(12)
    for _ in range(65):
        logits, p, q = categorical()
        (plain,) = torch.autograd.grad(-(q.exp() * p).sum(), logits)
        torch.testing.assert_close(expected_gradient(ones, 12), 0 * plain, rtol=0, atol=1e-6)
        drift.append((expected_gradient(ones, 4).norm() / plain.norm()).item())
    assert 0.2 < statistics.median(drift) < 0.5  # the page says a third
    rewards = torch.randn(12)
    centred = q.exp() * (rewards - q.exp() @ rewards.double())
    covariance = torch.autograd.grad(-(centred * logits.log_softmax(-1)).sum(), logits)[0]
    torch.testing.assert_close(expected_gradient(rewards, 12), covariance, rtol=0, atol=1e-6)


def test_a_group_s_baseline_leaves_out_rejected_completions():
    rewards = torch.tensor([1.0, 3.0, 100.0, 5.0, 7.0, 2.0])
    kept = torch.tensor([4.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    corrected = SimpleNamespace(stats=SimpleNamespace(kept=kept))
    given = {"torch": torch, "corrected": corrected, "rewards": rewards, "group_size": 3}
    left = readme.run("rollout-baseline", **given)
    assert left["advantages"].flatten().tolist() == [-1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("threshold", [0.04, 1e-9, 1e9])
def test_the_mask_of_m2po(threshold):
    """AReaL drops one token after another until the mean of the others is below the threshold."""
    x, mask = torch.randn(6, 9, dtype=torch.float64), torch.rand(6, 9) < 0.8
    code = readme.code("m2po").replace("0.04", str(threshold))
    given = {"torch": torch, "old_logprobs": x, "rollout_logprobs": torch.zeros(6, 9), "mask": mask}
    left = readme.run("m2po", code, **given)
    values = sorted(x[mask].square().tolist(), reverse=True)
    while len(values) > 1 and sum(values) / len(values) >= threshold:
        values.pop(0)
    assert torch.equal(left["mask"], mask & (x.square() <= values[0]))
