"""The Triton kernels of ``rollout_correction``, as calls launch them, compiled without a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the Triton backend needs triton: pip install triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled here", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton_compile import instructions, recorded, resources

from klfast import Rejection
from klfast.backends.triton import rollout_launch
from klfast.rollout.call import rollout_call

FLOATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
ARCHITECTURES = (80, 90, 100)
OVER_TOKENS = (
    Rejection("ratio", low=0.5, high=2),
    Rejection("binary_kl", high=0.1),
    Rejection("binary_kl_reverse", high=0.1),
    Rejection("binary_tv", high=0.1),
)
OVER_SEQUENCES = (
    Rejection("ratio", "seq-sum", high=2),
    Rejection("k3", "seq-mean", high=0.1),
    Rejection("binary_kl", "seq-max", high=0.1),
    Rejection("abs", "seq-min", high=3),
)
OUTWARD = (Rejection("binary_tv", high=0.1, outward_only=True),)


def launches(
    dtype=torch.bfloat16,
    mask=torch.bool,
    weight="token",
    floor=None,
    cap=2.0,
    outside="truncate",
    reject=(),
    packed=False,
    strided=False,
    shape=(3, 64),
):
    """What a call launches, as ``Launch``es."""
    if packed:
        shape = (shape[0] * shape[1],)
    step = 2 if strided else 1
    wide = (*shape[:-1], step * shape[-1])
    logprobs, rollout_logprobs = (torch.zeros(wide, dtype=dtype)[..., ::step] for _ in range(2))
    given = None if mask is None else torch.zeros(wide, dtype=mask)[..., ::step]
    edges = torch.tensor([0, 3, shape[0]], dtype=torch.int32) if packed else None
    advantages = torch.zeros(shape) if any(rule.outward_only for rule in reject) else None
    cap = None if weight is None else cap
    call = rollout_call(
        logprobs,
        rollout_logprobs,
        given,
        weight,
        floor,
        cap,
        outside,
        reject,
        None,
        edges,
        advantages,
    )
    choices, numbers = call.spec.encoded()
    with recorded() as made:
        rollout_launch.rollout_correction(
            call.logprobs,
            call.rollout_logprobs,
            call.layout.mask,
            call.layout.cu_seqlens,
            call.advantages,
            list(choices),
            list(numbers),
            *call.spec.encoded_rules(),
        )
    return made


def names(made):
    shown = {
        "rollout_kernel": "tokens",
        "rollout_combine_kernel": "combine",
        "rollout_fill_kernel": "fill",
    }
    return [shown[each.kernel.fn.__name__] for each in made]


ONE_READ, WITH_TOTALS = ["tokens", "combine"], ["tokens", "combine", "fill"]
COSTS = {
    "weights-of-tokens": ({}, ONE_READ),
    "no-weights": ({"weight": None}, ONE_READ),
    "rules-over-tokens": ({"reject": OVER_TOKENS}, ONE_READ),
    "outward-only": ({"reject": OUTWARD}, ONE_READ),
    "rules-over-sequences": ({"reject": OVER_SEQUENCES}, WITH_TOTALS),
    "weights-of-sequences": ({"weight": "sequence"}, WITH_TOTALS),
    "geometric-weights": ({"weight": "geometric", "reject": OVER_TOKENS}, WITH_TOTALS),
    "eight-rules": ({"reject": OVER_TOKENS + OVER_SEQUENCES}, 2 * ONE_READ + ["fill"]),
    "four-rules-in-fp64": ({"reject": OVER_TOKENS, "dtype": torch.float64}, 4 * ONE_READ),
    "nothing": ({"shape": (0, 64)}, []),
}


@pytest.mark.parametrize(("options", "expected"), COSTS.values(), ids=COSTS)
def test_a_call_launches(options, expected):
    assert names(launches(**options)) == expected


KINDS = {
    "token": {},
    "none": {"weight": None},
    "icepop": {"floor": 0.5, "outside": "mask"},
    "sequence": {"weight": "sequence"},
    "one-rule": {"reject": OVER_TOKENS[:1]},
    "kpop": {"reject": OVER_TOKENS[1:3], "mask": torch.float32},
    "four-over-tokens": {"reject": OVER_TOKENS, "mask": torch.int64},
    "four-over-sequences": {"reject": OVER_SEQUENCES, "weight": "geometric"},
    "outward-only": {"reject": OUTWARD, "mask": None},
    "eight": {"reject": OVER_TOKENS + OVER_SEQUENCES},
    "packed": {"packed": True, "reject": OVER_SEQUENCES[:1], "mask": torch.bfloat16},
    "strided": {"strided": True, "reject": OVER_TOKENS[1:3], "mask": torch.float32},
}


def compilations():
    """(kind, dtype, capability): every kind in three dtypes, each on one of the chips in turn.

    A case compiles two kernels or more, some ten seconds each, so `make test` takes two of them.
    """
    for i, kind in enumerate(KINDS):
        for j, dtype in enumerate(("fp32", "bf16", "fp64")):
            yield kind, dtype, ARCHITECTURES[(i + j) % len(ARCHITECTURES)]
    yield "token", "fp16", 90


SHORT = (("token", "bf16", 90), ("four-over-sequences", "fp32", 90))
assert {*SHORT} <= {*compilations()}


@pytest.mark.parametrize(
    ("kind", "dtype", "capability"),
    [
        pytest.param(*case, marks=[] if case in SHORT else pytest.mark.exhaustive)
        for case in compilations()
    ],
)
def test_no_kernel_spills(kind, dtype, capability):
    for launch in launches(FLOATS[dtype], **KINDS[kind]):
        compiled = launch.build(GPUTarget("cuda", capability, 32))
        # ptxas reserves 8 bytes of stack for some kernels, and uses none.
        assert not any(name.startswith(("STL", "LDL")) for name in instructions(compiled))
        assert resources(compiled).registers < 255


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["token", "kpop", "four-over-sequences"])
def test_kernels_compile_for_amd(kind):
    for launch in launches(**KINDS[kind]):
        assert launch.build(GPUTarget("hip", "gfx942", 64)).asm["amdgcn"]


@pytest.mark.exhaustive
def test_no_sum_is_atomic():
    for launch in launches(reject=OVER_SEQUENCES, weight="geometric"):
        code = instructions(launch.build(GPUTarget("cuda", 90, 32)))
        assert not any(name.startswith(("ATOM", "RED.")) for name in code)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_nothing_is_compiled_for_a_new_size_or_bound(packed):
    def variants(shape, cap, bound):
        rules = (Rejection("ratio", high=bound), Rejection("k1", "seq-sum", high=bound))
        made = launches(shape=shape, cap=cap, reject=rules, packed=packed)
        return [launch.variant() for launch in made]

    once = variants((2, 24), 2.0, 3.0)
    for shape, cap, bound in (((1, 8), 1.0, 1.0), ((17, 5000), 1e300, 0.5), ((100, 4096), 3.0, 1)):
        assert variants(shape, cap, bound) == once
