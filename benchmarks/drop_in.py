"""The frameworks' own functions against klfast's in their place, interleaved in one process.

``make bench-peers`` runs it with what ``make test-peers`` installs, once with each set of peers,
and writes ``benchmarks/results/drop-in-<peers>.json``; ``benchmarks/report.py`` makes the table of
them in docs/measured.md. The framework's real function is timed; for ROLL and trlx, which have no
releases to install, their formula as ``tests/support/frameworks.py`` has it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import allocator, idle, outcome
from benchmarks.cases import DTYPES, KEPT, SPREAD
from benchmarks.command import REMEDY
from benchmarks.measure import ATTEMPTS, Plan, time_idle
from benchmarks.peers import PEERS, QUICK, SHAPE, Pair, from_tests, make_batch

ROUNDS = 20


def check(pair: Pair, batch: Any) -> None:
    """Both lead to the same, as far as the framework's dtype goes."""
    theirs, ours = (_flat(f(batch)) for f in (pair.theirs, pair.ours))
    eps = torch.finfo(batch.logprobs.dtype).eps
    for mine, other in zip(ours, theirs, strict=True):
        kept = batch.mask != 0 if other.shape == batch.mask.shape else torch.tensor(True)
        torch.testing.assert_close(
            mine.double() * kept, other.double() * kept, rtol=1e-4 + 64 * eps, atol=64 * eps
        )


def _flat(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def measure(
    pair: Pair, dtype: str, shape: tuple[int, ...], plan: Plan
) -> tuple[list[dict[str, Any]], idle.Load | None]:
    """The rows of both, and the load beside their rounds; ``ratio`` is a median over klfast's."""
    batch = make_batch(shape, DTYPES[dtype])
    check(pair, batch)
    timings, load = time_idle({"framework": pair.theirs, "klfast": pair.ours}, [batch], plan)
    rows = [
        {
            "case": f"{pair.framework} {pair.what} {dtype}",
            "framework": pair.framework,
            "what": pair.what,
            "dtype": dtype,
            "shape": list(shape),
            "impl": impl,
            "median_ms": timing.median * 1e3,
            "min_ms": timing.best * 1e3,
            "ratio": timing.median / timings["klfast"].median,
            "rounds": plan.rounds,
            "calls": timing.calls,
        }
        for impl, timing in timings.items()
    ]
    return rows, load


def main() -> int:
    parser = argparse.ArgumentParser(description="Time frameworks' functions against klfast's.")
    parser.add_argument("peers", choices=PEERS, help="the set of frameworks that is installed")
    parser.add_argument(
        "--out", type=Path, default=outcome.RESULTS, help="the folder for the JSON file"
    )
    parser.add_argument("--quick", action="store_true", help="toy size, to see that it runs")
    as_of = "as in python -m benchmarks"
    parser.add_argument("--keep-memory", action="store_true", help=as_of)
    parser.add_argument("--allow-load", action="store_true", help=as_of)
    arguments = parser.parse_args()
    if arguments.keep_memory:
        allocator.keep_memory()
    plan = Plan(
        rounds=1 if arguments.quick else ROUNDS,
        keeps_memory=arguments.keep_memory,
        attempts=1 if arguments.allow_load else ATTEMPTS,
    )
    torch.manual_seed(0)
    if arguments.peers == "verl":
        stand_ins = from_tests("stand_ins")  # for what OpenRLHF imports and no CPU has
        stand_ins.install(*stand_ins.OF_OPENRLHF)
    results = outcome.Results()
    pairs = itertools.chain.from_iterable(make() for make in PEERS[arguments.peers])
    for pair, dtype in itertools.product(pairs, DTYPES):
        (theirs, ours), load = measure(pair, dtype, QUICK if arguments.quick else SHAPE, plan)
        results.rows += (theirs, ours)
        results.loads[theirs["case"]] = load
        print(
            f"{theirs['case']}: {theirs['median_ms']:.3g} ms, klfast {ours['median_ms']:.3g} ms, "
            f"{theirs['ratio']:.2g}x",
            flush=True,
        )
    loaded = outcome.loaded_text(results.loads)
    if loaded is not None and not arguments.allow_load:
        print(f"nothing was written: {loaded}; {REMEDY}", file=sys.stderr)
        return 3
    where = {
        **outcome.conditions(replace(plan, reused=True), packages=("verl", "openrlhf", "trl")),
        "mask_kept": KEPT,
        "log_ratio_std": SPREAD,
        **outcome.load_conditions(results, arguments.allow_load),
    }
    file = arguments.out / f"drop-in-{arguments.peers}.json"
    outcome.write_json(file, where, rows=results.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
