"""Tests that need a GPU: streams, graphs, syncs, memory, and sizes that no CPU test reaches.

Numbers are compared with the reference in float64, or bit for bit with another call. A missing
backend fails if ``KLFAST_REQUIRE_CUDA=1``. Then only tests that need more GPU memory are skipped.
"""

import gpu
import pytest
import torch
from agreement import same_bits
from gpu import assert_same_bits, capture, different_bits, overwrite

import klfast
from klfast.types.reduction import REDUCTIONS

pytestmark = gpu.marks

DEVICES = [f"cuda:{index}" for index in range(max(1, torch.cuda.device_count()))]

RELATIVE = 1e-5
"""The relative error of a sum of k3's terms, which are all positive. A term at |x| < 6 may be off
by 1e-6, and the longest path through a reduction tree rounds."""

OF_LENGTH, OF_K1 = (1 + klfast.KLStats._fields.index(name) for name in ("length", "k1"))
"""Their positions in the compared outputs."""

LARGE_ROWS, LARGE_TOKENS = 2049, 1 << 20  # 2**31 + 2**20 elements

CASES = {
    "none, forward": ((33, 1000), False, "none", False),
    "seq-sum, forward": ((33, 1000), False, "seq-sum", False),
    "few long rows, forward": ((2, 300_000), False, "seq-sum", False),
    "seq-sum, two passes": ((33, 1000), False, "seq-sum", True),
    "token-mean, one read": ((33, 1000), False, "token-mean", True),
    "few long rows, one read": ((2, 300_000), False, "token-mean", True),
    "seq-mean-token-mean": ((33, 1000), False, "seq-mean-token-mean", True),
    "packed, two passes": ((7, 3000), True, "seq-mean", True),
    "packed, one read": ((7, 3000), True, "token-mean", True),
}
"""Name -> (shape, packed, reduction, backward)."""

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


backend, _memory = gpu.backend, gpu.memory_given_back


def make_inputs(shape, dtype=torch.float32, packed=False, device="cuda"):
    """(logprobs, ref_logprobs, mask, cu_seqlens or None)."""
    sequences, tokens = shape
    cu_seqlens = None
    if packed:
        shape = (sequences * tokens,)
        cuts = torch.randint(0, shape[0] + 1, (sequences - 1,)).sort().values.tolist()
        cu_seqlens = torch.tensor([0, *cuts, shape[0]], dtype=torch.int32, device=device)
    logprobs = (-4 * torch.rand(shape)).to(device, dtype)
    ref_logprobs = (logprobs - torch.randn(shape).to(device)).to(dtype)
    mask = (torch.rand(shape) < 0.8).to(device)
    return logprobs, ref_logprobs, mask, cu_seqlens


def compute(backend, inputs, reduction, backward=True, grad_out=None, **options):
    """[penalty, statistics, gradient of logprobs]. By default the incoming gradient is uneven."""
    logprobs, ref_logprobs, mask, cu_seqlens = inputs
    logprobs = logprobs.detach().requires_grad_(backward)
    penalty, stats = klfast.kl_penalty(
        logprobs,
        ref_logprobs,
        mask,
        reduction=reduction,
        cu_seqlens=cu_seqlens,
        return_stats=True,
        backend=backend,
        **options,
    )
    outputs = [penalty.detach(), *stats]
    if backward:
        if grad_out is None:
            grad_out = torch.linspace(1, 1.75, penalty.numel(), device=penalty.device)
            grad_out = grad_out.view_as(penalty).to(penalty)
        outputs += torch.autograd.grad(penalty, logprobs, grad_out.expand_as(penalty))
    return outputs


def compute_with_ones(backend, inputs, reduction):
    """The gradient of the penalty's sum. A row's gradient does not depend on its position."""
    return compute(backend, inputs, reduction, grad_out=torch.ones((), device="cuda"))


def call_of(backend, case, inputs):
    _, _, reduction, backward = case
    return lambda: compute(backend, inputs, reduction, backward)


def inputs_of(case, dtype=torch.float32):
    shape, packed, *_ = case
    return make_inputs(shape, dtype, packed)


def assert_right(outputs, inputs, reduction, backward=True):
    """Compare outputs with the reference in float64 on the CPU."""
    logprobs, ref_logprobs, mask, cu_seqlens = (None if t is None else t.cpu() for t in inputs)
    wide = (logprobs.double(), ref_logprobs.double(), mask, cu_seqlens)
    expected = compute("reference", wide, reduction, backward)
    largest = [float(want.abs().max()) if want.numel() else 0.0 for want in expected]
    largest[OF_K1] = largest[OF_LENGTH]  # k1's terms cancel, the others' do not
    for actual, want, size in zip(outputs, expected, largest, strict=True):
        rounding = torch.finfo(actual.dtype).eps
        torch.testing.assert_close(
            actual.cpu().double(), want, rtol=RELATIVE + rounding, atol=RELATIVE * size
        )


