"""Memory is flat over many calls of every public function, right or refused.

All cases run one after the other in a fresh process, which reports what has grown with each call:
the bytes that malloc has given out (Python's objects too: PYTHONMALLOC), and the resident memory.
The first is exact: a std::string that is lost is 48 bytes a call. The second rises only when the
holes that earlier cases left are full, but sees what is mapped past malloc, by pages.
"""

import ctypes
import gc
import json
import pathlib

import pytest
import torch
from fresh import run_fresh

import klfast

STATM = pathlib.Path("/proc/self/statm")
LIBC = ctypes.CDLL(None)
PAGE = 4096
WARM_UP, CALLS = 1000, 3000
SLACK = 24
"""Bytes a call; the smallest object takes malloc 32."""

pytestmark = pytest.mark.skipif(
    not (STATM.exists() and hasattr(LIBC, "mallinfo2")), reason="needs /proc and glibc 2.33"
)

B, T, V = 2, 8, 12
torch.manual_seed(0)
LOGPROBS, REF_LOGPROBS, OLD_LOGPROBS = torch.randn(3, B, T)
MASK = torch.rand(B, T) < 0.7
SCORES = torch.randn(B)
LOGITS, REF_LOGITS = torch.randn(2, B, T, V)
IDS = torch.randint(V, (B, T))
LIMITED = klfast.Estimator("k3", log_ratio_clip=(-2.0, 3.0), kl_clip=1.0, importance_cap=4.0)
STATS = klfast.kl_penalty(LOGPROBS, REF_LOGPROBS, return_stats=True)[1]


def leaf(tensor):
    return tensor.detach().requires_grad_()


# What a call is: one function per case, which leaves nothing behind.


def penalty(reduction):
    return lambda: klfast.kl_penalty(
        LOGPROBS, REF_LOGPROBS, MASK, reduction=reduction, return_stats=True
    )


def penalty_and_gradient(reduction):
    """One read for a scalar, two for what is per sequence."""
    return lambda: (
        klfast.kl_penalty(
            leaf(LOGPROBS),
            REF_LOGPROBS,
            MASK.float(),
            estimator=LIMITED,
            old_logprobs=OLD_LOGPROBS,
            reduction=reduction,
        )
        .sum()
        .backward()
    )


def rewards():
    return klfast.kl_rewards(SCORES, LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.1)


def tokens():
    return klfast.token_logprobs(LOGITS, IDS, mask=MASK, return_entropy=True)


def tokens_and_gradient():
    klfast.token_logprobs(leaf(LOGITS), IDS, mask=MASK).sum().backward()


def tokens_and_gradient_inplace():
    logits = leaf(LOGITS).clone()
    klfast.token_logprobs(logits, IDS, inplace_backward=True).sum().backward()


def divergence():
    return klfast.kl_divergence(LOGITS, REF_LOGITS, MASK, token_ids=IDS, return_stats=True)


def divergence_and_gradient(reduction):
    return lambda: (
        klfast.kl_divergence(leaf(LOGITS), REF_LOGITS, MASK, reduction=reduction).sum().backward()
    )


def update(controller):
    return lambda: controller.update(STATS)


def refused(function, *arguments, **options):
    """A call that raises ValueError out of the kernel's read."""

    def call():
        try:
            function(*arguments, **options)
        except ValueError:
            return
        raise AssertionError("the call was not refused")

    return call


PACKED = LOGPROBS.view(-1), REF_LOGPROBS.view(-1)
CASES = {
    "kl_penalty": penalty("none"),
    "kl_penalty-scalar": penalty("token-mean"),
    "kl_penalty-one-read": penalty_and_gradient("token-mean"),
    "kl_penalty-two-reads": penalty_and_gradient("seq-mean"),
    "kl_penalty-refused-shape": refused(klfast.kl_penalty, LOGPROBS, REF_LOGPROBS[:1]),
    "kl_penalty-refused-mask": refused(klfast.kl_penalty, LOGPROBS, REF_LOGPROBS, -MASK.float()),
    "kl_penalty-refused-cu_seqlens": refused(
        klfast.kl_penalty, *PACKED, cu_seqlens=torch.tensor([0, 9, B * T - 1])
    ),
    "kl_rewards": rewards,
    "kl_rewards-refused-mask": refused(
        klfast.kl_rewards, SCORES, LOGPROBS, REF_LOGPROBS, -MASK.float(), kl_coef=0.1
    ),
    "token_logprobs": tokens,
    "token_logprobs-gradient": tokens_and_gradient,
    "token_logprobs-gradient-inplace": tokens_and_gradient_inplace,
    "token_logprobs-refused-ids": refused(klfast.token_logprobs, LOGITS, IDS + V),
    "kl_divergence": divergence,
    "kl_divergence-one-read": divergence_and_gradient("token-mean"),
    "kl_divergence-two-reads": divergence_and_gradient("none"),
    "kl_divergence-refused-ids": refused(
        klfast.kl_divergence, LOGITS, REF_LOGITS, token_ids=IDS + V
    ),
    "FixedKLController": update(klfast.FixedKLController(0.1)),
    "AdaptiveKLController": update(klfast.AdaptiveKLController(0.1, 6.0)),
    "ExponentialKLController": update(klfast.ExponentialKLController()),
    "KLMonitor": update(klfast.KLMonitor(STATS.sequence_mean().abs().item())),
}


# What the fresh process does


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
    """(bytes that malloc has given out, bytes that are resident)."""
    gc.collect()
    info = LIBC.mallinfo2()
    return info.uordblks + info.hblkhd, int(STATM.read_text().split()[1]) * PAGE


def grown(call):
    """Bytes a call of both, after calls that fill what is kept on purpose."""
    for _ in range(WARM_UP):
        call()
    before = memory()
    for _ in range(CALLS):
        call()
    return [(b - a) / CALLS for a, b in zip(before, memory(), strict=True)]


def report():
    torch.set_num_threads(1)
    LIBC.mallinfo2.restype = Mallinfo
    print(json.dumps({name: grown(call) for name, call in CASES.items()}))


@pytest.fixture(scope="module")
def growth():
    """Case -> (given out, resident), bytes a call."""
    code = "import sys; sys.path[:0] = sys.argv[1:]; import test_memory; test_memory.report()"
    here = pathlib.Path(__file__).parent
    folders = [str(here), str(here.with_name("support"))]
    return json.loads(run_fresh(code, arguments=folders, timeout=600, PYTHONMALLOC="malloc"))


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_no_call_leaves_memory_behind(growth, case):
    given_out, resident = growth[case]
    assert given_out < SLACK
    assert resident < PAGE / 2
