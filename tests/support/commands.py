"""Checks of the shell commands on pages, chosen by the name of the command.

A command without a check fails, so every command on a page is tested.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from readme import ROOT
from setuptools.command.build_ext import build_ext

from benchmarks import __main__ as benchmarks_program
from klfast import cli as klfast_program
from lab import __main__ as lab_program

VARIABLE = re.compile(r"([A-Z][A-Z0-9_]+|[a-z]+)=.*")
"""A variable of the environment, or of the shell in lower case."""
RULES = (ROOT / "Makefile", *sorted(ROOT.glob("tests/*/*.mk")))


def checked(command):
    """Check one line of a shell block. A comment has nothing to check."""
    for part in command.split(" && "):
        words = shlex.split(part, comments=True)
        while words and VARIABLE.fullmatch(words[0]):
            name = words.pop(0).partition("=")[0]
            assert name.islower() or is_read(name), f"nothing reads the variable {name}"
        if words:
            name = Path(words[0]).name
            assert name in CHECKS, f"no check of {name!r} in tests/support/commands.py"
            CHECKS[name](words[1:])


def run(*command, timeout=120, folder=ROOT, **environment):
    """Run a process in the repository or another folder, and return its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, f"{shlex.join(map(str, command))}: {done.stderr or done.stdout}"
    return done.stdout


def make(words):
    """The Makefile has the target and the variables, and ``make -n`` lists commands."""
    names = [word.partition("=")[0] for word in words if "=" in word]
    rules = "".join(path.read_text() for path in RULES)
    for name in names:
        assert f"$({name})" in rules, f"the Makefile has no {name}"
    targets = [word for word in words if "=" not in word]
    phony = " ".join(re.findall(r"^\.PHONY: (.*)", rules, re.MULTILINE)).split()
    assert set(targets) <= set(phony), targets
    assert run("make", "--dry-run", *words, MAKEFLAGS="")


def klfast(words):
    """The command accepts the options. A command that ends at once is run."""
    command = klfast_program.COMMANDS.get(words[0]) if words != ["info"] else None
    _program_of(klfast_program.main, command, words)


def lab(words):
    """The command accepts the options."""
    _program_of(lab_program.main, lab_program.COMMANDS.get(words[0]), words)


def benchmarks(words):
    """The benchmark accepts the options."""
    _program_of(benchmarks_program.main, "benchmarks.command", words)


def _program_of(main, module, words):
    """Run a command line whose module's ``run`` does nothing. It must succeed."""
    with pytest.MonkeyPatch.context() as patch:
        if module is not None:
            patch.setattr(f"{module}.run", lambda arguments: 0)
        try:
            code = main(words)
        except SystemExit as ended:  # --version; a mistake is 2
            code = ended.code
    assert code in (0, None), f"{main.__module__} {shlex.join(words)} ends with {code}"


def module(name):
    """Tests import this module of ``lab`` or ``benchmarks``. It is run without options."""

    def check(words):
        assert words == []
        tests = [test.read_text() for test in ROOT.glob("tests/**/test_*.py")]
        package, _, last = name.rpartition(".")
        assert any(name in text or f"from {package} import {last}" in text for text in tests), name

    return check


def torchrun(words):
    """Torchrun accepts the options, and a test runs the program."""
    from torch.distributed.run import parse_args

    arguments = parse_args(words)
    assert not arguments.module
    _program(arguments.training_script)


def python(words):
    """The command runs a checked module, a build step of setup.py, or a tested program."""
    if words[0] == "-m":
        assert words[1] in MODULES, f"no check of -m {words[1]} in tests/support/commands.py"
        MODULES[words[1]](words[2:])
    elif words[0] == "setup.py":
        assert words[1] == "build_ext"
        known = {f"--{option.rstrip('=')}" for option, _, _ in build_ext.user_options}
        assert set(words[2:]) <= known
    else:
        _program(words[0])


