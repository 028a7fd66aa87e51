"""torch.func and vmap over logits: what plain autograd gives, or an error that says so."""

import pytest
import torch
from agreement_logits import DIRECTIONS, leaves, random_logits, tensors_of
from torch.autograd import forward_ad
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

import klfast

every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
one_of_each_kind = pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])
# torch's own, at the first use of a forward derivative in a process.
quiet_jvp = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def batch():
    """[4, 2, 3, 7] logits, ids and a mask."""
    logits, ref_logits = random_logits(4, 2, 3, 7)
    return logits, ref_logits, torch.randint(7, (4, 2, 3)), torch.rand(4, 2, 3) < 0.7


def divergence(backend, reduction, direction="reverse", **options):
    def of(logits, ref_logits, mask=None):
        return klfast.kl_divergence(
            logits,
            ref_logits,
            mask,
            reduction=reduction,
            direction=direction,
            backend=backend,
            **options,
        ).sum()

    return of


def log_probs(backend, **options):
    def of(logits, ids, mask=None):
        found, entropy = klfast.token_logprobs(
            logits, ids, mask=mask, return_entropy=True, backend=backend, **options
        )
        return (found + 0.3 * entropy).sum()

    return of


def plain_grad(function, logits, *others):
    (leaf,) = leaves(logits)
    return torch.autograd.grad(function(leaf, *others), leaf)[0]


@pytest.mark.grid
@one_of_each_kind
@every_direction
def test_grad(backend, direction, reduction):
    logits, ref_logits, _, mask = (t[0] for t in batch())
    function = divergence(backend, reduction, direction)
    expected = plain_grad(function, logits, ref_logits, mask)
    gradient, value = grad_and_value(function)(logits, ref_logits, mask)
    close(gradient, expected)
    close(value, function(logits, ref_logits, mask))
    both = torch.autograd.grad(function(*(models := leaves(logits, ref_logits)), mask), models)
    close(grad(function, argnums=(0, 1))(logits, ref_logits, mask), both)


def test_grad_of_log_probs(backend):
    logits, _, ids, mask = (t[0] for t in batch())
    function = log_probs(backend, temperature=0.7)
    close(grad(function)(logits, ids, mask), plain_grad(function, logits, ids, mask))


@every_direction
def test_vjp_of_four_results(backend, direction):
    logits, ref_logits, ids, _ = (t[0] for t in batch())
    options = {"direction": direction, "return_entropy": True, "backend": backend}

    def four(logits, ref_logits):
        return tensors_of(klfast.kl_divergence(logits, ref_logits, token_ids=ids, **options))

    results, pull_back = vjp(four, logits, ref_logits)
    cotangents = tuple(torch.randn_like(result) for result in results)
    models = leaves(logits, ref_logits)
    close(pull_back(cotangents), torch.autograd.grad(four(*models), models, cotangents))


def test_jacrev(backend):
    logits, ref_logits, _, _ = (t[0] for t in batch())

    def per_token(logits):
        return klfast.kl_divergence(logits, ref_logits, backend=backend)

    close(jacrev(per_token)(logits), torch.autograd.functional.jacobian(per_token, logits))


BATCHED = {
    "all": (0, 0, 0, 0),
    "logits": (0, None, None, None),
    "reference-and-ids": (None, 0, 0, None),
    "mask": (None, None, None, 0),
    "last-dim": (3, 3, 2, 2),
}


@pytest.mark.grid
@pytest.mark.parametrize("in_dims", BATCHED.values(), ids=BATCHED)
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_vmap_is_a_loop(backend, reduction, in_dims):
    arguments = [
        argument[0] if dim is None else argument.movedim(0, dim)
        for argument, dim in zip(batch(), in_dims, strict=True)
    ]

    def everything(logits, ref_logits, ids, mask):
        options = {"mask": mask, "backend": backend}
        asked = {"token_ids": ids, "return_stats": True, "return_entropy": True}
        *results, stats = klfast.kl_divergence(
            logits, ref_logits, reduction=reduction, **asked, **options
        )
        tokens = klfast.token_logprobs(logits, ids, return_entropy=True, **options)
        return *results, *stats, *tokens

    def element(i):
        return [
            argument if dim is None else argument.select(dim, i)
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]

    found = vmap(everything, in_dims)(*arguments)
    for i in range(4):
        close([part[i] for part in found], list(everything(*element(i))))


