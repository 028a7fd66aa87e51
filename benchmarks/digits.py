"""The digits of a KL from hidden states in bf16, against float64 of the same hidden states.

``python -m benchmarks.digits trl`` compares klfast, eager PyTorch and the functions of the peers'
packages (``trl`` or ``verl``, whichever is importable), and writes
``benchmarks/results/digits-<peers>.json``; ``make compare-peers`` runs it with both.
``benchmarks/report.py`` makes the table of them in docs/hidden_states.md. Nothing is timed, so a
load does no harm.

Two models have one head, and hidden states that differ in a share of their numbers: if all
differed, neighbours in bf16 would already be further apart than 1e-5 nats.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

import klfast
from benchmarks import outcome, rivals, tables
from klfast.formulas import FORMULAS
from klfast.selfcheck import eager

RESULTS = Path(__file__).parent / "results"

TOKENS, WIDTH, WORDS = 256, 1024, 151_936
QUICK = (8, 64, 1000)
LOGIT_STD = 8.0
"""Deviation of the logits in nats: of these words some ten have most of the probability."""

DISTANCES = {1e-5: (0.02, 0.0), 1e-3: (0.5, 0.01), 1e-1: (1.0, 0.077)}
"""Nats, about -> the share of a hidden state's numbers that differ, and by which part of their
deviation, beside the last bit of bf16."""

ROWS = 32
"""Tokens whose logits are in float64 at a time."""

KL, K3 = "exact KL", "k3 of the drawn tokens"

PEERS = {"trl": ("trl", "liger_kernel"), "verl": ("verl",)}


class Models(NamedTuple):
    """Hidden states of policy and reference, [N, D], their head, [V, D], and drawn words, [N]."""

    hidden: Tensor
    ref_hidden: Tensor
    weight: Tensor
    token_ids: Tensor

    def both(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.ref_hidden


class Truth(NamedTuple):
    """In float64 of the stored hidden states: KL, log-probs under both models, [N] each."""

    kl: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor


class Found(NamedTuple):
    """The results of a function: a KL per token, [N], or its mean; or the log-probs under both
    models, [N] each.
    """

    kl: Tensor | None = None
    logprobs: tuple[Tensor, Tensor] | None = None


Way = Callable[[Models], Found]


def make_models(share: float, distance: float, sizes: tuple[int, int, int]) -> Models:
    """Two models in bf16 that differ in a share of the numbers of their hidden states."""
    tokens, width, words = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden = (LOGIT_STD * normal(tokens, width)).bfloat16()
    weight = (normal(words, width) * width**-0.5).bfloat16()
    step = (normal(tokens, width) > 0) * 2.0**-7 - 2.0**-8  # to a neighbour in bf16, or to none
    moved = hidden.float() * (1 + step) + LOGIT_STD * distance * normal(tokens, width)
    differs = torch.rand(tokens, width, generator=generator) < share
    ref_hidden = torch.where(differs, moved.bfloat16(), hidden)
    drawn = [
        linear(rows.double(), weight.double()).softmax(-1).multinomial(1, generator=generator)
        for (rows,) in parts_of(hidden)
    ]
    return Models(hidden, ref_hidden, weight, torch.cat(drawn)[:, 0])


def parts_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of all, a part at a time."""
    return zip(*(torch.split(each, ROWS) for each in tensors), strict=True)


def truth_of(models: Models) -> Truth:
    """The exact KL and log-probs of what is stored."""
    weight = models.weight.double()
    parts = []
    for rows, ref_rows, ids in parts_of(*models.both(), models.token_ids):
        p, q = (log_softmax(linear(x.double(), weight), -1) for x in (rows, ref_rows))
        of_ids = (x.gather(-1, ids[:, None])[:, 0] for x in (p, q))
        parts.append(((p.exp() * (p - q)).sum(-1), *of_ids))
    return Truth(*(torch.cat(each) for each in zip(*parts, strict=True)))


# Ways


def from_hidden(models: Models) -> Found:
    return Found(klfast.linear_kl_divergence(models.hidden, models.weight, models.ref_hidden))


def over_logits(dtype: torch.dtype, kl: Callable[[Tensor, Tensor], Tensor]) -> Way:
    """A KL of logits in a dtype, which the product is made in."""

    def way(models: Models) -> Found:
        weight = models.weight.to(dtype)
        parts = [
            kl(*(linear(rows.to(dtype), weight) for rows in both))
            for both in parts_of(*models.both())
        ]
        return Found(torch.cat(parts))

    return way


def in_float64(logits: Tensor, ref_logits: Tensor) -> Tensor:
    p, q = (log_softmax(x.double(), -1) for x in (logits, ref_logits))
    return (p.exp() * (p - q)).sum(-1)


