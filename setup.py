"""Builds klfast._C with ninja: CPU kernels per instruction set, CUDA kernels, the binding to torch.

CUDA kernels are built if torch has CUDA and a toolkit is found (CUDA_HOME, nvcc on the PATH, or
/usr/local/cuda). FORCE_CUDA=1 builds them for any torch, FORCE_CUDA=0 for none. torch's own
BuildExtension is not used, because it refuses .cu files on a torch without CUDA.

The file COMMIT of an sdist says which commit it was made from. A wheel built from it says so too.

Environment: CXX, MAX_JOBS, DEBUG=1 (-O0 -g), SANITIZE=1 (AddressSanitizer and UBSan), WERROR=1,
FORCE_CUDA, CUDA_HOME, TORCH_CUDA_ARCH_LIST, NVCC_THREADS. KLFAST_LOCAL_VERSION=cu130 adds +cu130 to
the version of a wheel. KLFAST_INSTRUCTION_SETS is "native" or "all". "native" builds this machine's
best instruction set, and a baseline that compiles fast but runs slowly. An editable build is
"native", a wheel is "all".
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

try:
    import pybind11
    import torch
    from setuptools import Extension, setup
    from setuptools.command.build_ext import build_ext
    from setuptools.command.egg_info import egg_info
    from setuptools.command.sdist import sdist
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    raise SystemExit(
        f"klfast needs {error.name} to build: pip install torch pybind11 ninja setuptools"
    ) from None

ROOT = Path(__file__).parent.resolve()
COMMIT = ROOT / "COMMIT"  # only in an sdist
OLDEST_TORCH = "0x020a000000000000"  # TORCH_TARGET_VERSION: one binary runs on torch 2.10 and later
KERNELS = (
    "csrc/penalty/cpu_kernel.cpp",
    "csrc/logits/cpu_kernel.cpp",
    "csrc/rollout/cpu_kernel.cpp",
)
NOT_SANITIZED = "csrc/logits/cpu_kernel.cpp"  # the sanitizers take more than ten minutes for it
CHOICE = "csrc/device/cpu/instruction_sets.cpp"  # of an instruction set that was built
SOURCES = (
    CHOICE,
    "csrc/penalty/cpu.cpp",
    "csrc/logits/cpu.cpp",
    "csrc/rollout/cpu.cpp",
    "csrc/binding/cpu.cpp",
    "csrc/binding/module.cpp",
)
CUDA_SOURCES = (
    "csrc/device/cuda/arrivals.cu",
    "csrc/device/cuda/chip.cu",
    "csrc/logits/cuda_divergence_backward.cu",
    "csrc/logits/cuda_divergence_forward.cu",
    "csrc/penalty/cuda.cu",
    "csrc/penalty/cuda_plain.cu",
    "csrc/binding/cuda.cpp",
    "csrc/device/cuda/problem.cu",
    "csrc/logits/cuda_token_logprobs.cu",
)
# PTX of 10.0 is for 11.0, which runs no code of 12.0.
CUDA_ARCHS = "8.0 9.0 10.0+PTX 12.0+PTX"
# No -ffast-math: it folds the rounding trick of exp_series.h away, and the result is wrong.
MATH_FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
# Contraction would give other bits than on x86 if "baseline" has fused instructions, as on aarch64.
HOST_FLAGS = ("-ffp-contract=off",)
X86_FLAGS = {
    "avx2": ("-march=x86-64-v3",),
    # By default GCC takes 256-bit vectors here, which are 28 % slower.
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
# The formulas say where they fuse, and nvcc must not, so that every kernel gives the same bits.
NVCC_FLAGS = ("-std=c++17", "-fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall")


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def instruction_sets(chosen: str) -> dict[str, tuple[str, ...]]:
    """The flags of each instruction set that is built. ``chosen`` is "all" or "native"."""
    if not is_x86():
        return {"baseline": ()}
    if chosen == "all":
        return {"baseline": ()} | X86_FLAGS
    best = next((name for name in reversed(X86_FLAGS) if here_has(X86_FLAGS[name])), None)
    # Only tests use this baseline. -O1 takes 60 % less time to compile than -O3.
    quick = () if enabled("DEBUG") else ("-O1",)
    return {"baseline": quick, best: X86_FLAGS[best]} if best else {"baseline": ()}


def chosen_sets(default: str) -> str:
    chosen = os.environ.get("KLFAST_INSTRUCTION_SETS") or default
    if chosen not in ("native", "all"):
        raise SystemExit(f"KLFAST_INSTRUCTION_SETS must be 'native' or 'all', got {chosen!r}")
    return chosen


def here_has(flags: tuple[str, ...]) -> bool:
    """True if this processor has every instruction that the flags allow."""
    needed, here = (
        set(re.findall(r"#define (__[A-Z0-9]+__) 1$", predefined, re.MULTILINE))
        for predefined in map(macros, (flags[0], "-march=native"))
    )
    return needed <= here


def macros(flag: str) -> str:
    """The compiler's predefined macros under a flag."""
    command = [*compiler(), flag, "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def enabled(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def is_toolkit(home: Path) -> bool:
    """True if nvcc and the runtime are there. An nvcc on the PATH may be only a wrapper."""
    headers = [home / "include", *home.glob("targets/*/include")]
    return (home / "bin" / "nvcc").exists() and any(
        (folder / "cuda_runtime.h").exists() for folder in headers
    )


def cuda_home() -> Path | None:
    """The CUDA toolkit, if there is one."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        if not is_toolkit(Path(named)):
            raise SystemExit(f"CUDA_HOME must be a CUDA toolkit, got {named!r}")
        return Path(named)
    on_path = shutil.which("nvcc")
    candidates = [Path(on_path).resolve().parents[1]] if on_path is not None else []
    return next(filter(is_toolkit, [*candidates, Path("/usr/local/cuda")]), None)


def builds_cuda() -> bool:
    """True if CUDA kernels are built. If they are not but seem expected, prints why."""
    forced = os.environ.get("FORCE_CUDA")
    if forced == "0" or (not forced and torch.version.cuda is None):
        return False
    if cuda_home() is not None:
        return True
    if enabled("FORCE_CUDA"):
        raise SystemExit("FORCE_CUDA=1, but no CUDA toolkit was found; set CUDA_HOME")
    print(
        "klfast: NO CUDA KERNELS: torch has CUDA, but no toolkit (nvcc) was found; set CUDA_HOME.\n"
        "klfast: GPU tensors will use Triton, or the slow reference backend.",
        file=sys.stderr,
        flush=True,
    )
    return False


def nvcc(*arguments: str) -> str:
    home = cuda_home()
    assert home is not None
    command = [str(home / "bin" / "nvcc"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cuda_archs() -> list[str]:
    """Compute capabilities to build for, as TORCH_CUDA_ARCH_LIST writes them: "9.0", "10.0+PTX"."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    archs = (asked or CUDA_ARCHS).replace(";", " ").replace(",", " ").split()
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?", arch):
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST must list numbers as '9.0+PTX', got {arch!r}")
    if asked:
        return archs
    known = nvcc("--list-gpu-arch").split()
    archs = [arch for arch in archs if f"compute_{arch_number(arch)}" in known]
    return [*archs[:-1], archs[-1].removesuffix("+PTX") + "+PTX"]


def arch_number(arch: str) -> str:
    return arch.removesuffix("+PTX").replace(".", "")


def arch_flags() -> list[str]:
    flags = []
    for arch in cuda_archs():
        n = arch_number(arch)
        flags.append(f"-gencode=arch=compute_{n},code=sm_{n}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{n},code=compute_{n}")
    return flags


def nvcc_flags() -> list[str]:
    threads = os.environ.get("NVCC_THREADS", str(min(len(cuda_archs()), os.cpu_count() or 1)))
    flags = [*NVCC_FLAGS, *arch_flags(), f"--threads={threads}"]
    flags += ["-O0", "-g", "-G"] if enabled("DEBUG") else ["-O3"]
    if enabled("WERROR"):
        flags += ["-Werror=all-warnings", "-Xptxas=-warn-spills"]
    return flags


def nvcc_path_flags() -> list[str]:
    """The flags that name folders of this machine."""
    flags = [f"-I{ROOT / 'csrc'}", f"-Xcompiler={without_folder(ROOT)}"]
    if "CXX" in os.environ:
        flags.append(f"-ccbin={shlex.split(os.environ['CXX'])[-1]}")
    return flags


def variants() -> list[str]:
    names = [name.lower() for name in ("DEBUG", "SANITIZE") if enabled(name)]
    return [*names, "cuda"] if builds_cuda() else names


def without_folder(path: Path | str) -> str:
    """The flag that makes messages name files by their path inside of the folder."""
    return f"-fmacro-prefix-map={path}/="


def path_flags() -> list[str]:
    """The flags that name folders of this machine."""
    # pip's pybind11 comes first, because torch's copy refuses TORCH_TARGET_VERSION.
    paths = [pybind11.get_include(), *cpp_extension.include_paths(), sysconfig.get_path("include")]
    includes = [f"-I{ROOT / 'csrc'}", *(f"-isystem{path}" for path in paths)]
    return [*includes, *map(without_folder, [ROOT, *paths])]


def compile_flags() -> list[str]:
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-O0", "-g"] if enabled("DEBUG") else ["-O3", "-g0"]
    if enabled("SANITIZE"):
        flags += ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    if enabled("WERROR"):
        flags.append("-Werror")
    if builds_cuda():
        flags.append("-DKLFAST_CUDA")
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
    # libtorch must stay in DT_NEEDED. Without it the stable ABI's CUDA symbols are silently null.
    flags = ["-shared", *flags, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
    return [*flags, *cuda_link_flags()] if builds_cuda() else flags


def cuda_link_flags() -> list[str]:
    """The static runtime, with which the module also loads on machines without CUDA."""
    home = cuda_home()
    assert home is not None
    folders = [home / "lib64", home / "lib", *home.glob("targets/*/lib")]
    paths = [f"-L{folder}" for folder in folders if folder.exists()]
    return [*paths, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def ninja_quote(words: list[str] | tuple[str, ...]) -> str:
    return shlex.join(words).replace("$", "$$")


def ninja_path(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def object_of(source: str, *variant: str) -> str:
    """The name of an object file: ``penalty_cpu_kernel.cpp_avx2.o``."""
    return "_".join([*Path(source).parts[1:], *variant]) + ".o"


def ninja_file(output: Path, sets: dict[str, tuple[str, ...]]) -> str:
    """The build as a ninja file, with an object per source, and per instruction set for kernels."""
    cxx = compiler()
    common = ninja_quote([*compile_flags(), *path_flags()])
    objects: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, flags in reversed(sets.items()):  # the slowest files begin first
        flags = (*MATH_FLAGS, *flags, f"-DKLFAST_INSTRUCTION_SET={name}")
        objects |= {object_of(kernel, name): (kernel, flags) for kernel in KERNELS}
        if enabled("SANITIZE"):  # -O1 fuses no products of blocks, which its accuracy needs
            own = (*flags, "-O3", "-g0", "-fno-sanitize=all")
            objects[object_of(NOT_SANITIZED, name)] = (NOT_SANITIZED, own)
    objects |= {object_of(source): (source, HOST_FLAGS) for source in SOURCES}
    tables = tuple(f"-DKLFAST_HAS_{name.upper()}" for name in sets)
    objects[object_of(CHOICE)] = (CHOICE, (*HOST_FLAGS, *tables))
    if builds_cuda():
        objects |= {object_of(source): (source, ()) for source in CUDA_SOURCES}
    lines = [
        "rule compile",
        "  description = Compiling $out",
        f"  command = {ninja_quote(cxx)} -MMD -MF $out.d {common} $flags -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link",
        "  description = Linking $out",
        f"  command = {ninja_quote(cxx)} $in -o $out {ninja_quote(link_flags())}",
    ]
    if builds_cuda():
        nvcc_command = ninja_quote([f"{cuda_home()}/bin/nvcc", *nvcc_flags(), *nvcc_path_flags()])
        lines += [
            "rule compile_cuda",
            "  description = Compiling $out",
            f"  command = {nvcc_command} -MMD -MF $out.d -c $in -o $out",
            "  deps = gcc",
            "  depfile = $out.d",
        ]
    for name, (source, flags) in objects.items():
        rule = "compile_cuda" if source.endswith(".cu") else "compile"
        lines += [f"build {name}: {rule} {ninja_path(ROOT / source)}"]
        lines += [f"  flags = {ninja_quote(flags)}"]
    lines += [f"build {ninja_path(output)}: link {' '.join(objects)}", ""]
    return "\n".join(lines)


def check_compiler() -> None:
    program = compiler()[0]
    if shutil.which(program) is None:
        raise SystemExit(
            f"klfast needs a C++ compiler to build, and there is no {program}: install g++ or "
            "clang++ (apt install g++, dnf install gcc-c++, xcode-select --install), or name it in "
            "CXX"
        )


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


def git(*arguments: str) -> str | None:
    """The output of git in this folder, or None if git fails or is not installed."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def commit() -> str | None:
    """The commit of these sources, or of the sources of this sdist.

    It is ``<commit>-dirty`` if files have changed since.
    """
    if COMMIT.exists():
        return COMMIT.read_text().strip() or None
    if not git("ls-files", "--error-unmatch", "setup.py"):
        return None  # this folder lies in another project's checkout
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def cuda_version() -> str:
    """The version of the toolkit, such as "13.0"."""
    found = re.search(r"release (\d+\.\d+)", nvcc("--version"))
    assert found is not None
    return found.group(1)


def build_info(sets: Iterable[str]) -> dict[str, object]:
    """Facts about the build for klfast.info(), which can read them if the module does not load."""
    cuda = builds_cuda()
    return {
        "torch": torch.__version__,
        "cuda": cuda_version() if cuda else None,
        "cuda_archs": cuda_archs() if cuda else [],
        "nvcc_flags": nvcc_flags() if cuda else [],
        "compile_flags": compile_flags(),
        "instruction_sets": list(sets),
        "commit": commit(),
    }


class NinjaBuild(build_ext):
    """Compiles changed files in parallel with ninja."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.was_in_place = bool(self.inplace)  # setuptools clears `inplace` while it builds

    def build_extension(self, ext: Extension) -> None:
        check_compiler()
        if builds_cuda() and torch.version.cuda is not None:
            major = cuda_version().split(".")[0]
            if major != torch.version.cuda.split(".")[0]:
                print(
                    f"klfast: CUDA {cuda_version()} builds the kernels, torch has CUDA "
                    f"{torch.version.cuda}: they need a driver for CUDA {major} or later",
                    file=sys.stderr,
                    flush=True,
                )
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        platform = str(sysconfig.get_config_var("SOABI"))  # "cpython-311-x86_64-linux-gnu"
        folder = ROOT / "build" / "-".join(["klfast", platform, *variants()])
        folder.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        is_for_here = self.was_in_place or getattr(self, "editable_mode", False)
        sets = instruction_sets(chosen_sets("native" if is_for_here else "all"))
        (folder / "build.ninja").write_text(ninja_file(output, sets))
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        subprocess.run([ninja_command(), "-C", str(folder), *jobs], check=True)
        check_runtime(output)
        info = json.dumps(build_info(sets), indent=2) + "\n"
        for package in {output.parent, ROOT / "klfast" if is_for_here else output.parent}:
            (package / "_build_info.json").write_text(info)


def check_runtime(module: Path) -> None:
    """Raises unless the module shares torch's C++ runtime. With a runtime of its own, an error of
    an op loses its text or ends the process.
    """
    if sys.platform == "linux" and b"libstdc++.so" not in module.read_bytes():
        module.unlink()
        raise SystemExit(
            f"CXX must link the shared libstdc++, as torch does, got {compiler()!r}, which links "
            "the static one: set CXX to another compiler, as CXX=/usr/bin/g++"
        )


class SourceDistribution(sdist):
    """Writes COMMIT."""

    def finalize_options(self) -> None:
        if os.environ.get("KLFAST_LOCAL_VERSION"):
            raise SystemExit("KLFAST_LOCAL_VERSION is for wheels, not for an sdist")
        super().finalize_options()

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / COMMIT.name).write_text(f"{commit() or ''}\n")


class LabelledVersion(egg_info):
    """Adds KLFAST_LOCAL_VERSION to the version of a wheel."""

    def finalize_options(self) -> None:
        label = os.environ.get("KLFAST_LOCAL_VERSION", "")
        if label:
            if not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", label):
                raise SystemExit(f"KLFAST_LOCAL_VERSION must be as 'cu130', got {label!r}")
            self.tag_build = f"+{label}"
        super().finalize_options()


setup(
    ext_modules=[Extension("klfast._C", [*KERNELS, *SOURCES, *CUDA_SOURCES])],
    cmdclass={"build_ext": NinjaBuild, "egg_info": LabelledVersion, "sdist": SourceDistribution},
)
