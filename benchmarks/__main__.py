"""``python -m benchmarks``: klfast timed against eager PyTorch and ``torch.compile``."""

import argparse
import sys
from collections.abc import Sequence

try:
    from benchmarks import command
except KeyboardInterrupt:  # while torch is imported
    sys.exit(130)


def main(argv: Sequence[str] | None = None) -> int:
    """Times what the options say, and returns the exit code: 2 for a mistake among them, 130 after
    Ctrl-C.
    """
    try:
        parser = argparse.ArgumentParser(prog="python -m benchmarks", description=command.HELP)
        command.add_arguments(parser)
        return command.run(parser.parse_args(argv))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
