"""The command line of the lab: ``python -m lab compare`` and ``python -m lab study``."""

import argparse
import io
import sys
from collections.abc import Sequence

try:
    from klfast.cli import run_command
except KeyboardInterrupt:  # while torch is imported
    sys.exit(130)

COMMANDS = {"compare": "lab.compare", "study": "lab.study.table"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code, as the commands of ``klfast`` do."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # missing characters become "?"
        sys.stdout.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(
        prog="python -m lab", description="Experiments with KL controllers."
    )
    return run_command(parser, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
