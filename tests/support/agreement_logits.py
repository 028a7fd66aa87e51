"""Logits as training makes them, and comparisons of calls over them with the reference."""

import math

import torch
from targets import TARGETS
from truth import wrong

DIRECTIONS = ("reverse", "forward", "jsd")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

OF_ONE_WORD = 2**-22 + 2 * 2**-24
"""How far a row's sum may be off, relatively, where one word has all of it: a GPU's ex2.approx errs
by 2**-22, its argument and its result are rounded. Log-probs, entropies and divergences of 0 are
off by as much, absolutely."""

COMPILED = [name for name, target in TARGETS.items() if target.backend != "reference"]
"""Targets with kernels of their own. The reference cancels as the textbook does, and its last bits
are torch's."""

FAST = [name for name in COMPILED if not TARGETS[name].is_emulated]
"""Those for a whole vocabulary: the emulator takes a second for it."""

NOT_EMULATED = [name for name, target in TARGETS.items() if not target.is_emulated]
"""Those for what lies before the kernels, which are emulated behind the same Python."""


def random_logits(*shape, dtype=torch.float32, ref_dtype=None, apart=0.5):
    """(logits, ref_logits), some standard deviations wide, the reference ``apart`` beside."""
    logits = 2.5 * torch.randn(shape, dtype=torch.float64)
    ref_logits = logits + apart * torch.randn(shape, dtype=torch.float64)
    return logits.to(dtype), ref_logits.to(ref_dtype or dtype)


def random_ids(logits):
    return torch.randint(logits.shape[-1], logits.shape[:-1])


def uneven(like):
    """An upstream gradient that differs from token to token."""
    return torch.linspace(-1, 1.75, like.numel(), dtype=like.dtype).reshape(like.shape)


def leaves(*tensors):
    return tuple(t.detach().requires_grad_() for t in tensors)


def tensors_of(found):
    """The tensors of what ``kl_divergence`` returned, in order: all but statistics and None."""
    if isinstance(found, torch.Tensor):
        return (found,)
    return tuple(part for part in found if isinstance(part, torch.Tensor))


MODELS = ("logits", "ref_logits")


def assert_divergence_agrees(backend, logits, ref_logits, mask=None, **options):
    """Result, statistics and the gradients of both models and of each are the reference's."""
    given = dict(zip(MODELS, (logits, ref_logits), strict=True)) | options
    if mask is not None:
        given |= {"mask": mask, "kept": (mask != 0).cpu()}
    for of in (MODELS, MODELS[:1], MODELS[1:]):
        assert not wrong(backend, "kl_divergence", of, return_stats=True, **given)


def assert_entropy_agrees(backend, logits, ref_logits, mask=None, **options):
    """The same beside the policy's entropies."""
    options |= {"return_entropy": True}
    assert_divergence_agrees(backend, logits, ref_logits, mask, **options)


def assert_tokens_agree(backend, logits, token_ids, keep=None, **options):
    """Log-probs and entropies of ``token_logprobs``, and the gradient."""
    if keep is not None and keep.dim() == logits.dim():
        keep = keep.any(-1)
    given = {"logits": logits, "token_ids": token_ids, "kept": keep, **options}
    for return_entropy in (False, True):
        options = {"return_entropy": return_entropy}
        assert not wrong(backend, "token_logprobs", ("logits",), **options, **given)


def differentiated(function, *models):
    """The value, and the gradient of each model under an uneven gradient that comes in."""
    inputs = leaves(*models)
    value = function(*inputs)
    upstream = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return value.detach(), *torch.autograd.grad(value, inputs, upstream)


def distinct_logits(*shape, dtype):
    """(logits, others) of which no two of a row are equal in any dtype: topk finds the same."""
    words = shape[-1]
    assert words <= 512
    steps = torch.stack([torch.randperm(words) for _ in range(math.prod(shape[:-1]))])
    logits = (steps.view(shape) - words // 2).double() / 32
    return logits.to(dtype), (logits + 0.5 * torch.randn(shape, dtype=torch.float64)).to(dtype)
