"""Checks that need no data: numbers, choices, and a tensor's type, shape, dtype, device, layout.

The module ``values`` checks the contents of tensors.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from klfast.distributed import is_dtensor
from klfast.types.dtypes import FLOATS, INDICES, INTEGERS, wide_dtype
from klfast.types.reduction import (
    FRAMEWORKS_REDUCTIONS,
    NORMALIZED_REDUCTIONS,
    REDUCTIONS,
    TORCHS_REDUCTIONS,
    Reduction,
)


def check_choice(
    argument: str,
    value: object,
    choices: Collection[str],
    *,
    torchs: Mapping[str, str] | None = None,
    others: Mapping[str, str] | None = None,
    calls: Mapping[str, str] | None = None,
) -> None:
    """Raise unless ``choices`` has ``value``; the error lists them and suggests the likely one.

    ``torchs`` and ``others`` map torch's and frameworks' names of a choice to the choice, and
    ``calls`` frameworks' names of several options to the options.
    """
    if isinstance(value, str) and value in choices:
        return
    expected = ", ".join(repr(choice) for choice in choices)
    text = f"unknown {argument} {value!r}; expected one of {expected}"
    if not isinstance(value, str):
        raise TypeError(text)
    if torchs is not None and value in torchs:
        text = f"{text}; klfast's name for torch's {value!r} is {torchs[value]!r}"
    elif same := (calls or {}).get(value):
        text = f"{text}; the call for {value!r} is {same}"
    elif likely := (others or {}).get(value) or nearest(value, choices):
        text += f"; did you mean {likely!r}?"
    raise ValueError(text)


def nearest(value: str, choices: Collection[str]) -> str | None:
    """The choice that equals a name except for case, hyphens and a typo; None if there is none."""
    plain = {choice.lower().replace("_", "-"): choice for choice in choices}
    given = value.strip().lower().replace("_", "-").replace(" ", "-")
    found = difflib.get_close_matches(given, plain, n=1, cutoff=0.75)
    return plain[found[0]] if found else None


def shown(value: object) -> str:
    """``repr(value)`` for an error; Python refuses to print integers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return f"a number of type {type(value).__name__} with too many digits to print"


def check_number(
    argument: str, value: object, *, above: float | None = None, least: float | None = None
) -> float:
    """Return ``value`` as a float, or raise unless it is finite, > ``above`` and >= ``least``."""
    # Most numbers are floats, and a check by the abstract class Real is slow.
    # torch.compile can trace comparisons of a symbol, and not math.isfinite.
    if type(value) is float and above is None and least is None and -math.inf < value < math.inf:
        return value
    wanted = "a finite number"
    if above is not None:
        wanted += f" > {above}"
    if least is not None:
        wanted += f" >= {least}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{argument} must be {wanted}, got {shown(value)} of type {type(value).__name__}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    too_low = (above is not None and number <= above) or (least is not None and number < least)
    if not -math.inf < number < math.inf or too_low:  # torch.compile can trace this
        raise ValueError(f"{argument} must be {wanted}, got {shown(value)}")
    return number


