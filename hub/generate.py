"""Writes the kernel for the Hugging Face Hub: `python hub/generate.py [--out build/hub]`.

The kernel consists of the modules in `torch-ext/klfast/` here, and of all modules of klfast that
they import, directly or not. A file here replaces the file of the same name in klfast. klfast
imports itself by name, but a kernel must use relative imports. Only these statements are rewritten.

The output is a project for kernel-builder. Its `build/` has the variants that kernel-builder would
make, so `kernels` can load them from there. The same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path, PurePosixPath

from sources import HERE, PACKAGE, ROOT, Files, package_files
from variants import backends, variant_files

PROJECT = ("build.toml", "flake.nix", "CARD.md", "example.py", "benchmarks", "tests")


def project_files() -> Files:
    """All files by their path in the output."""
    files = package_files()
    written = {PurePosixPath("LICENSE"): (ROOT / "LICENSE").read_bytes()}
    for name in PROJECT:
        path = HERE / name
        for file in [path] if path.is_file() else path.rglob("*.py"):
            written[PurePosixPath(file.relative_to(HERE).as_posix())] = file.read_bytes()
    written |= {PurePosixPath("torch-ext", PACKAGE, path): text for path, text in files.items()}
    for backend in backends():
        folder = PurePosixPath("build", f"torch-{backend}")
        written |= {folder / path: text for path, text in variant_files(files, backend).items()}
    return written


def write(out: Path) -> Files:
    """Write the kernel to a folder, and replace an earlier kernel there. Returns the files.

    Raises:
        SystemExit: the folder has other contents.
    """
    if out.exists() and not (out / "build.toml").is_file() and any(out.iterdir()):
        raise SystemExit(f"--out must be a kernel's folder, or a new one, got {out}")
    files = project_files()
    shutil.rmtree(out, ignore_errors=True)
    for path, content in files.items():
        file = out / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description="Write klfast's kernel for the Hugging Face Hub.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub", help="the folder")
    out = parser.parse_args().out
    files = write(out)
    for backend in backends():
        variant = PurePosixPath("build", f"torch-{backend}")
        sizes = [len(content) for path, content in files.items() if path.is_relative_to(variant)]
        print(f"{out / variant}: {len(sizes)} files, {sum(sizes) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
