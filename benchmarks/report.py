"""Tables and pictures from ``benchmarks/results/*.json``, in docs/measured.md and the README.

Between ``<!-- benchmark:NAME -->`` and ``<!-- end -->`` a page holds the numbers that this script
writes from those files; ``--check`` (a test) tells whether a page is out of date::

    python -m benchmarks.report

With a ``gpu.json`` or a ``gpu-logits.json`` it also writes ``gpu.md``, all their cases, and a
picture of each. What has not been measured on a GPU is pending, case by case (``pending.py``).
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
PAGES = (ROOT / "README.md", ROOT / "docs" / "measured.md")
BLOCK = re.compile(r"(<!-- benchmark:(?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

NO_GPU = "**Nothing here has run on a GPU yet.**"
NOT_MEASURED = "**Not measured yet.**"
PICTURES = {"gpu": "gpu-roofline.png", "gpu-logits": "gpu-logits-roofline.png"}
"""Results on a GPU -> their picture."""

Row = dict[str, Any]
Case = dict[str, Row]
"""Implementation -> its row."""

OPS = {
    "forward": "forward to per-sequence sums",
    "stats": "the same with `KLStats`",
    "one-read": "forward + backward, one read",
    "two-pass": "forward + backward, two passes",
    "limits": "k3 with limits, forward to per-sequence sums",
    "weights": "k3 with importance weights, forward to per-sequence sums",
    "limits-one-read": "k3 with limits, sum, forward + backward, one read",
    "weights-one-read": "k3 with importance weights, sum, forward + backward, one read",
    "k2-one-read": "k3 with k2's gradient, sum, forward + backward, one read",
    "sum-one-read": "k3, sum, forward + backward, one read",
    "kl": "KL forward",
    "kl-one-read": "mean KL, forward + backward, one read",
    "kl-two-pass": "KL, forward + backward, two passes",
    "jsd-one-read": "mean JSD, forward + backward, one read",
    "logprob": "log-prob forward",
    "logprob-entropy": "log-prob and entropy forward",
    "logprob-two-pass": "log-prob, forward + backward",
}
HEADINGS = {
    "tokens": "k3, random boolean mask",
    "options": "random boolean mask",
    "logits": "tokens x vocabulary, every token kept",
}
"""Suite -> what its ops are of."""
SHOWN_OPS = ("forward", "one-read")
"""What docs/measured.md shows of a GPU's results over log-probs; ``gpu.md`` has all."""
SUMMARY = {
    "cpu": ("forward", "one-read"),
    "cpu-logits": ("kl", "kl-one-read", "logprob", "logprob-two-pass"),
}
"""Results on a CPU -> the ops of the README's table."""
LAUNCH_TOKENS = 1 << 18
"""Cases of fewer tokens are about launches, not about bytes."""

BACKENDS = {"native": "CUDA C++", "triton": "Triton"}
RIVALS = {
    "eager": "eager",
    "torch.compile": "`torch.compile`",
    "torch.compile max-autotune": "max-autotune",
}
SOME_RIVALS = {
    "selective": "selective",
    "Liger": "Liger",
    "TRL": "TRL's Triton",
    "plain k3": "klfast's plain k3",
    "token-mean": "klfast's `token-mean`",
    "klfast in place": "klfast's `inplace_backward`",
}
"""Of some ops, or where they are installed."""


COMPARED = {"tokens": (), "logits": ("eager", "torch.compile")}
"""Suite -> whose memory stands beside klfast's in a GPU's table."""


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


def suite_of(data: dict[str, Any]) -> str:
    suite: str = data["conditions"].get("suite", "tokens")
    return suite


def rivals_of(cases: Sequence[Case], always: Sequence[str]) -> dict[str, str]:
    """Name -> title of those that a table has a column for: some always, others where they are."""
    named = {**RIVALS, **SOME_RIVALS}
    return {n: t for n, t in named.items() if n in always or any(n in case for case in cases)}


def ratios(case: Case, names: Iterable[str]) -> list[str]:
    """How many times klfast's time each takes; nothing for one that is not there."""
    return [times(case[name]["ratio"]) if name in case else "" for name in names]


