"""The command line: a command is a module with HELP, add_arguments(parser) and run(arguments),
which returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from klfast.backends.info import described

COMMANDS = {"check": "klfast.cli.check.report", "info": "klfast.cli.info"}


class _Version(argparse.Action):
    """Prints version and commit; the commit is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"klfast {described()}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 2 for a wrong command, 130 after Ctrl-C."""
    if argv is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process, silently
    parser = argparse.ArgumentParser(
        prog="klfast", description="The KL penalty of RL for language models."
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version and the commit"
    )
    return run_command(parser, COMMANDS, argv)


def run_command(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, str],
    argv: Sequence[str] | None,
) -> int:
    """Runs the chosen command (``commands``: name -> module), and returns its exit status."""
    try:
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
