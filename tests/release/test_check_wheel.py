"""`release/check_wheel.py` finds each fault of a wheel, one at a time, and none in a good one."""

import io
import json
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
    """Of a wheel with these files beside a sdist with the package's."""
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


def test_a_good_wheel_has_none(faults):
    assert faults(GOOD) == []


@pytest.mark.parametrize("name", [*PACKAGE, f"{INFO}/licenses/LICENSE"])
def test_a_file_that_is_missing_is_named(faults, name):
    files = {path: content for path, content in GOOD.items() if path != name}
    assert faults(files) == [f"{name} is missing"]


@pytest.mark.parametrize(
    "name",
    [
        "tests/conftest.py",
        "klfast.libs/libgomp.so.1",
    ],
)
def test_a_file_that_does_not_belong_is_named(faults, name):
    assert faults({**GOOD, name: b""}) == [f"{name} does not belong in it"]


def test_one_module_is_there(faults):
    without = {path: content for path, content in GOOD.items() if path != MODULE}
    two = {**GOOD, "klfast/_C.cpython-312-x86_64-linux-gnu.so": b""}
    for files in (without, two):
        assert faults(files)[0].startswith("there must be one module")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("Version: 1.2.3", "Version: 1.2.4", "Version must be 1.2.3, is 1.2.4"),
        ("Apache-2.0", "MIT", "License-Expression must be"),
        ("torch>=2.10", "torch>=2.13", "only torch>=2.10 may be required"),
        ('triton; extra == "triton"', "triton", "only torch>=2.10 may be required"),
    ],
)
def test_metadata(faults, old, new, fault):
    metadata = GOOD[METADATA].decode()
    assert old in metadata
    found = faults({**GOOD, METADATA: metadata.replace(old, new).encode()})
    assert fault in found[0]


@pytest.mark.parametrize(
    ("tag", "fault"),
    [
        ("cp311-cp311-linux_x86_64", "is not a tag of"),
        ("cp311-cp311-macosx_11_0_arm64", None),
    ],
)
def test_tags(faults, tag, fault):
    wheel = f"Wheel-Version: 1.0\nTag: {tag}\n"
    found = faults({**GOOD, f"{INFO}/WHEEL": wheel.encode()}, f"klfast-1.2.3-{tag}.whl")
    assert found == [] if fault is None else fault in found[0]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"compile_flags": ["-I/home/somebody/include"]}, "names a path: -I/home/somebody/include"),
        ({"nvcc_flags": ["-O3", "-ccbin=/usr/bin/g++"]}, "names a path: -ccbin"),
        ({"commit": None}, "has None"),
        ({"commit": "0123456789" * 4 + "-dirty"}, "must have a commit without changes"),
    ],
)
def test_build_information(faults, change, fault):
    info = json.dumps({**BUILD, **change}).encode()
    (found,) = faults({**GOOD, "klfast/_build_info.json": info})
    assert fault in found


def test_a_module_names_no_path_of_the_machine(faults):
    path = "/home/somebody/klfast/csrc/cpu.cpp"
    module = b"\0csrc/binding/cpu.cpp\0" + path.encode() + b"\0/usr/lib\0"
    assert faults({**GOOD, MODULE: module}) == [f"the module names {path}"]


def test_the_size_has_a_limit(faults, monkeypatch):
    monkeypatch.setitem(check_wheel.MOST_MIB, "cpu", 0.0001)
    assert "more than 0.0001" in faults(GOOD)[0]
    cuda = {**GOOD, "klfast/_build_info.json": json.dumps({**BUILD, "cuda": "13.0"}).encode()}
    assert faults(cuda) == []


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