def _program(path):
    """The program is in the repository, and a test names it."""
    assert (ROOT / path).is_file(), path
    tests = [test.read_text() for test in ROOT.glob("tests/**/test_*.py")]
    assert any(Path(path).name in text for text in tests), f"no test runs {path}"


def pytest_(words):
    """The files exist, and pytest knows the options."""
    left = iter(words)
    for word in left:
        if word in ("-k", "-m", "-n", "-p"):
            next(left)
        else:
            assert (ROOT / word.partition("::")[0]).exists(), word


def pip(words):
    """Pip has the options. A package is klfast, or is installed, or ``make test-peers`` pins it.

    ``make wheel`` makes the files of ``dist``.
    """
    assert words[0] == "install"
    pins = "".join(path.read_text() for path in ROOT.glob("tests/peers/*/requirements.txt"))
    extras = metadata.metadata("klfast").get_all("Provides-Extra")
    for word in words[1:]:
        name, _, chosen = word.rstrip("]").partition("[")
        if word.startswith("-"):
            assert re.search(rf"{word}(?![\w-])", _help_of_pip()), word
        elif name in (".", "klfast"):
            assert not chosen or {*chosen.split(",")} <= {*extras}, word
        elif not re.fullmatch(r"dist/klfast-[\w.*+-]*\.(whl|tar\.gz)", word):
            assert re.search(rf"^{name}==", pins, re.MULTILINE) or metadata.version(name)


@functools.cache
def _help_of_pip():
    return run(sys.executable, "-m", "pip", "install", "--help")


def git(words):
    """The subcommand has the options, and the files to add exist."""
    usage = subprocess.run(["git", words[0], "-h"], capture_output=True, text=True, check=False)
    options = [word for word in words if word.startswith("--")]
    text = re.sub(r"\[no-\]", "", usage.stdout + usage.stderr)
    assert usage.returncode == 129, usage.stderr
    assert all(re.search(rf"{option}(?![\w-])", text) for option in options), options
    assert words[0] != "add" or all((ROOT / word).exists() for word in words[1:]), words


def gh(words):
    """The repository has the workflow."""
    assert words[:2] == ["workflow", "run"]
    assert (ROOT / ".github" / "workflows" / words[2]).is_file(), words[2]


def cd(words):
    """An earlier command makes the folder, so there is nothing to check."""
    assert len(words) == 1


def ci(words):
    """The script of `.ci/run`."""
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert words == []


def venv(words):
    """``python -m venv FOLDER``."""
    assert len(words) == 1


def framework(words):
    """A framework's own command: tests/peers asks the framework's parser for its options."""


CHECKS = {
    "accelerate": framework,
    "cd": cd,
    "gh": gh,
    "git": git,
    "klfast": klfast,
    "make": make,
    "pip": pip,
    "pytest": pytest_,
    "python": python,
    "python3": python,
    "ray": framework,
    "run": ci,
    "swift": framework,
    "torchrun": torchrun,
}

MODULES = {
    "benchmarks": benchmarks,
    "benchmarks.report": module("benchmarks.report"),
    "klfast": klfast,
    "lab": lab,
    "pip": pip,
    "pytest": pytest_,
    "venv": venv,
    "verl.trainer.main_ppo": framework,
}
"""Of ``python -m``."""


@functools.cache
def _code():
    """All code that may read a variable: klfast, the workflows, and torch's extension builder."""
    import torch.utils.cpp_extension

    paths = [ROOT / "setup.py", *RULES, Path(torch.utils.cpp_extension.__file__)]
    for pattern in (
        ".github/workflows/*.yml",
        "klfast/**/*.py",
        "csrc/**/*",
        "lab/**/*.py",
        "benchmarks/*.py",
        "tests/**/conftest.py",
        "tests/support/**/*.cpp",
    ):
        paths += [path for path in ROOT.glob(pattern) if path.is_file()]
    return "\n".join(path.read_text(errors="replace") for path in paths)


def is_read(variable):
    """True if code reads a variable of the environment or of a Makefile."""
    return re.search(rf"""["'(.]{variable}(?!\w)""", _code()) is not None