def peaks(case: Case, names: Iterable[str]) -> str:
    """Megabytes above the inputs, of each."""
    known = [case.get(name, {}).get("peak_bytes") for name in names]
    return " / ".join("-" if peak is None else number(peak / 1e6) for peak in known)


def cpu_table(data: dict[str, Any]) -> str:
    """Time, ratios and bandwidth of each case, and memory where it was measured."""
    cases = cases_of(data)
    rows = [case["klfast"] for case in cases]
    several = len({tuple(row["shape"]) for row in rows}) > 1
    rivals = rivals_of(cases, always=("eager", "torch.compile"))
    with_memory = any(row.get("peak_bytes") is not None for row in rows)
    with_floor = any(row.get("floor_ratio") is not None for row in rows)
    lines = [
        [
            label(row, several),
            row["dtype"],
            number(row["median_ms"]),
            *ratios(case, rivals),
            "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f}",
            share(row["read_share"]),
            *([number(row.get("floor_ratio"))] * with_floor),
            *([peaks(case, ("klfast", "eager", "torch.compile"))] * with_memory),
        ]
        for case, row in zip(cases, rows, strict=True)
    ]
    headings = [HEADINGS[suite_of(data)], "dtype", "klfast, ms"]
    headings += [f"vs {title}" for title in rivals.values()]
    headings += ["GB/s", "of read bandwidth"]
    headings += ["times a read, and a fill of the gradient"] * with_floor
    headings += ["MB above the inputs: klfast / eager / `torch.compile`"] * with_memory
    return table(headings, lines)


def state(where: dict[str, Any]) -> str:
    """The machine's state, in a sentence: its memory's, and the load; of results that say it."""
    if "memory" not in where:
        return ""
    others = where["others_share"]
    load = "is not known" if others is None else f"was {100 * others:.1f} % of the cores' time"
    allowed = " (a load was allowed)" if where["load_allowed"] else ""
    return f"Freed memory: {where['memory']}. What other processes took {load}{allowed}."


def cpu_block(data: dict[str, Any]) -> str:
    """The table of a CPU's results; of logits, where, when and how too."""
    if suite_of(data) != "logits":
        return "\n\n".join(filter(None, (cpu_table(data), state(data["conditions"]))))
    where = data["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    shapes = ", ".join(dict.fromkeys(str(row["shape"]) for row in data["rows"]))
    return (
        f"{cpu_table(data)}\n\n"
        f"{shapes}, {where['device']}, {where['threads']} threads; {versions}; commit "
        f"{where['commit']}, {where['date'][:10]}; medians of {where['rounds']} interleaved "
        f"rounds, inputs {where['inputs']}, checked against float64 first; logits with a deviation "
        f"of {where['logits_std']} nats, {where['log_ratio_std']} apart. Memory: the peak of what "
        "is resident, each in a process of its own. selective: eager PyTorch without a log_softmax "
        "of all rows at once, as TRL's `selective_log_softmax`. "
        f"{state(where)}".rstrip()
    )


def memory_of(where: dict[str, Any]) -> str:
    """The state of the memory as the end of a list of conditions; nothing where none is said."""
    return f", freed memory {where['memory']}" if "memory" in where else ""


def summary(parts: Sequence[dict[str, Any]]) -> str:
    """The README's table of a CPU: time, and times those of eager and ``torch.compile``."""
    pairs: dict[str, dict[str, Case]] = {}
    for name, data in zip(SUMMARY, parts, strict=True):
        estimator = "k3 " if suite_of(data) == "tokens" else ""
        for case in cases_of(data):
            row = case["klfast"]
            if row["op"] in SUMMARY[name]:
                what = estimator + label(row, with_shape=True)
                pairs.setdefault(what, {})[row["dtype"]] = case
    rivals = {name: RIVALS[name] for name in ("eager", "torch.compile")}
    dtypes = list(dict.fromkeys(dtype for cases in pairs.values() for dtype in cases))
    headings = ["on a CPU"]
    for dtype in dtypes:
        headings += [f"{dtype}, ms", *(f"vs {title}" for title in rivals.values())]
    lines = []
    for what, cases in pairs.items():
        line = [what]
        for dtype in dtypes:
            line += [number(cases[dtype]["klfast"]["median_ms"]), *ratios(cases[dtype], rivals)]
        lines.append(line)
    wheres = [
        f"{suite}: {where['device']}, {where['threads']} threads, torch "
        f"{where['versions']['torch']}, {where['date'][:10]}, medians of {where['rounds']} "
        f"interleaved rounds, inputs {where['inputs']}" + memory_of(where)
        for suite, where in zip(
            ("Log-probs", "Logits"), (data["conditions"] for data in parts), strict=True
        )
    ]
    return (
        f"{table(headings, lines)}\n\n{'. '.join(wheres)}. [docs/measured.md](docs/measured.md) "
        "has all conditions, bandwidths, memory, and the goals that were missed."
    )


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
        f"rounds, results compared first{memory_of(where)}. "
        "`GRPOTrainer._compute_loss` is TRL's whole loss around a model that costs nothing; ROLL's "
        "and trlx's side is their formula in eager PyTorch."
    )


