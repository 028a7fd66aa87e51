"""The frameworks' functions over vocabulary shards against whole ones, on two ranks."""

import sys
import types
from unittest import mock

import pytest
import torch
from agreement_logits import differentiated
from ranks import here, on_ranks

from klfast.compat import ms_swift, verl

WORDS, FIRST = 23, 9  # the size of the vocabulary, and of rank 0's shard


def batch():
    """(logits, teacher's logits, token ids), the same in every process."""
    torch.manual_seed(0)
    return *torch.randn(2, 3, 5, WORDS, dtype=torch.float64), torch.randint(WORDS, (3, 5))


def by_the_textbook(logits, teacher, ids):
    """Name -> the result over the whole vocabulary."""
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
    """A stand-in for ``megatron.core`` that has the tensor-parallel group and nothing else."""
    state = types.ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_group = lambda: group
    packages = {name: types.ModuleType(name) for name in ("megatron", "megatron.core")}
    return mock.patch.dict(sys.modules, packages | {state.__name__: state})


class Normalized(torch.autograd.Function):
    """Log-probs over all shards, as the framework's own log-softmax returns them."""

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


@pytest.mark.parametrize("name", ["log-probs", "entropy", "entropy in chunks", "kl"])
@on_ranks
def test_numbers_and_gradients_are_those_of_whole_vocabularies(name):
    rank, _, group = here()
    logits, teacher, ids = batch()
    calls = {
        "log-probs": lambda x: verl.vocab_parallel_log_probs_from_logits(x, ids),
        "entropy": verl.vocab_parallel_entropy,
        "entropy in chunks": lambda x: verl.vocab_parallel_entropy_with_chunking(x, 2),
        "kl": lambda *models: ms_swift.vocab_parallel_kl_div(
            *(Normalized.apply(model, group) for model in models)
        ),
    }
    models, own = (
        (logits, teacher)[: 1 + (name == "kl")],
        slice(*((0, FIRST), (FIRST, WORDS))[rank]),
    )
    with as_megatron(group):
        numbers, *gradients = differentiated(calls[name], *(model[..., own] for model in models))
    expected, *whole = differentiated(
        lambda x, y=teacher: by_the_textbook(x, y, ids)[name], *models
    )
    torch.testing.assert_close(numbers, expected, rtol=1e-9, atol=1e-12)
    for found, exact in zip(gradients, whole, strict=True):
        torch.testing.assert_close(found, exact[..., own], rtol=1e-9, atol=1e-12)
