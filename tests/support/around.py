"""Code that users put around a call."""

import contextlib

import torch


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
