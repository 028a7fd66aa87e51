"""Checks of plain values, shared by everything that takes arguments. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real


def check_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``; the error lists them."""
    if isinstance(value, str) and value in choices:
        return
    expected = ", ".join(repr(choice) for choice in choices)
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"unknown {argument} {value!r}; expected one of {expected}")


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
    if not math.isfinite(number) or too_low:
        raise ValueError(f"{argument} must be {wanted}, got {shown(value)}")
    return number
