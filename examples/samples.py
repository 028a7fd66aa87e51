"""How many tokens an estimate of the KL needs: draws docs/samples.png.

``python examples/samples.py``

A policy p and a reference q have 512 tokens in their vocabulary. They are near each other, or far
apart. Tokens are drawn from p, and k1, k2 and k3 are averaged over them. The error is the root mean
square of (mean - KL) / KL over many such means. ``kl_divergence`` gives the true KL from the logits
of both models, without drawn tokens. The output has a line per estimator with the errors for 1, 4,
16, ..., 4096 tokens.

Near the reference, k3 has a smaller error with 64 tokens than k1 with 4096. Far apart, k2 is off by
half of the KL or more with any number of tokens, and k3 needs less than half of k1's tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import klfast

sys.path.append(str(Path(__file__).parents[1]))  # the laboratory is not installed

from lab.drawing import BLUE, GREEN, LINE, VERMILION, dress, new_figure, set_shares

PICTURE = Path(__file__).parents[1] / "docs" / "samples.png"
WORDS = 512
COUNTS = tuple(4**i for i in range(7))
SCALES = {"near": 0.1, "far": 1.4}
STYLES = {
    "k1": {"color": BLUE, "linestyle": "--", "marker": "o"},
    "k2": {"color": VERMILION, "linestyle": "-", "marker": "s"},
    "k3": {"color": GREEN, "linestyle": "-", "marker": "^"},
}


def models(scale: float) -> tuple[Tensor, Tensor]:
    """Logits [WORDS] of a policy, and of a reference about ``scale`` away."""
    torch.manual_seed(0)
    logits = 2.0 * torch.randn(WORDS, dtype=torch.float64)
    return logits, logits + scale * torch.randn_like(logits)


def errors(estimator: str, logits: Tensor, ref: Tensor, repeats: int) -> list[float]:
    """The error for each of COUNTS tokens, as a share of the KL."""
    torch.manual_seed(1)
    kl = klfast.kl_divergence(logits[None], ref[None])
    tokens = logits.softmax(-1).multinomial(repeats * COUNTS[-1], replacement=True)
    logprobs, ref_logprobs = (
        of_model.log_softmax(-1)[tokens].view(repeats, -1) for of_model in (logits, ref)
    )
    found = []
    for count in COUNTS:
        near = klfast.kl_penalty(
            logprobs[:, :count],
            ref_logprobs[:, :count],
            estimator=estimator,
            reduction="seq-mean",
        )
        found.append((near / kl - 1).square().mean().sqrt().item())
    return found


def main() -> None:
    """Draw the tokens, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    figure = new_figure(3.8)
    panels = figure.subplots(1, len(SCALES), sharey=True)
    for panel, (name, scale) in zip(panels, SCALES.items(), strict=True):
        logits, ref = models(scale)
        kl = klfast.kl_divergence(logits[None], ref[None]).item()
        for estimator, style in STYLES.items():
            found = errors(estimator, logits, ref, options.repeats)
            panel.plot(COUNTS, found, label=estimator, **LINE, **style)
            print(f"{name}, {estimator}: off by", *(f"{error:.1%}" for error in found))
        panel.set_xscale("log", base=4)
        panel.set_yscale("log")
        panel.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
        panel.set_xlabel("tokens")
        dress(panel, f"KL {kl:.2g} nats: error of the mean")
        panel.legend(frameon=False)
    set_shares(panels[0].yaxis)
    figure.savefig(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
