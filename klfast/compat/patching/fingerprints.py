"""How ``patch`` recognises code: by its syntax tree, whatever the release is called."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from typing import Any


class PatchError(RuntimeError):
    """The installed framework is not one that klfast knows how to patch; nothing was changed."""


def fingerprint(function_or_class: Any) -> str:
    """16 hexadecimal digits of the code, without its comments, docstrings and annotations."""
    return fingerprint_of_tree(parse(function_or_class))


def fingerprint_of_tree(tree: ast.Module) -> str:
    """The same of a module whose only statement is the function or class; changes the tree."""
    return hashlib.sha256(_text(_Bare().visit(tree)).encode()).hexdigest()[:16]


def parse(function_or_class: Any) -> ast.Module:
    """The syntax tree of a function, static method or class, decorators included.

    Raises:
        PatchError: the source cannot be read, or is not all there is: something wraps it.
    """
    if isinstance(function_or_class, (staticmethod, classmethod)):
        function_or_class = function_or_class.__func__
    # The source is the wrapped function's, and a replacement would drop the wrapper.
    if hasattr(function_or_class, "__wrapped__"):
        wrapper = getattr(function_or_class, "__globals__", {}).get("__name__", "something")
        raise PatchError(f"it is wrapped by {wrapper}; patch first, and wrap after that")
    try:
        source = inspect.getsource(function_or_class)
    except (OSError, TypeError) as error:
        raise PatchError(f"its source cannot be read: {error}") from None
    return ast.parse(textwrap.dedent(source))


def _text(node: Any) -> str:
    """A syntax tree as text that is the same in every Python, unlike ``ast.dump``."""
    if isinstance(node, list):
        return "[" + " ".join(map(_text, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    # Both fields say nothing that the tree does not, and newer Pythons add fields that are empty.
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind"))
    given = (f"{name}={_text(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({' '.join(given)})"


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
