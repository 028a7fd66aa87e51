"""``patch``: klfast's functions in the place of an installed framework's own.

A ``Target`` says what a framework's distribution is called and which ``Site`` objects to put what
into. A site is recognised by its code: comments, docstrings and annotations left out, it must be
what klfast was proved equal to. If anything is not, nothing is replaced, and an error says what.
"""

from __future__ import annotations
import __future__

import ast
import functools
import hashlib
import importlib
import inspect
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

Make = Callable[[Any, bool], Any]
"""(what the framework has, exact) -> what takes its place."""

Holder = tuple[Any, str, Any, Any]
"""(module or class, name, old, new)."""


class Site(NamedTuple):
    """One function, class or method of a framework.

    Attributes:
        where: ``"package.module:Class.method"``.
        code: its fingerprint; None where ``make`` itself looks for the code that it replaces.
        make: from the framework's object to its replacement; None for code that stays, but that
            what is replaced was proved equal with.
    """

    where: str
    code: str | None
    make: Make | None = None


class Target(NamedTuple):
    """A framework's distribution and what to replace in it.

    Attributes:
        distribution: the name under which it is installed; None if it has no releases.
        versions: the releases that are known, by their first numbers.
        sites: what is replaced.
        exact: whether any of the replacements has an ``exact``.
    """

    distribution: str | None
    versions: tuple[str, ...]
    sites: tuple[Site, ...]
    exact: bool = False


class PatchError(RuntimeError):
    """The installed framework is not one that klfast knows how to patch; nothing was changed."""


def fingerprint(function_or_class: Any) -> str:
    """16 hexadecimal digits of the code, without its comments, docstrings and annotations.

    Raises:
        PatchError: the source cannot be read, or is not all there is: something wraps it.
    """
    tree = _Bare().visit(_parse(function_or_class))
    return hashlib.sha256(_text(tree).encode()).hexdigest()[:16]


def _check_code(function_or_class: Any, code: str) -> None:
    if fingerprint(function_or_class) != code:
        raise PatchError("its code is another than the one that klfast replaces")


