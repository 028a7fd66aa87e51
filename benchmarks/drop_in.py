"""The frameworks' own functions against klfast's in their place, interleaved in one process.

``make bench-peers`` runs it with what ``make test-peers`` installs, once with each set of peers,
and writes ``benchmarks/results/drop-in-<peers>.json``; ``benchmarks/report.py`` makes the table of
them in docs/measured.md. The framework's real function is timed; for ROLL and trlx, which have no
releases to install, their formula as ``tests/support/frameworks.py`` has it. The frameworks use
PyTorch here instead of kernels that run on GPUs alone (flash-attn, Triton).
"""

import argparse
import importlib
import itertools
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import idle, memory, outcome
from benchmarks.cases import DTYPES, KEPT, SPREAD
from benchmarks.command import REMEDY
from benchmarks.measure import ATTEMPTS, Plan, time_idle
from klfast import compat

TESTS = Path(__file__).parents[1] / "tests"
FORWARD_BACKWARD = ", forward + backward"


class Batch(NamedTuple):
    """[B, T] each; the mask keeps each sequence's beginning, ``KEPT`` of all tokens."""

    logprobs: Tensor
    ref_logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor


Function = Callable[[Any], Any]


class Pair(NamedTuple):
    """The framework's way and klfast's to the same result.

    Attributes:
        framework: the framework that has the function.
        what: the function's name, and the timed part.
        theirs, ours: from a batch to a tensor or a tuple of tensors.
    """

    framework: str
    what: str
    theirs: Function
    ours: Function


Of = Callable[[Any, Any, Any], Any]
"""Takes a module (the framework's, or klfast's with the same functions), log-probs, and a batch."""


def pair(
    framework: str, what: str, theirs: Any, ours: Any, function: Of, backward: bool = False
) -> Pair:
    """A function of either module: forward, or forward and backward of its sum."""

    def of(module: Any) -> Function:
        if backward:
            return gradient(lambda x, batch: function(module, x, batch).sum())
        return lambda batch: function(module, batch.logprobs, batch)

    return Pair(framework, what + FORWARD_BACKWARD * backward, of(theirs), of(ours))


def make_batch(shape: tuple[int, ...], dtype: torch.dtype) -> Batch:
    logprobs = -4 * torch.rand(shape)
    ref_logprobs = logprobs - SPREAD * torch.randn(shape)
    old_logprobs = logprobs + SPREAD * torch.randn(shape)
    lengths = torch.linspace(2 * KEPT - 1, 1, shape[0]) * shape[1]
    mask = torch.arange(shape[1]) < lengths[:, None]
    return Batch(logprobs.to(dtype), ref_logprobs.to(dtype), old_logprobs.to(dtype), mask.long())


def gradient(loss: Callable[[Tensor, Any], Tensor]) -> Function:
    """(loss, its gradient to the log-probs): forward and backward."""

    def both(batch: Any) -> tuple[Tensor, Tensor]:
        leaf = batch.logprobs.detach().requires_grad_()
        value = loss(leaf, batch)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    return both


def from_tests(name: str) -> types.ModuleType:
    path = next(TESTS.rglob(f"{name}.py"))
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(name)


