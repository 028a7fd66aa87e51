"""Calls over a vocabulary as models make them, and their comparison with the reference in float64,
within what rounding may do, by the engine of ``klfast check``.
"""

import contextlib

import oracle
import torch

from klfast.cli.check.calls import Call
from klfast.cli.check.compare import found_by, truth_of, wrong_of


def wrong(backend, function, leaves, kept=None, within=None, **arguments):
    """What of a call's results and of the gradients of the leaves is further from the truth.

    ``kept`` says which tokens exist. The backend is called in the context ``within``.
    """
    tensors = {n: t.detach().cpu() for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    options = {n: value for n, value in arguments.items() if n not in tensors}
    call = Call(function, tensors, options, leaves, kept=kept)
    truth = truth_of(call)
    with within or contextlib.nullcontext():
        found = found_by(call, backend, torch.get_default_device())
    if {"logits", "ref_logits"} <= tensors.keys():
        slack = _slack(tensors, options.get("temperature", tensors.get("temperature", 1.0)))
        for name in leaves:
            truth.allowed[f"gradient of {name}"] += slack
    return wrong_of(call, truth, found)


def _slack(tensors, temperature):
    """How far gradients are off where few words decide or a model excludes some. The draws of
    roundings cancel there: some roundings of each word and its log-ratio.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().view(*temperature.shape, *[1] * (3 - temperature.dim()))
    logits = [tensors[name] for name in ("logits", "ref_logits")]
    log_p, log_q = ((t.double() / temperature).log_softmax(-1).clamp(min=-1e6) for t in logits)
    most, u = torch.maximum(log_p, log_q), (log_p - log_q).abs()
    is_few = ((most.exp() > 0.9) | (u > 1e5)).any(-1, keepdim=True)
    u = u.clamp(max=100)
    off = 1 - most + u + (most.exp() * u).sum(-1, keepdim=True)
    unit = 8 * torch.finfo(oracle.arithmetic_dtype(*logits)).eps
    return torch.where(is_few, unit * most.exp() * off / temperature, 0.0)


def models(*shape, dtype=torch.float32, apart=0.5):
    """(logits, ref_logits), the reference ``apart`` beside the policy."""
    logits = 2.5 * torch.randn(shape, dtype=torch.float64)
    ref_logits = logits + apart * torch.randn(shape, dtype=torch.float64)
    return logits.to(dtype), ref_logits.to(dtype)


def teacher(*shape, entries=4, dtype=torch.float32, apart=0.5):
    """The arguments of ``topk_kl_divergence``: a teacher's likeliest words, in no order."""
    logits, other = models(*shape, dtype=dtype, apart=apart)
    top = other.double().log_softmax(-1).topk(entries)
    order = torch.rand(top.indices.shape).argsort(-1)
    ids, values = (t.gather(-1, order) for t in (top.indices, top.values))
    return {"logits": logits, "ref_token_ids": ids, "ref_logprobs": values.float()}
