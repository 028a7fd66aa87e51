"""Memory that calls keep: none, over thousands of them, errors included."""

import ast
import ctypes

import pytest
from fresh import run_fresh

CATEGORY = "leaks"

COMMON = """
import ctypes, gc, sys, torch, klfast
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

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo

def in_use():
    gc.collect()
    info = mallinfo2()
    return info.uordblks + info.hblkhd

found, calls, limit = {}, *map(int, sys.argv[1:])
for name, kind in KINDS.items():
    for _ in range(calls // 2):
        kind()
    growth = []
    # A leak grows in every round; a cache does not.
    while len(growth) < 3 or (min(growth) >= limit and len(growth) < 12):
        before = in_use()
        for _ in range(calls):
            kind()
        growth.append((in_use() - before) / calls)
    found[name] = min(growth)
print(found)
"""
LEAST_LEAK = 16
"""Bytes a call: the smallest block that malloc gives."""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc for the memory in use"
)
def test_calls_keep_no_memory(hunt):
    """By malloc's own account, Python's objects included."""
    calls = 2000 if hunt.whole else 200
    arguments = (str(calls), str(LEAST_LEAK))
    printed = run_fresh(COMMON, arguments=arguments, timeout=600, PYTHONMALLOC="malloc")
    for kind, growth in ast.literal_eval(printed).items():
        hunt.check(growth < LEAST_LEAK, kind, got=f"{growth:.1f} bytes a call, over {calls} calls")
