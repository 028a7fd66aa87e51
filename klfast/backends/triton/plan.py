"""Plans: the first call of a kind notes what it allocates and launches, and later calls repeat it.

Calls are of one kind if they have the same options, and tensors of the same dtypes, shapes, strides
and alignment. Only a coefficient and a normalizer are passed again, as they may change each step. A
repeated launch calls the compiled kernel, because Triton takes 25 to 37 us to find it.

A call takes some 100 us of the host's time, so the code here avoids what a repeated call does not
need: a function per argument, a context per launch, and the stream and the empty hooks per launch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import partial, wraps
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends import backends
from triton.backends.compiler import BaseBackend
from triton.compiler import CompiledKernel
from triton.runtime import driver

from klfast.backends.triton.launch import GPU, device_of
from klfast.ops.schemas import NAMES, Arguments

PLANS: dict[Any, Callable[..., Any]] = {}  # functions that repeat a call, by its kind
_MOST_PLANS = 1024  # shapes may change in each step
_COMPILED: dict[Any, CompiledKernel] = {}
"""Kernels by what selects a variant. Plans for other shapes share them."""
_DEFINED = {"enable_fp_fusion": False}  # so that each compiled variant computes the same bits

_specialization = backends[GPU.triton].compiler.get_tensor_specialization
"""What selects a variant besides dtypes, as our kernels ignore alignment: on AMD, whether 32 bits
address a tensor's memory."""


_has_memories = _specialization is not BaseBackend.get_tensor_specialization
"""False if a backend looks at alignment alone."""


def _memory_of(tensors: Iterable[Tensor | None]) -> list[str]:
    return [_specialization(tensor, align=False) for tensor in tensors if tensor is not None]


_Launch = tuple[Callable[..., Any], Any, tuple[int, ...], Any, tuple[Any, ...]]
"""A launch: Triton's own function for it, the compiled kernel (None in Triton's interpreter), the
grid, what gets the tensors and numbers from a call's objects, and the other arguments."""


