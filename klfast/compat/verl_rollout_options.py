"""``rollout_is``, ``rollout_rs`` and their thresholds in verl's rollout correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from klfast.checks.arguments import check_choice, check_number
from klfast.rollout.rejection import Rejection

LEVELS = ("token", "sequence")
"""``rollout_is``."""

RULES = {
    **{f"token_{name}": (name, "token") for name in ("k1", "k2", "k3")},
    **{f"seq_sum_{name}": (name, "seq-sum") for name in ("k1", "k2", "k3")},
    **{f"seq_mean_{name}": (name, "seq-mean") for name in ("k1", "k2", "k3")},
    **{f"seq_max_{name}": (name, "seq-max") for name in ("k2", "k3")},
}
"""``rollout_rs`` -> (statistic, over)."""


class Option(NamedTuple):
    """One of ``rollout_rs`` with its threshold."""

    name: str
    rule: Rejection
    sign: int
    """-1 for k1: verl's is log(rollout / policy), klfast's x the opposite."""

    def bounds(self) -> tuple[float, float]:
        """(low, high) of verl's statistic, infinite where there is none."""
        low, high = self.rule.bounds
        return (low, high) if self.sign > 0 else (-high, -low)


def weight_bounds(threshold: str | float) -> dict[str, Any]:
    """``floor``, ``cap`` and ``outside`` of ``rollout_is_threshold``."""
    low, high = _pair("rollout_is_threshold", threshold)
    if low is None:
        return {"cap": high}
    return {"floor": low, "cap": high, "outside": "mask"}


def _pair(argument: str, threshold: object) -> tuple[float | None, float]:
    """(lower, upper) of ``"lower_upper"``; (None, upper) of a number or its text."""
    if not isinstance(threshold, str):
        return None, check_number(argument, threshold, above=0)
    try:
        numbers = [float(part) for part in threshold.strip().split("_", 1)]
    except ValueError:
        raise ValueError(
            f"{argument} must be a number or 'lower_upper', got {threshold!r}"
        ) from None
    low, high = (None, numbers[0]) if len(numbers) == 1 else numbers
    for number in numbers:
        check_number(argument, number, above=0)
    if low is not None and low > high:
        raise ValueError(f"{argument} must have lower <= upper, got {threshold!r}")
    return low, high


def options_of(names: str, thresholds: str | float | None) -> tuple[Option, ...]:
    """The options of ``rollout_rs``, each once, with the thresholds of ``rollout_rs_threshold``."""
    if not isinstance(names, str) or not names.strip(", "):
        raise ValueError(f"rollout_rs must name an option, got {names!r}")
    if thresholds is None:
        raise ValueError("rollout_rs_threshold must be given with rollout_rs, got None")
    chosen = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    for name in chosen:
        check_choice("rollout_rs", name, tuple(RULES))
    if isinstance(thresholds, str):
        each: Sequence[object] = [part.strip() for part in thresholds.split(",") if part.strip()]
    else:
        each = [thresholds]
    if len(each) == 1:
        each = [*each] * len(chosen)
    if len(each) != len(chosen):
        raise ValueError(
            f"rollout_rs_threshold must be one threshold or {len(chosen)}, got {thresholds!r}"
        )
    return tuple(_option(name, threshold) for name, threshold in zip(chosen, each, strict=True))


def _option(name: str, threshold: object) -> Option:
    statistic, over = RULES[name]
    low, high = _pair("rollout_rs_threshold", threshold)
    if statistic == "k1":
        low = 1 / high if low is None else low
        if low > high:
            raise ValueError(
                f"rollout_rs_threshold must be >= 1 for {name!r}, whose lower bound is 1 / "
                f"threshold, got {threshold!r}"
            )
        rule = Rejection("k1", over, low=-math.log(high), high=-math.log(low))
        return Option(name, rule, -1)
    if low is not None:
        raise ValueError(f"rollout_rs_threshold must be one number for {name!r}, got {threshold!r}")
    return Option(name, Rejection(statistic, over, high=high), 1)
