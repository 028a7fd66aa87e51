"""Smooth tokens, which CPU kernels read in one loop, and all others give the same numbers.

Smooth are contiguous fp32 or bf16 log-probs under a mask of zeros and ones. A mask shows that it is
another only where its first other weight is: outputs may be written by then.
"""

import itertools
import math
import sys

import pytest
import torch
from agreement import random_inputs, same_bits
from fresh import run_fresh
from masked import FLOATS, INTEGERS
from refusals import GOOD_WEIGHTS

import klfast
from klfast import Estimator
from klfast.args.estimator import ESTIMATORS
from klfast.types.reduction import REDUCTIONS

GROUP, TILE, SEGMENT = 64, 1024, 16_384
LENGTH = SEGMENT + TILE + GROUP + 5
PLACES = {
    "first": 0,
    "end of the first group": GROUP - 1,
    "second tile": TILE,
    "end of the first segment": SEGMENT - 1,
    "second segment": SEGMENT,
    "last group": LENGTH - 1,
}
DTYPES = (torch.float32, torch.bfloat16)
FORMS = {
    "plain": Estimator("k3"),
    "limits": Estimator("k3", log_ratio_clip=1.0, kl_clip=0.5),
    "k2-gradient": Estimator("k3", gradient="k2"),
    "weighted": Estimator("k3", importance_cap=1.2),
}

every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
every_float = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def strided(tensor):
    """The same numbers in every second column, which are not smooth."""
    return torch.stack([tensor, torch.full_like(tensor, 3)], -1).flatten(-2)[..., ::2]


def outputs_of(tensors, mask, form=FORMS["plain"], reduction="none", **options):
    """[result, gradients, statistics] of a call in the native backend."""
    logprobs, ref_logprobs, old_logprobs = tensors
    leaves = [t.detach().requires_grad_() for t in (logprobs, ref_logprobs)]
    result, stats = klfast.kl_penalty(
        *leaves,
        mask,
        estimator=form,
        reduction=reduction,
        old_logprobs=old_logprobs if form is FORMS["weighted"] else None,
        return_stats=True,
        backend="native",
        **options,
    )
    grads = torch.autograd.grad(result.sum(), leaves[:1], retain_graph=True)
    grads += torch.autograd.grad(result.sum(), leaves)
    return [result.detach(), *grads, *stats]


def all_same_bits(first, second):
    return all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@every_form
@every_float
@pytest.mark.parametrize("reduction", ["none", "token-sum", "seq-mean", "token-mean"])
def test_smooth_tokens_have_the_bits_of_others(form, dtype, reduction):
    tensors = random_inputs((2, LENGTH), dtype, spread=0.5)
    keep = torch.rand(2, LENGTH) < 0.7
    smooth = outputs_of(tensors, keep, form, reduction)
    others = outputs_of([strided(t) for t in tensors], strided(keep), form, reduction)
    assert all_same_bits(smooth, others)


@pytest.mark.parametrize("mask_dtype", [*INTEGERS, *FLOATS], ids=str)
@every_float
def test_zeros_and_ones_of_any_dtype_are_bools(dtype, mask_dtype):
    tensors = random_inputs((1, LENGTH), dtype)
    keep = torch.rand(1, LENGTH) < 0.7
    for form in FORMS.values():
        bools = outputs_of(tensors, keep, form, "token-mean")
        assert all_same_bits(outputs_of(tensors, keep.to(mask_dtype), form, "token-mean"), bools)


@every_place
@every_float
@pytest.mark.parametrize("weight", [2.0, 0.5])
def test_one_other_weight_counts_wherever_it_is(dtype, weight, place):
    """And changes no bit of other tokens."""
    tensors = random_inputs((1, LENGTH), dtype)
    mask = (torch.rand(1, LENGTH) < 0.7).float()
    mask[:, place] = 1
    ones = outputs_of(tensors, mask)
    weighted = mask.clone()
    weighted[:, place] = weight
    for mask_dtype in (torch.float32, torch.float16, torch.float64):
        got = outputs_of(tensors, weighted.to(mask_dtype))
        for before, after in zip(ones[:4], got[:4], strict=True):
            expected = before.clone()
            expected[:, place] *= weight  # a power of 2: exact
            assert same_bits(after, expected)
        stats = klfast.KLStats(*got[4:])
        assert stats.length.item() == mask.sum().item() + weight - 1
    x = tensors[0].double() - tensors[1].double()
    exact = weighted.double() * (torch.expm1(-x) + x)
    total = outputs_of(tensors, weighted, reduction="token-mean")[0].item()
    assert total == pytest.approx((exact.sum() / weighted.double().sum()).item(), rel=1e-5)


