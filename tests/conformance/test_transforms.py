"""torch.compile, torch.func, vmap and torch.export over every public function: each gives what
plain autograd gives, or says that it cannot.
"""

import copy
import functools
import math

import pytest
import torch
from families import FAMILIES, GRADED, TRACED, UNTRACED, VARIANTS, Function, every, served
from targets import TARGETS
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import klfast

GRADED_TRACED = [of for of in GRADED if of in TRACED]
FIRST = [
    next(of for of in TRACED if of[0] == family) for family in FAMILIES if family not in UNTRACED
]
# torch's own: dynamo makes a Function object to trace any autograd.Function. Inductor and the first
# forward derivative use what torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>"),
    pytest.mark.filterwarnings("ignore:.* is deprecated"),
]


@pytest.fixture
def function(of, target):
    """The call on a target. Backends are resolved as in a used process."""
    torch._dynamo.reset()
    with served(target, of[0]):
        yield Function(of, TARGETS[target].backend)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7, equal_nan=True)


every_target = pytest.mark.parametrize("target", TARGETS)
every_target_slowly = pytest.mark.parametrize(
    "target",
    [pytest.param(t, marks=[] if t == "native" else pytest.mark.exhaustive) for t in TARGETS],
)
"""Tracing takes seconds per call, and more of the reference, whose every op it sees."""


@every_target_slowly
@every(TRACED)
def test_it_compiles_whole(function):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = function.leaves()
    found, expected = compiled(*leaves), function(*leaves)
    close([*found], [*expected])
    if function.graded:
        sums = (sum(o.sum() for o in of if o.requires_grad) for of in (found, expected))
        close(*(torch.autograd.grad(total, leaves) for total in sums))


@every_target_slowly
@every(TRACED)
def test_batches_of_any_size_compile_once(function):
    """Or twice: the second may teach dynamo that numbers change."""
    counter = CompileCounterWithBackend("aot_eager")
    tensors = function.call.tensors

    def run(tensors):
        return function.outputs(tensors)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for times in (1, 2, 3, 4, 5):
        given = {n: torch.cat([t] * times) if t.dim() else t for n, t in tensors.items()}
        if (edges := tensors.get("cu_seqlens")) is not None:
            given["cu_seqlens"] = torch.cat(
                [edges[:1], *(edges[1:] + i * edges[-1] for i in range(times))]
            )
        close([*compiled(given)], [*run(given)])
    assert counter.frame_count <= 2


@pytest.mark.exhaustive
@every([*TRACED])
@pytest.mark.parametrize("target", ["native"])
def test_inductor_gives_the_same(function):
    leaves = function.leaves()
    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    close([*compiled(*leaves)], [*function(*leaves)])


@every_target
@every(GRADED_TRACED)
def test_derivatives_of_torch_func(function):
    leaves = function.leaves()
    expected = function.gradients(*leaves)
    inputs = tuple(leaf.detach() for leaf in leaves)
    every_leaf = tuple(range(len(leaves)))
    close(grad(function.loss, argnums=every_leaf)(*inputs), expected)
    values, pull_back = vjp(function.values, *inputs)
    sent = tuple(torch.randn_like(value) for value in values)
    plain = function.values(*leaves)
    close(values, tuple(value.detach() for value in plain))
    close(pull_back(sent), torch.autograd.grad(plain, leaves, sent))

    def first(leaf):
        return function.values(leaf, *inputs[1:])[0]

    if plain[0].numel() <= 8:
        expected = torch.autograd.functional.jacobian(first, inputs[0])
        close(jacrev(first)(inputs[0]), expected)


