"""The interpreter finds each fault that is put into a copy of the kernels.

Every case compiles one unit and links it with the current other units.
"""

import re
from typing import NamedTuple

import ptx_build
import pytest
from fresh import run_fresh

pytestmark = [
    pytest.mark.exhaustive,  # half a minute of nvcc each
    pytest.mark.long,
    pytest.mark.skipif(not ptx_build.has_nvcc(), reason=ptx_build.NO_NVCC),
]

# A call on the CPU and on the changed kernels.
PROGRAM = """
import emulated, klfast, torch, warnings
from klfast import backends

torch.manual_seed(0)
warnings.simplefilter("ignore")
CALL
expected = call()
backends.BACKENDS["native"] = emulated.backend()
try:
    got = call()
except RuntimeError as error:
    print(error)
else:
    def is_same(a, b):
        digits = 1e-2 if a.dtype == torch.bfloat16 else 1e-5
        return torch.allclose(a, b, rtol=digits, atol=digits / 100)
    same = all(map(is_same, got, expected))
    print("right" if same else "wrong numbers")
"""
TOKENS = """
logits = torch.randn(2, 32003)
ids = torch.tensor([5, 32002])
def call():
    return (klfast.token_logprobs(logits, ids, backend="native"),)
"""
SLICED = """
ids = torch.tensor([5, 6])
logits = torch.randn(2, 66)[:, 2:]
def call():
    return (klfast.token_logprobs(logits, ids, backend="native"),)
"""
GRADIENT = """
logits, others = (torch.randn(3, 1029).bfloat16()[:, 1:].requires_grad_() for _ in range(2))
def call():
    kl = klfast.kl_divergence(logits, others.detach(), backend="native")
    return torch.autograd.grad(kl.sum(), logits)
"""
RING = """
import os
os.environ["KLFAST_RING"] = "1"
logits, others = (torch.randn(3, 1032).bfloat16().requires_grad_() for _ in range(2))
def call():
    kl = klfast.kl_divergence(logits, others.detach(), reduction="token-sum", backend="native")
    return torch.autograd.grad(kl, logits)
"""
PENALTY = """
logprobs, others = (-torch.rand(5, 9000) for _ in range(2))
def call():
    return (klfast.kl_penalty(logprobs, others, reduction="token-mean", backend="native"),)
"""

TOKEN_UNIT = "csrc/logits/cuda_token_logprobs.cu"
FORWARD_UNIT = "csrc/logits/cuda_divergence_forward.cu"
BACKWARD_UNIT = "csrc/logits/cuda_divergence_backward.cu"
PENALTY_UNIT = "csrc/penalty/cuda_plain.cu"


class Change(NamedTuple):
    """A fault replaces the first ``old`` in a file by ``new``. It also has the expected message."""

    unit: str
    file: str
    old: str
    new: str
    call: str
    said: str


CHANGES = {
    "no barrier of a block": Change(
        TOKEN_UNIT,
        "logits/cuda_token_sums.h",
        "    __syncthreads();\n    if (warp == 0) {",
        "    if (warp == 0) {",
        TOKENS,
        "in a race with|nobody wrote",
    ),
    "no barrier of a cluster": Change(
        TOKEN_UNIT,
        "logits/cuda_token_sums.h",
        "if (plan.blocks > 1) meet();",
        "",
        TOKENS,
        "in a race with|nobody wrote",
    ),
    "a block that leaves its cluster early": Change(
        TOKEN_UNIT,
        "logits/cuda_cluster.h",
        "if (plan.blocks > 1) cluster_wait();",
        "",
        TOKENS,
        "still reads its shared memory|that has ended",
    ),
    "the memory of the wrong rank": Change(
        TOKEN_UNIT,
        "logits/cuda_token_sums.h",
        "of_block(own(), part)",
        "of_block(own(), 0)",
        TOKENS,
        "wrong numbers",
    ),
    "a rank beyond the cluster": Change(
        TOKEN_UNIT,
        "logits/cuda_token_sums.h",
        "of_block(own(), part)",
        "of_block(own(), part + 1)",
        TOKENS,
        "maps to rank",
    ),
    "a number that nobody wrote": Change(
        TOKEN_UNIT,
        "logits/cuda_token_sums.h",
        "if (lane == 0) exchange.of_warp",
        "if (lane == 99) exchange.of_warp",
        TOKENS,
        "takes a value that nobody wrote",
    ),
    "a read beyond the end of a row": Change(
        TOKEN_UNIT,
        "logits/cuda_tiles.h",
        "return at + kChunk<T> < rest;",
        "return at + kChunk<T> <= rest;",
        SLICED,
        "reads 16 bytes at .* outside of",
    ),
    "swapped halves of a pair": Change(
        BACKWARD_UNIT,
        "device/cuda/load.h",
        "cvt.rn.bf16x2.f32 %0, %1, %2",
        "cvt.rn.bf16x2.f32 %0, %2, %1",
        GRADIENT,
        "wrong numbers",
    ),
    "vectors of memory that is not aligned": Change(
        BACKWARD_UNIT,
        "logits/cuda_rows.h",
        "load_shifted<uint32_t, 4, memory>(from)",
        "load_aligned<uint32_t, 4, memory>(from)",
        GRADIENT,
        "not aligned to 16 bytes",
    ),
    "no wait for bulk copies": Change(
        FORWARD_UNIT,
        "logits/cuda_ring.h",
        "    wait_for_copies(barrier(round), parity);\n",
        "",
        RING,
        "in a race with the bulk copy",
    ),
    "no fence before the arrival is counted": Change(
        PENALTY_UNIT,
        "device/cuda/last_block.h",
        "    __threadfence();\n",
        "",
        PENALTY,
        "counts without a fence before it",
    ),
    "no __syncwarp": Change(
        PENALTY_UNIT,
        "penalty/cuda_plain.h",
        "  __syncwarp();\n  const bool follows",
        "  const bool follows",
        PENALTY,
        "shared memory in a race with|nobody wrote",
    ),
}
SUPPORT = str(ptx_build.ROOT / "tests" / "support")
ENVIRONMENT = {"KLFAST_PTX_ARCH": "90", "KLFAST_PTX_RACES": "all", "PYTHONPATH": SUPPORT}


def changed(name):
    """The folder of the module with a fault.

    Unchanged files keep their times, so a second run compiles nothing.
    """
    change = CHANGES[name]
    folder = ptx_build.FOLDER / "faults" / name.replace(" ", "-")
    for source in sorted((ptx_build.ROOT / "csrc").rglob("*.*")):
        inside = source.relative_to(ptx_build.ROOT / "csrc")
        text = source.read_text()
        if str(inside) == change.file:
            assert change.old in text, f"{change.file} has changed: {change.old!r} is not there"
            text = text.replace(change.old, change.new, 1)
        copy = folder / "csrc" / inside
        if not copy.exists() or copy.read_text() != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
    return ptx_build.build_changed("90", folder / "csrc", change.unit, folder)


def said_of(call, folder):
    program = PROGRAM.replace("CALL", call)
    return run_fresh(program, timeout=300, KLFAST_PTX_FOLDER=str(folder), **ENVIRONMENT)


@pytest.mark.parametrize("call", [TOKENS, SLICED, GRADIENT, RING, PENALTY], ids=range(5))
def test_the_kernels_as_they_are_pass(call):
    assert said_of(call, ptx_build.build("90")) == "right"


@pytest.mark.parametrize("name", CHANGES)
def test_a_fault_is_seen(name):
    said = said_of(CHANGES[name].call, changed(name))
    assert re.search(CHANGES[name].said, said), said
