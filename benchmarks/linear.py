"""Divergences and log-probs from hidden states, timed.

Shapes: N tokens of width D, V words. The policy has a head of its own; its reference has another,
or under a frozen head the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import klfast
from benchmarks import cases
from benchmarks.cases import Case, Forward, Inputs, Layout, Shape, Suite, by_name
from benchmarks.logits import LOGIT_STD, LogitsOp, eager_kl, eager_logprobs
from klfast.autograd.chunks import length_of

HELD = "held logits"
CHECKPOINT = "checkpoint"
TORCHS = "linear_cross_entropy"
TORCH_CHUNKS = (128, 256, 512)

OF_HIDDEN, OF_WEIGHT = "gradient of hidden", "gradient of weight"

_ROWS = 64  # rows of which the check makes the logits at a time, at the least

Models = Callable[[Sequence[Tensor]], list[tuple[Tensor, Tensor]]]
OfLogits = Callable[..., Tensor]
"""What is computed of a part's logits: of the policy, and of the reference where there is one, or
the ids of the tokens."""


@dataclass(frozen=True)
class LinearOp(LogitsOp):
    """A function from hidden states to per-token values, or with ``mean`` to their mean.

    A ``frozen`` head has no gradient, and is the reference's too.
    """

    frozen: bool = False

    working_bytes = 60

    @property
    def shared(self) -> frozenset[int]:
        return frozenset({1})

    @property
    def gradients(self) -> dict[str, int]:
        return {OF_HIDDEN: 0} if self.frozen else {OF_HIDDEN: 0, OF_WEIGHT: 1}

    def numbers(self, shape: Shape) -> int:
        return shape[0] * shape[2]

    def rows_at_once(self, inputs: Inputs, numbers: int) -> int:
        return max(_ROWS, numbers // len(inputs.arguments[1]))

    def rounding(self, inputs: Inputs) -> tuple[float, float]:
        """Rivals round logits, and sums of gradients over parts of the tokens."""
        eps = torch.finfo(inputs.arguments[0].dtype).eps
        return eps, 4 * eps

    def term(self, inputs: Inputs) -> float:
        """Of some tokens' logits."""
        hidden, weight = inputs.arguments[:2]
        return 1 + cases.largest(linear(hidden[:_ROWS].detach(), weight.detach()))

    def sizes(self, inputs: Inputs) -> tuple[float, float]:
        value, gradient = super().sizes(inputs)
        return value, gradient * max(map(cases.largest, inputs.arguments[:2]))

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        eagerly, ours = self._of_logits()
        in_parts = self._in_parts(ours)
        return {cases.EAGER: self._whole(eagerly), HELD: self._whole(ours), CHECKPOINT: in_parts}

    def _of_logits(self) -> tuple[OfLogits, OfLogits]:
        """The per-token computation from logits, in eager PyTorch and by klfast."""
        raise NotImplementedError

    def _both(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What ``OfLogits`` takes."""
        raise NotImplementedError

    def _models(self, arguments: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Hidden states and head of each matmul that makes logits. The first has the gradient."""
        raise NotImplementedError

    def floors(self) -> dict[str, Callable[[Inputs], Any]]:
        return floors_of(self._models, with_weight=not self.frozen)

    def _reduced(self, rows: Tensor) -> Tensor:
        return rows.mean() if self.mean else rows

    def _whole(self, of_logits: OfLogits) -> Forward:
        return lambda *arguments: self._reduced(of_logits(*self._both(arguments)))

    def _in_parts(self, of_logits: OfLogits) -> Forward:
        """A part of the tokens at a time, each made again in the backward."""

        def of_part(*arguments: Tensor) -> Tensor:
            return of_logits(*self._both(arguments))

        def forward(*arguments: Tensor) -> Tensor:
            size, parts = chunk_of(arguments), []
            for first in range(0, len(arguments[0]), size):
                own = (
                    each if place in self.shared else each[first : first + size]
                    for place, each in enumerate(arguments)
                )
                of_own = checkpoint(of_part, *own, use_reentrant=False, preserve_rng_state=False)
                parts.append(of_own)
            return self._reduced(torch.cat(parts))

        return forward


@dataclass(frozen=True)
class LinearDivergenceOp(LinearOp):
    """``linear_kl_divergence``, reverse."""

    @property
    def shared(self) -> frozenset[int]:
        return frozenset({1}) if self.frozen else frozenset({1, 3})

    def layout(self, case: Case) -> Layout:
        tokens, width, words = case.shape
        dtype = cases.DTYPES[case.dtype]
        both = [(dtype, (tokens, width)), (dtype, (words, width))]
        return [*both, *(both[:1] if self.frozen else both)]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        hidden, weight, ref_hidden, *ref_weight = tensors
        _fill_model(hidden, weight)
        torch.add(hidden, torch.randn_like(hidden), alpha=cases.SPREAD, out=ref_hidden)
        for own in ref_weight:
            own.copy_(weight)

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        return partial(
            klfast.linear_kl_divergence,
            reduction="token-mean" if self.mean else "none",
            normalizer=normalizer,
            backend=backend,
        )

    def rounding(self, inputs: Inputs) -> tuple[float, float]:
        """Two logits' rounding is held against their log-ratio."""
        share = torch.finfo(inputs.arguments[0].dtype).eps * self.term(inputs) / cases.SPREAD
        return share, 2 * share

    def _of_logits(self) -> tuple[OfLogits, OfLogits]:
        return eager_kl, klfast.kl_divergence

    def _models(self, arguments: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        hidden, weight, ref_hidden, *ref_weight = arguments
        return [(hidden, weight), (ref_hidden, ref_weight[0] if ref_weight else weight)]

    def _both(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(linear(*model) for model in self._models(arguments))

    def _whole(self, of_logits: OfLogits) -> Forward:
        if of_logits is not klfast.kl_divergence or not self.mean:
            return super()._whole(of_logits)
        return lambda *each: klfast.kl_divergence(*self._both(each), reduction="token-mean")


@dataclass(frozen=True)
class LinearLogprobsOp(LinearOp):
    """``linear_token_logprobs``."""

    outputs = ("logprobs",)

    def layout(self, case: Case) -> Layout:
        tokens, width, words = case.shape
        dtype = cases.DTYPES[case.dtype]
        return [(dtype, (tokens, width)), (dtype, (words, width)), (torch.int64, (tokens,))]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        hidden, weight, token_ids = tensors
        _fill_model(hidden, weight)
        token_ids.random_(len(weight))

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        return partial(klfast.linear_token_logprobs, backend=backend)

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        return super().eager(packed) | torchs()

    def _of_logits(self) -> tuple[OfLogits, OfLogits]:
        return eager_logprobs, partial(klfast.token_logprobs, inplace_backward=True)

    def _both(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        hidden, weight, token_ids = arguments
        return linear(hidden, weight), token_ids

    def _models(self, arguments: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The same twice, as the backward makes the logits again."""
        return [(arguments[0], arguments[1])] * 2


@dataclass(frozen=True)
class LinearGrpoOp(LinearLogprobsOp):
    """``linear_token_loss`` with GRPO's loss of a token."""

    def layout(self, case: Case) -> Layout:
        numbers = [(torch.float32, (case.shape[0],))] * 3  # old, reference, advantages
        return [*super().layout(case), *numbers]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        hidden, weight, token_ids, old_logprobs, ref_logprobs, advantages = tensors
        super().fill(tensors[:3])
        for first in range(0, len(hidden), _ROWS):
            at = slice(first, first + _ROWS)
            logits = linear(hidden[at].detach(), weight.detach())
            old_logprobs[at] = eager_logprobs(logits, token_ids[at])
        torch.add(
            old_logprobs, torch.randn_like(old_logprobs), alpha=cases.SPREAD, out=ref_logprobs
        )
        # The clip acts on no token: near its bounds, rounding would decide on the gradient.
        old_logprobs += torch.empty_like(old_logprobs).uniform_(-0.1, 0.1)
        of_sequences = advantages.view(sequences_of(advantages), -1)
        # Of one sign, so that the mean loss is not near 0, where rounding would be all of it.
        of_sequences.copy_(0.5 + torch.rand_like(of_sequences[:, :1]))

    def rounding(self, inputs: Inputs) -> tuple[float, float]:
        """A token's ratio is off by as much as its logits are."""
        share = torch.finfo(inputs.arguments[0].dtype).eps * self.term(inputs)
        return share, 4 * share

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        def forward(hidden: Tensor, weight: Tensor, token_ids: Tensor, *inputs: Tensor) -> Tensor:
            return klfast.linear_token_loss(
                hidden,
                weight,
                token_ids,
                grpo,
                inputs=inputs,
                reduction="token-mean",
                normalizer=normalizer,
                backend=backend,
            ).loss

        return forward

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        return LinearOp.eager(self, packed)

    def _of_logits(self) -> tuple[OfLogits, OfLogits]:
        eagerly, ours = super()._of_logits()

        def of(logprobs: OfLogits) -> OfLogits:
            return lambda logits, token_ids, *inputs: grpo(logprobs(logits, token_ids), *inputs)

        return of(eagerly), of(ours)

    def _both(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        hidden, weight, *others = arguments
        return linear(hidden, weight), *others

    def _models(self, arguments: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(arguments[0], arguments[1])]

    def named(self, outputs: Any) -> dict[str, Tensor]:
        return {"loss": outputs}


BETA = 0.04


def sequences_of(tokens: Tensor) -> int:
    """The number of sequences of equal lengths, each with one advantage."""
    return math.gcd(8, len(tokens))


def grpo(logprobs: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
    """GRPO's loss of each token: PPO's clip and k3."""
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return BETA * klfast.kl_penalty(logprobs, ref, estimator="k3") - gain


OPS = by_name(
    LinearDivergenceOp("linear-kl-loss", backward=True, mean=True),
    LinearDivergenceOp("linear-kl-frozen", backward=True, frozen=True),
    LinearLogprobsOp("linear-logprob", backward=True),
    LinearGrpoOp("linear-grpo", backward=True, mean=True),
)
"""Of the mean; per token under a frozen head; per token under a trained one; GRPO's mean loss."""

SUITE = Suite(
    name="linear",
    ops=OPS,
    sizes=("tokens", "hidden size", "vocabulary"),
    shapes=((256, 512, 151936), (1024, 512, 151936)),
    quick_shapes=((8, 16, 1000),),
    gpu_shapes=((8192, 4096, 151936), (8192, 4096, 128256)),
    gpu_budget=300.0,
    facts={"logits_std": LOGIT_STD, "log_ratio_std": cases.SPREAD},
    text=f"from hidden states, every token kept, forward and backward, logits with a deviation of "
    f"{LOGIT_STD} nats, {cases.SPREAD} apart",
)


def chunk_of(arguments: Sequence[Tensor]) -> int:
    """The tokens that klfast takes at a time."""
    weight = arguments[1]
    return length_of(len(weight), torch.float32, weight.device)


def _fill_model(hidden: Tensor, weight: Tensor) -> None:
    hidden.normal_(std=LOGIT_STD)
    weight.normal_(std=weight.shape[1] ** -0.5)


def torchs() -> dict[str, Forward]:
    """Torch's own function at several numbers of tokens at a time; nothing where torch is older."""
    function = getattr(functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        return {}

    def of(tokens: int) -> Forward:
        chunked = options(batch_chunk_size=tokens)
        return lambda *each: -function(*each, reduction="none", options=chunked)

    return {f"{TORCHS} {tokens}": of(tokens) for tokens in TORCH_CHUNKS}


def floors_of(models: Models, *, with_weight: bool) -> dict[str, Callable[[Inputs], Any]]:
    """The bare matmuls into fresh memory, of all tokens at once and of as many as klfast takes."""

    def of_parts(size_of: Callable[[Sequence[Tensor]], int]) -> Callable[[Inputs], list[Tensor]]:
        @torch.no_grad()
        def floor(inputs: Inputs) -> list[Tensor]:
            both = models(inputs.arguments)
            hidden, weight = both[0]
            size = min(size_of(inputs.arguments), len(hidden))
            memory = [hidden.new_empty(size, len(weight)) for _ in both]
            of_hidden = torch.empty_like(hidden)
            of_weight: Tensor | None = None
            for first in range(0, len(hidden), size):
                at = slice(first, first + size)
                parts = [own[: len(hidden[at])] for own in memory]
                for (rows, head), out in zip(both, parts, strict=True):
                    torch.mm(rows[at], head.t(), out=out)
                torch.mm(parts[0], weight, out=of_hidden[at])
                if with_weight and of_weight is None:
                    of_weight = parts[0].t() @ hidden[at]
                elif of_weight is not None:
                    of_weight.addmm_(parts[0].t(), hidden[at])
            return [of_hidden] if of_weight is None else [of_hidden, of_weight]

        return floor

    return {
        "products of all tokens": of_parts(lambda arguments: len(arguments[0])),
        "products of some tokens at a time": of_parts(chunk_of),
    }
