"""Examples of the README and docs/drop_in.md: code blocks after ``<!-- example: NAME -->``."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DROP_IN = ROOT / "docs" / "drop_in.md"
BLOCK = re.compile(r"<!-- example: ([\w-]+) -->\n```python\n(.*?)```", re.DOTALL)


def examples():
    """Name -> code."""
    return dict(BLOCK.findall(README.read_text() + DROP_IN.read_text()))


def run(name, **given):
    """Runs an example with the names that it takes for granted, and returns all it leaves."""
    code = compile(examples()[name], f"README example {name}", "exec")
    exec(code, given)
    return given
