"""Results as tables in Markdown.

A column is data: its heading, whose row it reads, which number of the row, and how that is written.
A table leaves out the columns without a number.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.linear import TORCH_CHUNKS, TORCHS
from benchmarks.timing import GRAPH_CALLS

Row = dict[str, Any]
Case = dict[str, Row]  # implementation -> its row
OURS = "klfast"  # klfast's row: on a GPU that of its first backend, to which ratios are

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
    "linear-grpo": "GRPO's loss, trained head",
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
SUMMARY = {
    "cpu": ("forward", "one-read"),
    "cpu-logits": ("kl", "kl-one-read", "logprob", "logprob-two-pass"),
}
"""Results on a CPU -> the ops of the README's table."""
BACKENDS = {"native": "CUDA C++", "triton": "Triton"}
MAIN_RIVALS = {"eager": "eager", "torch.compile": "`torch.compile`"}
RIVALS = {
    **MAIN_RIVALS,
    "torch.compile max-autotune": "max-autotune",
    "selective": "selective",
    "Liger": "Liger",
    "TRL": "TRL's Triton",
    "cut-cross-entropy": "cut-cross-entropy",
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
IN_MEMORY = ("eager", "torch.compile", "held logits", "checkpoint", TORCHS)
"""The rivals whose memory stands beside klfast's."""

WORDS = {
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


def number(value: float) -> str:
    """Three digits, never an exponent."""
    if 0 < value < 1e-3:
        return "<0.001"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def times(ratio: float) -> str:
    """How many times, in two digits."""
    return f"{ratio:.2g}x" if ratio < 99.5 else f"{ratio:.0f}x"


def share(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


class Column(NamedTuple):
    """The heading, the key of a row, whose row it is, and how its number is written."""

    heading: str
    key: str
    impl: str = OURS
    text: Callable[[Any], str] = number

    def cell(self, case: Case) -> str:
        """The text of a case. It is empty if there is no number."""
        value = case.get(self.impl, {}).get(self.key)
        return "" if value is None else self.text(value)


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    heading, *rows = [f"| {' | '.join(line)} |" for line in (headings, *lines)]
    return "\n".join([heading, "|" + "---|" * len(headings), *rows])


def table_of(cases: Sequence[Case], columns: Sequence[Column]) -> str:
    """A line for each case."""
    full = [column for column in columns if any(map(column.cell, cases))]
    return table([c.heading for c in full], [[c.cell(case) for c in full] for case in cases])


def pivot(cases: Sequence[Case], labels: Sequence[Column], columns: Sequence[Column]) -> str:
    """A line for each label, with the columns of every dtype, which is ``{}`` in their headings."""
    lines: dict[tuple[str, ...], dict[str, Case]] = {}
    for case in cases:
        lines.setdefault(tuple(c.cell(case) for c in labels), {})[case[OURS]["dtype"]] = case
    dtypes = dict.fromkeys(dtype for line in lines.values() for dtype in line)
    headings = [c.heading for c in labels]
    headings += [c.heading.format(dtype) for dtype in dtypes for c in columns]
    return table(
        headings,
        [
            [*label, *(c.cell(line.get(dtype, {})) for dtype in dtypes for c in columns)]
            for label, line in lines.items()
        ],
    )


def versus(rivals: Iterable[str] = RIVALS) -> list[Column]:
    """How many times klfast's time each rival takes."""
    return [Column(f"vs {RIVALS[name]}", "ratio", name, times) for name in rivals]


def label(suite: str) -> list[Column]:
    return [Column(HEADINGS[suite], "label", text=str), Column("dtype", "dtype", text=str)]


BESIDE = [
    Column("GB/s", "gb_per_s"),
    Column("of read", "read_share", text=share),
    Column("times a read, and a fill of the gradient", "floor_ratio"),
    Column("MB above the inputs", "peak_mb"),
    *(Column(f"{RIVALS[name]}, MB", "peak_mb", name) for name in IN_MEMORY),
]
OF_CPU = [Column("klfast, ms", "median_ms"), *versus(), *BESIDE]
OF_STEP = [
    Column("models alone, ms", "median_ms", "products"),
    *(
        column
        for name, title in {**RIVALS, OURS: OURS}.items()
        if name in ("eager", "held logits", OURS)
        for column in (
            Column(f"{title}, ms", "median_ms", name),
            Column("log-probs and KL", "beyond_models", name, share),
            Column("MB above the inputs", "peak_mb", name),
        )
    ),
]
_ON_DEVICE = [Column(f"{title}, us", "kernel_us", name) for name, title in BACKENDS.items()]
OF_GPU = [*_ON_DEVICE, *versus(), *BESIDE]
OF_LAUNCHES = [
    Column(f"{title}, {where}", key, name)
    for name, title in {**BACKENDS, **RIVALS}.items()
    for key, where in (("graph_us", "us in a graph"), ("host_us", "us of the host"))
]


def suite_of(data: dict[str, Any]) -> str:
    suite: str = data["conditions"].get("suite", "tokens")
    return suite


def cases_of(data: dict[str, Any]) -> list[Case]:
    """The cases in their order, each as its rows by implementation.

    Of one that was timed at several sizes, ``NAME SIZE``, the fastest is ``NAME``.
    """
    cases: dict[str, Case] = {}
    for given in data["rows"]:
        row, case = {**given}, cases.setdefault(given["case"], {})
        name = TORCHS if row["impl"].startswith(TORCHS) else row["impl"]
        if name in case and row["ratio"] >= case[name]["ratio"]:
            continue
        case[name] = row
        for key in ("kernel_ms", "graph_ms", "host_ms"):
            if row.get(key) is not None:
                row[key.replace("ms", "us")] = row[key] * 1e3
        if row.get("peak_bytes") is not None:
            row["peak_mb"] = row["peak_bytes"] / 1e6
        if "op" in row:
            layout = "packed " if row.get("packed") else ""
            row["label"] = f"{layout}{row['shape']} {OPS[row['op']]}"
    for case in cases.values():
        if OURS not in case:
            case[OURS] = next(case[name] for name in BACKENDS if name in case)
        if suite_of(data) == "step" and "products" in case:
            for row in case.values():
                row["beyond_models"] = 1 - case["products"]["median_ms"] / row["median_ms"]
    return list(cases.values())


def result_table(data: dict[str, Any]) -> str:
    """All that was measured: on a CPU one table, on a GPU another one of its launches."""
    cases, suite = cases_of(data), suite_of(data)
    if "ceilings" not in data["conditions"]:
        return table_of(cases, [*label(suite), *(OF_STEP if suite == "step" else OF_CPU)])
    return "\n\n".join(table_of(cases, [*label(suite), *each]) for each in (OF_GPU, OF_LAUNCHES))


def versions(*wheres: dict[str, Any]) -> str:
    """The names and versions in conditions, each once."""
    found = (f"{name} {at}" for where in wheres for name, at in where["versions"].items())
    return ", ".join(dict.fromkeys(found))


def memory_of(where: dict[str, Any]) -> str:
    """The state of the memory as the end of a list of conditions. Empty if none is said."""
    return f", freed memory {where['memory']}" if "memory" in where else ""


def conditions(data: dict[str, Any]) -> str:
    """The machine, time and settings of the measurement, in one paragraph."""
    where, suite = data["conditions"], suite_of(data)
    std, ceilings = where.get("logits_std"), where.get("ceilings")
    clocks = ", ".join(f"{name} {value}" for name, value in (where.get("clocks") or {}).items())
    others = where.get("others_share")
    parts = [
        f"{where['device']}, {versions(where)}, commit {where['commit']}, {where['date'][:10]}, "
        f"{where['rounds']} rounds",
        f"{where['threads']} threads, {where['instruction_set']}, inputs {where['inputs']}"
        f"{memory_of(where)}"
        if "threads" in where
        else "",
        f"nvidia-smi said {clocks}" if clocks else "",
        f"The logits have a deviation of {std} nats" if std else "",
        f"The log-ratios have a deviation of {where['log_ratio_std']} nats",
        f"A plain read reached {ceilings['read_gb_per_s']:.0f} GB/s, a copy "
        f"{ceilings['copy_gb_per_s']:.0f} GB/s, and no call at all took "
        f"{ceilings['nothing_us']:.2g} us"
        if ceilings
        else "",
        f"Other processes took {100 * others:.1f} % of the cores' time"
        f"{' (a load was allowed)' if where['load_allowed'] else ''}"
        if others is not None
        else "",
    ]
    return f"{'. '.join(filter(None, parts))}. {WORDS.get(suite, '')}".rstrip()


def left_out(data: dict[str, Any]) -> str:
    """Which cases were not measured, and why."""
    cases: dict[str, list[str]] = {}
    for case, reason in {**data.get("failed", {}), **data["skipped"]}.items():
        cases.setdefault(reason, []).append(case)
    lines = [f"Left out, as {reason}: {', '.join(names)}." for reason, names in cases.items()]
    return "\n\n".join(lines)


def block(data: dict[str, Any]) -> str:
    """The tables of a file of results, its conditions, and what was left out."""
    return "\n\n".join(filter(None, [result_table(data), conditions(data), left_out(data)]))


SUBJECTS = {
    "tokens": "Log-probs",
    "logits": "Logits",
    "topk": "Losses from a teacher's top K",
    "linear": "Hidden states",
}
IN_ALL = [Column("MB", "peak_mb"), Column("eager, MB", "peak_mb", "eager")]


def _summary_label(suite: str) -> str:
    return "k3 " if suite == "tokens" else ""


def summary(
    parts: Sequence[dict[str, Any]],
    shown: Iterable[Collection[str]] = SUMMARY.values(),
    more: Sequence[Column] = (),
) -> str:
    """A CPU's short table: klfast's time, and its ratios to eager and ``torch.compile``.

    ``shown`` has the ops of each part.
    """
    cases, wheres = [], []
    for data, ops in zip(parts, shown, strict=True):
        estimator = _summary_label(suite_of(data))
        for case in cases_of(data):
            case[OURS]["label"] = estimator + case[OURS]["label"]
            cases += [case] if case[OURS]["op"] in ops else []
        where = data["conditions"]
        wheres.append(
            f"{SUBJECTS[suite_of(data)]} were measured on {where['device']}, "
            f"{where['threads']} threads, torch {where['versions']['torch']}, commit "
            f"{where['commit']}, {where['date'][:10]}: medians of {where['rounds']} interleaved "
            f"rounds, inputs {where['inputs']}{memory_of(where)}"
        )
    columns = [Column("{}, ms", "median_ms"), *versus(MAIN_RIVALS), *more]
    labels = [Column("on a CPU", "label", text=str)]
    return f"{pivot(cases, labels, columns)}\n\n{'. '.join(wheres)}."


def by_instruction_set(results: Iterable[dict[str, Any]]) -> str:
    """The time of each case over the time of a read and a fill, for each dtype and set."""
    cases = []
    for data in results:
        for case in cases_of(data):
            if case[OURS]["floor_ratio"] is not None:
                case[OURS]["dtype"] += f", {data['conditions']['instruction_set']}"
                cases.append(case)
    cases.sort(key=lambda case: case[OURS]["dtype"].partition(",")[0], reverse=True)
    labels = [Column("times a read, and a fill of the gradient", "label", text=str)]
    return pivot(cases, labels, [Column("{}", "floor_ratio")])


def drop_in_table(parts: Sequence[dict[str, Any]]) -> str:
    """Frameworks' own functions and klfast's in their place: milliseconds, and how many times."""
    cases = [case for data in parts for case in cases_of(data)]
    labels = [Column(key, key, text=str) for key in ("framework", "what")]
    columns = [
        Column("theirs {}, ms", "median_ms", "framework"),
        Column("klfast, ms", "median_ms"),
        Column("faster", "ratio", "framework", times),
    ]
    where = parts[0]["conditions"]
    return (
        f"{pivot(cases, labels, columns)}\n\n"
        f"{parts[0]['rows'][0]['shape']}, {where['device']}, {where['threads']} threads, "
        f"{versions(*(data['conditions'] for data in parts))}, commit "
        f"{where['commit']}, {where['date'][:10]}. Times are medians of {where['rounds']} "
        f"interleaved rounds, and results were compared first{memory_of(where)}. "
        "`GRPOTrainer._compute_loss` is TRL's whole loss around a model that costs nothing. ROLL's "
        "and trlx's side is their formula in eager PyTorch."
    )


GPU_METHOD = (
    "Times are of the device, and medians of rounds with L2 flushed, with all candidates "
    "interleaved in one process. Results were checked against float64 first. Ratios, GB/s (the "
    "least bytes of the case), shares and memory are of the first backend in the table. In a "
    f"graph of {GRAPH_CALLS} calls small inputs stay in L2."
)


def largest(data: dict[str, Any]) -> list[Case]:
    """The cases in bf16 of the suite's largest shape, without packed ones."""
    found = [
        case
        for case in cases_of(data)
        if case[OURS]["dtype"] == "bf16" and not case[OURS]["packed"]
    ]
    most = max((math.prod(case[OURS]["shape"]) for case in found), default=0)
    found = [case for case in found if math.prod(case[OURS]["shape"]) == most]
    for case in found:
        case[OURS]["label"] = _summary_label(suite_of(data)) + case[OURS]["label"]
    return found


def gpu_summary(parts: Sequence[dict[str, Any]], columns: Sequence[Column] | None = None) -> str:
    """A GPU's short table: the largest shape of each suite in bf16, and the GPUs."""
    if columns is None:
        speed = Column("of a read's speed", "read_share", text=share)
        columns = [Column("us", "kernel_us"), *versus(MAIN_RIVALS), speed]
    cases = [case for data in parts for case in largest(data)]
    wheres = [
        f"{where['device']}, torch {where['versions']['torch']}, commit {where['commit']}, "
        f"{where['date'][:10]}"
        for where in (data["conditions"] for data in parts)
    ]
    lines = table_of(cases, [Column("on a GPU, bf16", "label", text=str), *columns])
    return f"{lines}\n\nThey were measured on {'; '.join(dict.fromkeys(wheres))}."


def gpu_details(parts: Sequence[dict[str, Any]]) -> str:
    """The same with both backends, bandwidth and memory."""
    return gpu_summary(parts, [*_ON_DEVICE, *versus(MAIN_RIVALS), *BESIDE])


def steps_table(steps: Iterable[dict[str, Any]]) -> str:
    lines = [[s["name"], s["status"], f"{s['seconds']:.0f}", s["detail"]] for s in steps]
    return table(("step", "outcome", "s", ""), lines)


def machine_code_table(data: dict[str, Any]) -> str:
    """The counts of benchmarks/sass.py."""
    chips = list(data["chips"])
    rows = [
        [
            name,
            *(f"{case['loop'][chip]:.1f}" for chip in chips),
            f"{data['triton'][name]:.1f}" if name in data["triton"] else "",
            f"{case['bound']:.1f}",
            str(case["registers"]),
            str(case["warps"]),
            f"{case['code'] / 1024:.0f}",
            *(share(case["share"][chip]) for chip in chips),
        ]
        for name, case in data["cases"].items()
    ]
    assumed = "".join(f"\n- {each}" for each in data["assumptions"])
    loops = [f"loops, {chip}" for chip in chips]
    head = ["case", *loops, "Triton's", "bound", "registers", "warps", "KB of code", *chips]
    return f"{table(head, rows)}\n\nAssumed:\n{assumed}"
