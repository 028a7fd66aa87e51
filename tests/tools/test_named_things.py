"""Comments, docstrings and pages name only files and names that exist."""

import functools
import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = ("*.py", "*.pyi", "*.h", "*.cpp", "*.cu", "*.md", "*.rst", "*.mk", "Makefile", "*.yml")
KINDS = "cpp|cu|h|html|ipynb|json|md|mk|png|py|pyi|rst|toml|txt|yml"
TICKS = "`{1,2}"
FILE = re.compile(rf"{TICKS}((?:[\w.*-]+/)*[\w*-]+\.(?:{KINDS}))(?:[:#][^`]*)?{TICKS}")
DOTTED = re.compile(rf"{TICKS}~?(klfast(?:\.\w+)+)(?:\([^`]*\))?{TICKS}")
HAS = re.compile(
    rf"{TICKS}(?P<name>[A-Za-z_]\w+)(?:\(\))?{TICKS}\s+(?:in|of)\s+{TICKS}"
    rf"(?P<file>(?:[\w.-]+/)*[\w-]+\.(?:{KINDS})){TICKS}"
)
MADE = {
    *("compare.json", "settings.json", "study.json", "study.md", "metrics.jsonl", "speed.json"),
    *("bench.json", "report.html", "report.md", "frontier.png", "gpu.json", "gpu-logits.json"),
    *("gpu-topk.json", "gpu-linear.json"),
    "klfast_plugin.py",
    *("gpu.md", "gpu-check.json", "_build_info.json", "curves.png", "sampler.png"),
    *("metadata.json", "trainer_state.json"),
}
"""Files that programs write, or the readers of a page."""
ELSEWHERE = re.compile(
    r"trl|verl|openrlhf|roll|areal|slime|skyrl|nemo_rl|swift|open_instruct|torch"
)
"""Folders of other projects."""


@functools.cache
def tracked(*patterns):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def texts():
    """The texts of files. Sources lose their comment marks, which would split a sentence."""
    for name in tracked(*TEXTS):
        if Path(name).name == Path(__file__).name or name.startswith("docs/upstream/"):
            continue  # a report's own files are not in this repository
        text = (ROOT / name).read_text()
        yield name, re.sub(r"\n[ \t]*(?://|#(?!#)|\*)?[ \t]*", "\n", text)


def files_of(name):
    """The tracked files with this name: a whole path or its end."""
    pattern = re.compile("(?:.*/)?" + re.escape(name).replace(r"\*", "[^/]*"))
    return [file for file in tracked() if pattern.fullmatch(file)]


def missing_files(text):
    for match in FILE.finditer(text):
        name = match[1]
        if name.rpartition("/")[2] in MADE or ELSEWHERE.match(name):
            continue
        if not files_of(name):
            yield name


def resolves(dotted):
    """Return whether a module, or an attribute of a module or class, has this name."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            fields = getattr(found, "__annotations__", {})
            if not hasattr(found, part):
                return part in fields and part == parts[-1]
            found = getattr(found, part)
        return True
    return False


def missing_names(text):
    yield from (m[1] for m in DOTTED.finditer(text) if not resolves(m[1]))
    for match in HAS.finditer(text):
        files = files_of(match["file"])
        is_type = match["name"][0].isupper() and match["file"].endswith(".h")
        of_type = r"(?:struct|class|enum|using|concept)\s+" if is_type else ""
        pattern = re.compile(rf"\b{of_type}{match['name']}\b")
        if files and not any(pattern.search((ROOT / file).read_text()) for file in files):
            yield f"{match['name']} in {match['file']}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks git which files there are")
@pytest.mark.parametrize("missing", [missing_files, missing_names])
def test_what_a_text_names_is_there(missing):
    wrong = {name: [*dict.fromkeys(missing(text))] for name, text in texts()}
    assert {name: found for name, found in wrong.items() if found} == {}
