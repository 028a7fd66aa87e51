"""Results as tables in Markdown: of a CPU, of a GPU, of frameworks' functions, of machine code.

A table is a list of columns. A column has a heading and a function from a case to its text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from benchmarks.linear import TORCH_CHUNKS, TORCHS
from benchmarks.timing import GRAPH_CALLS

Row = dict[str, Any]
Case = dict[str, Row]
"""Implementation -> its row."""
Column = tuple[str, Callable[[Case], str]]
"""A heading, and the text of a case's cell."""

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
    "far-2": "k3 forward, 2 % of the tokens beyond 1 nat",
    "far-10": "k3 forward, 10 % of the tokens beyond 1 nat",
    "kl": "KL forward",
    "kl-one-read": "mean KL, forward + backward, one read",
    "kl-two-pass": "KL, forward + backward, two passes",
    "jsd-one-read": "mean JSD, forward + backward, one read",
    "logprob": "log-prob forward",
    "logprob-entropy": "log-prob and entropy forward",
    "logprob-two-pass": "log-prob, forward + backward",
    "topk": "with a bucket for the rest, forward",
    "topk-loss": "with a bucket for the rest, mean, forward + backward",
    "topk-drop-loss": "without the rest, mean, forward + backward",
    "linear-kl-loss": "mean KL, trained head",
    "linear-kl-frozen": "KL per token, frozen head",
    "linear-logprob": "log-prob per token, trained head",
    "step-grpo": "GRPO, the sampled tokens' log-probs and k3",
    "step-distillation": "distillation, exact KL",
}
HEADINGS = {
    "tokens": "k3, random boolean mask",
    "options": "random boolean mask",
    "logits": "tokens x vocabulary, every token kept",
    "topk": "tokens x vocabulary, a teacher's top 64",
    "linear": "tokens x hidden size x vocabulary, forward + backward",
    "step": "sequences x tokens x hidden size x vocabulary",
}
"""Suite -> what its ops are of."""
SHOWN_OPS, HIDDEN_SHAPES = ("forward", "one-read"), ([64, 2048], [256, 8192], [2048, 32000])
"""Which of a GPU's results docs/measured.md shows over log-probs, and leaves to ``gpu.md``."""
SUMMARY = {
    "cpu": ("forward", "one-read"),
    "cpu-logits": ("kl", "kl-one-read", "logprob", "logprob-two-pass"),
}
"""Results on a CPU -> the ops of the README's table."""
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
    "verl": "verl's log-probs",
    "token_logprobs": "klfast's `token_logprobs`",
    "held logits": "klfast over held logits",
    "checkpoint": "klfast under `checkpoint`",
    TORCHS: "`linear_cross_entropy`",
    "products": "bare matmuls",
}
"""The rivals of some ops, or where they are installed."""


COMPARED: dict[str, tuple[str, ...]] = {
    "tokens": (),
    "options": (),
    "logits": ("eager", "torch.compile"),
    "topk": ("eager", "torch.compile"),
    "linear": ("eager", "held logits", "checkpoint", TORCHS),
    "step": ("eager", "held logits"),
}
"""Suite -> whose memory stands beside klfast's."""


OVER_LOGITS = {
    "logits": "`selective` is eager PyTorch without a log_softmax of all rows at once, as in TRL's "
    "`selective_log_softmax`.",
    "topk": "Eager is log_softmax in fp32, gathered. verl's is gathered logits minus their "
    "logsumexp in fp32, as verl 0.9 with `use_chunked_topk`. Without the rest it is verl's loss "
    "without its clamp. `token_logprobs` takes one token id per token, forward or forward and "
    "backward like the case.",
    "linear": "Eager is log_softmax in fp32 of the logits of all tokens. klfast over held logits "
    "reads the same logits. Under `checkpoint` it reads the logits of as many tokens as klfast "
    "from hidden states takes at a time. `linear_cross_entropy` is torch's own, at the number of "
    f"tokens that was fastest of {', '.join(map(str, TORCH_CHUNKS))}. Bare matmuls are those that "
    "every method needs, of all tokens at once or of as many as klfast takes, whichever was "
    "faster. Their results are fresh memory, as gradients are.",
    "step": "A step is the forward pass of the policy and of its reference, transformers of 8 "
    "layers, then the loss and the backward of the policy. The models alone make both models' "
    "logits and the policy's gradients without a loss. Eager is log_softmax in fp32 of the logits "
    "of all tokens. klfast over held logits reads the same logits, and klfast alone works from "
    "hidden states.",
}
"""Suite -> its rivals, in words."""


