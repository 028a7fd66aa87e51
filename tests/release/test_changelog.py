"""The script that prints a release's notes finds its section of CHANGELOG.md."""

import subprocess
import sys
from pathlib import Path

import changelog
import pytest

ROOT = Path(__file__).parents[2]
RELEASED = """# Changelog

## [0.2.0] - 2026-03-01

### Fixed

- A fault,
  over two lines.

## [0.1.0] - 2026-02-01

- The first.
"""


def test_the_notes_are_of_the_newest_section():
    fixed = "### Fixed\n\n- A fault,\n  over two lines."
    assert changelog.notes(RELEASED, "0.2.0", "v0.2.0") == fixed
    assert changelog.HEADING.search((ROOT / "CHANGELOG.md").read_text())


@pytest.mark.parametrize(
    ("text", "version", "tag", "message"),
    [
        (RELEASED, "0.2.0", "v0.2.1", "the tag is v0.2.1"),
        (RELEASED, "0.2.0", "0.2.0", "the tag is 0.2.0"),
        (RELEASED, "0.1.0", "v0.1.0", r"must be of 0.1.0, is '## \[0.2.0\] - 2026-03-01'"),
        (RELEASED.replace("03-01", "02-30"), "0.2.0", "v0.2.0", "day"),
    ],
)
def test_a_release_that_does_not_agree_is_refused(text, version, tag, message):
    with pytest.raises(ValueError, match=message):
        changelog.notes(text, version, tag)


def test_the_command_says_why_in_one_line():
    command = [sys.executable, ROOT / "release" / "changelog.py", "v0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("the tag is v0.0.0\n")
    assert done.stderr.count("\n") == 1
