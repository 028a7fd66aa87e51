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
from typing import TYPE_CHECKING, Any

from klfast.args.checks import check_choice
from klfast.args.estimator import as_estimator
from klfast.compat import patching
from klfast.compat.frameworks import FRAMEWORKS, Framework
from klfast.compat.patching import Left, Modules, Patch, Replaced
from klfast.compat.patching.fingerprints import PatchError

if TYPE_CHECKING:
    from klfast.args.estimator import Estimator
    from klfast.compat import (
        ms_swift,
        openrlhf,
        presets,
        roll,
        skyrl,
        trl,
        trlx,
        verl,
        vllm,
    )
    from klfast.types.names import EstimatorName

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


def patch(
    framework: str,
    *,
    exact: bool = False,
    strict: bool = False,
    modules: Modules = (),
    estimator: EstimatorName | Estimator | None = None,
) -> Patch:
    """Put klfast's KL code in the place of an installed framework's own, in this process.

    ``patch`` compares the code, not the version. It replaces code that klfast was proved equal to
    and leaves code that it does not know. ``print(patch(...))`` names both. Functions that were
    proved equal together are replaced together or not at all. If there is a GPU and the framework's
    own code runs there as a fused kernel, ``patch`` leaves that code too, because no measurement
    says that klfast's is faster.

    Modules of the framework that imported a replaced function by name get the replacement. Names
    in other modules, ``__main__`` too, stay as they are and are listed in ``Patch.left``, unless
    ``modules`` has them. The patch holds until ``unpatch(framework)``, or as a context manager
    (``with klfast.compat.patch("verl"): ...``) until the end of the block. Worker processes need
    their own call, in Ray ``ray.init(runtime_env={"worker_process_setup_hook":
    "module.function"})``. ``klfast.compat.<framework>.setup_worker`` is such a function for verl,
    OpenRLHF, ROLL and SkyRL.

    Args:
        framework: a name in ``klfast.compat.FRAMEWORKS``.
        exact: passed to the replacements that have this option, for the framework's dtypes and
            faults too. The KL in GRPO's loss and sums over a sequence do not have it.
        strict: replace everything that klfast knows of the framework, or nothing. Unknown code is
            then an error. Functions missing from that release, or fused on a GPU, raise no error.
        modules: further modules or packages whose names are replaced too, ``("my_trainer",)``, or
            ``"all"``.
        estimator: for TRL, whose settings name none: the estimator of the KL in GRPO's loss, such
            as ``"k3+"`` or a :class:`klfast.Estimator`. None is TRL's own, k3. A trainer class with
            an attribute ``estimator`` has its own.

    Returns:
        The patch, a context manager. It lists the code that was ``replaced``, and the code that was
        ``left`` with the reasons.

    Raises:
        PatchError: the framework is not installed or is already patched, or klfast knows none of
            its code or, if ``strict``, not all of it. Nothing is changed.
        ValueError, TypeError: the framework is unknown, ``modules`` is not a sequence of names, or
            ``estimator`` is unknown or not for this framework.
    """
    check_choice("framework", framework, (*FRAMEWORKS,))
    if estimator is not None and framework != "trl":
        raise ValueError(
            f"estimator must be None for {framework!r}, whose settings name the estimator, got "
            f"{estimator!r}"
        )
    options: dict[str, Any] = {} if estimator is None else {"estimator": as_estimator(estimator)}
    targets = importlib.import_module("klfast.compat.targets").TARGETS[framework]
    given = framework, FRAMEWORKS[framework], targets, exact, strict, modules
    return patching.apply(*given, **options)


def unpatch(framework: str) -> tuple[Left, ...]:
    """Put a framework's own code back, also where its modules imported it by name since.

    Args:
        framework: the name that :func:`patch` was given.

    Returns:
        The names in modules outside the framework that keep klfast's functions, because the modules
        imported them while the framework was patched.

    Raises:
        PatchError: the framework is not patched, or other code has wrapped or replaced a klfast
            function since, where it is defined or where a module imported it by name. Unpatching
            would lose that wrapper, so nothing is changed.
        ValueError, TypeError: as :func:`patch`.
    """
    check_choice("framework", framework, (*FRAMEWORKS,))
    return patching.undo(framework)
