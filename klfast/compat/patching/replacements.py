"""Replacements of a framework's code: functions, classes, and statements inside of methods."""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from klfast.compat.patching.fingerprints import (
    PatchError,
    fingerprint,
    fingerprint_of_tree,
    parse,
)

Make = Callable[[Any, bool], Any]
"""(what the framework has, exact) -> what takes its place."""


def replacement(new: Any) -> Make:
    """A function or class of klfast in the framework's place, under the framework's name."""

    def make(old: Any, exact: bool) -> Any:
        if inspect.isclass(new):
            # A class of its own, so that ``unpatch`` knows who holds it. Its objects are pickled as
            # klfast's, which any process can read, patched or not.
            names = {name: getattr(old, name) for name in ("__module__", "__qualname__")}
            methods = {"__reduce__": lambda self: (_revive, (new, vars(self)))}
            return type(old.__name__, (new,), {"__doc__": new.__doc__, **names, **methods})
        if isinstance(old, staticmethod):
            return staticmethod(make(old.__func__, exact))
        function = _exact(new) if exact else new

        @functools.wraps(old)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return stand_in

    return make


def replacement_of_compiled(new: Any, code: str) -> Make:
    """``replacement`` of a function that ``torch.compile`` decorates; ``code`` is its own."""

    def make(old: Any, exact: bool) -> Any:
        function = getattr(old, "_torchdynamo_orig_callable", old)
        if function is not old and old.__wrapped__ is not function:
            function = old  # which somebody has wrapped once more, its attributes with it
        if fingerprint(function) != code:
            raise PatchError("its code is none of those that klfast replaces")
        return replacement(new)(function, exact)

    return make


def _exact(function: Any) -> Any:
    """The function with ``exact=True``, where it has an ``exact``."""
    if "exact" not in inspect.signature(function).parameters:
        return function
    return functools.partial(function, exact=True)


def _revive(cls: type, attributes: dict[str, Any]) -> Any:
    """The pickled object of a replaced class, as klfast's own."""
    revived: Any = object.__new__(cls)
    vars(revived).update(attributes)
    return revived


Blocks = Mapping[tuple[str, ...], str]
"""Fingerprints of the known codes of an ``if`` statement, its blocks included -> the new one."""


def rewriting(
    statements: Mapping[str, str], namespace: Any, *, blocks: Blocks | None = None
) -> Make:
    """The framework's function with some of its statements replaced, each found exactly once.

    For code that is written inline. Assignments are named by their text, whole ``if`` statements by
    their fingerprints. The new statements see the functions of ``namespace`` under the
    name ``klfast``, with ``exact=True`` if that is asked for and they have an ``exact``. Line
    numbers stay, so tracebacks still point into the framework's file.
    """

    def make(old: Any, exact: bool) -> Any:
        tree = parse(old)
        if set(old.__code__.co_freevars) - {"__class__"}:
            raise PatchError("it must be a plain method, got a closure")
        rewrite = _Rewrite(statements, blocks or {})
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
        functions = dict(inspect.getmembers(namespace, inspect.isfunction))
        if exact:
            functions = {name: _exact(function) for name, function in functions.items()}
        rewritten = scope["around"](_class_of(old), SimpleNamespace(**functions))
        rewritten.__qualname__ = old.__qualname__
        return rewritten

    return make


def _class_of(function: Any) -> type | None:
    """The class in whose body the function was written, if it uses ``super()``."""
    closure = inspect.getclosurevars(function).nonlocals
    found = closure.get("__class__")
    return found if isinstance(found, type) else None


class _Rewrite(ast.NodeTransformer):
    """Replaces assignments that read the same and ``if`` statements of known code; counts both."""

    def __init__(self, statements: Mapping[str, str], blocks: Blocks) -> None:
        self.new = {ast.unparse(ast.parse(old)): new for old, new in statements.items()}
        self.blocks = {code: codes for codes in blocks for code in codes}
        self.names = {codes: " or ".join(codes) for codes in blocks}
        self.new |= {self.names[codes]: new for codes, new in blocks.items()}
        self.found = dict.fromkeys(self.new, 0)

    def visit_Assign(self, node: ast.Assign) -> Any:
        text = ast.unparse(node)
        return self._replace(node, text) if text in self.new else node

    def visit_If(self, node: ast.If) -> Any:
        if self.blocks:
            code = fingerprint_of_tree(ast.Module([copy.deepcopy(node)], []))
            if code in self.blocks:
                return self._replace(node, self.names[self.blocks[code]])
        return self.generic_visit(node)

    def _replace(self, node: ast.stmt, name: str) -> ast.stmt:
        self.found[name] += 1
        new = ast.parse(self.new[name]).body[0]
        for part in ast.walk(new):
            ast.copy_location(part, node)
        return new
