"""Distillation into a student that is too small for its teacher, by each direction of the KL.

Run it with ``python examples/distillation.py``. Both models say which of 32 words follows a word;
the student has three numbers a word to say it with. It learns from text of the teacher, then both
write, and a line per direction has

- the KL to the teacher in nats per word, reverse and forward, on new text of the teacher,
- the student's entropy, and the teacher's log-prob of the student's words,
- how many of these words the teacher says less than once in a hundred times.

Forward KL covers: the student says all that the teacher may say, and much that it would not.
Reverse KL seeks modes: the student says little but what the teacher likes. JSD is between them.
"""

import argparse

import torch
from torch import nn

import klfast

WORDS, LENGTH = 32, 16


def write(model, count):
    """Words, and the word after each, of texts that begin anywhere: [count, LENGTH] both."""
    tokens = torch.randint(WORDS, (count, 1))
    for _ in range(LENGTH):
        next_word = model(tokens[:, -1]).detach().softmax(-1).multinomial(1)
        tokens = torch.cat([tokens, next_word], 1)
    return tokens[:, :-1], tokens[:, 1:]


def distil(direction, teacher, steps):
    """A student that has learned from batches of the teacher's text."""
    torch.manual_seed(1)
    student = nn.Sequential(nn.Embedding(WORDS, 3), nn.Linear(3, WORDS))
    optimizer = torch.optim.Adam(student.parameters(), lr=0.03)
    for _ in range(steps):
        before, _ = write(teacher, 16)
        loss = klfast.kl_divergence(
            student(before), teacher(before), direction=direction, reduction="token-mean"
        )
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
    of_teacher, _ = write(teacher, 1024)
    for direction in ("forward", "jsd", "reverse"):
        student = distil(direction, teacher, steps)
        reverse, forward = (
            klfast.kl_divergence(
                student(of_teacher), teacher(of_teacher), direction=name, reduction="token-mean"
            )
            for name in ("reverse", "forward")
        )
        before, words = write(student, 1024)
        _, entropy = klfast.token_logprobs(student(before), words, return_entropy=True)
        liked = klfast.token_logprobs(teacher(before), words)
        print(
            f"{direction}: KL {reverse:.2f} reverse, {forward:.2f} forward; "
            f"entropy {entropy.mean():.2f}, teacher's log-prob {liked.mean():.2f}, "
            f"unlikely words {(liked.exp() < 0.01).double().mean():.0%}"
        )


if __name__ == "__main__":
    main()
