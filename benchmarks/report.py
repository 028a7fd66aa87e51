"""Tables and picture from ``benchmarks/results/*.json``, the README's among them.

A README shows no number that a file there does not hold: between ``<!-- benchmark:NAME -->`` and
``<!-- end -->`` it holds what this writes, and ``--check`` (a test) says if it does not::

    python benchmarks/report.py

With a ``gpu.json`` it also writes ``gpu.md``, all its cases, and ``gpu-roofline.png``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- benchmark:(?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

NO_GPU = "**Nothing here has run on a GPU yet.**"
PICTURE = "gpu-roofline.png"

Row = dict[str, Any]
Case = dict[str, Row]
"""Implementation -> its row."""

OPS = {
    "forward": "forward to per-sequence sums",
    "stats": "the same with `KLStats`",
    "one-read": "forward + backward, one read",
    "two-pass": "forward + backward, two passes",
}
README_OPS = ("forward", "one-read")
LAUNCH_TOKENS = 1 << 18
"""Cases of fewer tokens are about launches, not about bytes."""

BACKENDS = {"native": "CUDA C++", "triton": "Triton"}
RIVALS = {
    "eager": "eager",
    "torch.compile": "`torch.compile`",
    "torch.compile max-autotune": "max-autotune",
}


def cases_of(data: dict[str, Any]) -> list[Case]:
    """The cases in their order, each as its rows by implementation."""
    cases: dict[str, Case] = {}
    for row in data["rows"]:
        cases.setdefault(row["case"], {})[row["impl"]] = row
    return list(cases.values())


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    heading, *rows = [f"| {' | '.join(line)} |" for line in (headings, *lines)]
    return "\n".join([heading, "|" + "---|" * len(headings), *rows])


def number(value: float | None) -> str:
    """Three digits, never an exponent; nothing for None."""
    if value is None:
        return ""
    if 0 < value < 1e-3:
        return "<0.001"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def times(ratio: float | None) -> str:
    """How many times, in two digits."""
    if ratio is None:
        return ""
    return f"{ratio:.2g}x" if ratio < 99.5 else f"{ratio:.0f}x"


def share(value: float | None) -> str:
    """A share in per cent."""
    return "" if value is None else f"{value:.0%}".replace("%", " %")


def label(row: Row, with_shape: bool) -> str:
    """What a case computes, and on what."""
    layout = "packed " if row.get("packed") else ""
    return f"{layout}{row['shape']} {OPS[row['op']]}" if with_shape else OPS[row["op"]]


def cpu_table(data: dict[str, Any]) -> str:
    """Time, ratios and bandwidth of each case."""
    cases = cases_of(data)
    rows = [case["klfast"] for case in cases]
    several = len({tuple(row["shape"]) for row in rows}) > 1
    headings = ["k3, random boolean mask", "dtype", "klfast, ms", "vs eager", "vs `torch.compile`"]
    lines = [
        [
            label(row, several),
            row["dtype"],
            number(row["median_ms"]),
            times(case["eager"]["ratio"]),
            times(case["torch.compile"]["ratio"]),
            "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f}",
            share(row["read_share"]),
        ]
        for case, row in zip(cases, rows, strict=True)
    ]
    return table([*headings, "GB/s", "of read bandwidth"], lines)


def drop_in_table(parts: Sequence[dict[str, Any]]) -> str:
    """Frameworks' own functions and klfast's in their place: milliseconds, and how many times."""
    pairs: dict[tuple[str, str], dict[str, Case]] = {}
    for data in parts:
        for case in cases_of(data):
            row = case["klfast"]
            pairs.setdefault((row["framework"], row["what"]), {})[row["dtype"]] = case
    dtypes = list(dict.fromkeys(dtype for cases in pairs.values() for dtype in cases))
    lines = []
    for (framework, what), cases in pairs.items():
        line = [framework, what]
        for dtype in dtypes:
            theirs, mine = cases[dtype]["framework"], cases[dtype]["klfast"]
            line += [number(theirs["median_ms"]), number(mine["median_ms"]), times(theirs["ratio"])]
        lines.append(line)
    headings = ["framework", "function"]
    for dtype in dtypes:
        headings += [f"theirs {dtype}, ms", "klfast, ms", "faster"]
    return table(headings, lines) + "\n\n" + drop_in_conditions(parts)


def drop_in_conditions(parts: Sequence[dict[str, Any]]) -> str:
    """Where, when and how they were measured, in one paragraph."""
    wheres = [data["conditions"] for data in parts]
    where = wheres[0]
    versions = dict.fromkeys(
        f"{name} {version}" for each in wheres for name, version in each["versions"].items()
    )
    shape = parts[0]["rows"][0]["shape"]
    return (
        f"{shape}, {where['device']}, {where['threads']} threads; {', '.join(versions)}; commit "
        f"{where['commit']}, {where['date'][:10]}; medians of {where['rounds']} interleaved "
        "rounds, results compared first. `GRPOTrainer._compute_loss` is TRL's whole loss around a "
        "model that costs nothing; ROLL's and trlx's side is their formula in eager PyTorch."
    )


def ours(case: Case) -> Row:
    """The row of klfast's first backend, to which ratios are."""
    return next(case[name] for name in BACKENDS if name in case)


