"""Distillation into a student that is too small for its teacher, by each direction of the KL.

Run it with ``python examples/distillation.py``. Both models predict the next of 32 tokens from the
last token. The student has only three parameters per token. It learns from text of the teacher.
Then both models write text, and the output has a line per direction with

- the KL to the teacher in nats per token, reverse and forward, on new text of the teacher,
- the student's entropy, and the teacher's log-prob of the student's tokens,
- the share of these tokens that have a probability below 1 % under the teacher.

With forward KL the student covers all tokens that the teacher may sample, and many that it would
not sample. With reverse KL the student samples few tokens besides the teacher's likely tokens. JSD
is between them.
"""

import argparse

import torch
from torch import nn

import klfast

WORDS, LENGTH = 32, 16


def write(model, count):
    """Tokens of texts that begin anywhere, and the token after each: [count, LENGTH] both."""
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
