"""A page for each framework: its rows of the table in frameworks.md, its module's functions."""

import importlib
import inspect
import re
from pathlib import Path

from klfast.compat import FRAMEWORKS

COLUMNS = ("release", "theirs", "mine", "differs")
HEADER = "| framework | their line | your line | what differs |"
PAGE = """# From {title}

<!-- example: framework -->
```python
import klfast

print(klfast.compat.patch("{name}"))  # what was replaced, what was left and why
```

Or, without a patch, by the imports below. [In place of a framework's KL](../drop_in.md) says what
holds for all frameworks. The code of {title} {releases} was read.

{rows}

## `klfast.compat.{name}`

```{{eval-rst}}
.. automodule:: klfast.compat.{name}
   :no-members:

{entries}

Its controllers are those of :mod:`klfast.compat.controllers`.
```
"""
CALLED = ("apply", "forward")
"""Methods that a class is called by: the reference has them too."""
CONTROLLERS = ("AdaptiveKLController", "FixedKLController")


def page_of(name, rows=""):
    """The page of a framework of klfast's table."""
    entries = "\n".join(entries_of(name, rows))
    return PAGE.format(**FRAMEWORKS[name]._asdict(), name=name, rows=rows, entries=entries)


def entries_of(name, rows):
    """The reference's entries of a module, in the order in which the page's rows name them."""
    module = importlib.import_module(f"klfast.compat.{name}")
    later = getattr(module, "LATER", {})  # what it imports when it is first asked for
    names = [each for each in module.__all__ if each not in CONTROLLERS]
    names = [*dict.fromkeys([*names, *later])]

    def place(each):
        found = re.search(rf"\b{each}\b", rows)
        return found.start() if found else len(rows)

    for each in sorted(names, key=place):
        if each in later:
            yield f".. autoclass:: klfast.compat.{later[each]}.{each}\n"
            continue
        value = getattr(module, each)
        kind = "class" if inspect.isclass(value) else "function"
        called = ", ".join(method for method in CALLED if kind == "class" and method in vars(value))
        members = f"   :members: {called}\n" if called else ""
        if callable(value):
            yield f".. auto{kind}:: klfast.compat.{name}.{each}\n{members}"


ROW = """:::{{admonition}} {release}
Their line
: {theirs}

Your line
: {mine}

What differs
: {differs}
:::
"""


def rows_of(table, title):
    """The table's rows that name a framework, and those of all; links are one folder down."""
    name = re.compile(rf"\b{re.escape(title)}(?![\w-])")
    for row in table:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        if name.search(cells[0]) or cells[0] == "all":
            text = ROW.format(**dict(zip(COLUMNS, cells, strict=True)))
            text = re.sub(r"\]\((\w+\.md)", r"](../\1", text)
            yield text.replace("](#", "](../frameworks.md#")


def write_pages(app):
    """One page per framework, in docs/frameworks/, which git ignores."""
    here = Path(app.srcdir)
    lines = (here / "frameworks.md").read_text().partition(HEADER)[2].splitlines()[2:]
    table = lines[: lines.index("")]
    folder = here / "frameworks"
    folder.mkdir(exist_ok=True)
    for name, framework in FRAMEWORKS.items():
        rows = [*rows_of(table, framework.title)]
        assert len(rows) > 1, f"no row of {framework.title} in frameworks.md"
        (folder / f"{name}.md").write_text(page_of(name, "\n".join(rows)))


def setup(app):
    """Write the pages before Sphinx looks for them."""
    app.connect("config-inited", lambda app, config: write_pages(app))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
