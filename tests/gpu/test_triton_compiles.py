"""The Triton kernels compile to good machine code for GPUs, without a GPU."""

import inspect
import json
import os

import pytest
import torch

pytest.importorskip("triton", reason="the Triton backend needs triton: pip install triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled here", allow_module_level=True)

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton_compile import (
    SPILLED,
    VERSION,
    assert_no_spills,
    build,
    build_nvidia,
    instructions,
    recorded,
    resources,
)
from triton_variants import (
    CALLS,
    MEAN,
    PLAIN,
    compiled,
    constants,
    token_kernel,
    unit_gradient_kernel,
)

from benchmarks import sass
from klfast import Estimator
from klfast.args.penalty import Spec
from klfast.backends.triton import implementation, logits_launch
from klfast.backends.triton import penalty_kernels as triton_kernels
from klfast.backends.triton.divergences import DIVERGENCES
from klfast.backends.triton.math import ESTIMATORS
from klfast.types.reduction import REDUCTIONS

FLOATS = ("fp32", "bf16", "fp16", "fp64")
ARCHITECTURES = (80, 90, 100)
EVERYTHING = PLAIN._replace(
    weighs=True, caps=True, clips_log_ratio=True, linear_tail=True, clips_value=True
)
WEIGHTED = EVERYTHING._replace(clip_weighted=True)
K2_DETACHED = PLAIN._replace(weighs=True, detached=True, caps=True, k2_gradient=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_compiles_without_spills(estimator, dtype):
    assert_no_spills(unit_gradient_kernel(estimator, dtype))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_compiles_on_every_architecture(dtype, capability):
    assert_no_spills(unit_gradient_kernel("k3", dtype, capability))


VARIANTS = {
    "value": {"outputs": ("value",), "OVER": "one"},
    "statistics": {"STATISTICS": True},
    "finishes": {"outputs": ("result", "statistics"), "STATISTICS": True, "FINISHES": True},
    "rewards": {"outputs": ("value", "partials"), "REWARDS": True, "OVER": "one"},
    "backward": {
        "outputs": ("grad_logprobs", "grad_ref_logprobs"),
        "inputs": {"grad_out": "*fp32"},
        "GRADIENT": "token",
    },
    "packed": {"inputs": {"cu_seqlens": "*i32"}, "LAYOUT": "unit"},
    "strided": {"LAYOUT": "strided", "inputs": {"mask": "*bf16"}},
    "scalars": {
        "outputs": ("partials", "grad_logprobs"),
        "inputs": {"coef_tensor": "*bf16", "normalizer_tensor": "*i64"},
        "GRADIENT": "unit-of-shape",
        "NORMALIZED": True,
    },
    "mixed": {
        "dtype": "fp64",
        "outputs": ("partials", "grad_ref_logprobs"),
        "inputs": {"ref_logprobs": "*bf16", "grad_ref_logprobs": "*bf16"},
        "GRADIENT": "unit",
    },
    "everything": {
        "outputs": ("partials", "grad_logprobs", "grad_ref_logprobs"),
        "inputs": {"old_logprobs": "*fp32"},
        "FORM": EVERYTHING,
        "GRADIENT": "unit",
        "STATISTICS": True,
    },
    "clip-weighted": {
        "outputs": ("partials", "grad_logprobs", "grad_ref_logprobs"),
        "inputs": {"old_logprobs": "*fp32"},
        "FORM": WEIGHTED,
        "GRADIENT": "unit",
        "STATISTICS": True,
    },
    "k2-gradient": {
        "outputs": ("grad_logprobs",),
        "inputs": {"old_logprobs": "*fp32", "grad_out": "*fp32"},
        "FORM": K2_DETACHED,
        "GRADIENT": "scalar",
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_pass_compiles_without_spills(variant):
    assert_no_spills(token_kernel(**variant))


COMBINE = {
    "REDUCED": MEAN[torch.float32],
    "SCALAR": True,
    "MASKED": True,
    "SUMMED": True,
    "WEIGHTS": True,
    "STATISTICS": True,
}
RESULTS = {"weights": "*fp32", "statistics": "*fp32", "result": "*fp32"}


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize(("block", "warps"), [(128, 4), (1024, 16)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_combining_compiles_without_spills(packed, block, warps):
    pointers = RESULTS | {"partials": "*fp64"} | ({"cu_seqlens": "*i64"} if packed else {})
    options = COMBINE | {"BLOCK": block}
    assert_no_spills(
        build_nvidia(triton_kernels.combine_kernel, pointers, options, 90, num_warps=warps)
    )


def test_the_small_kernels_compile_without_spills():
    total = RESULTS | {"sums": "*fp64"}
    lengths = {"mask": "*i1", "partials": "*fp64"}
    layout = {"ACC": tl.float32, "LAYOUT": "aligned"}
    scaled = {"tensor": "*bf16", "factor": "*fp32"}
    for kernel, pointers, options, warps in (
        (triton_kernels.total_kernel, total, COMBINE | {"BLOCK": 1024}, 8),
        (triton_kernels.lengths_kernel, lengths, layout, 4),
        (triton_kernels.scale_kernel, scaled, layout, 4),
    ):
        names = inspect.signature(kernel.fn).parameters
        options = {name: value for name, value in options.items() if name in names}
        assert_no_spills(build_nvidia(kernel, pointers, options, 90, num_warps=warps))


@pytest.mark.parametrize(("dtype", "loads"), [("fp32", 4), ("bf16", 2)])
def test_aligned_inputs_are_read_16_bytes_at_a_time(dtype, loads):
    """A thread reads eight tokens of each of two inputs, and writes their gradients alike."""
    code = instructions(unit_gradient_kernel("k3", dtype))
    assert sum(name.startswith("LDG.E.128") for name in code) == loads
    assert sum(name.startswith("STG.E.128") for name in code) == loads // 2
    assert not any(name.startswith(("ATOM", "RED.")) for name in code)


@pytest.mark.parametrize(
    "variant", [{}, {"FORM": EVERYTHING, "STATISTICS": True}, {"LAYOUT": "unit"}], ids=str
)
def test_kernels_compile_for_amd(variant):
    pointers = {
        "logprobs": "*bf16",
        "ref_logprobs": "*bf16",
        "old_logprobs": "*bf16",
        "mask": "*i1",
        "weights": "*fp32",
        "grad_logprobs": "*bf16",
        "partials": "*fp64",
    }
    options = constants(GRADIENT="unit", **variant)
    machine_code = build(
        triton_kernels.kl_penalty_kernel, pointers, options, GPUTarget("hip", "gfx942", 64), 8
    )
    assert "gfx942" in machine_code.asm["amdgcn"]


@pytest.fixture
def launched():
    """The list of launches that calls would make."""
    with recorded() as launches:
        yield launches


def variants(launches, kernel=""):
    """The variants that the launches of a kernel, or of all kernels, would compile."""
    return {each.variant() for each in launches if each.kernel.fn.__name__.startswith(kernel)}


def launch(rows, width, reduction, coef, normalizer, packed, offset=0):
    """Forward and backward of a batch, as the ops launch them."""

    def tensor():
        return torch.zeros(rows * width + offset)[offset:].view((-1,) if packed else (rows, width))

    logprobs = tensor()
    edges = torch.arange(rows + 1) * width if packed else None
    call = (logprobs, tensor(), None, tensor(), None, edges, None, None)
    choices, numbers = Spec(Estimator("k3"), REDUCTIONS[reduction]).encoded()
    call += (choices, (*numbers[:-2], coef, normalizer))
    scalar = REDUCTIONS[reduction].is_scalar()
    _, weights, *_ = implementation("kl_penalty_fwd")(*call, None, True, scalar, False, True)
    shape = {"none": logprobs.shape}.get(reduction, () if scalar else (rows,))
    implementation("kl_penalty_bwd")(*call, torch.zeros(shape), weights, True, False)
    implementation("scale_")(logprobs.flatten(), torch.ones(()))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])
def test_nothing_is_compiled_for_a_new_size_or_number(launched, reduction, packed):
    """Sizes differ in value, in divisibility, and in the registers that hold them. Only rows of one
    segment have a variant of their own, which finishes them.
    """
    for width in (24, 4104):
        launch(2, width, reduction, 1.0, 0.0, packed)
    once = variants(launched)
    for rows, width, coef in ((1, 8, 0.0), (16, 1024, 1.0), (17, 5000, -0.25), (100, 4096, 1e300)):
        launch(rows, width, reduction, coef, 0.0, packed)
    assert variants(launched) == once


def test_lengths_and_addresses_that_are_not_aligned_have_one_variant_more(launched):
    launch(3, 7, "token-mean", 1.0, 0.0, packed=False)
    once = variants(launched, "kl_penalty_kernel")
    for rows, width, offset in ((1, 1, 0), (2, 4097, 0), (5, 333, 1), (3, 64, 3)):
        launch(rows, width, "token-mean", 2.0, 0.0, packed=False, offset=offset)
    assert variants(launched, "kl_penalty_kernel") == once


@pytest.mark.exhaustive
@pytest.mark.skipif(VERSION < (3, 8), reason="older Tritons make up to a tenth more instructions")
@pytest.mark.parametrize("name", sass.TRITON)
def test_the_table_of_instructions_has_the_loops_of_these_kernels(name):
    """`auto` prefers the CUDA kernels because of this table."""
    table = json.loads((sass.RESULTS / "sass.json").read_text())["triton"]
    assert sass.triton_loops(name) == pytest.approx(table[name], rel=0.05)


def assert_in_registers(kernel):
    usage = resources(kernel)
    assert usage.local == 0, usage
    assert usage.stack <= SPILLED, usage
    assert usage.registers <= 65_536 // (32 * logits_launch._WARPS)


@pytest.mark.exhaustive
@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_spills_over_logits(call, dtype):
    assert_in_registers(compiled(call, dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["unit", "strided"])
@pytest.mark.parametrize("call", ["kl", "tokens-backward"])
def test_no_layout_of_logits_spills(call, layout):
    assert_in_registers(compiled(call, "bf16", layout=layout))


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", ["kl-backward", "tokens", "picks"])
def test_fp64_logits_are_for_checking_and_compile_all_the_same(call):
    assert_in_registers(compiled(call, "fp64"))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("call", ["kl", "tokens"])
def test_logits_on_other_chips(call, capability):
    assert_in_registers(compiled(call, "bf16", GPUTarget("cuda", capability, 32)))


@pytest.mark.parametrize("call", ["kl", "tokens-backward"])
def test_logits_on_amd(call):
    assert compiled(call, "bf16", GPUTarget("hip", "gfx942", 64)).asm["amdgcn"]


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("call", ["kl", "tokens", "kl-backward"])
def test_aligned_rows_move_in_words_of_16_bytes(call, dtype):
    """A lane reads logits and writes gradients in words of 16 bytes."""
    code = instructions(compiled(call, dtype))
    loads = [name for name in code if name.startswith(("LDG", "LDGSTS"))]
    assert any(name.endswith("128") or ".128." in name for name in loads), set(loads)
    if "backward" in call:
        assert any("128" in name for name in code if name.startswith("STG"))


def test_a_new_formula_is_a_new_kernel():
    """Triton keeps compiled kernels on disk, by the sources of their functions."""
    for row in DIVERGENCES.values():
        functions = [field.value for field in row if hasattr(field.value, "cache_key")]
        assert len(functions) == (0 if row.is_kl.value else 2)
        assert all(function.cache_key in row.cache_key for function in functions)


def test_one_variant_serves_every_shape():
    """Sizes and strides are 64-bit arguments that are never specialized."""
    for models, arguments in CALLS.values():
        kernel = arguments("bf16")[0]
        numbers = [p for p in kernel.params if p.annotation == "i64"]
        assert len(numbers) > 3 * models
        assert all(p.do_not_specialize for p in numbers)
