"""Bias and noise of the KL estimators, in value and in gradient: draws docs/estimators.png.

``python examples/estimators.py``

A policy p over a vocabulary moves away from a reference q, and tokens are drawn from p. Everything
is exact: an expectation is a sum over the vocabulary, with p as the mask's weights. The output has
two lines per estimator, one near the reference and one far from it.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor

import klfast

sys.path.append(str(Path(__file__).parents[1]))  # the laboratory is not installed

from lab.drawing import BLUE, GREEN, VERMILION, dress, new_figure

PICTURE = Path(__file__).parents[1] / "docs" / "estimators.png"
WORDS, DRAWS = 512, 64
SCALES = torch.logspace(-2, 0.6, 27, dtype=torch.float64)
STYLES = {
    "k3": {"color": GREEN, "linewidth": 4.0},
    "k2": {"color": VERMILION, "linewidth": 2.0},
    "k1": {"color": BLUE, "linewidth": 2.0, "linestyle": "--"},
}
"""Wide lines are first, so that two equal curves are both visible."""


class Point(NamedTuple):
    """One distance between policy and reference, averaged over draws of both."""

    kl: float
    bias: float
    """(expected estimate - KL) / KL."""
    noise: float
    """Standard deviation of one token's estimate / KL."""
    gradient: float
    """|expected gradient - gradient of KL(p || q)| / |gradient of KL(p || q)|."""


def moments(estimator: str, policy: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """Expectation and variance of the estimate from one token of each policy, [DRAWS]."""
    weights = policy.exp()
    each = klfast.kl_penalty(policy, ref, estimator=estimator)
    mean = (weights * each).sum(-1)
    return mean, (weights * (each - mean[:, None]) ** 2).sum(-1)


def gradients(estimator: str, logits: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """The expected gradient in the logits, and the gradient of KL(p || q), [DRAWS, WORDS]."""
    logits = logits.requires_grad_()
    policy = logits.log_softmax(-1)
    loss = klfast.kl_penalty(
        policy, ref, policy.exp().detach(), estimator=estimator, reduction="token-sum"
    )
    exact = klfast.kl_divergence(logits, ref).sum()
    (of_loss,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (of_exact,) = torch.autograd.grad(exact, logits)
    return of_loss, of_exact


def point(estimator: str, scale: float) -> Point:
    """An estimator where the logits of policy and reference are about ``scale`` apart."""
    torch.manual_seed(0)
    logits = 2.0 * torch.randn(DRAWS, WORDS, dtype=torch.float64)
    ref = (logits + scale * torch.randn_like(logits)).log_softmax(-1)
    policy = logits.log_softmax(-1)
    kl = klfast.kl_divergence(policy, ref)
    mean, variance = moments(estimator, policy, ref)
    found, exact = gradients(estimator, logits, ref)
    return Point(
        kl.mean().item(),
        ((mean - kl) / kl).mean().item(),
        (variance.sqrt() / kl).mean().item(),
        ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item(),
    )


def draw(panel: Axes, curves: dict[str, list[Point]], field: str, title: str) -> None:
    """One panel: a field of the points against the KL."""
    for name, points in curves.items():
        ys = [getattr(p, field) for p in points]
        panel.plot([p.kl for p in points], ys, label=name, **STYLES[name])
    panel.set_xscale("log")
    panel.set_xlabel("KL(p || q), nats per token")
    dress(panel, title, 24)
    panel.legend(frameon=False)


def main() -> None:
    """Compute the curves and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PICTURE)
    out = parser.parse_args().out
    warnings.filterwarnings("ignore", ".*estimator 'k1'")  # the picture shows its missing gradient
    curves = {name: [point(name, scale.item()) for scale in SCALES] for name in STYLES}
    for name, points in curves.items():
        for kl in (0.01, 1.0):
            at = min(points, key=lambda p: abs(math.log(p.kl / kl)))
            print(
                f"{name} at {kl:g} nats: off by {abs(at.bias):.0%} of the KL, noise {at.noise:.1f} "
                f"times the KL, gradient off by {at.gradient:.0%}"
            )
    figure = new_figure(3.4)
    panels = figure.subplots(1, 3)
    draw(panels[0], curves, "bias", "Bias of the value, share of the KL")
    draw(panels[1], curves, "noise", "Noise of one token, times the KL")
    panels[1].set_yscale("log")
    draw(panels[2], curves, "gradient", "In a loss: error of the expected gradient")
    figure.savefig(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
