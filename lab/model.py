"""A small GPT in plain PyTorch, and its pretraining. It is the policy and the frozen reference.

Shapes: P prompts of S tokens, B continuations of T tokens, D channels, V tokens in the vocabulary.
Each prompt has B / P continuations, which follow each other in the batch.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lab.settings import Settings
from lab.text import Corpus, windows

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Batch:
    """Sampled continuations.

    ``prompts`` ``[P, S]``, ``continuations`` ``[B, T]``. ``mask`` ``[B, T]`` ends with the token
    that ends the paragraph.
    """

    prompts: Tensor
    continuations: Tensor
    mask: Tensor


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, start: int, cache: Tensor | None, mask: Tensor | None) -> Tensor:
        """``[B, T, D]`` -> ``[B, T, D]``. The cache keeps the keys and values of all tokens."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        if cache is not None:
            cache[:, :, :, start : start + length] = qkv[1:]
            key, value = cache[:, :, :, : start + length].unbind(0)
        causal = mask is None and start == 0
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, start: int, cache: Tensor | None, mask: Tensor | None) -> Tensor:
        mixed: Tensor = x + self.attention(self.attention_norm(x), start, cache, mask)
        return mixed + cast(Tensor, self.mlp(self.mlp_norm(mixed)))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and tied embeddings."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.context, self.width = heads, context, width
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def initialise(self, generator: torch.Generator) -> None:
        """Draws the weights from ``generator`` alone, so a seed always gives the same model."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(
        self,
        ids: Tensor,
        start: int = 0,
        caches: list[Tensor] | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Token ids ``[B, T]`` -> logits ``[B, T - first, V]``, from the token ``first`` on.

        With caches, the tokens before ``start`` are in them, and T is 1 or start is 0.
        ``positions`` ``[T]`` count from ``start`` by default. ``mask`` ``[T, T]`` says which tokens
        a token sees, by default all tokens before it.
        """
        if positions is None:
            positions = torch.arange(start, start + ids.shape[1])
        x = self.tokens(ids) + self.positions(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, start, caches[i] if caches else None, mask)
        return functional.linear(self.norm(x[:, first:]), self.tokens.weight)

    def new_caches(self, batch: int) -> list[Tensor]:
        """Room for a full context: per layer ``[2, B, heads, S + T, D / heads]``."""
        shape = (2, batch, self.heads, self.context, self.width // self.heads)
        return [torch.empty(shape, dtype=self.positions.weight.dtype) for _ in self.blocks]


def frozen_copy(model: GPT) -> GPT:
    return copy.deepcopy(model).requires_grad_(False)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def sample(
    model: GPT, prompts: Tensor, length: int, generator: torch.Generator, group: int = 1
) -> Tensor:
    """Continuations ``[P * group, length]`` of ``prompts`` ``[P, S]``, at temperature 1."""
    caches = model.new_caches(len(prompts))
    logits = model(prompts, 0, caches, first=-1).repeat_interleave(group, 0)
    caches = [cache.repeat_interleave(group, 1) for cache in caches]
    drawn: list[Tensor] = []
    for position in range(prompts.shape[1], prompts.shape[1] + length):
        if drawn:
            logits = model(drawn[-1], position - 1, caches)
        uniform = torch.rand(len(logits), 1, generator=generator)
        drawn.append(draw(logits[:, 0].softmax(-1), uniform))
    return torch.cat(drawn, 1)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """One index ``[B, 1]`` per row of ``[B, V]``, by the inverse of the cumulative distribution."""
    cumulative = probabilities.cumsum(-1)
    below = uniform * cumulative[:, -1:]
    return torch.searchsorted(cumulative, below, right=True).clamp_(max=probabilities.shape[1] - 1)


def continuation_logits(model: nn.Module, prompts: Tensor, continuations: Tensor) -> Tensor:
    """Logits ``[B, T, V]`` at each token of ``continuations``, given all before it.

    A row of the model's batch is a prompt and then its continuations, so the prompt is read once.
    The continuations do not see each other.
    """
    (rows, length), own = prompts.shape, continuations.shape[1] - 1
    group = len(continuations) // rows
    positions = torch.cat([torch.arange(length), torch.arange(length, length + own).repeat(group)])
    branch = torch.cat([torch.zeros(length), torch.arange(1, group + 1).repeat_interleave(own)])
    mask = ((branch[:, None] == branch) | (branch == 0)).tril()
    ids = torch.cat([prompts, continuations[:, :-1].reshape(rows, -1)], 1)
    logits: Tensor = model(ids, positions=positions, mask=mask, first=length - 1)
    begin = logits[:, None, :1].expand(-1, group, -1, -1)
    rest = logits[:, 1:].reshape(rows, group, own, -1)
    return torch.cat([begin, rest], 2).flatten(0, 1)


def cross_entropy(model: GPT, windows: Tensor) -> Tensor:
    """Mean nats per token of ``windows`` ``[B, T]``. Its exponential is the perplexity."""
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: GPT, windows: Tensor) -> float:
    return math.exp(float(cross_entropy(model, windows)))  # in float64, since it can be very large


def side_by_side(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results of ``work`` for the items, each in its own thread. Raises the first error.

    Each thread of Python has one torch thread. Torch's kernels release Python's lock, so the
    threads run in parallel, and share the models and the corpus. The results do not depend on the
    number of cores.
    """
    with ThreadPoolExecutor(len(items), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, items))


@contextmanager
def one_thread() -> Iterator[None]:
    """Gives torch one thread. The model is too small for more threads to help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_WARMUP = 30


@dataclass
class PretrainState:
    """The model during its pretraining, after which it is the reference."""

    model: GPT
    optimizer: torch.optim.AdamW
    generator: torch.Generator
    step: int = 0

    def stateful(self) -> dict[str, Any]:
        """The objects with a ``state_dict``, by name."""
        return {"model": self.model, "optimizer": self.optimizer}


def new_pretraining(corpus: Corpus, settings: Settings) -> PretrainState:
    generator = torch.Generator().manual_seed(settings.seed)
    shape = settings.context, settings.layers, settings.width, settings.heads
    model = GPT(len(corpus.tokens), *shape)
    model.initialise(generator)
    model.to(getattr(torch, settings.precision))
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.pretrain_learning_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    return PretrainState(model, optimizer, generator)


def pretrain_step(state: PretrainState, corpus: Corpus, settings: Settings) -> float:
    """Makes one step on random windows of the train part. Returns its loss in nats per token."""
    # Linear warm-up, flat, then linear decay over the last 70 %.
    step, steps = state.step, settings.pretrain_steps
    share = min((step + 1) / _WARMUP, 1.0, (steps - step) / (0.7 * steps))
    for group in state.optimizer.param_groups:
        group["lr"] = settings.pretrain_learning_rate * share
    places, count = len(corpus.train) - settings.context + 1, settings.pretrain_batch
    starts = torch.randint(places, (count,), generator=state.generator)
    drawn = windows(corpus.train, starts, settings.context)
    state.optimizer.zero_grad()

    def add_gradient(part: Tensor) -> float:
        loss = cross_entropy(state.model, part) * (len(part) / len(drawn))
        torch.autograd.backward(loss)
        return float(loss.detach())

    # Two parts, on any number of cores: the sum of two gradients does not depend on their order.
    losses = side_by_side(add_gradient, drawn.chunk(2))
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimizer.step()
    state.step += 1
    return sum(losses)
