"""A small GPT in plain PyTorch: the policy, and (frozen) the reference.

Shapes: B sequences, S tokens in the context so far, T new tokens, D channels, V characters.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lab.team import Share


@dataclass(frozen=True)
class Batch:
    """Sampled continuations. ``mask`` ``[B, T]`` ends with the token that ends the paragraph."""

    prompts: Tensor
    continuations: Tensor
    mask: Tensor


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, start: int, cache: Tensor | None) -> Tensor:
        """``[B, T, D]`` -> ``[B, T, D]``; keys and values go to, and come from, the cache."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        if cache is not None:
            cache[:, :, :, start : start + length] = qkv[1:]
            key, value = cache[:, :, :, : start + length].unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=start == 0)
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

    def forward(self, x: Tensor, start: int, cache: Tensor | None) -> Tensor:
        mixed: Tensor = x + self.attention(self.attention_norm(x), start, cache)
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
        """Draws the weights from ``generator`` alone, so that a seed names one model."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, ids: Tensor, start: int = 0, caches: list[Tensor] | None = None) -> Tensor:
        """``[B, T]`` at positions from ``start`` -> logits ``[B, T, V]``.

        With caches, the tokens before ``start`` are in them; T is then 1, or start is 0.
        """
        x = self.tokens(ids) + self.positions.weight[start : start + ids.shape[1]]
        for i, block in enumerate(self.blocks):
            x = block(x, start, caches[i] if caches else None)
        return functional.linear(self.norm(x), self.tokens.weight)

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
    model: GPT,
    prompts: Tensor,
    length: int,
    generator: torch.Generator,
    share: Share | None = None,
) -> Tensor:
    """Continuations ``[B, length]`` of ``prompts`` ``[B, S]``, drawn at temperature 1.

    With a share they are those that its rows of the whole batch would get.
    """
    share = share or Share(slice(None), len(prompts))
    caches = model.new_caches(len(prompts))
    drawn: list[Tensor] = []
    new, start = prompts, 0
    for _ in range(length):
        logits = model(new, start, caches)[:, -1]
        start += new.shape[1]
        uniform = torch.rand(share.total, 1, generator=generator)[share.rows]
        new = draw(logits.softmax(-1), uniform)
        drawn.append(new)
    return torch.cat(drawn, 1)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """One index ``[B, 1]`` per row of ``[B, V]``, by the inverse of the cumulative distribution."""
    cumulative = probabilities.cumsum(-1)
    below = uniform * cumulative[:, -1:]
    return torch.searchsorted(cumulative, below, right=True).clamp_(max=probabilities.shape[1] - 1)


def continuation_logits(model: nn.Module, prompts: Tensor, continuations: Tensor) -> Tensor:
    """Logits ``[B, T, V]`` at each token of ``continuations``, given all before it."""
    ids = torch.cat([prompts, continuations], 1)
    logits: Tensor = model(ids[:, :-1])[:, prompts.shape[1] - 1 :]
    return logits


def cross_entropy(model: GPT, windows: Tensor) -> Tensor:
    """Mean nats per character of ``windows`` ``[B, T]``; its exponential is the perplexity."""
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: GPT, windows: Tensor) -> float:
    return math.exp(float(cross_entropy(model, windows)))  # in float64: it can be astronomical
