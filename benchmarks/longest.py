"""The longest batch whose loss fits into a memory, of public models' last layers.

``python -m benchmarks.longest`` measures the peak memory of a mean KL and its gradients, of a
trained head, at small shapes, as the suite ``linear`` does, and fits to it

    bytes = a N V + b N D + c D V + e P

of N tokens, width D, V words, and P logits that a way holds of a part of the batch: of ways that
hold all logits P is 0, of others a. It then runs each way at the size of a public model and
compares, and writes ``FILE``, of which ``benchmarks/report.py`` makes the tables in
docs/hidden_states.md. ``make compare-peers`` runs it with TRL. Nothing is timed, so a load does no
harm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import memory, outcome, rivals, tables
from benchmarks.candidates import KLFAST
from benchmarks.cases import DTYPES, EAGER, Case, Shape
from benchmarks.linear import CHECKPOINT, HELD, OPS
from klfast.linear.chunks import length_of

FILE = Path(__file__).parent / "results" / "longest.json"
OP = OPS["linear-kl-loss"]
DTYPE = "bf16"
BYTES = DTYPES[DTYPE].itemsize

TRL = "TRL"
WAYS = (EAGER, HELD, CHECKPOINT, TRL, KLFAST)
HOLDING = (EAGER, HELD)
"""The ways that hold the logits of all tokens."""
TRL_TOKENS = 4096
"""Tokens that TRL's ``ChunkedDivergenceFunction`` takes at a time, of ``rivals.TRL_WORDS``."""

SHAPES = (
    (512, 256, 32768),
    (1024, 256, 32768),
    (512, 1024, 32768),
    (1024, 1024, 32768),
    (512, 256, 65536),
)
"""Tokens, width and words that the bytes of a way that holds all logits are fitted to."""
SHAPES_IN_PARTS = (
    (65536, 1024, 1024),
    (32768, 2048, 1024),
    (65536, 2048, 1024),
    (512, 2048, 65536),
    (512, 1024, 131072),
)
"""Those of the others: hidden states, or heads, that are large beside a part's logits, as they are
where a batch fills a memory."""
TRL_SHAPES = ((4096, 256, 32768),)
"""Those of TRL beside: its parts are large whatever the batch."""


MAPPED = "1000000"
"""Bytes. A larger block gets a mapping of its own, so that what is freed is not resident, as of a
batch that is large enough; glibc reads it from the environment."""


class Model(NamedTuple):
    """A public model's sizes, as its configuration on the Hugging Face Hub has them.

    Attributes:
        name: as there.
        width: ``hidden_size``.
        words: ``vocab_size``.
    """

    name: str
    width: int
    words: int


MODELS = (
    Model("Qwen/Qwen3-0.6B", 1024, 151_936),
    Model("Qwen/Qwen3-8B", 4096, 151_936),
    Model("meta-llama/Llama-3.1-8B", 4096, 128_256),
    Model("google/gemma-3-27b-it", 5376, 262_208),
    Model("openai/gpt-oss-20b", 2880, 201_088),
    Model("deepseek-ai/DeepSeek-V3", 7168, 129_280),
)
GIVEN = 16 << 30
"""Bytes for everything but the two heads."""

CHECKED = MODELS[0]
CHECK_GIVEN = 6 << 30
CHECK_TOKENS = 2048
"""The most of a run that is compared, as products take long."""


class Fit(NamedTuple):
    """Bytes of a way: for each token and word, token and number of the width, word and number of
    the width, and logit of a part of the batch.
    """

    way: str
    word: float
    width: float
    head: float
    part: float

    def bytes_of(self, shape: Shape) -> float:
        """The peak above the inputs."""
        each = (self.word, self.width, self.head, self.part)
        return sum(
            size * bytes_ for size, bytes_ in zip(sizes_of(self.way, shape), each, strict=True)
        )

    def once(self, width: int, words: int) -> float:
        """The bytes that do not grow with the batch, where it is long."""
        return self.head * width * words + self.part * part_of(self.way, (1 << 30, width, words))

    def a_token(self, width: int, words: int) -> float:
        """The bytes of each further token, with those of both models' hidden states."""
        return self.word * words + (self.width + 2 * BYTES) * width

    def longest(self, width: int, words: int, given: int) -> int:
        """The most tokens whose hidden states, of both models, and all that the way adds to them
        and to the heads fit into so many bytes; 0 where the head's gradient alone does not.
        """
        return max(0, int((given - self.once(width, words)) / self.a_token(width, words)))


def part_of(way: str, shape: Shape) -> int:
    """The logits of a part of the batch; 0 of ways that hold all."""
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


def fit(way: str, shapes: Sequence[Shape], peaks: Sequence[int]) -> Fit:
    """By least squares of what each misses as a share of its peak, so that no shape outweighs.
    Bytes that come out negative are none: they are not there when the peak is.
    """
    sizes = torch.tensor([sizes_of(way, shape) for shape in shapes], dtype=torch.float64)
    shares = sizes / torch.tensor(peaks, dtype=torch.float64)[:, None]
    wanted = torch.ones(len(shapes), dtype=torch.float64)
    counts = shares.amax(0) > 0
    while True:
        scale = shares[:, counts].amax(0)
        found = torch.zeros_like(counts, dtype=torch.float64)
        found[counts] = torch.linalg.lstsq(shares[:, counts] / scale, wanted).solution / scale
        if found.min() >= 0:
            return Fit(way, *found.tolist())
        counts[found.argmin()] = False


