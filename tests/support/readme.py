"""Finds the code blocks of the README, of pages and of docstrings, and runs them in tests.

A block without shell commands has a name in the line above it: ``<!-- example: NAME -->``. A block
in a docstring has the name of the function, the class or the module. ``test_code_blocks`` lists the
blocks that no test uses.
"""

import ast
import functools
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FOLDERS = ("*.md", ".github/**/*.md", "benchmarks/**/*.md", "docs/**/*.md")
FOLDERS += ("examples/**/*.md", "release/*.md", "docs/llms.txt")
PAGES = tuple(sorted(path for pattern in FOLDERS for path in ROOT.glob(pattern)))

NAME = re.compile(r"<!-- example: ([\w-]+) -->")
DIRECTIVES = ("{eval-rst}", "{glossary}", "{include}", "{literalinclude}", "{raw}", "{toctree}")
"""Sphinx's directives, which are no code."""
LITERAL = re.compile(r"^(?!\s*\.\. ).*::\n\n((?:[ \t]+\S.*\n?|\s*\n)+)", re.MULTILINE)


class Block(NamedTuple):
    """A block of code, and the line where it begins."""

    place: str
    language: str
    name: str | None
    code: str


def blocks_of_page(text, place):
    """The blocks of a page in Markdown. ``place`` is its path."""
    name = None
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block"):
            language = (token.info.split() or [""])[0]
            if language not in DIRECTIVES:
                yield Block(f"{place}:{token.map[0] + 1}", language, name, token.content)
        found = NAME.fullmatch(token.content.strip()) if token.type == "html_block" else None
        name = found and found[1]


def blocks_of_module(source, module, place):
    """The literal blocks of a module's docstrings, and any block of another kind."""
    for node, name in _documented(ast.parse(source), module):
        text = ast.get_docstring(node) or ""
        place_of = f"{place}:{getattr(node, 'lineno', 1)}"
        for code in LITERAL.findall(text + "\n"):
            yield Block(place_of, "python", name, textwrap.dedent(code))
        if re.search(r"^\s*(>>> |```|\.\. (code|doctest|testcode|parsed))", text, re.MULTILINE):
            yield Block(place_of, "doctest", None, text)


def _documented(node, name):
    """(node, dotted name) of a module, and of the classes and functions in it."""
    yield node, name
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child, f"{name}.{child.name}")


@functools.cache
def blocks():
    """Every block, of pages and of klfast's docstrings."""
    found = []
    for page in PAGES:
        found += blocks_of_page(page.read_text(), page.relative_to(ROOT).as_posix())
    packages = ("klfast", "lab")
    for path in sorted(path for name in packages for path in ROOT.glob(f"{name}/**/*.py")):
        place = path.relative_to(ROOT)
        parts = [part for part in place.with_suffix("").parts if part != "__init__"]
        found += blocks_of_module(path.read_text(), ".".join(parts), place.as_posix())
    return tuple(found)


@functools.cache
def examples():
    """Name -> code."""
    return {block.name: block.code for block in blocks() if block.name}


def code(name):
    """The text of a block."""
    return examples()[name]


def run(name, source=None, **given):
    """Run a block with the given names, and return all names that it leaves.

    ``source`` replaces the text of the block, for example by a part of it.
    """
    compiled = compile(source or code(name), f"example {name}", "exec")
    exec(compiled, given)
    return given
