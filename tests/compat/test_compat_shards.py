"""The frameworks' functions over vocabulary shards against whole ones, on two ranks."""

import sys
import types

import pytest
import torch
from ranks import results_of_ranks

from klfast.compat import ms_swift, verl

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
WORDS, FIRST = 23, 9
"""Of all, and of rank 0."""


def batch():
    """(logits, teacher's logits, token ids), the same in every process."""
    torch.manual_seed(0)
    return *torch.randn(2, 3, 5, WORDS, dtype=torch.float64), torch.randint(WORDS, (3, 5))


def by_the_textbook(logits, teacher, ids):
    """Name -> the numbers of whole vocabularies."""
    logprobs, ref_logprobs = logits.log_softmax(-1), teacher.log_softmax(-1)
    taken = logprobs.gather(-1, ids[..., None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return {
        "log-probs": taken,
        "entropy": entropy,
        "entropy in chunks": entropy,
        "kl": (ref_logprobs.exp() * (ref_logprobs - logprobs)).sum(-1),
    }


def as_megatron(group):
    """``megatron.core`` that knows its tensor-parallel ranks, and nothing else."""
    state = types.ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_group = lambda: group
    for name in ("megatron", "megatron.core"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["megatron.core.parallel_state"] = state


def differentiated(call, *models):
    leaves = [model.clone().requires_grad_() for model in models]
    found = call(*leaves)
    weights = torch.linspace(0.5, 1.5, found.numel(), dtype=found.dtype).view(found.shape)
    return found.detach(), *torch.autograd.grad((weights * found).sum(), leaves)


class Normalized(torch.autograd.Function):
    """Log-probs over all shards, as the framework's own log-softmax hands them out."""

    @staticmethod
    def forward(ctx, logits, group):
        ctx.group = group
        total = logits.exp().sum(-1, keepdim=True)
        torch.distributed.all_reduce(total, group=group)
        logprobs = logits - total.log()
        ctx.save_for_backward(logprobs)
        return logprobs

    @staticmethod
    def backward(ctx, grad):
        (logprobs,) = ctx.saved_tensors
        total = grad.sum(-1, keepdim=True)
        torch.distributed.all_reduce(total, group=ctx.group)
        return grad - logprobs.exp() * total, None


def work(rank):
    group = torch.distributed.group.WORLD
    as_megatron(group)
    own = slice(0, FIRST) if rank == 0 else slice(FIRST, WORDS)
    logits, teacher, ids = batch()
    logits, teacher = logits[..., own], teacher[..., own]

    def kl(x, y):
        return ms_swift.vocab_parallel_kl_div(
            Normalized.apply(x, group), Normalized.apply(y, group)
        )

    return {
        "log-probs": differentiated(
            lambda x: verl.vocab_parallel_log_probs_from_logits(x, ids), logits
        ),
        "entropy": differentiated(verl.vocab_parallel_entropy, logits),
        "entropy in chunks": differentiated(
            lambda x: verl.vocab_parallel_entropy_with_chunking(x, 2), logits
        ),
        "kl": differentiated(kl, logits, teacher),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of_ranks(work, tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("name", ["log-probs", "entropy", "entropy in chunks", "kl"])
def test_numbers_and_gradients_are_those_of_whole_vocabularies(ranks, name):
    logits, teacher, ids = batch()
    models = (logits, teacher) if name == "kl" else (logits,)
    wanted = differentiated(
        lambda *x: by_the_textbook(x[0], x[1] if len(x) > 1 else teacher, ids)[name], *models
    )
    of_ranks = [found[name] for found in ranks]
    for numbers, *_ in of_ranks:
        torch.testing.assert_close(numbers, wanted[0], rtol=1e-9, atol=1e-12)
    for place, exact in enumerate(wanted[1:], 1):
        together = torch.cat([of_rank[place] for of_rank in of_ranks], -1)
        torch.testing.assert_close(together, exact, rtol=1e-9, atol=1e-12)