def verl_pairs() -> Iterator[Pair]:
    from verl.trainer.ppo import core_algos, ray_trainer

    mode, average = "low_var_kl", "token-mean"
    controller = compat.verl.FixedKLController(0.1)

    def two_steps(of: Any, x: Tensor, b: Batch) -> Any:
        return of.agg_loss(kl(of, x, b), b.mask, average)

    def kl(of: Any, x: Tensor, b: Batch) -> Any:
        return of.kl_penalty(x, b.ref_logprobs, mode)

    def rewards(of: Any, x: Tensor, b: Batch) -> Tensor:
        tensors = _Tensors(old_log_probs=b.logprobs, ref_log_prob=b.ref_logprobs)
        tensors |= {"response_mask": b.mask, "token_level_scores": b.old_logprobs.float()}
        tensors.batch_size = b.mask.shape[:1]
        of.apply_kl_penalty(types.SimpleNamespace(batch=tensors), controller, mode)
        return tensors["token_level_rewards"]

    def fused(x: Tensor, b: Batch) -> Tensor:
        return compat.verl.kl_loss(x, b.ref_logprobs, mode, b.mask, average)

    of_core = core_algos, compat.verl
    yield pair("verl", "`kl_penalty`", *of_core, kl)
    separate = pair("verl", "`agg_loss(kl_penalty(...))`", *of_core, two_steps, backward=True)
    yield separate
    what = "the same as `kl_loss`" + FORWARD_BACKWARD
    yield separate._replace(what=what, ours=gradient(fused))
    yield pair("verl", "`apply_kl_penalty`", ray_trainer, compat.verl, rewards)


class _Tensors(dict[str, Tensor]):
    """The part of a DataProto's batch that ``apply_kl_penalty`` reads: tensors with a size."""

    batch_size: tuple[int, ...]


def openrlhf_pairs() -> Iterator[Pair]:
    from openrlhf.models import utils

    def kl(of: Any, x: Tensor, b: Batch, **options: Any) -> Any:
        return of.compute_approx_kl(x, b.ref_logprobs, kl_estimator="k3", **options)

    def unbiased(of: Any, x: Tensor, b: Batch) -> Any:
        return kl(of, x, b, log_probs_old=b.old_logprobs, unbiased_gradient=True)

    def reward(of: Any, x: Tensor, b: Batch) -> Any:
        first = b.old_logprobs[:, 0].float()
        return of.compute_reward(first, 0.1, x.float() * b.mask, b.mask.bool())

    of_both = utils, compat.openrlhf
    yield pair("OpenRLHF", "`compute_approx_kl`", *of_both, kl)
    yield pair("OpenRLHF", "the same, `unbiased_gradient`", *of_both, unbiased, backward=True)
    yield pair("OpenRLHF", "`compute_reward`", *of_both, reward)


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
    def kl(of: Any, x: Tensor, b: Batch) -> Any:
        return of(x, b.ref_logprobs, b.mask, "k3")

    of_both = from_tests("frameworks").roll, compat.roll.compute_approx_kl
    yield pair("ROLL", "`compute_approx_kl`", *of_both, kl)
    yield pair("ROLL", "the same", *of_both, kl, backward=True)


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
        what = f"`GRPOTrainer._compute_loss`, {loss_type}{FORWARD_BACKWARD}"
        yield Pair("TRL", what, loss(GRPOTrainer, loss_type), loss(Fused, loss_type))


SHAPE, QUICK = (64, 8192), (4, 64)  # the shape, and instead of it: does it run?

PEERS: dict[str, tuple[Callable[[], Iterator[Pair]], ...]] = {
    "verl": (verl_pairs, openrlhf_pairs, trl011_pairs, roll_pairs, trlx_pairs),
    "trl": (grpo_pairs,),
}
"""What makes the pairs, by the set of peers that is importable."""

ROUNDS = 20


def check(pair: Pair, batch: Any) -> None:
    """Both lead to the same, as far as the framework's dtype goes."""
    results = (f(batch) for f in (pair.theirs, pair.ours))
    theirs, ours = (each if isinstance(each, tuple) else (each,) for each in results)
    eps = torch.finfo(batch.logprobs.dtype).eps
    for mine, other in zip(ours, theirs, strict=True):
        kept = batch.mask != 0 if other.shape == batch.mask.shape else torch.tensor(True)
        torch.testing.assert_close(
            mine.double() * kept, other.double() * kept, rtol=1e-4 + 64 * eps, atol=64 * eps
        )


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
        memory.keep_memory()
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
        times = f"{theirs['median_ms']:.3g} ms, klfast {ours['median_ms']:.3g} ms"
        print(f"{theirs['case']}: {times}, {theirs['ratio']:.2g}x", flush=True)
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
