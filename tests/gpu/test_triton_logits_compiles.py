"""The Triton kernels over logits become machine code for GPUs that are not here, and good one."""

import os

import pytest

pytest.importorskip("triton", reason="the Triton backend needs triton: pip install triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled here", allow_module_level=True)

import torch
from triton.backends.compiler import GPUTarget
from triton_compile import build, instructions, resources

from klfast.backends.triton import logits_kernels as kernels
from klfast.backends.triton import logits_launch as launch

HOPPER = GPUTarget("cuda", 90, 32)


def result(dtype):
    return "*fp64" if dtype == "fp64" else "*fp32"


def divergence(dtype, backward=False, divergence="kl", stage="row"):
    """(kernel, pointers, constants) with a mask: the policy's gradient in the forward's read, both
    and those of tokens in the backward.
    """
    pointers = {"first": f"*{dtype}", "second": f"*{dtype}", "values": result(dtype)}
    pointers |= {"saved": "*fp64", "keep": "*i1"}
    options = {"DIVERGENCE": divergence}
    if stage == "row":
        pointers |= {"grad_first": f"*{dtype}"}
    if backward:
        pointers |= {"grad_second": f"*{dtype}"}
        incoming = ("grad_rows", "grad_logprobs", "grad_ref_logprobs")
        pointers |= dict.fromkeys(incoming, result(dtype)) | {"token_ids": "*i64"}
        return kernels.kl_divergence_backward_kernel, pointers, options
    options["STAGE"] = stage
    pointers |= {"partials": "*fp64"} if stage != "row" else {"shares": result(dtype)}
    return kernels.kl_divergence_kernel, pointers, options


def tokens(dtype, backward=False, stage="row"):
    """(kernel, pointers, constants) with entropies."""
    pointers = {"logits": f"*{dtype}", "token_ids": "*i64", "saved": "*fp64", "keep": "*i1"}
    pointers |= {"entropy": result(dtype)}
    if backward:
        pointers |= dict.fromkeys(("grad_logprobs", "grad_entropy"), result(dtype))
        return kernels.token_logprobs_backward_kernel, pointers | {"grad": f"*{dtype}"}, {}
    pointers |= {"logprobs": result(dtype)}
    pointers |= {"partials": "*fp64"} if stage != "row" else {}
    return kernels.token_logprobs_kernel, pointers, {"STAGE": stage}


CALLS = {
    "kl": (2, divergence),
    "kl-segment": (2, lambda dtype: divergence(dtype, stage="segment")),
    "kl-combine": (2, lambda dtype: divergence(dtype, stage="combine")),
    "kl-backward": (2, lambda dtype: divergence(dtype, backward=True)),
    "jsd": (2, lambda dtype: divergence(dtype, divergence="jsd")),
    "jsd-backward": (2, lambda dtype: divergence(dtype, backward=True, divergence="jsd")),
    "tokens": (1, tokens),
    "tokens-segment": (1, lambda dtype: tokens(dtype, stage="segment")),
    "tokens-backward": (1, lambda dtype: tokens(dtype, backward=True)),
}


def compiled(call, dtype, target=HOPPER, layout="aligned"):
    models, arguments = CALLS[call]
    kernel, pointers, constants = arguments(dtype)
    arithmetic = torch.float64 if dtype == "fp64" else torch.float32
    kind = constants.get("DIVERGENCE", "kl")
    constants["FORM"] = launch.form_of(arithmetic, layout, models, kind)
    finishes = constants.get("STAGE") in ("row", "combine")
    room = launch._ROOM if finishes and target.backend == "cuda" else {}
    return build(kernel, pointers, constants, target, launch._WARPS, **room)


def assert_in_registers(kernel):
    usage = resources(kernel)
    assert usage.stack == usage.local == 0
    assert usage.registers <= 65_536 // (32 * launch._WARPS)


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_spills(call, dtype):
    assert_in_registers(compiled(call, dtype))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("layout", ["unit", "strided"])
@pytest.mark.parametrize("call", ["kl", "tokens-backward"])
def test_no_layout_spills(call, layout):
    assert_in_registers(compiled(call, "bf16", layout=layout))


@pytest.mark.parametrize("call", ["kl-backward", "tokens"])
def test_fp64_is_for_checking_and_compiles_all_the_same(call):
    assert_in_registers(compiled(call, "fp64"))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("call", ["kl", "tokens"])
def test_other_chips(call, capability):
    assert_in_registers(compiled(call, "bf16", GPUTarget("cuda", capability, 32)))


@pytest.mark.parametrize("call", ["kl", "tokens-backward"])
def test_amd(call):
    assert compiled(call, "bf16", GPUTarget("hip", "gfx942", 64)).asm["amdgcn"]


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("call", ["kl", "tokens", "kl-backward"])
def test_aligned_rows_move_in_words_of_16_bytes(call, dtype):
    """Logits come by 16 bytes a lane, straight or through shared memory; gradients leave so."""
    code = instructions(compiled(call, dtype))
    loads = [name for name in code if name.startswith(("LDG", "LDGSTS"))]
    assert any(name.endswith("128") or ".128." in name for name in loads), set(loads)
    if "backward" in call:
        assert any("128" in name for name in code if name.startswith("STG"))


def test_one_variant_serves_every_shape():
    """Numbers of rows, words and strides are 64-bit arguments that nothing is compiled for."""
    for models, arguments in CALLS.values():
        kernel = arguments("bf16")[0]
        numbers = [p for p in kernel.params if p.annotation == "i64"]
        assert len(numbers) > 3 * models
        assert all(p.do_not_specialize for p in numbers)
