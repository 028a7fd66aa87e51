"""On-policy distillation with three objectives: log-probs needed, bias and noise of the gradient.

``python examples/objectives.py`` draws docs/objectives.png, and trains a student with each.

The student's vocabulary has 64 tokens. Bias and noise are sums over all of them, not estimates.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import klfast

sys.path.append(str(Path(__file__).parents[1]))  # the laboratory is not installed

from lab.drawing import BLUE, GREEN, VERMILION, dress, new_figure

PICTURE = Path(__file__).parents[1] / "docs" / "objectives.png"
STYLES = {
    "sampled token": {"color": VERMILION, "linestyle": "--", "marker": "s"},
    "top-K": {"color": GREEN, "linestyle": "-.", "marker": "^"},
    "top-K and sampled token": {"color": BLUE, "linestyle": "-", "marker": "o"},
}
V = 64
KS = (1, 2, 4, 8, 16, 32, 48)


def losses(name: str, logits: Tensor, teacher: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """A loss per token, [B, T]. The tokens were sampled by the student itself."""
    logprobs = klfast.token_logprobs(logits, token_ids)
    teacher_logprobs = teacher.gather(-1, token_ids[..., None])[..., 0]
    sampled = klfast.kl_penalty(
        logprobs, teacher_logprobs, estimator="k3+", old_logprobs=logprobs.detach()
    )
    if name == "sampled token":
        return sampled
    ids = logits.detach().topk(k).indices
    known = teacher.gather(-1, ids)
    if name == "top-K":
        return klfast.topk_kl_divergence(logits, ids, known, direction="reverse")
    exact = klfast.topk_kl_divergence(logits, ids, known, direction="reverse", tail="generalized")
    return exact + sampled * (ids != token_ids[..., None]).all(-1)


def bias_and_noise(name: str, k: int) -> tuple[float, float]:
    """Bias and noise relative to the exact gradient's norm. Each token counts by its weight."""
    ranks = torch.arange(1, V + 1, dtype=torch.float64)
    student = -1.5 * ranks.log()
    teacher = (student + (2.4 * ranks).sin()).log_softmax(-1).expand(1, V, V)
    logits = student.expand(1, V, V).clone().requires_grad_()
    loss = losses(name, logits, teacher, torch.arange(V)[None], k)
    (each,) = torch.autograd.grad(loss.sum(), logits)
    kl = klfast.kl_divergence(logits, teacher, reduction="token-sum")
    exact = torch.autograd.grad(kl, logits)[0][0, 0]
    weights, size = student.softmax(-1), exact.norm()
    mean = weights @ each[0]
    noise = (weights @ (each[0] - mean).square().sum(-1)).sqrt()
    return ((mean - exact).norm() / size).item(), (noise / size).item()


def train(name: str, k: int, steps: int) -> float:
    """The exact KL of a student after training on its own tokens, in nats per token."""
    generator = torch.Generator().manual_seed(0)
    teacher = (2 * torch.randn(1, 32, V, generator=generator)).log_softmax(-1)
    logits = (teacher + torch.randn(1, 32, V, generator=generator)).requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=6.0)
    for _ in range(steps):
        policy = logits.detach().softmax(-1)[0]
        token_ids = policy.multinomial(4, replacement=True, generator=generator).T
        rows = logits.expand(4, -1, -1)
        loss = losses(name, rows, teacher.expand_as(rows), token_ids, k).mean(0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return klfast.kl_divergence(logits.detach(), teacher, reduction="token-mean").item()


def main() -> None:
    """Draw bias and noise over K, and train a student with each objective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    figure = new_figure(3.6)
    panels = figure.subplots(1, 2)
    for name, style in STYLES.items():
        ks = (1, 1) if name == "sampled token" else KS
        found = [bias_and_noise(name, k) for k in ks]
        sent = [k + 1 if name == "top-K and sampled token" else k for k in ks]
        for panel, values in zip(panels, zip(*found, strict=True), strict=True):
            panel.plot(sent, values, label=name, linewidth=2, markersize=5, **style)
        of_training = train(name, 16, options.steps)
        at_8 = " and ".join(f"{value:.2f}" for value in bias_and_noise(name, 8))
        print(f"{name}: bias and noise {at_8} at K 8, KL after training {of_training:.3f} at K 16")
    for panel, title in zip(panels, ("bias of the gradient", "noise of one token"), strict=True):
        dress(panel)
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 2, 4, 8, 16, 32], labels=["1", "2", "4", "8", "16", "32"])
        panel.set_xlabel("log-probs that the teacher sends, per token")
        panel.set_ylabel(f"{title} / exact gradient")
    panels[1].legend(frameon=False)
    figure.savefig(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
