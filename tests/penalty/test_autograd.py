"""The gradient as a citizen of autograd: who gets it, how often, and what may happen in between."""

import pytest
import torch
from agreement import SCALAR_REDUCTIONS, assert_agrees, random_inputs, same_bits
from fresh import run_fresh

import klfast
from klfast import Estimator
from klfast.args.estimator import ESTIMATORS
from klfast.types.reduction import REDUCTIONS

every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
one_of_each_kind = pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])

OPTIONS = {
    "clip": {"estimator": Estimator("k3", log_ratio_clip=(-0.7, 0.9))},
    "kl-clip": {"estimator": Estimator("k3", kl_clip=0.3)},
    "tail": {"estimator": Estimator("r_log_r", linear_tail=0.6)},
    "all-limits": {"estimator": Estimator("k3", "value", "differentiable", 1.1, 1.3, 0.8, 0.9)},
    "normalizer": {"normalizer": 3.5, "reduction": "seq-mean-token-sum"},
    "coef": {"coef": -0.7, "reduction": "token-mean"},
    "packed": {"cu_seqlens": torch.tensor([0, 1, 1, 6]), "reduction": "seq-mean-token-mean"},
}


def leaves(*shape, dtype=torch.float32):
    """(logprobs, ref_logprobs) that ask for gradients."""
    logprobs, ref_logprobs, _ = random_inputs(shape, dtype)
    return logprobs.requires_grad_(), ref_logprobs.requires_grad_()


def smooth_points():
    """Six tokens in float64, each 1e-2 or more from every kink of the options above."""
    x = torch.tensor([-1.9, -0.5, -0.02, 0.03, 0.55, 1.7], dtype=torch.float64)
    logprobs = torch.linspace(-3, -1, 6, dtype=torch.float64)
    old_logprobs = logprobs + torch.tensor([0.4, -0.3, 0.05, 0.2, -0.25, 0.5], dtype=torch.float64)
    return logprobs, logprobs - x, old_logprobs


@pytest.mark.grid
@every_reduction
@every_estimator
@pytest.mark.parametrize("weighted", [False, True], ids=["no-old", "old"])
def test_gradcheck_of_every_estimator_and_reduction(backend, name, reduction, weighted):
    logprobs, ref_logprobs, old_logprobs = (t.reshape(2, 3) for t in smooth_points())
    mask = torch.tensor([[1.0, 0.5, 0.0], [2.0, 1.0, 0.25]])
    options = {"old_logprobs": old_logprobs} if weighted else {}

    def penalty(logprobs, ref_logprobs):
        return klfast.kl_penalty(
            logprobs,
            ref_logprobs,
            mask,
            estimator=name,
            reduction=reduction,
            backend=backend,
            **options,
        )

    inputs = (logprobs.requires_grad_(), ref_logprobs.requires_grad_())
    assert torch.autograd.gradcheck(penalty, inputs)


@pytest.mark.grid
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
def test_gradcheck_of_every_option(backend, options, needs):
    logprobs, ref_logprobs, old_logprobs = smooth_points()

    def penalty(logprobs, ref_logprobs):
        return klfast.kl_penalty(
            logprobs, ref_logprobs, old_logprobs=old_logprobs, backend=backend, **options
        )

    inputs = [
        tensor.requires_grad_(need)
        for tensor, need in zip((logprobs, ref_logprobs), needs, strict=True)
    ]
    assert torch.autograd.gradcheck(penalty, inputs)