def rival_of(candidate: str) -> str:
    """The name of a candidate without the size that it was timed at."""
    return TORCHS if candidate.startswith(TORCHS) else candidate


def cases_of(data: dict[str, Any]) -> list[Case]:
    """The cases in their order, each as its rows by implementation; of one that was timed at
    several sizes, ``NAME SIZE``, the fastest as ``NAME``.
    """
    cases: dict[str, Case] = {}
    for row in data["rows"]:
        case = cases.setdefault(row["case"], {})
        name = rival_of(row["impl"])
        if name not in case or row["ratio"] < case[name]["ratio"]:
            case[name] = row
    return list(cases.values())


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    heading, *rows = [f"| {' | '.join(line)} |" for line in (headings, *lines)]
    return "\n".join([heading, "|" + "---|" * len(headings), *rows])


def table_of(cases: Iterable[Case], columns: Sequence[Column]) -> str:
    """A line for each case."""
    lines = ([cell(case) for _, cell in columns] for case in cases)
    return table([heading for heading, _ in columns], lines)


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


def label(row: Row, with_shape: bool = True) -> str:
    """The op of a case, and its inputs."""
    layout = "packed " if row.get("packed") else ""
    return f"{layout}{row['shape']} {OPS[row['op']]}" if with_shape else OPS[row["op"]]


def suite_of(data: dict[str, Any]) -> str:
    suite: str = data["conditions"].get("suite", "tokens")
    return suite


def titles(names: Iterable[str]) -> list[str]:
    """The titles of rivals."""
    return [{**RIVALS, **SOME_RIVALS}[name] for name in names]


def rivals_of(cases: Sequence[Case], always: Sequence[str]) -> list[Column]:
    """How many times klfast's time each rival takes: some always, others where they are."""
    named = {**RIVALS, **SOME_RIVALS}
    there = [n for n in named if n in always or any(n in case for case in cases)]
    return [(f"vs {named[name]}", partial(ratio, name=name)) for name in there]


def ratio(case: Case, name: str) -> str:
    """Nothing for one that is not there."""
    return times(case[name]["ratio"]) if name in case else ""


def peaks(case: Case, names: Iterable[str]) -> str:
    """Megabytes above the inputs, of each."""
    known = [case.get(name, {}).get("peak_bytes") for name in names]
    return " / ".join("-" if peak is None else number(peak / 1e6) for peak in known)


# A CPU


def cpu_table(data: dict[str, Any]) -> str:
    """Time, ratios and bandwidth of each case, and memory where it was measured."""
    cases, suite = cases_of(data), suite_of(data)
    if suite == "step":
        return table_of(cases, STEP_COLUMNS)
    rows = [case["klfast"] for case in cases]
    several = len({tuple(row["shape"]) for row in rows}) > 1
    columns: list[Column] = [
        (HEADINGS[suite], lambda case: label(case["klfast"], several)),
        ("dtype", lambda case: case["klfast"]["dtype"]),
        ("klfast, ms", lambda case: number(case["klfast"]["median_ms"])),
        *rivals_of(cases, always=("eager", "torch.compile")),
    ]
    if any(row["gb_per_s"] is not None for row in rows):
        columns += [
            ("GB/s", lambda case: gigabytes(case["klfast"]["gb_per_s"])),
            ("of read bandwidth", lambda case: share(case["klfast"]["read_share"])),
        ]
        if any(row.get("floor_ratio") is not None for row in rows):
            heading = "times a read, and a fill of the gradient"
            columns.append((heading, lambda case: number(case["klfast"].get("floor_ratio"))))
    if any(row.get("peak_bytes") is not None for row in rows):
        compared = COMPARED[suite]
        heading = f"MB above the inputs: {' / '.join(['klfast', *titles(compared)])}"
        columns.append((heading, lambda case: peaks(case, ("klfast", *compared))))
    return table_of(cases, columns)


def _of_steps(name: str) -> list[Column]:
    """The time of a step, and the share of it that the models alone do not take."""
    title = {"klfast": "klfast", **RIVALS, **SOME_RIVALS}[name]

    def beyond_the_models(case: Case) -> str:
        return share(1 - case["products"]["median_ms"] / case[name]["median_ms"])

    return [
        (f"{title}, ms", lambda case: number(case[name]["median_ms"])),
        ("log-probs and KL", beyond_the_models),
    ]


