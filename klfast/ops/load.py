"""Loads the extension, whose import implements the ops of ``torch.ops.klfast``."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from klfast.args.penalty import Choices, Numbers
from klfast.args.rollout import (
    FORMULAS,
    RolloutChoices,
    RolloutNumbers,
    RuleBounds,
    RuleChoices,
)
from klfast.formulas.divergences import DIVERGENCES
from klfast.ops.schemas import NAMES, define
from klfast.stats.kl import KLStats
from klfast.stats.rollout import rows_of_table
from klfast.types.names import ESTIMATORS

TABLES = {
    "estimators": [*ESTIMATORS],
    "divergences": [*DIVERGENCES],
    "statistics": [*KLStats._fields],
    "rollout statistics": rows_of_table(0),
    "statistics of rules": len(FORMULAS),
    "choices": len(Choices._fields),
    "numbers": len(Numbers._fields),
    "rollout choices": len(RolloutChoices._fields),
    "rollout numbers": len(RolloutNumbers._fields),
    "choices of a rule": len(RuleChoices._fields),
    "bounds of a rule": len(RuleBounds._fields),
    "arguments of ops": {op: len(names) for op, names in NAMES.items()},
}
"""The tables that the extension must have: names, or the number of rows."""


def _load() -> ModuleType | str:
    """The extension, or why it cannot be loaded; ImportError if its tables are not Python's."""
    try:
        extension = importlib.import_module("klfast._C")
    except ModuleNotFoundError:
        return "the extension was not built; run pip install --no-build-isolation ."
    except ImportError as error:
        return f"the extension does not load with torch {torch.__version__}: {error}"
    # Choices travel as positions in these tables. An old build would compute another choice.
    built = getattr(extension, "TABLES", {})
    for name, table in TABLES.items():
        if built.get(name) != table:
            raise ImportError(
                f"klfast._C was built from other sources: its {name} are {built.get(name)}, "
                f"klfast's are {table}; rebuild it with pip install --no-build-isolation ."
            )
    return extension


define("klfast")
_EXTENSION = _load()


def load_error() -> str | None:
    """The reason why the extension could not be loaded, in one sentence; None if it was loaded."""
    return _EXTENSION if isinstance(_EXTENSION, str) else None


def extension() -> ModuleType | None:
    """The extension; None if it could not be loaded."""
    return None if isinstance(_EXTENSION, str) else _EXTENSION
