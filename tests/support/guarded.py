"""Memory that ends the process if it is read or written outside of a tensor.

A tensor's bytes lie right before or right after a protected page. In torch's own memory other bytes
surround a tensor, so a bad read goes unnoticed. ``main`` runs the cases of ``klfast check`` over
tensors in protected memory. It needs its own process (``fresh``).
"""

import ctypes
import faulthandler
import mmap
import sys
from dataclasses import replace
from unittest import mock

import emulated
import torch
from agreement import same_bits
from targets import OF_ROLLOUT, TARGETS, serving

from klfast.cli.check import calls
from klfast.cli.check.cases import FAMILIES

PAGE = mmap.PAGESIZE


def _forbid(address, size):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0) != 0:  # PROT_NONE
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(tensor, *, at_end):
    """The tensor, of the same strides, in memory that begins or ends with its storage."""
    if tensor.numel() == 0:
        return tensor
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    numbers = tensor.storage_offset() + last + 1
    size = numbers * tensor.element_size()
    pages = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, pages + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + PAGE + pages):
        _forbid(guard, PAGE)
    offset = PAGE + (pages - size if at_end else 0)
    whole = torch.frombuffer(memory, dtype=tensor.dtype, count=numbers, offset=offset)
    emulated.allow(whole)
    inside = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return inside.copy_(tensor)


def longer(call):
    """The call with 25 times the tokens, if it is over log-probs: several tiles of a kernel."""
    if call.words:
        return call
    shape = call.policy.shape
    times = [1] * (len(shape) - 1) + [25]
    tensors = {
        name: 25 * t if name == "cu_seqlens" else t.repeat(times) if t.shape == shape else t
        for name, t in call.tensors.items()
    }
    return replace(call, tensors=tensors)


def main(target, step):
    """Run every ``step``-th case in guarded memory and in torch's. Print the number of runs."""
    faulthandler.enable()
    families = [name for name in FAMILIES if name != "rollout" or target in OF_ROLLOUT]
    cases = [case for name in families for case in FAMILIES[name].cases(name)][::step]
    laid_out = calls._laid_out
    with serving(TARGETS[target]):
        for case in cases:
            call = longer(case.call())
            expected = calls.run(call, "native")
            for at_end in (True, False):
                print(case.name, "before a guard" if at_end else "after a guard", file=sys.stderr)
                lay_out = lambda t, memory, at_end=at_end: guarded(  # noqa: E731
                    laid_out(t, memory), at_end=at_end
                )
                with mock.patch.object(calls, "_laid_out", lay_out):
                    found = calls.run(call, "native")
                assert all(same_bits(t, expected[name]) for name, t in found.items()), case.name
    print(2 * len(cases))
