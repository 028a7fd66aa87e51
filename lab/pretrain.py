"""Language-model pretraining: makes the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.cores import side_by_side
from lab.model import GPT, cross_entropy
from lab.settings import Settings
from lab.text import Corpus, random_windows

_WARMUP = 30


@dataclass
class PretrainState:
    """The model on its way to becoming the reference."""

    model: GPT
    optimizer: torch.optim.AdamW
    generator: torch.Generator
    step: int = 0


def new_pretraining(corpus: Corpus, settings: Settings) -> PretrainState:
    generator = torch.Generator().manual_seed(settings.seed)
    model = GPT(
        len(corpus.tokens), settings.context, settings.layers, settings.width, settings.heads
    )
    model.initialise(generator)
    model.to(getattr(torch, settings.precision))
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.pretrain_learning_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    return PretrainState(model, optimizer, generator)


def pretrain_step(state: PretrainState, corpus: Corpus, settings: Settings) -> float:
    """One step on random windows of the train part; returns its loss in nats per token."""
    for group in state.optimizer.param_groups:
        group["lr"] = settings.pretrain_learning_rate * _schedule(
            state.step, settings.pretrain_steps
        )
    windows = random_windows(
        corpus.train, settings.pretrain_batch, settings.context, state.generator
    )
    state.optimizer.zero_grad()

    def add_gradient(part: Tensor) -> float:
        loss = cross_entropy(state.model, part) * (len(part) / len(windows))
        torch.autograd.backward(loss)
        return float(loss.detach())

    # Two parts, on any number of cores: the sum of two gradients does not depend on their order.
    losses = side_by_side(add_gradient, windows.chunk(2))
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimizer.step()
    state.step += 1
    return sum(losses)


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, flat, then linear decay over the last 70 %."""
    return min((step + 1) / _WARMUP, 1.0, (steps - step) / (0.7 * steps))
