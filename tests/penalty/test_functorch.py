"""torch.func and vmap: each transform gives what plain autograd gives, or says that it cannot."""

import pytest
import torch
from agreement import SCALAR_REDUCTIONS, random_inputs
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

import klfast
from klfast.args.estimator import ESTIMATORS
from klfast.types.reduction import REDUCTIONS

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
one_of_each_kind = pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])
# torch's own, at the first use of a forward derivative in a process.
quiet_jvp = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def batch():
    """[4, 3, 7] log-probs, their mask, and old log-probs."""
    logprobs, ref_logprobs, old_logprobs = random_inputs((4, 3, 7))
    return logprobs, ref_logprobs, old_logprobs, torch.rand(4, 3, 7) < 0.7


def scalar_penalty(backend, reduction, **options):
    def penalty(logprobs, ref_logprobs, mask=None):
        return klfast.kl_penalty(
            logprobs, ref_logprobs, mask, reduction=reduction, backend=backend, **options
        ).sum()

    return penalty


def plain_grad(function, logprobs, *others):
    logprobs = logprobs.detach().requires_grad_()
    return torch.autograd.grad(function(logprobs, *others), logprobs)[0]


@pytest.mark.grid
@pytest.mark.parametrize("name", ESTIMATORS)
@every_reduction
def test_grad(backend, reduction, name):
    logprobs, ref_logprobs, old_logprobs, mask = (t[0] for t in batch())
    penalty = scalar_penalty(backend, reduction, estimator=name, old_logprobs=old_logprobs)
    expected = plain_grad(penalty, logprobs, ref_logprobs, mask)
    close(grad(penalty)(logprobs, ref_logprobs, mask), expected)
    gradient, value = grad_and_value(penalty)(logprobs, ref_logprobs, mask)
    close(gradient, expected)
    close(value, penalty(logprobs, ref_logprobs, mask))


@every_reduction
def test_grad_of_both_inputs(backend, reduction):
    logprobs, ref_logprobs, _, _ = (t[0].requires_grad_() for t in batch()[:2] * 2)
    penalty = scalar_penalty(backend, reduction, coef=0.3)
    expected = torch.autograd.grad(penalty(logprobs, ref_logprobs), (logprobs, ref_logprobs))
    close(grad(penalty, argnums=(0, 1))(logprobs.detach(), ref_logprobs.detach()), expected)


def test_grad_with_statistics(backend):
    logprobs, ref_logprobs, _, mask = (t[0] for t in batch())

    def penalty(logprobs):
        return klfast.kl_penalty(
            logprobs,
            ref_logprobs,
            mask,
            reduction="token-mean",
            return_stats=True,
            backend=backend,
        )

    gradient, stats = grad(penalty, has_aux=True)(logprobs)
    close(gradient, plain_grad(lambda t: penalty(t)[0], logprobs))
    close(stats, penalty(logprobs)[1])


@every_reduction
def test_vjp(backend, reduction):
    logprobs, ref_logprobs, _, _ = (t[0] for t in batch())

    def penalty(logprobs):
        return klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, backend=backend)

    result, pull_back = vjp(penalty, logprobs)
    cotangent = torch.randn_like(result)
    leaf = logprobs.clone().requires_grad_()
    close(result, penalty(logprobs))
    close(pull_back(cotangent)[0], torch.autograd.grad(penalty(leaf), leaf, cotangent)[0])


@one_of_each_kind
def test_jacrev(backend, reduction):
    logprobs, ref_logprobs, _, _ = (t[0] for t in batch())

    def penalty(logprobs):
        return klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, backend=backend)

    close(jacrev(penalty)(logprobs), torch.autograd.functional.jacobian(penalty, logprobs))


BATCHED = {
    "all": (0, 0, 0, 0, None),
    "logprobs": (0, None, None, None, None),
    "mask": (None, None, 0, None, None),
    "ref-and-old": (None, 0, None, 0, None),
    "coef": (None, None, None, None, 0),
    "all-and-coef": (0, 0, 0, 0, 0),
    "last-dim": (2, 2, 2, 2, None),
}


