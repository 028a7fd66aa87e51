"""The contents of a wheel: `check_wheel.py SDIST WHEEL...` prints every fault.

A wheel has the package's files as in the sdist, the built module and the record of the build. It
has no tests, no sources of the module, no path of the machine that built it, and no foreign
library. On Linux the module's header is read too. It says which libraries the module links, and
how.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from elftools.elf.elffile import ELFFile

MADE = {"klfast/_build_info.json"}
"""The package's files that no sdist has, besides the module."""
METADATA = {
    "Name": ["klfast"],
    "License-Expression": ["Apache-2.0"],
    "License-File": ["LICENSE"],
    "Requires-Python": [">=3.10"],
}
NEEDED = {"libtorch.so", "libtorch_cpu.so"}
"""Without libtorch the stable ABI's CUDA symbols are silently null."""
ALLOWED = re.compile(r"lib(torch|torch_cpu|stdc\+\+|m|gcc_s|c|pthread|rt|dl)\.so|ld-linux.*")
UNSTABLE = re.compile(r"_Z.*(?:2at|3c10|5torch)\d")  # mangled: in namespaces at, c10, torch
# A path of a header or source with a folder in front, such as in the text of an error.
SOURCE_PATH = re.compile(rb"(?<![\w.])/[\w.+-]+/[\w./+-]*\.(?:h|hpp|cuh|c|cc|cpp|cu|py)\b")
MOST_MIB = {"cpu": 8, "cuda": 100}


class Linking(NamedTuple):
    """The facts in the header of a module."""

    needed: frozenset[str]
    rpaths: tuple[str, ...]
    text_relocations: bool
    executable_stack: bool
    symbols: bool
    unstable: frozenset[str] = frozenset()
    """Names of torch's C++ functions, which differ from release to release."""


