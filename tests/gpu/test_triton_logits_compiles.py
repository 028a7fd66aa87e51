"""The Triton kernels over logits become machine code for GPUs that are not here, and good one."""

import os

import pytest

pytest.importorskip("triton", reason="the Triton backend needs triton: pip install triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled here", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton_compile import instructions, resources
from triton_variants import CALLS, compiled

from klfast.backends.triton import logits_launch as launch


def assert_in_registers(kernel):
    usage = resources(kernel)
    assert usage.stack == usage.local == 0
    assert usage.registers <= 65_536 // (32 * launch._WARPS)


@pytest.mark.exhaustive
@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_spills(call, dtype):
    assert_in_registers(compiled(call, dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["unit", "strided"])
@pytest.mark.parametrize("call", ["kl", "tokens-backward"])
def test_no_layout_spills(call, layout):
    assert_in_registers(compiled(call, "bf16", layout=layout))


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", ["kl-backward", "tokens", "picks"])
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
