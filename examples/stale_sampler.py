"""A policy gradient on another policy's samples, and how ``rollout_correction`` improves it.

Run it with ``python examples/stale_sampler.py``. A bigram policy with a vocabulary of 6 tokens
writes 5 tokens. All 7776 texts can be summed, so every number is an expectation without noise. The
samplers round logits, sample at another temperature, or have the weights of an earlier step. The
output has a line per sampler with the drift (k3, nats per token) and the error of the expected
policy gradient:

- without correction: from 0.2 % with logits in bf16 to over 100 % with weights of four steps ago
- with a weight per token of at most 2 (the preset "tis"): less by a fifth with logits in fp8, and
  by half or more for the other samplers. The rest comes from the tokens before a token, whose
  distribution this weight does not correct
- with the weight of the whole text, without a bound: none. But it adds noise, which docs/rollout.md
  shows
"""

import torch

import klfast
from klfast.args.rollout_presets import PRESETS

WORDS, LENGTH = 6, 5
WAYS = {
    "uncorrected": {"weight": None},
    "per token": PRESETS["tis"],
    "per text": {"weight": "sequence", "cap": None},
}

torch.manual_seed(0)
policy = (1.5 * torch.randn(WORDS, WORDS, dtype=torch.float64)).requires_grad_()
texts = torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), *[torch.arange(WORDS)] * LENGTH)
before, after = texts[:, :-1], texts[:, 1:]
rewards = torch.randn(WORDS, WORDS, dtype=torch.float64)[before, after].sum(1)


def logprobs_of(logits):
    return klfast.token_logprobs(logits[before], after)


def gradient_of(objective):
    return torch.autograd.grad(objective, policy, retain_graph=True)[0]


logprobs = logprobs_of(policy)
mean_reward = (logprobs.sum(1).exp() * rewards).sum()
truth = gradient_of(mean_reward)
advantages = (rewards - mean_reward.detach())[:, None]

now = policy.detach()
samplers = {
    "bf16": now.bfloat16().double(),
    "fp8": now.float().to(torch.float8_e4m3fn).double(),
    "temperature 0.9": now / 0.9,
    "a step ago": now - 0.5 * truth / truth.norm(),
    "four steps ago": now - 2.0 * truth / truth.norm(),
}
for name, sampler in samplers.items():
    rollout_logprobs = logprobs_of(sampler)
    of_text = rollout_logprobs.sum(1).exp()
    errors = []
    for way, options in WAYS.items():
        corrected = klfast.rollout_correction(logprobs.detach(), rollout_logprobs, **options)
        weights = 1.0 if corrected.weights is None else corrected.weights
        gain = torch.where(corrected.mask, weights * advantages * logprobs, 0.0).sum(1)
        off = gradient_of((of_text * gain).sum()) - truth
        errors.append(f"{way} {off.norm() / truth.norm():.2%}")
    drift = (of_text * corrected.stats.k3).sum() / LENGTH
    print(f"{name}: drift {drift:.1e}, gradient off by {', '.join(errors)}")
