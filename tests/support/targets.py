"""Who is tested: a backend on a device. The CUDA kernels are tested without a GPU too, emulated."""

import contextlib
import os
from typing import NamedTuple

import emulated
import pytest
import torch

from klfast import backends
from klfast.backends import native
from klfast.checks.values import (
    are_tracing,
    check_divergence_values,
    check_token_logprobs_values,
    check_values,
)
from klfast.logits import autograd as logits_ops
from klfast.logits.autograd import LogitsKernels
from klfast.ops import autograd as ops


class Target(NamedTuple):
    """A backend of the table, and where its tensors are made."""

    backend: str
    device: str = "cpu"
    is_emulated: bool = False


def _all_targets():
    targets = {
        name: Target(name)
        for name, module in backends.MODULES.items()
        if module.unavailable(torch.device("cpu")) is None
    }
    targets["native-emulated"] = Target("native", is_emulated=True)
    interprets = os.environ.get("TRITON_INTERPRET") == "1"  # which it does on the CPU
    if torch.cuda.is_available() and not interprets:
        targets |= {f"{name}-cuda": Target(name, "cuda") for name in backends.MODULES}
    return targets


TARGETS = _all_targets()


def _emulate():
    """The native backend's functions as on a GPU under KLFAST_CHECK=1: kernels leave values
    unchecked there.
    """
    kernels = emulated.kernels()
    over_logits = LogitsKernels.of(torch.ops.klfast_emulated)

    def kl_penalty(call):
        if not are_tracing():
            check_values(call)
        return ops.kl_penalty(call, kernels)

    def token_logprobs(call):
        if not are_tracing():
            check_token_logprobs_values(call)
        return logits_ops.token_logprobs(call, over_logits)

    def kl_divergence(call):
        if not are_tracing():
            check_divergence_values(call)
        return logits_ops.kl_divergence(call, over_logits, kernels)

    return (kl_penalty, token_logprobs, kl_divergence)


@contextlib.contextmanager
def serving(target):
    """Tests written for the CPU and a backend's name, on another target."""
    if target.device != "cpu":
        reason = backends.MODULES[target.backend].unavailable(torch.device(target.device))
        assert reason is None, f"backend {target.backend} on {target.device}: {reason}"
    with pytest.MonkeyPatch.context() as patch:
        if target.is_emulated:
            for function in _emulate():
                patch.setattr(native, function.__name__, function)
        if target.device == "cpu":
            yield
        else:
            with torch.device(target.device):
                yield
