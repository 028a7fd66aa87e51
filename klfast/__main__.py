"""The command line: ``python -m klfast <command>``, or ``klfast <command>``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from klfast.provenance import described
from klfast.streams import replace_standard_streams

# A command is a module with HELP, add_arguments(parser) and run(arguments) -> exit code.
COMMANDS = {"check": "klfast.cli.check.report", "info": "klfast.backends.info"}


class _Version(argparse.Action):
    """Prints version and commit; the commit is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"klfast {described()}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for a mistake on the command line, 130 after
    Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="klfast", description="The KL penalty of RL for language models."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="version and commit")
    return run_command(parser, COMMANDS, argv)


def run_command(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, str],
    argv: Sequence[str] | None,
) -> int:
    """Runs one of a program's commands (name -> module), and returns its exit code."""
    try:
        replace_standard_streams()
        subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
        for name, module_name in commands.items():
            module = importlib.import_module(module_name)
            subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
        arguments = parser.parse_args(argv)
        code: int = arguments.run(arguments)
        return code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
