"""Inputs of any strides and views: the bits of contiguous ones, and gradients through the view."""

import itertools

import torch
from controls import FLOATS

import klfast

CATEGORY = "layouts and views"


def lazy_conjugate(t):
    """The values of ``t`` as the imaginary part of a conjugate: a view with its sign bit set."""
    if t.dtype not in (torch.float32, torch.float64):
        return torch._neg_view(-t)
    return torch.complex(torch.zeros_like(t), -t).conj().imag


LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "last first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "stepped": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "stepped by 3": lambda t: t.repeat_interleave(3, -1)[..., 1::3],
    "stepped rows": lambda t: t.repeat_interleave(2, 0)[::2],
    "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "offset by 3": lambda t: torch.cat([t.new_zeros(3), t.flatten()])[3:].view(t.shape),
    "narrow": lambda t: torch.cat([t, t], -1).narrow(-1, 0, t.shape[-1]),
    "narrow rows": lambda t: torch.cat([t, t], 0)[t.shape[0] :],
    "gap": lambda t: torch.nn.functional.pad(t, (2, 3))[..., 2:-3],
    "flipped twice": lambda t: t.flip(-1).flip(-1),
    "negated view": lambda t: torch._neg_view(-t),
    "conjugate": lazy_conjugate,
    "real part": lambda t: torch.stack([t, t], -1)[..., 0],
    "clone of strides": lambda t: t.transpose(0, -1).clone().transpose(0, -1),
    "swapped twice": lambda t: t.swapaxes(0, 1).swapaxes(0, 1),
    "split": lambda t: torch.stack([t, t + 1]).unbind()[0],
    "as_strided": lambda t: t.contiguous().as_strided(t.shape, t.contiguous().stride()),
}
SHARED = {
    "expanded rows": lambda t: t[:1].expand_as(t),
    "expanded words": lambda t: t[..., :1].expand_as(t),
    "one number": lambda t: t.flatten()[0].expand(t.shape),
    "overlapping": lambda t: t.contiguous().as_strided(t.shape, (1,) * t.dim()),
    "sliding": lambda t: t.contiguous().as_strided(t.shape, (2, *(1,) * (t.dim() - 1))),
    "zero tensor": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
}
"""Elements that lie in one place."""
MASK = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0], [0] * 6, [1] * 6])
IDS = torch.arange(24).view(4, 6) % 9


def calls():
    for reduction in ("none", "seq-mean", "token-mean"):
        yield (
            f"kl_penalty {reduction}",
            lambda a, b, m, n=reduction: klfast.kl_penalty(a, b, m, reduction=n),
            (4, 6),
        )
        for direction in ("reverse", "jsd"):
            yield (
                f"kl_divergence {direction} {reduction}",
                lambda a, b, m, n=reduction, d=direction: klfast.kl_divergence(
                    a, b, m, reduction=n, direction=d
                ),
                (4, 6, 9),
            )
    yield (
        "kl_rewards",
        lambda a, b, m: klfast.kl_rewards(a[:, 0], a, b, m, kl_coef=0.2),
        (4, 6),
    )
    yield "token_logprobs", lambda a, b, m: klfast.token_logprobs(a, IDS, mask=m), (4, 6, 9)


def test_values_and_gradients_in_every_layout(hunt):
    """The first input, the second, and the mask in each layout."""
    layouts = {**LAYOUTS, **SHARED}
    cases = itertools.product(calls(), layouts.items(), FLOATS)
    for (name, call, shape), (what, layout), dtype in hunt.some(cases, 6):
        a = torch.randn(shape).to(dtype)
        b = (a + 0.3 * torch.randn(shape)).to(dtype)
        for first, second in ((layout, None), (None, layout), (layout, layout)):
            got, leaves = run(call, a, b, first, second)
            wanted, others = run(call, a, b, first, second, contiguous=True)
            case = (name, what, dtype, first is not None, second is not None)
            hunt.bits(got.detach(), wanted.detach(), *case)
            if not got.requires_grad:
                continue
            grads = torch.autograd.grad(got.sum(), leaves, allow_unused=True)
            expected = torch.autograd.grad(wanted.sum(), others, allow_unused=True)
            for grad, other in zip(grads, expected, strict=True):
                hunt.equal(grad is None, other is None, *case)
                if grad is not None and other is not None:
                    scale = 4 * torch.finfo(dtype).eps * other.double().abs().max()
                    hunt.close(grad, other.double(), scale, *case, "gradient")


def run(call, a, b, first, second, contiguous=False):
    leaves = [t.clone().requires_grad_() for t in (a, b)]
    given = [
        leaf if layout is None else layout(leaf)
        for leaf, layout in zip(leaves, (first, second), strict=True)
    ]
    if contiguous:
        given = [torch.add(t, 0).contiguous().resolve_neg() for t in given]
    return call(*given, MASK), leaves


def test_masks_ids_and_edges_in_every_layout(hunt):
    plain = {key: layout for key, layout in LAYOUTS.items() if key != "conjugate"}
    for (name, call, shape), (what, layout) in itertools.product(calls(), plain.items()):
        a, b = torch.randn(shape), torch.randn(shape)
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64):
            mask = MASK.to(dtype)
            if what == "negated view" and dtype in (torch.bool, torch.uint8):
                continue
            hunt.bits(call(a, b, layout(mask)), call(a, b, mask), name, what, dtype)
    edges = torch.tensor([0, 4, 4, 9, 24])
    for dtype, make in itertools.product(
        (torch.int32, torch.int64),
        (
            lambda t: t.repeat_interleave(2)[::2],
            lambda t: torch._neg_view(-t),
            lambda t: torch.cat([t, t])[5:],
            lambda t: torch.stack([t, t], 1)[:, 1],
        ),
    ):
        a, b, cu = torch.randn(24), torch.randn(24), edges.to(dtype)
        got = klfast.kl_penalty(a, b, cu_seqlens=make(cu), reduction="seq-sum")
        hunt.bits(got, klfast.kl_penalty(a, b, cu_seqlens=cu, reduction="seq-sum"), dtype)
    z = torch.randn(4, 6, 9)
    for what, layout in plain.items():
        got = klfast.token_logprobs(z, layout(IDS))
        hunt.bits(got, klfast.token_logprobs(z, IDS), "ids", what)