def linking(module: bytes) -> Linking:
    """Reads the facts from an ELF file."""
    elf = ELFFile(BytesIO(module))
    tags = list(elf.get_section_by_name(".dynamic").iter_tags())
    named = {tag.entry.d_tag for tag in tags}
    flags = sum(tag.entry.d_val for tag in tags if tag.entry.d_tag == "DT_FLAGS")
    dynamic = elf.get_section_by_name(".dynsym").iter_symbols()
    wanted = {symbol.name for symbol in dynamic if symbol["st_shndx"] == "SHN_UNDEF"}
    stacks = [s for s in elf.iter_segments() if s["p_type"] == "PT_GNU_STACK"]
    return Linking(
        needed=frozenset(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
        rpaths=tuple(
            getattr(tag, tag.entry.d_tag.removeprefix("DT_").lower())
            for tag in tags
            if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")
        ),
        text_relocations="DT_TEXTREL" in named or bool(flags & 4),
        executable_stack=not stacks or bool(stacks[0]["p_flags"] & 1),
        symbols=elf.get_section_by_name(".symtab") is not None,
        unstable=frozenset(filter(UNSTABLE.match, wanted)),
    )


def faults_of_linking(found: Linking) -> Iterator[str]:
    """The faults of a module's header, as text."""
    for library in sorted(NEEDED - found.needed):
        yield f"the module does not name {library}"
    for library in sorted(found.needed):
        if not ALLOWED.match(library):
            yield f"the module needs {library}"
    for name in sorted(found.unstable):
        yield f"the module needs {name}, which not every torch has"
    for path in found.rpaths:
        yield f"the module looks for libraries in {path}"
    if found.text_relocations:
        yield "the module has text relocations"
    if found.executable_stack:
        yield "the module wants an executable stack"
    if found.symbols:
        yield "the module is not stripped"


def faults_of_module(module: bytes) -> Iterator[str]:
    """The faults of the built module."""
    for path in sorted({match.decode() for match in SOURCE_PATH.findall(module)}):
        yield f"the module names {path}"
    if module.startswith(b"\x7fELF"):
        yield from faults_of_linking(linking(module))


def strings_of(value: object) -> Iterator[str]:
    """Every string in plain data."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for item in value:
            yield from strings_of(item)
    elif isinstance(value, str):
        yield value


def faults_of_build_info(info: dict[str, object]) -> Iterator[str]:
    """The faults of the record of setup.py."""
    for text in strings_of(info):
        if "/" in text or "\\" in text:
            yield f"_build_info.json names a path: {text}"
    commit = str(info["commit"])
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        yield f"_build_info.json must have a commit without changes, has {commit}"


def faults_of_metadata(text: str, version: str) -> Iterator[str]:
    """The faults of the wheel's METADATA."""
    metadata = HeaderParser().parsestr(text)
    for name, expected in METADATA.items():
        if metadata.get_all(name) != expected:
            yield f"{name} must be {expected}, is {metadata.get_all(name)}"
    public = metadata["Version"].partition("+")[0]
    if public != version:
        yield f"Version must be {version}, is {metadata['Version']}"
    own = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    if own != ["torch>=2.10"]:
        yield f"without an extra, only torch>=2.10 may be required, not {own}"


def faults_of_names(names: set[str], package: set[str], info: str) -> Iterator[str]:
    """The files that are missing or too many, compared with the names in the sdist's package."""
    modules = {name for name in names if re.fullmatch(r"klfast/_C\..*\.so", name)}
    if len(modules) != 1:
        yield f"there must be one module klfast/_C, there are {sorted(modules)}"
    files = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    expected = package | MADE | modules | {f"{info}/{file}" for file in files}
    yield from (f"{name} is missing" for name in sorted(expected - names))
    yield from (f"{name} does not belong in it" for name in sorted(names - expected))


def tags_of(wheel_file: str) -> set[str]:
    """The tags that a wheel's WHEEL file lists."""
    return set(HeaderParser().parsestr(wheel_file).get_all("Tag"))


def tags_in_name(name: str) -> set[str]:
    """The tags in a wheel's name, such as cp311-cp311-manylinux_2_28_x86_64."""
    python, abi, platforms = name.removesuffix(".whl").split("-")[-3:]
    return {f"{python}-{abi}-{platform}" for platform in platforms.split(".")}


def faults_of_tags(name: str, wheel_file: str) -> Iterator[str]:
    """The faults of the tags of a wheel's name."""
    tags = tags_in_name(name)
    if tags != tags_of(wheel_file):
        yield f"the name has the tags {sorted(tags)}, WHEEL {sorted(tags_of(wheel_file))}"
    for tag in sorted(tags):
        if not re.fullmatch(r"cp3\d+-cp3\d+-(manylinux|macosx)_\d+_\d+_\w+", tag):
            yield f"{tag} is not a tag of one Python and a manylinux or macOS platform"


def package_of(sdist: Path) -> tuple[set[str], str]:
    """The names of the package's files in an sdist, and its version."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not name.endswith("/")}
        folders = {m.name.partition("/")[2] for m in archive.getmembers() if m.isdir()}
    version = sdist.name.removeprefix("klfast-").removesuffix(".tar.gz")
    return {name for name in names - folders if name.startswith("klfast/")}, version


def faults(wheel: Path, sdist: Path) -> list[str]:
    """Everything that is wrong with a wheel of this sdist."""
    package, version = package_of(sdist)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (info,) = {n.partition("/")[0] for n in names if n.endswith(".dist-info/METADATA")}
        found = [*faults_of_names(names, package, info)]
        found += faults_of_tags(wheel.name, archive.read(f"{info}/WHEEL").decode())
        found += faults_of_metadata(archive.read(f"{info}/METADATA").decode(), version)
        if archive.read(f"{info}/top_level.txt").split() != [b"klfast"]:
            found.append("top_level.txt must list klfast alone")
        build = json.loads(archive.read("klfast/_build_info.json"))
        found += faults_of_build_info(build)
        for name in names:
            if re.fullmatch(r"klfast/_C\..*\.so", name):
                found += faults_of_module(archive.read(name))
    mib, most = wheel.stat().st_size / 2**20, MOST_MIB["cuda" if build["cuda"] else "cpu"]
    if mib > most:
        found.append(f"it has {mib:.1f} MiB, more than {most}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sdist", type=Path, help="the sdist that the wheels were built from")
    parser.add_argument("wheels", type=Path, nargs="+", help="the wheels to check")
    arguments = parser.parse_args()
    failed = False
    for wheel in arguments.wheels:
        found = faults(wheel, arguments.sdist)
        failed |= bool(found)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {len(found)} faults")
        print("".join(f"  {fault}\n" for fault in found), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
