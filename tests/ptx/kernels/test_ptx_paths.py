"""The instructions of a small call: those of nvcc's PTX that some thread runs. A loop counts once.

A lone warp takes several cycles for each of them, and code that is in no cache comes from memory.
"""

import ptx_build
import pytest
from fresh import run_fresh

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.long,  # minutes of nvcc
    pytest.mark.skipif(not ptx_build.has_nvcc(), reason=ptx_build.NO_NVCC),
]
NVCC = "13.0"  # of the counts below

PROGRAM = """
import emulated, klfast, torch
from klfast import backends

backends.BACKENDS["native"] = emulated.backend()
logprobs, others = (-torch.rand(8, 512, dtype=torch.float32).to(torch.DTYPE) for _ in range(2))
mask = torch.ones(8, 512, dtype=torch.bool)
logprobs.requires_grad_(HAS_GRADIENT)
result = klfast.kl_penalty(logprobs, others, mask, reduction="REDUCTION", backend="native")
if HAS_GRADIENT:
    result.backward()
"""
MOST = {
    ("float32", "seq-sum", False): {"plain_kernel": 655},
    ("bfloat16", "seq-sum", False): {"plain_kernel": 655},
    ("float32", "token-mean", False): {"plain_kernel": 905},
    ("bfloat16", "token-mean", False): {"plain_kernel": 905},
    ("float32", "token-mean", True): {
        "plain_lengths_kernel": 665,
        "plain_kernel": 1025,
        "scale_kernel": 40,
    },
    ("bfloat16", "token-mean", True): {
        "plain_lengths_kernel": 665,
        "plain_kernel": 945,
        "scale_kernel": 40,
    },
}
"""The dtype, the reduction, and whether there is a gradient -> a kernel's most instructions."""


@pytest.mark.parametrize("call", MOST, ids=lambda call: "-".join(map(str, call)))
def test_a_small_call_has_a_short_path(call, tmp_path):
    dtype, reduction, has_gradient = call
    if not ptx_build.nvcc_version().startswith(NVCC):
        pytest.skip(f"the counts are of nvcc {NVCC}")
    program = PROGRAM.replace("DTYPE", dtype).replace("REDUCTION", reduction)
    run_fresh(
        program.replace("HAS_GRADIENT", str(has_gradient)),
        timeout=300,
        KLFAST_PTX_ARCH="90",
        KLFAST_PTX_FOLDER=str(ptx_build.build("90")),
        KLFAST_PTX_COVERAGE=str(tmp_path / "ran"),
        PYTHONPATH=str(ptx_build.ROOT / "tests" / "support"),
    )
    (file,) = tmp_path.iterdir()
    ran = dict(line.split() for line in file.read_text().splitlines() if "1" in line.split()[1])
    counts = {
        next(short for short in MOST[call] if f"{len(short)}{short}" in name): digits.count("1")
        for name, digits in ran.items()
    }
    assert counts.keys() == MOST[call].keys()
    assert all(counts[name] <= most for name, most in MOST[call].items()), counts