STEP_COLUMNS: list[Column] = [
    (HEADINGS["step"], lambda case: label(case["klfast"])),
    ("models alone, ms", lambda case: number(case["products"]["median_ms"])),
    *itertools.chain.from_iterable(map(_of_steps, ("eager", "held logits", "klfast"))),
    (
        "MB above the inputs: eager / klfast over held logits / klfast",
        lambda case: peaks(case, ("eager", "held logits", "klfast")),
    ),
]


def gigabytes(speed: float | None) -> str:
    return "" if speed is None else f"{speed:.1f}"


def versions(*wheres: dict[str, Any]) -> str:
    """The names and versions in conditions, each once."""
    found = (f"{name} {at}" for where in wheres for name, at in where["versions"].items())
    return ", ".join(dict.fromkeys(found))


def state(where: dict[str, Any]) -> str:
    """A sentence with the state of the machine's memory and its load, if the results have them."""
    if "memory" not in where:
        return ""
    others = where["others_share"]
    share = "an unknown share" if others is None else f"{100 * others:.1f} %"
    allowed = " (a load was allowed)" if where["load_allowed"] else ""
    return (
        f"Freed memory: {where['memory']}. "
        f"Other processes took {share} of the cores' time{allowed}."
    )


def cpu_block(data: dict[str, Any]) -> str:
    """The table of a CPU's results; over logits, where, when and how too."""
    where = data["conditions"]
    if suite_of(data) not in OVER_LOGITS:
        return "\n\n".join(filter(None, (cpu_table(data), state(where))))
    shapes = ", ".join(dict.fromkeys(str(row["shape"]) for row in data["rows"]))
    return (
        f"{cpu_table(data)}\n\n"
        f"{shapes}, {where['device']}, {where['threads']} threads, {where['instruction_set']}, "
        f"{versions(where)}, commit {where['commit']}, {where['date'][:10]}, {where['rounds']} "
        f"rounds, inputs {where['inputs']}. The logits have a deviation of {where['logits_std']} "
        f"nats and are {where['log_ratio_std']} apart. {OVER_LOGITS[suite_of(data)]} "
        f"{state(where)}".rstrip()
    )


def by_instruction_set(results: Iterable[dict[str, Any]]) -> str:
    """The time of each case over the time of a read and a fill, for each dtype and set."""
    lines: dict[str, dict[str, str]] = {}
    for data in results:
        for case in cases_of(data):
            row = case["klfast"]
            if row["floor_ratio"] is not None:
                kind = f"{row['dtype']}, {data['conditions']['instruction_set']}"
                lines.setdefault(label(row), {})[kind] = number(row["floor_ratio"])
    found = dict.fromkeys(kind for line in lines.values() for kind in line)
    kinds = sorted(found, key=lambda kind: kind.partition(",")[0], reverse=True)
    return table(
        ["times a read, and a fill of the gradient", *kinds],
        [[what, *(line.get(kind, "") for kind in kinds)] for what, line in lines.items()],
    )


def memory_of(where: dict[str, Any]) -> str:
    """The state of the memory as the end of a list of conditions; nothing where none is said."""
    return f", freed memory {where['memory']}" if "memory" in where else ""


def by_dtype(
    cases: Iterable[tuple[tuple[str, ...], Case]],
    headings: Sequence[str],
    columns: Sequence[Column],
) -> str:
    """A line for each label, and in it for each dtype the columns of that case.

    In their headings ``{}`` is the dtype.
    """
    lines: dict[tuple[str, ...], dict[str, Case]] = {}
    for what, case in cases:
        lines.setdefault(what, {})[case["klfast"]["dtype"]] = case
    dtypes = list(dict.fromkeys(dtype for line in lines.values() for dtype in line))
    return table(
        [*headings, *(each.format(dtype) for dtype in dtypes for each, _ in columns)],
        [
            [*what, *(cell(line[dtype]) for dtype in dtypes for _, cell in columns)]
            for what, line in lines.items()
        ],
    )