@pytest.mark.grid
@every_reduction
@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["logprobs", "ref_logprobs"])
def test_a_gradient_does_not_depend_on_who_else_asks(backend, reduction, needs):
    both = leaves(3, 70, dtype=torch.float64)
    some = [t.detach().clone().requires_grad_(need) for t, need in zip(both, needs, strict=True)]
    for inputs in (both, some):
        result = klfast.kl_penalty(*inputs, reduction=reduction, backend=backend)
        result.sum().backward()
    for alone, together, need in zip(some, both, needs, strict=True):
        assert (alone.grad is not None) == need
        if need:
            torch.testing.assert_close(alone.grad, together.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("reduction", ["none", "token-mean"])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float16),
    ],
    ids=str,
)
def test_each_gradient_has_the_dtype_of_its_input(backend, dtypes, reduction):
    logprobs, ref_logprobs, _ = random_inputs((2, 9))
    assert_agrees(
        backend,
        logprobs.to(dtypes[0]),
        ref_logprobs.to(dtypes[1]),
        estimator=Estimator("k3"),
        reduction=reduction,
    )


@every_reduction
def test_a_tensor_against_itself_gets_both_gradients(backend, reduction):
    """The log-ratio is 0 whatever the tensor holds, so the two cancel."""
    logprobs, _ = leaves(3, 5)
    penalty = klfast.kl_penalty(
        logprobs, logprobs, estimator="r_log_r", reduction=reduction, backend=backend
    )
    penalty.sum().backward()
    assert torch.equal(logprobs.grad, torch.zeros(3, 5))


@one_of_each_kind
def test_the_two_gradients_do_not_share_memory(backend, reduction):
    logprobs, ref_logprobs = leaves(3, 5)
    klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, backend=backend).sum().backward()
    before = logprobs.grad.clone()
    ref_logprobs.grad.zero_()
    assert same_bits(logprobs.grad, before)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_reduction
