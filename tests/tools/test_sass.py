"""The counter of machine code, on code that is short enough to count by hand."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.machine_code import Kernel, feature_of, functions_of, pipe_of
from klfast.backends import BACKENDS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Reads vectors in a loop, adds their series where a vote allows, and stores a sum at the end.
LISTING = """
	.section	.text.sum,"ax",@progbits
.text.sum:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @P0 EXIT ;
.L_x_1:
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/                   VOTE.ANY P0, P0 ;
        /*0040*/              @P0 BRA `(.L_x_2) ;
        /*0050*/                   FFMA R1, R4, R1, 0.041666716337203979492 ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   MUFU.EX2 R1, R4 ;
        /*0080*/                   FADD R1, R1, R4 ;
        /*0090*/                   FMUL R1, R1, R4 ;
        /*00a0*/                   FMUL R1, R1, R4 ;
.L_x_3:
        /*00b0*/                   VIADD R2, R2, 0x10 ;
        /*00c0*/              @P1 BRA `(.L_x_1) ;
.L_x_4:
        /*00d0*/                   SHFL.BFLY PT, R5, R1, R6, 0x1f ;
        /*00e0*/              @P2 BRA `(.L_x_4) ;
        /*00f0*/              @P3 BRA `(.L_x_5) ;
        /*0100*/                   STG.E desc[UR4][R8.64], R5 ;
.L_x_5:
        /*0110*/                   EXIT ;
.L_x_6:
        /*0120*/                   BRA `(.L_x_6);
"""
NEAR = {"LDG.128": 1, "series": 1}
FAR = {"LDG.128": 1, "MUFU": 1}


@pytest.fixture
def kernel():
    return Kernel(functions_of(LISTING)["sum"])


@pytest.mark.parametrize(("features", "length"), [(NEAR, 7), (FAR, 9)], ids=["near", "far"])
def test_a_trip_around_a_loop_is_known_by_its_features(kernel, features, length):
    assert kernel.hot(Counter(features), 1).trip.length == length


@pytest.mark.parametrize(("stores", "length"), [(0, 49), (1, 50)])
def test_the_way_through_takes_every_trip_and_five_shuffles(kernel, stores, length):
    hot = kernel.hot(Counter(NEAR), 5)
    way = kernel.whole([hot], [], {"STG": stores}, writes=False)
    assert way.length == 2 + 5 * 7 + 5 * 2 + 1 + stores + 1
    assert way.length == length
    assert way.pipes["FP32"] == 5


@pytest.mark.parametrize(
    ("instruction", "pipe", "feature"),
    [
        ("@!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", "memory", "LDG.128"),
        ("LDG.E.U8 R4, desc[UR4][R2.64]", "memory", "LDG.8"),
        ("STG.E.128.STRONG.SM desc[UR8][R2.64], R4", "memory", "STG.128"),
        ("LDS.128 R4, [R2]", "memory", "LDS.128"),
        ("LDS.64 R4, [R2]", "memory", None),
        ("MUFU.EX2 R1, R2", "MUFU", "MUFU"),
        ("DADD R2, R2, R4", "FP64", None),
        ("F2FP.BF16.F32.PACK_AB R1, R2, R3", "conversion", None),
        ("FFMA R1, R2, R3, 0.0096181044355034828186", "FP32", "series"),
        ("FSETP.GT.AND P0, PT, R1, 1, PT", "ALU", None),
    ],
)
def test_instructions_are_known(instruction, pipe, feature):
    assert pipe_of(instruction) == pipe
    assert feature_of(instruction) == feature


def test_auto_prefers_the_backend_with_fewer_instructions():
    counts = json.loads((BENCHMARKS / "results" / "sass-sm90.json").read_text())
    native = [counts["cases"][name]["loop"] for name in counts["triton"]]
    assert all(a < b for a, b in zip(native, counts["triton"].values(), strict=True))
    assert list(BACKENDS)[:2] == ["native", "triton"]
