"""The host's part of calls of Triton's kernels, counted with a driver that launches nothing."""

import json
import os
from pathlib import Path

import pytest
from fresh import run_fresh

pytest.importorskip("triton", reason="the Triton backend needs triton: pip install triton")

SUPPORT = str(Path(__file__).parents[1] / "support")
CALLS = """
import json, sys, warnings
from concurrent.futures import ThreadPoolExecutor
import torch
import triton_stub as stub
import klfast
from klfast.backends.triton import plan

warnings.simplefilter("ignore")
BACKEND = {"backend": "triton"}
logprobs, ref_logprobs, old_logprobs = torch.full((3, 2, 512), -1.0)
mask = torch.ones(2, 512, dtype=torch.bool)
logits, ref_logits = torch.zeros(2, 2, 4, 64)
ids = torch.zeros(2, 4, dtype=torch.int64)


def penalty(first=logprobs, *others, grad=False, **options):
    first = first.detach().requires_grad_(grad)
    arguments = others or (ref_logprobs, mask)
    result = klfast.kl_penalty(first, *arguments, **options, **BACKEND)
    if grad:
        torch.autograd.grad(result, first, torch.ones_like(result))


def divergence(grad=False, function=klfast.kl_divergence, second=ref_logits, **options):
    first = logits.detach().requires_grad_(grad)
    result = function(first, second, **options, **BACKEND)
    if grad:
        torch.autograd.grad(result, first, torch.ones_like(result))


def tokens(grad=False, **options):
    divergence(grad, klfast.token_logprobs, ids, **options)
"""


def run(code, tmp_path, **environment):
    path = os.pathsep.join([SUPPORT, os.environ.get("PYTHONPATH", "")])
    made = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    return json.loads(run_fresh(CALLS + code, timeout=600, **made, **environment))


MOST = {
    "forward": 46,
    "mean": 74,
    "sums": 67,
    "divergences": 132,
    "mean divergence": 116,
    "tokens": 74,
}
"""The Python functions of klfast and Triton that run, and a tenth more."""


def test_a_later_call_runs_few_python_functions(tmp_path):
    counted, profiled = run(
        """
calls = {
    "forward": lambda: penalty(reduction="seq-sum"),
    "mean": lambda: penalty(reduction="token-mean", grad=True),
    "sums": lambda: penalty(reduction="seq-sum", grad=True),
    "divergences": lambda: divergence(grad=True),
    "mean divergence": lambda: divergence(reduction="token-mean", grad=True),
    "tokens": lambda: tokens(grad=True),
}
for call in calls.values():
    for _ in range(20):  # hints read values in the first calls
        call()
counted = {name: stub.python_calls(call) for name, call in calls.items()}
seen = []
stub.triton.knobs.runtime.launch_enter_hook = seen.append
calls["sums"]()
print(json.dumps([counted, len(seen)]))
""",
        tmp_path,
    )
    assert not {name: n for name, n in counted.items() if n > MOST[name]}, counted
    assert profiled == 2  # profilers see the launches


def test_later_calls_launch_what_first_calls_do(tmp_path):
    """Calls of many kinds alternate, and each launches the variant that Triton itself finds."""
    different = run(
        """
column = torch.full((512, 2), -1.0).t()
odd = torch.full((1025,), -1.0)[1:].view(2, 512)
edges = torch.tensor([0, 5, 1024])
calls = [
    lambda coef=coef, normalizer=normalizer, first=first, reduction=reduction: penalty(
        first, ref_logprobs[:, : first.shape[1]], coef=coef, normalizer=normalizer,
        reduction=reduction,
    )
    for first in (logprobs, odd, column, logprobs.bfloat16(), logprobs[:, :509], logprobs.double())
    for reduction, normalizer in (("seq-sum", None), ("token-mean", None), ("token-mean", 16.0))
    for coef in (0.0, 1.0, torch.tensor(2))
]
calls += [
    lambda: penalty(grad=True, reduction="token-mean"),
    lambda: penalty(logprobs, ref_logprobs, mask.float(), grad=True, reduction="none"),
    lambda: penalty(logprobs, ref_logprobs, None, grad=True, old_logprobs=old_logprobs),
    lambda: penalty(logprobs, logprobs, None),
    lambda: penalty(logprobs.view(-1), ref_logprobs.view(-1), None, cu_seqlens=edges),
    lambda: penalty(logprobs.view(-1), ref_logprobs.view(-1), None, cu_seqlens=edges.int()),
    lambda: divergence(grad=True, temperature=2.0),
    lambda: divergence(grad=True, direction="jsd", jsd_beta=0.9),
    lambda: divergence(grad=True, direction="jsd", jsd_beta=0.1, mask=mask[:, :4]),
    lambda: divergence(second=torch.zeros(4, 2, 64).transpose(0, 1), reduction="token-mean"),
    lambda: divergence(second=torch.zeros(2, 4, 128)[..., ::2], grad=True),
    lambda: tokens(grad=True, temperature=torch.tensor(2.0)),
    lambda: tokens(grad=True, return_entropy=False),
]
firsts = []
for call in calls:
    plan.PLANS.clear()
    plan._COMPILED.clear()
    firsts.append(stub.launched(call))
plan.PLANS.clear()
plan._COMPILED.clear()
for repeat in range(3):
    for place, (call, first) in enumerate(zip(calls, firsts)):
        if stub.launched(call) != first:
            print(json.dumps([repeat, place]))
            sys.exit()
mean = lambda: penalty(grad=True, reduction="seq-mean-token-mean")  # only one kernel is new
with ThreadPoolExecutor(1) as executor, stub.triton.AsyncCompileMode(executor):
    first = stub.launched(mean)
print(json.dumps(None if stub.launched(mean) == first else "compiled in the background"))
""",
        tmp_path,
    )
    assert different is None


def test_on_amd_large_storages_have_variants_of_their_own(tmp_path):
    """Triton addresses a storage below 2 GiB by 32 bits."""
    found = run(
        """
large = torch.empty(2**29 + 1024)[:1024].view(2, 512)
calls = [lambda first=first: penalty(first, ref_logprobs, None) for first in (logprobs, large)]
small_hash, large_hash = [stub.launched(call)[0][0] for call in calls]
print(json.dumps([small_hash != large_hash, stub.launched(calls[1])[0][0] == large_hash]))
""",
        tmp_path,
        KLFAST_STUB_TARGET="hip",
    )
    assert found == [True, True]


def test_profilers_and_tracers_see_the_ops(tmp_path):
    """A call leaves out torch's dispatcher only if nothing else listens there."""
    seen = run(
        """
from torch.fx.experimental.proxy_tensor import make_fx

function = lambda first: klfast.kl_penalty(first, ref_logprobs, mask, **BACKEND)
with torch.profiler.profile() as profiler:
    function(logprobs)
seen = {
    "profiler": [event.key for event in profiler.key_averages()],
    "make_fx": make_fx(function)(logprobs).code,
    "jit": torch.jit.trace(function, logprobs, check_trace=False).graph,
}
print(json.dumps([name for name, text in seen.items() if "kl_penalty_fwd" in str(text)]))
""",
        tmp_path,
    )
    assert seen == ["profiler", "make_fx", "jit"]
