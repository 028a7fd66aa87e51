"""Links inside the built site must resolve: pages, anchors, pictures, scripts, the search.

``python docs/links.py build/site`` prints those that do not, and ends with 1 if there are any; it
is the end of `make docs`. Links to other sites are not followed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINKS = ("href", "src", "srcset", "data", "poster", "action")
ELSEWHERE = ("http", "https", "mailto", "data", "javascript")
INDEX = re.compile(r"^Search\.setIndex\((.*)\)\s*$", re.DOTALL)
MARKDOWN = re.compile(r"\]\(([^)\s]+)\)")
STYLE = re.compile(r"""url\(\s*['"]?([^'")]+)['"]?\s*\)""")


class Page(HTMLParser):
    """The links of a page with their lines, and the names that others may link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[int, str]] = []
        self.names: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        # Sphinx links a source back to a name that a page shows it by, which is not its anchor.
        is_back = dict(attributes).get("class") == "viewcode-back"
        for name, value in attributes:
            if value is None:
                continue
            value = value.partition("#")[0] if is_back else value
            if name == "id" or (name == "name" and tag == "a"):
                self.names.add(value)
            if name in LINKS:
                parts = value.split(",") if name == "srcset" else [value]
                targets = [part.split()[0] for part in parts if part.split()] or [""]
                self.links += [(self.getpos()[0], target) for target in targets]


class Site:
    """A folder of pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.pages = {
            path: Page(path.read_text(encoding="utf-8")) for path in self.folder.rglob("*.html")
        }

    def broken(self) -> Iterator[str]:
        """A line for each link that leads nowhere."""
        if not self.pages:
            yield f"{self.folder}: no page"
        for place, source, link in self._links():
            fault = self._fault(source, link)
            if fault:
                yield f"{place}: {link!r} {fault}"

    def _links(self) -> Iterator[tuple[str, Path, str]]:
        """(where it stands, the file that it is relative to, link)."""
        for path, page in sorted(self.pages.items()):
            for line, link in page.links:
                yield f"{self._name(path)}:{line}", path, link
        for pattern, expression in (("*.css", STYLE), ("*.txt", MARKDOWN)):
            for path in sorted(self.folder.rglob(pattern)):
                if "_sources" not in path.parts:
                    for link in expression.findall(path.read_text(encoding="utf-8")):
                        yield self._name(path), path, link
        index = self.folder / "searchindex.js"
        for link in self._found_by_search(index):
            yield self._name(index), index, link

    def _found_by_search(self, index: Path) -> Iterator[str]:
        found = INDEX.match(index.read_text(encoding="utf-8")) if index.exists() else None
        if found is None:
            yield "searchindex.js" if not index.exists() else "searchindex.js#no-index"
            return
        for name in json.loads(found[1])["docnames"]:
            yield f"{name}.html"

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _fault(self, source: Path, link: str) -> str | None:
        """The fault of a link; None if it resolves or leads to another site."""
        parts = urlsplit(link)
        if parts.scheme in ELSEWHERE or (parts.netloc and not parts.scheme):
            return None
        if parts.scheme or parts.path.startswith("/"):
            return "works on this machine alone"
        target = (source.parent / unquote(parts.path)).resolve() if parts.path else source
        if not target.is_relative_to(self.folder):
            return "leads out of the site"
        if not target.is_file():
            return "is not there"
        if parts.fragment and target.suffix == ".html":
            if unquote(parts.fragment) not in self.pages[target].names:
                return f"is no anchor of {self._name(target)}"
        elif parts.fragment and target.suffix != ".svg":
            return "is an anchor of no page"
        return None


def main(folder: str) -> int:
    """0 if every link resolves."""
    faults = [*Site(Path(folder)).broken()]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
