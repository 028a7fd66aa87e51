"""``patch``: klfast's functions in the place of an installed framework's own.

A site is recognised by its code, not by a version. Without comments, docstrings and annotations,
the code must be one that klfast was proved equal to. Other code is left alone, with its whole
group. This is a part of what ``patch`` knows of verl, from ``klfast/compat/targets.py``:

    Target                  verl; a framework has one target, or one for each era
      Group                 sites that are replaced together or not at all
        Site                "verl.trainer.ppo.core_algos:kl_penalty"
          its codes         54a41f26e292a888, in 0.6 and 0.7.0; 26e3aa9865ad925b, in 0.7.1; ...
          new               klfast.compat.verl.kl_penalty
        Site                "verl.trainer.ppo.core_algos:kl_penalty_forward", which it calls
          its codes         21b857ef8d407206, in every release
          new               None: it stays as it is
      Group
        Site                "verl.trainer.ppo.core_algos:agg_loss"
        ...

Had verl changed ``kl_penalty_forward``, ``kl_penalty`` would be left alone, and ``agg_loss``
replaced.

``patch`` first goes through the target and changes nothing. Each site becomes a ``Replacement``
(owner, name, old code and new code) or a reason why its group is left. Then ``patch`` puts all
replacements in place, in every ``Binding``. A binding is a name of the old code in a module of the
framework. Both steps, and ``unpatch``, run under one lock. An error or an interrupt halfway puts
everything back. A patch is in place as a whole or not at all.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from klfast.args.checks import check_choice
from klfast.args.estimator import Estimator, as_estimator
from klfast.compat.frameworks import FRAMEWORKS, Framework
from klfast.compat.patching.fingerprints import PatchError, fingerprint
from klfast.compat.patching.replacements import Options, replace
from klfast.compat.patching.sites import INSIDE, Group, Site, Target, is_there, is_within, versioned
from klfast.types.names import EstimatorName

Modules = tuple[str, ...] | str  # further modules whose names are replaced too, or ``"all"``


class Replaced(NamedTuple):
    """One function, class or method that is klfast's now.

    Attributes:
        where: ``"package.module:Class.method"``.
        releases: which releases have the code that was found there.
        modules: the other modules that had imported it by name and got the replacement too.
    """

    where: str
    releases: str
    modules: tuple[str, ...]

    def __str__(self) -> str:
        also = f" (also in {', '.join(self.modules)})" if self.modules else ""
        return f"{self.where}{also}"


class Left(NamedTuple):
    """One that is not, and why.

    Attributes:
        where: ``"package.module:name"``.
        reason: a sentence without its full stop.
    """

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Replacement(NamedTuple):
    """The old and the new at a place: ``name`` of ``owner``, a module or a class."""

    where: str
    releases: str
    owner: Any
    name: str
    old: Any
    new: Any

    def check_unchanged(self, found: Any, where: str) -> None:
        """Raise if other code has taken klfast's place."""
        # A reload of the module puts the old code there, in a new object.
        if found is self.new or found is self.old:
            return
        try:
            if fingerprint(found) == fingerprint(self.old):
                return
        except PatchError:
            pass
        raise PatchError(
            f"{where} has been wrapped or replaced since it was patched, by "
            f"{getattr(found, '__module__', found)!r}; undo that first"
        )


class Binding(NamedTuple):
    """A name by which a module has something."""

    module: str
    names: dict[str, Any]
    name: str


def bindings_of(value: Any) -> Iterator[Binding]:
    """Every name by which a module has a value."""
    seen: set[int] = set()
    # A copy, because another thread may import meanwhile.
    for module_name, module in list(sys.modules.items()):
        # The dict is read, because reading attributes would make a lazy module load its content.
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or id(names) in seen:
            continue
        seen.add(id(names))
        for name in [name for name, held in list(names.items()) if held is value]:
            yield Binding(module_name, names, name)


class _ExpectedError(PatchError):
    """A site that is left alone, ``strict`` or not."""


class _FusedError(_ExpectedError):
    """Known code that runs as a fused kernel on a GPU."""


