"""Compares a call on the CUDA kernels' PTX with the same call on the CPU's kernels.

Tests over grids of options and tests with random options share the choices here.
"""

import emulated
import torch

from klfast import backends
from klfast.types.dtypes import MASKS

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASKS_OR_NONE = (None, *MASKS)
# Some statistics of a sampler are exponentials, which enlarge the rounding of their exponent.
OF_EXPONENTIALS = 1e-4
# The allowed difference of two backends, each off by half of it. It is relative to a number and to
# the greatest number beside it, because sums cancel.
TOLERANCES = {
    torch.bfloat16: 2**-7,
    torch.float16: 2**-9,
    torch.float32: 2e-5,
    torch.float64: 1e-9,
}


def named(value):
    """Ids of parameters."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple) and all(isinstance(each, torch.dtype) for each in value):
        return "-".join(map(named, value))
    return None


def laid_out(tensor, layout):
    """The same values: dense, one element into wider rows, or in strides of two."""
    if layout == "shifted":
        wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)
        wide[..., 1:] = tensor
        return wide[..., 1:]
    if layout == "strided":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor


def flat(result):
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for each in result for tensor in flat(each)]
    return []


def gradients(outputs, leaves, grad_out=0.5):
    """The gradients of the outputs that have one."""
    wanted = [output for output in flat(outputs) if output.requires_grad]
    if not wanted:
        return []
    given = [torch.full_like(output, grad_out) for output in wanted]
    made = torch.autograd.grad(wanted, leaves, given, allow_unused=True)
    return [each for each in made if each is not None]


def on(backend, call, monkeypatch):
    """Run a call while the given backend serves as "native"."""
    with monkeypatch.context() as patch:
        patch.setitem(backends.BACKENDS, "native", backend)
        return call()


def compare(expected, got, least=0):
    """Fail if two lists of tensors differ by more than a tolerance of at least ``least``."""
    assert len(expected) == len(got)
    for own, other in zip(expected, got, strict=True):
        assert own.dtype == other.dtype
        tolerance = max(TOLERANCES.get(own.dtype, 0), least)
        a, b = own.double(), other.double()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.isinf(), b.isinf())
        finite = a.isfinite()
        a, b = a[finite], b[finite]
        if a.numel():
            most = a.abs() + 0.05 * a.abs().max() + 0.05
            assert ((a - b).abs() <= tolerance * most).all()


def check(call, monkeypatch, *, chip="h200", least=0):
    """Run a call with ``backend="native"`` on both backends, and compare its tensors."""
    cpu = backends.BACKENDS["native"]
    monkeypatch.setenv("KLFAST_EMULATED_CHIP", chip)
    expected, got = (on(each, call, monkeypatch) for each in (cpu, emulated.backend()))
    assert expected
    compare(expected, got, least)