def _acts(hook: Any) -> bool:
    """True if a hook of Triton's launches does something, such as a profiler's."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _repeat(launches: list[_Launch], are_compiled: bool, objects: list[Any]) -> None:
    """Launch kernels on a call's objects, of which the first is a tensor on the call's GPU."""
    like, runtime = objects[1], knobs.runtime
    is_plain = not (_acts(runtime.launch_enter_hook) or _acts(runtime.launch_exit_hook))
    if is_plain and are_compiled:
        device = driver.active.get_current_device()
        if like.is_cpu or like.get_device() == device:
            # Triton's own function does the same. It also asks for the stream at each launch,
            # describes the launch, and calls two lists of hooks.
            stream = driver.active.get_current_stream(device)
            for _, kernel, grid, first, others in launches:
                own = stream, kernel.function, kernel.packed_metadata, None, None, None
                kernel.run(*grid, *own, *first(objects), *others)
            return
    with device_of(like):
        for run, _, _, first, others in launches:
            run(*first(objects), *others)


class Recording:
    """The first call of a kind, whose function allocates and launches here alone.

    A place is an index of a call's objects: None, its arguments, the numbers that are passed again,
    and its allocations.
    """

    def __init__(self, values: tuple[Any, ...], numbers: tuple[int, ...]) -> None:
        self._like: Tensor = values[0]
        self._numbers, self._numbered = numbers, [len(values) + 1, len(values) + 2]
        self._objects = [None, *values, *numbers]
        self._places = {id(o): i for i, o in enumerate(self._objects) if isinstance(o, Tensor)}
        # One tensor in two places may be two in a later call.
        self._is_repeatable = len(self._places) == sum(isinstance(v, Tensor) for v in values)
        self._allocations: list[tuple[Any, torch.dtype | None]] = []
        self._launches: list[_Launch] = []

    def _at(self, tensors: Iterable[Tensor | None]) -> list[int]:
        """The places of tensors. A call with one that is not known cannot be repeated."""
        places = [0 if t is None else self._places.get(id(t), -1) for t in tensors]
        self._is_repeatable &= -1 not in places
        return places

    def _note(self, tensor: Tensor, size: Any, dtype: torch.dtype | None) -> Tensor:
        self._allocations.append((size, dtype))
        self._places[id(tensor)] = len(self._objects)
        self._objects.append(tensor)
        return tensor

    def outputs(self, tensors: Any) -> Any:
        """The tensors, of which those that are not known must be new. A later call has one tensor
        for all of shape [0] and one dtype, as for outputs that are not wanted.
        """
        empty: dict[torch.dtype, int] = {}
        for tensor in tensors:
            if tensor is None or id(tensor) in self._places:
                continue
            if tensor.shape == (0,) and tensor.dtype in empty:
                self._places[id(tensor)] = empty[tensor.dtype]
                continue
            if tensor.shape == (0,):
                empty[tensor.dtype] = len(self._objects)
            # torch reads a size as integers in half the time of a tuple
            self._note(tensor, tuple(tensor.shape) or ((),), tensor.dtype)
        return tensors

    def empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        return self._note(self._like.new_empty(size, dtype=dtype), size or ((),), dtype)

    def contiguous(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.is_contiguous():
            return tensor
        return self._note(tensor.contiguous(), self._at([tensor])[0], None)

    def launch(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        """Launch a kernel on tensors, numbers that are passed again, integers and options."""
        tensors = [a for a in arguments if not isinstance(a, int)]
        numbered = "coef" in kernel.arg_names
        first = (*tensors, *self._numbers) if numbered else tensors
        places = self._at(tensors) + (self._numbered if numbered else [])
        others = arguments[len(tensors) :]
        others += tuple(options.pop(name) for name in kernel.arg_names[len(first) + len(others) :])
        options |= _DEFINED
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        constexprs = others[len(arguments) - len(tensors) :]
        variant = (kernel, self._like.device, *dtypes, *constexprs, *options.items())
        if _has_memories:
            variant += tuple(_memory_of(tensors))
        compiled, grid = _COMPILED.get(variant), (programs, 1, 1)
        run = partial(kernel[grid], **options) if compiled is None else compiled[grid]
        found = run(*first, *others)
        found = getattr(found, "result", lambda: found)()  # AsyncCompileMode returns a future
        if isinstance(found, CompiledKernel):  # Triton's interpreter returns None
            compiled = _COMPILED[variant] = found
            run = found[grid]
        self._launches.append((run, compiled, grid, itemgetter(*places), others))

    def keep(self, kind: Any, outputs: Any) -> None:
        """Let later calls repeat this one, which returned ``outputs``."""
        returned = itemgetter(*self._at(outputs if isinstance(outputs, tuple) else [outputs]))
        allocations, launches = self._allocations, self._launches
        are_compiled = all(compiled is not None for _, compiled, *_ in launches)

        def repeat(values: tuple[Any, ...], numbers: tuple[int, ...]) -> Any:
            like, objects = values[0], [None, *values, *numbers]
            for size, dtype in allocations:
                new = like.new_empty(*size, dtype=dtype) if dtype else objects[size].contiguous()
                objects.append(new)
            _repeat(launches, are_compiled, objects)
            return returned(objects)

        if self._is_repeatable and launches:
            if len(PLANS) >= _MOST_PLANS:
                PLANS.clear()
            PLANS[kind] = repeat


def planned(function: Callable[[Arguments, Recording], Any]) -> Callable[..., Any]:
    """An op by a function that computes the first call of each kind."""
    op = function.__name__
    names = NAMES[op]
    at = names.index("numbers") if "numbers" in names else None

    @wraps(function)
    def run(*values: Any) -> Any:
        kind: list[Any] = [op, values[0].device]
        numbers: tuple[int, ...] = ()
        known = values
        if at is not None:
            *limits, coef, normalizer = values[at]
            numbers = _INTEGERS.unpack(_DOUBLES.pack(coef, normalizer))
            kind += (*limits, normalizer > 0, *values[at - 1])
            known = values[: at - 1] + values[at + 1 :]
        for v in known:
            if isinstance(v, Tensor):
                kind += v.dtype, v.shape, v.stride(), v.data_ptr() % 16
            else:
                kind.append(v)
        if _has_memories:
            kind += _memory_of(v for v in known if isinstance(v, Tensor))
        if (repeat := PLANS.get(key := tuple(kind))) is not None:
            return repeat(values, numbers)
        recording = Recording(values, numbers)
        with device_of(values[0]):
            outputs = function(Arguments.of(op, values), recording)
        recording.keep(key, outputs)
        return outputs

    return run


_DOUBLES, _INTEGERS = struct.Struct("2d"), struct.Struct("2q")