class Patch:
    """A framework that has been patched; as a context manager, until the end of the block.

    Attributes:
        framework: its name.
        installed: its name with its version.
        replaced: the code that klfast replaced, ``Replaced`` each.
        left: the code that was left, with the reason, ``Left`` each. This is unknown code, and
            names in modules outside the framework, which ``modules`` of ``patch`` reaches.
    """

    def __init__(
        self,
        framework: str,
        installed: str,
        replacements: Sequence[Replacement],
        left: Sequence[Left],
        reached: Modules,
    ) -> None:
        self.framework = framework
        self.installed = installed
        self.replaced: tuple[Replaced, ...] = ()
        self.left = tuple(left)
        self._replacements = replacements
        self._reached = reached
        self._bound: list[tuple[Replacement, Binding]] = []

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _reaches(self, module: str) -> bool:
        return self._reached == "all" or any(is_within(module, each) for each in self._reached)

    def _apply(self) -> None:
        for each in self._replacements:
            # The place itself first: a method of a class has no other names.
            setattr(each.owner, each.name, each.new)
            bindings = list(bindings_of(each.old)) if isinstance(each.owner, ModuleType) else []
            modules: dict[str, None] = {}
            for binding in bindings:
                if self._reaches(binding.module):
                    binding.names[binding.name] = each.new
                    self._bound.append((each, binding))
                    modules[binding.module] = None
                else:
                    why = "it was imported by name into another module; "
                    why += f'modules=("{binding.module}",) reaches it'
                    self.left += (Left(f"{binding.module}:{binding.name}", why),)
            # The module that defines it is no other module that imported it.
            modules.pop(each.where.partition(":")[0], None)
            self.replaced += (Replaced(each.where, each.releases, tuple(modules)),)

    def undo(self) -> tuple[Left, ...]:
        """As :func:`klfast.compat.unpatch`; a second call does nothing and returns ``()``."""
        with _LOCK:
            if _ACTIVE.get(self.framework) is not self:
                return ()
            for each in self._replacements:
                each.check_unchanged(vars(each.owner).get(each.name), each.where)
            for each, (module, names, name) in self._bound:
                # A name that the module has deleted since holds no wrapper that could be lost.
                each.check_unchanged(names.get(name, each.new), f"{module}:{name}")
            return self._put_back()

    def _put_back(self) -> tuple[Left, ...]:
        kept: list[Left] = []
        for each in self._replacements:
            if vars(each.owner).get(each.name) is each.new:
                setattr(each.owner, each.name, each.old)
            if not isinstance(each.owner, ModuleType):
                continue
            for module, names, name in list(bindings_of(each.new)):
                if self._reaches(module):
                    names[name] = each.old
                else:
                    kept.append(Left(f"{module}:{name}", "imported from the patched framework"))
        del _ACTIVE[self.framework]  # last, so that an interrupted undo can be repeated
        return tuple(kept)

    def __str__(self) -> str:
        lines = [f"klfast in {self.installed}"]
        lines += [f"  replaced  {each}" for each in self.replaced]
        lines += [f"  left      {each}" for each in self.left]
        return "\n".join(lines)

    __repr__ = __str__


_ACTIVE: dict[str, Patch] = {}  # the active patch of each framework

_LOCK = threading.RLock()  # the lock for every change of a framework or of ``_ACTIVE``


def is_patched(framework: str) -> bool:
    """True while a patch of the framework is active."""
    return framework in _ACTIVE


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
    # Imported late, because it imports the functions of every framework.
    targets = importlib.import_module("klfast.compat.targets").TARGETS[framework]
    given = framework, FRAMEWORKS[framework], targets, exact, strict, modules
    return apply(*given, **options)


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
    return undo(framework)


def apply(
    name: str,
    framework: Framework,
    targets: Sequence[Target],
    exact: bool = False,
    strict: bool = False,
    modules: Modules = (),
    **options: Any,
) -> Patch:
    """Replace every group of the target whose code is known, or of ``strict`` all of them."""
    names = () if modules == "all" else modules
    # A text is a sequence of texts too.
    are_names = isinstance(names, Sequence) and not isinstance(names, str)
    if not (are_names and all(isinstance(module, str) for module in names)):
        raise TypeError(f'modules must be "all" or a sequence of module names, got {modules!r}')
    if exact:
        options["exact"] = True
    with _LOCK:
        if name in _ACTIVE:
            raise PatchError(f"{name} is already patched; unpatch({name!r}) comes first")
        replacements, failures = _choose(name, framework, targets, options, strict)
        left = [Left(where, str(failure)) for where, failure in failures.items()]
        # A name of no module may be early or wrong.
        left += [
            Left(module, "it is not imported; what it imports from now on is klfast's")
            for module in names
            if not any(is_within(loaded, module) for loaded in list(sys.modules))
        ]
        reached = modules if modules == "all" else (framework.package, *names)
        patch = Patch(name, versioned(name), replacements, left, reached)
        # Before it is applied, because ``_put_back`` takes it out again.
        _ACTIVE[name] = patch
        try:
            patch._apply()
        except BaseException as error:  # an interrupt too must not leave half of it
            patch._put_back()
            if not isinstance(error, Exception):
                raise
            raise PatchError(f"{name} does not let itself be patched: {error!r}") from error
        return patch


def undo(framework: str) -> tuple[Left, ...]:
    """Put a framework's own code back."""
    with _LOCK:
        if framework not in _ACTIVE:
            raise PatchError(f"{framework} is not patched")
        return _ACTIVE[framework].undo()


Failures = dict[str, PatchError]  # by ``where``: why it is left alone


