"""Plant the faults of ``faults.txt`` one at a time, and record the test that catches each.

``python tests/mutation/run.py [--only NAME] [--kind KIND] [--list]`` writes the first test that
fails with a fault, or null, into ``caught.json``. The status is 1 if a fault has no place, or if no
test catches one that is not null there already.

A fault has four lines below its kind. The first has its name, file and source, the second the old
text, the third the new text. The fourth has the tests that should catch it, as arguments of pytest.
The old text is once in the file, or else once in all of ``klfast/`` or ``csrc/``. Further pairs of
old and new text are other spellings.

A fault in Python or Triton edits a copy. One build has all faults in C++, each beside the old text,
and KLFAST_FAULT chooses one. A text that ends in a semicolon is a statement, any other an
expression. All tests of a kind must first pass without a fault.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
ROWS, CAUGHT = (Path(__file__).with_name(name) for name in ("faults.txt", "caught.json"))
TARGETS = {
    "python": "not emulated",
    "triton": "triton",
    "cpu": "not emulated and not reference",
    "cuda": "emulated",
}
"""The ``pytest -k`` of each kind, for faults without their own."""
COMPILED = ("cpu", "cuda")
COPIED = (
    *("klfast", "csrc", "tests", "release", "lab", "benchmarks"),
    *("setup.py", "pyproject.toml"),
)
SWITCH = """#pragma once
#include <cstdlib>
namespace klfast {
inline const char* const kPlanted = std::getenv("KLFAST_FAULT");
inline const long kFault = kPlanted == nullptr ? 0 : std::atol(kPlanted);
}  // namespace klfast
"""


class Fault(NamedTuple):
    """A row of ``faults.txt``."""

    kind: str
    name: str
    file: str
    spellings: tuple[tuple[str, str], ...]
    """The pairs of old and new text."""
    tests: tuple[str, ...]
    keyword: str
    source: str

    def number(self) -> int:
        """The number that chooses the fault in compiled code."""
        return zlib.crc32(self.name.encode()) >> 1


Places = dict[Fault, tuple[str, str, str]]  # the file, the old text and the new text of each fault


def read_faults() -> list[Fault]:
    """The rows of ``faults.txt``."""
    kind, rows = "", []
    for line in ROWS.read_text().splitlines():
        if line.startswith("== "):
            kind = line[3:]
        elif line.startswith("  "):
            rows[-1][line[2]].append(line[4:])
        elif line:
            head, _, source = line.partition("  # ")
            rows.append({"head": (kind, *head.split()), "-": [], "+": [], "?": [], "#": source})
    return [_fault(*row["head"], row) for row in rows]


def _fault(kind: str, name: str, file: str, row: dict) -> Fault:
    tests, keyword = shlex.split(row["?"][0]), TARGETS[kind]
    if "-k" in tests:
        *tests, _, keyword = tests
    spellings = tuple(zip(row["-"], row["+"], strict=True))
    return Fault(kind, name, file, spellings, tuple(tests), keyword, row["#"])


def place_of(fault: Fault) -> tuple[str, str, str] | None:
    """The only place of a fault, or None if there is none or more than one."""
    named = ROOT / fault.file
    for old, new in fault.spellings:
        if named.exists() and named.read_text().count(old) == 1:
            return fault.file, old, new
    files = [*(ROOT / Path(fault.file).parts[0]).rglob(f"*{named.suffix}")]
    for old, new in fault.spellings:
        having = [path for path in files for _ in range(path.read_text().count(old))]
        if len(having) == 1:
            return str(having[0].relative_to(ROOT)), old, new
    return None


def copy_checkout(tree: Path) -> None:
    """Copy the files that tests import and build, and link the rest. ``build/`` is left out."""
    tree.mkdir(parents=True, exist_ok=True)
    for entry in ROOT.iterdir():
        to = tree / entry.name
        if entry.name in COPIED and entry.is_dir():
            shutil.rmtree(to, ignore_errors=True)
            shutil.copytree(entry, to, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.name in COPIED:
            shutil.copy2(entry, to)
        elif entry.name != "build" and entry.name[0] != "." and not to.is_symlink():
            to.symlink_to(entry)


def plant_compiled(tree: Path, places: Places) -> None:
    """Plant all faults in the tree's C++, each beside the old text.

    ``build/`` is removed if it is of other sources. Otherwise no file is newer than the build.
    """
    switch = tree / "csrc" / "math" / "switch.h"
    switch.write_text(SWITCH)
    os.utime(switch, (0, 0))
    for file in {file for file, *_ in places.values()}:
        text = (tree / file).read_text()
        here = {f: texts for f, (of, *texts) in places.items() if of == file}
        spots = sorted(((text.index(old), f) for f, (old, _) in here.items()), reverse=True)
        for at, fault in spots:
            old, new = here[fault]
            chosen = f"klfast::kFault == {fault.number()}"
            both = f"({chosen} ? ({new}) : ({old}))"
            if old.endswith(";"):
                both = f"if ({chosen}) {{ {new} }} else {{ {old} }}"
            assert text.startswith(old, at), f"{fault.name} overlaps another fault"
            text = text[:at] + both + text[at + len(old) :]
        (tree / file).write_text(f'#include "math/switch.h"\n{text}')
        shutil.copystat(ROOT / file, tree / file)
    sources = sorted(path for path in (tree / "csrc").rglob("*.*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    mark = tree / "build" / "digest"
    if not mark.exists() or mark.read_text() != digest:
        shutil.rmtree(mark.parent, ignore_errors=True)
        mark.parent.mkdir()
        mark.write_text(digest)


def build_cpu(tree: Path) -> None:
    """Build the tree's extension: only the baseline's kernels, with a fast compilation."""
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(tree / "setup.py"))
    module = tree / "build" / next((tree / "klfast").glob("_C.*.so")).name
    commands = setup["ninja_file"](module, {"baseline": ("-O1",)})
    (module.parent / "build.ninja").write_text(commands)
    subprocess.run([setup["ninja_command"](), "-C", str(module.parent), "--quiet"], check=True)
    shutil.copy2(module, tree / "klfast")


def first_failure(tree: Path, fault: Fault, *options: str, number: int = 0) -> str | None:
    """The first failing test of a fault in the tree, without its parameters."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-m", "not exhaustive"]
    for plugin in ("no:cacheprovider", "no:benchmark", "no:xdist"):
        command += ["-p", plugin]
    variables = {"PYTHONPATH": str(tree), "KLFAST_FAULT": str(number)}
    if fault.kind == "cpu":
        variables["KLFAST_CPU"] = "baseline"
    if fault.kind == "triton":
        command += ["-p", "triton_interpreter"]
        variables |= {"PYTHONPATH": f"{tree}:{tree / 'tests/support'}", "TRITON_INTERPRET": "1"}
    command += ["-k", fault.keyword, *options, *fault.tests]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1) != (failed is not None):
        print(f"The tests of {fault.name} did not run:\n{done.stdout}{done.stderr}")
        return None
    return failed[1] if failed else None


