"""Times whole training steps, to show the share of log-probs and KL beside the models.

Shapes: B sequences of T tokens, hidden size D, V vocabulary entries. The policy is a transformer of
``LAYERS`` layers and a head, all trained. Its reference has the same size, and only a forward.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm, scaled_dot_product_attention

import klfast
from benchmarks.candidates import KLFAST
from benchmarks.cases import (
    DTYPES,
    EAGER,
    SPREAD,
    Case,
    Forward,
    Inputs,
    Layout,
    Op,
    Shape,
    Suite,
    by_name,
)
from benchmarks.linear import HELD
from benchmarks.logits import LOGIT_STD, eager_kl, eager_logprobs

LAYERS = 8
HEAD_SIZE = 64
BETA = 0.04  # the coefficient of GRPO's KL

Loss = Callable[..., Tensor]
"""Takes hidden states [N, D] and head of the policy, both of its reference, and token ids and
advantages [N]."""


def hidden_states(embedded: Tensor, blocks: Tensor) -> Tensor:
    """A causal transformer: [B, T, D] -> [B * T, D]. The weights are [layers, 12, D, D]."""
    hidden, size = embedded, embedded.shape[-1:]
    heads = max(1, size[0] // HEAD_SIZE)
    for block in blocks.unbind():
        of_qkv, of_heads, up, down = (
            each.flatten(0, 1) for each in torch.split(block, [3, 1, 4, 4])
        )
        qkv = linear(rms_norm(hidden, size), of_qkv).view(*embedded.shape[:2], 3, heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + linear(mixed.transpose(1, 2).flatten(2), of_heads)
        hidden = hidden + gelu(linear(rms_norm(hidden, size), up)) @ down
    return rms_norm(hidden, size).flatten(0, 1)


@dataclass(frozen=True)
class StepOp(Op):
    """Two models' forward passes, a loss, and the backward of the policy."""

    working_bytes = 60
    gpu_working_bytes = 60
    outputs = ("loss",)
    is_scalar = True
    shared = frozenset({3, 4, 5, 6})
    gradients: ClassVar[dict[str, int]] = {"gradient of layers": 3, "gradient of head": 4}

    def numbers(self, shape: Shape) -> int:
        return shape[0] * shape[1] * shape[3]

    def rows_at_once(self, inputs: Inputs, numbers: int) -> int:
        return 1

    def normalizer(self, inputs: Inputs) -> int:
        return inputs.arguments[1].numel()

    def rounding(self, inputs: Inputs) -> tuple[float, float]:
        """Each layer rounds, and two models' rounding is held against their log-ratio."""
        share = LAYERS * torch.finfo(inputs.arguments[0].dtype).eps / SPREAD
        return share, share

    def sizes(self, inputs: Inputs) -> tuple[float, float]:
        return 10.0, 1.0

    def layout(self, case: Case) -> Layout:
        sequences, tokens, width, words = case.shape
        dtype, of_tokens = DTYPES[case.dtype], (sequences, tokens)
        model = [(dtype, (LAYERS, 12, width, width)), (dtype, (words, width))]
        inputs = (dtype, (*of_tokens, width)), (torch.int64, of_tokens), (torch.float32, of_tokens)
        return [*inputs, *model, *model]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        embedded, token_ids, advantages, blocks, head, ref_blocks, ref_head = tensors
        scale = head.shape[1] ** -0.5
        embedded.normal_()
        token_ids.random_(len(head))
        advantages.normal_()
        blocks.normal_(std=scale)
        head.normal_(std=LOGIT_STD * scale)
        ref_blocks.copy_(blocks)
        torch.add(head, torch.randn_like(head), alpha=SPREAD * scale, out=ref_head)

    @abstractmethod
    def loss(self, name: str, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Loss:
        """The loss as one candidate computes it; the last two are for ``KLFAST``."""

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        return partial(_step, self.loss(KLFAST, backend, normalizer))

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        return {name: partial(_step, self.loss(name)) for name in (EAGER, HELD)}

    def floors(self) -> dict[str, Callable[[Inputs], Any]]:
        """The models alone, with all logits."""

        def models(inputs: Inputs) -> Any:
            kept: list[Tensor] = []

            def logits_of(hidden: Tensor, head: Tensor, *reference: Any) -> Tensor:
                kept.append(linear(*reference[:2]))
                return linear(hidden, head)

            logits = _step(logits_of, *inputs.arguments)
            leaves = [inputs.arguments[place] for place in self.gradients.values()]
            return torch.autograd.grad(logits, leaves, kept[0])

        return {"products of the models": models}


def _step(loss: Loss, *tensors: Tensor) -> Tensor:
    embedded, token_ids, advantages, blocks, head, ref_blocks, ref_head = tensors
    ref_hidden = hidden_states(embedded, ref_blocks)
    hidden = hidden_states(embedded, blocks)
    return loss(hidden, head, ref_hidden, ref_head, token_ids.flatten(), advantages.flatten())


@dataclass(frozen=True)
class GrpoOp(StepOp):
    """GRPO on-policy: the policy loss and ``BETA`` times k3, from the sampled tokens' log-probs."""

    def loss(self, name: str, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Loss:
        ways: dict[str, Callable[..., Tensor]] = {
            KLFAST: partial(klfast.linear_token_logprobs, backend=backend),
            HELD: lambda hidden, head, ids: klfast.token_logprobs(linear(hidden, head), ids),
            EAGER: lambda hidden, head, ids: eager_logprobs(linear(hidden, head), ids),
        }
        logprobs_of = ways[name]

        def of_token(logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor) -> Tensor:
            kl: Tensor = klfast.kl_penalty(logprobs, ref_logprobs, coef=BETA, backend=backend)
            return kl - advantages * logprobs

        def loss(*tensors: Tensor) -> Tensor:
            hidden, head, ref_hidden, ref_head, token_ids, advantages = tensors
            ref_logprobs = logprobs_of(ref_hidden, ref_head, token_ids)
            mean: dict[str, Any] = {"reduction": "token-mean", "normalizer": normalizer}
            if name == KLFAST:
                given = {"inputs": (ref_logprobs, advantages), "backend": backend, **mean}
                return klfast.linear_token_loss(hidden, head, token_ids, of_token, **given).loss
            logprobs = logprobs_of(hidden, head, token_ids)
            if name == EAGER:
                x = logprobs - ref_logprobs
                return (BETA * (torch.expm1(-x) + x) - advantages * logprobs).mean()
            return klfast.reduce(of_token(logprobs, ref_logprobs, advantages), **mean)

        return loss


@dataclass(frozen=True)
class DistillationOp(StepOp):
    """Distillation: the exact reverse KL to the reference, which is the teacher."""

    def loss(self, name: str, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Loss:
        mean: dict[str, Any] = {"reduction": "token-mean", "normalizer": normalizer}

        def loss(
            hidden: Tensor, head: Tensor, ref_hidden: Tensor, ref_head: Tensor, *_: Tensor
        ) -> Tensor:
            if name == KLFAST:
                models = hidden, head, ref_hidden, ref_head
                kl: Tensor = klfast.linear_kl_divergence(*models, backend=backend, **mean)
                return kl
            both = linear(hidden, head), linear(ref_hidden, ref_head)
            return klfast.kl_divergence(*both, **mean) if name == HELD else eager_kl(*both).mean()

        return loss


OPS = by_name(
    GrpoOp("step-grpo", backward=True),
    DistillationOp("step-distillation", backward=True),
)

SUITE = Suite(
    name="step",
    ops=OPS,
    sizes=("sequences", "tokens", "hidden size", "vocabulary"),
    shapes=((2, 128, 256, 32000), (2, 128, 256, 151936)),
    quick_shapes=((2, 4, 16, 1000),),
    gpu_shapes=((8, 1024, 2048, 151936),),
    gpu_budget=120.0,
    facts={"logits_std": LOGIT_STD, "log_ratio_std": SPREAD, "layers": LAYERS},
    text=f"steps of a transformer of {LAYERS} layers and of its reference, every token kept, "
    f"forward and backward, logits with a deviation of {LOGIT_STD} nats, {SPREAD} apart",
)
