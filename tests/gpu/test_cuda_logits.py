"""Tests on a GPU of the ops over logits: streams, graphs, syncs, memory, bounds, sizes.

Numbers are compared with the reference in float64, or bit for bit with another call. ``test_cuda``
says which tests are skipped.
"""

import gpu
import pytest
import torch
from agreement_logits import tensors_of
from gpu import assert_same_bits

import klfast

pytestmark = gpu.marks

RELATIVE = 1e-5
"""The tolerance relative to a result's largest entry. It finds wrong indices, not rounding."""

CASES = {
    "kl": {},
    "kl, one read": {"reduction": "token-mean"},
    "kl, token ids": {"with_ids": True},
    "forward, per sequence": {"direction": "forward", "reduction": "seq-mean"},
    "jsd": {"direction": "jsd"},
    "jsd, one read": {"direction": "jsd", "reduction": "token-mean", "jsd_beta": 0.3},
    "log-probs": None,
}
"""Name -> options of ``kl_divergence``, or None for ``token_logprobs``."""

SHAPES = {
    "few words": (3, 5, 77),
    "odd": (2, 3, 50_257),
    "few long rows": (1, 2, 151_936),
    "many rows": (4, 300, 1000),
}

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


backend, _memory = gpu.backend, gpu.memory_given_back


def make_inputs(shape, dtype=torch.float32):
    """(logits, ref_logits, token_ids, mask)."""
    logits = (2.5 * torch.randn(shape, device="cuda")).to(dtype)
    ref_logits = (logits + 0.3 * torch.randn(shape, device="cuda")).to(dtype)
    ids = torch.randint(shape[-1], shape[:-1], device="cuda")
    mask = torch.rand(shape[:-1], device="cuda") < 0.8
    mask[..., 0] = True
    return logits, ref_logits, ids, mask


def compute(backend, inputs, case, backward=True):
    """All results, and the gradients of all logits for an uneven incoming gradient."""
    logits, ref_logits, ids, mask = inputs
    models = [t.detach().requires_grad_(backward) for t in (logits, ref_logits)]
    if case is None:
        del models[1:]
        options = {"mask": mask, "return_entropy": True, "backend": backend}
        results = klfast.token_logprobs(models[0], ids, **options)
    else:
        options = {"backend": backend, **case}
        if options.pop("with_ids", False):
            options["token_ids"] = ids
        results = klfast.kl_divergence(*models, mask, **options)
    results = tensors_of(results)
    outputs = [result.detach() for result in results]
    if backward:
        upstream = [uneven(result) for result in results]
        outputs += torch.autograd.grad(results, models, upstream)
    return outputs


def uneven(like):
    steps = torch.linspace(1, 1.75, like.numel(), dtype=like.dtype, device=like.device)
    return steps.view_as(like)


def assert_right(outputs, inputs, case, device="cuda"):
    """Compare outputs with the reference in float64 on a device."""
    logits, ref_logits, *others = (tensor.to(device) for tensor in inputs)
    expected = compute("reference", (logits.double(), ref_logits.double(), *others), case)
    for actual, want in zip(outputs, expected, strict=True):
        allowed = (RELATIVE + torch.finfo(actual.dtype).eps) * float(want.abs().max())
        torch.testing.assert_close(actual.to(device).double(), want, rtol=0, atol=allowed)


@cases
@pytest.mark.parametrize("shape", [SHAPES["odd"], SHAPES["few long rows"]], ids=["odd", "long"])
def test_replays_give_the_bits_of_eager_calls(backend, case, shape):
    inputs = make_inputs(shape, torch.bfloat16)
    replayed = gpu.assert_replays(
        inputs, lambda: make_inputs(shape, torch.bfloat16), lambda: compute(backend, inputs, case)
    )
    assert_right(replayed, inputs, case)


@cases
def test_two_streams_at_once_do_not_disturb_each_other(backend, case):
    inputs = [make_inputs(SHAPES["few long rows"]) for _ in range(2)]
    gpu.assert_streams_apart([lambda x=x: compute(backend, x, case) for x in inputs], 50)


@cases
@dtypes
def test_no_call_waits_for_the_device(backend, case, dtype):
    inputs = make_inputs(SHAPES["many rows"], dtype)
    gpu.assert_no_sync(lambda: compute(backend, inputs, case))