@every_target
@every(TRACED)
def test_vmap_is_a_loop(function):
    """Over all tensors, or one. The mapped dimension is the last: no element is contiguous."""
    given = {n: t for n, t in function.call.tensors.items() if t.dim() and n != "cu_seqlens"}
    batches = {
        name: torch.stack([t, t * 0.5, t * 1.5] if t.is_floating_point() else [t, t.flip(0), t], -1)
        for name, t in given.items()
    }
    for mapped in (given.keys(), *({name} for name in given)):
        dims = {name: -1 if name in mapped else None for name in given}
        inputs = {name: batches[name] if name in mapped else given[name] for name in given}
        found = vmap(lambda tensors: function.outputs(tensors), ({**dims},))(inputs)
        for i in range(3):
            element = {n: t[..., i] if n in mapped else t for n, t in inputs.items()}
            close([output[i] for output in found], [*function.outputs(element)])


@every_target
@every(GRADED_TRACED)
def test_gradients_under_vmap(function):
    """Per sample, of a vmap, through a vmap and in a batch of incoming gradients."""
    leaf, *others = (leaf.detach() for leaf in function.leaves())

    def loss(leaf):
        return function.loss(leaf, *others)

    batch = torch.stack([leaf, leaf * 0.5])
    expected = torch.stack([grad(loss)(each) for each in batch])
    close(vmap(grad(loss))(batch), expected)
    close(grad(lambda leaves: vmap(loss)(leaves).sum())(batch), expected)
    outside = batch.clone().requires_grad_()
    vmap(loss)(outside).sum().backward()
    close(outside.grad, expected)
    leaf.requires_grad_()
    for _ in range(2):
        value = function.values(leaf, *others)[0]
        sent = torch.randn(3, *value.shape)
        (found,) = torch.autograd.grad(value, leaf, sent, is_grads_batched=True, retain_graph=True)
        wanted = [torch.autograd.grad(value, leaf, each, retain_graph=True)[0] for each in sent]
        close(found, torch.stack(wanted))


@every(GRADED_TRACED)
@pytest.mark.parametrize("target", ["native", "reference"])
def test_further_derivatives_raise_or_are_right(function):
    """Above all a tangent and a curvature are not silently 0."""
    leaf, *others = (leaf.detach() for leaf in function.leaves())
    tangent = torch.randn_like(leaf)

    def loss(leaf):
        return function.loss(leaf, *others)

    calls = {
        "tangent": lambda: jvp(loss, (leaf,), (tangent,))[1],
        "nested": lambda: grad(lambda t: (grad(loss)(t) * tangent).sum())(leaf),
    }
    if function.backend == "reference":
        plain = leaf.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(plain), plain, create_graph=True)
        close(calls["tangent"](), (first.detach() * tangent).nansum())
        close(calls["nested"](), torch.autograd.grad((first * tangent).sum(), plain)[0])
        return
    for call in (*calls.values(), lambda: hessian(loss)(leaf)):
        with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward|reference"):
            call()


@every([(family, next(iter(VARIANTS[family]))) for family in UNTRACED])
@pytest.mark.parametrize("target", ["native"])
def test_torch_func_is_refused_where_a_batch_is_split_by_its_data(function):
    leaves = [leaf.detach() for leaf in function.leaves()]
    with pytest.raises((RuntimeError, ValueError, TypeError), match=r"torch\.func|transform"):
        grad(function.loss)(*leaves)


def losses_from_hidden(hidden, weight):
    """A loss of each function that splits a batch by its data."""
    ids = torch.arange(hidden.shape[0])
    hidden = hidden * 1.5
    logprobs = klfast.linear_token_logprobs(hidden, weight, ids)
    teacher = torch.full((hidden.shape[0], 2), -1.0)
    kl = klfast.linear_topk_kl_divergence(hidden, weight, torch.stack([ids, ids + 1], 1), teacher)
    exact = klfast.linear_kl_divergence(hidden, weight, hidden.detach() + 1)
    found = klfast.linear_token_loss(hidden, weight, ids, torch.neg, reduction="token-mean")
    return logprobs.sum() + kl.sum() + exact.sum() + found.loss


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_graph_breaks_where_a_batch_is_split_by_its_data():
    torch.manual_seed(0)
    leaves = [torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)]
    with pytest.raises(RuntimeError, match="a chunk at a time"):
        torch.compile(losses_from_hidden, backend="aot_eager", fullgraph=True)(*leaves)
    losses = [
        call(*leaves)
        for call in (losses_from_hidden, torch.compile(losses_from_hidden, backend="aot_eager"))
    ]
    eager, broken = ([loss.detach(), *torch.autograd.grad(loss, leaves)] for loss in losses)
    torch.testing.assert_close(broken, eager, rtol=0, atol=0)