def ours(case: Case) -> Row:
    """The row of klfast's first backend, to which ratios are."""
    return next(case[name] for name in BACKENDS if name in case)


def microseconds(row: Row | None, kind: str) -> str:
    return number(None if row is None or row[kind] is None else row[kind] * 1e3)


def kernel_headings(suite: str, rivals: dict[str, str]) -> list[str]:
    """The columns of a GPU's table."""
    return [
        HEADINGS[suite],
        "dtype",
        *(f"{title}, us" for title in BACKENDS.values()),
        *(f"vs {title}" for title in rivals.values()),
        *("GB/s", "of read", "of copy"),
        " / ".join(["MB above inputs", *(RIVALS[name] for name in COMPARED[suite])]),
    ]


def kernel_table(cases: Sequence[Case], suite: str = "tokens") -> str:
    """Times on the device with cold caches; of rivals, how many times klfast's first backend's."""
    rivals = rivals_of(cases, always=tuple(RIVALS))
    lines = []
    for case in cases:
        row = ours(case)
        lines.append(
            [
                label(row, with_shape=True),
                row["dtype"],
                *(microseconds(case.get(name), "kernel_ms") for name in BACKENDS),
                *ratios(case, rivals),
                number(row["gb_per_s"]),
                share(row["read_share"]),
                share(row["copy_share"]),
                peaks(case, (row["impl"], *COMPARED[suite])),
            ]
        )
    return table(kernel_headings(suite, rivals), lines)


def launch_table(cases: Sequence[Case]) -> str:
    """Microseconds of a call in a CUDA graph, and of the host to queue it."""
    names = {**BACKENDS, **rivals_of(cases, always=tuple(RIVALS))}
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


def is_shown(row: Row, suite: str) -> bool:
    """Whether docs/measured.md shows a case that was measured on a GPU."""
    if suite == "logits":
        return bool(row["dtype"] == "bf16")
    return row["op"] in SHOWN_OPS and not row["packed"]


def gpu_block(data: dict[str, Any], only_some: bool = True) -> str:
    """The measurements on a GPU: those that docs/measured.md shows, or all."""
    suite = suite_of(data)
    cases = cases_of(data)
    if only_some:
        cases = [case for case in cases if is_shown(ours(case), suite)]
    small = [c for c in cases if ours(c)["shape"][0] * ours(c)["shape"][1] < LAUNCH_TOKENS]
    parts = [kernel_table(cases, suite)]
    if small or not only_some:
        parts.append(launch_table(small if only_some else cases))
    parts.append(gpu_conditions(data))
    left_out = {**data.get("failed", {}), **data["skipped"]}
    parts += [f"Left out: {case}: {reason}." for case, reason in left_out.items()]
    return "\n\n".join(parts)


def gpu_results(results: Path) -> dict[str, dict[str, Any]]:
    """Name -> what was measured on a GPU."""
    found = {name: load(results / f"{name}.json") for name in PICTURES}
    return {name: data for name, data in found.items() if data is not None}


