"""`release/check_wheel.py` finds each fault of a wheel, one at a time, and none in a good one."""

import io
import json
import re
import tarfile
import zipfile
from pathlib import Path

import check_wheel
import pytest

import klfast

PACKAGE = ("klfast/__init__.py", "klfast/py.typed", "klfast/_C.pyi", "klfast/controllers/rules.py")
NAME = "klfast-1.2.3-cp311-cp311-manylinux_2_28_x86_64.whl"
INFO = "klfast-1.2.3.dist-info"
MODULE = "klfast/_C.cpython-311-x86_64-linux-gnu.so"
METADATA = f"{INFO}/METADATA"
BUILD = {
    "torch": "2.13.0+cpu",
    "cuda": None,
    "cuda_archs": [],
    "compile_flags": ["-std=c++17", "-O3"],
    "commit": "0123456789" * 4,
}
GOOD = {
    **dict.fromkeys(PACKAGE, b""),
    MODULE: b"\xcf\xfa\xed\xfe not an ELF file",
    "klfast/_build_info.json": json.dumps(BUILD).encode(),
    METADATA: b"""Metadata-Version: 2.4
Name: klfast
Version: 1.2.3
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: torch>=2.10
Requires-Dist: triton; extra == "triton"

# The text
""",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_28_x86_64\n",
    f"{INFO}/RECORD": b"",
    f"{INFO}/entry_points.txt": b"",
    f"{INFO}/top_level.txt": b"klfast\n",
    f"{INFO}/licenses/LICENSE": b"",
}


@pytest.fixture
def faults(tmp_path):
    """A function from a wheel's files to its faults, beside an sdist with the package's files."""
    sdist = tmp_path / "klfast-1.2.3.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in (*PACKAGE, "setup.py", "tests/conftest.py"):
            archive.addfile(tarfile.TarInfo(f"klfast-1.2.3/{name}"), io.BytesIO())

    def of(files, name=NAME):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path, content in files.items():
                archive.writestr(path, content)
        return check_wheel.faults(tmp_path / name, sdist)

    return of


PATH = "/home/somebody/klfast/csrc/cpu.cpp"
WITH_PATH = b"\0csrc/binding/cpu.cpp\0" + PATH.encode() + b"\0/usr/lib\0"
WHEEL, LICENSE = f"{INFO}/WHEEL", f"{INFO}/licenses/LICENSE"
LINUX, MACOS = "cp311-cp311-linux_x86_64", "cp311-cp311-macosx_11_0_arm64"


def metadata(old, new):
    assert old in GOOD[METADATA].decode()
    return {METADATA: GOOD[METADATA].decode().replace(old, new).encode()}


def build(**changes):
    return {"klfast/_build_info.json": json.dumps({**BUILD, **changes}).encode()}


def tagged(tag):
    return {WHEEL: f"Wheel-Version: 1.0\nTag: {tag}\n".encode()}


ONLY_TORCH = "only torch>=2.10 may be required"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        *(({name: None}, f"{name} is missing") for name in (*PACKAGE, LICENSE)),
        *(
            ({name: b""}, f"{name} does not belong in it")
            for name in ("tests/conftest.py", "klfast.libs/libgomp.so.1")
        ),
        ({MODULE: None}, "there must be one module"),
        ({"klfast/_C.cpython-312-x86_64-linux-gnu.so": b""}, "there must be one module"),
        (metadata("Version: 1.2.3", "Version: 1.2.4"), "Version must be 1.2.3, is 1.2.4"),
        (metadata("Apache-2.0", "MIT"), "License-Expression must be"),
        (metadata("torch>=2.10", "torch>=2.13"), ONLY_TORCH),
        (metadata('triton; extra == "triton"', "triton"), ONLY_TORCH),
        (tagged(LINUX), "is not a tag of"),
        (tagged(MACOS), None),
        (build(compile_flags=["-I/home/somebody/include"]), "path: -I/home/somebody/include"),
        (build(nvcc_flags=["-O3", "-ccbin=/usr/bin/g++"]), "names a path: -ccbin"),
        (build(commit=None), "has None"),
        (build(commit=f"{BUILD['commit']}-dirty"), "must have a commit without changes"),
        ({MODULE: WITH_PATH}, f"the module names {PATH}"),
        ({MODULE: bytes(9 << 20)}, "more than 8"),
        ({MODULE: bytes(9 << 20), **build(cuda="13.0")}, None),
    ],
)
def test_each_fault_of_a_wheel_is_named(faults, changes, fault):
    files = {name: content for name, content in {**GOOD, **changes}.items() if content is not None}
    named = re.findall("Tag: (.*)", files[WHEEL].decode())[0] if WHEEL in changes else None
    found = faults(files, f"klfast-1.2.3-{named}.whl" if named else NAME)
    assert found == [] if fault is None else fault in found[0]


LINKING = check_wheel.Linking(
    needed=frozenset({"libtorch.so", "libtorch_cpu.so", "libstdc++.so.6", "libc.so.6"}),
    rpaths=(),
    text_relocations=False,
    executable_stack=False,
    symbols=False,
)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"needed": LINKING.needed - {"libtorch.so"}}, "does not name libtorch.so"),
        ({"needed": LINKING.needed | {"libgomp.so.1"}}, "needs libgomp.so.1"),
        ({"rpaths": ("/build/torch/lib",)}, "looks for libraries in /build/torch/lib"),
        ({"text_relocations": True}, "text relocations"),
        ({"executable_stack": True}, "executable stack"),
        ({"symbols": True}, "not stripped"),
        ({"unstable": frozenset({"_ZN2at4addE"})}, "needs _ZN2at4addE, which not every torch has"),
    ],
)
def test_faulty_linking(change, fault):
    (found,) = check_wheel.faults_of_linking(LINKING._replace(**change))
    assert fault in found


@pytest.mark.skipif(
    klfast.info()["extension"] is not None or not Path("/proc").exists(), reason="needs an ELF file"
)
def test_the_module_that_runs_here_is_linked_well():
    from klfast import _C

    module = Path(_C.__file__).read_bytes()
    assert [*check_wheel.faults_of_module(module)] == []
    assert check_wheel.linking(module).needed >= check_wheel.NEEDED
