"""LoRA with an exact KL to its reference from hidden states, without the logits of a batch.

``python examples/hidden_states.py``

A block of a transformer with random weights learns to predict the next token. One of its layers has
an adapter, and its head is frozen. The reference is the same model without the adapter. The exact
KL over a vocabulary of 16,384 tokens is the penalty. One call returns it with the log-probs of the
text. The output has a line per coefficient with the log-prob and the KL, in nats per token. A small
penalty removes part of the KL and costs almost nothing. A large penalty keeps the model at its
reference.

The last lines compare the KL and its gradient with the results from logits. On Linux they also
compare the memory of both for a text of 4,096 tokens.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import klfast

sys.path.append(str(Path(__file__).parents[1]))  # the benchmarks are not installed

from benchmarks.memory import peak_of

WORDS, WIDTH, RANK = 16_384, 64, 4


class Adapted(nn.Module):
    """A frozen layer, plus the product of two thin layers that are trained."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x, adapted):
        out = self.frozen(x)
        return out + self.up(self.down(x)) if adapted else out


class Body(nn.Module):
    """One block of a transformer, from token ids [B, T] to hidden states [B, T, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.mixes = nn.Linear(WIDTH, 3 * WIDTH, bias=False).requires_grad_(False)
        self.layer = Adapted()

    def forward(self, words, adapted=True):
        x = self.words(words)
        query, key, value = self.mixes(x).chunk(3, -1)
        x = x + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + functional.gelu(self.layer(x, adapted))
        return functional.layer_norm(x, (WIDTH,))


def text(sequences, length):
    """Token ids below 100. After each id a certain id follows most of the time."""
    first = torch.randint(100, (sequences, length + 1))
    follows = (7 * first[:, :-1] + 3) % 100
    given = torch.rand(follows.shape) < 0.8
    return first[:, :-1], torch.where(given, follows, first[:, 1:])


def train(coefficient, steps):
    """The body and the head after some steps, with the last log-prob and KL."""
    torch.manual_seed(0)
    body = Body()
    head = nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)
    nn.init.normal_(head.weight, std=3 * WIDTH**-0.5)
    adapter = [weight for weight in body.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(adapter, lr=0.03)
    for _ in range(steps):
        words, following = text(8, 32)
        with torch.no_grad():
            ref_hidden = body(words, adapted=False)
        found = klfast.linear_kl_divergence(
            body(words), head.weight, ref_hidden, token_ids=following, reduction="token-mean"
        )
        logprob = found.logprobs.mean()
        loss = coefficient * found.kl - logprob
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return body, head, logprob.item(), found.kl.item()


def from_hidden(hidden, weight, ref_hidden):
    return klfast.linear_kl_divergence(hidden, weight, ref_hidden, reduction="token-mean")


def from_logits(hidden, weight, ref_hidden):
    return klfast.kl_divergence(hidden @ weight.T, ref_hidden @ weight.T, reduction="token-mean")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    for coefficient in (0.0, 0.3, 3.0):
        body, head, logprob, kl = train(coefficient, steps)
        print(f"coefficient {coefficient}: log-prob {logprob:.2f}, KL {kl:.2f}")

    words, _ = text(64, 64)
    with torch.no_grad():
        ref_hidden = body(words, adapted=False)
        hidden = body(words)
    hidden.requires_grad_()

    def both(kl_of):
        """The KL, and the gradient of the hidden states."""
        kl = kl_of(hidden, head.weight, ref_hidden)
        return kl.detach(), *torch.autograd.grad(kl, hidden)

    (kl, gradient), (kl_of_logits, other) = both(from_hidden), both(from_logits)
    apart = (gradient - other).norm() / other.norm()
    print(f"KL: {kl:.6f} from hidden states, {kl_of_logits:.6f} from logits")
    print(f"gradients: {apart:.0e} of their size apart")
    peaks = [peak_of(lambda way=way: both(way)) / 1e6 for way in (from_hidden, from_logits)]
    print("peak memory: {:.0f} MB from hidden states, {:.0f} MB from logits".format(*peaks))


if __name__ == "__main__":
    main()
