"""The entry of ``python -m klfast <command>``, and of ``klfast <command>``."""

from __future__ import annotations

import sys

from klfast.cli import main

if __name__ == "__main__":
    sys.exit(main())
