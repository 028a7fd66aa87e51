"""The Triton kernels: NVIDIA and AMD GPUs, without a compiler at installation.

``rollout_correction`` has none: a step calls it once, and the reference serves it in torch ops.

The kernels' ops have a separate namespace (``klfast.ops.schemas``), because the extension may be
absent. Triton is imported when the first op runs, because the import is slow.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import operator
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from klfast.autograd import lse
from klfast.backends.compiled import compiled
from klfast.backends.triton.namespace import NAMESPACE
from klfast.ops.schemas import SCHEMAS, Ops, define
from klfast.types.device import DEVICES
from klfast.types.dtypes import has_float64

_installed = importlib.util.find_spec("triton") is not None
_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
# The types of devices that have the ops. On the CPU they are for Triton's interpreter.
_types = ["cpu", *(name for name, row in DEVICES.items() if row.triton)]


def _why_not(device: torch.device) -> str | None:
    if not _installed:
        return "triton is not installed; run pip install triton"
    compiler = DEVICES[device.type].triton
    if not compiler and not (device.type == "cpu" and _interpreted):
        return (
            "Triton kernels run on GPUs of NVIDIA and AMD; set TRITON_INTERPRET=1 before Python "
            "starts to step through them on the CPU"
        )
    if not has_float64(device):
        return "the kernels add in float64, which the device lacks"
    return _compiler_problem(compiler)


def _compiler_problem(compiler: str) -> str | None:
    """Why the installed Triton cannot compile for a GPU; without one, why not for any."""
    from triton.backends import backends  # only the first import is slow

    wanted = [compiler] if compiler else [row.triton for row in DEVICES.values() if row.triton]
    if any(name in backends for name in wanted):
        return None
    return (
        f"the installed triton compiles for {', '.join(backends) or 'no GPU'} and not for "
        f"{' or '.join(wanted)}; run pip install triton"
    )


# A question about the machine, whose answer torch.compile takes for a constant.
_compiler_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _implement() -> None:
    names = [name for name in SCHEMAS if name != "rollout_correction"]
    library = define(NAMESPACE, names)
    for name, device in itertools.product(names, _types):
        library.impl(name, implementation(name), device.upper())


def implementation(name: str) -> Any:
    """The implementation of an op, imported when it is first called."""

    @functools.cache
    def function() -> Any:
        from klfast.backends.triton import logits_launch, penalty_launch

        modules = (penalty_launch, logits_launch)
        return next(getattr(module, name) for module in modules if hasattr(module, name))

    return lambda *values: function()(*values)


def _keys(*names: str) -> Any:
    keys = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names]
    return functools.reduce(operator.or_, keys)


_OF_THREAD = _keys("BackendSelect", "ADInplaceOrView")
"""What torch's dispatcher looks at in a thread without tracers, transforms and modes."""
_OF_TENSORS = {
    name: _keys("ADInplaceOrView", *(kind + name.upper() for kind in ("", "Autograd", "Autocast")))
    for name in _types
}
"""What it looks at in a tensor that is nothing else, such as negated or fake, by type of device."""


def _undispatched(name: str) -> Callable[..., Any]:
    """An op without torch's dispatcher, if that would only call the kernels. It takes a fifth of
    the host's time of a call with a gradient.
    """
    op, kernel = getattr(getattr(torch.ops, NAMESPACE), name).default, implementation(name)

    def call(*values: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or torch._C._dispatch_tls_local_include_set() != _OF_THREAD
            or torch._C._autograd._profiler_enabled()
            or torch.overrides.has_torch_function(values)
        ):
            return op(*values)
        plain = _OF_TENSORS.get(values[0].device.type)
        for value in values:
            if isinstance(value, Tensor) and torch._C._dispatch_keys(value) != plain:
                return op(*values)
        return kernel(*values)

    return call


_implement()

TRITON = compiled("triton", _why_not, Ops(*map(_undispatched, Ops._fields)), units_of=lse.TRITON)