@cases
@dtypes
def test_replays_give_the_bits_of_eager_calls(backend, case, dtype):
    inputs = inputs_of(case, dtype)
    call = call_of(backend, case, inputs)
    replayed = gpu.assert_replays(inputs, lambda: inputs_of(case, dtype), call)
    assert_right(replayed, inputs, *case[2:])


@cases
def test_replays_on_one_stream_and_eager_calls_on_that_of_the_capture(backend, case):
    """A capture reserves its own memory, which later calls on its stream do not share."""
    capturing, replaying = torch.cuda.Stream(), torch.cuda.Stream()
    captured, eager = inputs_of(case), inputs_of(case)
    expected = [call_of(backend, case, inputs)() for inputs in (captured, eager)]
    graph, outputs = capture(call_of(backend, case, captured), capturing)
    call = call_of(backend, case, eager)
    torch.cuda.synchronize()
    wrong = []
    for _ in range(50):
        with torch.cuda.stream(replaying):
            graph.replay()
            wrong.append(different_bits(outputs, expected[0]))
        with torch.cuda.stream(capturing):
            wrong.append(different_bits(call(), expected[1]))
    torch.cuda.synchronize()
    assert torch.stack(wrong).tolist() == [0] * 100


@cases
def test_two_streams_at_once_do_not_disturb_each_other(backend, case):
    gpu.assert_streams_apart([call_of(backend, case, inputs_of(case)) for _ in range(2)], 200)


@cases
def test_a_call_waits_for_its_own_stream(backend, case):
    """The stream writes the inputs before the call. Another stream would be too early."""
    inputs = inputs_of(case)
    news = inputs_of(case)
    call = call_of(backend, case, inputs)
    expected = call_of(backend, case, news)()
    call()  # loads lazy modules
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # about 50 ms
        overwrite(inputs, news)
        outputs = call()
        different = different_bits(outputs, expected)
    side.synchronize()
    assert different.item() == 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@dtypes