@pytest.mark.grid
@pytest.mark.parametrize("in_dims", BATCHED.values(), ids=BATCHED)
@every_reduction
def test_vmap_is_a_loop(backend, reduction, in_dims):
    logprobs, ref_logprobs, old_logprobs, mask = batch()
    arguments = [logprobs, ref_logprobs, mask, old_logprobs, torch.tensor([0.5, 1.0, -2.0, 3.0])]
    arguments = [
        argument[0] if dim is None else argument.movedim(0, dim)
        for argument, dim in zip(arguments, in_dims, strict=True)
    ]

    def penalty(logprobs, ref_logprobs, mask, old_logprobs, coef):
        return klfast.kl_penalty(
            logprobs,
            ref_logprobs,
            mask,
            old_logprobs=old_logprobs,
            coef=coef,
            reduction=reduction,
            return_stats=True,
            backend=backend,
        )

    def element(i):
        return [
            argument if dim is None else argument.select(dim, i)
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]

    results, stats = vmap(penalty, in_dims)(*arguments)
    for i in range(4):
        expected, expected_stats = penalty(*element(i))
        close(results[i], expected)
        close(type(stats)(*(field[i] for field in stats)), expected_stats)


@one_of_each_kind
def test_vmap_over_packed_batches_that_share_cu_seqlens(backend, reduction):
    logprobs, ref_logprobs, _, _ = (t[:, 0] for t in batch())
    cu_seqlens = torch.tensor([0, 2, 2, 7])

    def penalty(logprobs, ref_logprobs):
        return klfast.kl_penalty(
            logprobs, ref_logprobs, cu_seqlens=cu_seqlens, reduction=reduction, backend=backend
        )

    expected = [penalty(a, b) for a, b in zip(logprobs, ref_logprobs, strict=True)]
    close(vmap(penalty)(logprobs, ref_logprobs), torch.stack(expected))


def test_vmap_of_rewards(backend):
    logprobs, ref_logprobs, _, mask = batch()
    scores = torch.randn(4, 3)

    def rewards(*arguments):
        return klfast.kl_rewards(*arguments, kl_coef=0.1, backend=backend)

    arguments = (scores, logprobs, ref_logprobs, mask)
    expected = [rewards(*element) for element in zip(*arguments, strict=True)]
    close(vmap(rewards)(*arguments), torch.stack(expected))


@pytest.mark.grid
@pytest.mark.parametrize("masked", [False, True])
@every_reduction
def test_per_sample_gradients(backend, reduction, masked):
    logprobs, ref_logprobs, _, mask = batch()
    penalty = scalar_penalty(backend, reduction)
    arguments = (logprobs, ref_logprobs, mask) if masked else (logprobs, ref_logprobs)
    expected = [plain_grad(penalty, *element) for element in zip(*arguments, strict=True)]
    close(vmap(grad(penalty))(*arguments), torch.stack(expected))


@every_reduction
def test_grad_of_a_vmap(backend, reduction):
    logprobs, ref_logprobs, _, mask = batch()
    penalty = scalar_penalty(backend, reduction)
    expected = [plain_grad(penalty, *e) for e in zip(logprobs, ref_logprobs, mask, strict=True)]
    gradient = grad(lambda *arguments: vmap(penalty)(*arguments).sum())
    close(gradient(logprobs, ref_logprobs, mask), torch.stack(expected))


@every_reduction
def test_backward_through_a_vmap(backend, reduction):
    """A leaf outside of vmap does not look as if it required a gradient inside."""
    logprobs, ref_logprobs, _, mask = batch()
    penalty = scalar_penalty(backend, reduction)
    expected = [plain_grad(penalty, *e) for e in zip(logprobs, ref_logprobs, mask, strict=True)]
    leaf = logprobs.requires_grad_()
    vmap(penalty)(leaf, ref_logprobs, mask).sum().backward()
    close(leaf.grad, torch.stack(expected))


