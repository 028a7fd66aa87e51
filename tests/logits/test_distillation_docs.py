"""The pages about sparse teachers, kept token ids and baselines. Each block runs, and each number
is computed.
"""

import re
from types import SimpleNamespace

import pytest
import readme
import torch

import klfast
from klfast.types.names import TAILS

PAGE = (readme.ROOT / "docs" / "distillation.md").read_text()
ROLLOUT = " ".join((readme.ROOT / "docs" / "rollout.md").read_text().split())
PRINTED = re.compile(r"^# (.*)$", re.MULTILINE)


def run(name, capsys, **given):
    """Run a block, which prints the text of its comments. Return the names that it leaves."""
    left = readme.run(name, torch=torch, klfast=klfast, **given)
    lines = capsys.readouterr().out.splitlines()
    assert lines == PRINTED.findall(readme.code(name))
    assert lines
    return {key: value for key, value in left.items() if key not in ("torch", "klfast")}


def test_the_loss_of_a_sparse_teacher():
    logits = torch.randn(2, 5, 30, requires_grad=True)
    top = torch.randn(2, 5, 30).log_softmax(-1).topk(4)
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    logged = {}
    readme.run(
        "sparse-teacher",
        klfast=klfast,
        logits=logits,
        ref_token_ids=top.indices,
        ref_logprobs=top.values,
        mask=mask,
        log=logged.update,
    )
    words = logits.detach().log_softmax(-1).gather(-1, top.indices).exp()
    teacher = top.values.exp()
    rest, teachers_rest = 1 - words.sum(-1), 1 - teacher.sum(-1)
    terms = (teacher * (teacher / words).log()).sum(-1) + teachers_rest * (
        teachers_rest / rest
    ).log()
    torch.testing.assert_close(logged["distillation/kl"], terms[mask].mean())
    assert logits.grad[mask].abs().amin(-1).gt(0).all()


