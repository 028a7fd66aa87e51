"""Memory stays flat over many calls of every public function, right or refused.

All cases run in one fresh process. It reports how the allocated bytes of malloc and the resident
memory grow with each call. PYTHONMALLOC makes Python's objects count too.

The first number is exact: a lost std::string is 48 bytes a call. The second number sees memory that
is mapped past malloc, in pages. It rises only when earlier cases have left no holes.
"""

import ctypes
import gc
import json
import pathlib
from itertools import pairwise

import pytest
import torch
from fresh import run_fresh

import klfast

STATM = pathlib.Path("/proc/self/statm")
LIBC = ctypes.CDLL(None)
PAGE = 4096
WARM_UP, CALLS = 1000, 3000
SLACK = 24  # bytes a call. The smallest object takes 32 bytes of malloc.

pytestmark = pytest.mark.skipif(
    not (STATM.exists() and hasattr(LIBC, "mallinfo2")), reason="needs /proc and glibc 2.33"
)

VALUES = {"mask": -1.0, "token_ids": 2**40, "cu_seqlens": 7}
"""Values in a tensor that a kernel refuses."""


def cases():
    """Name -> a call that leaves nothing behind.

    The import is local: pytest also collects this file where tests/conformance is not on its path.
    """
    from families import VARIANTS, Function

    made = {}
    for of in ((family, name) for family, names in VARIANTS.items() for name in names):
        function = Function(of, "native", mask=torch.float32)
        name = "-".join(of)
        made[name] = lambda f=function: f.loss(*f.leaves()).backward() if f.graded else f()
        for argument in VALUES.keys() & function.call.tensors.keys():
            right = function.call.tensors[argument]
            most = 2**40 if right.is_floating_point() else torch.iinfo(right.dtype).max
            wrong = torch.full_like(right, min(VALUES[argument], most))
            made[f"{name}-refused-{argument}"] = refused(function, {argument: wrong})
        first = function.call.policy
        made[f"{name}-refused-shape"] = refused(function, {"mask": torch.ones(first.numel() + 1)})
    _, stats = klfast.kl_penalty(*torch.randn(2, 2, 8), return_stats=True)
    for controller in (
        klfast.FixedKLController(0.1),
        klfast.AdaptiveKLController(0.1, 6.0),
        klfast.ExponentialKLController(),
        klfast.KLMonitor(stats.sequence_mean().abs().item()),
    ):
        made[type(controller).__name__] = lambda c=controller: c.update(stats)
    return made


def refused(function, tensors):
    def call():
        try:
            function.outputs(tensors)
        except ValueError:
            return
        raise AssertionError("the call was not refused")

    return call


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def memory():
    """(bytes that malloc has allocated, resident bytes)."""
    gc.collect()
    info = LIBC.mallinfo2()
    return info.uordblks + info.hblkhd, int(STATM.read_text().split()[1]) * PAGE


def grown(call):
    """The growth of both numbers in bytes a call, after calls that fill caches.

    A leak grows in both halves of the calls. A cache that fills once grows in one half.
    """
    for _ in range(WARM_UP):
        call()
    seen = [memory()]
    for _ in range(2):
        for _ in range(CALLS // 2):
            call()
        seen.append(memory())
    halves = [(b - a) / (CALLS // 2) for of in zip(*seen, strict=True) for a, b in pairwise(of)]
    return min(halves[:2]), min(halves[2:])


def report():
    torch.set_num_threads(1)
    LIBC.mallinfo2.restype = Mallinfo
    print(json.dumps({name: grown(call) for name, call in cases().items()}))


@pytest.mark.exhaustive
@pytest.mark.long
def test_no_call_leaves_memory_behind():
    code = "import sys; sys.path[:0] = sys.argv[1:]; import test_memory; test_memory.report()"
    here = pathlib.Path(__file__).parent
    folders = [str(here), *(str(here.with_name(name)) for name in ("support", "conformance"))]
    growth = json.loads(run_fresh(code, arguments=folders, timeout=900, PYTHONMALLOC="malloc"))
    assert not {
        name: (given_out, resident)
        for name, (given_out, resident) in growth.items()
        if given_out >= SLACK or resident >= PAGE / 2
    }