@every_reduction
def test_batched_gradients(backend, reduction):
    logprobs, ref_logprobs, _, _ = (t[0] for t in batch())
    leaf = logprobs.requires_grad_()
    penalty = klfast.kl_penalty(leaf, ref_logprobs, reduction=reduction, backend=backend)
    grad_outputs = torch.randn(5, *penalty.shape)
    expected = [torch.autograd.grad(penalty, leaf, g, retain_graph=True)[0] for g in grad_outputs]
    for first_backward in (False, True):
        if first_backward:
            penalty = klfast.kl_penalty(leaf, ref_logprobs, reduction=reduction, backend=backend)
        (grads,) = torch.autograd.grad(
            penalty, leaf, grad_outputs, is_grads_batched=True, retain_graph=True
        )
        close(grads, torch.stack(expected))


def test_functional_call(backend):
    """A module's own parameters replaced by a stack of them."""
    model = torch.nn.Linear(4, 6)
    states, ref_logprobs = torch.randn(3, 4), torch.randn(3, 6)

    def penalty(parameters):
        logprobs = functional_call(model, parameters, (states,)).log_softmax(-1)
        return klfast.kl_penalty(logprobs, ref_logprobs, reduction="token-mean", backend=backend)

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    expected = dict(
        zip(
            parameters,
            torch.autograd.grad(penalty(dict(model.named_parameters())), model.parameters()),
            strict=True,
        )
    )

    def close(actual, expected):  # three matrix products in different orders
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)

    close(grad(penalty)(parameters), expected)
    stacked = {name: torch.stack([p, p]) for name, p in parameters.items()}
    per_model = vmap(grad(penalty))(stacked)
    for i in range(2):
        close({name: grads[i] for name, grads in per_model.items()}, expected)


@one_of_each_kind
def test_nested_grad_raises_on_native_and_works_on_the_reference(reduction):
    logprobs, ref_logprobs, _, _ = (t[0].double() for t in batch())

    def slope(backend):
        penalty = scalar_penalty(backend, reduction)
        return grad(lambda t: grad(penalty)(t.square(), ref_logprobs).sum())

    with pytest.raises(RuntimeError, match=r"differentiable once.*backend='reference'"):
        slope("native")(logprobs)
    x = logprobs.square() - ref_logprobs
    share = {"none": 1, "seq-mean": 7, "token-mean": 21}[reduction]
    expected = torch.exp(-x) / share * 2 * logprobs
    torch.testing.assert_close(slope("reference")(logprobs), expected)


@quiet_jvp
@one_of_each_kind
def test_forward_derivatives_raise_on_native_and_work_on_the_reference(reduction):
    """Above all a tangent is not silently 0."""
    logprobs, ref_logprobs, _, _ = (t[0].double() for t in batch())
    tangent = torch.randn_like(logprobs)

    def push_forward(backend):
        penalty = scalar_penalty(backend, reduction)
        return jvp(lambda t: penalty(t, ref_logprobs), (logprobs,), (tangent,))[1]

    expected = plain_grad(scalar_penalty("reference", reduction), logprobs, ref_logprobs)
    torch.testing.assert_close(push_forward("reference"), (expected * tangent).sum())
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward|reference"):
        push_forward("native")


@quiet_jvp
@pytest.mark.parametrize("reduction", SCALAR_REDUCTIONS)
def test_hessian_raises_on_native_and_works_on_the_reference(reduction):
    logprobs, ref_logprobs, _, _ = (t[0, :2, :3].double() for t in batch())

    def curvature(backend):
        penalty = scalar_penalty(backend, reduction, estimator="k2")
        return hessian(penalty)(logprobs, ref_logprobs)

    share = {"token-sum": 1, "token-mean": 6, "seq-mean-token-sum": 2, "seq-mean-token-mean": 6}
    expected = torch.eye(6, dtype=torch.float64).reshape(2, 3, 2, 3) / share[reduction]
    torch.testing.assert_close(curvature("reference"), expected)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward|reference"):
        curvature("native")