def test_a_second_backward_is_right_after_the_first_gradient_was_changed(backend, reduction, dtype):
    inputs = leaves(3, 70, dtype=dtype)
    result = klfast.kl_penalty(*inputs, reduction=reduction, backend=backend)
    grad_output = torch.ones_like(result)
    first = torch.autograd.grad(result, inputs, grad_output, retain_graph=True)
    expected = [grad.clone() for grad in first]
    for grad in first:
        grad.fill_(torch.nan)
    second = torch.autograd.grad(result, inputs, grad_output)
    assert all(same_bits(a, b) for a, b in zip(second, expected, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("factor", [0.0, 1.0, -0.5, 8.0, 0.3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", SCALAR_REDUCTIONS)
def test_scaling_the_unit_gradient_equals_computing_it_anew(backend, reduction, dtype, factor):
    """To the two roundings of the former; exactly for a power of two."""
    inputs = leaves(2, 70, dtype=dtype)
    loss = factor * klfast.kl_penalty(*inputs, reduction=reduction, coef=0.2, backend=backend)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    anew = torch.autograd.grad(loss, inputs)
    rtol = 0 if factor in (0.0, 1.0, -0.5, 8.0) else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(first, anew, rtol=rtol, atol=0)
    assert factor == 0 or all(grad.count_nonzero() > 130 for grad in anew)


@one_of_each_kind
def test_a_result_may_be_changed_in_place(backend, reduction):
    inputs = leaves(3, 5)
    plain = klfast.kl_penalty(*inputs, reduction=reduction, backend=backend)
    expected = torch.autograd.grad(plain.sum(), inputs)
    changed = klfast.kl_penalty(*inputs, reduction=reduction, backend=backend)
    changed.mul_(4)
    grads = torch.autograd.grad(changed.sum(), inputs)
    assert all(same_bits(a, 4 * b) for a, b in zip(grads, expected, strict=True))


GRAD_OUTPUTS = {
    "expanded": lambda g: g[:1].expand_as(g),
    "expanded-columns": lambda g: g[:, :1].expand_as(g),
    "one-number": lambda g: g[0, 0].expand_as(g),
    "transposed": lambda g: g.t().contiguous().t(),
    "stepped": lambda g: g.repeat_interleave(2, 1)[:, ::2],
    "offset": lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].view_as(g),
}


@pytest.mark.parametrize("layout", GRAD_OUTPUTS.values(), ids=GRAD_OUTPUTS)
def test_grad_output_per_token_may_have_any_layout(backend, layout):
    inputs = leaves(5, 70)
    grad_output = layout(torch.randn(5, 70))
    penalty = klfast.kl_penalty(*inputs, backend=backend)
    grads = torch.autograd.grad(penalty, inputs, grad_output, retain_graph=True)
    expected = torch.autograd.grad(penalty, inputs, grad_output.contiguous())
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize(
    "layout",
    [lambda g: g[:1].expand(5), lambda g: g.repeat_interleave(3)[::3], lambda g: g.flip(0).flip(0)],
    ids=["expanded", "stepped", "contiguous"],
)
def test_grad_output_per_sequence_may_have_any_layout(backend, layout):
    inputs = leaves(5, 70)
    grad_output = layout(torch.randn(5))
    penalty = klfast.kl_penalty(*inputs, reduction="seq-mean", backend=backend)
    grads = torch.autograd.grad(penalty, inputs, grad_output, retain_graph=True)
    expected = torch.autograd.grad(penalty, inputs, grad_output.contiguous())
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


@every_reduction
def test_without_a_need_there_is_no_graph(backend, reduction):
    logprobs, ref_logprobs = leaves(3, 5)
    options = {"reduction": reduction, "backend": backend}
    expected = klfast.kl_penalty(logprobs, ref_logprobs, **options)
    assert expected.requires_grad
    detached = klfast.kl_penalty(logprobs.detach(), ref_logprobs.detach(), **options)
    with torch.no_grad():
        in_no_grad = klfast.kl_penalty(logprobs, ref_logprobs, **options)
    with torch.inference_mode():
        in_inference = klfast.kl_penalty(logprobs, ref_logprobs, **options)
    quiet = klfast.kl_penalty(
        logprobs, ref_logprobs, estimator=Estimator("k3", gradient="none"), **options
    )
    for penalty in (detached, in_no_grad, in_inference, quiet):
        assert not penalty.requires_grad
        assert same_bits(penalty, expected.detach())
    assert in_inference.is_inference()


def inference_tensors(logprobs):
    with torch.inference_mode():
        return {
            "ref_logprobs": logprobs - 0.5,
            "old_logprobs": logprobs + 0.1,
            "mask": torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0]).repeat(3, 1),
        }


@pytest.mark.parametrize("argument", ["ref_logprobs", "old_logprobs", "mask"])
@one_of_each_kind
def test_a_constant_may_come_out_of_inference_mode(backend, reduction, argument):
    """Where reference models run. Eager code takes it: a difference saves neither of its terms."""
    logprobs, _ = leaves(3, 5)
    constants = inference_tensors(logprobs)
    ordinary = {name: constant.clone() for name, constant in constants.items()}
    options = {"reduction": reduction, "backend": backend}
    (expected,) = torch.autograd.grad(
        klfast.kl_penalty(logprobs, **ordinary, **options).sum(), logprobs
    )
    mixed = {**ordinary, argument: constants[argument]}
    klfast.kl_penalty(logprobs, **mixed, **options).sum().backward()
    assert same_bits(logprobs.grad, expected)


@pytest.mark.parametrize("argument", ["ref_logprobs", "old_logprobs", "mask"])
@one_of_each_kind
def test_an_inference_tensor_may_change_after_the_forward(backend, reduction, argument):
    """Autograd does not see its changes: the gradients, first and second, are of what was read."""
    logprobs, _ = leaves(3, 5)
    constants = inference_tensors(logprobs)
    ordinary = {name: constant.clone() for name, constant in constants.items()}
    options = {"reduction": reduction, "backend": backend}
    before = klfast.kl_penalty(logprobs, **ordinary, **options)
    (expected,) = torch.autograd.grad(before.sum(), logprobs)
    penalty = klfast.kl_penalty(logprobs, **{**ordinary, argument: constants[argument]}, **options)
    with torch.inference_mode():
        constants[argument].add_(5)
    for _ in range(2):
        (grad,) = torch.autograd.grad(penalty.sum(), logprobs, retain_graph=True)
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-7)


