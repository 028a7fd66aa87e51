"""Policy gradient under a KL penalty: one step of one arm.

Some arms sample with old weights that are rounded to 8 bits. Asynchronous training samples while
the policy learns, and inference engines compute in fp8. ``klfast.rollout_correction`` corrects for
both.

Shapes: B = prompts x group sequences, T tokens in a continuation.
"""

import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import klfast
from klfast import EstimatorName, KLStats, RolloutCorrection
from klfast.args.rollout_presets import PRESETS
from klfast.controllers.base import CoefficientController
from klfast.types.names import ReductionName
from lab.model import GPT, Batch, continuation_logits, frozen_copy, perplexity, sample
from lab.settings import ARMS, CompareError, Settings
from lab.text import Corpus, prompt_starts, some_of, windows

Row = dict[str, Any]  # the record of a step, a line of ``metrics.jsonl``

ESTIMATOR: EstimatorName = "k3+"
"""Its value is unbiased, with low variance near the reference. Its expected gradient is the reverse
KL's gradient, which is not true of k3."""

REDUCTION: ReductionName = "seq-mean-token-sum"
"""The penalty's reduction: the mean over sequences of their sums, like the controllers' targets."""


def estimator(settings: Settings) -> klfast.Estimator:
    """The penalty's estimator, with the clip of the settings."""
    return klfast.Estimator(ESTIMATOR, log_ratio_clip=settings.clip or None)


SAMPLED: tuple[EstimatorName, ...] = ("k1", "k2", "k3")
"""The estimators that are recorded together with the exact KL."""

EDGES = tuple(float(f"{digit}e{power}") for power in range(-8, 4) for digit in (1, 2, 5))
"""The lower edges of the bins, in nats per token. No bin has tokens at the first edge or below."""

Errors = dict[str, list[float]]
"""Columns with an entry for each bin that has tokens: its lower edge (``low``), its number of
``tokens``, and sums over these in nats. The sums are of the ``exact`` KL, of each estimator's error
(``k1``, ...) and of the error's square (``k1_squared``, ...)."""


