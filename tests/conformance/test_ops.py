"""The ops as torch sees them: schemas, fakes, every output written, no crash whatever comes in.

The calls are those that the public functions make of their cases.
"""

import functools

import pytest
import torch
from families import FAMILIES
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from klfast.cli.check.calls import run
from klfast.ops.schemas import SCHEMAS

ALL_UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
QUICK_UTILS = ALL_UTILS[:3]  # without a compilation per call
every_op = pytest.mark.parametrize("op", SCHEMAS)


class Recorder(TorchDispatchMode):
    """A mode that keeps one call of each kind of klfast's ops."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "klfast":
            kind = (op, *map(kind_of, args))
            if kind not in self.calls:
                changes = op._opname.endswith("_")
                self.calls[kind] = [own(argument, changes) for argument in args]
        return op(*args, **(kwargs or {}))


def own(value, changes):
    """A tensor without a graph, of which an op that changes tensors gets a copy."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if changes else value.detach()


def kind_of(value):
    """Two arguments of one kind are the same to opcheck."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.is_contiguous(), value.numel() == 0
    return value if isinstance(value, bool | int) else type(value)


@functools.cache
def recorded():
    """Op -> lists of arguments."""
    calls = {name: [] for name in SCHEMAS}
    with Recorder() as recorder:
        for family in FAMILIES:
            for case in FAMILIES[family].cases(family):
                if case.is_basic:
                    run(case.call(), "native")
    for (op, *_), arguments in recorder.calls.items():
        calls[op._opname].append(arguments)
    return calls


@every_op
def test_it_keeps_its_contract_with_torch(op):
    calls = recorded()[op]
    assert calls
    for i, arguments in enumerate(calls):
        utils = ALL_UTILS if i % 8 == 0 else QUICK_UTILS
        opcheck(getattr(torch.ops.klfast, op).default, tuple(arguments), test_utils=utils)


WRONG = {
    "complex": lambda t: t.to(torch.complex64),
    "shorter": lambda t: t[..., :-1],
    "longer": lambda t: torch.cat([t, t], -1),
    "of one dimension more": lambda t: t[None],
}


VALID = {
    "logits": {"shorter", "longer"},  # another vocabulary
    "token_ids": {"shorter", "longer", "of one dimension more"},  # K ids for one row
    "keep": {"of one dimension more"},
    "inverse_temperature": {"of one dimension more"},  # of the only row
    "entropy": {*WRONG},  # which is not read without a gradient of it
    "logprobs": {"shorter", "longer"},  # of no tokens
    "like": {"complex", "shorter", "longer"},  # whose numbers are not read, nor its width alone
    "tensor": {"shorter", "longer", "of one dimension more"},
    "cu_seqlens": {"shorter"},  # without the last sequence, which is empty
    "rules": {"fewer"},  # of none
    "bounds": {"fewer"},
}
"""Changes that make another valid call of some call."""


@every_op
def test_a_direct_call_with_a_wrong_argument_raises(op):
    """Anyone can call torch.ops, and no call may read or write memory that is not its own."""
    function = getattr(torch.ops.klfast, op).default
    accepted = []
    for arguments in recorded()[op]:
        for at, argument in enumerate(function._schema.arguments[: len(arguments)]):
            for name, value in wrong_values(arguments[at]):
                given = [*arguments[:at], value, *arguments[at + 1 :]]
                try:
                    function(*given)
                except RuntimeError:
                    continue
                if name not in VALID.get(argument.name, ()):
                    accepted.append((argument.name, name))
    assert not accepted


def wrong_values(value):
    """Values that an op must refuse in the place of an argument."""
    if isinstance(value, torch.Tensor):
        for name, change in WRONG.items():
            if value.numel() > 0 and (value.dim() > 0 or name not in ("shorter", "longer")):
                yield name, change(value)
    elif isinstance(value, list | tuple):
        yield "fewer", value[:-1]
        for at in range(len(value)):
            for wrong in (-1, 2**40) if isinstance(value[at], int) else ():
                yield f"{wrong} at {at}", [*value[:at], wrong, *value[at + 1 :]]
    elif type(value) is int:
        yield "-1", -1
        yield "2**40", 2**40
