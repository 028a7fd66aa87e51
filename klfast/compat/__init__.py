"""Drop-in replacements for the KL penalty code of the frameworks in ``FRAMEWORKS``.

``klfast.compat.<framework>`` has functions and classes with the framework's own names, argument
names and return shapes, to be imported; ``patch("<framework>")`` puts them into the installed
framework. Values and gradients are the framework's own, but for rounding and its faults. These
differences hold for all of them; a docstring names only further ones:

- Lower dtypes give fp32, and fp64 stays fp64.
- k3, chi-square and divergences keep their digits near 0. A divergence is never negative.
- NaN and inf under a mask have no effect. The frameworks multiply by the mask, which lets NaN
  through, or gives it a NaN gradient.
- If an exp overflows under a limit, the gradient is 0, as wherever a limit acts, and not NaN.
- A logit of -inf adds 0 to an entropy, where theirs is NaN.
- A function over logits takes one read. It makes nothing of their size but the gradient, so an
  argument such as ``chunk_size`` has no effect.
- An unknown name is a ValueError that gives the argument and lists the known names.

Per-token functions have an option ``exact=True``, which undoes the first, third and fourth
difference.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from klfast.compat.frameworks import FRAMEWORKS, Framework
from klfast.compat.patching import Left, Patch, Replaced, patch, unpatch
from klfast.compat.patching.fingerprints import PatchError

if TYPE_CHECKING:
    from klfast.compat import ms_swift, openrlhf, presets, roll, skyrl, trl, trlx, verl, vllm

__all__ = [
    "FRAMEWORKS",
    "Framework",
    "Left",
    "Patch",
    "PatchError",
    "Replaced",
    "ms_swift",
    "openrlhf",
    "patch",
    "presets",
    "roll",
    "skyrl",
    "trl",
    "trlx",
    "unpatch",
    "verl",
    "vllm",
]


def __getattr__(name: str) -> object:
    """A framework's module is imported when it is first asked for."""
    if name in FRAMEWORKS or name in ("presets", "vllm"):
        return importlib.import_module(f"klfast.compat.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