def check_without_faults(tree: Path, faults: list[Fault]) -> None:
    """Raise if a test fails without a fault, because its failure would mean nothing."""
    for keyword in {fault.keyword for fault in faults}:
        tests = {test for fault in faults for test in fault.tests if fault.keyword == keyword}
        none = faults[0]._replace(name="no fault", tests=(*sorted(tests),), keyword=keyword)
        if (failed := first_failure(tree, none)) is not None:
            raise SystemExit(f"{failed} fails without a fault")


def run_kind(kind: str, places: Places, chosen: list[Fault], tree: Path) -> dict[str, str | None]:
    """The first test that catches each of the chosen faults of a kind, by name."""
    copy_checkout(tree)
    if kind in COMPILED:
        plant_compiled(tree, places)
    if kind == "cpu":
        build_cpu(tree)
    check_without_faults(tree, chosen)
    caught = {}
    for fault in chosen:
        file, old, new = places[fault]
        text, begin = (tree / file).read_text(), os.times()
        if kind not in COMPILED:
            (tree / file).write_text(text.replace(old, new))
        caught[fault.name] = first_failure(tree, fault, "-x", number=fault.number())
        if kind not in COMPILED:
            (tree / file).write_text(text)
        seconds = sum(os.times()[2:4]) - sum(begin[2:4])
        said = caught[fault.name] or "NOT CAUGHT"
        print(f"{seconds:5.1f} s  {fault.name:30}  {said}", flush=True)
    return caught


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="only this fault")
    parser.add_argument("--kind", choices=[*TARGETS], help="only faults of one kind")
    parser.add_argument("--list", action="store_true", help="list the faults and their places")
    options = parser.parse_args()
    faults = read_faults()
    if unknown := {*(options.only or ())} - {fault.name for fault in faults}:
        parser.error(f"--only must name a fault of faults.txt, got {', '.join(sorted(unknown))}")
    found = {fault: place_of(fault) for fault in faults}
    places = {fault: place for fault, place in found.items() if place is not None}
    chosen = [f for f in faults if options.kind in (None, f.kind)]
    chosen = [f for f in chosen if options.only is None or f.name in options.only]
    for fault in chosen:
        if options.list or fault not in places:
            where = places[fault][0] if fault in places else "not anchored"
            print(f"{fault.kind:7} {fault.name:30} {where:40} {fault.source}")
    caught: dict[str, str | None] = {}
    for kind in () if options.list else TARGETS:
        here = [fault for fault in chosen if fault.kind == kind and fault in places]
        of_kind = {fault: place for fault, place in places.items() if fault.kind == kind}
        with tempfile.TemporaryDirectory() as folder:
            tree = ROOT / "build" / "mutation" / kind if kind in COMPILED else Path(folder)
            caught |= run_kind(kind, of_kind, here, tree) if here else {}
    before = json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}
    if caught:
        record = {fault.name: (before | caught).get(fault.name) for fault in faults}
        CAUGHT.write_text(json.dumps(record, indent=2) + "\n")
        print(f"{sum(map(bool, caught.values()))} of {len(caught)} faults were caught.")
    missed = [name for name, test in caught.items() if test is None and before.get(name, True)]
    return int(bool(missed) or any(fault not in places for fault in chosen))


if __name__ == "__main__":
    sys.exit(main())