def peak_of(way: str, shape: Shape) -> int:
    """The measured peak above the inputs.

    Raises:
        SystemExit: it is not known here, with the reason.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peak = memory.peak_bytes(Case(OP, DTYPE, shape), way)
    if peak is None:
        reasons = "; ".join(str(each.message) for each in caught)
        raise SystemExit(f"{way} {shape}: {reasons or 'the inputs are too small'}")
    print(f"{way} {shape}: {peak / 1e6:.0f} MB", flush=True)
    return peak


def measure(way: str) -> dict[str, Any]:
    """The peaks of a way, what is fitted to them, and a run at the size of a model."""
    shapes = SHAPES if way in HOLDING else SHAPES_IN_PARTS + TRL_SHAPES * (way == TRL)
    peaks = [peak_of(way, shape) for shape in shapes]
    fitted = fit(way, shapes, peaks)
    tokens = fitted.longest(CHECKED.width, CHECKED.words, CHECK_GIVEN)
    run = min(tokens, CHECK_TOKENS) if way in HOLDING else CHECK_TOKENS
    shape = (run, CHECKED.width, CHECKED.words)
    return {
        "way": way,
        "shapes": shapes,
        "peaks": peaks,
        "fit": fitted._asdict(),
        "check": {
            "shape": shape,
            "fits": tokens,
            "expected": round(fitted.bytes_of(shape)),
            "peak": peak_of(way, shape),
        },
    }


# The tables


def tables_of(data: dict[str, Any]) -> str:
    """The longest batches by model and way, the bytes that they follow from, and the conditions."""
    return "\n\n".join((longest_table(data), bytes_table(data), conditions_of(data)))


def longest_table(data: dict[str, Any]) -> str:
    fits = fits_of(data)
    lines = [
        [
            f"`{model.name}`",
            f"{model.width:,}",
            f"{model.words:,}",
            *(rounded(each.longest(model.width, model.words, GIVEN)) for each in fits.values()),
        ]
        for model in MODELS
    ]
    return tables.table(["tokens that fit", "width", "words", *titles_of(fits)], lines)


def bytes_table(data: dict[str, Any]) -> str:
    """The bytes of each way, and how far a run at a model's size is from them."""
    lines = []
    for (way, found), row in zip(fits_of(data).items(), data["ways"], strict=True):
        check = row["check"]
        part = found.part * part_of(way, (1 << 30, CHECKED.width, CHECKED.words))
        lines.append(
            [
                *titles_of([way]),
                terms({" V": found.word, " D": found.width + 2 * BYTES}),
                terms({" D V": found.head, " GiB": part / 2**30}),
                f"{check['shape'][0]:,}",
                f"{check['peak'] / 2**30:.2f}",
                f"{check['expected'] / 2**30:.2f}",
            ]
        )
    run = ["tokens of a run", "its peak, GiB", "expected"]
    return tables.table(["way", "bytes a token", "bytes beside", *run], lines)


def terms(parts: Mapping[str, float]) -> str:
    """A sum, without what rounds to nothing."""
    texts = {name: f"{value:.1f}" for name, value in parts.items()}
    return " + ".join(f"{text}{name}" for name, text in texts.items() if text != "0.0") or "0"


def fits_of(data: dict[str, Any]) -> dict[str, Fit]:
    """Way -> its bytes."""
    return {row["way"]: Fit(**row["fit"]) for row in data["ways"]}


def titles_of(ways: Sequence[str] | Mapping[str, Any]) -> list[str]:
    known = {**tables.RIVALS, **tables.SOME_RIVALS, KLFAST: "klfast", TRL: "TRL"}
    return [known[way] for way in ways]


def rounded(tokens: int) -> str:
    """Two digits, rounded down."""
    unit = 10 ** max(0, len(str(tokens)) - 2)
    return f"{tokens // unit * unit:,}"


def conditions_of(data: dict[str, Any]) -> str:
    where = data["conditions"]
    fewest = min(len(row["shapes"]) for row in data["ways"])
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return (
        f"A mean KL with the gradients of hidden states and of a head of its own, all in {DTYPE}; "
        f"peaks of what is resident, each in a process of its own, above the inputs, fitted to "
        f"{fewest} or more shapes a way; run at the sizes of {CHECKED.name}. "
        f"{where['device']}; {versions}; commit {where['commit']}, {where['date'][:10]}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The longest batches that fit into a memory.")
    parser.add_argument("--out", type=Path, default=FILE, help="the JSON that is written")
    arguments = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = MAPPED
    ways = [way for way in WAYS if way != TRL or TRL in rivals.installed()[0]]
    rows = [measure(way) for way in ways]
    where = {
        **outcome.provenance({**outcome.versions("klfast", "torch"), **outcome.releases("trl")}),
        "given": GIVEN,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"conditions": where, "ways": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
