"""The tables of two studies that ran once, from hidden states, for docs/hidden_states.md.

``results/digits-*.json`` has the errors of a KL in bf16 against float64 of the same hidden states.
Two models have one head, and hidden states that differ in a share of their numbers.

``results/longest.json`` has the peak memory of a mean KL and its gradients, of a trained head, at
small shapes, measured as the suite ``linear`` measures it, and what was fitted to the peaks:

    bytes = a N V + b N D + c D V + e P

of N tokens, width D, V token ids, and P logits that a way holds of a part of the batch: for ways
that hold all logits P is 0, for others a. It also has the peak of a run at the size of a public
model. The measuring code of both is in the history, at the commit in their conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import rivals, tables
from benchmarks.candidates import KLFAST
from benchmarks.cases import DTYPES, EAGER, Shape
from benchmarks.linear import HELD
from klfast.autograd.chunks import length_of

# The digits

DISTANCES = (1e-5, 1e-3, 1e-1)
"""Nats, about."""

KL, K3 = "exact KL", "k3 of the drawn tokens"


def digits_table(parts: Sequence[dict[str, Any]]) -> str:
    """Relative errors by function and distance, and where they come from."""
    rows = {(row["function"], row["about"]): row for part in parts for row in part["rows"]}
    functions = dict.fromkeys((rows[at]["kind"], at[0]) for at in rows)
    lines = [
        [name, kind, *(cell(rows[name, about]) for about in DISTANCES)]
        for kind in (KL, K3)
        for of, name in functions
        if of == kind
    ]
    firsts = [next(row for (_, of), row in rows.items() if of == about) for about in DISTANCES]
    headings = ["function", "what", *(f"at {short(row['kl'])} nats" for row in firsts)]
    where = parts[0]["conditions"]
    tokens, width, words = where["sizes"]
    return (
        f"{tables.table(headings, lines)}\n\n"
        f"{tokens} tokens of two models that share a head and differ in part of their hidden "
        f"states: width {width}, {words:,} words, all in bf16, logits with a deviation of "
        f"{where['logits_std']:g} nats; {where['device']}; "
        f"{tables.versions(*(part['conditions'] for part in parts))}; commit "
        f"{where['commit']}, {where['date'][:10]}."
    )


def cell(row: dict[str, Any]) -> str:
    """The error of the mean, and in brackets the error of the worst token or log-prob."""
    mean = short(abs(row["mean"]))
    if row["kind"] == K3:
        return f"{mean} ({short(row['logprob'])} nats)"
    return mean if row["worst"] is None else f"{mean} ({short(row['worst'])})"


def short(value: float) -> str:
    """Two digits; an exponent below 1e-4 alone, without padding."""
    text = f"{value:.2g}"
    return f"{float(text):,.0f}" if value >= 100 else text.replace("e-0", "e-")


# The longest batch

DTYPE = "bf16"
BYTES = DTYPES[DTYPE].itemsize

TRL = "TRL"
HOLDING = (EAGER, HELD)
"""The ways that hold the logits of all tokens."""
TRL_TOKENS = 4096
"""Tokens that TRL's ``ChunkedDivergenceFunction`` takes at a time, of ``rivals.TRL_WORDS``."""

MODELS = {
    "Qwen/Qwen3-0.6B": (1024, 151_936),
    "Qwen/Qwen3-8B": (4096, 151_936),
    "meta-llama/Llama-3.1-8B": (4096, 128_256),
    "google/gemma-3-27b-it": (5376, 262_208),
    "openai/gpt-oss-20b": (2880, 201_088),
    "deepseek-ai/DeepSeek-V3": (7168, 129_280),
}
"""Public models -> ``hidden_size`` and ``vocab_size`` of their configuration."""
GIVEN = 16 << 30
"""Bytes for everything but the two heads."""

CHECKED = "Qwen/Qwen3-0.6B"