def test_the_numbers_of_the_tails_and_of_both_traps(capsys):
    left = run("tails", capsys)
    teacher, logits = left["teacher"], left["logits"].detach()
    mass = left["ref_logprobs"].exp().sum().item()
    assert f"have {mass:.0%} of its probability".replace("%", " %", 1) in PAGE
    left = run("detached", capsys, **left)
    assert torch.equal(left["logits"], logits)
    assert torch.equal(left["teacher"], teacher)
    run("proportions", capsys, **left)
    ids, logprobs = left["ref_token_ids"][:, :1], left["ref_logprobs"][:, :1]
    with pytest.raises(ValueError, match=r"tail must not be 'renormalize' with one"):
        klfast.topk_kl_divergence(logits, ids, logprobs, tail="renormalize")


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("tail", TAILS)
def test_each_tail_leads_where_the_table_says(tail, direction):
    """Free logits move to the least loss."""
    teacher = (2 * torch.randn(1, 16, dtype=torch.float64)).log_softmax(-1)
    top = teacher.topk(4)
    logits = torch.zeros(1, 16, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        kl = klfast.topk_kl_divergence(
            logits, top.indices, top.values, tail=tail, direction=direction, reduction="token-mean"
        )
        kl.backward()
        return kl

    optimizer.step(loss)
    p = top.values.exp()
    q = logits.detach().softmax(-1).gather(-1, top.indices)
    least = p
    if tail == "drop":
        least = p / p.sum() if direction == "forward" else p / torch.e
    if tail == "renormalize":
        p, q = p / p.sum(), q / q.sum()
        least = p
        assert not torch.allclose(logits.softmax(-1).gather(-1, top.indices), top.values.exp())
    torch.testing.assert_close(q, least, rtol=2e-3, atol=0)


def test_the_table_has_every_tail():
    table = PAGE.partition("## Which tail")[2].partition("On the K tokens")[0]
    assert sorted(re.findall(r'^\| `"(\w+)"` \|', table, re.MULTILINE)) == sorted(TAILS)


def test_vllms_lists_are_the_top_k_and_the_sampled_token():
    """Two requests of 7 and 5 tokens, with the shift of docs/grpo.md and the page's own losses."""
    models = torch.randn(2, 2, 7, 50, dtype=torch.float64)
    teacher, logits = models.log_softmax(-1)[:, :, :-1]
    lengths = (7, 5)
    input_ids = torch.randint(50, (2, 7))
    token_ids = input_ids[:, 1:]
    outputs = []
    for row, ids, length in zip(teacher, token_ids.tolist(), lengths, strict=True):
        kept = [{*row[t].topk(20).indices.tolist(), ids[t]} for t in range(length - 1)]
        entries = [{i: row[t, i].item() for i in each} for t, each in enumerate(kept)]
        outputs.append(SimpleNamespace(prompt_logprobs=[None, *entries]))
    completion = torch.arange(6).expand(2, 6) >= 2
    left = readme.run(
        "opd-vllm",
        torch=torch,
        klfast=klfast,
        outputs=outputs,
        token_ids=token_ids,
        mask=completion,
    )
    assert left["mask"].sum(1).tolist() == [4, 2]
    exists = torch.arange(6) < torch.tensor(lengths)[:, None] - 1
    top = teacher.topk(20)
    assert torch.equal(left["ref_token_ids"][exists], top.indices[exists])
    torch.testing.assert_close(left["ref_logprobs"][exists].double(), top.values[exists])
    sampled = teacher.gather(-1, token_ids[..., None])[..., 0]
    torch.testing.assert_close(left["teacher_logprobs"][exists].double(), sampled[exists])
    given = {name: left[name] for name in ("ref_token_ids", "ref_logprobs", "teacher_logprobs")}
    given |= {"mask": left["mask"], "logits": logits.requires_grad_(), "token_ids": token_ids}
    loss = readme.run("opd-tail", klfast=klfast, old_logprobs=None, **given)["loss"]
    q = logits.detach().gather(-1, top.indices)
    terms = (q.exp() * (q - top.values) - q.exp() + top.values.exp()).sum(-1)
    mine = logits.detach().gather(-1, token_ids[..., None])[..., 0]
    outside = (top.indices != token_ids[..., None]).all(-1)
    terms += outside * ((sampled - mine).expm1() - (sampled - mine))
    torch.testing.assert_close(loss.detach(), terms[left["mask"]].mean(), rtol=1e-5, atol=1e-6)


def test_words_that_a_sampler_left_out():
    """Only the sampler has top-p 0.9. Without the replay x is the log of the kept mass."""
    logits = 2 * torch.randn(4, 256, 512)
    probs, words = logits.softmax(-1).sort(-1, descending=True)
    left_out = probs.cumsum(-1) - probs > 0.9
    probs = probs.masked_fill(left_out, 0)
    drawn = probs.flatten(0, 1).multinomial(1).view(4, 256, 1)
    mass = probs.sum(-1)
    given = {
        "token_ids": words.gather(-1, drawn)[..., 0],
        "rollout_logprobs": (probs.gather(-1, drawn)[..., 0] / mass).log(),
        "mask": torch.ones(4, 256, dtype=torch.bool),
    }
    whole = klfast.token_logprobs(logits, given["token_ids"])
    biased = klfast.rollout_correction(whole, given["rollout_logprobs"], given["mask"])
    torch.testing.assert_close(biased.weights, mass)
    kl = biased.stats.as_dict()["rollout/kl"].item()
    assert kl == pytest.approx(-mass.log().mean().item(), rel=1e-4)
    assert f"mean ratio is {biased.weights.mean():.2f} and `kl` {kl:.2f} nats" in ROLLOUT
    assert f"300 tokens is e^\N{MINUS SIGN}{300 * kl:.0f}" in ROLLOUT
    kept = words.masked_fill(left_out, -1)
    kept[0, 0] = words[0, 0, -1]  # a kept set without the sampled id
    assert words[0, 0, -1] != given["token_ids"][0, 0]
    left = readme.run(
        "kept-words", torch=torch, klfast=klfast, logits=logits.requires_grad_(), kept=kept, **given
    )
    assert (~left["mask"]).nonzero().tolist() == [[0, 0]]
    torch.testing.assert_close(left["corrected"].weights, left["mask"].float())
    assert abs(left["corrected"].stats.as_dict()["rollout/kl"]) < 1e-6
    (grad,) = torch.autograd.grad(left["logprobs"].sum(), logits)
    unsorted = torch.zeros_like(left_out).scatter(-1, words, left_out)
    assert not grad[1:][unsorted[1:]].any()
    assert grad[1:][~unsorted[1:]].all()

    code = readme.code("kept-words").replace(
        "few = logits.gather(-1, kept.clamp(min=0))\n# or: ", ""
    )
    hidden, weight = torch.randn(4, 256, 8), torch.randn(512, 8)
    named = {"torch": torch, "klfast": klfast, "hidden": hidden, "weight": weight, "kept": kept}
    left = readme.run("kept-words", code, **named, **given)
    few = (hidden @ weight.T).masked_fill(unsorted, -torch.inf).log_softmax(-1)
    expected = few.gather(-1, given["token_ids"][..., None])[..., 0]
    torch.testing.assert_close(left["logprobs"][left["mask"]], expected[left["mask"]])


def test_a_kl_in_the_advantages_and_its_baselines():
    logits = torch.randn(3, 7, 20, requires_grad=True)
    ref_logits, token_ids = torch.randn(3, 7, 20), torch.randint(20, (3, 7))
    advantages, mask = torch.randn(3, 7), torch.rand(3, 7) < 0.7
    left = readme.run(
        "kl-advantages",
        klfast=klfast,
        logits=logits,
        ref_logits=ref_logits,
        token_ids=token_ids,
        mask=mask,
        advantages=advantages,
        c=0.1,
    )
    p, q = (z.detach().log_softmax(-1) for z in (logits, ref_logits))
    x = (p - q).gather(-1, token_ids[..., None])[..., 0]
    kl = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(
        left["centred"][mask], (advantages + 0.1 * (x[mask].mean() - x))[mask]
    )
    torch.testing.assert_close(left["exact"][mask], (advantages + 0.1 * (kl - x))[mask])
    assert not left["centred"].requires_grad
    assert not left["exact"].requires_grad


def test_the_noise_of_each_baseline(capsys):
    run("kl-baselines", capsys)
    near = readme.code("kl-baselines").replace("[0.1] * 48 + [2.0] * 16", "[0.1] * 64")
    readme.run("kl-baselines", near.replace(":.0f}", ":.4f}"), torch=torch, klfast=klfast)
    printed = [float(n) for n in re.findall(r": ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)]
    assert len(printed) == 3
    assert max(printed) < 1.01 * min(printed)
