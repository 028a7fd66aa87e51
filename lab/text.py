"""The text of the experiment: real English that every Python installation has.

A token is a common word with the space before it, or a single character.
"""

import hashlib
import json
import pydoc_data.topics
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

COMMON_WORDS = 600
_PLAIN = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--") | {0x2026: "..."}
_HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """A text split into train and held-out parts, as token ids. A newline ends each paragraph.

    Attributes:
        tokens: the text of every token. A token id is an index into it.
        train: ``[N]`` int64, nine paragraphs of ten.
        held_out: ``[M]`` int64, every tenth paragraph. No paragraph is in both.
    """

    tokens: tuple[str, ...]
    train: Tensor
    held_out: Tensor

    @property
    def end(self) -> int:
        return self.tokens.index("\n")

    @property
    def digest(self) -> str:
        """Identifies the text, because another Python version has another text."""
        parts = [self.tokens, self.train.tolist(), self.held_out.tolist()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def decode(self, ids: Tensor) -> str:
        return "".join(self.tokens[i] for i in ids.tolist())


@cache
def load_corpus() -> Corpus:
    """The prose of Python's own language reference, as shipped in ``pydoc_data.topics``."""
    return build_corpus(prose_paragraphs(pydoc_data.topics.topics))


def prose_paragraphs(topics: dict[str, str]) -> list[str]:
    """Paragraphs that are sentences (not code, grammar or tables), each on one line, each once."""
    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name].translate(_PLAIN)):
            line = " ".join(block.split())
            prose = sum(character.isalpha() or character in " .,;'" for character in line)
            if len(line) >= 60 and prose >= 0.9 * len(line) and line.isascii():
                paragraphs[line] = None
    return list(paragraphs)


def build_corpus(paragraphs: list[str]) -> Corpus:
    held_out = paragraphs[::_HELD_OUT_EVERY]
    train = [line for i, line in enumerate(paragraphs) if i % _HELD_OUT_EVERY]
    counts = Counter(word for line in train for word in re.findall(r" [A-Za-z]+", line))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:COMMON_WORDS]
    tokens = tuple(sorted({"\n"}.union(*paragraphs))) + tuple(words)
    ids = {token: i for i, token in enumerate(tokens)}
    longest_first = sorted(words, key=len, reverse=True)
    pattern = re.compile("|".join([*longest_first, "."]), re.DOTALL)

    def encode(lines: list[str]) -> Tensor:
        return torch.tensor([ids[token] for token in pattern.findall("\n".join([*lines, ""]))])

    return Corpus(tokens, encode(train), encode(held_out))


def windows(ids: Tensor, starts: Tensor, length: int) -> Tensor:
    """``[count, length]`` windows of ``ids`` that begin at ``starts``."""
    return ids[starts[:, None] + torch.arange(length)]


def some_of(starts: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return starts[torch.randint(len(starts), (count,), generator=generator)]


def prompt_starts(corpus: Corpus, ids: Tensor, length: int) -> Tensor:
    """Positions in ``ids`` from which ``length`` tokens are whole words of one paragraph."""
    begins_word = torch.tensor([token.startswith(" ") for token in corpus.tokens])[ids]
    paragraph = torch.cumsum(ids == corpus.end, 0)
    first = torch.arange(len(ids) - length)
    after = first + length
    whole = begins_word[first] & begins_word[after] & (paragraph[first] == paragraph[after])
    return first[whole]