def _choose(
    name: str, framework: Framework, targets: Sequence[Target], options: Options, strict: bool
) -> tuple[list[Replacement], Failures]:
    """The replacements and the reasons for left code, from the first target whose code is known."""
    if not is_there(framework.package):
        raise PatchError(f"{name} is not installed")
    found = []
    for target in targets:
        replacements: list[Replacement] = []
        failures: Failures = {}
        for group in target:
            of_group, why_not = _prepare_group(name, group, options)
            replacements += of_group
            failures.update(why_not)
        found.append((replacements, failures))
        # On a GPU all code of a release may be fused, and klfast knows it nevertheless.
        is_fused = any(isinstance(each, _FusedError) for each in failures.values())
        known = bool(replacements) or is_fused
        if known:
            break
    # The first target is the newest era, whose reasons help most.
    replacements, failures = found[-1] if known else found[0]
    # An import that fails says more than code that is unknown.
    broken = (each for _, why_not in found for each in why_not.values() if each.__cause__)
    if not known and (failure := next(broken, None)) is not None:  # a module does not import
        raise PatchError(f"{versioned(name)} cannot be patched: {failure}") from failure.__cause__
    for where, failure in failures.items():
        if not known or (strict and not isinstance(failure, _ExpectedError)):
            what = "not all" if known else "nothing"
            raise PatchError(
                f"{what} of {versioned(name)} is known to klfast, which knows {name} "
                f"{framework.releases}; {where}: {failure}"
            )
    return replacements, failures


def _prepare_group(
    framework: str, group: Group, options: Options
) -> tuple[list[Replacement], Failures]:
    """The replacements, or the reasons why the group is left."""
    places: dict[str, list[Site]] = {}
    for site in group:
        places.setdefault(site.where, []).append(site)
    replacements: list[Replacement] = []
    failures: Failures = {}
    for where, sites in places.items():
        try:
            replacement = _recognise(framework, sites, options)
        except PatchError as failure:
            failures[where] = failure
        else:
            replacements += [] if replacement is None else [replacement]
    if not failures:
        return replacements, {}
    # A site without a replacement is named only if no other site gives a reason.
    of_replaced = {site.where for site in group if site.new is not None}
    failures = {where: why for where, why in failures.items() if where in of_replaced} or failures
    first = next(iter(failures))
    for replacement in replacements:
        together = f"it is replaced together with {first} or not at all"
        # The same kind of error, so that ``strict`` accepts both or neither.
        failures[replacement.where] = type(failures[first])(together)
    return [], failures


def _recognise(framework: str, sites: Sequence[Site], options: Options) -> Replacement | None:
    where = sites[0].where
    owner, name, old = _find(framework, where, sites[0].absent)
    site, code = _known(sites, old)
    # Its code is known, which is all that its group asks.
    if site.new is None:
        return None
    new = replace(old, site.new, options)
    if site.fused is not None and torch.cuda.is_available():
        does = site.fused(sys.modules[where.partition(":")[0]])
        if does is not None:
            raise _FusedError(f"on a GPU it {does}; no measurement shows klfast to be faster")
    return Replacement(where, site.codes[code], owner, name, old, new)


def _find(framework: str, where: str, absent: str | None) -> tuple[Any, str, Any]:
    module_name, _, path = where.partition(":")
    owner = _import(framework, module_name, absent)
    *classes, name = path.split(".")
    try:
        for part in classes:
            owner = getattr(owner, part)
        # getattr would unwrap a static method, and find a base class's.
        return owner, name, vars(owner)[name]
    except (AttributeError, KeyError):
        raise _missing(f"the installed {framework} has none", absent) from None


def _missing(text: str, absent: str | None) -> PatchError:
    """The error of a place that is not there, which ``absent`` expects if it is a text."""
    return PatchError(text) if absent is None else _ExpectedError(f"{text} ({absent})")


def _known(sites: Sequence[Site], old: Any) -> tuple[Site, str]:
    if INSIDE in sites[0].codes:
        return sites[0], INSIDE
    is_code = inspect.isroutine(old) or inspect.isclass(old) or hasattr(old, "__wrapped__")
    found = fingerprint(old) if is_code else repr(old)
    for site in sites:
        if found in site.codes:
            return site, found
    releases = ", ".join(each for site in sites for each in site.codes.values())
    raise PatchError(f"its code is none of those that klfast knows ({releases})")


def _import(framework: str, module: str, absent: str | None) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The module itself is missing in this release, and not one that it imports.
        if error.name is not None and is_within(module, error.name):
            raise _missing(f"the installed {framework} has none", absent) from None
        text = f"importing {module} failed: {error.name} is not installed"
        raise _missing(text, absent) from error
    except Exception as error:  # whatever a framework's import may raise
        raise PatchError(f"importing {module} failed: {error!r}") from error
