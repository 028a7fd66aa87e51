"""The frameworks' own functions against klfast's in their place, interleaved in one process.

``make bench-peers`` runs it with what ``make test-peers`` installs, once with each set of peers,
and writes ``benchmarks/results/drop-in-<peers>.json``; ``benchmarks/report.py`` makes
the table of them in docs/measured.md. The framework's real function is timed; for ROLL and trlx,
which have no releases to install, their formula as ``tests/support/frameworks.py`` has it. The
pairs over log-probs are here, those between sampler and trainer in ``drop_in_rollout.py``, those
over logits in ``drop_in_logits.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import allocator, drop_in_logits, drop_in_rollout, idle, outcome
from benchmarks.cases import DTYPES
from benchmarks.command import REMEDY
from benchmarks.measure import ATTEMPTS, Plan, time_idle
from benchmarks.pairs import (
    Batch,
    Function,
    Pair,
    from_tests,
    gradient,
    make_batch,
    make_vocabulary,
)
from benchmarks.timing import Timing
from klfast import compat

RESULTS = Path(__file__).parent / "results"
ROUNDS = 20
OVER_LOGPROBS = ((64, 8192),)
OVER_LOGITS = ((2, 64, 512), (4, 512, 32000))
QUICK = {OVER_LOGPROBS: ((4, 64),), OVER_LOGITS: ((2, 8, 64), (2, 16, 128))}
"""Shapes, and instead of them: does it run?"""


@dataclass(frozen=True)
class Row:
    """One implementation of one pair; ``ratio`` is its median over klfast's."""

    case: str
    framework: str
    what: str
    dtype: str
    shape: list[int]
    impl: str
    median_ms: float
    min_ms: float
    ratio: float
    rounds: int
    calls: int


def verl_pairs() -> Iterator[Pair]:
    from verl.trainer.ppo import core_algos, ray_trainer

    ours = compat.verl
    mode, average = "low_var_kl", "token-mean"

    def rewards(apply: Callable[..., Any]) -> Function:
        controller = ours.FixedKLController(0.1)

        def run(batch: Batch) -> Tensor:
            data = _Data(batch)
            apply(data, controller, mode)
            result: Tensor = data.batch["token_level_rewards"]
            return result

        return run

    yield Pair(
        "verl",
        "`kl_penalty`",
        lambda b: core_algos.kl_penalty(b.logprobs, b.ref_logprobs, mode),
        lambda b: ours.kl_penalty(b.logprobs, b.ref_logprobs, mode),
    )

    def two_steps(of: Any) -> Callable[[Tensor, Batch], Tensor]:
        return lambda x, b: of.agg_loss(of.kl_penalty(x, b.ref_logprobs, mode), b.mask, average)

    yield Pair(
        "verl",
        "`agg_loss(kl_penalty(...))`, forward + backward",
        gradient(two_steps(core_algos)),
        gradient(two_steps(ours)),
    )
    yield Pair(
        "verl",
        "the same as `kl_loss`, forward + backward",
        gradient(two_steps(core_algos)),
        gradient(lambda x, b: ours.kl_loss(x, b.ref_logprobs, mode, b.mask, average)),
    )
    yield Pair(
        "verl",
        "`apply_kl_penalty`",
        rewards(ray_trainer.apply_kl_penalty),
        rewards(ours.apply_kl_penalty),
    )


class _Data:
    """What ``apply_kl_penalty`` needs of a DataProto: a batch with a size."""

    class Tensors(dict[str, Tensor]):
        batch_size: tuple[int, ...]

    def __init__(self, batch: Batch) -> None:
        self.batch = self.Tensors(
            old_log_probs=batch.logprobs,
            ref_log_prob=batch.ref_logprobs,
            response_mask=batch.mask,
            token_level_scores=batch.old_logprobs.float(),
        )
        self.batch.batch_size = batch.mask.shape[:1]


