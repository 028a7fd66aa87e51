"""Any shape, stride, dtype, mask, packing, estimator and reduction: backends give the truth."""

import torch
from agreement import assert_agrees
from draws import MASKS, edges
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import FLOATS

from klfast import Estimator
from klfast.args.estimator import ESTIMATORS, GRADIENTS, IMPORTANCE
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS


def junk(values, size):
    """Memory that no result may depend on."""
    return values.new_full(size, torch.nan if values.is_floating_point() else 1)


def contiguous(values):
    return values.contiguous()


def transposed(values):
    return values.t().contiguous().t()


def stepped(values):
    """Every third column of a wider tensor, from the second on."""
    wide = junk(values, (*values.shape[:-1], 3 * values.shape[-1] + 2))
    wide[..., 1 : 3 * values.shape[-1] + 1 : 3] = values
    return wide[..., 1 : 3 * values.shape[-1] + 1 : 3]


def sliced(values):
    """A window of a larger tensor: rows far apart, nothing aligned."""
    frame = junk(values, [size + 3 for size in values.shape])
    window = tuple(slice(1, size + 1) for size in values.shape)
    frame[window] = values
    return frame[window]


def expanded(values):
    """The first row (or token) over and over, without memory of its own."""
    return values[:1].contiguous().expand(values.shape)


STRIDES = (contiguous, transposed, stepped, sliced, expanded)


# Bounds off the grid of low-precision log-ratios: at a bound itself the gradient has two sides.
estimators = st.builds(
    Estimator,
    name=st.sampled_from(ESTIMATORS),
    gradient=st.sampled_from(GRADIENTS),
    importance=st.sampled_from(IMPORTANCE),
    importance_cap=st.sampled_from([None, 0.7123, 1.4142]),
    log_ratio_clip=st.sampled_from([None, None, 1.2345, (-0.7123, 2.1234), (0.1234, 1.2345)]),
    kl_clip=st.sampled_from([None, None, 0.8123, 3.1416]),
    clip_weighted=st.booleans(),
    linear_tail=st.sampled_from([None, None, 0.5123, 1.7321]),
)


@st.composite
def layouts(draw):
    """(shape, cu_seqlens or None)."""
    kind = draw(st.sampled_from(["padded", "one sequence", "packed"]))
    if kind == "padded":
        return (draw(st.integers(0, 4)), draw(st.integers(0, 9))), None
    if kind == "one sequence":
        return (draw(st.sampled_from([0, 1, 2, 7, 33])),), None
    packing = draw(edges())
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return (packing[-1],), torch.tensor(packing, dtype=dtype)


@st.composite
def calls(draw):
    """(logprobs, ref_logprobs, mask, options of kl_penalty, scale of an upstream gradient)."""
    shape, cu_seqlens = draw(layouts())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def uniform(low, high):
        values = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        return low + (high - low) * values.to(torch.get_default_device())

    def place(values, dtype):
        strides = [s for s in STRIDES if values.dim() == 2 or s is not transposed]
        if values.numel() == 0:
            strides = [contiguous]
        return draw(st.sampled_from(strides))(values.to(dtype))

    spread = draw(st.sampled_from([1e-4, 0.3, 4.0]))
    logprobs = uniform(-5, 0)
    ref_logprobs = place(logprobs + uniform(-spread, spread), draw(st.sampled_from(FLOATS)))
    old_logprobs = place(logprobs + uniform(-0.5, 0.5), draw(st.sampled_from(FLOATS)))
    logprobs = place(logprobs, draw(st.sampled_from(FLOATS)))
    mask = draw(st.sampled_from(MASKS))
    if mask is not None:
        kept = uniform(0, 1) < draw(st.sampled_from([0.0, 0.5, 0.9]))
        weight = uniform(0.1, 3) if mask in FLOATS else uniform(1, 4).floor()
        mask = place(torch.where(kept, weight, 0), mask)
    options = {
        "estimator": draw(estimators),
        "reduction": draw(st.sampled_from(list(REDUCTIONS))),
        "cu_seqlens": cu_seqlens,
        "old_logprobs": old_logprobs if draw(st.booleans()) else None,
        "coef": draw(st.sampled_from([1.0, 0.04, -3.0])),
    }
    if options["reduction"] in NORMALIZED_REDUCTIONS:
        options["normalizer"] = draw(st.sampled_from([None, 0.5, 1000.0]))
    return logprobs, ref_logprobs, mask, options, draw(st.sampled_from([1.0, -0.3, 1024.0]))


@settings(max_examples=3 * settings.default.max_examples)
@given(call=calls())
def test_every_call_agrees_with_the_oracle(backend, call):
    logprobs, ref_logprobs, mask, options, upstream = call
    masked = torch.zeros(logprobs.shape, dtype=torch.bool) if mask is None else mask == 0
    if logprobs.is_contiguous():
        logprobs = torch.where(masked, torch.nan, logprobs)
    assert_agrees(backend, logprobs, ref_logprobs, mask, upstream=upstream, **options)