def number_calls():
    """Name -> a call on tensors whose sizes change, and a number that does."""
    logits, other = torch.randn(2, 2, 5, 16)
    ids = torch.arange(10).view(2, 5)
    edges = {n: torch.linspace(0, 6, n + 1).int() for n in (3, 4, 2, 1)}
    log_probs = -torch.rand(2, 6)
    scale = {"reduction": "token-mean"}
    return {
        "ignore_index": lambda x: klfast.token_logprobs(logits, ids, ignore_index=round(10 * x)),
        "skew_alpha": lambda x: klfast.kl_divergence(
            logits, other, direction="skew-forward", skew_alpha=x, **scale
        ),
        "clip": lambda x: klfast.kl_penalty(
            *log_probs, estimator=klfast.Estimator("k3", log_ratio_clip=(-x, x)), **scale
        ),
        "weights": lambda x: klfast.kl_penalty(
            *log_probs,
            cu_seqlens=edges[round(10 * x)],
            weights=torch.full((round(10 * x),), x),
            **scale,
        ),
    }


@pytest.mark.parametrize("name", number_calls())
def test_numbers_and_sizes_that_change_under_torch_compile(name):
    call = number_calls()[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for number in (0.3, 0.4, 0.2, 0.1):
        close(compiled(number), call(number))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_torch_func_under_torch_compile(backend):
    """Dynamo cannot trace a Function in a transform. The graph breaks there."""
    pair, logits = -torch.rand(2, 3, 5), torch.randn(2, 3, 4, 9)

    def both(pair, logits):
        kl = klfast.kl_divergence(*logits, reduction="token-mean", backend=backend)
        return kl + klfast.kl_penalty(*pair, reduction="token-mean", backend=backend)

    def one(pair, _):  # in grad, torch 2.13 cannot go on after a graph break
        return klfast.kl_penalty(*pair, reduction="token-mean", backend=backend)

    for transform in (vmap(both, in_dims=1), grad(one)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *tensors, t=transform: t(*tensors), backend="eager")
        close(compiled(pair, logits), transform(pair, logits))


@pytest.mark.parametrize("beta", [0.0, math.nan])
def test_a_wrong_beta_is_refused_under_torch_compile(beta):
    call = functools.partial(klfast.kl_divergence, direction="jsd", jsd_beta=beta)
    with pytest.raises(ValueError, match="jsd_beta must be"):
        torch.compile(call, backend="eager")(*torch.randn(2, 2, 9))


class Module(torch.nn.Module):
    """A call, as torch.export takes it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, tensors):
        return self.function.outputs(tensors)


@every_target_slowly
@every(FIRST[:-1])
def test_an_exported_program_takes_any_batch(function, tmp_path):
    module, tensors = Module(function), copy.copy(function.call.tensors)
    rows = Dim("rows", min=2, max=64)
    dynamic = {name: {0: rows} if t.dim() else None for name, t in tensors.items()}
    program = export(module, (tensors,), dynamic_shapes=(dynamic,))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    fewer = {name: t[:2] if t.dim() else t for name, t in tensors.items()}
    for given in (tensors, fewer):
        for run in (program.module(), loaded):
            close([*run(given)], [*module(given)])


@pytest.mark.exhaustive
@every(TRACED)
@pytest.mark.parametrize("target", ["native"])
def test_a_package_of_aot_inductor_gives_the_same(function, tmp_path):
    module, tensors = Module(function), copy.copy(function.call.tensors)
    path = str(tmp_path / "package.pt2")
    package = torch._inductor.aoti_compile_and_package(
        export(module, (tensors,)), package_path=path
    )
    close([*torch._inductor.aoti_load_package(package)(tensors)], [*module(tensors)])