def check_flag(argument: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {shown(value)}")


def check_integer(
    argument: str,
    value: object,
    wanted: str,
    *,
    least: int | None = None,
    within: tuple[str, float] = ("int64", 2**63 - 1),
) -> int:
    """Return ``value`` as an int, or raise unless it is an integer >= ``least`` within a dtype, of
    a name and a greatest number. NumPy's integers are integers.
    """
    # To Python True is 1, and a tensor of one integer is an index, whose value may need a sync.
    try:
        if type(value) is int:  # operator.index would make a constant of a symbol
            number: int | None = value
        else:
            number = None if isinstance(value, bool | Tensor) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        # The text is made here, because torch.compile cannot print a symbol.
        error = TypeError if number is None else ValueError
        raise error(f"{argument} must be {wanted}, got {shown(value)}")
    name, most = within
    if not -most - 1 <= number <= most:
        raise ValueError(f"{argument} must be within {name}, got {shown(value)}")
    return number


def reduction_of(name: str, *, is_normalized: bool) -> Reduction:
    """The reduction of a name, which must have a denominator if a normalizer replaces it."""
    if not (isinstance(name, str) and name in REDUCTIONS):
        check_choice(
            "reduction", name, REDUCTIONS, torchs=TORCHS_REDUCTIONS, calls=FRAMEWORKS_REDUCTIONS
        )
    if is_normalized and name not in NORMALIZED_REDUCTIONS:
        means = ", ".join(repr(name) for name in NORMALIZED_REDUCTIONS)
        raise ValueError(f"reduction must be one of {means} with a normalizer, got {name!r}")
    return REDUCTIONS[name]


# The remedy for lengths in the place of cu_seqlens.
CUMULATE = "cumulate lengths, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"


def check_cu_seqlens(cu_seqlens: Tensor, like: Tensor, *, of: str = "logprobs") -> None:
    """Check the type, shape and device of cu_seqlens; ``values`` checks its contents."""
    check_tensor("cu_seqlens", cu_seqlens, INDICES)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape [S+1], got {shape_text(cu_seqlens)}")
    check_device("cu_seqlens", cu_seqlens, like, of)


CONSTANTS = {
    "mask": "give kl_penalty an importance weight by old_logprobs=, multiply other weights into "
    "the values of reduce, or use mask.detach()",
    "weights": "use weights.detach()",
    "normalizer": "use normalizer.detach()",
}
"""The arguments that raise if they require a gradient, and the remedies."""


# The types of most tensors, which need no second look.
PLAIN = (Tensor, torch.nn.Parameter)


def check_tensor(argument: str, value: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Return ``value``, or raise unless it is a dense tensor with an allowed dtype.

    An argument in ``CONSTANTS`` that requires a gradient raises too.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(value).__name__}")
    # Functions that compute on shards have called themselves with every rank's part by now.
    if type(value) not in PLAIN and is_dtensor(value):
        raise TypeError(
            f"{argument} must be a plain tensor, got DTensor; give each rank its own sequences, "
            f"{argument}.to_local()"
        )
    if value.dtype not in dtypes:
        raise TypeError(
            f"{argument} must have one of the dtypes {dtypes_text(dtypes)}, got {value.dtype}"
        )
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise ValueError(f"{argument} must have the layout torch.strided, got {kind}")
    if value.requires_grad and argument in CONSTANTS:
        raise ValueError(
            f"{argument} must be a constant, got a tensor that requires a gradient: "
            f"{CONSTANTS[argument]}"
        )
    return value


def dtypes_text(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def check_device(argument: str, value: Tensor, like: Tensor, of: str = "logprobs") -> None:
    """Raise unless it is on the device of ``like``, the argument called ``of``."""
    if value.device != like.device:
        raise ValueError(
            f"{argument} must be on the device of {of}, {like.device}, got {value.device}"
        )


def scalar_argument(
    argument: str,
    value: object,
    like: Tensor,
    of: str,
    *,
    above: float | None = None,
) -> float | Tensor:
    """A checked number, or a 0-dim tensor without a graph on the device of the argument ``of``."""
    if type(value) in (int, float) and torch.compiler.is_compiling():
        # May be symbolic. As a tensor it stays so, and a new value needs no new compilation.
        return cast(float, value) * torch.ones(
            (), dtype=wide_dtype(like.device), device=like.device
        )
    if not isinstance(value, Tensor):
        return check_number(argument, value, above=above)
    check_tensor(argument, value, (*FLOATS, *INTEGERS))
    if value.dim() != 0:
        raise ValueError(f"{argument} must be a number or a 0-dim tensor, got {shape_text(value)}")
    # A kernel cannot read the host's memory. The number of a CPU's tensor needs no sync.
    if value.device != like.device and value.device.type == "cpu":
        return check_number(argument, value.item(), above=above)
    check_device(argument, value, like, of)
    return value.detach() if value.requires_grad else value


class HasValue(Protocol):
    """A controller: its ``value`` is the coefficient."""

    @property
    def value(self) -> Any:
        """A number or a 0-dim tensor."""


Coefficient: TypeAlias = float | Tensor | HasValue
"""The coefficient of a penalty, as callers give it: a number, a 0-dim tensor, or a controller."""


def coef_argument(argument: str, coef: Coefficient, like: Tensor, of: str) -> float | Tensor:
    """A checked coefficient, as ``scalar_argument`` returns it."""
    number = coef if isinstance(coef, (float, int, Tensor)) else getattr(coef, "value", coef)
    if type(number) is float and not torch.compiler.is_compiling() and math.isfinite(number):
        return number
    return scalar_argument(argument, number, like, of)


GATHERED = (
    "DeepSpeed ZeRO-3 empties parameters outside of deepspeed.zero.GatheredParameters, which must "
    "stay open around the forward and the backward"
)


def is_freed(tensor: Tensor) -> bool:
    """True if FSDP or a user has freed a tensor's storage."""
    return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def shape_text(tensor: Tensor) -> str:
    return str(list(tensor.shape))
