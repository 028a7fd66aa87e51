"""Distillation from a teacher's top-K tokens, with each tail, compared with the whole teacher.

Run it with ``python examples/sparse_teacher.py``. The vocabulary has 32 tokens. An inference server
returns the four most likely tokens at each position and their log-probs. They have three quarters
of the probability. The student could equal its teacher. It learns from text of the teacher, and the
output has a line per loss with

- the forward and the reverse KL to the whole teacher in nats per token, on new text of the teacher,
- the probability of the four tokens under the student and under the teacher.

``bucket`` and ``generalized`` find the teacher's probabilities of the four tokens. ``renormalize``
only finds their proportions. Their sum stays near its value in the untrained student. ``drop``
gives them almost all probability, so the student rarely samples another token.
"""

import argparse

import torch
from distillation import WORDS, write
from torch import nn

import klfast
from klfast.types.names import TAILS

K = 4


def served(teacher, before):
    """The response of an inference server: K token ids per position, and their log-probs."""
    logprobs, ids = teacher(before).log_softmax(-1).topk(K)
    return ids, logprobs


def distil(loss_of, teacher, steps):
    """A student that has learned from batches of the teacher's text."""
    torch.manual_seed(1)
    student = nn.Embedding(WORDS, WORDS)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.03)
    for _ in range(steps):
        before, _ = write(teacher, 16)
        loss = loss_of(student(before), before)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student.requires_grad_(False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    teacher = nn.Embedding(WORDS, WORDS).requires_grad_(False)
    teacher.weight *= 2
    text, _ = write(teacher, 1024)
    ids, logprobs = served(teacher, text)

    def whole(logits, before):
        return klfast.kl_divergence(
            logits, teacher(before), direction="forward", reduction="token-mean"
        )

    def sparse(tail):
        return lambda logits, before: klfast.topk_kl_divergence(
            logits, *served(teacher, before), tail=tail, reduction="token-mean"
        )

    for name, loss_of in {"all words": whole, **{tail: sparse(tail) for tail in TAILS}}.items():
        logits = distil(loss_of, teacher, steps)(text)
        forward, reverse = (
            klfast.kl_divergence(logits, teacher(text), direction=direction, reduction="token-mean")
            for direction in ("forward", "reverse")
        )
        of_words = klfast.token_logprobs(logits, ids).exp().sum(-1).mean()
        print(
            f"{name}: KL {forward:.2f} forward, {reverse:.2f} reverse; the teacher's words have "
            f"{of_words:.0%}, of {logprobs.exp().sum(-1).mean():.0%}"
        )


if __name__ == "__main__":
    main()
