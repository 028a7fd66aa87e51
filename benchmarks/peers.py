"""The frameworks' own functions and klfast's in their place, as pairs for ``drop_in.py``.

The frameworks use PyTorch here instead of kernels that run on GPUs alone (flash-attn, Triton).
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import KEPT, SPREAD
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


def pairs(
    framework: str, theirs: Any, ours: Any, forward: dict[str, Of], backward: dict[str, Of]
) -> Iterator[Pair]:
    """A pair for each function by name: forward, and forward and backward of its sum."""

    def of(module: Any, function: Of) -> Function:
        return lambda batch: function(module, batch.logprobs, batch)

    def gradient_of(module: Any, function: Of) -> Function:
        return gradient(lambda x, batch: function(module, x, batch).sum())

    for what, function in forward.items():
        yield Pair(framework, what, of(theirs, function), of(ours, function))
    for what, function in backward.items():
        both = (gradient_of(module, function) for module in (theirs, ours))
        yield Pair(framework, what + FORWARD_BACKWARD, *both)


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
    """A module of the tests' folders."""
    path = next(TESTS.rglob(f"{name}.py"))
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(name)


def verl_pairs() -> Iterator[Pair]:
    from verl.trainer.ppo import core_algos, ray_trainer

    mode, average = "low_var_kl", "token-mean"
    controller = compat.verl.FixedKLController(0.1)

    def two_steps(of: Any, x: Tensor, b: Batch) -> Any:
        return of.agg_loss(of.kl_penalty(x, b.ref_logprobs, mode), b.mask, average)

    def rewards(of: Any, x: Tensor, b: Batch) -> Tensor:
        data = _Data(b)
        of.apply_kl_penalty(data, controller, mode)
        return data.batch["token_level_rewards"]

    def fused(x: Tensor, b: Batch) -> Tensor:
        return compat.verl.kl_loss(x, b.ref_logprobs, mode, b.mask, average)

    first, separate = pairs(
        "verl",
        core_algos,
        compat.verl,
        {"`kl_penalty`": lambda of, x, b: of.kl_penalty(x, b.ref_logprobs, mode)},
        {"`agg_loss(kl_penalty(...))`": two_steps},
    )
    yield from (first, separate)
    what = "the same as `kl_loss`" + FORWARD_BACKWARD
    yield separate._replace(what=what, ours=gradient(fused))
    yield from pairs("verl", ray_trainer, compat.verl, {"`apply_kl_penalty`": rewards}, {})


class _Data:
    """The part of a DataProto that ``apply_kl_penalty`` reads: a batch with a size."""

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

    def kl(of: Any, x: Tensor, b: Batch, **options: Any) -> Any:
        return of.compute_approx_kl(x, b.ref_logprobs, kl_estimator="k3", **options)

    def unbiased(of: Any, x: Tensor, b: Batch) -> Any:
        return kl(of, x, b, log_probs_old=b.old_logprobs, unbiased_gradient=True)

    def reward(of: Any, x: Tensor, b: Batch) -> Any:
        first = b.old_logprobs[:, 0].float()
        return of.compute_reward(first, 0.1, x.float() * b.mask, b.mask.bool())

    first, last, middle = pairs(
        "OpenRLHF",
        utils,
        compat.openrlhf,
        {"`compute_approx_kl`": kl, "`compute_reward`": reward},
        {"the same, `unbiased_gradient`": unbiased},
    )
    yield from (first, middle, last)


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

    theirs = from_tests("frameworks").roll
    ours = compat.roll.compute_approx_kl
    yield from pairs("ROLL", theirs, ours, {"`compute_approx_kl`": kl}, {"the same": kl})


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


SHAPE, QUICK = (64, 8192), (4, 64)
"""The shape, and instead of it: does it run?"""

PEERS: dict[str, tuple[Callable[[], Iterator[Pair]], ...]] = {
    "verl": (verl_pairs, openrlhf_pairs, trl011_pairs, roll_pairs, trlx_pairs),
    "trl": (grpo_pairs,),
}
"""What makes the pairs, by the set of peers that is importable."""