@every_reduction
def test_statistics_carry_no_gradient(backend, reduction):
    inputs = leaves(3, 5)
    penalty, stats = klfast.kl_penalty(
        *inputs, reduction=reduction, return_stats=True, backend=backend
    )
    assert penalty.requires_grad
    assert not any(field.requires_grad for field in stats)
    assert not any(value.requires_grad for value in stats.as_dict().values())
    with pytest.raises(RuntimeError, match="does not require grad"):
        stats.kl.sum().backward()


@one_of_each_kind
def test_statistics_may_be_all_reduced_in_place_before_the_backward(backend, reduction):
    inputs = leaves(3, 5)
    options = {"reduction": reduction, "backend": backend, "return_stats": True}
    penalty, _ = klfast.kl_penalty(*inputs, **options)
    expected = torch.autograd.grad(penalty.sum(), inputs)
    penalty, stats = klfast.kl_penalty(*inputs, **options)
    for field in stats:
        field.mul_(2)
    grads = torch.autograd.grad(penalty.sum(), inputs)
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


@one_of_each_kind
def test_tensor_coef_and_old_logprobs_get_no_gradient(backend, reduction):
    logprobs, ref_logprobs, old_logprobs = random_inputs((3, 5))
    constants = {
        "old_logprobs": old_logprobs.requires_grad_(),
        "coef": torch.tensor(0.3, requires_grad=True),
    }
    logprobs.requires_grad_()
    penalty = klfast.kl_penalty(
        logprobs, ref_logprobs, reduction=reduction, backend=backend, **constants
    )
    penalty.sum().backward()
    assert logprobs.grad.count_nonzero() == 15
    assert all(constant.grad is None for constant in constants.values())


CURVED = {
    "inputs": lambda penalty, leaf: penalty(leaf).square().sum(),
    "constant-grad-output": lambda penalty, leaf: penalty(leaf).sum(),
    "under-a-curve": lambda penalty, leaf: penalty(leaf.square()).sum(),
}


