"""``klfast.compat.patch`` and ``unpatch``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from klfast.args.checks import check_choice
from klfast.args.estimator import as_estimator
from klfast.compat import patching
from klfast.compat.frameworks import FRAMEWORKS
from klfast.compat.patching import Left, Modules, Patch

if TYPE_CHECKING:
    from klfast.args.estimator import Estimator
    from klfast.types.names import EstimatorName


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
