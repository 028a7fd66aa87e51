"""torch.compile(fullgraph=True) over logits: the values and gradients of eager klfast."""

import pytest
import torch
from agreement import same_bits
from agreement_logits import FAST, NOT_EMULATED, leaves, random_ids, random_logits, tensors_of
from torch._dynamo.testing import CompileCounterWithBackend

import klfast

# Both are torch's own: see test_compile.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]

every_fast = pytest.mark.parametrize("backend", FAST, indirect=True)
not_emulated = pytest.mark.parametrize("backend", NOT_EMULATED, indirect=True)

MASK = torch.tensor([[True, False, True], [True, True, False]])
IDS = torch.tensor([[0, 1, 2], [3, 4, 5]])
DIVERGENCES = {
    "per-token": {},
    "scalar": {"reduction": "token-mean", "mask": MASK, "coef": 0.3, "normalizer": 7},
    "forward": {"direction": "forward", "reduction": "seq-mean", "mask": MASK.float()},
    "jsd": {"direction": "jsd", "jsd_beta": 0.3, "reduction": "token-sum", "temperature": 0.7},
    "ids": {"token_ids": IDS, "mask": MASK},
    "statistics": {"token_ids": IDS, "return_stats": True, "reduction": "token-mean"},
    "entropy": {"return_entropy": True, "reduction": "token-mean", "mask": MASK},
    "forward-entropy": {"direction": "forward", "return_entropy": True, "temperature": 0.7},
    "everything": {"token_ids": IDS, "return_stats": True, "return_entropy": True},
}
TOKENS = {
    "log-probs": {},
    "entropy": {"return_entropy": True, "temperature": 0.7},
    "mask": {"mask": MASK, "ignore_index": 4, "return_entropy": True},
}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def run(function, tensors, *arguments):
    """Outputs, flat, and gradients of what has one."""
    outputs = function(*tensors, *arguments)
    flat = [part for part in torch.utils._pytree.tree_leaves(outputs) if part is not None]
    with_graph = [t for t in flat if t.requires_grad]
    grads = torch.autograd.grad([t.sum() for t in with_graph], tensors) if with_graph else ()
    return [t.detach() for t in (*flat, *grads)]


def assert_like_eager(function, of, tensors, *arguments, exactly):
    for found, expected in zip(
        run(of, tensors, *arguments), run(function, tensors, *arguments), strict=True
    ):
        if exactly:
            assert same_bits(found, expected)
        torch.testing.assert_close(found, expected)


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("options", DIVERGENCES.values(), ids=DIVERGENCES)
@every_fast
def test_divergences_compile_to_the_bits_of_eager(backend, options):
    def divergence(*logits):
        return klfast.kl_divergence(*logits, backend=backend, **options)

    tensors = leaves(*random_logits(2, 3, 37))
    assert_like_eager(divergence, compiled(divergence), tensors, exactly=backend == "native")


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("options", TOKENS.values(), ids=TOKENS)
@not_emulated
def test_log_probs_compile_to_the_bits_of_eager(backend, options):
    def log_probs(logits):
        return klfast.token_logprobs(logits, IDS, backend=backend, **options)

    tensors = leaves(random_logits(2, 3, 37)[0])
    assert_like_eager(log_probs, compiled(log_probs), tensors, exactly=backend == "native")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_every_dtype_compiles(dtype):
    def loss(logits, ref_logits):
        logprobs = klfast.token_logprobs(logits, IDS, backend="native")
        return logprobs.sum() + klfast.kl_divergence(
            logits, ref_logits, reduction="token-mean", backend="native"
        )

    tensors = leaves(*random_logits(2, 3, 37, dtype=dtype))
    assert_like_eager(loss, compiled(loss), tensors, exactly=True)