class Fit(NamedTuple):
    """Bytes of a way: for each token and token id, token and number of the width, token id and
    number of the width, and logit of a part of the batch.
    """

    way: str
    word: float
    width: float
    head: float
    part: float

    def bytes_of(self, shape: Shape) -> float:
        """The peak above the inputs."""
        each = (self.word, self.width, self.head, self.part)
        return sum(n * size for n, size in zip(sizes_of(self.way, shape), each, strict=True))

    def longest(self, width: int, words: int, given: int) -> int:
        """The most tokens whose hidden states, of both models, and all that the way adds to them
        and to the heads fit into so many bytes; 0 where the head's gradient alone does not.
        """
        once = self.head * width * words + self.part * part_of(self.way, (1 << 30, width, words))
        a_token = self.word * words + (self.width + 2 * BYTES) * width
        return max(0, int((given - once) / a_token))


def part_of(way: str, shape: Shape) -> int:
    """The logits of a part of the batch; 0 for ways that hold all."""
    tokens, _, words = shape
    if way in HOLDING:
        return 0
    if way == TRL:
        return min(tokens, TRL_TOKENS) * min(words, rivals.TRL_WORDS)
    return min(tokens, length_of(words, torch.float32, torch.device("cpu"))) * words


def sizes_of(way: str, shape: Shape) -> tuple[int, int, int, int]:
    """The numbers that the bytes of a way grow with."""
    tokens, width, words = shape
    logits = tokens * words if way in HOLDING else 0
    return logits, tokens * width, width * words, part_of(way, shape)


def longest_tables(data: dict[str, Any]) -> str:
    """The longest batches by model and way, the bytes that they follow from, and the conditions."""
    known = {**tables.RIVALS, **tables.SOME_RIVALS, KLFAST: "klfast", TRL: "TRL"}
    fits = {row["way"]: Fit(**row["fit"]) for row in data["ways"]}
    lines = [
        [f"`{name}`", f"{width:,}", f"{words:,}"]
        + [rounded(each.longest(width, words, GIVEN)) for each in fits.values()]
        for name, (width, words) in MODELS.items()
    ]
    headings = ["tokens that fit", "width", "words", *(known[way] for way in fits)]
    of_bytes = []
    for (way, found), row in zip(fits.items(), data["ways"], strict=True):
        check = row["check"]
        part = found.part * part_of(way, (1 << 30, *MODELS[CHECKED]))
        of_bytes.append(
            [
                known[way],
                terms({" V": found.word, " D": found.width + 2 * BYTES}),
                terms({" D V": found.head, " GiB": part / 2**30}),
                f"{check['shape'][0]:,}",
                f"{check['peak'] / 2**30:.2f}",
                f"{check['expected'] / 2**30:.2f}",
            ]
        )
    run = ["way", "bytes a token", "bytes beside", "tokens of a run", "its peak, GiB", "expected"]
    where = data["conditions"]
    fewest = min(len(row["shapes"]) for row in data["ways"])
    conditions = (
        f"A mean KL with the gradients of hidden states and of a head of its own, all in {DTYPE}; "
        f"peaks of what is resident, each in a process of its own, above the inputs, fitted to "
        f"{fewest} or more shapes a way; run at the sizes of {CHECKED}. "
        f"{where['device']}; {tables.versions(where)}; commit {where['commit']}, "
        f"{where['date'][:10]}."
    )
    return "\n\n".join((tables.table(headings, lines), tables.table(run, of_bytes), conditions))


def terms(parts: Mapping[str, float]) -> str:
    """A sum, without what rounds to nothing."""
    texts = {name: f"{value:.1f}" for name, value in parts.items()}
    return " + ".join(f"{text}{name}" for name, text in texts.items() if text != "0.0") or "0"


def rounded(tokens: int) -> str:
    """Two digits, rounded down."""
    unit = 10 ** max(0, len(str(tokens)) - 2)
    return f"{tokens // unit * unit:,}"
