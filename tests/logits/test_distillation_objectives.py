"""The bias and noise of each objective in docs/distillation.md, over a small vocabulary.

The batch has each token once, and the mask is the sampler's probability of it. A sum over the batch
is then the expectation over the sampled token.
"""

import re

import pytest
import readme
import torch

import klfast

PAGE = re.sub(r"\s+", " ", (readme.ROOT / "docs" / "distillation.md").read_text())
V, K = 64, 8
RANKS = torch.arange(1, V + 1, dtype=torch.float64)
STUDENT = -1.5 * RANKS.log()  # logits: the token of rank r has a probability of about r^-1.5
TEACHER = (STUDENT + (2.4 * RANKS).sin()).log_softmax(-1)
CURRENT = STUDENT.log_softmax(-1)
OLD = (STUDENT + 0.5 * (3.7 * RANKS).sin()).log_softmax(-1)
SAMPLED, TAIL = readme.code("opd-sampled"), readme.code("opd-tail")
DROP = TAIL.replace('"generalized"', '"drop"')
CODES = {
    "sampled token, `k1`": SAMPLED.replace('"k3+"', '"k1"'),
    "sampled token, `k3+`": SAMPLED,
    "with a baseline": readme.code("opd-baseline"),
    "student's top-K": readme.code("opd-student"),
    "top-K and the sampled token": TAIL,
    "full vocabulary, logits": readme.code("opd-full"),
    "full vocabulary, hidden states": readme.code("opd-hidden"),
}
for name in ("bucket", "generalized", "drop", "renormalize"):
    call = readme.code("sparse-teacher").replace("mask,", f'mask, tail="{name}",')
    CODES[f'teacher\'s top-K, `"{name}"`'] = f"{call}\nloss = found.kl"
ROWS = {
    re.sub(r"\[|\]\([^)]*\)", "", name): (bias, noise)
    for name, bias, noise in re.findall(
        r"\| ((?:\[|sam|tea)[^|]+) \| [^|]+ \| ([^|]+) \| ([^|]+) \| [^|]+ \| [^|]+ \|", PAGE
    )
}


def found(code, sampler, old_logprobs, direction="reverse", k=K):
    """(bias of the value, of the gradient, noise) of a block's loss, relative to the exact KL."""
    logits = STUDENT.expand(1, V, V).clone().requires_grad_()
    ids = TEACHER.topk(k).indices.expand(1, V, k)
    heads = dict.fromkeys(("weight", "teacher_weight"), torch.eye(V, dtype=torch.float64))
    given = dict.fromkeys(("teacher_hidden", "teacher_logits"), TEACHER.expand(1, V, V))
    given |= {"logits": logits, "hidden": logits, "teacher_at": TEACHER.__getitem__, "K": k}
    given |= {"token_ids": torch.arange(V)[None], "teacher_logprobs": TEACHER[None]}
    given |= {"ref_token_ids": ids, "ref_logprobs": TEACHER[ids], "mask": sampler.exp()[None]}
    given |= {"old_logprobs": old_logprobs[None], "log": lambda values: None, "klfast": klfast}
    left = readme.run("of an objective", code, **given, **heads)
    if logits.grad is None:
        left["loss"].backward()
    value = left["loss"].item() + left.get("baseline", torch.zeros(1, 1))[0, 0].item()
    gradient = logits.grad[0].sum(0)
    each = logits.grad[0] / sampler.exp()[:, None]
    noise = (sampler.exp() @ (each - gradient).square().sum(-1)).sqrt()
    leaf = STUDENT[None].clone().requires_grad_()
    kl = klfast.kl_divergence(leaf, TEACHER[None], direction=direction).sum()
    (exact,) = torch.autograd.grad(kl, leaf)
    error = (gradient - exact[0]).norm()
    return value / kl.item() - 1, (error / exact.norm()).item(), (noise / exact.norm()).item()


def percent(bias):
    return f"{bias:.0%}".replace("%", " %") if abs(bias) > 1e-9 else "0"


@pytest.mark.parametrize("name", CODES)
def test_bias_and_noise_are_those_of_the_table(name):
    direction = "forward" if name.startswith("teacher") else "reverse"
    noises = []
    for sampler in (CURRENT, OLD):
        value, gradient, noise = found(CODES[name], sampler, sampler, direction)
        bias, of_gradient = (
            ROWS[name][0].replace("\N{MINUS SIGN}", "-").replace("+", "").split(", ")
        )
        assert (percent(value), percent(gradient)) == (bias, of_gradient)
        noises.append(f"{noise:.1f}" if noise > 1e-6 else "0")
    assert ", ".join(noises) == ROWS[name][1]


def test_the_numbers_of_the_sentences():
    """Sentences about missing weights of an older policy and mismatched parts; the table of K."""
    assert ROWS.keys() == CODES.keys()
    assert f"policy at {(OLD.exp() * (OLD - CURRENT)).sum():.2f} nats" in PAGE
    for code, sampler in ((SAMPLED, OLD), (TAIL, OLD), (DROP, CURRENT)):
        value, gradient, _ = found(code, sampler, CURRENT)
        of_value = rf"(?:{percent(abs(value))} in value and )?"
        assert re.search(rf"off by {of_value}{percent(gradient)} in gradient", PAGE)
    pairs = [found(DROP.replace('"k3+"', '"k1"'), each, each) for each in (CURRENT, OLD)]
    assert max(abs(bias) for pair in pairs for bias in pair[:2]) < 1e-9
    assert f"a noise of {pairs[0][2]:.1f} and {pairs[1][2]:.1f}" in PAGE
    for k in (K, 32):
        mass = percent(TEACHER.topk(k).values.exp().sum())
        gradient = percent(found(CODES["student's top-K"], CURRENT, CURRENT, k=k)[1])
        noise = found(TAIL, CURRENT, CURRENT, k=k)[2]
        assert f"| {k} | {mass} | {gradient} | {noise:.1f} |" in PAGE