def microseconds(row: Row | None, kind: str) -> str:
    return number(None if row is None or row[kind] is None else row[kind] * 1e3)


def kernel_table(cases: Sequence[Case]) -> str:
    """Times on the device with cold caches; of rivals, how many times klfast's first backend's."""
    headings = ["k3, random boolean mask", "dtype"]
    headings += [f"{title}, us" for title in BACKENDS.values()]
    headings += [f"vs {title}" for title in RIVALS.values()]
    headings += ["GB/s", "of read", "of copy", "MB above inputs"]
    lines = []
    for case in cases:
        row = ours(case)
        lines.append(
            [
                label(row, with_shape=True),
                row["dtype"],
                *(microseconds(case.get(name), "kernel_ms") for name in BACKENDS),
                *(times(case[name]["ratio"]) if name in case else "" for name in RIVALS),
                number(row["gb_per_s"]),
                share(row["read_share"]),
                share(row["copy_share"]),
                number(row["peak_bytes"] / 1e6),
            ]
        )
    return table(headings, lines)


def launch_table(cases: Sequence[Case]) -> str:
    """Microseconds of a call in a CUDA graph, and of the host to queue it."""
    names = {**BACKENDS, **RIVALS}
    headings = ["us: in a CUDA graph / of the host", "dtype", *names.values()]
    lines = []
    for case in cases:
        row = ours(case)
        pairs = [
            " / ".join(
                microseconds(case.get(name), kind) or "-" for kind in ("graph_ms", "host_ms")
            )
            for name in names
        ]
        lines.append([label(row, with_shape=True), row["dtype"], *pairs])
    return table(headings, lines)


