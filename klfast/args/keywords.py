"""The error of an unknown keyword names what was called, and the argument that was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from klfast.args.checks import nearest

P = ParamSpec("P")
R = TypeVar("R")

COEFFICIENTS = ("coef", "kl_coef", "init_kl_coef", "controller", "beta", "kl_beta", "kl_loss_coef")
# Names of one thing, in klfast's functions and classes, and in frameworks.
_SAME = (
    COEFFICIENTS,
    ("jsd_beta", "beta"),
    ("skew_alpha", "alpha"),
    ("horizon", "ki", "gain", "lr", "every"),
    ("target", "limit", "target_kl", "kl_target"),
    ("mask", "response_mask", "loss_mask", "attention_mask", "completion_mask", "action_mask"),
    ("estimator", "kl_type", "kl_loss_type", "kl_estimator", "kl_penalty"),
    ("reduction", "loss_agg_mode"),
    ("token_ids", "input_ids", "labels"),
)


def explains_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function or ``__init__``, whose TypeError of an unknown keyword is klfast's own."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        # Only a call that fails pays, and any other TypeError keeps its traceback.
        try:
            return function(*args, **kwargs)
        except TypeError:
            check_keywords(function, args, kwargs)
            raise

    return called


def check_keywords(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise TypeError if a function or an ``__init__`` has no argument of a keyword's name."""
    name, known = function.__qualname__, _keywords_of(function)
    if function.__name__ == "__init__" and args:
        made = type(args[0])
        name, known = made.__name__, _keywords_of(made) or known
    for given in kwargs if known else ():
        if given not in known:
            raise TypeError(
                f"{name}() got an unexpected keyword argument {given!r}; {_meant(given, known)}"
            ) from None


def _keywords_of(called: Callable[..., Any]) -> list[str]:
    """The names of arguments; none if any name is taken."""
    parameters = inspect.signature(called).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return []
    return [each.name for each in parameters if each.name != "self"]


def _meant(given: str, known: list[str]) -> str:
    of_groups = ([n for n in same if n in known][:1] for same in _SAME if given in same)
    if same := [repr(name) for names in of_groups for name in names]:
        return f"its argument for this is {' or '.join(same)}"
    if likely := nearest(given, known):
        return f"did you mean {likely!r}?"
    return f"expected one of {', '.join(map(repr, known))}"
