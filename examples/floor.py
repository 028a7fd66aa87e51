"""The least KL that can be measured from logits in 16 bits: draws docs/floor.png.

``python examples/floor.py``

Two models have a vocabulary of 32,768 tokens. They are between almost equal and far apart. Their
logits are rounded to a dtype, as the last matmul of a model in bf16 does, and the exact KL of the
rounded logits is computed. Rounding alone moves the models apart, and more so with larger logits.
The output has a line per dtype and deviation of the logits. For each distance it has the KL of the
rounded logits divided by the true KL.

klfast adds no error of its own: with fp32 logits the KL is right at every distance.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import klfast

sys.path.append(str(Path(__file__).parents[1]))  # the laboratory is not installed

from lab.drawing import BLUE, GREEN, LINE, VERMILION, dress, new_figure

PICTURE = Path(__file__).parents[1] / "docs" / "floor.png"
WORDS = 32_768
DISTANCES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Standard deviations of the log-ratio, in nats."""
LINES = {
    "bf16, deviation 8": (torch.bfloat16, 8.0, {"color": VERMILION, "linestyle": "-"}),
    "bf16, deviation 2.5": (torch.bfloat16, 2.5, {"color": VERMILION, "linestyle": "--"}),
    "fp16, deviation 8": (torch.float16, 8.0, {"color": BLUE, "linestyle": "-"}),
    "fp32, deviation 8": (torch.float32, 8.0, {"color": GREEN, "linestyle": "-"}),
}
"""Name -> dtype, deviation of the logits in nats, and how it is drawn."""


def mean_kl(logits: Tensor, ref_logits: Tensor) -> float:
    """The exact KL of the policy and the reference, averaged over tokens."""
    return klfast.kl_divergence(logits, ref_logits, reduction="token-mean").item()


def found(dtype: torch.dtype, deviation: float, tokens: int) -> tuple[list[float], list[float]]:
    """The true KL and the KL of the rounded logits, at each distance."""
    torch.manual_seed(0)
    logits = deviation * torch.randn(tokens, WORDS, dtype=torch.float64)
    noise = torch.randn_like(logits)
    true, rounded = [], []
    for distance in DISTANCES:
        ref_logits = logits + distance * noise
        true.append(mean_kl(logits, ref_logits))
        rounded.append(mean_kl(logits.to(dtype), ref_logits.to(dtype)))
    return true, rounded


def main() -> None:
    """Measure, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    figure = new_figure(4)
    panel = figure.subplots()
    for name, (dtype, deviation, style) in LINES.items():
        true, rounded = found(dtype, deviation, options.tokens)
        panel.plot(true, rounded, label=name, marker="o", **LINE, **style)
        pairs = zip(true, rounded, strict=True)
        print(f"{name}: KL over the true one", *(f"{of / kl:.2f} at {kl:.1e}," for kl, of in pairs))
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("true KL, nats per token")
    panel.set_ylabel("KL of the rounded logits")
    dress(panel)
    panel.legend(frameon=False)
    figure.savefig(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
