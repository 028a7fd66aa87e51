"""Checks that one wheel per Python runs on every torch: `make wheel-check`.

Each pair of an interpreter and a torch gets a fresh environment with the wheel. There it runs
`klfast check` with only torch installed, and then `release/check_installed.py`. If the folder lacks
a wheel, it is built against the first torch of the list, and `release/check_wheel.py` checks it. It
is built from the folder's sdist, which is made first if it is missing.

Prints the pairs that were checked and the pairs that were not. A failed check is an error. If you
name an interpreter or a torch that is not available, that is an error too. If you do not name it,
because the list is "all that klfast supports", it is reported as NOT CHECKED.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import artifacts
import check_wheel

RECORD = Path(__file__).with_name("checked.json")
PAGE = artifacts.ROOT / "docs" / "stability.md"
BEGIN, END = "<!-- checked -->\n", "<!-- end -->"
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14")
TORCHES = ("newest", "2.10.0")
TOOLS = ("hypothesis", "mpmath", "numpy", "pytest")
"""The packages that release/check_installed.py needs besides klfast."""
BUILDERS = ("ninja", "pybind11", "setuptools")
OK, FAILED, NOT_CHECKED = "ok", "FAILED", "NOT CHECKED"


class MissingError(Exception):
    """An interpreter that is not installed, or a torch that has no wheel for it."""


class Environment:
    """A virtual environment of an interpreter. Torch and its requirements have no pins."""

    def __init__(self, interpreter: str, folder: Path) -> None:
        run(interpreter, "-m", "venv", folder)
        self.python = str(folder / "bin" / "python")
        self.pins = folder / "pins.txt"
        pins = (artifacts.ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        self.pins.write_text("".join(pin for pin in pins if pin.startswith((*TOOLS, *BUILDERS))))

    def install(self, *what: str | Path) -> None:
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "--constraint", self.pins, *what)

    def install_torch(self, version: str) -> str:
        """Installs torch, and returns the installed version, such as 2.10.0+cu128."""
        try:
            self.install("torch" if version == "newest" else f"torch=={version}")
        except subprocess.CalledProcessError as error:
            raise MissingError(f"torch {version} could not be installed") from error
        return self.says("import torch; print(torch.__version__)")

    def says(self, code: str) -> str:
        command = [self.python, "-W", "ignore", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def passes(self, *arguments: str) -> bool:
        return subprocess.run([self.python, *arguments], check=False).returncode == 0


def run(*command: str | Path) -> None:
    subprocess.run([*map(str, command)], check=True)


def found(interpreter: str) -> str:
    """The path of an interpreter."""
    path = shutil.which(interpreter)
    if path is None:
        raise MissingError(f"no {interpreter} here")
    return path


def the_sdist(folder: Path) -> Path:
    """The folder's sdist. It is made if the folder has none."""
    sdists = [*folder.glob("klfast-*.tar.gz")]
    return sdists[0] if sdists else artifacts.make_sdist(folder)


def the_wheel(folder: Path, environment: Environment) -> Path:
    """The folder's wheel for the environment's interpreter. It is built if the folder has none."""
    tag = environment.says("import sys; print('cp%d%d' % sys.version_info[:2])")
    wheels = [*folder.glob(f"klfast-*-{tag}-{tag}-*.whl")]
    if wheels:
        return wheels[0]
    environment.install(*BUILDERS)
    wheel = artifacts.make_wheel(the_sdist(folder), folder, environment.python)
    faults = check_wheel.faults(wheel, the_sdist(folder))
    if faults:
        raise SystemExit("\n".join([f"{wheel.name}:", *faults]))
    return wheel


def commit_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return str(json.loads(archive.read("klfast/_build_info.json"))["commit"])


def checked(interpreter: str, torch: str, folder: Path) -> dict[str, Any]:
    """A row of the table."""
    path = found(interpreter)
    with tempfile.TemporaryDirectory() as made:
        environment = Environment(path, Path(made))
        installed = environment.install_torch(torch)
        wheel = the_wheel(folder, environment)
        environment.install(wheel)
        has_answers = environment.passes("-m", "klfast", "check", "--strict")
        environment.install(*TOOLS)
        if environment.says("import torch; print(torch.__version__)") != installed:
            raise SystemExit(f"{wheel.name} brought another torch than {installed}")
        check = Path(__file__).with_name("check_installed.py")
        has_passed = environment.passes(str(check))
        return {
            "python": environment.says("import platform; print(platform.python_version())"),
            "torch": installed,
            "result": OK if has_answers and has_passed else FAILED,
            "wheel": wheel.name.removesuffix(".whl").split("-")[-1],
            "commit": commit_of(wheel),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        }


def rows(pythons: Sequence[str], torches: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each pair."""
    for interpreter in pythons:
        for torch in torches:
            print(f"\n{interpreter}, torch {torch}", flush=True)
            try:
                yield checked(interpreter, torch, folder)
            except MissingError as reason:
                row = {"python": interpreter, "torch": torch, "result": NOT_CHECKED}
                yield {**row, "reason": str(reason)}


def table(record: list[dict[str, Any]]) -> str:
    """The record as a Markdown table."""
    if not record:
        return "None is recorded yet.\n"
    lines = ["| Python | torch | wheel | | |", "|---|---|---|---|---|"]
    for row in record:
        of = f"{row['date']}, commit {row['commit'][:7]}" if "date" in row else row["reason"]
        cells = [row["python"], row["torch"], row.get("wheel", ""), row["result"], of]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def keep(new: list[dict[str, Any]]) -> None:
    """Writes checked rows into the record, and the record's table into the page.

    A new row replaces the earlier row of the same pair.
    """

    def pair(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        versions = row["python"], row["torch"].partition("+")[0]
        python, torch = ([*map(int, version.split("."))] for version in versions)
        return python[:2], torch

    pairs = [pair(row) for row in new]
    earlier = [row for row in json.loads(RECORD.read_text()) if pair(row) not in pairs]
    record = sorted([*earlier, *new], key=pair)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + table(record) + END + rest.partition(END)[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "folder",
        type=Path,
        help="the folder of the sdist and the wheels; missing ones are built into it",
    )
    parser.add_argument(
        "--pythons", nargs="*", help="Python interpreters (default: all that klfast supports)"
    )
    parser.add_argument(
        "--torches",
        nargs="*",
        help="versions of torch, or newest (default: the oldest and the newest)",
    )
    parser.add_argument(
        "--record", action="store_true", help="write the result into docs/stability.md"
    )
    arguments = parser.parse_args()
    asked = arguments.pythons or PYTHONS, arguments.torches or TORCHES
    done = list(rows(*asked, arguments.folder))
    print(f"\n{table(done)}")
    if arguments.record:
        keep([row for row in done if row["result"] == OK])
    missing = any(row["result"] == NOT_CHECKED for row in done)
    nothing = all(row["result"] == NOT_CHECKED for row in done)
    failed = any(row["result"] == FAILED for row in done)
    return int(failed or nothing or (missing and bool(arguments.pythons or arguments.torches)))


if __name__ == "__main__":
    sys.exit(main())
