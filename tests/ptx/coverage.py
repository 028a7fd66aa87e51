"""Counts the instructions of the kernels that ran, and gives reasons for the others.

``python tests/ptx/coverage.py`` merges what the parts of ``make test-ptx`` left in
build/ptx/coverage and writes benchmarks/results/ptx-coverage-sm90.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import ptx_build  # noqa: E402
import ptx_run  # noqa: E402

from klfast.backends.info import commit  # noqa: E402

ARCH = "90"
RESULT = ROOT / "benchmarks" / "results" / f"ptx-coverage-sm{ARCH}.json"
MOST_LINES = 40  # that the result names


class Kernel(NamedTuple):
    """The instructions of a kernel: (line of source, text) each."""

    name: str
    code: list[tuple[str, str]]


def kernels_of(folder):
    """Every kernel of a folder of PTX, with the functions that it calls."""
    text = ptx_run.library().klfast_ptx_describe_folder(str(folder).encode())
    if text is None:
        raise RuntimeError(ptx_run.library().klfast_ptx_error().decode())
    found = []
    for line in text.decode().splitlines():
        if line.startswith("kernel "):
            found.append(Kernel(line.removeprefix("kernel "), []))
        else:
            source, _, instruction = line.partition("\t")
            found[-1].code.append((source, instruction))
    return found


def reached_in(folder):
    """Kernel -> a digit for each instruction, 1 where some process ran it."""
    merged = {}
    for path in folder.glob("*"):
        for line in path.read_text().splitlines():
            name, _, digits = line.partition(" ")
            before = merged.get(name)
            if before is None:
                merged[name] = digits
            elif len(before) == len(digits):
                pairs = zip(before, digits, strict=True)
                merged[name] = "".join("1" if "1" in pair else "0" for pair in pairs)
    return merged


def readable(names):
    """Kernels' names as C++ has them, without what all have in common."""
    bare = [
        re.sub(r"_GLOBAL__N__[0-9a-f]+_\d+_\w+?_cu_[0-9a-f]{8}", "_GLOBAL__N_1", name)
        for name in names
    ]
    bare = [re.sub(r"\d+_GLOBAL__N_1", "12_GLOBAL__N_1", name) for name in bare]
    done = subprocess.run(
        ["c++filt"], input="\n".join(bare), capture_output=True, text=True, check=True
    )
    common = r"\(anonymous namespace\)::|klfast::|cuda::|formulas::|^void "
    return [re.sub(common, "", line).rpartition("(")[0] for line in done.stdout.splitlines()]


def place(line):
    """The path of a line of the project, or the name of another project's header."""
    return line if line.startswith("csrc/") else line.rpartition("/")[2] or "(no line of source)"


class Reason(NamedTuple):
    """A reason why lines are not reached, with patterns of kernel, file and code."""

    kernels: str
    files: str
    code: str
    text: str


# The first matching reason counts.
REASONS = (
    Reason(
        r"divergence_(forward|backward)",
        r"formulas/divergences\.h$",
        r"std::exp\(x\)",
        "exp of 1e-4 nats or more, by which no row's log-sum-exp is rounded",
    ),
    Reason(
        r"divergence_forward",
        r"formulas/(divergences|entropy)\.h$",
        r"std::log",
        "ways of CUDA's logarithms for what no row's sums have been: 0, subnormal, far from 1",
    ),
    Reason(
        "",
        "",
        r"switch \(dtype\)|case DType::|return visit\(|= To\{\};|const T\*>\(first\)\[in\.",
        "a dtype, of those in a switch, that no call of the kernel has had there",
    ),
)


@functools.cache
def lines_of(path):
    """The lines of a file of the project."""
    return (ROOT / path).read_text().splitlines()


def code_at(line):
    """(path, code) of a line such as "csrc/device/cuda/load.h:146"."""
    path, _, number = line.partition(":")
    is_known = path.startswith("csrc/") and int(number) > 0
    return path, lines_of(path)[int(number) - 1] if is_known else ""


def operation(text):
    """An instruction without its operands."""
    return re.sub(r"^@\S+ ", "", text).split()[0]


def reason(kernel, line, is_copied, is_launched):
    """The reason why an instruction was not reached, from its kernel and its line.

    ``is_copied`` says that the same instruction of the line has run elsewhere in the kernel.
    """
    if not is_launched:
        return "a kernel that no call has launched"
    path, code = code_at(line)
    for each in REASONS:
        patterns = ((each.kernels, kernel), (each.files, path), (each.code, code))
        if code and all(re.search(pattern, text) for pattern, text in patterns):
            return each.text
    if is_copied:
        return "a copy of what has run elsewhere in the kernel, of code inlined or unrolled twice"
    if line.startswith("csrc/"):
        return "a case of the project's code that no call has brought about"
    return "a case of CUDA's or the host's headers that no call has brought about"


def table_of(folder, coverage):
    """The result, without the numbers of the runs."""
    kernels = kernels_of(folder)
    reached = reached_in(coverage)
    rows, lines, reasons = [], Counter(), Counter()
    for kernel, name in zip(kernels, readable([each.name for each in kernels]), strict=True):
        digits = reached.get(kernel.name, "0" * len(kernel.code))
        assert len(digits) == len(kernel.code), f"{kernel.name} is not what ran"
        rows.append({"kernel": name, "instructions": len(digits), "reached": digits.count("1")})
        pairs = list(zip(digits, kernel.code, strict=True))
        have_run = {(line, operation(text)) for digit, (line, text) in pairs if digit == "1"}
        for digit, (line, text) in pairs:
            if digit == "0":
                is_copied = (line, operation(text)) in have_run
                lines[place(line)] += 1
                reasons[reason(name, line, is_copied, bool(have_run))] += 1
    total = sum(row["instructions"] for row in rows)
    done = sum(row["reached"] for row in rows)
    return {
        "arch": f"sm_{ARCH}",
        "instructions": total,
        "reached": done,
        "share": round(done / total, 4),
        "kernels": sorted(rows, key=lambda row: row["reached"] - row["instructions"]),
        "not_reached": {
            "reasons": dict(reasons.most_common()),
            "lines": dict(lines.most_common(MOST_LINES)),
        },
    }


def write(coverage, runs, path=RESULT):
    """The result, with the runs (part -> counts of cases) that it comes from."""
    table = table_of(ptx_build.build(ARCH), coverage)
    data = {
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "nvcc": ptx_build.nvcc_version(),
        "cases": sum(run["cases"] for run in runs.values()),
        "passed": sum(run["passed"] for run in runs.values()),
        "runs": runs,
        **table,
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    return data


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coverage", type=Path, default=ptx_build.FOLDER / "coverage")
    parser.add_argument("--lines", type=int, default=20, help="of source, to print")
    arguments = parser.parse_args()
    table = table_of(ptx_build.build(ARCH), arguments.coverage)
    for row in table["kernels"]:
        print(f"{row['reached']:7} of {row['instructions']:7}  {row['kernel'][:110]}")
    for line, count in list(table["not_reached"]["lines"].items())[: arguments.lines]:
        print(f"{count:7} not reached of {line}")
    print(table["not_reached"]["reasons"])
    print(f"{table['reached']} of {table['instructions']}: {100 * table['share']:.1f} %")


if __name__ == "__main__":
    main()
