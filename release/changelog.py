"""Checks CHANGELOG.md.

- `changelog.py form` checks that it has the form of Keep a Changelog.
- `changelog.py since REF` checks that it has changed if klfast/ or csrc/ have changed since the
  branch left REF.
- `changelog.py notes TAG` prints the newest section. Its version must be the version of the tag and
  of klfast/version.py.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1].resolve()
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
NEED_A_LINE = ("klfast/", "csrc/")
HEADING = re.compile(r"\[(?:(?P<version>\d+\.\d+\.\d+)\] - (?P<date>\S+)|Unreleased\])")


class Section(NamedTuple):
    """A heading of the second level and the lines under it."""

    heading: str
    lines: list[str]

    def text(self) -> str:
        return "\n".join(self.lines).strip()


def sections(changelog: str) -> list[Section]:
    """The releases, in the file's order."""
    found: list[Section] = []
    for line in changelog.splitlines():
        if line.startswith("## "):
            found.append(Section(line.removeprefix("## "), []))
        elif found:
            found[-1].lines.append(line)
    return found


def version_of(heading: str) -> tuple[int, ...] | None:
    """The version as a tuple, such as (0, 1, 0). None for the unreleased section."""
    match = HEADING.fullmatch(heading)
    if match is None or match["version"] is None:
        return None
    return tuple(map(int, match["version"].split(".")))


def date_of(heading: str) -> str | None:
    """The date of a release, as it is written."""
    match = HEADING.fullmatch(heading)
    return match["date"] if match else None


def faults(changelog: str, version: str) -> list[str]:
    """The faults of a changelog whose sources have this version."""
    found = sections(changelog)
    headings = [section.heading for section in found]
    faults = [] if changelog.startswith("# Changelog\n") else ["it must begin with '# Changelog'"]
    for section in found:
        faults += faults_of_section(section)
    if "[Unreleased]" in headings[1:]:
        faults.append("[Unreleased] must be the first section, and stand once")
    numbers = [number for number in map(version_of, headings) if number is not None]
    if numbers != sorted({*numbers}, reverse=True):
        faults.append("versions must descend, each once")
    dates = [date for date in map(date_of, headings) if date is not None]
    if dates != sorted(dates, reverse=True):
        faults.append("no release may have a date after a later one's")
    if "[Unreleased]" not in headings and number_of(version) not in numbers:
        faults.append(f"it must have a section [Unreleased] or one of {version}")
    if numbers and number_of(version) < numbers[0]:
        faults.append(f"klfast/version.py has {version}, older than the newest section")
    return faults


def faults_of_section(section: Section) -> Iterator[str]:
    """The faults of one release."""
    if not HEADING.fullmatch(section.heading):
        yield f"'## {section.heading}' must be '## [Unreleased]' or '## [1.2.3] - 2026-01-31'"
    date = date_of(section.heading)
    if date is not None and not is_date(date):
        yield f"'## {section.heading}' has no date such as 2026-01-31"
    kinds = [line.removeprefix("### ") for line in section.lines if line.startswith("### ")]
    for kind in kinds:
        if kind not in KINDS or kinds.count(kind) > 1:
            yield f"{section.heading}: '### {kind}' must be one of {KINDS}, and stand once"
    for part in re.split(r"^### .*$", section.text(), flags=re.MULTILINE)[1:]:
        if not part.strip().startswith("- "):
            yield f"{section.heading}: under each '###' there must be a list"
    if date is not None and not kinds:
        yield f"{section.heading} says nothing"


def is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def number_of(version: str) -> tuple[int, ...]:
    """(0, 2, 0) of "0.2.0" and of "0.2.0.dev1"."""
    return tuple(map(int, version.split(".")[:3]))


def missing_line(changed: list[str]) -> str | None:
    """Why the changelog must change together with these files. None if it need not, or does."""
    which = [path for path in changed if path.startswith(NEED_A_LINE)]
    if not which or "CHANGELOG.md" in changed:
        return None
    return f"CHANGELOG.md has no line about the change to {', '.join(which)}"


def not_ready(changelog: str, version: str, tag: str) -> str | None:
    """Why sources of this version cannot be released under the tag. None if they can."""
    newest = sections(changelog)[0].heading
    if tag != f"v{version}":
        return f"klfast/version.py has {version}, the tag is {tag}"
    if version_of(newest) != number_of(version):
        return f"the first section of CHANGELOG.md must be of {version}, is '## {newest}'"
    return None


def version() -> str:
    """The version of these sources."""
    facts: dict[str, str] = {}
    exec((ROOT / "klfast" / "version.py").read_text(), facts)
    return facts["__version__"]


def changed_since(reference: str) -> list[str]:
    """Files of the checkout that have changed since HEAD and the reference parted."""
    command = ["git", "diff", "--name-only", f"{reference}...HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("form", help="check the form of CHANGELOG.md")
    since = commands.add_parser("since", help="check that a change of the code has a line")
    since.add_argument("reference", help="the branch or commit to compare with")
    notes = commands.add_parser("notes", help="check and print the section of a release")
    notes.add_argument("tag", help="the tag of the release, such as v0.1.0")
    arguments = parser.parse_args()
    if arguments.command == "since":
        return missing_line(changed_since(arguments.reference))
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if found := faults(changelog, version()):
        return "\n".join(found)
    if arguments.command == "notes":
        if reason := not_ready(changelog, version(), arguments.tag):
            return reason
        print(sections(changelog)[0].text())
    return None


if __name__ == "__main__":
    sys.exit(main())
