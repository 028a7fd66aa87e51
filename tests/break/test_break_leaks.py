"""Memory that calls keep: none, over thousands of them, errors included."""

import ast

import pytest
from fresh import run_fresh

CATEGORY = "leaks"

COMMON = """
import sys, torch, klfast
torch.set_num_threads(1)
a, b = torch.randn(4, 16), torch.randn(4, 16)
z, r = torch.randn(4, 4, 16), torch.randn(4, 4, 16)
ids, mask = torch.zeros(4, 4, dtype=torch.int64), torch.ones(4, 16)
bad = torch.full((4, 16), torch.nan)
edges = torch.tensor([0, 16, 64], dtype=torch.int32)
controller, monitor = klfast.AdaptiveKLController(0.1, 6.0), klfast.KLMonitor(1e9, low=0.0)
estimator = klfast.Estimator("k3", log_ratio_clip=20, kl_clip=10)

def refused(call):
    try:
        call()
    except ValueError:
        return
    raise AssertionError("was accepted")

def trained(call, *leaves):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    call(*leaves).sum().backward()

KINDS = {
    "penalty": lambda: klfast.kl_penalty(a, b, reduction="token-mean"),
    "per token": lambda: klfast.kl_penalty(a, b),
    "options": lambda: klfast.kl_penalty(
        a, b, mask, estimator=estimator, old_logprobs=a, reduction="seq-mean", coef=0.5,
        return_stats=True,
    ),
    "packed": lambda: klfast.kl_penalty(
        a.view(-1), b.view(-1), cu_seqlens=edges, reduction="seq-sum"
    ),
    "rewards": lambda: klfast.kl_rewards(a[:, 0], a, b, kl_coef=0.1),
    "trained": lambda: trained(lambda x: klfast.kl_penalty(x, b, reduction="token-mean"), a),
    "both trained": lambda: trained(lambda x, y: klfast.kl_penalty(x, y), a, b),
    "reference": lambda: klfast.kl_penalty(a, b, reduction="token-mean", backend="reference"),
    "divergence": lambda: klfast.kl_divergence(z, r, reduction="token-mean"),
    "jsd": lambda: klfast.kl_divergence(z, r, direction="jsd", token_ids=ids, return_stats=True),
    "trained divergence": lambda: trained(
        lambda x: klfast.kl_divergence(x, r, reduction="token-mean"), z
    ),
    "tokens": lambda: klfast.token_logprobs(z, ids, return_entropy=True),
    "trained tokens": lambda: trained(lambda x: klfast.token_logprobs(x, ids), z),
    "in place": lambda: trained(
        lambda x: klfast.token_logprobs(x * 1, ids, inplace_backward=True), z
    ),
    "bad mask": lambda: refused(lambda: klfast.kl_penalty(a, b, bad, reduction="token-mean")),
    "bad shape": lambda: refused(lambda: klfast.kl_penalty(a, b[0])),
    "bad ids": lambda: refused(lambda: klfast.token_logprobs(z, ids + 99)),
    "bad name": lambda: refused(lambda: klfast.kl_penalty(a, b, estimator="k9")),
    "forgotten graph": lambda: klfast.kl_penalty(a.detach().requires_grad_(), b),
    "controller": lambda: controller.update(5.0, 8),
    "monitor": lambda: monitor.update(5.0),
    "estimator": lambda: klfast.Estimator("k3", kl_clip=1.0),
}

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

found, calls, limit = {}, *map(int, sys.argv[1:])
for name, kind in KINDS.items():
    for _ in range(calls // 2):
        kind()
    growth = []
    # A leak grows in every round; what the allocator does now and then does not.
    while len(growth) < 3 or (min(growth) >= limit and len(growth) < 12):
        before = resident()
        for _ in range(calls):
            kind()
        growth.append((resident() - before) / calls)
    found[name] = min(growth)
print(found)
"""
LEAST_LEAK = 40
"""Bytes a call: less than one lost object of the smallest kind."""


@pytest.mark.skipif("not __import__('os').path.exists('/proc/self/statm')")
def test_calls_keep_no_memory(hunt):
    calls = 3000 if hunt.whole else 600
    printed = run_fresh(COMMON, arguments=(str(calls), str(LEAST_LEAK)), timeout=600)
    for kind, growth in ast.literal_eval(printed).items():
        hunt.check(growth < LEAST_LEAK, kind, got=f"{growth:.0f} bytes a call, over {calls} calls")
