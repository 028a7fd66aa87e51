"""The README's examples: code blocks after ``<!-- example: NAME -->``."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"<!-- example: ([\w-]+) -->\n```python\n(.*?)```", re.DOTALL)


def examples():
    """Name -> code."""
    return dict(BLOCK.findall(README.read_text()))


def run(name, **given):
    """Runs an example with the names that it takes for granted, and returns all it leaves."""
    code = compile(examples()[name], f"README example {name}", "exec")
    exec(code, given)
    return given
