"""Strides, offsets and odd sizes: how a tensor lies in memory changes no bit of the result."""

import pytest
import torch
from agreement import random_inputs, same_bits

import klfast
from klfast.types.reduction import REDUCTIONS

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
FLOATS = [torch.float32, torch.bfloat16]


def in_buffer(tensor, offset):
    """The same numbers, `offset` elements into a larger memory that is NaN elsewhere."""
    size = tensor.numel()
    buffer = torch.full((size + offset + 1,), torch.nan).to(tensor.dtype)
    buffer[offset : offset + size] = tensor.flatten()
    return buffer[offset : offset + size].view_as(tensor)


def between(tensor, dim, step):
    """Every `step`-th row or column of a larger tensor that is NaN elsewhere."""
    shape = list(tensor.shape)
    shape[dim] *= step
    larger = torch.full(shape, torch.nan).to(tensor.dtype)
    index = [slice(None)] * tensor.dim()
    index[dim] = slice(step - 1, None, step)
    larger[tuple(index)] = tensor
    return larger[tuple(index)]


LAYOUTS_2D = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every-2nd-column": lambda t: between(t, 1, 2),
    "every-3rd-row": lambda t: between(t, 0, 3),
    "every-2nd-of-both": lambda t: between(between(t, 0, 2), 1, 2),
    "middle-columns": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "one-row": lambda t: t[:1].expand_as(t),
    "one-column": lambda t: t[:, :1].expand_as(t),
    "one-number": lambda t: t[0, 0].expand_as(t),
    "overlapping-rows": lambda t: t.flatten().as_strided(t.shape, (1, 1)),
    "offset-1": lambda t: in_buffer(t, 1),
    "offset-3": lambda t: in_buffer(t, 3),
}
LAYOUTS_1D = {
    "every-2nd": lambda t: between(t, 0, 2),
    "column": lambda t: torch.stack([t, t, t], 1)[:, 1],
    "one-number": lambda t: t[:1].expand_as(t),
    "offset-1": lambda t: in_buffer(t, 1),
}


def call(tensors, backend, **options):
    """Result, gradients and statistics, as one list."""
    logprobs, ref_logprobs = (
        tensors[name].detach().requires_grad_() for name in ("logprobs", "ref_logprobs")
    )
    constants = {name: t for name, t in tensors.items() if not name.endswith("logprobs")}
    result, stats = klfast.kl_penalty(
        logprobs, ref_logprobs, **constants, backend=backend, return_stats=True, **options
    )
    grads = torch.autograd.grad(result.sum(), (logprobs, ref_logprobs), retain_graph=True)
    again = torch.autograd.grad(result.sum(), (logprobs, ref_logprobs))
    return [result.detach(), *grads, *again, *stats]


def assert_layout_does_not_matter(tensors, argument, layout, backend, **options):
    names = tensors if argument == "all" else (argument,)
    laid_out = {name: layout(t) if name in names else t for name, t in tensors.items()}
    plain = {name: t.contiguous() for name, t in laid_out.items()}
    got, expected = call(laid_out, backend, **options), call(plain, backend, **options)
    assert not expected[0].isnan().any()
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("argument", ["logprobs", "ref_logprobs", "mask", "all"])
@pytest.mark.parametrize("layout", LAYOUTS_2D.values(), ids=LAYOUTS_2D)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_padded_inputs_may_have_any_layout(backend, dtype, layout, argument):
    """1100 tokens: more than a block of 1024, and no multiple of a vector."""
    logprobs, ref_logprobs, _ = random_inputs((3, 1100), dtype)
    mask = (torch.rand(3, 1100) < 0.8).to(dtype)
    tensors = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "mask": mask}
    for reduction in ("none", "token-mean"):
        assert_layout_does_not_matter(tensors, argument, layout, backend, reduction=reduction)


@pytest.mark.parametrize("layout", LAYOUTS_2D.values(), ids=LAYOUTS_2D)
def test_old_logprobs_may_have_any_layout(backend, layout):
    logprobs, ref_logprobs, old_logprobs = random_inputs((3, 70))
    old_logprobs = layout(old_logprobs)
    tensors = {"logprobs": logprobs, "ref_logprobs": ref_logprobs}
    got = call(tensors, backend, old_logprobs=old_logprobs)
    expected = call(tensors, backend, old_logprobs=old_logprobs.contiguous())
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "one-row", "one-column", "middle-columns"])
def test_masks_of_any_dtype_may_have_any_layout(backend, layout, mask_dtype):
    logprobs, ref_logprobs, _ = random_inputs((3, 70))
    mask = torch.randint(2, (3, 70)).to(mask_dtype)
    tensors = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "mask": mask}
    assert_layout_does_not_matter(
        tensors, "mask", LAYOUTS_2D[layout], backend, reduction="token-mean"
    )


