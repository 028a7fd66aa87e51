"""The frameworks' own functions and klfast's in their place, as pairs for ``drop_in.py``.

Over logits a scalar of each row's result stands for what training makes of it. What frameworks hand
to kernels that run on GPUs alone (flash-attn, Triton) they do in PyTorch here.
"""

from __future__ import annotations

import importlib
import os
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


class Vocabulary(NamedTuple):
    """Log-probs [B, T, V] of the whole vocabulary, which are logits too; [B, T] all kept."""

    logprobs: Tensor
    ref_logprobs: Tensor
    labels: Tensor
    mask: Tensor


Function = Callable[[Any], Any]


class Pair(NamedTuple):
    """The framework's way and klfast's to the same result.

    Attributes:
        framework: whose function it is.
        what: its name, and what is timed.
        theirs, ours: from a batch to a tensor or a tuple of tensors.
    """

    framework: str
    what: str
    theirs: Function
    ours: Function


class Both(NamedTuple):
    """A framework's module and klfast's with the same functions."""

    framework: str
    theirs: Any
    ours: Any

    def pair(self, what: str, make: Callable[[Any], Function]) -> Pair:
        """The pair of what is made of either."""
        return Pair(self.framework, what, make(self.theirs), make(self.ours))

    def gradient(self, what: str, loss: Callable[[Any, Tensor, Any], Tensor]) -> Pair:
        """Forward and backward of the sum of ``loss(module, log-probs, batch)``."""
        return self.pair(
            what + FORWARD_BACKWARD,
            lambda of: gradient(lambda x, batch: loss(of, x, batch).sum()),
        )


def make_batch(shape: tuple[int, ...], dtype: torch.dtype) -> Batch:
    logprobs = -4 * torch.rand(shape)
    ref_logprobs = logprobs - SPREAD * torch.randn(shape)
    old_logprobs = logprobs + SPREAD * torch.randn(shape)
    lengths = torch.linspace(2 * KEPT - 1, 1, shape[0]) * shape[1]
    mask = torch.arange(shape[1]) < lengths[:, None]
    return Batch(logprobs.to(dtype), ref_logprobs.to(dtype), old_logprobs.to(dtype), mask.long())


def make_vocabulary(shape: tuple[int, ...], dtype: torch.dtype) -> Vocabulary:
    logits = 2.5 * torch.randn(shape)
    ref_logprobs = (logits + SPREAD * torch.randn(shape)).log_softmax(-1).to(dtype)
    labels = torch.randint(shape[-1], shape[:-1])
    return Vocabulary(
        logits.log_softmax(-1).to(dtype), ref_logprobs, labels, torch.ones_like(labels)
    )


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


# Over log-probs


def verl_pairs() -> Iterator[Pair]:
    from verl.trainer.ppo import core_algos, ray_trainer

    mode, average = "low_var_kl", "token-mean"
    both = Both("verl", core_algos, compat.verl)

    def two_steps(of: Any, x: Tensor, b: Batch) -> Tensor:
        loss: Tensor = of.agg_loss(of.kl_penalty(x, b.ref_logprobs, mode), b.mask, average)
        return loss

    def rewards(of: Any) -> Function:
        controller = compat.verl.FixedKLController(0.1)

        def run(batch: Batch) -> Tensor:
            data = _Data(batch)
            of.apply_kl_penalty(data, controller, mode)
            return data.batch["token_level_rewards"]

        return run

    def fused(x: Tensor, b: Batch) -> Tensor:
        return compat.verl.kl_loss(x, b.ref_logprobs, mode, b.mask, average)

    yield both.pair(
        "`kl_penalty`", lambda of: lambda b: of.kl_penalty(b.logprobs, b.ref_logprobs, mode)
    )
    separate = both.gradient("`agg_loss(kl_penalty(...))`", two_steps)
    yield separate
    what = "the same as `kl_loss`" + FORWARD_BACKWARD
    yield separate._replace(what=what, ours=gradient(fused))
    yield Both("verl", ray_trainer, compat.verl).pair("`apply_kl_penalty`", rewards)


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


RULES = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.2_5.0,1.0"}
"""A rule over tokens and one over sequences. No token is so near to a bound that rounding decides;
neither side's time depends on how many fail."""


def verl_rollout_pairs() -> Iterator[Pair]:
    """Between sampler and trainer."""
    from verl.trainer.ppo import rollout_corr_helper

    both = Both("verl", rollout_corr_helper, compat.verl)

    def correction(of: Any, **rules: str) -> Function:
        def run(batch: Batch) -> tuple[Tensor, ...]:
            weights, mask, metrics = of.compute_rollout_correction_and_rejection_mask(
                batch.logprobs,
                batch.old_logprobs,
                batch.mask,
                rollout_is="token",
                rollout_is_threshold=2.0,
                **rules,
            )
            assert metrics  # floats: both have copied them from the device
            return weights.batch["rollout_is_weights"], mask

        return run

    def drift(of: Any) -> Function:
        def run(batch: Batch) -> Tensor:
            metrics = of.compute_offpolicy_metrics(batch.logprobs, batch.old_logprobs, batch.mask)
            return torch.tensor([metrics["training_log_ppl"], metrics["rollout_log_ppl"]])

        return run

    name = "`compute_rollout_correction_and_rejection_mask`, token weights"
    yield both.pair(
        name + ", a rule over tokens, one over sequences, all metrics",
        lambda of: correction(of, **RULES),
    )
    yield both.pair(name + " and all metrics", correction)
    yield both.pair("`compute_offpolicy_metrics`", drift)


