"""Teachers as inference servers send them, and comparisons of calls with the oracle."""

import oracle
import oracle_topk
import torch
from agreement_logits import assert_gradient, leaves, random_logits, uneven

import klfast

TAILS = ("bucket", "renormalize", "generalized", "drop")


def random_teacher(*shape, entries=4, dtype=torch.float32, ref_dtype=None, apart=0.5):
    """(logits, ref_token_ids, ref_logprobs): a teacher's likeliest words, in no order."""
    logits, teacher = random_logits(*shape, dtype=dtype, apart=apart)
    top = teacher.double().log_softmax(-1).topk(entries)
    order = torch.rand(top.indices.shape).argsort(-1)
    ids, values = (t.gather(-1, order) for t in (top.indices, top.values))
    return logits, ids, values.to(ref_dtype or torch.float32)


def assert_topk_agrees(backend, logits, ref_token_ids, ref_logprobs, mask=None, **options):
    """Result, statistics and both gradients of ``topk_kl_divergence`` are the oracle's; either
    gradient alone, and a second time, is the same.
    """
    inputs = leaves(logits, ref_logprobs)

    def call(student, teacher, **others):
        return klfast.topk_kl_divergence(
            student, ref_token_ids, teacher, mask, **options, **others, backend=backend
        )

    found = call(*inputs, return_stats=True)
    result, stats = found.kl, found.stats
    upstream = uneven(result)
    truth = oracle_topk.topk_kl_divergence(
        logits, ref_token_ids, ref_logprobs, mask, upstream=upstream, **options
    )
    assert result.dtype == oracle.arithmetic_dtype(logits)
    oracle.assert_within(result, truth.result, truth.result_tolerance, "result")
    oracle.assert_within(stats.kl, truth.kl, truth.kl_tolerance, "stats.kl")
    oracle.assert_within(stats.length, truth.length, truth.length_tolerance, "stats.length")
    for grads in (torch.autograd.grad(result, inputs, upstream, retain_graph=True) for _ in "12"):
        assert_gradient(grads[0], logits, truth.grad, truth.grad_tolerance, "grad")
        assert_gradient(grads[1], ref_logprobs, truth.grad_ref, truth.grad_ref_tolerance, "ref")
    for given in ((inputs[0], ref_logprobs), (logits, inputs[1])):
        (leaf,) = (t for t in given if t.requires_grad)
        (alone,) = torch.autograd.grad(call(*given), leaf, upstream)
        assert torch.equal(alone, grads[0] if leaf is inputs[0] else grads[1])
