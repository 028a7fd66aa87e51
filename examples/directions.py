"""Distillation with each direction of the KL, into a student that cannot equal its teacher.

``python examples/directions.py`` draws docs/directions.png.

The teacher's distribution has two peaks. The student's logits are a parabola over the token ids, so
it can only have one peak. Reverse KL and the total variation choose one peak. Forward KL and, in
this example, the Jensen-Shannon divergence cover both peaks and the tokens between them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import klfast

sys.path.append(str(Path(__file__).parents[1]))  # the laboratory is not installed

from lab.drawing import BLUE, GREEN, GRID, PURPLE, VERMILION, dress, new_figure

PICTURE = Path(__file__).parents[1] / "docs" / "directions.png"
STYLES = {
    "reverse": {"color": BLUE, "linestyle": "-"},
    "forward": {"color": VERMILION, "linestyle": "--"},
    "jsd": {"color": GREEN, "linestyle": "-."},
    "tv": {"color": PURPLE, "linestyle": ":"},
}
IDS = torch.linspace(-4, 4, 161)


def teacher_logits() -> Tensor:
    """Two peaks, the right one higher."""
    left, right = -((IDS + 1.6) ** 2) / 0.3, -((IDS - 1.4) ** 2) / 0.4
    return torch.logaddexp(left, right + 0.5)


def student_logits(centre: Tensor, log_width: Tensor) -> Tensor:
    """One peak."""
    return 1 - (IDS - centre) ** 2 / (2 * torch.exp(2 * log_width))


def distil(direction: str, steps: int) -> tuple[Tensor, float]:
    """The student's distribution after training, and its loss in nats."""
    centre, log_width = torch.tensor(0.3, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    optimizer = torch.optim.Adam([centre, log_width], lr=0.03)
    teacher = teacher_logits()[None]
    for _ in range(steps):
        logits = student_logits(centre, log_width)[None]
        loss = klfast.kl_divergence(logits, teacher, direction=direction).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return logits.detach().softmax(-1)[0], loss.item()


def main() -> None:
    """Train a student for every direction, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    figure = new_figure(3.6)
    panel = figure.subplots()
    dress(panel)
    panel.fill_between(IDS, teacher_logits().softmax(-1), color=GRID, label="teacher")
    for direction, style in STYLES.items():
        student, loss = distil(direction, options.steps)
        label = f'direction="{direction}", {loss:.2f}{" nats" if direction != "tv" else ""}'
        panel.plot(IDS, student, label=label, linewidth=2, **style)
        print(f"{label}: most likely token id {student.argmax().item()}")
    panel.set_xlabel("token id")
    panel.set_ylabel("probability")
    panel.set_xticks([])
    panel.legend(frameon=False)
    figure.savefig(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
