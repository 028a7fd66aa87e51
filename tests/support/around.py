"""Code that users put around a call."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextlib.contextmanager
def default_dtype():
    """New tensors are bf16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Passed(torch.autograd.Function):
    """A Function that returns the memory of its input, as a tensor-parallel copy does.

    Autograd does not know that the memory is shared.
    """

    @staticmethod
    def forward(ctx, tensor):
        return tensor.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


READING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim"}
"""torch's ops that read a tensor's values on the host, or whose shapes depend on values."""


class RefusesReads(TorchDispatchMode):
    """Raises for an op that would wait for a device."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name.removeprefix("aten::")
        self.ops.add(name)
        assert name not in READING, f"{name} reads a value"
        if name.startswith("repeat_interleave"):
            assert (kwargs or {}).get("output_size") is not None, "its shape depends on values"
        if name.startswith("index"):
            indices = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor)]
            assert all(index.dtype != torch.bool for index in indices[:1]), "bools are read"
        return op(*args, **(kwargs or {}))