@cases
@shapes
def test_rows_have_the_bits_that_they_have_alone(backend, case, shape):
    inputs = make_inputs(shape, torch.bfloat16)
    if case is not None and "reduction" in case:
        case = {**case, "reduction": "none"}
    rows = [tensor.flatten(0, 1) for tensor in inputs]
    *results, last = compute(backend, rows, case, backward=False)
    for row in {0, 1, len(last) // 2, len(last) - 1}:
        alone = compute(backend, [t[row : row + 1] for t in rows], case, backward=False)
        assert_same_bits(alone, [result[row : row + 1] for result in (*results, last)])


@dtypes
@pytest.mark.parametrize(
    "options", [{}, {"direction": "jsd"}, {"reduction": "token-mean"}], ids=str
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("shape", [(2, 512, 32_000), (1, 2, 1 << 22)], ids=["many", "long"])
def test_the_peak_of_a_divergence_is_its_gradient(backend, shape, dtype, options, backward):
    logits, ref_logits, *_ = make_inputs(shape, dtype)
    logits.requires_grad_(backward)

    def call():
        result = klfast.kl_divergence(logits, ref_logits, **options, backend=backend)
        return torch.autograd.grad(result.sum(), logits) if backward else result

    gpu.assert_peak(call, logits.nbytes * backward)


@dtypes
@pytest.mark.parametrize("kind", ["forward", "backward", "in place"])
@pytest.mark.parametrize("shape", [(2, 512, 32_000), (1, 2, 1 << 22)], ids=["many", "long"])
def test_the_peak_of_log_probs_is_their_gradient_or_the_logits_own(backend, shape, dtype, kind):
    logits, _, ids, _ = make_inputs(shape, dtype)
    logits.requires_grad_(kind != "forward")

    def call():
        inplace = kind == "in place"
        computed = logits * 1 if inplace else logits  # by a model: they are no leaf
        options = {"return_entropy": True, "inplace_backward": inplace, "backend": backend}
        logprobs, entropy = klfast.token_logprobs(computed, ids, **options)
        if kind == "forward":
            return logprobs, entropy
        return torch.autograd.grad((logprobs + entropy).sum(), computed)

    gpu.assert_peak(call, 0 if kind == "forward" else logits.nbytes)


@cases
def test_more_than_two_to_the_31_elements(backend, case):
    """Each row has the same bits in a small batch."""
    gpu.needs_large_memory()
    shape = (16_400, 131_072)
    logits = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    ref_logits = torch.empty_like(logits)
    for part, ref_part in zip(logits.split(256), ref_logits.split(256), strict=True):
        part.normal_(std=2.5)
        ref_part.copy_(part).add_(0.3 * torch.randn_like(part))
    assert logits.numel() > 1 << 31
    ids = torch.randint(shape[1], shape[:1], device="cuda")
    inputs = (logits, ref_logits, ids, torch.ones_like(ids, dtype=torch.bool))
    if case is not None and "reduction" in case:
        case = {**case, "reduction": "none"}
    outputs = with_a_gradient_of_ones(backend, inputs, case)
    for start in (0, shape[0] // 2, shape[0] - 16):
        rows = slice(start, start + 16)
        few = with_a_gradient_of_ones(backend, [tensor[rows] for tensor in inputs], case)
        assert_same_bits([output[rows] for output in outputs], few)


def with_a_gradient_of_ones(backend, inputs, case):
    """The first result and its gradient. A row's numbers do not depend on its position."""
    logits, ref_logits, ids, mask = inputs
    logits = logits.detach().requires_grad_()
    if case is None:
        result = klfast.token_logprobs(logits, ids, mask=mask, backend=backend)
    else:
        options = {name: value for name, value in case.items() if name != "with_ids"}
        result = klfast.kl_divergence(logits, ref_logits, mask, **options, backend=backend)
    ones = torch.ones((), device="cuda").expand_as(result)
    return [result.detach(), *torch.autograd.grad(result, logits, ones)]


# For compute-sanitizer, where everything is 10 to 100 times slower: the reference is on the CPU.
@pytest.mark.sanitizer
@cases
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 77), torch.bfloat16), ((1, 2, 9001), torch.float32)],
    ids=["short", "long"],
)
def test_small(backend, case, shape, dtype):
    inputs = make_inputs(shape, dtype)
    assert_right(compute(backend, inputs, case), inputs, case, "cpu")


@pytest.mark.sanitizer
def test_ids_outside_of_the_vocabulary_reach_no_memory(backend):
    """Their log-probs are NaN, and no memory outside is read or written."""
    logits, ref_logits, ids, mask = make_inputs((2, 3, 1001))
    ids[0, 0], ids[1, 0] = 1 << 40, -(1 << 40)
    mask[:] = True
    logits.requires_grad_()
    logprobs = klfast.token_logprobs(logits, ids, backend=backend)
    found = klfast.kl_divergence(logits, ref_logits, token_ids=ids, backend=backend)
    of_policy, of_reference = found.logprobs, found.ref_logprobs
    for of in (logprobs, of_policy, of_reference):
        assert of.isnan().nonzero().tolist() == [[0, 0], [1, 0]]
    (grad,) = torch.autograd.grad((logprobs + of_policy + of_reference).sum(), logits)
    assert grad[:, 1:].isfinite().all()