def test_no_call_waits_for_the_device(backend, reduction, packed, dtype):
    inputs = make_inputs((5, 300), dtype, packed)
    options = {"coef": torch.tensor(0.1, device="cuda")}
    if REDUCTIONS[reduction].over != "one":
        options["normalizer"] = torch.tensor(9.0, device="cuda")
    with gpu.no_sync(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones((), device="cuda").item()
    gpu.assert_no_sync(lambda: compute(backend, inputs, reduction, **options))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_rewards_do_not_wait_for_the_device(backend, packed):
    *tensors, cu_seqlens = make_inputs((5, 300), packed=packed)
    scores = torch.randn(5, device="cuda")
    options = {"kl_coef": torch.tensor(0.1, device="cuda"), "cu_seqlens": cu_seqlens}
    gpu.assert_no_sync(lambda: [klfast.kl_rewards(scores, *tensors, backend=backend, **options)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_every_device_serves_its_own_tensors(backend, device, packed):
    inputs = make_inputs((5, 300), packed=packed, device=device)
    with torch.cuda.device(0):
        outputs = compute(backend, inputs, "seq-sum")
    assert {str(output.device) for output in outputs} == {device}
    assert_right(outputs, inputs, "seq-sum")


@pytest.mark.parametrize("shape", [(3, 70_001), (70_001, 3)], ids=["long", "many"])
@pytest.mark.parametrize("reduction", ["none", "seq-sum", "token-mean"])
@dtypes
def test_more_than_65535_tokens_or_sequences(backend, shape, reduction, dtype):
    inputs = make_inputs(shape, dtype)
    assert_right(compute(backend, inputs, reduction), inputs, reduction)


@pytest.fixture
def large_inputs():
    """Random tensors [2049, 2**20] in bf16, with more than 2**31 elements."""
    gpu.needs_large_memory()
    shape = (LARGE_ROWS, LARGE_TOKENS)
    logprobs = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    ref_logprobs, mask = torch.empty_like(logprobs), torch.empty_like(logprobs, dtype=torch.bool)
    for rows in logprobs.split(64), ref_logprobs.split(64):
        for part in rows:
            part.uniform_(-4, 0)
    for part in mask.split(64):
        part.bernoulli_(0.8)
    return logprobs, ref_logprobs, mask, None


@pytest.mark.parametrize("reduction", ["none", "seq-sum"])
def test_more_than_two_to_the_31_elements(backend, large_inputs, reduction):
    """Each sequence has the same bits in a small batch."""
    assert large_inputs[0].numel() > 1 << 31
    *outputs, gradient = compute_with_ones(backend, large_inputs, reduction)
    for start in range(0, LARGE_ROWS, 128):
        rows = slice(start, start + 128)
        few = tuple(None if tensor is None else tensor[rows] for tensor in large_inputs)
        expected = compute_with_ones(backend, few, reduction)
        actual = [*(output[rows] for output in outputs), gradient[rows]]
        assert_same_bits(actual, expected)


def test_a_sequence_of_more_than_two_to_the_31_tokens(backend, large_inputs):
    """A packed batch has this sequence and a short one behind it."""
    logprobs, ref_logprobs, mask, _ = (t if t is None else t.view(-1) for t in large_inputs)
    end, cut = logprobs.numel(), (1 << 31) + 12_345
    cu_seqlens = torch.tensor([0, cut, end], device="cuda")
    inputs = (logprobs, ref_logprobs, mask, cu_seqlens)
    outputs = compute_with_ones(backend, inputs, "seq-sum")
    behind = tuple(tensor[cut:] for tensor in inputs[:3])
    alone = compute_with_ones(backend, (*behind, torch.tensor([0, end - cut]).cuda()), "seq-sum")
    assert_same_bits([output[1:] for output in outputs[:-1]], alone[:-1])
    assert same_bits(outputs[-1][cut:], alone[-1])
    total = sum(
        klfast.kl_penalty(*parts, reduction="token-sum", backend=backend).double()
        for parts in zip(*(tensor[:cut].split(1 << 24) for tensor in inputs[:3]), strict=True)
    )
    torch.testing.assert_close(outputs[0][0].double(), total, rtol=RELATIVE, atol=0)
    assert outputs[OF_LENGTH][0].item() == pytest.approx(mask[:cut].sum().item(), rel=RELATIVE)


@dtypes
@pytest.mark.parametrize(
    ("reduction", "backward"),
    [
        ("none", False),
        ("none", True),
        ("seq-sum", False),
        ("seq-sum", True),
        ("token-mean", False),
        ("token-mean", True),
        ("seq-mean-token-mean", True),
    ],
)
@pytest.mark.parametrize("shape", [(256, 8192), (2, 1 << 20)], ids=["many", "long"])
def test_the_peak_is_the_outputs_and_a_little(backend, shape, dtype, reduction, backward):
    logprobs, ref_logprobs, mask, _ = make_inputs(shape, dtype)
    logprobs.requires_grad_(backward)

    def call():
        options = {"reduction": reduction, "backend": backend}
        penalty = klfast.kl_penalty(logprobs, ref_logprobs, mask, **options)
        if not backward:
            return [penalty]
        ones = torch.ones((), device="cuda").expand_as(penalty)
        return [penalty, *torch.autograd.grad(penalty, logprobs, ones)]

    gpu.assert_peak(call, sum(output.nbytes for output in call()))


def test_what_the_ops_refuse_is_an_error():
    logprobs = torch.zeros(2, 3, device="cuda")
    with pytest.raises(ValueError, match=r"coef must be finite in torch.float32, .* got 1e\+39"):
        klfast.kl_penalty(logprobs, logprobs, coef=1e39, backend="native")


# For compute-sanitizer, where everything is 10 to 100 times slower.
@pytest.mark.sanitizer
@dtypes
@pytest.mark.parametrize(
    ("shape", "packed", "reduction"),
    [
        ((3, 77), False, "none"),
        ((3, 77), False, "seq-sum"),
        ((3, 77), True, "seq-mean"),
        ((1, 9001), False, "token-mean"),
        ((2, 9001), True, "seq-mean-token-sum"),
    ],
)
def test_small(backend, shape, packed, reduction, dtype):
    inputs = make_inputs(shape, dtype, packed)
    assert_right(compute(backend, inputs, reduction), inputs, reduction)


@pytest.mark.sanitizer
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_small_rewards(backend, packed):
    logprobs, ref_logprobs, mask, cu_seqlens = make_inputs((3, 77), packed=packed)
    scores = torch.randn(3, device="cuda")
    tensors = (scores, logprobs, ref_logprobs, mask)
    rewards = klfast.kl_rewards(*tensors, kl_coef=0.1, cu_seqlens=cu_seqlens, backend=backend)
    wide = [t.cpu() if t.dtype == torch.bool else t.cpu().double() for t in tensors]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.cpu()
    expected = klfast.kl_rewards(*wide, kl_coef=0.1, cu_seqlens=cu_seqlens, backend="reference")
    torch.testing.assert_close(rewards.cpu().double(), expected, rtol=RELATIVE, atol=RELATIVE)