def of_tokens(logprobs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Way:
    """Log-probs of the drawn tokens, from hidden states, weight and ids, of both models."""

    def way(models: Models) -> Found:
        both = [logprobs(each, models.weight, models.token_ids) for each in models.both()]
        return Found(logprobs=(both[0], both[1]))

    return way


def eager_logprobs(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    parts = parts_of(hidden, token_ids)
    return torch.cat([eager.token_logprobs(linear(rows, weight), ids) for rows, ids in parts])


OURS: dict[str, Way] = {
    "klfast `linear_kl_divergence`": from_hidden,
    "the same logits, in float64": over_logits(torch.float32, in_float64),
    "klfast `kl_divergence` of bf16 logits": over_logits(torch.bfloat16, klfast.kl_divergence),
    "eager of fp32 logits": over_logits(torch.float32, eager.kl),
    "eager of bf16 logits": over_logits(torch.bfloat16, eager.kl),
    "klfast `linear_token_logprobs`": of_tokens(klfast.linear_token_logprobs),
    "eager log-probs of bf16 logits": of_tokens(eager_logprobs),
}


def of_trl() -> dict[str, Way]:
    libraries = rivals.installed()[0]

    def kl(models: Models) -> Found:
        forward = libraries["TRL"]["linear-kl-frozen"]
        return Found(forward(models.hidden, models.weight, models.ref_hidden))

    def liger_kl(models: Models) -> Found:
        forward = libraries["Liger"]["linear-kl-loss"]
        leaves = (models.hidden, models.weight, models.ref_hidden, models.weight)
        return Found(forward(*leaves))

    logprobs = libraries["TRL"]["linear-logprob"]
    return {
        "TRL `ChunkedDivergenceFunction`": kl,
        "Liger `LigerFusedLinearJSDLoss`, beta = 1": liger_kl,
        "TRL `ChunkedLogProbFunction`": of_tokens(logprobs),
    }


def of_verl() -> dict[str, Way]:
    module = import_module("verl.utils.experimental.torch_functional")

    def logprobs(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
        found: Tensor = module.FusedLinearForPPO()(hidden, weight, token_ids)[0]
        return found

    return {"verl `FusedLinearForPPO`": of_tokens(logprobs)}


WAYS_OF: dict[str, Callable[[], dict[str, Way]]] = {"trl": of_trl, "verl": of_verl}


# Errors


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The estimate of each token, in float64 of what was returned."""
    return FORMULAS["k3"](logprobs.double() - ref_logprobs.double())


def errors(found: Found, truth: Truth) -> dict[str, Any]:
    """The relative error of the mean; of a KL per token, the greatest relative error of a token; of
    log-probs, the greatest error in nats.
    """
    if found.logprobs is not None:
        of, ref = (each.detach() for each in found.logprobs)
        true = k3(truth.logprobs, truth.ref_logprobs).mean()
        pairs = ((of, truth.logprobs), (ref, truth.ref_logprobs))
        worst = max((a.double() - b).abs().max().item() for a, b in pairs)
        mean_error = (k3(of, ref).mean() - true) / true
        return {"kind": K3, "mean": mean_error.item(), "worst": None, "logprob": worst}
    assert found.kl is not None
    kl = found.kl.detach().double()
    mean_error = (kl.mean() - truth.kl.mean()) / truth.kl.mean()
    worst_token = None
    if kl.dim():
        differ = truth.kl > 0
        worst_token = ((kl - truth.kl).abs() / truth.kl)[differ].max().item()
    return {"kind": KL, "mean": mean_error.item(), "worst": worst_token, "logprob": None}


def measure(ways: dict[str, Way], sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    """A row for each function and distance."""
    rows = []
    for distance, differs in DISTANCES.items():
        models = make_models(*differs, sizes)
        truth = truth_of(models)
        for name, way in ways.items():
            facts = {"function": name, "about": distance, "kl": truth.kl.mean().item()}
            with torch.no_grad():
                rows.append({**facts, **errors(way(models), truth)})
            print(f"{name}, {short(rows[-1]['kl'])} nats: {cell(rows[-1])}", flush=True)
    return rows


# The table


def table_of(parts: Sequence[dict[str, Any]]) -> str:
    """Relative errors by function and distance, and where they come from."""
    rows = {(row["function"], row["about"]): row for part in parts for row in part["rows"]}
    functions = dict.fromkeys((rows[at]["kind"], at[0]) for at in rows)
    lines = []
    for kind in (KL, K3):
        for function in (name for of, name in functions if of == kind):
            own = [rows[function, about] for about in DISTANCES]
            lines.append([function, kind, *map(cell, own)])
    firsts = [next(row for (_, of), row in rows.items() if of == about) for about in DISTANCES]
    headings = ["function", "what", *(f"at {short(row['kl'])} nats" for row in firsts)]
    return f"{tables.table(headings, lines)}\n\n{conditions_of(parts)}"


def cell(row: dict[str, Any]) -> str:
    """The error of the mean, and in brackets that of the worst token or log-prob."""
    mean = short(abs(row["mean"]))
    if row["kind"] == K3:
        return f"{mean} ({short(row['logprob'])} nats)"
    return mean if row["worst"] is None else f"{mean} ({short(row['worst'])})"


def short(value: float) -> str:
    """Two digits; an exponent below 1e-4 alone, without padding."""
    text = f"{value:.2g}"
    return f"{float(text):,.0f}" if value >= 100 else text.replace("e-0", "e-")


def conditions_of(parts: Sequence[dict[str, Any]]) -> str:
    wheres = [part["conditions"] for part in parts]
    where = wheres[0]
    named = dict.fromkeys(
        f"{name} {version}" for each in wheres for name, version in each["versions"].items()
    )
    tokens, width, words = where["sizes"]
    return (
        f"{tokens} tokens of two models that share a head and differ in part of their hidden "
        f"states: width {width}, {words:,} words, all in bf16, logits with a deviation of "
        f"{where['logits_std']:g} nats; {where['device']}; "
        f"{', '.join(named)}; commit {where['commit']}, {where['date'][:10]}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The digits of a KL from hidden states in bf16.")
    parser.add_argument("peers", choices=PEERS, help="which set of frameworks is importable")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for its JSON")
    parser.add_argument("--quick", action="store_true", help="toy size: does it run?")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else (TOKENS, WIDTH, WORDS)
    releases = outcome.releases(*PEERS[arguments.peers])
    rows = measure({**OURS, **WAYS_OF[arguments.peers]()}, sizes)
    where = {
        **outcome.provenance({**outcome.versions("klfast", "torch"), **releases}),
        "sizes": list(sizes),
        "logits_std": LOGIT_STD,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"digits-{arguments.peers}.json"
    file.write_text(json.dumps({"conditions": where, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
