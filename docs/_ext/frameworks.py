"""The pages of docs/frameworks/: their tables become boxes, and a module's functions follow."""

import importlib
import inspect
import re

from klfast.compat import FRAMEWORKS

COLUMNS = ("release", "theirs", "mine", "differs")
HEADER = "| releases | their line | your line | what differs |"
REFERENCE = """
## `klfast.compat.{name}`

The code of {title} {releases} was read.

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


def page_of(name, text):
    """A framework's page for Sphinx, of the text that GitHub shows."""
    before, _, rest = text.partition(HEADER)
    lines = rest.splitlines()[2:]
    end = lines.index("") if "" in lines else len(lines)
    rows = "\n".join(boxes_of(name, lines[:end]))
    entries = "\n".join(entries_of(name, rows))
    reference = REFERENCE.format(**FRAMEWORKS[name]._asdict(), name=name, entries=entries)
    return "\n".join([before + rows, *lines[end:], reference])


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


BOX = """:::{{admonition}} {release}
Their line
: {theirs}

Your line
: {mine}

What differs
: {differs}
:::
"""


def boxes_of(name, table):
    """The table's rows, each as a box that a phone can show, and that says where a line is from."""
    for row in table:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        cells[2] = re.sub("^the same", f"the same from `klfast.compat.{name}`", cells[2])
        cells[2] = cells[2].replace("`patch`", f'`patch("{name}")`')
        cells[3] = cells[3] or "nothing but [what differs everywhere](../drop_in.md#what-differs)"
        yield BOX.format(**dict(zip(COLUMNS, cells, strict=True)))


def setup(app):
    """Change a page's text as Sphinx reads it."""

    def read(app, docname, source):
        folder, _, name = docname.rpartition("/")
        if folder == "frameworks":
            source[0] = page_of(name, source[0])

    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
