"""torch.compile(fullgraph=True): the values and gradients of eager klfast, compiled once."""

import pytest
import torch
from agreement import random_inputs, same_bits
from fresh import run_fresh
from torch._dynamo.testing import CompileCounterWithBackend

import klfast
from klfast import Estimator
from klfast.args.penalty import PenaltyCall, Spec
from klfast.args.rows import Hidden, Logits, Reduced, RowsArgs
from klfast.backends.native import NATIVE
from klfast.types.reduction import REDUCTIONS, Reduction

# Both are torch's own: dynamo makes a Function object to trace any autograd.Function whatever, and
# inductor's imports use TorchScript.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
ONE_OF_EACH_KIND = ("none", "seq-mean", "token-mean")

OPTIONS = {
    "plain": {},
    "statistics": {"return_stats": True},
    "packed": {"cu_seqlens": torch.tensor([0, 4, 4, 21])},
    "int32-packed": {"cu_seqlens": torch.tensor([0, 4, 4, 21], dtype=torch.int32)},
    "mask": {"mask": torch.tensor([True, False, True] * 7)},
    "weights": {"mask": torch.linspace(0, 2, 21), "return_stats": True},
    "old": {"old_logprobs": torch.linspace(-3, -1, 21), "estimator": Estimator("k1")},
    "limits": {"estimator": Estimator("k3", log_ratio_clip=1.0, kl_clip=0.5, linear_tail=0.8)},
    "k2-gradient": {"estimator": Estimator("k3", gradient="k2")},
    "no-gradient": {"estimator": Estimator("k3", gradient="none")},
    "numbers": {"coef": 0.3, "normalizer": 7, "reduction": "token-mean"},
    "tensors": {
        "coef": torch.tensor(0.3),
        "normalizer": torch.tensor(7),
        "reduction": "token-mean",
    },
}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Compiled code does not outlive its test, and backends are resolved as in a used process."""
    torch._dynamo.reset()
    logprobs, ref_logprobs, _ = random_inputs((2, 3))
    for name in ("auto", "native", "reference"):
        klfast.kl_penalty(logprobs, ref_logprobs, backend=name)


def inputs(*shape, dtype=torch.float32):
    logprobs, ref_logprobs, _ = random_inputs(shape, dtype)
    return logprobs.requires_grad_(), ref_logprobs.requires_grad_()


def run(function, tensors, *arguments):
    """(penalty, [statistics], gradients) of a call."""
    outputs = function(*tensors, *arguments)
    penalty, stats = outputs if isinstance(outputs, tuple) else (outputs, ())
    grads = torch.autograd.grad(penalty.sum(), tensors) if penalty.requires_grad else ()
    return [penalty.detach(), *stats, *grads]


def assert_like_eager(function, compiled, tensors, *arguments, exactly):
    for actual, expected in zip(
        run(compiled, tensors, *arguments), run(function, tensors, *arguments), strict=True
    ):
        if exactly:
            assert same_bits(actual, expected)
        torch.testing.assert_close(actual, expected)


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_compiles_to_the_bits_of_eager(backend, options):
    def penalty(*tensors):
        return klfast.kl_penalty(*tensors, backend=backend, **options)

    assert_like_eager(penalty, compiled(penalty), inputs(21), exactly=backend == "native")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_dtype_compiles(dtype):
    def penalty(*tensors):
        return klfast.kl_penalty(*tensors, reduction="token-mean", backend="native")

    assert_like_eager(penalty, compiled(penalty), inputs(3, 70, dtype=dtype), exactly=True)


@pytest.mark.grid(meet=1)
@every_reduction
def test_every_reduction_compiles(backend, reduction):
    def penalty(*tensors):
        return klfast.kl_penalty(*tensors, reduction=reduction, return_stats=True, backend=backend)

    assert_like_eager(penalty, compiled(penalty), inputs(3, 70), exactly=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "reduction",
    [
        pytest.param(name, marks=() if name in ONE_OF_EACH_KIND else pytest.mark.exhaustive)
        for name in REDUCTIONS
    ],
)
def test_every_reduction_runs_under_inductor(reduction):
    def penalty(*tensors):
        return klfast.kl_penalty(*tensors, reduction=reduction, return_stats=True)

    assert_like_eager(penalty, compiled(penalty, "inductor"), inputs(3, 70), exactly=True)


def test_inductor_fuses_what_is_around_the_op():
    token_ids = torch.randint(11, (3, 7, 1))

    def loss(logits, ref_logits):
        logprobs, ref_logprobs = (
            t.log_softmax(-1).gather(-1, token_ids).squeeze(-1) for t in (logits, ref_logits)
        )
        mask = token_ids[..., 0] != 3
        return 2 * klfast.kl_penalty(logprobs, ref_logprobs, mask, reduction="token-mean")

    tensors = inputs(3, 7, 11)
    torch.testing.assert_close(
        run(compiled(loss, "inductor"), tensors), run(loss, tensors), rtol=1e-5, atol=1e-6
    )


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("grad", [False, True])
def test_inference_compiles(backend, grad):
    tensors = [t.detach() for t in inputs(3, 7)]

    def penalty(*tensors):
        return klfast.kl_penalty(*tensors, reduction="token-mean", backend=backend)

    with torch.set_grad_enabled(grad):
        assert_like_eager(penalty, compiled(penalty), tensors, exactly=backend == "native")


def test_rewards_compile(backend):
    logprobs, ref_logprobs = inputs(3, 7)

    def rewards(scores, kl_coef):
        return klfast.kl_rewards(
            scores, logprobs.detach(), ref_logprobs.detach(), kl_coef=kl_coef, backend=backend
        )

    scores, kl_coef = torch.randn(3), torch.tensor(0.2)
    actual = compiled(rewards)(scores, kl_coef)
    torch.testing.assert_close(actual, rewards(scores, kl_coef))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("argument", ["coef", "normalizer"])
def test_a_controllers_coefficient_changes_without_recompiling(backend, argument, as_tensor):
    """Twenty values; recompile_limit is 8. The second may teach dynamo that numbers change."""
    counter = CompileCounterWithBackend("aot_eager")

    def penalty(logprobs, ref_logprobs, number):
        return klfast.kl_penalty(
            logprobs,
            ref_logprobs,
            reduction="token-mean",
            backend=backend,
            **{argument: number},
        )

    function = compiled(penalty, counter)
    for step in range(20):
        number = 0.1 + 0.01 * step
        number = torch.tensor(number) if as_tensor else number
        assert_like_eager(penalty, function, inputs(3, 7), number, exactly=False)
    assert counter.frame_count <= 2


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("reduction", ONE_OF_EACH_KIND)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_dynamic_shapes_compile_once(backend, packed, reduction):
    counter = CompileCounterWithBackend("aot_eager")

    def penalty(logprobs, ref_logprobs, cu_seqlens):
        return klfast.kl_penalty(
            logprobs, ref_logprobs, cu_seqlens=cu_seqlens, reduction=reduction, backend=backend
        )

    function = compiled(penalty, counter, dynamic=True)
    for size in (5, 7, 12, 64):
        tensors = inputs(size) if packed else inputs(size, 3 * size)
        cu_seqlens = torch.tensor([0, 2, *range(3, size - 1), size]) if packed else None
        assert_like_eager(penalty, function, tensors, cu_seqlens, exactly=False)
    assert counter.frame_count == 1


def test_marked_dynamic_dimensions_compile_once(backend):
    counter = CompileCounterWithBackend("aot_eager")

    def penalty(*tensors):
        return klfast.kl_penalty(
            *tensors, reduction="token-mean", return_stats=True, backend=backend
        )

    function = compiled(penalty, counter)
    for shape in ((5, 9), (6, 11), (2, 70)):
        tensors = inputs(*shape)
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, (0, 1))
        assert_like_eager(penalty, function, tensors, exactly=False)
    assert counter.frame_count == 1


def test_a_second_derivative_of_compiled_code_raises():
    leaf, ref_logprobs = inputs(3, 7)
    function = compiled(
        lambda t: klfast.kl_penalty(
            t.square(), ref_logprobs.detach(), reduction="token-mean", backend="native"
        )
    )
    penalty = function(leaf)
    (grad,) = torch.autograd.grad(penalty, leaf, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"does not currently support double backward|differentiable once"
    ):
        torch.autograd.grad(grad.sum(), leaf)


@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_compiled_autograd(reduction):
    tensors = inputs(3, 7)

    def loss():
        return 3 * klfast.kl_penalty(*tensors, reduction=reduction, backend="native").sum()

    expected = torch.autograd.grad(loss(), tensors)
    penalty = loss()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        penalty.backward()
    torch.testing.assert_close([t.grad for t in tensors], list(expected))


FIRST_CALL = """
import torch, klfast
penalty = torch.compile(
    lambda *tensors: klfast.kl_penalty(*tensors, reduction="token-mean"),
    fullgraph=True, backend="aot_eager",
)
logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
penalty(logprobs, torch.tensor([[-1.0, -2.5]])).backward()
print([round(slope, 4) for slope in logprobs.grad[0].tolist()])
"""


@pytest.mark.long
def test_the_first_call_of_a_process_may_be_a_compiled_one():
    assert eval(run_fresh(FIRST_CALL)) == [0.0, 0.1967]


def test_an_integer_normalizer_may_change(backend):
    def penalty(logprobs, ref_logprobs, count):
        return klfast.kl_penalty(
            logprobs, ref_logprobs, reduction="token-mean", normalizer=count, backend=backend
        )

    function = compiled(penalty)
    for count in (3, 5, 8):
        assert_like_eager(penalty, function, inputs(3, 7), count, exactly=False)


def test_whether_cuda_kernels_can_run_is_a_constant_to_the_compiler():
    """Asking the extension is nothing that dynamo could trace."""

    @torch.compile(fullgraph=True, backend="eager")
    def add_one_if_unavailable(x):
        return x + (NATIVE.why_not(torch.device("cuda", 0)) is not None)

    unavailable = NATIVE.why_not(torch.device("cuda", 0)) is not None
    assert add_one_if_unavailable(torch.zeros(())).item() == unavailable


@pytest.mark.parametrize(
    "named",
    [Spec, PenaltyCall, RowsArgs, Logits, Hidden, Reduced, Reduction],
)
def test_call_objects_have_no_property(named):
    """Dynamo of torch 2.10 follows the methods of a named tuple alone."""
    assert not [name for name, value in vars(named).items() if isinstance(value, property)]