@dataclass(frozen=True)
class World:
    """The state that all arms share and that no arm changes.

    Attributes:
        corpus: the text.
        reference: the pretrained, frozen model.
        held_out: ``[W, context]`` windows on which fluency is measured.
        starts: the positions in the train part where prompts may begin.
        letters: ``[V]`` the number of rewarded letters in each token.
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
    """The state of one arm: everything that a step reads and changes.

    ``sampler`` draws the tokens. Without one the policy draws them. The thread that trains the arm
    holds ``turn``.
    """

    name: str
    policy: GPT
    optimizer: torch.optim.Adam
    controller: CoefficientController
    generator: torch.Generator
    sampler: GPT | None = None
    rows: list[Row] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def stateful(self) -> dict[str, Any]:
        """The objects with a ``state_dict``, by name."""
        parts = {"policy": self.policy, "optimizer": self.optimizer, "controller": self.controller}
        return parts if self.sampler is None else {**parts, "sampler": self.sampler}


def build_world(corpus: Corpus, reference: GPT, settings: Settings) -> World:
    last = len(corpus.held_out) - settings.context
    even = torch.linspace(0, last, settings.held_out_windows)
    return World(
        corpus=corpus,
        reference=reference,
        held_out=windows(corpus.held_out, even.long(), settings.context),
        starts=prompt_starts(corpus, corpus.train, settings.prompt_length),
        letters=torch.tensor([float(t.lower().count(settings.letter)) for t in corpus.tokens]),
        characters=torch.tensor([float(len(t)) for t in corpus.tokens]),
    )


def new_arm(name: str, world: World, settings: Settings) -> ArmState:
    """The arm before its first step. Every arm draws from a generator with the same seed."""
    policy = frozen_copy(world.reference).requires_grad_(True)
    return ArmState(
        name=name,
        policy=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=settings.learning_rate),
        controller=ARMS[name].controller(settings),
        generator=torch.Generator().manual_seed(settings.seed),
        sampler=frozen_copy(world.reference) if ARMS[name].is_off_policy else None,
    )


def train_step(arm: ArmState, world: World, settings: Settings) -> Row:
    """Makes one step: sample, reward, penalty, updates. Returns the step's record."""
    started = time.thread_time()
    if arm.sampler is not None and len(arm.rows) % settings.staleness == 0:
        synchronize(arm.sampler, arm.policy)
    batch = sample_batch(arm, world, settings)
    reward = letter_share(batch, world)
    advantage = group_advantage(reward, settings.group)

    logits = continuation_logits(arm.policy, batch.prompts, batch.continuations)
    with torch.no_grad():
        ref_logits = continuation_logits(world.reference, batch.prompts, batch.continuations)
    # One read of the logits of both: the exact KL at each token, given the tokens before it, its
    # statistics, and the log-probs of the sampled tokens.
    both: Any = klfast.kl_divergence(
        logits, ref_logits, batch.mask, token_ids=batch.continuations, return_stats=True
    )
    own_logprobs = both.logprobs.detach()
    corrected, weights = None, batch.mask
    if arm.sampler is not None:
        corrected = correct(arm.sampler, own_logprobs, batch, advantage, settings.correction)
        if ARMS[arm.name].is_corrected:
            weights = corrected.token_weights
    coefficient = arm.controller.value
    kl_gradient, stats, kl_seconds = kl_step(
        own_logprobs, both.ref_logprobs, weights, coefficient, estimator(settings)
    )
    reward_gradient = -advantage.to(both.logprobs.dtype)[:, None] * weights / settings.batch

    arm.optimizer.zero_grad()
    torch.autograd.backward(both.logprobs, reward_gradient + kl_gradient)
    torch.nn.utils.clip_grad_norm_(arm.policy.parameters(), 1.0)
    arm.optimizer.step()
    # With weights the statistics may have no token.
    arm.controller.update(stats if corrected is None else both.stats)

    row = {
        "arm": arm.name,
        "step": len(arm.rows) + 1,
        "reward": float(reward.mean()),
        "coefficient": coefficient,
        **kl_record(both.stats),
        "clipped": int(stats.clipped.sum()),
        "nonfinite": int(stats.nonfinite.sum()),
        "held_out_perplexity": perplexity(arm.policy, world.held_out),
        "kl_step_seconds": kl_seconds,
    }
    if corrected is None:
        exact = both.kl.detach()
        row["token_errors"] = token_errors(exact, own_logprobs, both.ref_logprobs, batch.mask)
    else:
        numbers = corrected.stats.as_dict("")
        weighted = weighted_kl(corrected, own_logprobs, both.ref_logprobs).mean()
        row["rollout"] = {name: float(numbers[name]) for name in DRIFT}
        row["rollout"]["weighted_k1"] = float(weighted)
    row["step_seconds"] = time.thread_time() - started
    if any(isinstance(value, float) and not math.isfinite(value) for value in row.values()):
        raise CompareError(
            f"arm {arm.name!r} diverged at step {row['step']}: there is a NaN or an infinity among "
            "its numbers; try a smaller learning rate"
        )
    arm.rows.append(row)
    return row


def sample_batch(arm: ArmState, world: World, settings: Settings) -> Batch:
    """Samples ``group`` continuations of each prompt. The rows of a group follow each other."""
    train, generator, length = world.corpus.train, arm.generator, settings.continuation_length
    starts = some_of(world.starts, settings.prompts, generator)
    prompts = windows(train, starts, settings.prompt_length)
    drawn = sample(arm.sampler or arm.policy, prompts, length, generator, settings.group)
    return Batch(prompts, drawn, kept(drawn, world.corpus.end))


def kept(continuations: Tensor, end: int) -> Tensor:
    """Boolean ``[B, T]``: True up to and including the first token that ends the paragraph."""
    is_end = continuations == end
    return (is_end.cumsum(1) - is_end.long()) == 0


def letter_share(batch: Batch, world: World) -> Tensor:
    """``[B]`` the reward: the share of the letter among the continuation's characters.

    Each token that is missing at the end counts as one character that is not the letter, so that
    a short continuation does not get a high reward.
    """
    letters = (world.letters[batch.continuations] * batch.mask).sum(1)
    characters = (world.characters[batch.continuations] * batch.mask).sum(1)
    return letters / (characters + (~batch.mask).sum(1))


def group_advantage(reward: Tensor, group: int) -> Tensor:
    """``[B]`` reward minus the mean of its group: continuations of the same prompt."""
    grouped = reward.view(-1, group)
    return (grouped - grouped.mean(1, keepdim=True)).flatten()


