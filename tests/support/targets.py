"""The targets of tests: a backend on a device. Emulated CUDA kernels need no GPU."""

import contextlib
import os
from typing import NamedTuple

import emulated
import pytest
import torch

from klfast import backends


class Target(NamedTuple):
    """A backend of the table, and the device of its tensors."""

    backend: str
    device: str = "cpu"
    is_emulated: bool = False


def _all_targets():
    targets = {
        name: Target(name)
        for name, module in backends.BACKENDS.items()
        if module.why_not(torch.device("cpu")) is None
    }
    targets["native-emulated"] = Target("native", is_emulated=True)
    interprets = os.environ.get("TRITON_INTERPRET") == "1"  # which it does on the CPU
    if torch.cuda.is_available() and not interprets:
        targets |= {f"{name}-cuda": Target(name, "cuda") for name in backends.BACKENDS}
    return targets


TARGETS = _all_targets()
OF_ROLLOUT = {
    name: target
    for name, target in TARGETS.items()
    if not target.is_emulated
    and not backends.BACKENDS[target.backend].lacks(
        "rollout_correction", torch.device(target.device)
    )
}
"""The targets that serve ``rollout_correction``."""


@contextlib.contextmanager
def serving(target):
    """Run code that is written for the CPU and a backend's name on another target."""
    if target.device != "cpu":
        reason = backends.BACKENDS[target.backend].why_not(torch.device(target.device))
        assert reason is None, f"backend {target.backend} on {target.device}: {reason}"
    with pytest.MonkeyPatch.context() as patch:
        if target.is_emulated:
            patch.setitem(backends.BACKENDS, "native", emulated.backend())
        if target.device == "cpu":
            yield
        else:
            with torch.device(target.device):
                yield