@every_place
@pytest.mark.parametrize("weight", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_one_bad_weight_is_refused_wherever_it_is(reduction, weight, place):
    tensors = random_inputs((1, LENGTH))
    for mask_dtype in (torch.float32, torch.bfloat16, torch.float64):
        mask = torch.ones(1, LENGTH, dtype=mask_dtype)
        mask[:, place] = weight
        with pytest.raises(ValueError, match=f"mask {GOOD_WEIGHTS}"):
            outputs_of(tensors, mask, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [1e-60, 1 - 1e-9, 1 + 1e-8, 1e60])
def test_fp64_weights_count_as_fp64(weight, reduction):
    """Those that are 0 or 1 in fp32 too."""
    logprobs, ref_logprobs, _ = random_inputs((3, 70), torch.float64)
    mask = torch.ones(3, 70, dtype=torch.float64)
    mask[1:] = weight
    got, expected = [], []
    for backend, results in (("native", got), ("reference", expected)):
        leaf = logprobs.clone().requires_grad_()
        result = klfast.kl_penalty(leaf, ref_logprobs, mask, reduction=reduction, backend=backend)
        result.sum().backward()
        results += [result.detach(), leaf.grad]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


EDGES = {"minus-zero": (-0.0, 0.0), "minus-infinity": (-math.inf, 0.0), "far": (-200.0, 0.0)}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_sign_of_a_zero_depends_on_its_token_alone(name, edge):
    """Neither on strides, nor on a neighbour that is far from 0, nor on another's weight."""
    logprobs, ref_logprobs = torch.full((1, GROUP), -0.5), torch.full((1, GROUP), -0.3)
    logprobs[0, 0], ref_logprobs[0, 0] = edge
    far = logprobs.clone()
    far[0, 1] = -9.0
    half = torch.ones(1, GROUP)
    half[0, 5] = 0.5
    calls = itertools.product((logprobs, far), (lambda t: t, strided), (None, half))
    firsts = [
        [
            t[0, :1]
            for t in outputs_of(
                [layout(t) for t in (policy, ref_logprobs, ref_logprobs)], mask, Estimator(name)
            )[:4]
        ]
        for policy, layout, mask in calls
    ]
    assert all(all_same_bits(first, firsts[0]) for first in firsts)


GUARDED = """
import ctypes, mmap, torch, klfast

libc = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
keep = []

def at_the_end(tensor):
    data = tensor.view(torch.uint8).numpy().tobytes()
    pages = -(-len(data) // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = pages * PAGE
    memory[end - len(data) : end] = data
    assert libc.mprotect(start, end, 1) == 0 and libc.mprotect(start + end, PAGE, 0) == 0
    keep.append(memory)
    view = torch.frombuffer(memory, dtype=torch.uint8, count=len(data), offset=end - len(data))
    return view.view(tensor.dtype)

for n in (1, 5, 63, 64, 65, 127, 1023, 1024, 1025, 1088, 2047):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for mask_dtype in (torch.bool, torch.int16, torch.int64, torch.float16, torch.float64):
            inputs = [at_the_end(torch.rand(n).to(dtype)) for _ in range(3)]
            mask = at_the_end((torch.rand(n) < 0.7).to(mask_dtype))
            leaf = inputs[0].detach().requires_grad_()
            for old in (None, inputs[2]):
                for reduction in ("none", "token-mean"):
                    result, stats = klfast.kl_penalty(
                        leaf, inputs[1], mask, reduction=reduction, old_logprobs=old,
                        return_stats=True, backend="native",
                    )
                    result.sum().backward()
            klfast.kl_rewards(torch.ones(1), *inputs[:2], mask, kl_coef=0.1, backend="native")
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of Linux")
def test_nothing_is_read_beyond_an_input():
    """Each input ends with a page that cannot be written, before one that cannot be read."""
    assert run_fresh(GUARDED) == "done"


@pytest.mark.parametrize("threads", [2, 7])
@every_float
def test_threads_share_a_long_sequence_and_thousands_of_short_ones(dtype, threads, set_num_threads):
    lengths = [3, 0, 1, 64] * 500 + [5 * SEGMENT + 7] + [65, 0, 2] * 500
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tensors = random_inputs((sum(lengths),), dtype)
    keep = torch.rand(sum(lengths)) < 0.7
    results = []
    for count in (1, threads):
        set_num_threads(count)
        results.append(outputs_of(tensors, keep, reduction="seq-mean", cu_seqlens=cu_seqlens))
    assert all_same_bits(*results)
    kept = [piece.sum().item() for piece in keep.split(lengths)]
    assert klfast.KLStats(*results[0][4:]).length.tolist() == kept