def kl_step(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    coefficient: float,
    estimator: klfast.Estimator,
) -> tuple[Tensor, KLStats, float]:
    """The penalty's gradient to ``logprobs`` ``[B, T]``, its statistics, and its processor time.

    ``mask`` may hold weights.

    A training loop would write ``loss = policy_loss + penalty`` and one ``backward``. Here the
    penalty has a backward of its own, so that only the penalty is timed.
    """
    logprobs = logprobs.requires_grad_()
    started = time.thread_time()
    penalty, stats = klfast.kl_penalty(
        logprobs,
        ref_logprobs,
        mask,
        estimator=estimator,
        reduction=REDUCTION,
        coef=coefficient,
        return_stats=True,
    )
    (gradient,) = torch.autograd.grad(penalty, logprobs)
    return gradient, stats, time.thread_time() - started


def kl_record(stats: KLStats) -> Row:
    """Means per sequence and per token of the exact KL and of each estimator, in nats.

    Also the standard deviation over the sequences of each estimator's error. The error is the
    estimator's sum over a sequence minus the sum of the exact KL.
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


def token_errors(exact: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Errors:
    """The errors of one batch, from the exact KL and log-probs of sampled tokens, ``[B, T]``."""
    logprobs = logprobs.detach()
    binned = mask & (exact > EDGES[0])
    kl = exact[binned].double()
    values = {"tokens": torch.ones_like(kl), "exact": kl}
    for name in SAMPLED:
        estimate = klfast.kl_penalty(logprobs, ref_logprobs, mask, estimator=name)
        error = estimate[binned].double() - kl
        values |= {name: error, f"{name}_squared": error.square()}
    bins = torch.bucketize(kl, torch.tensor(EDGES, dtype=kl.dtype)) - 1
    present = torch.bincount(bins).nonzero()[:, 0]
    sums = {
        key: torch.bincount(bins, weights=value)[present].tolist() for key, value in values.items()
    }
    return {"low": [EDGES[i] for i in present.tolist()], **sums}


FP8 = torch.float8_e4m3fn

DRIFT = (
    *("kl", "k3", "log_ppl_diff", "max_log_ratio", "min_log_ratio", "chi2_token", "ess"),
    *("weight_mean", "outside", "rejected_tokens", "rejected_sequences", "nonfinite"),
)
"""The statistics recorded for each step, with the names of ``RolloutStats.as_dict``."""


def synchronize(sampler: GPT, policy: GPT) -> None:
    """Gives the sampler the policy's weights, rounded."""
    sampler.load_state_dict({name: rounded(w) for name, w in policy.state_dict().items()})


@torch.no_grad()
def rounded(weight: Tensor) -> Tensor:
    """Rounds a matrix to fp8 (e4m3) with one scale. Vectors stay, as in inference engines."""
    if weight.dim() < 2:
        return weight
    scale = weight.abs().amax().clamp(min=torch.finfo(weight.dtype).tiny) / torch.finfo(FP8).max
    return (weight / scale).to(FP8).to(weight.dtype) * scale


@torch.no_grad()
def correct(
    sampler: GPT, logprobs: Tensor, batch: Batch, advantage: Tensor, preset: str
) -> RolloutCorrection:
    """``rollout_correction`` of a batch from the sampler. ``logprobs`` are the policy's.

    ``advantage`` [B] is for presets that decide by its sign.
    """
    logits = continuation_logits(sampler, batch.prompts, batch.continuations)
    options = PRESETS[preset]
    signs = any(rule.outward_only for rule in options.get("reject", ()))
    return klfast.rollout_correction(
        logprobs,
        klfast.token_logprobs(logits, batch.continuations),
        batch.mask,
        advantages=advantage.to(logprobs.dtype) if signs else None,
        **options,
    )


@torch.no_grad()
def weighted_kl(corrected: RolloutCorrection, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``[B]`` the KL to the reference by k1 with these weights, in nats per sequence.

    Given the tokens before it, the expectation of a token's ``weight * k1`` is the exact KL, except
    for the bounds on the weight.
    """
    mask, weights = corrected.mask, corrected.weights
    return klfast.kl_penalty(
        logprobs, ref_logprobs, mask, weights=weights, estimator="k1", reduction="seq-sum"
    )
