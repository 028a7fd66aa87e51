"""The launches of klfast and torch, and the memory of a call on a GPU.

The calls go to the emulated CUDA kernels, which count their launches. Torch would launch the aten
ops that the same call dispatches. Incoming gradients belong to the loss and are not counted.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from agreement_logits import tensors_of
from targets import TARGETS, serving
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import klfast
from klfast import backends
from klfast.args import values
from klfast.autograd import context

B, T, V = 2, 5, 40

NO_LAUNCH = {
    *("alias", "as_strided", "detach", "expand", "select", "slice", "squeeze", "unbind"),
    *("unsqueeze", "view", "_unsafe_view", "empty", "empty_strided", "new_empty"),
}
"""Ops of aten that launch nothing: views and unwritten memory. Others count as launches."""


class Cost(NamedTuple):
    """The cost of a forward and a backward."""

    ours: int
    """Launches of klfast's kernels."""
    blocks: int | None
    """Blocks of memory with the results. None if torch runs ops, which take more on a CPU."""
    torchs: str = ""
    """Ops of torch that launch."""


class Case(NamedTuple):
    """A call of one tensor, and the indices of results with a gradient."""

    call: Callable[..., Any]
    first: torch.Tensor
    cost: Cost
    differentiated: tuple[int, ...] = (0,)
    grad_is_expanded: bool = False


class Launching(TorchDispatchMode):
    """Notes the ops of torch that launch."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        namespace, _, name = op._schema.name.partition("::")
        if namespace == "aten" and name not in NO_LAUNCH:
            self.ops.append(name)
        return op(*args, **(kwargs or {}))


MASK = torch.arange(B * T).reshape(B, T) % 4 != 0
IDS = torch.arange(B * T).reshape(B, T)
NUMBERS = torch.randn(2, B, T, generator=torch.Generator().manual_seed(0))
LOGITS = torch.randn(2, B, T, V, generator=torch.Generator().manual_seed(0))


class Computed(torch.autograd.Function):
    """Logits that are no leaf, as a model computes them, in existing memory."""

    memory = torch.empty(B, T, V)

    @staticmethod
    def forward(ctx, logits):
        return Computed.memory.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def logprobs(cost, *, dtype=torch.float32, packed=False, **options):
    """A case of ``kl_penalty``, whose first tensor has a gradient."""
    first, second = NUMBERS.to(dtype)
    if packed:
        first, second = first.view(-1), second.view(-1)
        options = {"cu_seqlens": torch.tensor([0, 3, B * T]), "mask": MASK.view(-1), **options}
    call = functools.partial(klfast.kl_penalty, ref_logprobs=second, **options)
    return Case(call, first, cost)


def rewards(cost, **options):
    """A case of ``kl_rewards``, which has no gradient."""
    first, second = NUMBERS
    options = {"ref_logprobs": second, "kl_coef": 0.1, **options}
    call = functools.partial(klfast.kl_rewards, torch.ones(B), **options)
    return Case(call, first, cost, differentiated=())


def tokens(cost, *, ids=IDS, differentiated=(0,), grad_is_expanded=False, **options):
    """A case of ``token_logprobs``. ``differentiated`` are the results with a gradient."""

    def call(logits, **backend):
        if options.get("inplace_backward"):
            logits = Computed.apply(logits)
        return klfast.token_logprobs(logits, ids, **options, **backend)

    return Case(call, LOGITS[0], cost, differentiated, grad_is_expanded)


def divergence(cost, *, packed=False, differentiated=(0,), **options):
    """A case of ``kl_divergence``, whose first tensor has a gradient."""
    first, second = LOGITS
    if packed:
        first, second = first.view(-1, V), second.view(-1, V)
        options = {"cu_seqlens": torch.tensor([0, 3, B * T]), "mask": MASK.view(-1), **options}
    call = functools.partial(klfast.kl_divergence, ref_logits=second, **options)
    return Case(call, first, cost, differentiated)


TOKEN, SEQUENCE = "token-mean", "seq-mean-token-mean"

CASES = {
    "penalty-none": logprobs(Cost(2, 3), mask=MASK),
    "penalty-sequences": logprobs(Cost(2, 3), mask=MASK, reduction="seq-mean"),
    "penalty-sum": logprobs(Cost(2, 4), mask=MASK, reduction="token-sum"),
    "penalty-mean-of-all": logprobs(Cost(2, 4), reduction=TOKEN),
    "penalty-mean-of-tokens": logprobs(Cost(3, 4), mask=MASK, reduction=TOKEN),
    "penalty-mean-of-sequences": logprobs(Cost(3, 4), mask=MASK, reduction=SEQUENCE),
    "penalty-mean-of-packed": logprobs(Cost(3, 4), packed=True, reduction=TOKEN),
    "penalty-mean-normalized": logprobs(Cost(2, 4), mask=MASK, reduction=TOKEN, normalizer=4.0),
    "penalty-mean-weighted": logprobs(Cost(3, 4), mask=MASK.float(), reduction=TOKEN),
    "penalty-mean-stats": logprobs(Cost(3, 5), mask=MASK, reduction=TOKEN, return_stats=True),
    "penalty-mean-fp16": logprobs(Cost(2, 4), mask=MASK, reduction=TOKEN, dtype=torch.float16),
    "rewards": rewards(Cost(1, 1), mask=MASK),
    "rewards-stats": rewards(Cost(1, 2), mask=MASK, return_stats=True),
    "tokens": tokens(Cost(2, 3)),
    "tokens-mask": tokens(Cost(2, 3), mask=MASK),
    "tokens-weights": tokens(Cost(2, None, "ne"), mask=MASK.float()),
    "tokens-ignored": tokens(Cost(2, None, "ne"), ignore_index=3),
    "tokens-mask-and-ignored": tokens(Cost(2, None, "bitwise_and ne"), mask=MASK, ignore_index=3),
    "tokens-int32": tokens(Cost(2, None, "_to_copy"), ids=IDS.int()),
    "tokens-transposed-ids": tokens(Cost(2, None, "clone"), ids=IDS.T.contiguous().T),
    "tokens-sum": tokens(Cost(2, None, "clone"), grad_is_expanded=True),
    "tokens-inplace": tokens(Cost(2, 2), inplace_backward=True),
    "tokens-and-entropy": tokens(Cost(2, 4), return_entropy=True, differentiated=(0, 1)),
    "tokens-beside-entropy": tokens(Cost(2, 4), return_entropy=True),
    "entropy-alone": tokens(Cost(2, 4), return_entropy=True, differentiated=(1,)),
    "entropy-alone-inplace": tokens(
        Cost(2, 3), return_entropy=True, differentiated=(1,), inplace_backward=True
    ),
    "kl-none": divergence(Cost(4, 6), mask=MASK),
    "kl-mean-of-all": divergence(Cost(4, 6), reduction=TOKEN),
    "kl-mean-of-tokens": divergence(Cost(4, 7), mask=MASK, reduction=TOKEN),
    "kl-mean-of-sequences": divergence(Cost(4, 7), mask=MASK, reduction=SEQUENCE),
    "kl-mean-of-packed": divergence(Cost(4, 7), packed=True, reduction=TOKEN),
    "kl-mean-weighted": divergence(Cost(4, None, "ne"), mask=MASK.float(), reduction=TOKEN),
    "kl-mean-stats": divergence(
        Cost(4, None, "full_like"), mask=MASK, reduction=TOKEN, return_stats=True
    ),
    "kl-forward-mean": divergence(Cost(4, 7), mask=MASK, reduction=TOKEN, direction="forward"),
    "jsd-mean": divergence(Cost(4, 7), mask=MASK, reduction=TOKEN, direction="jsd"),
    "kl-mean-with-tokens": divergence(Cost(4, 9), mask=MASK, reduction=TOKEN, token_ids=IDS),
    "kl-and-entropy": divergence(Cost(4, 7), mask=MASK, return_entropy=True, differentiated=(0, 1)),
    "kl-beside-entropy": divergence(
        Cost(4, 8), mask=MASK, reduction=TOKEN, return_entropy=True, direction="forward"
    ),
    "entropy-beside-kl": divergence(
        Cost(3, 7), mask=MASK, reduction=TOKEN, return_entropy=True, differentiated=(1,)
    ),
    "kl-beside-tokens": divergence(
        Cost(3, 8), mask=MASK, reduction=TOKEN, token_ids=IDS, differentiated=(1,)
    ),
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu():
    """Values are not checked, and hints do not read them."""
    with serving(TARGETS["native-emulated"]), pytest.MonkeyPatch.context() as patch:
        for module in (backends, values):
            patch.setattr(module, "are_checked", lambda *_, **__: False)
        yield


def launches():
    """The launches of klfast's kernels since the process began."""
    return int(torch.ops.klfast_emulated.launches(torch.empty(0)))


