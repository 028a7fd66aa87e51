"""A test runs every code block of the README, of pages and of docstrings."""

import ast
import functools
import re
import shlex

import commands
import pytest
import readme

SHELL = ("bash", "console", "sh", "shell")
RUNNERS = ("code", "run")
"""The functions of `readme` that run a block, and tests' own functions with these names."""
COMMAND = re.compile(r"(?<!`)`((?:make|klfast|torchrun|python -m) [^`]+)`(?!`)")
PROGRAM = re.compile(r"(?<!`)`python ([\w/]+\.py)[^`]*`(?!`)")
VARIABLE = re.compile(r"(?<!`)`((?:KLFAST|CUDA|NVCC|TORCH|MAX)_[A-Z_]+|[A-Z_]+(?==))[^`]*`(?!`)")


@functools.cache
def asked_for():
    """The names of blocks that some test passes to a function that runs them."""
    names = set()
    for path in readme.ROOT.glob("tests/**/test_*.py"):
        text = path.read_text()
        if re.search(r"^import readme|^from readme", text, re.MULTILINE):
            names.update(names_in(ast.parse(text)))
    return names


def names_in(tree):
    """The first arguments of calls of ``RUNNERS``, if they are strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else None
            if (called or getattr(function, "id", None)) in RUNNERS:
                yield node.args[0].value


def uncovered(blocks, tested):
    """The reasons why no test runs some of these blocks, by place."""
    seen = {}
    for block in blocks:
        if block.language in SHELL:
            continue
        if block.language == "":
            yield f"{block.place}: a block must name its language"
        elif block.name is None:
            yield f"{block.place}: a {block.language} block must have a name and a test"
        elif re.sub(r"-\d+$", "-1", block.name) not in tested:  # tests of steps begin with 1
            yield f"{block.place}: no test runs {block.name!r}"
        elif block.name in seen:
            yield f"{block.place}: {block.name!r} is a block of {seen[block.name]} too"
        seen[block.name] = block.place


def shell_commands():
    """Every command of the shell blocks, with the places where it stands."""
    places = {}
    for block in readme.blocks():
        if block.language in SHELL:
            page, _, line = block.place.partition(":")
            code = block.code.replace("\\\n", " ")  # join a command over several lines
            for number, command in enumerate(code.splitlines(), int(line) + 1):
                words = shlex.split(command, comments=True)
                text = " ".join(word if word == "&&" else shlex.quote(word) for word in words)
                places.setdefault(text, []).append(f"{page}:{number}")
    return parameters(places)


def in_prose(pattern):
    """The texts between backticks in pages, with their places."""
    places = {}
    for page in readme.PAGES:
        if page.name == "CHANGELOG.md":  # the changelog names old commands
            continue
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for found in pattern.findall(line):
                places.setdefault(found, []).append(f"{page.relative_to(readme.ROOT)}:{number}")
    return parameters(places)


def parameters(places):
    return [pytest.param(text, id=f"{text} of {', '.join(at)}") for text, at in places.items()]


def test_every_block_has_a_test():
    assert list(uncovered(readme.blocks(), asked_for())) == []


def test_a_page_shows_every_line_of_a_block():
    """The site shows 110 characters at a width of 1280 px."""
    long = [
        (block.place, line)
        for block in readme.blocks()
        for line in block.code.splitlines()
        if len(line) > 110
    ]
    assert long == []


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("text\n\n```python\n1 / 0\n```\n", "page.md:3: a python block must have a name"),
        ("<!-- example: new -->\n```python\n```\n", "page.md:2: no test runs 'new'"),
        (
            "<!-- example: old -->\n```python\n```\n" * 2,
            "page.md:5: 'old' is a block of page.md:2 too",
        ),
    ],
)
def test_a_block_without_a_test_is_named(page, says):
    (found,) = uncovered(readme.blocks_of_page(page, "page.md"), {"old"})
    assert found.startswith(says)


@pytest.mark.parametrize("command", shell_commands())
def test_a_command_of_a_shell_block(command):
    commands.checked(command)


@pytest.mark.parametrize("command", in_prose(COMMAND))
def test_a_command_in_a_sentence(command):
    commands.checked(command)


@pytest.mark.parametrize("program", in_prose(PROGRAM))
def test_a_program_in_a_sentence_is_there_and_has_a_test(program):
    commands.checked(f"python {program}")


@pytest.mark.parametrize("variable", in_prose(VARIABLE))
def test_a_variable_of_the_environment_is_read(variable):
    assert commands.is_read(variable)


@pytest.mark.parametrize(
    "command",
    [
        "make tets",
        "klfast dance",
        "python -m benchmarks --fast",
        "pip install no-such-package-of-anybody",
        "KLFAST_CHEK=1 make test",
        "curl example.org",
    ],
)
def test_a_wrong_command_is_found(command, capsys):
    with pytest.raises((AssertionError, ImportError, SystemExit, KeyError)):
        commands.checked(command)