def summary(
    parts: Sequence[dict[str, Any]], shown: Iterable[Collection[str]] = SUMMARY.values()
) -> str:
    """A CPU's table for the README: klfast's time, and its ratios to eager and ``torch.compile``.

    ``shown`` has the ops of each part.
    """
    cases, wheres = [], []
    for data, ops in zip(parts, shown, strict=True):
        estimator = "k3 " if suite_of(data) == "tokens" else ""
        for case in cases_of(data):
            if case["klfast"]["op"] in ops:
                cases.append(((estimator + label(case["klfast"]),), case))
        where = data["conditions"]
        wheres.append(
            f"{'Log-probs' if estimator else 'Logits'} were measured on {where['device']}, "
            f"{where['threads']} threads, torch {where['versions']['torch']}, commit "
            f"{where['commit']}, {where['date'][:10]}: medians of {where['rounds']} interleaved "
            f"rounds, inputs {where['inputs']}{memory_of(where)}"
        )
    columns: list[Column] = [
        ("{}, ms", lambda case: number(case["klfast"]["median_ms"])),
        *rivals_of((), always=("eager", "torch.compile")),
    ]
    return f"{by_dtype(cases, ['on a CPU'], columns)}\n\n{'. '.join(wheres)}."


def drop_in_table(parts: Sequence[dict[str, Any]]) -> str:
    """Frameworks' own functions and klfast's in their place: milliseconds, and how many times."""
    cases = [
        ((case["klfast"]["framework"], case["klfast"]["what"]), case)
        for data in parts
        for case in cases_of(data)
    ]
    columns: list[Column] = [
        ("theirs {}, ms", lambda case: number(case["framework"]["median_ms"])),
        ("klfast, ms", lambda case: number(case["klfast"]["median_ms"])),
        ("faster", lambda case: times(case["framework"]["ratio"])),
    ]
    where = parts[0]["conditions"]
    return (
        f"{by_dtype(cases, ['framework', 'function'], columns)}\n\n"
        f"{parts[0]['rows'][0]['shape']}, {where['device']}, {where['threads']} threads, "
        f"{versions(*(data['conditions'] for data in parts))}, commit "
        f"{where['commit']}, {where['date'][:10]}. Times are medians of {where['rounds']} "
        f"interleaved rounds, and results were compared first{memory_of(where)}. "
        "`GRPOTrainer._compute_loss` is TRL's whole loss around a model that costs nothing. ROLL's "
        "and trlx's side is their formula in eager PyTorch."
    )


# A GPU


def ours(case: Case) -> Row:
    """The row of klfast's first backend, to which ratios are."""
    return next(case[name] for name in BACKENDS if name in case)


def microseconds(case: Case, name: str, kind: str) -> str:
    value = case.get(name, {}).get(kind)
    return number(None if value is None else value * 1e3)


def kernel_columns(suite: str, cases: Sequence[Case], always: Sequence[str] = ()) -> list[Column]:
    """Times on the device with cold caches; of rivals, how many times klfast's first backend's.
    Bandwidth where memory bounds the suite's ops, and not matmuls.
    """
    columns: list[Column] = [
        (HEADINGS[suite], lambda case: label(ours(case))),
        ("dtype", lambda case: ours(case)["dtype"]),
    ]
    for name, title in BACKENDS.items():
        columns.append((f"{title}, us", partial(microseconds, name=name, kind="kernel_ms")))
    columns += rivals_of(cases, always)
    if suite != "linear":
        columns += [
            ("GB/s", lambda case: number(ours(case)["gb_per_s"])),
            ("of read", lambda case: share(ours(case)["read_share"])),
        ]
    compared = COMPARED[suite]
    memory = " / ".join(["MB above inputs", *titles(compared)])
    return [*columns, (memory, lambda case: peaks(case, (ours(case)["impl"], *compared)))]


def kernel_table(cases: Sequence[Case], suite: str = "tokens") -> str:
    return table_of(cases, kernel_columns(suite, cases, always=("eager", "torch.compile")))


def launch_table(cases: Sequence[Case]) -> str:
    """Microseconds of a call in a CUDA graph, and of the host to queue it."""

    def pair(case: Case, name: str) -> str:
        kinds = ("graph_ms", "host_ms")
        return " / ".join(microseconds(case, name, kind) or "-" for kind in kinds)

    rivals = {**RIVALS, **{n: t for n, t in SOME_RIVALS.items() if any(n in c for c in cases)}}
    columns: list[Column] = [
        ("us: in a CUDA graph / of the host", lambda case: label(ours(case))),
        ("dtype", lambda case: ours(case)["dtype"]),
        *((title, partial(pair, name=name)) for name, title in {**BACKENDS, **rivals}.items()),
    ]
    return table_of(cases, columns)