def _text(node: Any) -> str:
    """A syntax tree as text that is the same in every Python, unlike ``ast.dump``."""
    if isinstance(node, list):
        return "[" + " ".join(map(_text, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind"))
    given = (f"{name}={_text(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({' '.join(given)})"


def _parse(function_or_class: Any) -> ast.Module:
    if hasattr(function_or_class, "__wrapped__"):
        wrapper = getattr(function_or_class, "__globals__", {}).get("__name__", "something")
        raise PatchError(f"it is wrapped by {wrapper}, whose wrapping must come after klfast's")
    try:
        source = inspect.getsource(function_or_class)
    except (OSError, TypeError) as error:
        raise PatchError(f"its source cannot be read: {error}") from None
    return ast.parse(textwrap.dedent(source))


class _Bare(ast.NodeTransformer):
    """Takes out what does not change what code does."""

    def _without_docstring(self, node: Any) -> Any:
        self.generic_visit(node)
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_ClassDef = _without_docstring  # noqa: N815

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.returns = None
        return self._without_docstring(node)

    def visit_arg(self, node: ast.arg) -> Any:
        node.annotation = None
        return node


def replacement(new: Any) -> Make:
    """A function or class of klfast in the framework's place, under the framework's name."""

    def make(old: Any, exact: bool) -> Any:
        if inspect.isclass(new):
            # A class of its own, so that ``unpatch`` knows who holds it. Its objects are pickled as
            # klfast's, which any process can read, patched or not.
            names = {name: getattr(old, name) for name in ("__module__", "__qualname__")}
            methods = {"__reduce__": lambda self: (_revive, (new, vars(self)))}
            return type(old.__name__, (new,), {"__doc__": new.__doc__, **names, **methods})
        options = {"exact": True} if exact and "exact" in inspect.signature(new).parameters else {}

        @functools.wraps(old)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return new(*args, **options, **kwargs)

        return stand_in

    return make


def replacement_of_compiled(new: Any, code: str) -> Make:
    """``replacement`` of a function that ``torch.compile`` decorates; ``code`` is its own."""

    def make(old: Any, exact: bool) -> Any:
        function = getattr(old, "_torchdynamo_orig_callable", old)
        if function is not old and old.__wrapped__ is not function:
            function = old  # which somebody has wrapped once more, its attributes with it
        _check_code(function, code)
        return replacement(new)(function, exact)

    return make


def _revive(cls: type, attributes: dict[str, Any]) -> Any:
    """The pickled object of a replaced class, as klfast's own."""
    revived: Any = object.__new__(cls)
    vars(revived).update(attributes)
    return revived


def rewriting(statements: Mapping[str, str], namespace: Any) -> Make:
    """The framework's function with some of its statements replaced, each found exactly once.

    For code that is written inline. The new statements see ``namespace`` under the name ``klfast``.
    Line numbers stay, so tracebacks still point into the framework's file.
    """

    def make(old: Any, exact: bool) -> Any:
        tree = _parse(old)
        if set(old.__code__.co_freevars) - {"__class__"}:
            raise PatchError("it must be a plain method, got a closure")
        rewrite = _Rewrite(statements)
        function = rewrite.visit(tree).body[0]
        for statement, count in rewrite.found.items():
            if count != 1:
                raise PatchError(f"it must have the statement {statement!r} once, got {count}")
        # ``super()`` looks for __class__ around its function, where a class body would put it.
        around = ast.parse("def around(__class__, klfast):\n    return None").body[0]
        assert isinstance(around, ast.FunctionDef)
        around.body = [function, ast.Return(ast.Name(function.name, ast.Load()))]
        module = ast.fix_missing_locations(ast.Module([around], []))
        ast.increment_lineno(module, old.__code__.co_firstlineno - 1)
        scope: dict[str, Any] = {}
        code = old.__code__
        flags = code.co_flags & __future__.annotations.compiler_flag
        exec(compile(module, code.co_filename, "exec", flags, True), old.__globals__, scope)
        rewritten = scope["around"](_class_of(old), namespace)
        rewritten.__qualname__ = old.__qualname__
        return rewritten

    return make


def _class_of(function: Any) -> type | None:
    """The class in whose body the function was written, if it uses ``super()``."""
    closure = inspect.getclosurevars(function).nonlocals
    found = closure.get("__class__")
    return found if isinstance(found, type) else None


class _Rewrite(ast.NodeTransformer):
    """Replaces statements that read the same, and counts them."""

    def __init__(self, statements: Mapping[str, str]) -> None:
        self.new = {ast.unparse(ast.parse(old)): new for old, new in statements.items()}
        self.found = dict.fromkeys(self.new, 0)

    def visit_Assign(self, node: ast.Assign) -> Any:
        text = ast.unparse(node)
        if text not in self.new:
            return node
        self.found[text] += 1
        new = ast.parse(self.new[text]).body[0]
        for part in ast.walk(new):
            ast.copy_location(part, node)
        return new


class Patch:
    """A framework that has been patched; as a context manager, until the end of the block."""

    def __init__(self, framework: str, holders: Sequence[Holder]) -> None:
        self.framework = framework
        self._holders = holders

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def undo(self) -> None:
        """Put everything back, also where it was imported by name since; once is enough."""
        with _LOCK:
            if _ACTIVE.get(self.framework) is not self:
                return
            del _ACTIVE[self.framework]
            for owner, name, old, new in self._holders:
                _put(owner, name, new, old)

    def __repr__(self) -> str:
        where = ", ".join(f"{_name(owner)}.{name}" for owner, name, *_ in self._holders)
        return f"Patch({self.framework!r}: {where})"


_ACTIVE: dict[str, Patch] = {}
"""By framework: what is patched now."""

_LOCK = threading.RLock()
"""Of whoever changes that."""


def apply(framework: str, targets: Sequence[Target], exact: bool) -> Patch:
    """Replace every site of the target that is installed, or nothing at all."""
    with _LOCK:
        if framework in _ACTIVE:
            raise PatchError(f"{framework} is already patched; unpatch({framework!r}) comes first")
        target = _installed(framework, targets)
        if exact and not target.exact:
            raise PatchError(f"nothing that klfast replaces in {framework} has an exact=True")
        prepared = [_prepare(framework, site, exact) for site in target.sites]
        patch = Patch(framework, [holder for holder in prepared if holder is not None])
        _ACTIVE[framework] = patch
        try:
            for owner, name, old, new in patch._holders:
                _put(owner, name, old, new)
        except Exception as error:
            patch.undo()
            raise PatchError(f"{framework} does not let itself be patched: {error!r}") from error
        return patch


def undo(framework: str) -> None:
    """Put a framework's own code back."""
    with _LOCK:
        if framework not in _ACTIVE:
            raise PatchError(f"{framework} is not patched")
        _ACTIVE[framework].undo()


def _installed(framework: str, targets: Sequence[Target]) -> Target:
    """The target whose version is installed."""
    known: list[str] = []
    for target in targets:
        if target.distribution is None:
            return target
        try:
            version = metadata.version(target.distribution)
        except metadata.PackageNotFoundError:
            raise PatchError(f"{framework} is not installed") from None
        for first in target.versions:
            if version == first or version.startswith(first + "."):
                return target
        known += target.versions
    raise PatchError(
        f"{framework} {version} is installed; klfast knows how to patch {', '.join(known)}"
    )


def _prepare(framework: str, site: Site, exact: bool) -> Holder | None:
    """What to put where, or an error if the site is not what it should be."""
    module_name, _, path = site.where.partition(":")
    owner = _import(framework, module_name)
    *classes, name = path.split(".")
    try:
        for part in classes:
            owner = getattr(owner, part)
        old = vars(owner)[name]
    except (AttributeError, KeyError):
        raise PatchError(f"the installed {framework} has no {site.where} to replace") from None
    try:
        if site.code is not None:
            _check_code(old, site.code)
        return None if site.make is None else (owner, name, old, site.make(old, exact))
    except PatchError as error:
        raise PatchError(f"{framework}'s {site.where} is not known to klfast: {error}") from None


def _import(framework: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            raise PatchError(f"{framework} is not installed") from None
        raise PatchError(f"importing {module} failed, for want of {error.name}") from error
    except Exception as error:  # whatever a framework's import may raise
        raise PatchError(f"importing {module} failed: {error!r}") from error


def _put(owner: Any, name: str, old: Any, new: Any) -> None:
    """Replace ``old`` in its owner, and in every module that holds it under whatever name."""
    setattr(owner, name, new)
    if not isinstance(owner, ModuleType):
        return
    for module in list(sys.modules.values()):
        # Their dicts, not their attributes: a lazy module must not be made to load what it holds.
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for held in [held for held, value in list(names.items()) if value is old]:
            names[held] = new


def _name(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", owner.__name__))
