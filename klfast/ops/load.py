"""Loads the extension, whose import implements the ops of ``torch.ops.klfast``."""

from __future__ import annotations

import importlib

import torch

from klfast.ops.table import define


def _load() -> str | None:
    try:
        importlib.import_module("klfast._C")
    except ModuleNotFoundError:
        return "the extension was not built; run pip install --no-build-isolation ."
    except ImportError as error:
        return f"the extension does not load with torch {torch.__version__}: {error}"
    return None


define("klfast")
_LOAD_ERROR = _load()


def load_error() -> str | None:
    """Why the extension could not be loaded, in one sentence; None if it was."""
    return _LOAD_ERROR
