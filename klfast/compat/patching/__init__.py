"""``patch``: klfast's functions in the place of an installed framework's own.

A site is recognised by its code, not by a version: comments, docstrings and annotations left out,
it must be one that klfast was proved equal to. What is not is left alone, with its whole group.
What ``patch`` knows of verl, of which ``klfast/compat/targets/verl.py`` is the whole:

    Target                  verl; a framework has one target, or one for each era
      Group                 sites that are replaced together or not at all
        Site                "verl.trainer.ppo.core_algos:kl_penalty"
          KnownCode         54a41f26e292a888, in 0.6 and 0.7.0: klfast.compat.verl.kl_penalty
          KnownCode         26e3aa9865ad925b, in 0.7.1: the same
          KnownCode         3194e8e3a0b07d41, in 0.8 and 0.9: the same
        Site                "verl.trainer.ppo.core_algos:kl_penalty_forward", which it calls
          KnownCode         21b857ef8d407206, in every release: stays as it is
      Group
        Site                "verl.trainer.ppo.core_algos:agg_loss"
        ...

Had verl changed ``kl_penalty_forward``, ``kl_penalty`` would be left alone, and ``agg_loss``
replaced.

``patch`` goes through the target first and changes nothing: each site becomes a ``_Holder`` (who
holds the code under which name, the old and the new), or a reason why its group is left. Then all
holders are put in place, in every module of the framework that has the name. Both steps, and
``unpatch``, run under one lock; an error or an interrupt halfway puts everything back. A patch is
in place as a whole or not at all.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from klfast.compat.frameworks import Framework
from klfast.compat.patching.fingerprints import PatchError, fingerprint
from klfast.compat.patching.sites import Group, KnownCode, Site, Target, is_there, versioned
from klfast.compat.reports import Left, Replaced, report

Modules = tuple[str, ...] | str
"""Further modules whose names are replaced too, or ``"all"``."""


class _Holder(NamedTuple):
    """A replacement and its place."""

    site: Site
    code: KnownCode
    owner: Any
    name: str
    old: Any
    new: Any


class _Name(NamedTuple):
    """A name by which a module holds something."""

    module: str
    names: dict[str, Any]
    name: str


class _ExpectedError(PatchError):
    """A site that is left alone, ``strict`` or not."""


class _FusedError(_ExpectedError):
    """Known code that runs as a fused kernel on a GPU."""


class _AbsentError(PatchError):
    """A site that the installed framework does not have, or cannot import."""


class _ExpectedAbsentError(_AbsentError, _ExpectedError):
    """A site that some releases or installations are known to lack."""


class Patch:
    """A framework that has been patched; as a context manager, until the end of the block.

    Attributes:
        framework: its name.
        installed: its name with its version.
        replaced: what is klfast's now, ``Replaced`` each.
        left: what is not, and why, ``Left`` each: code that is not known, and names in modules
            outside the framework, which ``modules`` of ``patch`` reaches.
    """

    def __init__(
        self,
        framework: str,
        installed: str,
        holders: Sequence[_Holder],
        left: Sequence[Left],
        reaches: Callable[[str], bool],
    ) -> None:
        self.framework = framework
        self.installed = installed
        self.replaced: tuple[Replaced, ...] = ()
        self.left = tuple(left)
        self._holders = holders
        self._reaches = reaches
        self._reached: list[tuple[_Holder, _Name]] = []

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def _apply(self) -> None:
        for holder in self._holders:
            setattr(holder.owner, holder.name, holder.new)
            held = list(_held(holder.old)) if isinstance(holder.owner, ModuleType) else []
            reached = [each for each in held if self._reaches(each.module)]
            for each in reached:
                each.names[each.name] = holder.new
                self._reached.append((holder, each))
            modules = dict.fromkeys(each.module for each in reached)
            modules.pop(holder.site.where.partition(":")[0], None)
            self.replaced += (Replaced(holder.site.where, holder.code.releases, tuple(modules)),)
            self.left += tuple(
                Left(f"{module}:{name}", _outside(module))
                for module, _, name in held
                if not self._reaches(module)
            )

    def undo(self) -> tuple[Left, ...]:
        """Put everything back, also where the framework imported it by name since; once is enough.

        Returns:
            The names in modules outside the framework that still hold klfast's, because they
            imported them while it was patched: they are not touched.

        Raises:
            PatchError: somebody has wrapped or replaced one of them since, also where a module
                imported it by name; nothing is changed.
        """
        with _LOCK:
            if _ACTIVE.get(self.framework) is not self:
                return ()
            for holder in self._holders:
                found = vars(holder.owner).get(holder.name)
                _check_unchanged(holder, found, holder.site.where)
            for holder, (module, names, name) in self._reached:
                # A name that the module has deleted since holds no wrapper that could be lost.
                _check_unchanged(holder, names.get(name, holder.new), f"{module}:{name}")
            return self._put_back()

    def _put_back(self) -> tuple[Left, ...]:
        kept: list[Left] = []
        for holder in self._holders:
            if vars(holder.owner).get(holder.name) is holder.new:
                setattr(holder.owner, holder.name, holder.old)
            if not isinstance(holder.owner, ModuleType):
                continue
            for module, names, name in list(_held(holder.new)):
                if self._reaches(module):
                    names[name] = holder.old
                else:
                    kept.append(Left(f"{module}:{name}", "imported from the patched framework"))
        del _ACTIVE[self.framework]  # last, so that an interrupted undo can be repeated
        return tuple(kept)

    def __str__(self) -> str:
        return report(self.installed, self.replaced, self.left)

    __repr__ = __str__


_ACTIVE: dict[str, Patch] = {}
"""By framework: what is patched now."""

_LOCK = threading.RLock()
"""Held by whoever changes a framework or ``_ACTIVE``."""


def apply(
    name: str,
    framework: Framework,
    targets: Sequence[Target],
    exact: bool = False,
    strict: bool = False,
    modules: Modules = (),
) -> Patch:
    """Replace every group of the target whose code is known, or of ``strict`` all of them."""
    _check_modules(modules)
    with _LOCK:
        if name in _ACTIVE:
            raise PatchError(f"{name} is already patched; unpatch({name!r}) comes first")
        holders, failures = _choose(name, framework, targets, exact, strict)
        left = [Left(where, str(failure)) for where, failure in failures.items()]
        left += _absent(modules)
        patch = Patch(name, versioned(name), holders, left, _reach(framework.package, modules))
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


Failures = dict[str, PatchError]
"""By ``where``: why it is left alone."""


def _choose(
    name: str, framework: Framework, targets: Sequence[Target], exact: bool, strict: bool
) -> tuple[list[_Holder], Failures]:
    """The replacements and what is left, by the first target whose code is known here."""
    if not is_there(framework.package):
        raise PatchError(f"{name} is not installed")
    found = []
    for target in targets:
        holders, failures = _prepare(name, target, exact)
        found.append((holders, failures))
        known = bool(holders) or any(isinstance(each, _FusedError) for each in failures.values())
        if known:
            break
    holders, failures = found[-1] if known else found[0]
    for where, failure in failures.items():
        if not known or (strict and not isinstance(failure, _ExpectedError)):
            what = "not all" if known else "nothing"
            raise PatchError(
                f"{what} of {versioned(name)} is known to klfast, which knows {name} "
                f"{framework.releases}; {where}: {failure}"
            )
    return holders, failures


def _prepare(framework: str, target: Target, exact: bool) -> tuple[list[_Holder], Failures]:
    """The replacements, and the reasons of the groups whose code is not known."""
    holders: list[_Holder] = []
    failures: Failures = {}
    for group in target:
        of_group, why_not = _prepare_group(framework, group, exact)
        holders += of_group
        failures.update(why_not)
    return holders, failures


def _prepare_group(framework: str, group: Group, exact: bool) -> tuple[list[_Holder], Failures]:
    holders: list[_Holder] = []
    failures: Failures = {}
    for site in group:
        try:
            holder = _recognise(framework, site, exact)
        except PatchError as failure:
            failures[site.where] = failure
        else:
            holders += [] if holder is None else [holder]
    if not failures:
        return holders, {}
    # What stays is named only where nothing else says why.
    of_replaced = {site.where for site in group if any(code.make for code in site.known)}
    failures = {where: why for where, why in failures.items() if where in of_replaced} or failures
    first = next(iter(failures))
    for holder in holders:
        together = f"it is replaced together with {first} or not at all"
        failures[holder.site.where] = type(failures[first])(together)
    return [], failures


def _recognise(framework: str, site: Site, exact: bool) -> _Holder | None:
    """The replacement at a site; None where it stays; an error where its code is not known."""
    try:
        owner, name, old = _find(framework, site.where)
    except _AbsentError as error:
        if site.absent is None:
            raise
        raise _ExpectedAbsentError(f"{error} ({site.absent})") from error
    code = _known_code(site, old)
    if code.make is None:
        return None
    new = code.make(old, exact)
    if code.fused is not None and torch.cuda.is_available():
        reason = code.fused(sys.modules[site.where.partition(":")[0]])
        if reason is not None:
            raise _FusedError(reason)
    return _Holder(site, code, owner, name, old, new)


def _find(framework: str, where: str) -> tuple[Any, str, Any]:
    """Who holds it, under which name, and what it is."""
    module_name, _, path = where.partition(":")
    owner = _import(framework, module_name)
    *classes, name = path.split(".")
    try:
        for part in classes:
            owner = getattr(owner, part)
        return owner, name, vars(owner)[name]
    except (AttributeError, KeyError):
        raise _AbsentError(f"the installed {framework} has none") from None


def _known_code(site: Site, old: Any) -> KnownCode:
    """The one of the known codes that it has."""
    codes = [known.code for known in site.known]
    if codes == [None]:
        return site.known[0]
    is_code = inspect.isroutine(old) or inspect.isclass(old) or hasattr(old, "__wrapped__")
    found = fingerprint(old) if is_code else repr(old)
    if found not in codes:
        releases = ", ".join(known.releases for known in site.known)
        raise PatchError(f"its code is none of those that klfast knows ({releases})")
    return site.known[codes.index(found)]


def _import(framework: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise _AbsentError(f"the installed {framework} has none") from None
        raise _AbsentError(f"importing {module} failed, for want of {error.name}") from error
    except Exception as error:  # whatever a framework's import may raise
        raise PatchError(f"importing {module} failed: {error!r}") from error


def _check_modules(modules: Modules) -> None:
    if isinstance(modules, str):
        good = modules == "all"
    else:
        good = isinstance(modules, Sequence) and all(isinstance(name, str) for name in modules)
    if not good:
        raise TypeError(f'modules must be "all" or a sequence of module names, got {modules!r}')


def _reach(package: str, modules: Modules) -> Callable[[str], bool]:
    """Whether names in a module, by its name, are replaced."""
    if modules == "all":
        return lambda module: True
    reached = (package, *modules)
    return lambda module: any(f"{module}.".startswith(f"{name}.") for name in reached)


def _absent(modules: Modules) -> list[Left]:
    """Names of no module that is imported, which may be early or wrong."""
    asked = () if isinstance(modules, str) else modules
    loaded = list(sys.modules)
    return [
        Left(name, "it is not imported; what it imports from now on is klfast's")
        for name in asked
        if not any(f"{module}.".startswith(f"{name}.") for module in loaded)
    ]


def _outside(module: str) -> str:
    return f'it was imported by name into another module; modules=("{module}",) reaches it'


def _held(value: Any) -> Iterator[_Name]:
    """Every name by which a module holds a value."""
    seen: set[int] = set()
    for module_name, module in list(sys.modules.items()):
        # Their dicts, not their attributes: a lazy module must not be made to load what it holds.
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or id(names) in seen:
            continue
        seen.add(id(names))
        for name in [name for name, held in list(names.items()) if held is value]:
            yield _Name(module_name, names, name)


def _check_unchanged(holder: _Holder, found: Any, where: str) -> None:
    """Nobody has put something of their own where klfast's is; a reload of the module may have."""
    if found is holder.new or found is holder.old:
        return
    try:
        if fingerprint(found) == fingerprint(holder.old):
            return
    except PatchError:
        pass
    raise PatchError(
        f"{where} has been wrapped or replaced since it was patched, by "
        f"{getattr(found, '__module__', found)!r}; that must be taken back first"
    )
