"""Puts the results of ``klfast study`` into docs/controllers.md.

``klfast study --out runs/study`` makes them; given that folder, its numbers and its picture are
copied to benchmarks/results/study.json and docs/study.png first.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from klfast.study.table import plant_table, reading, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "study.json"
PICTURE = ROOT / "docs" / "study.png"
PAGE = ROOT / "docs" / "controllers.md"
BLOCK = re.compile(r"(<!-- study:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def blocks() -> dict[str, str]:
    """What the page's blocks hold, by name."""
    study = json.loads(RESULTS.read_text())
    return {
        "plant": plant_table(study),
        "table": table(study),
        "reading": "".join(f"- {sentence}\n" for sentence in reading(study)),
    }


def filled(page: str) -> str:
    """The page with its blocks as the results say."""
    found = blocks()
    return BLOCK.sub(lambda match: f"{match[1]}{found[match[2]]}{match[3]}", page)


def main(arguments: list[str]) -> None:
    if arguments:
        folder = Path(arguments[0])
        shutil.copyfile(folder / "study.json", RESULTS)
        shutil.copyfile(folder / "study.png", PICTURE)
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