def openrlhf_pairs() -> Iterator[Pair]:
    from openrlhf.models import utils

    def kl(function: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Batch], Tensor]:
        return lambda x, b: function(
            x, b.ref_logprobs, log_probs_old=b.old_logprobs, kl_estimator="k3", **options
        ).sum()

    def reward(function: Callable[..., Tensor]) -> Function:
        return lambda b: function(
            b.old_logprobs[:, 0].float(), 0.1, b.logprobs.float() * b.mask, b.mask.bool()
        )

    yield Pair(
        "OpenRLHF",
        "`compute_approx_kl`",
        lambda b: utils.compute_approx_kl(b.logprobs, b.ref_logprobs, kl_estimator="k3"),
        lambda b: compat.openrlhf.compute_approx_kl(b.logprobs, b.ref_logprobs, kl_estimator="k3"),
    )
    yield Pair(
        "OpenRLHF",
        "the same, `unbiased_gradient`, forward + backward",
        gradient(kl(utils.compute_approx_kl, unbiased_gradient=True)),
        gradient(kl(compat.openrlhf.compute_approx_kl, unbiased_gradient=True)),
    )
    yield Pair(
        "OpenRLHF",
        "`compute_reward`",
        reward(utils.compute_reward),
        reward(compat.openrlhf.compute_reward),
    )


def trl011_pairs() -> Iterator[Pair]:
    from trl.trainer.ppo_trainer import PPOTrainer

    trainer = types.SimpleNamespace(config=types.SimpleNamespace(kl_penalty="mse"))
    yield Pair(
        "TRL 0.11",
        "`PPOTrainer._kl_penalty`",
        lambda b: PPOTrainer._kl_penalty(trainer, b.logprobs, b.ref_logprobs),
        lambda b: compat.trl.kl_penalty(b.logprobs, b.ref_logprobs, "mse"),
    )


def roll_pairs() -> Iterator[Pair]:
    theirs = from_tests("frameworks").roll

    def ours(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, mode: str) -> Tensor:
        return compat.roll.compute_approx_kl(logprobs, ref_logprobs, mask, mode)

    def forward(function: Callable[..., Tensor]) -> Function:
        return lambda b: function(b.logprobs, b.ref_logprobs, b.mask, "k3")

    def backward(function: Callable[..., Tensor]) -> Function:
        return gradient(lambda x, b: function(x, b.ref_logprobs, b.mask, "k3").sum())

    yield Pair("ROLL", "`compute_approx_kl`", forward(theirs), forward(ours))
    yield Pair("ROLL", "the same, forward + backward", backward(theirs), backward(ours))


def trlx_pairs() -> Iterator[Pair]:
    theirs = from_tests("frameworks").trlx_mean_kl

    def whole(mask: Tensor) -> Tensor:
        return torch.nn.functional.pad(mask, (0, 1))

    yield Pair(
        "trlx",
        "`mean_kl` and `mean_kl_per_token`",
        lambda b: theirs(b.logprobs, b.ref_logprobs, whole(b.mask)),
        lambda b: compat.trlx.mean_kl(b.logprobs, b.ref_logprobs, whole(b.mask))[:2],
    )


def grpo_pairs() -> Iterator[Pair]:
    """TRL's whole ``_compute_loss`` around a model that costs nothing, with its KL and klfast's."""
    from trl import GRPOTrainer

    tiny = from_tests("tiny")

    class Fused(compat.trl.GRPOMixin, GRPOTrainer):  # type: ignore[misc]  # of no type here
        pass

    def loss(trainer_class: Any, loss_type: str) -> Function:
        trainer = tiny.make(trainer_class, tempfile.mkdtemp(), steps=1, loss_type=loss_type)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        forward: dict[str, Tensor] = {}
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
            forward["logps"],
            forward["entropies"],
            None,
        )

        def of(leaf: Tensor, batch: Batch) -> Tensor:
            forward.update(logps=leaf, entropies=batch.old_logprobs)
            ids = batch.mask
            result: Tensor = trainer._compute_loss(
                trainer.model,
                {
                    "prompt_ids": ids[:, :1],
                    "prompt_mask": ids[:, :1],
                    "completion_ids": ids,
                    "completion_mask": batch.mask,
                    "advantages": batch.old_logprobs[:, 0],
                    "old_per_token_logps": batch.old_logprobs,
                    "ref_per_token_logps": batch.ref_logprobs,
                    "num_items_in_batch": batch.mask.sum(),
                },
            )
            trainer._metrics["train"].clear()
            return result

        return gradient(of)

    for loss_type in ("dapo", "grpo"):
        yield Pair(
            "TRL",
            f"`GRPOTrainer._compute_loss`, {loss_type}, forward + backward",
            loss(GRPOTrainer, loss_type),
            loss(Fused, loss_type),
        )


