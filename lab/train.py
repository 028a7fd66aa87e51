"""Policy gradient under a KL penalty: one step of one arm.

Shapes: B = prompts x group sequences, T tokens in a continuation.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from klfast import Estimator, KLStats, RolloutCorrection, kl_divergence, kl_penalty
from klfast.controllers.base import CoefficientController
from klfast.names import ReductionName
from lab.accuracy import SAMPLED, token_errors
from lab.arms import ARMS
from lab.folder import Row
from lab.model import (
    GPT,
    Batch,
    continuation_logits,
    frozen_copy,
    perplexity,
    sample,
)
from lab.off_policy import (
    correct,
    drift_record,
    synchronize,
    token_weights,
    weighted_kl,
)
from lab.settings import CompareError, Settings
from lab.team import ALONE, Share, Team
from lab.text import Corpus, even_windows, prompt_starts, random_prompts

ESTIMATOR = Estimator("k3+")
"""The value is unbiased, and of low variance near the reference; the gradient is the reverse KL's
(k3's own is not)."""

REDUCTION: ReductionName = "seq-mean-token-sum"
"""The penalty's: the mean over sequences of each one's sum, as the controllers' targets are."""


def estimator(settings: Settings) -> Estimator:
    """The penalty's, with the clip that the settings ask for."""
    return replace(ESTIMATOR, log_ratio_clip=settings.clip or None)


@dataclass(frozen=True)
class World:
    """The state that all arms share and none changes.

    Attributes:
        corpus: the text.
        reference: the pretrained, frozen model.
        held_out: ``[W, context]`` windows on which fluency is measured.
        starts: where prompts may begin in the train part.
        letters: ``[V]`` how often the rewarded letter occurs in each token.
        characters: ``[V]`` the length of each token's text.
    """

    corpus: Corpus
    reference: GPT
    held_out: Tensor
    starts: Tensor
    letters: Tensor
    characters: Tensor


@dataclass
class ArmState:
    """The state of one arm: all that a step reads and changes.

    ``trainee`` has the policy's weights, and passes gradients to the other ranks. ``sampler`` draws
    the tokens; the policy itself where there is none. The thread that trains the arm holds
    ``turn``.
    """

    name: str
    policy: GPT
    trainee: nn.Module
    optimizer: torch.optim.Adam
    controller: CoefficientController
    generator: torch.Generator
    sampler: GPT | None = None
    rows: list[Row] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Comparison:
    """Policy and reference on a batch: ``[B, T]``, from one read of the logits of both.

    Attributes:
        logprobs: the policy's, of the drawn tokens; the only one with a graph.
        ref_logprobs: the reference's.
        exact: the KL over the whole vocabulary at each token, given the tokens before it.
        stats: ``kl`` sums ``exact``; ``k1``, ``k2`` and ``k3`` know the drawn tokens alone.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    exact: Tensor
    stats: KLStats


def build_world(corpus: Corpus, reference: GPT, settings: Settings) -> World:
    return World(
        corpus=corpus,
        reference=reference,
        held_out=even_windows(corpus.held_out, settings.held_out_windows, settings.context),
        starts=prompt_starts(corpus, corpus.train, settings.prompt_length),
        letters=torch.tensor([float(t.lower().count(settings.letter)) for t in corpus.tokens]),
        characters=torch.tensor([float(len(t)) for t in corpus.tokens]),
    )


def new_arm(name: str, world: World, settings: Settings, team: Team = ALONE) -> ArmState:
    """The arm before its first step. Every arm draws from a generator with the same seed."""
    policy = frozen_copy(world.reference).requires_grad_(True)
    trainee = team.wrap(policy)
    return ArmState(
        name=name,
        policy=policy,
        trainee=trainee,
        optimizer=torch.optim.Adam(policy.parameters(), lr=settings.learning_rate),
        controller=ARMS[name].controller(settings, team.group),
        generator=torch.Generator().manual_seed(settings.seed),
        sampler=frozen_copy(world.reference) if ARMS[name].is_off_policy else None,
    )


def train_step(arm: ArmState, world: World, settings: Settings, team: Team = ALONE) -> Row:
    """Samples, rewards, penalises, updates policy and coefficient; returns the step's record."""
    started = time.thread_time()
    share = team.share(settings.prompts, settings.group)
    if arm.sampler is not None and len(arm.rows) % settings.staleness == 0:
        synchronize(arm.sampler, arm.policy)
    batch = sample_batch(arm, world, settings, share)
    reward = letter_share(batch, world)
    advantage = group_advantage(reward, settings.group)

    both = compare_models(arm.trainee, world.reference, batch)
    own_logprobs = both.logprobs.detach()
    corrected = correction_of(arm, own_logprobs, batch, advantage, settings)
    weights = batch.mask
    if corrected is not None and ARMS[arm.name].is_corrected:
        weights = token_weights(corrected)
    coefficient = arm.controller.value
    sequences = share.total / team.size  # gradients are averaged over the ranks
    kl_gradient, stats, kl_seconds = kl_step(
        own_logprobs,
        both.ref_logprobs,
        weights,
        coefficient,
        estimator(settings),
        sequences,
    )
    reward_gradient = -advantage.to(both.logprobs.dtype)[:, None] * weights / sequences

    arm.optimizer.zero_grad()
    torch.autograd.backward(both.logprobs, reward_gradient + kl_gradient)
    torch.nn.utils.clip_grad_norm_(arm.policy.parameters(), 1.0)
    arm.optimizer.step()
    arm.controller.update(
        stats if corrected is None else both.stats
    )  # weighted, they may be of none

    def whole(own: Tensor) -> Tensor:
        return team.gather(own, share)

    stats = team.gather_stats(stats, share)
    exact = team.gather_stats(both.stats, share)
    row = {
        "arm": arm.name,
        "step": len(arm.rows) + 1,
        "reward": float(whole(reward).mean()),
        "coefficient": coefficient,
        **kl_record(exact),
        "clipped": int(stats.clipped.sum()),
        "nonfinite": int(stats.nonfinite.sum()),
        "by_length": kl_by_length(exact),
        "held_out_perplexity": perplexity(arm.policy, world.held_out),
        "kl_step_seconds": kl_seconds,
    }
    if corrected is None:
        row["token_errors"] = token_errors(
            whole(both.exact),
            whole(both.logprobs),
            whole(both.ref_logprobs),
            whole(batch.mask),
        )
    else:
        weighted = weighted_kl(corrected, own_logprobs, both.ref_logprobs)
        row["rollout"] = {
            **drift_record(team.gather_rollout(corrected.stats, share)),
            "weighted_k1": float(whole(weighted).mean()),
        }
    row["step_seconds"] = time.thread_time() - started
    if any(isinstance(value, float) and not math.isfinite(value) for value in row.values()):
        raise CompareError(
            f"arm {arm.name!r} diverged at step {row['step']}: there is a NaN or an infinity among "
            "its numbers; try a smaller learning rate"
        )
    arm.rows.append(row)
    return row


def sample_batch(
    arm: ArmState, world: World, settings: Settings, share: Share | None = None
) -> Batch:
    """``group`` continuations of each of ``prompts`` prompts; a group's rows are neighbours.

    Of the whole batch, or of a share's rows.
    """
    corpus = world.corpus
    share = share or ALONE.share(settings.prompts, settings.group)
    prompts = random_prompts(
        corpus.train, world.starts, settings.prompts, settings.prompt_length, arm.generator
    )[share.rows.start // settings.group : share.rows.stop // settings.group]
    model = arm.policy if arm.sampler is None else arm.sampler
    continuations = sample(model, prompts, settings.continuation_length, arm.generator, share)
    return Batch(prompts, continuations, kept(continuations, corpus.end))


def kept(continuations: Tensor, end: int) -> Tensor:
    """Boolean ``[B, T]``: tokens up to and with the first that ends the paragraph."""
    is_end = continuations == end
    return (is_end.cumsum(1) - is_end.long()) == 0


def letter_share(batch: Batch, world: World) -> Tensor:
    """``[B]`` the reward: the share of the letter among the continuation's characters.

    Each place left unused by ending early counts as one character that is not the letter, so that a
    short answer is no way out.
    """
    letters = (world.letters[batch.continuations] * batch.mask).sum(1)
    characters = (world.characters[batch.continuations] * batch.mask).sum(1)
    return letters / (characters + (~batch.mask).sum(1))


def group_advantage(reward: Tensor, group: int) -> Tensor:
    """``[B]`` reward minus the mean of its group: continuations of the same prompt."""
    grouped = reward.view(-1, group)
    return (grouped - grouped.mean(1, keepdim=True)).flatten()


def correction_of(
    arm: ArmState, logprobs: Tensor, batch: Batch, advantage: Tensor, settings: Settings
) -> RolloutCorrection | None:
    """The correction for the arm's sampler; None where that is the policy."""
    if arm.sampler is None:
        return None
    return correct(arm.sampler, logprobs, batch, advantage, settings.correction)


def compare_models(policy: nn.Module, reference: GPT, batch: Batch) -> Comparison:
    logits = continuation_logits(policy, batch.prompts, batch.continuations)
    with torch.no_grad():
        ref_logits = continuation_logits(reference, batch.prompts, batch.continuations)
    exact, logprobs, ref_logprobs, _, stats = kl_divergence(
        logits, ref_logits, batch.mask, token_ids=batch.continuations, return_stats=True
    )
    assert logprobs is not None
    assert ref_logprobs is not None
    assert stats is not None
    return Comparison(logprobs, ref_logprobs, exact.detach(), stats)


def kl_step(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    coefficient: float,
    estimator: Estimator = ESTIMATOR,
    sequences: float | None = None,
) -> tuple[Tensor, KLStats, float]:
    """The penalty's gradient to ``logprobs`` ``[B, T]``, its statistics, and its processor time.

    ``mask`` may hold weights. ``sequences`` divides the sum over sequences; those that there are by
    default.

    A training loop would write ``loss = policy_loss + penalty`` and one ``backward``; here the
    gradient is taken apart so that the time is the penalty's alone, forward and backward.
    """
    logprobs = logprobs.requires_grad_()
    started = time.thread_time()
    penalty, stats = kl_penalty(
        logprobs,
        ref_logprobs,
        mask,
        estimator=estimator,
        reduction=REDUCTION,
        coef=coefficient,
        normalizer=sequences,
        return_stats=True,
    )
    (gradient,) = torch.autograd.grad(penalty, logprobs)
    return gradient, stats, time.thread_time() - started


def kl_record(stats: KLStats) -> Row:
    """Means per sequence and per token of the exact KL and of each estimator, in nats.

    And the standard deviation over the sequences of each estimator's error, which is its sum over a
    sequence minus the exact KL's.
    """
    tokens = float(stats.length.sum())
    totals = {"exact": stats.kl, **{str(name): getattr(stats, name) for name in SAMPLED}}
    record: Row = {}
    for name, total in totals.items():
        record[f"kl_per_sequence_{name}"] = float(total.mean())
        record[f"kl_per_token_{name}"] = float(total.sum()) / tokens
    for name in SAMPLED:
        error = totals[name].double() - stats.kl.double()
        record[f"kl_per_sequence_{name}_error_std"] = float(error.std())
    record["max_log_ratio"] = float(stats.max_abs_log_ratio.max())
    record["mean_length"] = tokens / len(stats.length)
    return record


def kl_by_length(stats: KLStats) -> dict[str, list[float]]:
    """Columns with one entry for each bucket of lengths that holds a sequence.

    ``first``: the least length, a power of 2, below the next of which the lengths are;
    ``sequences`` and ``tokens``: how many; ``exact`` and ``k3``: sums of the KL in nats.
    """
    bucket = stats.length.log2().floor().long()
    columns = {
        "sequences": torch.ones_like(stats.length),
        "tokens": stats.length,
        "exact": stats.kl,
        "k3": stats.k3,
    }
    present = torch.bincount(bucket).nonzero()[:, 0]
    sums = {
        name: torch.bincount(bucket, weights=column.double())[present].tolist()
        for name, column in columns.items()
    }
    return {"first": [2.0**b for b in present.tolist()], **sums}