def gpu_part(results: Path) -> str:
    """The part of docs/measured.md on GPUs: what was measured, and what is pending."""
    from benchmarks import pending

    measured = gpu_results(results)
    parts = [] if measured else [NO_GPU]
    for name, (suite, cases) in pending.planned().items():
        if name in measured:
            picture = f"![GB/s by bytes](../benchmarks/results/{PICTURES[name]})"
            parts += [gpu_block(measured[name]), picture]
        else:
            parts.append(pending.block(suite, cases))
    return "\n\n".join(parts)


def gpu_summary(results: Path) -> str:
    """The README's sentence on GPUs."""
    wheres = [data["conditions"] for data in gpu_results(results).values()]
    measured = dict.fromkeys(f"{where['device']}, {where['date'][:10]}" for where in wheres)
    if not measured:
        from benchmarks import pending

        count = sum(len(cases) for _, cases in pending.planned().values())
        return f"{NO_GPU} The [{count} cases](docs/measured.md#on-a-gpu) of one are *pending*."
    return f"Measured on: {'; '.join(measured)}. See [docs/measured.md](docs/measured.md#on-a-gpu)."


def machine_code_table(data: dict[str, Any]) -> str:
    """The counts of benchmarks/sass.py."""
    chips = list(data["chips"])
    head = ["case", "loops", "Triton's", "in all", "bound"]
    head += ["registers", "warps", "KB in flight", *chips]
    rows = [
        [
            name,
            f"{case['loop']:.1f}",
            f"{data['triton'][name]:.1f}" if name in data["triton"] else "",
            f"{case['whole']:.1f}",
            f"{case['bound']:.1f}",
            str(case["registers"]),
            str(case["warps"]),
            f"{case['in_flight']:.0f}",
            *(f"{100 * case['share'][chip]:.0f} %" for chip in chips),
        ]
        for name, case in data["cases"].items()
    ]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\nAssumed: {'; '.join(data['assumptions'])}."


def load(path: Path) -> dict[str, Any] | None:
    """A results file; None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def blocks(results: Path) -> dict[str, str]:
    """Name -> text of the pages' generated parts."""
    texts = {"cpu-logits": NOT_MEASURED, "summary": NOT_MEASURED}
    for path in results.glob("cpu*.json"):
        texts[path.stem] = cpu_block(json.loads(path.read_text()))
    drop_in = sorted(results.glob("drop-in-*.json"), reverse=True)
    if drop_in:
        texts["drop-in"] = drop_in_table([json.loads(path.read_text()) for path in drop_in])
    parts = [load(results / f"{name}.json") for name in SUMMARY]
    known = [part for part in parts if part is not None]
    if len(known) == len(SUMMARY):
        texts["summary"] = summary(known)
    machine_code = load(results / "sass-sm90.json")
    if machine_code is not None:
        texts["machine-code"] = machine_code_table(machine_code)
    texts["gpu"] = gpu_part(results)
    texts["gpu-summary"] = gpu_summary(results)
    return texts


def rewrite(text: str, texts: dict[str, str]) -> str:
    """A page with its generated parts brought up to date.

    Raises:
        SystemExit: it names a part that has no results.
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
    labelled: dict[str, Any] = {}
    for panel in axes.flat:
        handles, labels = panel.get_legend_handles_labels()
        labelled |= dict(zip(labels, handles, strict=True))
    figure.legend(labelled.values(), labelled.keys(), loc="center right", frameon=False, fontsize=9)
    figure.suptitle(f"{data['conditions']['device']}, kernels with cold caches")
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
    "selective": ("selective", "#56B4E9", "<", "--"),
    "Liger": ("Liger", "#F0E442", "P", "--"),
    "TRL": ("TRL's Triton", "black", "X", "--"),
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
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    arguments = parser.parse_args(argv)
    parts = blocks(arguments.results)
    texts = {page: rewrite(page.read_text(), parts) for page in arguments.pages}
    gpu = gpu_results(arguments.results)
    if gpu:
        everything = [gpu_block(data, only_some=False) for data in gpu.values()]
        texts[arguments.results / "gpu.md"] = "\n\n".join(everything) + "\n"
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.name} is not what the results say: run python -m benchmarks.report")
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path])
        print(f"wrote {path}")
    for name, data in gpu.items():
        draw(data, arguments.results / PICTURES[name])
        print(f"wrote {arguments.results / PICTURES[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
