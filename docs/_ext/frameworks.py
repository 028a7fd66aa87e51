"""A page for each framework: its rows of the table in drop_in.md, and its module's functions."""

import re
from pathlib import Path

COLUMNS = ("release", "theirs", "mine", "differs")
HEADER = "| framework | their line | your line | what differs |"
TITLES = {
    "areal": "AReaL",
    "ms_swift": "ms-swift",
    "nemo_rl": "NeMo-RL",
    "open_instruct": "open-instruct",
    "openrlhf": "OpenRLHF",
    "roll": "ROLL",
    "skyrl": "SkyRL",
    "slime": "slime",
    "trl": "TRL",
    "trlx": "trlx",
    "verl": "verl",
}
PAGE = """# From {title}

<!-- example: framework -->
```python
import klfast

print(klfast.compat.patch("{name}"))  # what was replaced, what was left and why
```

or, without a patch, by the imports below. [In place of a framework's KL](../drop_in.md)
says what `patch` replaces, and what holds for all frameworks.

{rows}

## `klfast.compat.{name}`

```{{eval-rst}}
.. automodule:: klfast.compat.{name}
   :members:
   :exclude-members: AdaptiveKLController, FixedKLController

Its controllers are those of :mod:`klfast.compat.controllers`.
```
"""


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
            yield text.replace("](#", "](../drop_in.md#").replace("](rollout", "](../rollout")


def write_pages(app):
    """One page per framework, in docs/frameworks/, which git ignores."""
    here = Path(app.srcdir)
    lines = (here / "drop_in.md").read_text().partition(HEADER)[2].splitlines()[2:]
    table = lines[: lines.index("")]
    folder = here / "frameworks"
    folder.mkdir(exist_ok=True)
    for name, title in TITLES.items():
        rows = [*rows_of(table, title)]
        assert len(rows) > 1, f"no row of {title} in drop_in.md"
        page = PAGE.format(title=title, name=name, rows="\n".join(rows))
        (folder / f"{name}.md").write_text(page)


def setup(app):
    """Write the pages before Sphinx looks for them."""
    app.connect("config-inited", lambda app, config: write_pages(app))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
