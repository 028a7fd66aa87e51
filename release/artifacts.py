"""Builds the sdist, and from it a wheel, with the interpreter that runs this: `make wheel`.

The interpreter must have torch, pybind11, ninja and setuptools. The environment variables of
setup.py (FORCE_CUDA, KLFAST_LOCAL_VERSION, ...) apply to the wheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import repair

ROOT = Path(__file__).parents[1].resolve()


def make_sdist(out: Path) -> Path:
    """klfast-<version>.tar.gz in the folder."""
    # setuptools would keep every file of an earlier list, even if MANIFEST.in excludes it.
    (ROOT / "klfast.egg-info" / "SOURCES.txt").unlink(missing_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "KLFAST_LOCAL_VERSION"}
    with tempfile.TemporaryDirectory() as made:
        command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", made]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return moved(only(Path(made), "*.tar.gz"), out)


def make_wheel(sdist: Path, out: Path, python: str = sys.executable) -> Path:
    """A wheel of the sdist for the interpreter, with the widest tag that its symbols allow."""
    with tempfile.TemporaryDirectory() as made:
        command = ["pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
        subprocess.run([python, "-m", *command, "--wheel-dir", made, str(sdist)], check=True)
        repaired = Path(made) / "repaired"
        repair.repair(only(Path(made), "*.whl"), repaired)
        return moved(only(repaired, "*.whl"), out)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def moved(file: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(file, folder / file.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "out", type=Path, help="the output folder; packages in it are deleted first"
    )
    parser.add_argument("--sdist", action="store_true", help="build the sdist and no wheel")
    arguments = parser.parse_args()
    for old in [*arguments.out.glob("klfast-*.tar.gz"), *arguments.out.glob("klfast-*.whl")]:
        old.unlink()
    print(sdist := make_sdist(arguments.out))
    if not arguments.sdist:
        print(make_wheel(sdist, arguments.out))


if __name__ == "__main__":
    main()