PEERS: dict[str, dict[Any, tuple[Callable[[], Iterator[Pair]], ...]]] = {
    "verl": {
        OVER_LOGPROBS: (
            verl_pairs,
            drop_in_rollout.verl_pairs,
            openrlhf_pairs,
            trl011_pairs,
            roll_pairs,
            trlx_pairs,
        ),
        OVER_LOGITS: (
            drop_in_logits.verl_pairs,
            drop_in_logits.openrlhf_pairs,
            drop_in_logits.roll_pairs,
        ),
    },
    "trl": {OVER_LOGPROBS: (grpo_pairs,), OVER_LOGITS: (drop_in_logits.trl_pairs,)},
}
"""By the set of peers that is importable, and by shapes: what makes the pairs."""


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
) -> tuple[list[Row], idle.Load | None]:
    """The rows of both, and the load beside their rounds."""
    make = make_batch if len(shape) == 2 else make_vocabulary
    batch = make(shape, DTYPES[dtype])
    check(pair, batch)
    functions = {"framework": pair.theirs, "klfast": pair.ours}
    timings, load = time_idle(functions, [batch], plan)

    def row(impl: str, timing: Timing) -> Row:
        return Row(
            f"{pair.framework} {pair.what} {dtype}",
            pair.framework,
            pair.what,
            dtype,
            list(shape),
            impl,
            timing.median * 1e3,
            timing.best * 1e3,
            timing.median / timings["klfast"].median,
            plan.rounds,
            timing.calls,
        )

    return [row(impl, timing) for impl, timing in timings.items()], load


def conditions(plan: Plan) -> dict[str, Any]:
    """Where, when and how, and the versions of the frameworks; estimators are each pair's own."""
    names = ("verl", "openrlhf", "trl")
    peers = {name: metadata.version(name) for name in names if importlib.util.find_spec(name)}
    where = outcome.conditions(replace(plan, reused=True))
    return {**where, "versions": {**where["versions"], **peers}}


def cases(peers: str, quick: bool) -> Iterator[tuple[Pair, tuple[int, ...], str]]:
    """What is measured on what; a pair says its shape where it has several."""
    for shapes, makers in PEERS[peers].items():
        chosen = QUICK[shapes] if quick else shapes
        for maker, shape in itertools.product(makers, chosen):
            for pair in maker():
                what = pair.what if len(shapes) == 1 else f"{pair.what}, {list(shape)}"
                for dtype in DTYPES:
                    yield pair._replace(what=what), shape, dtype


def main() -> int:
    parser = argparse.ArgumentParser(description="Frameworks' functions against klfast's.")
    parser.add_argument("peers", choices=PEERS, help="which set of frameworks is importable")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for its JSON")
    parser.add_argument("--quick", action="store_true", help="toy size: does it run?")
    parser.add_argument("--keep-memory", action="store_true", help="as of python -m benchmarks")
    parser.add_argument("--allow-load", action="store_true", help="as of python -m benchmarks")
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
        from_tests("stand_ins").install()  # for what OpenRLHF imports and no CPU has
    results = outcome.Results()
    for pair, shape, dtype in cases(arguments.peers, arguments.quick):
        (theirs, ours), load = measure(pair, dtype, shape, plan)
        results.rows += (theirs, ours)
        results.loads[theirs.case] = load
        print(
            f"{theirs.case}: {theirs.median_ms:.3g} ms, klfast {ours.median_ms:.3g} ms, "
            f"{theirs.ratio:.2g}x",
            flush=True,
        )
    loaded = outcome.loaded_text(results.loads)
    if loaded is not None and not arguments.allow_load:
        print(f"nothing was written: {loaded}; {REMEDY}", file=sys.stderr)
        return 3
    where = {**conditions(plan), **outcome.load_conditions(results, arguments.allow_load)}
    data = {"conditions": where, "rows": [asdict(row) for row in results.rows]}
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"drop-in-{arguments.peers}.json"
    file.write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
