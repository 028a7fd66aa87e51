"""Memory that ends the process where it is read or written outside of a tensor.

A tensor's bytes lie right before, or right after, a page that nobody may touch. That finds what
torch's own memory hides, in which other bytes surround a tensor. ``main`` runs every function over
tensors in such memory, and is for a process of its own (``fresh``).
"""

import ctypes
import faulthandler
import itertools
import mmap
import sys

import emulated
import torch
from targets import TARGETS, serving

import klfast

PAGE = mmap.PAGESIZE
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _forbid(address, size):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0) != 0:  # PROT_NONE
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(tensor, *, at_end):
    """The tensor, of the same strides, in memory that begins or ends with its storage."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    numbers = tensor.storage_offset() + last + 1
    size = numbers * tensor.element_size()
    pages = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, pages + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + PAGE + pages):
        _forbid(guard, PAGE)
    offset = PAGE + (pages - size if at_end else 0)
    whole = torch.frombuffer(memory, dtype=tensor.dtype, count=numbers, offset=offset)
    emulated.allow(whole)
    inside = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return inside.copy_(tensor)


LAYOUTS = {
    "dense": lambda t: t,
    # Rows of an odd width, and of a width that leaves the last row aligned.
    **{f"from {n}": lambda t, n=n: torch.cat([t[:, :n], t], 1)[:, n:] for n in (1, 2, 4, 8)},
    "every second": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda t: t.t().contiguous().t(),
}


def _logits_calls(dtype, layout, words):
    """(name, function of a place for tensors) of every function over [2, words] logits."""
    logits, ref_logits = (layout(torch.randn(2, words).to(dtype)) for _ in range(2))
    ids = torch.tensor([words - 1, words // 2])
    keep = torch.tensor([True, True])

    def token_logprobs(place, entropy):
        leaf = place(logits).requires_grad_()
        outputs = klfast.token_logprobs(
            leaf, place(ids), place(keep), return_entropy=entropy, backend="native"
        )
        outputs = outputs if entropy else (outputs,)
        return *outputs, *torch.autograd.grad(sum(each.sum() for each in outputs), leaf)

    def divergence(place, direction, **options):
        leaves = [place(each).requires_grad_() for each in (logits, ref_logits)]
        made = klfast.kl_divergence(
            *leaves, place(keep), direction=direction, backend="native", **options
        )
        made = made if isinstance(made, torch.Tensor) else made.kl
        return made, *torch.autograd.grad(made.sum(), leaves)

    for entropy in (False, True):
        yield f"token_logprobs {entropy}", lambda place, e=entropy: token_logprobs(place, e)
    for direction in ("reverse", "jsd"):
        for name, options in {
            "rows": {},
            "one read": {"reduction": "token-mean"},
            "entropy": {"return_entropy": True},
        }.items():
            yield (
                f"{direction} {name}",
                lambda place, d=direction, o=options: divergence(place, d, **o),
            )


def _token_calls(dtype, layout, tokens):
    """The same over [2, tokens] log-probs."""
    logprobs, others, old = (layout(-torch.rand(2, tokens).to(dtype)) for _ in range(3))
    masks = {"bool": torch.rand(2, tokens) < 0.8, "float": torch.rand(2, tokens), "none": None}
    edges = torch.tensor([0, tokens // 3, tokens // 3, 2 * tokens])

    def penalty(place, mask, weighted, reduction):
        leaf = place(logprobs).requires_grad_()
        result, stats = klfast.kl_penalty(
            leaf,
            place(others),
            None if mask is None else place(mask),
            old_logprobs=place(old) if weighted else None,
            reduction=reduction,
            return_stats=True,
            backend="native",
        )
        return result, *stats, *torch.autograd.grad(result.sum(), leaf)

    def packed(place):
        leaf = place(logprobs.flatten()).requires_grad_()
        result = klfast.kl_penalty(
            leaf,
            place(others.flatten()),
            place(masks["bool"].flatten()),
            cu_seqlens=place(edges),
            reduction="seq-mean",
            backend="native",
        )
        return result, *torch.autograd.grad(result.sum(), leaf)

    def rollout(place, mask, **options):
        made = klfast.rollout_correction(
            place(logprobs),
            place(others),
            None if mask is None else place(mask),
            **options,
        )
        return made.weights, made.mask, *made.stats[:8]

    rules = [klfast.Rejection("k1", high=0.5), klfast.Rejection("k3", "seq-mean", high=9.0)]
    for name, mask in masks.items():
        for weighted, reduction in itertools.product((False, True), ("none", "token-mean")):
            yield (
                f"kl_penalty {name} {weighted} {reduction}",
                lambda place, m=mask, w=weighted, r=reduction: penalty(place, m, w, r),
            )
        yield f"rollout {name}", lambda place, m=mask: rollout(place, m)
        yield f"rules {name}", lambda place, m=mask: rollout(place, m, reject=rules)
    yield "packed", packed


def _calls():
    for dtype, (name, layout) in itertools.product(FLOATS, LAYOUTS.items()):
        for width in (8, 66, 1100):  # of rows: not a vector more, not a chunk a lane, several tiles
            for kind in (_logits_calls, _token_calls):
                for call_name, call in kind(dtype, layout, width):
                    yield f"{call_name}, {dtype}, {name}, {width}", call


def main(target, step):
    """Runs one of ``step`` calls in guarded memory, and compares with torch's; prints how many."""
    faulthandler.enable()
    count = 0
    with serving(TARGETS[target]):
        for name, call in itertools.islice(_calls(), 0, None, step):
            expected = call(torch.clone)
            for at_end in (True, False):
                print(name, "before a guard" if at_end else "after a guard", file=sys.stderr)
                found = call(lambda t, at_end=at_end: guarded(t, at_end=at_end))
                count += 1
                for own, other in zip(found, expected, strict=True):
                    assert torch.equal(own, other), name
    print(count)
