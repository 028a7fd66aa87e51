"""Replacements of a framework's code: functions, classes, and statements inside of methods."""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from klfast.compat.patching.fingerprints import PatchError, fingerprint, fingerprint_of_tree, parse

Options = Mapping[str, Any]
"""The options of ``patch`` that replacements take, where they have an argument of the name."""


class Make(NamedTuple):
    """A recipe that makes klfast's replacement from the framework's object."""

    make: Callable[[Any, Options], Any]  # (the framework's object, options) -> its replacement


def replace(old: Any, new: Any, options: Options) -> Any:
    """The replacement of ``old``: ``new`` under the framework's name, or a ``Make``'s result."""
    if isinstance(new, Make):
        return new.make(old, options)
    if inspect.isclass(new):
        # A class of its own, so that ``unpatch`` knows who holds it. Its objects are pickled as
        # klfast's, which any process can read, patched or not.
        names = {name: getattr(old, name) for name in ("__module__", "__qualname__")}
        methods = {"__reduce__": lambda self: (_revive, (new, vars(self)))}
        return type(old.__name__, (new,), {"__doc__": new.__doc__, **names, **methods})
    if isinstance(old, staticmethod):
        return staticmethod(replace(old.__func__, new, options))
    function = _with(new, options)

    @functools.wraps(old)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return stand_in


def compiled(new: Any, code: str) -> Make:
    """For a function that ``torch.compile`` decorates; ``code`` is its own."""

    def make(old: Any, options: Options) -> Any:
        function = getattr(old, "_torchdynamo_orig_callable", old)
        if function is not old and old.__wrapped__ is not function:
            function = old  # which somebody has wrapped once more, its attributes with it
        if fingerprint(function) != code:
            raise PatchError("its code is none of those that klfast replaces")
        return replace(function, new, options)

    return Make(make)


def _with(function: Any, options: Options) -> Any:
    """The function with the options that it takes."""
    if not options:  # a builtin, such as torch.neg, has no signature
        return function
    names = options.keys() & inspect.signature(function).parameters.keys()
    return functools.partial(function, **{n: options[n] for n in names}) if names else function


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
    name ``klfast``, with the options that they take. Line numbers stay, so tracebacks still point
    into the framework's file.
    """

    def make(old: Any, options: Options) -> Any:
        tree = parse(old)
        # The rewritten code is executed in the globals, where a closure's variables are not.
        if set(old.__code__.co_freevars) - {"__class__"}:
            raise PatchError("it must be a plain method, got a closure")
        rewrite = _Rewrite(statements, blocks or {})
        function = rewrite.visit(tree).body[0]
        for statement, count in rewrite.found.items():
            if count != 1:
                raise PatchError(f"it must have the statement {statement!r} once, got {count}")
        functions = dict(inspect.getmembers(namespace, inspect.isfunction))
        functions = {name: _with(function, options) for name, function in functions.items()}
        return _executed(function, old, SimpleNamespace(**functions))

    return Make(make)


def _executed(function: ast.FunctionDef, old: Any, klfast: SimpleNamespace) -> Any:
    """The function of a syntax tree, in the file, the globals and the class of the old one."""
    # ``super()`` looks for __class__ around its function, where a class body would put it. So the
    # function is defined inside of another, which has both names as arguments and returns it.
    around = ast.parse("def around(__class__, klfast):\n    return None").body[0]
    assert isinstance(around, ast.FunctionDef)
    around.body = [function, ast.Return(ast.Name(function.name, ast.Load()))]
    module = ast.fix_missing_locations(ast.Module([around], []))
    code = old.__code__
    ast.increment_lineno(module, code.co_firstlineno - 1)
    # Else annotations that the framework left as texts would be evaluated.
    flags = code.co_flags & __future__.annotations.compiler_flag
    scope: dict[str, Any] = {}
    exec(compile(module, code.co_filename, "exec", flags, True), old.__globals__, scope)
    owner = inspect.getclosurevars(old).nonlocals.get("__class__")
    rewritten = scope["around"](owner if isinstance(owner, type) else None, klfast)
    rewritten.__qualname__ = old.__qualname__
    return rewritten


class _Rewrite(ast.NodeTransformer):
    """Replaces assignments that read the same and ``if`` statements of known code; counts both."""

    def __init__(self, statements: Mapping[str, str], blocks: Blocks) -> None:
        self.new = {ast.unparse(ast.parse(old)): new for old, new in statements.items()}
        self.blocks = {code: codes for codes in blocks for code in codes}
        self.names = {codes: " or ".join(codes) for codes in blocks}
        self.new |= {self.names[codes]: new for codes, new in blocks.items()}
        self.found = dict.fromkeys(self.new, 0)

    def visit_Assign(self, node: ast.Assign) -> Any:
        # Unparsed, so that line breaks and quotes do not count.
        text = ast.unparse(node)
        return self._replace(node, text) if text in self.new else node

    def visit_If(self, node: ast.If) -> Any:
        if self.blocks:
            # A copy, because the fingerprint removes docstrings and annotations.
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
