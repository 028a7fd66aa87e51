"""Builds the PTX interpreter (``tests/support/ptx``) and the CUDA kernels' PTX and host code.

Ninja builds only changed files again. The interpreter alone is a library for ``ctypes`` and needs
no nvcc. With the kernels it is a module, which ``emulated`` loads instead of the emulator.
"""

import contextlib
import fcntl
import functools
import importlib.util
import os
import runpy
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).with_name("ptx")
FOLDER = ROOT / "build" / "ptx"
ARCHS = ("80", "90", "100", "120")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-march=native",  # a lane's loop becomes vector instructions
    "-fPIC",
    "-fno-strict-aliasing",  # registers are bytes of any type
    "-fno-math-errno",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
)
OF_OPS = ("python", "torch_ops")  # against the ops' own headers, as the emulator compiles them
OPS_FLAGS = (
    "-std=c++17",
    "-O1",
    "-g0",
    "-fPIC",
    "-ffp-contract=off",
    "-DKLFAST_EMULATE_CUDA",
    "-DKLFAST_POISON",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-DTORCH_EXTENSION_NAME=klfast_emulated",
    "-Wno-unknown-pragmas",
)
OF_TORCH = ("torch_memory",)
OF_CUDA = ("runtime",)
NO_NVCC = (
    "the PTX interpreter needs nvcc: install a CUDA toolkit (12.8 or later) and have nvcc on the "
    "PATH, or set CUDA_HOME"
)


@functools.cache
def setup():
    """The names of ``setup.py``, which finds the compilers."""
    with mock.patch("setuptools.setup"):
        return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")))


def has_nvcc():
    return setup().cuda_home() is not None


def nvcc_version():
    """As "13.0.88"."""
    return setup().nvcc("--version").partition(", V")[2].split()[0]


def cuda_units():
    return [source for source in setup().CUDA_SOURCES if source.endswith(".cu")]


def name_of(unit):
    """The name of a unit's object files: csrc/device/cuda/chip.cu -> device_cuda_chip."""
    return "_".join(Path(unit).with_suffix("").parts[1:])


def _core_sources():
    others = {*OF_OPS, *OF_TORCH, *OF_CUDA}
    return sorted(path.stem for path in SOURCES.glob("*.cpp") if path.stem not in others)


def _compile(rule, command):
    return [
        f"rule {rule}",
        f"  command = {command} -MMD -MF $out.d -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
    ]


def _nvcc_rule(csrc):
    make = setup()
    flags = [
        *make.NVCC_FLAGS,
        "-O3",
        "-lineinfo",
        "-cudart",
        "none",
        "-DKLFAST_RING=1",
        f"-I{csrc}",
    ]
    if "CXX" in os.environ:
        flags.append(f"-ccbin={shlex.split(os.environ['CXX'])[-1]}")
    command = make.ninja_quote([f"{make.cuda_home()}/bin/nvcc", *flags])
    return [
        "rule nvcc",
        f"  command = rm -rf $keep && mkdir -p $keep && {command}"
        " -gencode=arch=compute_$arch,code=compute_$arch --keep --keep-dir $keep"
        " -MMD -MF $object.d -c $in -o $object && mv $keep/*.ptx $ptx && rm -rf $keep",
        "  deps = gcc",
        "  depfile = $object.d",
    ]


def _nvcc_build(unit, arch, folder, csrc):
    make = setup()
    name = name_of(unit)
    object_, ptx = (make.ninja_path(folder / f"{name}.{kind}") for kind in ("o", "ptx"))
    source = make.ninja_path(csrc / Path(unit).relative_to("csrc"))
    return [
        f"build {object_} {ptx}: nvcc {source}",
        f"  arch = {arch}",
        f"  keep = {make.ninja_path(folder / name)}",
        f"  object = {object_}",
        f"  ptx = {ptx}",
    ]


def _core_rules(cxx):
    make = setup()
    core = [FOLDER / "core" / f"{name}.o" for name in _core_sources()]
    lines = _compile("core", f"{cxx} {make.ninja_quote(FLAGS)}")
    for name, object_ in zip(_core_sources(), core, strict=True):
        lines.append(f"build {object_}: core {make.ninja_path(SOURCES / f'{name}.cpp')}")
    lines += ["rule library", f"  command = {cxx} -shared -Wl,-Bsymbolic $in -o $out"]
    lines.append(f"build {FOLDER / 'core.so'}: library {' '.join(map(str, core))}")
    return lines, core