def run(case):
    """A function that runs the forward and the backward of a case on existing tensors."""
    first = case.first.clone().requires_grad_(bool(case.differentiated))
    results = tensors_of(case.call(first, backend="native"))
    incoming = [torch.ones_like(results[i]) for i in case.differentiated]
    if case.grad_is_expanded:
        incoming = [torch.ones(()).expand_as(grad) for grad in incoming]

    def forward_and_backward():
        results = case.call(first, backend="native")
        tensors = tensors_of(results)
        outputs = [tensors[i] for i in case.differentiated]
        return results, torch.autograd.grad(outputs, first, incoming) if outputs else None

    return forward_and_backward


def blocks_allocated(call):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)


def cost_of(case):
    call = run(case)
    before = launches()
    call()
    ours = launches() - before
    with Launching() as mode:
        call()
    dispatched = launches() - before - ours
    assert dispatched == ours, "the dispatcher's road launches other kernels"
    blocks = None if mode.ops else blocks_allocated(call)
    return Cost(ours, blocks, " ".join(sorted(mode.ops)))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_call_costs_no_more_than_its_kernels(case):
    assert cost_of(case) == case.cost


@pytest.mark.parametrize("name", ["mean-of-all", "mean-of-tokens", "mean-of-packed", "mean-stats"])
def test_a_scalar_is_read_twice_where_a_cache_holds_it(monkeypatch, name):
    """A forward and a backward are a launch each, and have the bits of one read."""
    case = CASES[f"penalty-{name}"]
    once = run(case)()
    monkeypatch.setattr(context, "cache_size", lambda device: 1 << 20)
    assert cost_of(case) == Cost(2, case.cost.blocks)
    torch.testing.assert_close(run(case)(), once, rtol=0, atol=0)
    monkeypatch.setattr(context, "cache_size", lambda device: 1)
    assert cost_of(case) == case.cost