@one_of_each_kind
@pytest.mark.parametrize("loss", CURVED.values(), ids=CURVED)
def test_a_second_derivative_raises_where_it_would_be_wrong(reduction, loss):
    """Above all it is not silently 0, or that of the rest of the graph."""
    leaf, ref_logprobs = leaves(3, 5, dtype=torch.float64)

    def penalty(logprobs):
        return klfast.kl_penalty(
            logprobs, ref_logprobs.detach(), reduction=reduction, backend="native"
        )

    (grad,) = torch.autograd.grad(loss(penalty, leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiable once.*backend='reference'"):
        torch.autograd.grad(grad.square().sum(), leaf)


@one_of_each_kind
def test_a_gradient_that_could_have_been_differentiated_is_the_same(backend, reduction):
    """create_graph alone, as in a WGAN-style penalty that is switched off, changes nothing."""
    inputs = leaves(3, 5)
    penalty = klfast.kl_penalty(*inputs, reduction=reduction, backend=backend).sum()
    graphed = torch.autograd.grad(penalty, inputs, create_graph=True)
    penalty = klfast.kl_penalty(*inputs, reduction=reduction, backend=backend).sum()
    expected = torch.autograd.grad(penalty, inputs)
    assert all(same_bits(a.detach(), b) for a, b in zip(graphed, expected, strict=True))


@every_reduction
@pytest.mark.parametrize("name", ["k2", "k3", "r_log_r"])
def test_the_reference_is_differentiable_twice(name, reduction):
    logprobs, ref_logprobs, _ = smooth_points()
    inputs = (logprobs.requires_grad_(), ref_logprobs.requires_grad_())
    assert torch.autograd.gradgradcheck(
        lambda *tensors: klfast.kl_penalty(
            *tensors, estimator=name, reduction=reduction, backend="reference"
        ),
        inputs,
    )


@pytest.mark.parametrize("argument", ["logprobs", "ref_logprobs", "old_logprobs", "mask"])
@pytest.mark.parametrize("reduction", ["none", "seq-sum", "token-mean"])
def test_an_input_changed_before_a_recomputing_backward_is_an_error(reduction, argument):
    logprobs, ref_logprobs, old_logprobs = random_inputs((3, 5))
    tensors = {
        "logprobs": logprobs.requires_grad_() * 1,
        "ref_logprobs": ref_logprobs,
        "old_logprobs": old_logprobs,
        "mask": torch.ones(3, 5),
    }
    penalty = klfast.kl_penalty(**tensors, reduction=reduction, backend="native").sum()
    if reduction in SCALAR_REDUCTIONS:
        penalty.backward(retain_graph=True)  # from the unit gradient
    with torch.no_grad():
        tensors[argument].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@pytest.mark.parametrize("argument", ["logprobs", "ref_logprobs", "old_logprobs", "mask"])
@pytest.mark.parametrize("reduction", ["none", "seq-sum", "token-mean"])
def test_an_input_that_changed_unseen_before_a_recomputing_backward_is_an_error(
    reduction, argument
):
    """In ways that autograd does not see."""
    names = ("logprobs", "ref_logprobs", "old_logprobs", "mask")
    for values in (lambda t: torch.rand(3, 5), lambda t: t.data[:1], lambda t: torch.empty(0)):
        inputs = [t.requires_grad_(n == 0) for n, t in enumerate(random_inputs((3, 5)))]
        tensors = dict(zip(names, [*inputs, torch.ones(3, 5)], strict=True))
        penalty = klfast.kl_penalty(**tensors, reduction=reduction, backend="native").sum()
        if reduction in SCALAR_REDUCTIONS:
            penalty.backward(retain_graph=True)  # from the unit gradient
        tensors[argument].data = values(tensors[argument])
        with pytest.raises(RuntimeError, match=f"{argument} must keep its shape and storage"):
            penalty.backward()


@pytest.mark.parametrize("reduction", SCALAR_REDUCTIONS)
def test_a_unit_gradient_is_that_of_the_forward_whatever_happens_to_the_inputs(reduction):
    """Either that or torch's error, never the gradient of what the tensor holds later."""
    logprobs, ref_logprobs = leaves(3, 5)
    penalty = klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, backend="native")
    expected = torch.autograd.grad(penalty, logprobs, retain_graph=True)[0].clone()
    penalty = klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, backend="native")
    with torch.no_grad():
        logprobs.mul_(3)
    penalty.backward()
    assert same_bits(logprobs.grad, expected)


@one_of_each_kind
def test_a_graph_that_was_freed_says_so(backend, reduction):
    logprobs, ref_logprobs = leaves(3, 5)
    penalty = klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, backend=backend).sum()
    penalty.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        penalty.backward()


@one_of_each_kind
def test_saved_tensors_may_be_kept_elsewhere(backend, reduction):
    """Offloading: whatever is saved comes back as a copy."""
    inputs = leaves(3, 5)
    plain = klfast.kl_penalty(*inputs, reduction=reduction, backend=backend)
    expected = torch.autograd.grad(plain.sum(), inputs)
    unpacked = []

    def unpack(copy):
        unpacked.append(copy)
        return copy.clone()

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        result = klfast.kl_penalty(*inputs, reduction=reduction, backend=backend).sum()
    first = torch.autograd.grad(result, inputs, retain_graph=True)
    again = torch.autograd.grad(result, inputs)
    assert unpacked
    for grads in (first, again):
        assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