@pytest.mark.grid
@pytest.mark.parametrize("packed", [False, True], ids=["one-sequence", "packed"])
@pytest.mark.parametrize("argument", ["logprobs", "ref_logprobs", "mask", "all"])
@pytest.mark.parametrize("layout", LAYOUTS_1D.values(), ids=LAYOUTS_1D)
def test_flat_inputs_may_have_any_layout(backend, layout, argument, packed):
    logprobs, ref_logprobs, _ = random_inputs((1100,), torch.bfloat16)
    mask = torch.rand(1100) < 0.8
    mask = mask.float() + 0.5
    tensors = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "mask": mask}
    cu_seqlens = torch.tensor([0, 3, 3, 1029, 1100]) if packed else None
    for reduction in ("none", "seq-mean", "token-mean"):
        assert_layout_does_not_matter(
            tensors, argument, layout, backend, reduction=reduction, cu_seqlens=cu_seqlens
        )


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.repeat_interleave(2)[::2],
        lambda t: torch.stack([t + 1, t], 1)[:, 1],
        lambda t: torch.cat([t[:1] - 7, t])[1:],
    ],
    ids=["every-2nd", "column", "offset"],
)
@every_reduction
def test_cu_seqlens_may_have_any_layout(backend, reduction, layout, dtype):
    logprobs, ref_logprobs, _ = random_inputs((9,))
    cu_seqlens = torch.tensor([0, 2, 2, 9], dtype=dtype)
    tensors = {"logprobs": logprobs, "ref_logprobs": ref_logprobs}
    options = {"backend": backend, "reduction": reduction}
    got = call(tensors, cu_seqlens=layout(cu_seqlens), **options)
    expected = call(tensors, cu_seqlens=cu_seqlens, **options)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_scores_may_have_any_layout(backend):
    logprobs, ref_logprobs, _ = random_inputs((4, 5))
    scores = torch.randn(4)
    expected = klfast.kl_rewards(scores, logprobs, ref_logprobs, kl_coef=0.1, backend=backend)
    for layout in LAYOUTS_1D.values():
        laid_out = layout(scores)
        got = klfast.kl_rewards(laid_out, logprobs, ref_logprobs, kl_coef=0.1, backend=backend)
        assert same_bits(got[:, :-1].contiguous(), expected[:, :-1].contiguous())
        torch.testing.assert_close(got[:, -1] - expected[:, -1], laid_out - scores)


@pytest.mark.parametrize("kept", [1, 2, 128, 255])
def test_a_boolean_view_of_bytes_keeps_what_is_not_zero(backend, kept):
    """Masks out of images or numpy hold 255; torch reads any such byte as True."""
    logprobs, ref_logprobs, _ = random_inputs((3, 70))
    keep = torch.rand(3, 70) < 0.5
    view = (keep.to(torch.uint8) * kept).view(torch.bool)
    tensors = {"logprobs": logprobs, "ref_logprobs": ref_logprobs}
    got = call({**tensors, "mask": view}, backend, reduction="seq-mean")
    expected = call({**tensors, "mask": keep}, backend, reduction="seq-mean")
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_lazily_negated_tensors_are_negated(backend):
    complex_numbers = torch.randn(3, 70, dtype=torch.complex64)
    negated = complex_numbers.conj().imag
    assert negated.is_neg()
    tensors = {"logprobs": negated, "ref_logprobs": torch.zeros(3, 70)}
    plain = {**tensors, "logprobs": -complex_numbers.imag}
    got, expected = call(tensors, backend), call(plain, backend)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.grid
@every_reduction
@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_one_token(backend, reduction, shape):
    tensors = {"logprobs": torch.full(shape, -1.0), "ref_logprobs": torch.full(shape, -1.5)}
    result, grad, grad_ref, *_ = call(tensors, backend, estimator="k1", reduction=reduction)
    assert (result.item(), grad.item(), grad_ref.item()) == (0.5, 1.0, -1.0)


@pytest.mark.grid(meet=1)
@every_reduction
def test_more_tokens_than_a_16_bit_index_counts(backend, reduction):
    """Only the last of 65,537 is kept, so it alone is every sum and mean."""
    tokens = 2**16 + 1
    mask = torch.zeros(2, tokens, dtype=torch.bool)
    mask[1, -1] = True
    x = torch.full((2, tokens), torch.nan)
    x[1, -1] = 0.75
    tensors = {"logprobs": x, "ref_logprobs": torch.zeros(2, tokens), "mask": mask}
    result, grad, *_ = call(tensors, backend, estimator="k1", reduction=reduction)
    kept = {"none": (1, -1), "seq-sum": (1,), "seq-mean": (1,)}.get(reduction, ())
    assert result[kept].item() == 0.75
    assert result.sum().item() == 0.75
    assert same_bits(grad, mask.float())
