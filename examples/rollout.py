"""Presets of rollout_correction: their weights, and their errors as the drift grows.

The picture is docs/rollout.png.

``python examples/rollout.py``

A sampler draws sequences in which each token depends on the token before. The policy is the sampler
with noise on its logits, and the noise grows. Each transition has a reward. The example estimates
the policy's expected reward per token, which is known exactly. A policy gradient is such an
estimate for each parameter. A weight per token does not correct the distribution of the tokens
before it, so it has a bias. The output has a line per drift with the bias of each preset.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from klfast import rollout_correction, token_logprobs
from klfast.args.rollout_presets import PRESETS

sys.path.append(str(Path(__file__).parents[1]))  # the laboratory is not installed

from lab.drawing import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    LINE,
    ORANGE,
    PURPLE,
    SILVER,
    SKY,
    SMALL,
    VERMILION,
    Styles,
    dress,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Path(__file__).parents[1] / "docs" / "rollout.png"

SHOWN = ("tis", "mis", "icepop", "prime-rl", "kpop")
"""Presets that decide on each token."""

NONE, EXACT = "no correction", "sequence weight, no bounds"
WAYS: dict[str, dict[str, Any]] = {
    NONE: {"weight": None},
    EXACT: {"weight": "sequence", "cap": None},
    **{
        name: PRESETS[name] for name in ("tis", "icepop", "seq-tis", "prime-rl", "prime-rl-2026-08")
    },
}

STYLES: Styles = {
    NONE: {"color": INK, "linestyle": ":"},
    EXACT: {"color": SILVER, "linestyle": "--"},
    "tis": {"color": BLUE, "linestyle": "-"},
    "mis": {"color": PURPLE, "linestyle": "--"},
    "icepop": {"color": VERMILION, "linestyle": "-"},
    "prime-rl": {"color": GREEN, "linestyle": "-."},
    "prime-rl-2026-08": {"color": GREEN, "linestyle": ":"},
    "kpop": {"color": SKY, "linestyle": "-."},
    "seq-tis": {"color": ORANGE, "linestyle": "--"},
}

LIKELY, RARE = 0.5, 0.01
"""Probabilities of a token under the sampler. A binary divergence depends on them."""

LENGTH, WORDS = 32, 12
SCALES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Standard deviations of the noise on the logits."""


def weights_of(preset: str, x: Tensor, probability: float) -> Tensor:
    """The weight of a token whose log-ratio is x. NaN if its probability would exceed 1."""
    rollout = torch.full_like(x, math.log(probability))
    tokens = (rollout + x)[:, None]
    possible = tokens.clamp(max=0)
    weights, mask, _ = rollout_correction(possible, rollout[:, None], **PRESETS[preset])
    return torch.where(tokens <= 0, weights * mask, torch.nan)[:, 0]


def draw_weights(panel: Axes, probability: float) -> None:
    """The weight of a token under the presets that decide on it."""
    x = torch.linspace(-3, 3, 1201, dtype=torch.float64)
    for i, preset in enumerate(SHOWN):
        # Equal lines are drawn a little apart, so that all are visible.
        shown = weights_of(preset, x, probability) + 0.02 * (i - 2)
        panel.plot(x, shown, label=preset, **LINE, **STYLES[preset])
    panel.plot(x, torch.exp(x), color=FAINT, linewidth=1, zorder=1, label="exp(x)")
    panel.set_ylim(-0.15, 6)
    panel.set_xlabel("x = logprobs - rollout_logprobs, nats")
    dress(panel, f"Weight of a token that the sampler gave {probability:g}")
    panel.legend(frameon=False, fontsize=SMALL, loc="upper left")


class Draw(NamedTuple):
    """Sequences of the sampler, [S, T] each, and the known means."""

    logprobs: Tensor
    rollout_logprobs: Tensor
    reward: Tensor
    of_policy: float
    of_sampler: float


def sample(scale: float, sequences: int) -> Draw:
    generator = torch.Generator().manual_seed(0)

    def table() -> Tensor:
        return torch.randn(WORDS, WORDS, dtype=torch.float64, generator=generator)

    rollout, noise, reward = 1.5 * table(), table(), table()
    policy = rollout + scale * noise
    words = [torch.zeros(sequences, dtype=torch.int64)]
    for _ in range(LENGTH):
        drawn = torch.multinomial(rollout[words[-1]].softmax(-1), 1, generator=generator)
        words.append(drawn[:, 0])
    before, after = torch.stack(words[:-1], 1), torch.stack(words[1:], 1)
    return Draw(
        token_logprobs(policy[before], after),
        token_logprobs(rollout[before], after),
        reward[before, after],
        expected(policy, reward),
        expected(rollout, reward),
    )


def expected(logits: Tensor, reward: Tensor) -> float:
    """The mean reward per token of a policy, from the distribution of each token in turn."""
    transition = logits.softmax(-1)
    of_word = (transition * reward).sum(-1)
    distribution = torch.zeros(WORDS, dtype=torch.float64)
    distribution[0] = 1
    total = 0.0
    for _ in range(LENGTH):
        total += float(distribution @ of_word)
        distribution = distribution @ transition
    return total / LENGTH


def estimates(scale: float, sequences: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """The drift (k3 per token), and (abs(bias), standard deviation of a sequence) of each way."""
    drawn = sample(scale, sequences)
    found, drift = {}, 0.0
    for name, options in WAYS.items():
        weights, mask, stats = rollout_correction(drawn.logprobs, drawn.rollout_logprobs, **options)
        drift = float(stats.as_dict("")["k3"])
        weighted = drawn.reward * (mask if weights is None else weights * mask)
        # The error does not include the noise that the unweighted mean has too, which is known.
        mean = float((weighted - drawn.reward).mean()) + drawn.of_sampler
        # Over all tokens, also rejected tokens.
        found[name] = (abs(mean - drawn.of_policy), float(weighted.mean(1).std()))
    return drift, found


def draw_estimates(bias: Axes, noise: Axes, sequences: int) -> None:
    """Bias and noise of each way over the drift."""
    points = [estimates(scale, sequences) for scale in SCALES]
    drifts = [drift for drift, _ in points]
    for drift, found in points:
        errors = ", ".join(f"{name} {off:.4f}" for name, (off, _) in found.items())
        print(f"drift {drift:.1e}: bias {errors}")
    for name in points[0][1]:
        for panel, which in ((bias, 0), (noise, 1)):
            values = [found[name][which] for _, found in points]
            panel.plot(drifts, values, label=name, marker="o", **LINE, **STYLES[name])
    for panel, title in (
        (bias, "Bias of the mean reward: what more data does not mend"),
        (noise, "Standard deviation of one sequence's estimate"),
    ):
        panel.set_xlabel("drift: KL(rollout || policy), nats per token")
        panel.set_xscale("log")
        panel.set_yscale("log")
        dress(panel, title)
        panel.legend(frameon=False, fontsize=SMALL)


def main() -> None:
    """Draw the sequences, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=50_000)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    figure = new_figure(8)
    axes = figure.subplots(2, 2)
    draw_weights(axes[0][0], LIKELY)
    draw_weights(axes[0][1], RARE)
    draw_estimates(*axes[1], options.sequences)
    figure.savefig(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
