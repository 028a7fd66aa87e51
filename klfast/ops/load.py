"""Loads the extension, whose import implements the ops of ``torch.ops.klfast``."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from klfast.ops.table import define


def _load() -> ModuleType | str:
    """The extension, or why it cannot be loaded."""
    try:
        return importlib.import_module("klfast._C")
    except ModuleNotFoundError:
        return "the extension was not built; run pip install --no-build-isolation ."
    except ImportError as error:
        return f"the extension does not load with torch {torch.__version__}: {error}"


define("klfast")
_EXTENSION = _load()


def load_error() -> str | None:
    """Why the extension could not be loaded, in one sentence; None if it was."""
    return _EXTENSION if isinstance(_EXTENSION, str) else None


def extension() -> ModuleType | None:
    """The extension; None if it could not be loaded."""
    return None if isinstance(_EXTENSION, str) else _EXTENSION
