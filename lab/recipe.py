"""The recipe for another run: an arm's controller as it was configured, and its penalty."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, fields
from typing import Any

from klfast import Estimator
from klfast.controllers.base import CoefficientController
from lab.arms import ARMS
from lab.settings import Settings
from lab.train import REDUCTION, estimator

_FIRST = ("kl_coef", "init_kl_coef")
_LINE = 48  # characters that a phone shows
_OF_A_PLACE = ("device", "process_group")

_RECIPE = """\
import klfast

controller = {controller}
estimator = {estimator}

# each step, on tensors [B, T]
penalty, stats = klfast.kl_penalty(
    logprobs,
    ref_logprobs,
    mask,
    estimator=estimator,
    reduction="{reduction}",
    coef=controller.value,
    return_stats=True,
)
loss = policy_loss + penalty
# and after the optimizer's step
controller.update(stats)
"""


def recipe(name: str, settings: Settings) -> str:
    """Python that sets up and makes the call of an arm."""
    return _RECIPE.format(
        controller=controller_text(ARMS[name].controller(settings, None)),
        estimator=estimator_text(estimator(settings)),
        reduction=REDUCTION,
    )


def controller_text(controller: CoefficientController) -> str:
    """The call that made a controller which has not moved; what it left at defaults is left out."""
    chosen = {}
    for parameter in inspect.signature(type(controller)).parameters.values():
        if parameter.name in _OF_A_PLACE:
            continue
        attribute = "value" if parameter.name in _FIRST else parameter.name
        value = getattr(controller, attribute)
        if parameter.default is parameter.empty or value != parameter.default:
            chosen[parameter.name] = value
    return _call(f"klfast.{type(controller).__name__}", chosen)


def estimator_text(of: Estimator) -> str:
    """The same of an estimator."""
    values = {field.name: getattr(of, field.name) for field in fields(of)}
    defaults = {f.name: f.default for f in fields(of) if f.default is not MISSING}
    chosen = {n: v for n, v in values.items() if n == "name" or v != defaults[n]}
    return _call("klfast.Estimator", chosen)


def _call(function: str, chosen: dict[str, Any]) -> str:
    """A line, or a line for each argument where that would be a long one."""
    values = {n: json.dumps(v) if isinstance(v, str) else repr(v) for n, v in chosen.items()}
    arguments = [f"{name}={value}" for name, value in values.items()]
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"{function}(", *(f"    {argument}," for argument in arguments), ")"])
