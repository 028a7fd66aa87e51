"""The modules of the kernel, and their text with relative imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeAlias

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGE = "klfast"
PLACES = (ROOT / PACKAGE, HERE / "torch-ext" / PACKAGE)
"""The folders of modules. A module in the second replaces the same module in the first."""
LEFT_OUT = ("KLLog", "compat", "info")
"""Public names that the kernel does not have."""
WRITTEN_BY_BUILD = (("_ops",),)
"""Modules that kernel-builder writes. Here `variants` writes them."""

Name: TypeAlias = tuple[str, ...]
"""A module's path in the package. () is the package itself."""
Files: TypeAlias = dict[PurePosixPath, bytes]


class Module(NamedTuple):
    """A module of the kernel."""

    name: Name
    file: Path

    @property
    def is_package(self) -> bool:
        return self.file.name == "__init__.py"

    @property
    def package(self) -> Name:
        """The package from which its relative imports start."""
        return self.name if self.is_package else self.name[:-1]

    @property
    def path(self) -> PurePosixPath:
        """Its file in the kernel."""
        file = "__init__.py" if self.is_package else f"{self.name[-1]}.py"
        return PurePosixPath(*self.package, file)

    @property
    def source(self) -> str:
        text = self.file.read_text(encoding="utf-8")
        return text if self.name else of_the_kernel(text)

    def refuse(self, node: ast.expr | ast.stmt, wanted: str) -> SystemExit:
        return SystemExit(f"{self.file}:{node.lineno}: for the kernel, {wanted}")


def of_the_kernel(text: str) -> str:
    """The package's own module, without the names in ``LEFT_OUT`` and what serves them."""
    imports = text.partition("\n\n\ndef ")[0]  # what follows is for compat
    imports = re.sub(r"\nimport importlib\nfrom typing .*\n", "", imports)
    imports = re.sub(r"if TYPE_CHECKING:\n.*\n\n", "", imports)
    for name in LEFT_OUT:
        imports = re.sub(rf"from \S+ import {name}\n|    \"{name}\",\n", "", imports)
    first, rest = imports.split("\n", 1)
    # It raises where torch is too old.
    check = f"from {PACKAGE} import _requirements as _requirements"
    return f"{first}\n\n{check}\n{rest.lstrip()}\n"


def available() -> dict[Name, Module]:
    """The modules that a kernel may have."""
    found = {}
    for place in PLACES:
        for file in place.rglob("*.py"):
            parts = file.relative_to(place).with_suffix("").parts
            name = parts[:-1] if file.name == "__init__.py" else parts
            found[name] = Module(name, file)
    return found


def target_of(statement: ast.ImportFrom, module: Module) -> Name | None:
    """The module that a `from` statement imports from, or None if it is not in the kernel."""
    parts = tuple(statement.module.split(".")) if statement.module else ()
    if statement.level:
        return (*module.package[: len(module.package) - statement.level + 1], *parts)
    return parts[1:] if parts[0] == PACKAGE else None


def imports_of(module: Module) -> Iterator[tuple[ast.ImportFrom, Name]]:
    """The statements that import modules of the kernel, with these modules.

    Raises:
        SystemExit: a module is imported in a way that cannot be rewritten.
    """
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.ImportFrom):
            if (target := target_of(node, module)) is not None:
                yield node, target
        elif isinstance(node, ast.Import):
            if any(alias.name.partition(".")[0] == PACKAGE for alias in node.names):
                raise module.refuse(node, f"write `from {PACKAGE} import ...`")
        elif isinstance(node, ast.Constant) and re.fullmatch(
            rf"{PACKAGE}(\.\w+)+", str(node.value)
        ):
            raise module.refuse(node, f"name no module in a string, as in {node.value!r}")


def modules(there: dict[Name, Module]) -> list[Module]:
    """The package and all modules that it imports, directly or not, in the order of their names."""
    found: dict[Name, Module] = {}
    wanted: list[Name] = [()]
    while wanted:
        name = wanted.pop()
        if name in found or name in WRITTEN_BY_BUILD:
            continue
        if name not in there:
            raise SystemExit(f"there is no module {'.'.join((PACKAGE, *name))}")
        found[name] = module = there[name]
        wanted += [name[:i] for i in range(len(name))]
        for statement, target in imports_of(module):
            submodules = ((*target, alias.name) for alias in statement.names)
            wanted += [target, *(submodule for submodule in submodules if submodule in there)]
    return [found[name] for name in sorted(found)]


def relative(target: Name, package: Name) -> str:
    """The shortest relative name of a module in `package`, such as `..stats`."""
    common = 0
    while common < min(len(target), len(package)) and target[common] == package[common]:
        common += 1
    return "." * (len(package) - common + 1) + ".".join(target[common:])


def rewritten(module: Module) -> str:
    """The text of a module, with relative imports."""
    lines = module.source.splitlines(keepends=True)
    for statement, target in imports_of(module):
        if statement.level:
            continue
        at = statement.lineno - 1
        line = lines[at].encode()  # ast counts columns in bytes
        before, rest = line[: statement.col_offset].decode(), line[statement.col_offset :].decode()
        absolute = f"from {statement.module} import "
        if not rest.startswith(absolute):
            raise module.refuse(statement, f"write `{absolute}...` in one line")
        names = rest.removeprefix(absolute)
        lines[at] = f"{before}from {relative(target, module.package)} import {names}"
    return "".join(lines)


def package_files() -> Files:
    """The kernel's files by their path in its package."""
    return {module.path: rewritten(module).encode() for module in modules(available())}
