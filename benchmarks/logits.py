"""Divergences and log-probs over the whole vocabulary, timed.

Shapes: R rows (tokens) over V words.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

import klfast
from benchmarks import cases
from benchmarks.cases import Case, Forward, Inputs, Layout, Op, Suite, by_name

LOGIT_STD = 2.5  # standard deviation of the logits, in nats

JSD_BETA = 0.5

IN_PLACE = "klfast in place"

CHUNK = 128  # rows that TRL's ``entropy_from_logits`` takes at once, to save memory


@dataclass(frozen=True)
class LogitsOp(Op):
    """An op over logits [R, V]: a result for each row, or with ``mean`` their mean."""

    mean: bool = False

    working_bytes = 80
    gpu_working_bytes = 20  # of klfast and the check: a rival may run out of memory there

    @property
    def is_scalar(self) -> bool:
        return self.mean

    def normalizer(self, inputs: Inputs) -> int | None:
        return len(inputs.arguments[0]) if self.mean else None

    def term(self, inputs: Inputs) -> float:
        """The size of a logit."""
        return 1 + cases.largest(inputs.arguments[0])

    def sizes(self, inputs: Inputs) -> tuple[float, float]:
        term = self.term(inputs)
        grad_out = 1.0 if inputs.grad_out is None else cases.largest(inputs.grad_out)
        return term, term * grad_out / (self.normalizer(inputs) or 1)


@dataclass(frozen=True)
class DivergenceOp(LogitsOp):
    """``kl_divergence`` in one direction."""

    direction: klfast.DirectionName = "reverse"

    def layout(self, case: Case) -> Layout:
        return [(cases.DTYPES[case.dtype], case.shape)] * 2

    def fill(self, tensors: Sequence[Tensor]) -> None:
        logits, ref_logits = tensors
        logits.normal_(std=LOGIT_STD)
        ref_logits.normal_(std=cases.SPREAD).add_(logits)

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        return partial(
            klfast.kl_divergence,
            direction=self.direction,
            jsd_beta=JSD_BETA,
            reduction="token-mean" if self.mean else "none",
            normalizer=normalizer,
            backend=backend,
        )

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        rows = {"reverse": eager_kl, "jsd": eager_jsd}[self.direction]
        return {cases.EAGER: _mean_of(rows) if self.mean else rows}


@dataclass(frozen=True)
class TokenLogprobsOp(LogitsOp):
    """``token_logprobs``, with the entropies or without."""

    entropy: bool = False
    outputs = ("logprobs", "entropy")

    def layout(self, case: Case) -> Layout:
        return [(cases.DTYPES[case.dtype], case.shape), (torch.int64, case.shape[:1])]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        logits, token_ids = tensors
        logits.normal_(std=LOGIT_STD)
        token_ids.random_(logits.shape[1])

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        return partial(klfast.token_logprobs, return_entropy=self.entropy, backend=backend)

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        if self.entropy:
            return {cases.EAGER: eager_entropy, cases.SELECTIVE: selective_entropy}
        return {cases.EAGER: eager_logprobs, cases.SELECTIVE: selective_logprobs}

    def beside(self, inputs: Inputs) -> dict[str, Callable[[Any], Any]]:
        """The backward into the logits' memory, on a copy of its own that the first call spoils:
        what follows takes gradients for logits, which costs the same.
        """
        if not self.backward:
            return {}
        memory = inputs.arguments[0].detach().clone()
        weight = torch.zeros((), requires_grad=True)

        def in_place(given: Inputs) -> tuple[Tensor, Tensor]:
            logits = _Computed.apply(weight, memory)
            logprobs = klfast.token_logprobs(logits, given.arguments[1], inplace_backward=True)
            return logprobs, torch.autograd.grad(logprobs, logits, given.grad_out)[0]

        return {IN_PLACE: in_place}


class _Computed(torch.autograd.Function):
    """Logits as a model has computed them, in given memory: no leaf."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, memory: Tensor) -> Tensor:
        return memory.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


OPS = by_name(
    DivergenceOp("kl"),
    DivergenceOp("kl-one-read", backward=True, mean=True),
    DivergenceOp("kl-two-pass", backward=True, reads=2),
    DivergenceOp("jsd-one-read", backward=True, mean=True, direction="jsd"),
    TokenLogprobsOp("logprob"),
    TokenLogprobsOp("logprob-entropy", entropy=True),
    TokenLogprobsOp("logprob-two-pass", backward=True, reads=2),
)
"""As in ``tokens``: ``one-read`` is of the mean, ``two-pass`` of a result for each row."""

SUITE = Suite(
    name="logits",
    ops=OPS,
    sizes=("tokens", "vocabulary"),
    shapes=((2048, 32000),),
    quick_shapes=((8, 1000),),
    gpu_shapes=((8192, 151936), (2048, 32000), (16, 262144), (8192, 50257), (8192, 128256)),
    gpu_budget=480.0,
    facts={"logits_std": LOGIT_STD, "log_ratio_std": cases.SPREAD, "jsd_beta": JSD_BETA},
    text="exact, every row kept, logits with a deviation of "
    f"{LOGIT_STD} nats, {cases.SPREAD} apart",
)


def _mean_of(rows: Callable[[Tensor, Tensor], Tensor]) -> Forward:
    return lambda logits, ref_logits: rows(logits, ref_logits).mean()


def eager_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(policy || reference) of each row: sum p (log p - log q)."""
    p, q = (log_softmax(x.float(), -1) for x in (logits, ref_logits))
    return (p.exp() * (p - q)).sum(-1)


def eager_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The log-prob of each row's token: log_softmax, gathered."""
    return log_softmax(logits.float(), -1).gather(-1, token_ids[:, None])[:, 0]


def eager_jsd(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Generalised JSD as TRL's GKD writes it."""
    p, q = (log_softmax(x.float(), -1) for x in (logits, ref_logits))
    weighted = [p + math.log1p(-JSD_BETA), q + math.log(JSD_BETA)]
    mixture = torch.logsumexp(torch.stack(weighted), 0)
    of_p, of_q = (kl_div(mixture, x, reduction="none", log_target=True) for x in (p, q))
    return ((1 - JSD_BETA) * of_p + JSD_BETA * of_q).sum(-1)


def eager_entropy(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """log_softmax in fp32, gathered, and its entropies."""
    logprobs = log_softmax(logits.float(), -1)
    return logprobs.gather(-1, token_ids[:, None])[:, 0], _entropy(logprobs)


def selective_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """In little memory, as TRL's ``selective_log_softmax``: no log_softmax is made of all rows at
    once. In fp32; theirs of bf16 stays bf16.
    """
    chosen = logits.gather(-1, token_ids[:, None])[:, 0].float()
    parts = torch.split(logits, CHUNK)
    return chosen - torch.cat([part.float().logsumexp(-1) for part in parts])


def selective_entropy(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the entropies as TRL's ``entropy_from_logits``."""
    parts = torch.split(logits, CHUNK)
    entropies = [_entropy(log_softmax(part.float(), -1)) for part in parts]
    return selective_logprobs(logits, token_ids), torch.cat(entropies)


def _entropy(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)