@pytest.mark.exhaustive
def test_inductor_fuses_what_is_around_the_ops():
    def loss(hidden, ref_hidden, head):
        logits, ref_logits = hidden @ head, ref_hidden @ head
        logprobs, entropy = klfast.token_logprobs(logits, IDS, return_entropy=True)
        divergence = klfast.kl_divergence(logits, ref_logits, reduction="token-mean")
        return (divergence - 0.1 * entropy.mean() - logprobs.mean()).square()

    tensors = leaves(torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8, 37))
    expected = run(loss, tensors)
    torch.testing.assert_close(
        run(compiled(loss, "inductor"), tensors), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("grad", [False, True])
@every_fast
def test_inference_compiles(backend, grad):
    tensors = random_logits(2, 3, 37)

    def both(logits, ref_logits):
        divergence = klfast.kl_divergence(logits, ref_logits, backend=backend)
        return divergence, klfast.token_logprobs(logits, IDS, backend=backend)

    with torch.set_grad_enabled(grad):
        assert_like_eager(both, compiled(both), tensors, exactly=backend == "native")


@every_fast
def test_a_controllers_coefficient_changes_without_recompiling(backend):
    """The second value may teach dynamo that it changes."""
    counter = CompileCounterWithBackend("aot_eager")

    def divergence(logits, ref_logits, coef):
        return klfast.kl_divergence(
            logits, ref_logits, reduction="token-mean", coef=coef, backend=backend
        )

    function = compiled(divergence, counter)
    for step in range(5):
        tensors = leaves(*random_logits(2, 3, 7))
        assert_like_eager(divergence, function, tensors, 0.4 + 0.05 * step, exactly=False)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@every_fast
def test_dynamic_shapes_compile_once(backend, packed):
    counter = CompileCounterWithBackend("aot_eager")

    def loss(logits, ref_logits, ids, cu_seqlens):
        outputs = klfast.kl_divergence(
            logits, ref_logits, cu_seqlens=cu_seqlens, token_ids=ids, backend=backend
        )
        logprobs = klfast.token_logprobs(logits, ids, backend=backend)
        return sum(output.sum() for output in tensors_of(outputs)) + logprobs.sum()

    function = compiled(loss, counter, dynamic=True)
    compilations = []
    for size in (5, 7, 12):
        shape = (size, 3 * size) if packed else (size, size + 2, 3 * size)
        tensors = leaves(*random_logits(*shape))
        cu_seqlens = torch.tensor([0, 2, *range(3, size - 1), size]) if packed else None
        ids = random_ids(tensors[0])
        assert_like_eager(loss, function, tensors, ids, cu_seqlens, exactly=False)
        compilations.append(counter.frame_count)
    # The first begins anew when it finds a number, the temperature, among an op's arguments.
    assert compilations[1:] == compilations[:-1]


@pytest.mark.parametrize("option", ["temperature", "jsd_beta"])
def test_true_is_no_number_in_compiled_code_either(option):
    logits, ref_logits = random_logits(2, 3, 7)

    def divergence(value):
        return klfast.kl_divergence(logits, ref_logits, direction="jsd", **{option: value})

    with pytest.raises(TypeError, match=f"{option} must be a finite number.*, got True of type"):
        torch.compile(divergence, backend="aot_eager")(True)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception"):
        compiled(divergence)(True)


def test_a_second_derivative_of_compiled_code_raises():
    leaf, ref_logits = leaves(*random_logits(2, 3, 7))
    function = compiled(
        lambda t: klfast.kl_divergence(
            t.square(), ref_logits.detach(), reduction="token-mean", backend="native"
        )
    )
    (grad,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"does not currently support double backward|differentiable once"
    ):
        torch.autograd.grad(grad.sum(), leaf)


def test_compiled_autograd():
    tensors = leaves(*random_logits(2, 3, 7))

    def loss():
        logprobs = klfast.token_logprobs(tensors[0], IDS, backend="native")
        scalar = klfast.kl_divergence(*tensors, reduction="token-mean", backend="native")
        return 3 * scalar + klfast.kl_divergence(*tensors, backend="native").sum() + logprobs.sum()

    expected = torch.autograd.grad(loss(), tensors)
    result = loss()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        result.backward()
    torch.testing.assert_close([t.grad for t in tensors], list(expected))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_a_new_temperature_needs_no_new_compilation(backend, grad):
    """An annealed one: as ``coef``, compiled once for the first number and once for all others."""
    logits, ref_logits = random_logits(2, 3, 11)
    leaf = logits.requires_grad_(grad)
    ids = random_ids(logits)

    def both(temperature):
        options = {"temperature": temperature, "backend": backend}
        logprobs, entropy = klfast.token_logprobs(leaf, ids, return_entropy=True, **options)
        kl = klfast.kl_divergence(leaf, ref_logits, reduction="token-mean", **options)
        return logprobs.sum() + entropy.sum() + kl

    temperatures = [0.5 + 0.1 * i for i in range(12)]
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(both, counter)
    found = [function(temperature) for temperature in temperatures]
    assert counter.frame_count <= 2
    for temperature, total in zip(temperatures, found, strict=True):
        expected = both(temperature)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
        if grad:
            grads = [torch.autograd.grad(value, leaf)[0] for value in (total, expected)]
            torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)
