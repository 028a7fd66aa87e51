"""inplace_backward=True beside every other use of the logits: right, or an error."""

import itertools

import torch
from controls import FLOATS, tokens
from torch.utils.checkpoint import checkpoint

import klfast

CATEGORY = "inplace_backward beside other uses"
IDS = torch.tensor([[0, 4, 6], [1, 1, 3]])


class Same(torch.autograd.Function):
    """Hands on its input detached, as a tensor-parallel copy does."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def inplace(logits, **options):
    return klfast.token_logprobs(logits, IDS, inplace_backward=True, **options)


def plain(logits, **options):
    return klfast.token_logprobs(logits, IDS, **options)


USES = {
    "none": lambda z, f: f(z).sum(),
    "a sum": lambda z, f: f(z).sum() + z.sum(),
    "a sum before": lambda z, f: z.sum() + f(z).sum(),
    "a product": lambda z, f: (z * 2).sum() + f(z).sum(),
    "a square": lambda z, f: (z * z).sum() + f(z).sum(),
    "a square after": lambda z, f: f(z).sum() + (z * z).sum(),
    "exp": lambda z, f: f(z).sum() + z.exp().sum(),
    "softmax": lambda z, f: f(z).sum() + z.softmax(-1).max(),
    "log_softmax": lambda z, f: f(z).sum() + z.log_softmax(-1)[..., 0].sum(),
    "cross entropy": lambda z, f: (
        f(z).sum() + torch.nn.functional.cross_entropy(z.flatten(0, 1), IDS.flatten())
    ),
    "logsumexp": lambda z, f: f(z).sum() + z.logsumexp(-1).sum(),
    "matmul": lambda z, f: f(z).sum() + (z @ z.mT).sum(),
    "max": lambda z, f: f(z).sum() + z.amax(-1).sum(),
    "gather": lambda z, f: f(z).sum() + z.gather(-1, IDS[..., None]).sum(),
    "a slice": lambda z, f: f(z).sum() + z[0].square().sum(),
    "a view": lambda z, f: f(z.view(2, 3, 7)).sum() + z.sum(),
    "a view's square": lambda z, f: f(z.view(2, 3, 7)).sum() + z.square().sum(),
    "a transposed use": lambda z, f: f(z).sum() + z.mT.contiguous().square().sum(),
    "klfast itself": lambda z, f: f(z).sum() + plain(z).sum(),
    "klfast before": lambda z, f: plain(z).sum() + f(z).sum(),
    "entropy": lambda z, f: sum(part.sum() for part in f(z, return_entropy=True)),
    "a divergence": lambda z, f: (
        f(z).sum() + klfast.kl_divergence(z, z.detach() + 1.5 * z.detach().sin()).sum()
    ),
    "twice": lambda z, f: f(z).sum() + f(z).sum(),
    "temperature": lambda z, f: f(z, temperature=0.5).sum(),
    "mask": lambda z, f: f(z, mask=IDS > 0).sum(),
    "ignored": lambda z, f: f(z, ignore_index=1).sum(),
    "a scaled loss": lambda z, f: 1000 * f(z).mean(),
    "a detached use": lambda z, f: f(z).sum() + (z.detach() * 2).sum(),
    "a passed-on copy": lambda z, f: f(Same.apply(z)).sum() + z.sum(),
    "a passed-on square": lambda z, f: f(Same.apply(z)).sum() + z.square().sum(),
    "a checkpoint": lambda z, f: checkpoint(f, z, use_reentrant=False).sum() + z.sum(),
    "changed after": lambda z, f: f(z).sum() + z.clone().add_(1).square().sum(),
}


def test_other_uses_of_the_logits(hunt):
    cases = itertools.product(USES.items(), FLOATS, ("native", "reference"))
    for (what, use), dtype, backend in hunt.some(cases, 2):
        leaf = torch.randn(2, 3, 7).to(dtype).requires_grad_()
        before = leaf.detach().clone()
        (wanted,) = torch.autograd.grad(use(leaf * 1, plain), leaf)
        try:
            got = torch.autograd.grad(
                use(leaf * 1, lambda z, b=backend, **k: inplace(z, backend=b, **k)), leaf
            )[0]
        except (RuntimeError, ValueError) as error:
            text = str(error)
            hunt.check("inplace" in text or "modified" in text, what, dtype, backend, got=text)
        else:
            tolerance = 4 * torch.finfo(dtype).eps * wanted.double().abs().max()
            hunt.close(got, wanted.double(), tolerance, what, dtype, backend)
        hunt.bits(leaf.detach(), before, what, dtype, backend, "the leaf")


LEAVES = {
    "a leaf": lambda w: w,
    "a view of a leaf": lambda w: w.view(2, 3, 7),
    "a slice of a leaf": lambda w: w[:],
    "a transposed leaf": lambda w: w.mT.mT,
    "a detaching Function": Same.apply,
    "two Functions": lambda w: Same.apply(Same.apply(w)),
    "a Function of a view": lambda w: Same.apply(w.view(2, 3, 7)),
    "stepped": lambda w: (w * 1).repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda w: (w * 1)[:, :1].expand(2, 3, 7),
    "transposed": lambda w: (w * 1).mT.contiguous().mT,
    "negated": lambda w: torch._neg_view(w * 1),
}


def test_what_must_not_be_overwritten(hunt):
    for (what, make), dtype, backend in itertools.product(
        LEAVES.items(), FLOATS, ("native", "reference")
    ):
        leaf = torch.randn(2, 3, 7).to(dtype).requires_grad_()
        before = leaf.detach().clone()
        logits = make(leaf)
        hunt.refuses(
            lambda z=logits, b=backend: inplace(z, backend=b).sum().backward(),
            "inplace_backward",
            what,
            dtype,
            backend,
        )
        hunt.bits(leaf.detach(), before, what, dtype, backend)


def test_one_backward_alone(hunt):
    for dtype, backend, entropy in itertools.product(FLOATS, ("native", "reference"), (0, 1)):
        leaf = torch.randn(2, 3, 7).to(dtype).requires_grad_()
        found = inplace(leaf * 1, backend=backend, return_entropy=bool(entropy))
        loss = sum(part.sum() for part in found) if entropy else found.sum()
        exact = tokens(leaf.detach(), IDS)
        wanted = exact[2] + exact[3] if entropy else exact[2]
        (got,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        hunt.close(got, wanted, 4 * torch.finfo(got.dtype).eps * 4, dtype, backend, entropy)
        hunt.raises(lambda y=loss, x=leaf: torch.autograd.grad(y, x), dtype, backend, "second")
        again = inplace(leaf * 1, backend=backend).sum()
        hunt.raises(
            lambda y=again, x=leaf: (
                torch.autograd.grad(y, x, create_graph=True)[0].sum().backward()
            ),
            dtype,
            backend,
            "create_graph",
        )