def openrlhf_pairs() -> Iterator[Pair]:
    from openrlhf.models import utils

    both = Both("OpenRLHF", utils, compat.openrlhf)

    def kl(of: Any, x: Tensor, b: Batch) -> Tensor:
        result: Tensor = of.compute_approx_kl(
            x,
            b.ref_logprobs,
            log_probs_old=b.old_logprobs,
            kl_estimator="k3",
            unbiased_gradient=True,
        )
        return result

    yield both.pair(
        "`compute_approx_kl`",
        lambda of: lambda b: of.compute_approx_kl(b.logprobs, b.ref_logprobs, kl_estimator="k3"),
    )
    yield both.gradient("the same, `unbiased_gradient`", kl)
    yield both.pair(
        "`compute_reward`",
        lambda of: (
            lambda b: of.compute_reward(
                b.old_logprobs[:, 0].float(), 0.1, b.logprobs.float() * b.mask, b.mask.bool()
            )
        ),
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
    both = Both("ROLL", from_tests("frameworks").roll, compat.roll.compute_approx_kl)
    yield both.pair(
        "`compute_approx_kl`", lambda of: lambda b: of(b.logprobs, b.ref_logprobs, b.mask, "k3")
    )
    yield both.gradient("the same", lambda of, x, b: of(x, b.ref_logprobs, b.mask, "k3"))


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


# Over logits


def verl_logits_pairs() -> Iterator[Pair]:
    os.environ["VERL_DISABLE_FLASH_ATTN_CE"] = "1"  # what stands in for it computes nothing
    from verl.utils import torch_functional

    both = Both("verl", torch_functional, compat.verl)
    yield both.pair(
        "`logprobs_from_logits`",
        lambda of: lambda b: of.logprobs_from_logits(b.logprobs, b.labels),
    )
    yield both.gradient(
        "`logprobs_from_logits`", lambda of, x, b: of.logprobs_from_logits(x, b.labels)
    )
    yield both.gradient("`entropy_from_logits`", lambda of, x, b: of.entropy_from_logits(x))


def openrlhf_logits_pairs() -> Iterator[Pair]:
    sys.modules["flash_attn.ops.triton.cross_entropy"] = None  # type: ignore[assignment]
    from openrlhf.models import utils

    both = Both("OpenRLHF", utils, compat.openrlhf)
    yield both.gradient(
        "`log_probs_from_logits`", lambda of, x, b: of.log_probs_from_logits(x, b.labels)
    )
    yield both.gradient(
        "`compute_entropy`, which it compiles", lambda of, x, b: of.compute_entropy(x)
    )


def roll_logits_pairs() -> Iterator[Pair]:
    frameworks = from_tests("frameworks")

    def full(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return compat.roll.compute_approx_kl(logprobs, ref_logprobs, kl_penalty="full")

    def theirs(logits: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = frameworks.logprobs_of(logits.float(), labels)
        return result

    yield Both("ROLL", theirs, compat.roll.log_probs_from_logits).gradient(
        "`log_probs_from_logits`", lambda of, x, b: of(x, b.labels)
    )
    both = Both("ROLL", frameworks.full, full)
    yield both.pair(
        "`compute_approx_kl`, `full`", lambda of: lambda b: of(b.logprobs, b.ref_logprobs)
    )
    yield both.gradient(
        "the same of `log_softmax`", lambda of, x, b: of(x.log_softmax(-1), b.ref_logprobs)
    )


def trl_logits_pairs() -> Iterator[Pair]:
    from trl.trainer import utils

    both = Both("TRL", utils, compat.trl)
    yield both.pair(
        "`selective_log_softmax`",
        lambda of: lambda b: of.selective_log_softmax(b.logprobs, b.labels),
    )
    yield both.gradient(
        "`selective_log_softmax`", lambda of, x, b: of.selective_log_softmax(x, b.labels)
    )
    yield both.gradient(
        "`selective_log_softmax_and_entropy`",
        lambda of, x, b: sum(of.selective_log_softmax_and_entropy(x, b.labels)),
    )
    yield both.pair(
        "`entropy_from_logits`", lambda of: lambda b: of.entropy_from_logits(b.logprobs)
    )


OVER_LOGPROBS = ((64, 8192),)
OVER_LOGITS = ((2, 64, 512), (4, 512, 32000))
QUICK = {OVER_LOGPROBS: ((4, 64),), OVER_LOGITS: ((2, 8, 64), (2, 16, 128))}
"""Shapes, and instead of them: does it run?"""

PEERS: dict[str, dict[Any, tuple[Callable[[], Iterator[Pair]], ...]]] = {
    "verl": {
        OVER_LOGPROBS: (
            *(verl_pairs, verl_rollout_pairs, openrlhf_pairs),
            *(trl011_pairs, roll_pairs, trlx_pairs),
        ),
        OVER_LOGITS: (verl_logits_pairs, openrlhf_logits_pairs, roll_logits_pairs),
    },
    "trl": {OVER_LOGPROBS: (grpo_pairs,), OVER_LOGITS: (trl_logits_pairs,)},
}
"""By the set of peers that is importable, and by shapes: what makes the pairs."""