def gpu_conditions(data: dict[str, Any]) -> str:
    """Where, when and how it was measured, in one paragraph."""
    where = data["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    clocks = where["clocks"] or {}
    running = "".join(f", {name} {value}" for name, value in clocks.items())
    ceilings = where["ceilings"]
    return (
        f"{where['device']}{running}; {versions}; commit {where['commit']}, {where['date'][:10]}. "
        f"Medians of {where['rounds']} rounds with L2 flushed, all candidates interleaved in one "
        f"process and checked against float64 first; log-ratios of {where['log_ratio_std']} nats. "
        f"Times are of the device; ratios, GB/s (the least bytes of the case), shares and memory "
        f"are of the first backend in the table. In the same run a plain read reached "
        f"{ceilings['read_gb_per_s']:.0f} GB/s and a copy {ceilings['copy_gb_per_s']:.0f} GB/s, "
        f"and no call at all {ceilings['nothing_us']:.2g} us. In "
        f"a graph of {where['graph_calls']} calls small inputs stay in L2."
    )


def gpu_block(data: dict[str, Any] | None, only_some: bool = True) -> str:
    """The README's part on GPUs; or all that was measured."""
    if data is None:
        return NO_GPU
    cases = cases_of(data)
    if only_some:
        cases = [c for c in cases if ours(c)["op"] in README_OPS and not ours(c)["packed"]]
    small = [c for c in cases if ours(c)["shape"][0] * ours(c)["shape"][1] < LAUNCH_TOKENS]
    parts = [kernel_table(cases), launch_table(small if only_some else cases)]
    parts.append(gpu_conditions(data))
    left_out = {**data.get("failed", {}), **data["skipped"]}
    parts += [f"Left out: {case}: {reason}." for case, reason in left_out.items()]
    return "\n\n".join(parts)


def load(path: Path) -> dict[str, Any] | None:
    """A results file; None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def blocks(results: Path) -> dict[str, str]:
    """Name -> text of the README's generated parts."""
    texts = {
        path.stem: cpu_table(json.loads(path.read_text())) for path in results.glob("cpu*.json")
    }
    drop_in = sorted(results.glob("drop-in-*.json"), reverse=True)
    if drop_in:
        texts["drop-in"] = drop_in_table([json.loads(path.read_text()) for path in drop_in])
    data = load(results / "gpu.json")
    texts["gpu"] = gpu_block(data)
    if data is not None:
        texts["gpu"] += f"\n\n![GB/s by bytes](benchmarks/results/{PICTURE})"
    return texts


def rewrite(text: str, texts: dict[str, str]) -> str:
    """A README with its generated parts as they must be.

    Raises:
        SystemExit: it asks for what is not there.
    """

    def generated(match: re.Match[str]) -> str:
        if match["name"] not in texts:
            known = ", ".join(map(repr, sorted(texts)))
            raise SystemExit(f"no results for benchmark:{match['name']}; expected one of {known}")
        return f"{match[1]}{texts[match['name']]}\n{match[3]}"

    return BLOCK.sub(generated, text)


def draw(data: dict[str, Any], path: Path) -> None:
    """GB/s by bytes of a call: a panel for each op and dtype, the measured ceilings as lines."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cases = [case for case in cases_of(data) if not ours(case)["packed"]]
    ops = list(dict.fromkeys(ours(case)["op"] for case in cases))
    dtypes = list(dict.fromkeys(ours(case)["dtype"] for case in cases))
    size = (4.6 * len(dtypes) + 1.8, 2.9 * len(ops) + 0.6)
    figure, axes = plt.subplots(
        len(ops), len(dtypes), figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for op, line in zip(ops, axes, strict=True):
        for dtype, panel in zip(dtypes, line, strict=True):
            chosen = [c for c in cases if (ours(c)["op"], ours(c)["dtype"]) == (op, dtype)]
            _draw_panel(panel, chosen, data["conditions"]["ceilings"])
            panel.set_title(f"{OPS[op]}, {dtype}", fontsize=10)
    for panel in axes[-1]:
        panel.set_xlabel("least bytes of the call")
    for panel in axes[:, 0]:
        panel.set_ylabel("GB/s")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", frameon=False, fontsize=9)
    figure.suptitle(f"{data['conditions']['device']}, k3, kernels with cold caches")
    figure.tight_layout(rect=(0, 0, 1 - 1.8 / size[0], 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


# Okabe and Ito's colours, which the colour-blind can tell apart; a marker each, for print.
STYLES = {
    "native": ("klfast CUDA C++", "#0072B2", "o", "-"),
    "triton": ("klfast Triton", "#009E73", "s", "-"),
    "eager": ("eager", "#D55E00", "v", "--"),
    "torch.compile": ("torch.compile", "#E69F00", "^", "--"),
    "torch.compile max-autotune": ("max-autotune", "#CC79A7", "D", "--"),
}


def _draw_panel(panel: Any, cases: Sequence[Case], ceilings: dict[str, float]) -> None:
    for impl, (title, colour, marker, line) in STYLES.items():
        points = sorted((c[impl]["bytes"], c[impl]["gb_per_s"]) for c in cases if impl in c)
        if points:
            x, y = zip(*points, strict=True)
            panel.plot(x, y, label=title, color=colour, marker=marker, linestyle=line, markersize=5)
    for name, style in (("read", ":"), ("copy", "-.")):
        ceiling = ceilings[f"{name}_gb_per_s"]
        panel.axhline(ceiling, label=f"{name}, measured", color="black", linestyle=style, lw=1)
    panel.set_xscale("log")
    panel.set_ylim(bottom=0)
    panel.grid(which="major", alpha=0.3)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes, or with ``--check`` says whether there is something to write (1)."""
    parser = argparse.ArgumentParser(description="Tables and picture from benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    arguments = parser.parse_args(argv)
    texts = {arguments.readme: rewrite(arguments.readme.read_text(), blocks(arguments.results))}
    data = load(arguments.results / "gpu.json")
    if data is not None:
        texts[arguments.results / "gpu.md"] = gpu_block(data, only_some=False) + "\n"
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.name} is not what the results say: run python benchmarks/report.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path])
        print(f"wrote {path}")
    if data is not None:
        draw(data, arguments.results / PICTURE)
        print(f"wrote {arguments.results / PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