@one_of_each_kind
def test_per_sample_gradients(backend, reduction):
    logits, ref_logits, ids, mask = batch()
    function = divergence(backend, reduction)
    elements = list(zip(logits, ref_logits, mask, strict=True))
    expected = torch.stack([plain_grad(function, *element) for element in elements])
    close(vmap(grad(function))(logits, ref_logits, mask), expected)
    summed = grad(lambda *arguments: vmap(function)(*arguments).sum())
    close(summed(logits, ref_logits, mask), expected)
    (leaf,) = leaves(logits)
    vmap(function)(leaf, ref_logits, mask).sum().backward()
    close(leaf.grad, expected)
    function = log_probs(backend)
    expected = [plain_grad(function, *e) for e in zip(logits, ids, mask, strict=True)]
    close(vmap(grad(function))(logits, ids, mask), torch.stack(expected))


@one_of_each_kind
def test_batched_gradients(backend, reduction):
    logits, ref_logits, _, _ = (t[0] for t in batch())
    (leaf,) = leaves(logits)
    for first_backward in (False, True):
        result = klfast.kl_divergence(leaf, ref_logits, reduction=reduction, backend=backend)
        grad_outputs = torch.randn(5, *result.shape)
        batched = {"is_grads_batched": True, "retain_graph": True}
        if first_backward:
            (grads,) = torch.autograd.grad(result, leaf, grad_outputs, **batched)
        expected = [
            torch.autograd.grad(result, leaf, g, retain_graph=True)[0] for g in grad_outputs
        ]
        if not first_backward:
            (grads,) = torch.autograd.grad(result, leaf, grad_outputs, **batched)
        close(grads, torch.stack(expected))


@one_of_each_kind
def test_vmap_over_no_element(backend, reduction):
    logits = torch.zeros(0, 2, 3, 7)
    shape = {"none": (0, 2, 3), "seq-mean": (0, 2), "token-mean": (0,)}[reduction]

    def of(logits):
        return klfast.kl_divergence(logits, logits, reduction=reduction, backend=backend)

    assert vmap(of)(logits).shape == shape


def test_nested_grad_raises_on_native_and_works_on_the_reference():
    logits, ref_logits, ids, _ = (t[0].double() for t in batch())
    ids = ids.long()
    for make in (
        lambda backend: lambda t: divergence(backend, "token-mean")(t, ref_logits),
        lambda backend: lambda t: log_probs(backend)(t, ids),
    ):

        def curvature(backend, make=make):
            return grad(lambda t: grad(make(backend))(t).square().sum())(logits)

        with pytest.raises(RuntimeError, match=r"differentiable once.*backend='reference'"):
            curvature("native")
        assert curvature("reference").isfinite().all()


@quiet_jvp
def test_forward_derivatives_raise_on_native_and_work_on_the_reference():
    """Above all a tangent is not silently 0."""
    logits, ref_logits, ids, _ = (t[0] for t in batch())
    tangent = torch.randn_like(logits)
    for make, other in (
        (lambda backend: divergence(backend, "none"), ref_logits),
        (lambda backend: divergence(backend, "token-mean"), ref_logits),
        (log_probs, ids),
    ):
        expected = (plain_grad(make("reference"), logits, other) * tangent).sum()
        found = jvp(lambda t, m=make, o=other: m("reference")(t, o), (logits,), (tangent,))[1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward|reference"):
            jvp(lambda t, m=make, o=other: m("native")(t, o), (logits,), (tangent,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(logits, tangent)
            with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward|reference"):
                make("native")(dual, other)


@quiet_jvp
def test_hessian_raises_on_native_and_works_on_the_reference():
    """At equal models KL's is the Fisher information."""
    logits = torch.randn(1, 1, 4, dtype=torch.float64)
    p = logits.flatten().softmax(-1)
    found = hessian(divergence("reference", "token-sum"))(logits, logits.clone())
    torch.testing.assert_close(found.reshape(4, 4), p.diag() - p[:, None] * p)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward|reference"):
        hessian(divergence("native", "token-sum"))(logits, logits.clone())
