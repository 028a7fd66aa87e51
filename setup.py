"""Builds klfast._C with ninja: CPU kernels once per instruction set, and the rim to torch.

Environment: CXX, MAX_JOBS, DEBUG=1 (-O0 -g), SANITIZE=1 (AddressSanitizer and UBSan), FORCE_CUDA=1.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from torch.utils import cpp_extension

ROOT = Path(__file__).parent.resolve()
OLDEST_TORCH = "0x020a000000000000"  # TORCH_TARGET_VERSION: one binary runs on torch 2.10 and later
KERNELS = "csrc/cpu/kl_penalty_kernel.cpp"
SOURCES = (
    "csrc/cpu/instruction_sets.cpp",
    "csrc/cpu/kl_penalty.cpp",
    "csrc/module.cpp",
    "csrc/ops.cpp",
)
# No -ffast-math: it folds the rounding trick of exp_series.h away, and the result is wrong.
MATH_FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
X86_FLAGS = {
    "avx2": ("-march=x86-64-v3",),
    # Left alone, GCC takes 256-bit vectors here: 28 % slower.
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def instruction_sets() -> dict[str, tuple[str, ...]]:
    return {"baseline": ()} | (X86_FLAGS if is_x86() else {})


def enabled(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def variants() -> list[str]:
    return [name.lower() for name in ("DEBUG", "SANITIZE") if enabled(name)]


def include_flags() -> list[str]:
    # pip's pybind11 first: torch's own copy refuses TORCH_TARGET_VERSION.
    paths = [pybind11.get_include(), *cpp_extension.include_paths(), sysconfig.get_path("include")]
    return [f"-isystem{path}" for path in paths]


def compile_flags() -> list[str]:
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-O0", "-g"] if enabled("DEBUG") else ["-O3", "-g0"]
    if enabled("SANITIZE"):
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"]
    if is_x86():
        flags.append("-DKLFAST_X86")
    flags.append(f"-DTORCH_TARGET_VERSION={OLDEST_TORCH}")
    return flags


def link_flags() -> list[str]:
    flags = [f"-L{path}" for path in cpp_extension.library_paths()]
    if sys.platform == "darwin":
        return [*flags, "-bundle", "-undefined", "dynamic_lookup", "-ltorch", "-ltorch_cpu"]
    if enabled("SANITIZE"):
        flags.append("-fsanitize=address,undefined")
    if not enabled("DEBUG") and not enabled("SANITIZE"):
        flags.append("-s")
    # libtorch must stay in DT_NEEDED: without it the stable ABI's CUDA symbols are silently null.
    return ["-shared", *flags, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]


def ninja_quote(words: list[str] | tuple[str, ...]) -> str:
    return shlex.join(words).replace("$", "$$")


def ninja_path(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_file(output: Path) -> str:
    """The build as a ninja file: one object per source, and per instruction set for the kernels."""
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    common = ninja_quote([*compile_flags(), *include_flags()])
    objects = {f"{Path(source).stem}.o": (source, ()) for source in SOURCES}
    for name, flags in instruction_sets().items():
        flags = (*MATH_FLAGS, *flags, f"-DKLFAST_INSTRUCTION_SET={name}")
        objects[f"kl_penalty_kernel_{name}.o"] = (KERNELS, flags)
    lines = [
        "rule compile",
        f"  command = {ninja_quote(cxx)} -MMD -MF $out.d {common} $flags -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link",
        f"  command = {ninja_quote(cxx)} $in -o $out {ninja_quote(link_flags())}",
    ]
    for name, (source, flags) in objects.items():
        lines += [f"build {name}: compile {ninja_path(ROOT / source)}"]
        lines += [f"  flags = {ninja_quote(flags)}"]
    lines += [f"build {ninja_path(output)}: link {' '.join(objects)}", ""]
    return "\n".join(lines)


def ninja_command() -> str:
    try:
        import ninja
    except ImportError:
        command = shutil.which("ninja")
    else:
        command = str(Path(ninja.BIN_DIR) / "ninja")
    if command is None:
        raise SystemExit("klfast needs ninja to build: pip install ninja")
    return command


def commit() -> str | None:
    if shutil.which("git") is None:
        return None
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return git.stdout.strip() or None


def build_info() -> dict[str, object]:
    """What was built, for klfast.info(): readable even where the module does not load."""
    return {
        "torch": torch.__version__,
        "cuda": None,
        "cuda_archs": [],
        "compile_flags": compile_flags(),
        "instruction_sets": list(instruction_sets()),
        "commit": commit(),
    }


class NinjaBuild(build_ext):
    """Compiles with ninja: in parallel, and only what has changed."""

    def build_extension(self, ext: Extension) -> None:
        if enabled("FORCE_CUDA"):
            raise SystemExit("FORCE_CUDA=1, but this version of klfast has no CUDA kernels yet")
        print(
            "klfast: building CPU kernels only; GPU tensors use the reference backend", flush=True
        )
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        folder = ROOT / "build" / "-".join(["klfast", sys.implementation.cache_tag, *variants()])
        folder.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(ninja_file(output))
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        subprocess.run([ninja_command(), "-C", str(folder), *jobs], check=True)
        info = json.dumps(build_info(), indent=2) + "\n"
        in_place = self.inplace or getattr(self, "editable_mode", False)
        for package in {output.parent, ROOT / "klfast" if in_place else output.parent}:
            (package / "_build_info.json").write_text(info)


setup(
    ext_modules=[Extension("klfast._C", [KERNELS, *SOURCES])],
    cmdclass={"build_ext": NinjaBuild},
)
