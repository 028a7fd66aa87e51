"""Times divergences from a teacher's K token ids per token.

Shapes: R rows (tokens) over V vocabulary entries. The teacher gives K of them per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

import klfast
from benchmarks.cases import DTYPES, EAGER, SPREAD, Case, Forward, Inputs, Layout, Suite, by_name
from benchmarks.logits import LOGIT_STD, LogitsOp

K = 64

VERL = "verl"
TOKEN_LOGPROBS = "token_logprobs"

_ROWS = 256  # rows whose teacher is made at once
_LEAST_TAIL = 2.0**-24  # the least probability of all other entries, as in klfast
LogProbs = Callable[[Tensor, Tensor], Tensor]  # logits [R, V], ids [R, K] -> log-probs [R, K], fp32


@dataclass(frozen=True)
class TopKOp(LogitsOp):
    """``topk_kl_divergence``, forward, with one tail."""

    tail: klfast.TailName = "bucket"

    def layout(self, case: Case) -> Layout:
        rows, words = case.shape
        entries = (rows, min(K, max(1, words // 2)))
        return [
            (DTYPES[case.dtype], case.shape),
            (torch.int64, entries),
            (torch.float32, entries),
        ]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        tensors[0].normal_(std=LOGIT_STD)
        parts = (torch.split(tensor, _ROWS) for tensor in tensors)
        for rows, ids, log_p in zip(*parts, strict=True):
            teacher = torch.randn(rows.shape, device=rows.device).mul_(SPREAD).add_(rows)
            top = log_softmax(teacher, -1).topk(ids.shape[1])
            ids.copy_(top.indices)
            log_p.copy_(top.values)

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        return partial(
            klfast.topk_kl_divergence,
            tail=self.tail,
            reduction="token-mean" if self.mean else "none",
            normalizer=normalizer,
            backend=backend,
        )

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        divergence = {"bucket": eager_bucket, "drop": eager_drop}[self.tail]

        def by(logprobs_of: LogProbs, logits: Tensor, token_ids: Tensor, log_p: Tensor) -> Tensor:
            rows = divergence(log_p, logprobs_of(logits, token_ids))
            return rows.mean() if self.mean else rows

        return {EAGER: partial(by, all_logprobs), VERL: partial(by, verl_logprobs)}

    def beside(self, inputs: Inputs) -> dict[str, Callable[[Any], Any]]:
        """The log-probs of one entry per row, without a divergence."""

        def of_one_word(given: Inputs) -> Any:
            logits, token_ids, _ = given.arguments
            logprobs = klfast.token_logprobs(logits, token_ids[:, 0])
            if not self.backward:
                return logprobs
            mean = logprobs.mean()
            return mean, torch.autograd.grad(mean, logits)[0]

        return {TOKEN_LOGPROBS: of_one_word}


OPS = by_name(
    TopKOp("topk"),
    TopKOp("topk-loss", backward=True, mean=True, reads=2),
    TopKOp("topk-drop-loss", backward=True, mean=True, reads=2, tail="drop"),
)
"""The losses are means, whose gradient is written in a second read of the logits."""

SUITE = Suite(
    name="topk",
    ops=OPS,
    sizes=("tokens", "vocabulary"),
    shapes=((256, 151936),),
    quick_shapes=((8, 1000),),
    gpu_shapes=((8192, 151936), (2048, 32000)),
    gpu_budget=240.0,
    facts={"logits_std": LOGIT_STD, "log_ratio_std": SPREAD, "k": K},
    text=f"forward KL from a teacher's top {K}, every row kept, logits with a deviation "
    f"of {LOGIT_STD} nats, {SPREAD} apart",
)


def all_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log_softmax in fp32 over all entries, gathered."""
    return log_softmax(logits.float(), -1).gather(-1, token_ids)


def verl_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Logits less their logsumexp in fp32, as verl 0.9 with ``use_chunked_topk``, which then rounds
    to the logits' dtype.
    """
    wide = logits.float()
    return wide.gather(-1, token_ids) - wide.logsumexp(-1, keepdim=True)


def eager_drop(log_p: Tensor, log_q: Tensor) -> Tensor:
    """As verl, without its clamp at 0."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def eager_bucket(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The same with a term for all other entries, as TRL's ``loss_add_tail``."""
    sums = (log.logsumexp(-1).clamp(max=-_LEAST_TAIL) for log in (log_p, log_q))
    tail_p, tail_q = (torch.log(-torch.expm1(log_sum)) for log_sum in sums)
    return eager_drop(log_p, log_q) + tail_p.exp() * (tail_p - tail_q)