def _module_rules(cxx, csrc):
    """The rules of the module's objects that need torch or the runtime's header."""
    from torch.utils import cpp_extension

    make = setup()
    home = make.cuda_home()
    of_torch = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    includes = make.ninja_quote([f"-I{SOURCES}", *(f"-isystem{path}" for path in of_torch)])
    of_ops = make.ninja_quote([f"-I{csrc}", f"-I{ROOT / 'tests/support/emulator'}"])
    own_pybind = make.ninja_quote([next(f for f in make.path_flags() if "pybind11" in f)])
    headers = [home / "include", *home.glob("targets/*/include")]
    of_cuda = make.ninja_quote([f"-isystem{path}" for path in headers])
    lines = _compile("torch", f"{cxx} {make.ninja_quote(FLAGS)} {includes}")
    lines += _compile("cuda", f"{cxx} {make.ninja_quote(FLAGS)} {of_cuda}")
    lines += _compile(
        "ops", f"{cxx} {make.ninja_quote(OPS_FLAGS)} {of_ops} {own_pybind} {includes}"
    )
    folder = FOLDER / sys.implementation.cache_tag
    objects = []
    for rule, names in (("torch", OF_TORCH), ("cuda", OF_CUDA), ("ops", OF_OPS)):
        for name in names:
            objects.append(folder / f"{name}.o")
            lines.append(f"build {objects[-1]}: {rule} {make.ninja_path(SOURCES / name)}.cpp")
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += [f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()]
    libraries += ["-ltorch", "-ltorch_cpu", "-lc10"]
    link = f"{cxx} -shared -Wl,-Bsymbolic $in -o $out {make.ninja_quote(libraries)}"
    return [*lines, "rule module", f"  command = {link}"], objects


def _link(folder, units, others):
    """The module in a folder."""
    module = folder / "klfast_emulated.so"
    return [f"build {module}: module {' '.join(map(str, [*units, *others]))}"]


def _objects_of_units(folder):
    return {unit: folder / f"{name_of(unit)}.o" for unit in cuda_units()}


def _lines():
    """The rules of everything that can be built. Without nvcc this is the interpreter alone."""
    lines, core_objects = _core_rules(_cxx())
    if not has_nvcc():
        return lines
    module_lines, objects = _module_rules(_cxx(), ROOT / "csrc")
    lines += [*module_lines, *_nvcc_rule(ROOT / "csrc")]
    for arch in ARCHS:
        folder = FOLDER / f"sm{arch}"
        for unit in cuda_units():
            lines += _nvcc_build(unit, arch, folder, ROOT / "csrc")
        lines += _link(folder, _objects_of_units(folder).values(), [*core_objects, *objects])
    return lines


def _run_ninja(folder, lines, target):
    """Run ninja on these rules. Each folder has its own log."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "build.ninja"
    text = "\n".join([f"builddir = {folder}", *lines, ""])
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    command = [setup().ninja_command(), "-C", str(folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the build of the PTX interpreter failed:\n{done.stdout}{done.stderr}")


def _cxx():
    return setup().ninja_quote(shlex.split(os.environ.get("CXX", "c++")))


@contextlib.contextmanager
def alone(folder):
    """One process builds in a folder at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "builder").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def core():
    """The library of the interpreter alone."""
    with alone(FOLDER):
        _run_ninja(FOLDER, _lines(), FOLDER / "core.so")
    return FOLDER / "core.so"


@functools.cache
def build(arch):
    """Build the module of one architecture, and return the folder of the module and its PTX."""
    if not has_nvcc():
        raise RuntimeError(NO_NVCC)
    folder = FOLDER / f"sm{arch}"
    with alone(FOLDER):
        _run_ninja(FOLDER, _lines(), folder / "klfast_emulated.so")
    return folder


def build_changed(arch, csrc, unit, folder):
    """Build the module of a changed copy of ``csrc``. Only one unit is compiled anew."""
    plain = build(arch)
    module_lines, objects = _module_rules(_cxx(), ROOT / "csrc")
    _, core_objects = _core_rules(_cxx())
    rules = [line for line in module_lines if not line.startswith("build ")]
    lines = [*rules, *_nvcc_rule(csrc), *_nvcc_build(unit, arch, folder, csrc)]
    units = _objects_of_units(plain)
    units[unit] = folder / f"{name_of(unit)}.o"
    lines += _link(folder, units.values(), [*core_objects, *objects])
    folder.mkdir(parents=True, exist_ok=True)
    for other in cuda_units():
        ptx = folder / f"{name_of(other)}.ptx"
        if other != unit and not ptx.exists():
            ptx.symlink_to(plain / ptx.name)
    with alone(folder):
        _run_ninja(folder, lines, folder / "klfast_emulated.so")
    return folder


def load(folder):
    """Load the module of a folder. From then on it sees torch's allocations."""
    spec = importlib.util.spec_from_file_location("klfast_emulated", folder / "klfast_emulated.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.set_folder(str(folder))
    module.watch_torch()
    return module


if __name__ == "__main__":
    if not has_nvcc():
        raise SystemExit(NO_NVCC)
    for each in sys.argv[1:] or ["90"]:
        print(build(each))