GPU_METHOD = (
    "Times are of the device, and medians of rounds with L2 flushed, with all candidates "
    "interleaved in one process. Results were checked against float64 first. Ratios, GB/s (the "
    "least bytes of the case), shares and memory are of the first backend in the table. In a "
    f"graph of {GRAPH_CALLS} calls small inputs stay in L2."
)


def gpu_conditions(data: dict[str, Any]) -> str:
    """The machine, time and settings of the measurement, in one paragraph."""
    where = data["conditions"]
    running = ", ".join(f"{name} {value}" for name, value in (where["clocks"] or {}).items())
    ceilings = where["ceilings"]
    return (
        f"The device is {where['device']}. "
        + (f"nvidia-smi said {running}. " if running else "")
        + f"The versions are {versions(where)}, commit {where['commit']}. It took "
        f"{where['rounds']} rounds on {where['date'][:10]}. The log-ratios have a deviation of "
        f"{where['log_ratio_std']} nats. In the same run a plain read reached "
        f"{ceilings['read_gb_per_s']:.0f} GB/s and a copy {ceilings['copy_gb_per_s']:.0f} GB/s, "
        f"and no call at all {ceilings['nothing_us']:.2g} us."
    )


def is_shown(row: Row, suite: str) -> bool:
    """True if docs/measured.md shows a case that was measured on a GPU."""
    chosen = row["dtype"] == "bf16" if suite in OVER_LOGITS else row["op"] in SHOWN_OPS
    return bool(chosen and row["shape"] not in HIDDEN_SHAPES and not row["packed"])


def gpu_summary(parts: Sequence[dict[str, Any]]) -> str:
    """The README's GPU table: the largest shape of each suite in bf16, and the GPUs."""
    columns: list[Column] = [
        ("us", lambda case: number(1e3 * ours(case)["kernel_ms"])),
        *rivals_of((), always=("eager", "torch.compile")),
        ("of a read's speed", lambda case: share(ours(case)["read_share"])),
    ]
    lines, wheres = [], []
    for data in parts:
        shown = [case for case in cases_of(data) if is_shown(ours(case), suite_of(data))]
        most = max((math.prod(ours(case)["shape"]) for case in shown), default=0)
        estimator = "k3 " if suite_of(data) == "tokens" else ""
        for case in shown:
            if math.prod(ours(case)["shape"]) == most and ours(case)["dtype"] == "bf16":
                lines.append([estimator + label(ours(case)), *(cell(case) for _, cell in columns)])
        where = data["conditions"]
        torch = where["versions"]["torch"]
        wheres.append(
            f"{where['device']}, torch {torch}, commit {where['commit']}, {where['date'][:10]}"
        )
    headings = ["on a GPU, bf16", *(heading for heading, _ in columns)]
    return f"{table(headings, lines)}\n\nThey were measured on {'; '.join(dict.fromkeys(wheres))}."


def gpu_table(data: dict[str, Any], only_some: bool = False) -> str:
    """Times on the device, of the cases of docs/measured.md with ``only_some``; else all cases,
    and the times of launches.
    """
    suite = suite_of(data)
    cases = [c for c in cases_of(data) if not only_some or is_shown(ours(c), suite)]
    launches = [] if only_some else [launch_table(cases)]
    return "\n\n".join([kernel_table(cases, suite), *launches])


def steps_table(steps: Iterable[dict[str, Any]]) -> str:
    """The steps of ``make gpu-check``."""
    lines = [[s["name"], s["status"], f"{s['seconds']:.0f}", s["detail"]] for s in steps]
    return table(("step", "outcome", "s", ""), lines)


def gpu_block(data: dict[str, Any], only_some: bool = True) -> str:
    """Joins the tables, the conditions and the reasons for missing cases."""
    cases: dict[str, list[str]] = {}
    for case, reason in {**data.get("failed", {}), **data["skipped"]}.items():
        cases.setdefault(reason, []).append(case)
    reasons = [f"Left out, as {reason}: {', '.join(names)}." for reason, names in cases.items()]
    return "\n\n".join([gpu_table(data, only_some), gpu_conditions(data), *reasons])


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
    assumed = "".join(f"\n- {each}" for each in data["assumptions"])
    return f"{table(head, rows)}\n\nAssumed:\n{assumed}"
