"""Continuations of the same unseen prompts by each policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lab.arms import ARMS
from lab.model import GPT, sample
from lab.run import Run
from lab.text import prompt_starts, random_prompts
from lab.train import kept

PROMPTS = 3


@dataclass(frozen=True)
class Sample:
    """One prompt and how every model goes on from it: pairs of a label and a continuation."""

    prompt: str
    continuations: list[tuple[str, str]]


def sample_texts(run: Run) -> list[Sample]:
    """Held-out prompts continued by the reference and by every arm that has made a step."""
    models: list[tuple[str, GPT]] = [("reference", run.reference)]
    models += [(ARMS[arm.name].label, arm.policy) for arm in run.arms.values() if arm.rows]
    generator = torch.Generator().manual_seed(run.settings.seed)
    corpus, settings = run.corpus, run.settings
    starts = prompt_starts(corpus, corpus.held_out, settings.prompt_length)
    prompts = random_prompts(corpus.held_out, starts, PROMPTS, settings.prompt_length, generator)
    texts = [(label, _continue(model, prompts, run)) for label, model in models]
    return [
        Sample(corpus.decode(prompt), [(label, own[i]) for label, own in texts])
        for i, prompt in enumerate(prompts)
    ]


def _continue(model: GPT, prompts: torch.Tensor, run: Run) -> list[str]:
    generator = torch.Generator().manual_seed(run.settings.seed)
    drawn = sample(model, prompts, run.settings.continuation_length, generator)
    mask = kept(drawn, run.corpus.end)
    return [run.corpus.decode(ids[keep]) for ids, keep in zip(drawn, mask, strict=True)]
