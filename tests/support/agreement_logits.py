"""Logits as training makes them, and comparisons of calls with the reference in float64.

The engine of ``klfast check`` says how far rounding may move a result.
"""

import contextlib
import math

import oracle
import pytest
import torch
from agreement import same_bits
from targets import TARGETS

import klfast
from klfast.cli.check.calls import Call
from klfast.cli.check.compare import found_by, truth_of, wrong_of
from klfast.types.names import DIRECTIONS

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

OF_ONE_WORD = 2**-22 + 2 * 2**-24
"""The relative error of a row's sum if one token id has all the probability. A GPU's ex2.approx is
off by 2**-22, and its argument and its result are rounded. Log-probs, entropies and divergences of
0 have this absolute error."""

COMPILED = [name for name, target in TARGETS.items() if target.backend != "reference"]
"""Targets with their own kernels. The reference cancels as the textbook formulas do, and its last
bits are torch's."""

FAST = [name for name in COMPILED if not TARGETS[name].is_emulated]
"""Targets for a whole vocabulary, which takes the emulator a second."""

NOT_EMULATED = [name for name, target in TARGETS.items() if not target.is_emulated]
"""Targets for tests of the Python code before the kernels, which the emulator shares."""

every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
every_compiled = pytest.mark.parametrize("backend", COMPILED, indirect=True)


def random_logits(*shape, dtype=torch.float32, apart=0.5):
    """(logits, ref_logits). The two models differ by ``apart`` standard deviations."""
    logits = 2.5 * torch.randn(shape, dtype=torch.float64)
    ref_logits = logits + apart * torch.randn(shape, dtype=torch.float64)
    return logits.to(dtype), ref_logits.to(dtype)


def random_ids(logits):
    return torch.randint(logits.shape[-1], logits.shape[:-1])


def uneven(like):
    """An upstream gradient that differs from token to token."""
    steps = torch.linspace(-1, 1.75, like.numel(), dtype=like.dtype, device=like.device)
    return steps.view_as(like)


def leaves(*tensors):
    return tuple(t.detach().requires_grad_() for t in tensors)


def tensors_of(found):
    """The tensors that ``kl_divergence`` returned, in order, without the statistics."""
    if isinstance(found, torch.Tensor):
        return (found,)
    return tuple(part for part in found if isinstance(part, torch.Tensor))


def teacher(*shape, entries=4):
    """The arguments of ``topk_kl_divergence``: a teacher's top-K token ids, in random order."""
    logits, other = random_logits(*shape, dtype=torch.float32, apart=0.5)
    top = other.double().log_softmax(-1).topk(entries)
    order = torch.rand(top.indices.shape).argsort(-1)
    ids, values = (t.gather(-1, order) for t in (top.indices, top.values))
    return {"logits": logits, "ref_token_ids": ids, "ref_logprobs": values.float()}


def wrong(backend, function, leaves, kept=None, within=None, off=0.0, **arguments):
    """Return the results and gradients that are off by more than allowed, and by more than ``off``.

    ``kept`` says which tokens exist. The backend is called in the context ``within``.
    """
    tensors = {n: t.detach().cpu() for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    options = {n: value for n, value in arguments.items() if n not in tensors}
    call = Call(function, tensors, options, leaves, kept=kept)
    truth = truth_of(call)
    for allowed in truth.allowed.values():
        allowed += off
    with within or contextlib.nullcontext():
        found = found_by(call, backend, torch.get_default_device())
    if {"logits", "ref_logits"} <= tensors.keys():
        slack = _slack(tensors, options.get("temperature", tensors.get("temperature", 1.0)))
        for name in leaves:
            truth.allowed[f"gradient of {name}"] += slack
    return wrong_of(truth, found)


def _slack(tensors, temperature):
    """The additional error of gradients if few token ids have the mass or a model excludes some.

    The simulated roundings cancel in such rows. The error is a few roundings of each entry and its
    log-ratio.
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


MODELS = ("logits", "ref_logits")


def assert_divergence_agrees(backend, logits, ref_logits, mask=None, **options):
    """Compare the result, the statistics and the gradients of both models and of each model."""
    given = dict(zip(MODELS, (logits, ref_logits), strict=True)) | options
    if mask is not None:
        given |= {"mask": mask, "kept": (mask != 0).cpu()}
    for of in (MODELS, MODELS[:1], MODELS[1:]):
        assert not wrong(backend, "kl_divergence", of, return_stats=True, **given)


def assert_entropy_agrees(backend, logits, ref_logits, mask=None, **options):
    """Compare a call that returns the policy's entropies too."""
    options |= {"return_entropy": True}
    assert_divergence_agrees(backend, logits, ref_logits, mask, **options)


def assert_tokens_agree(backend, logits, token_ids, keep=None, **options):
    """Compare the log-probs and entropies of ``token_logprobs``, and their gradient."""
    if keep is not None and keep.dim() == logits.dim():
        keep = keep.any(-1)
    given = {"logits": logits, "token_ids": token_ids, "kept": keep, **options}
    for return_entropy in (False, True):
        options = {"return_entropy": return_entropy}
        assert not wrong(backend, "token_logprobs", ("logits",), **options, **given)


def differentiated(function, *models):
    """The value, and the gradient of each model for an uneven incoming gradient."""
    inputs = leaves(*models)
    value = function(*inputs)
    upstream = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return value.detach(), *torch.autograd.grad(value, inputs, upstream)


def everything(backend, logits, ref_logits, ids, direction, mask=None, cu_seqlens=None):
    """Every per-token output: results, log-probs, entropies and gradients."""
    models = leaves(logits, ref_logits)
    options = {"direction": direction, "cu_seqlens": cu_seqlens, "backend": backend}
    outputs = tensors_of(klfast.kl_divergence(*models, mask, token_ids=ids, **options))
    both = torch.autograd.grad([t.sum() for t in outputs], models, retain_graph=True)
    alone = torch.autograd.grad(outputs[0].sum(), models)
    one_read = klfast.kl_divergence(*models, mask, reduction="token-sum", **options)
    unit = torch.autograd.grad(one_read, models)
    tokens = klfast.token_logprobs(models[0], ids, return_entropy=True, backend=backend)
    of_tokens = torch.autograd.grad([t.sum() for t in tokens], models[0])
    return [t.detach() for t in (*outputs, *both, *alone, *unit, *tokens, *of_tokens)]


def assert_same(found, expected):
    """The same bits in two lists of tensors."""
    assert [same_bits(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(found)


def distinct_logits(*shape, dtype):
    """(logits, others). The logits of a row differ in every dtype, so topk finds the same ids."""
    words = shape[-1]
    assert words <= 512
    steps = torch.stack([torch.randperm(words) for _ in range(math.prod(shape[:-1]))])
    logits = (steps.view(shape) - words // 2).double() / 32
    return logits.to(dtype), (logits + 0.5 * torch.randn(shape, dtype=torch.float64)).to(dtype)