def test_fp16_gradients_of_a_long_mean_keep_their_digits_under_loss_scaling(backend):
    """A token's share of 4M is 2e-7, below fp16's precision; times 65536 it is not."""
    tokens, scale = 2**22, 65536.0
    x = torch.linspace(-2, 2, 2**11, dtype=torch.float16).repeat(tokens // 2**11)
    logprobs = x.reshape(1, -1).requires_grad_()
    ref_logprobs = torch.zeros(1, tokens, dtype=torch.float16)
    penalty = klfast.kl_penalty(logprobs, ref_logprobs, reduction="token-mean", backend=backend)
    (scale * penalty).backward()
    exact = -torch.expm1(-x.double()) * scale / tokens
    error = (logprobs.grad[0].double() - exact).abs()
    half_a_unit = torch.finfo(torch.float16).eps / 2 * exact.abs() + 2**-25
    assert (error <= 1.001 * half_a_unit).all()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@one_of_each_kind
def test_anomaly_detection_finds_nothing_in_good_gradients_and_nan_in_bad(backend, reduction):
    logprobs, ref_logprobs = leaves(3, 5)
    options = {"estimator": "k2", "reduction": reduction, "backend": backend}
    with torch.autograd.detect_anomaly():
        klfast.kl_penalty(logprobs, ref_logprobs, **options).sum().backward()
        expected = (logprobs - ref_logprobs).detach()
        expected /= {"none": 1, "seq-mean": 5, "token-mean": 15}[reduction]
        torch.testing.assert_close(logprobs.grad, expected)
        bad = logprobs.detach().clone()
        bad[1, 2] = torch.nan
        bad.requires_grad_()
        penalty = klfast.kl_penalty(bad, ref_logprobs.detach(), **options).sum()
        with pytest.raises(RuntimeError, match="returned nan values"):
            penalty.backward()


@pytest.mark.grid
@pytest.mark.parametrize("needs", [(True, False), (True, True)], ids=["logprobs", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["k2", "k3"])
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_a_kept_nan_is_nan_in_the_gradient_too(backend, reduction, name, dtype, needs):
    """Not 0, which would hide it; and not one or the other by who asks in what dtype."""
    logprobs, ref_logprobs = leaves(2, 3, dtype=dtype)
    with torch.no_grad():
        logprobs[1, 2] = torch.nan
    penalty = klfast.kl_penalty(
        logprobs,
        ref_logprobs.requires_grad_(needs[1]),
        estimator=name,
        reduction=reduction,
        backend=backend,
    )
    penalty.sum().backward()
    expected = torch.zeros(2, 3, dtype=torch.bool)
    expected[1, 2] = True
    assert torch.equal(logprobs.grad.isnan(), expected)
    assert not needs[1] or torch.equal(ref_logprobs.grad.isnan(), expected)


PARALLEL = """
import sys, torch, klfast
import torch.distributed.nn  # before there is a group, which it would keep
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1
)
model = torch.nn.Linear(4, 6)
tokens, ref_logprobs = torch.randn(3, 4), torch.randn(3, 6)

def loss(module):
    logprobs = module(tokens).log_softmax(-1)
    return 3 * klfast.kl_penalty(
        logprobs, ref_logprobs, reduction="token-mean", coef=0.1, backend="native"
    )

expected = torch.autograd.grad(loss(model), list(model.parameters()))
parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
for _ in range(2):
    parallel.zero_grad(set_to_none=False)
    loss(parallel).backward()
torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected))
del parallel
torch.distributed.destroy_process_group()
print("equal")
"""


def test_under_distributed_data_parallel(tmp_path):
    """Hooks on parameters, buckets, and gradients as views of them."""
    assert run_fresh(PARALLEL, arguments=[str(tmp_path / "store")]) == "equal"


@pytest.mark.parametrize("wanted", ["scale", "ref_logprobs"])
def test_a_mixed_second_derivative_raises(wanted):
    """Differentiating the gradient by anything else it depends on is a second derivative too."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ref_logprobs = torch.tensor([-1.5, -2.2], requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    penalty = scale * klfast.kl_penalty(
        logprobs, ref_logprobs, reduction="token-sum", backend="native"
    )
    (grad,) = torch.autograd.grad(penalty, logprobs, create_graph=True)
    by = scale if wanted == "scale" else ref_logprobs
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.square().sum() + by.square().sum(), by)
