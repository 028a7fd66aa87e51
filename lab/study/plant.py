"""A simulated policy: how its KL responds to the coefficient of its penalty.

In every update the logarithm of the KL moves towards a goal that falls with the coefficient::

    goal = level - gain * log(value + least) + drift * t + w  # value: of `delay` updates ago
    log_kl += (rise if goal > log_kl else fall) * (goal - log_kl)
    current = exp(log_kl) * exp(noise * n - noise**2 / 2)  # what the controller measures

with standard normal n, and w a slow random walk back to 0:
``w = 0.95 * w + sqrt(1 - 0.95**2) * wander * n``. The KL is 0 before the first update and ``first``
after it, because Adam moves every weight by a whole step in the first update.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

RECORDED = Path(__file__).with_name("recorded.json")
"""Runs with the default settings. The default ``Plant`` is fitted to them."""

_SLOW = 0.95
_DELAYS = range(4)
_FAR = 0.3
"""Larger residuals do not count by their squares, so that single updates do not decide the fit."""


@dataclass(frozen=True)
class Plant:
    """The parameters of a simulated policy (see the module).

    Attributes:
        level: the goal at a coefficient of 1, log nats.
        gain: the goal falls by so much when the coefficient is multiplied by e.
        least: far below this coefficient the goal rises no further.
        rise, fall: the shares of the way to the goal that an update moves, up and down.
        delay: updates until a coefficient acts.
        drift: the change of the goal per update.
        first: the KL after the first update, in nats.
        noise: standard deviation of the logarithm of a measured KL.
        wander: standard deviation of w.
    """

    level: float
    gain: float
    least: float
    rise: float
    fall: float
    delay: int
    drift: float
    first: float
    noise: float
    wander: float

    def balance(self, target: float) -> float:
        """The coefficient that holds the target at first."""
        return max(1e-6, math.exp((self.level - math.log(target)) / self.gain) - self.least)


def goal_of(plant: Any, value: Tensor, t: int) -> Tensor:
    """The goal of the logarithm of the KL in update t. ``plant`` may have tensors as fields."""
    goal: Tensor = plant.level - plant.gain * torch.log(value + plant.least) + plant.drift * t
    return goal


def moved(plant: Any, log_kl: Tensor, goal: Tensor) -> Tensor:
    """The logarithm of the KL after an update."""
    gap = goal - log_kl
    return log_kl + torch.where(gap > 0, plant.rise * gap, plant.fall * gap)


class Policy:
    """Simulated policies in a tensor of any shape. They begin at their reference."""

    def __init__(self, plant: Plant, shape: tuple[int, ...]) -> None:
        self.plant = plant
        self.kl = torch.zeros(shape, dtype=torch.float64)
        self._w = torch.zeros(shape, dtype=torch.float64)
        self._values: list[Tensor] = []

    def measured(self, n: Tensor) -> Tensor:
        """The KL as a batch measures it, with standard normal n."""
        noise = self.plant.noise
        return self.kl * torch.exp(noise * n - noise**2 / 2)

    def update(self, value: Tensor, n: Tensor | float = 0.0, push: float = 1.0) -> None:
        """Make one update under a coefficient.

        Args:
            value: the coefficients, in the shape of the policies.
            n: standard normal, moves w.
            push: multiplies the KL of the goal, which simulates a change of the task.
        """
        plant, t = self.plant, len(self._values)
        self._values.append(value)
        self._w = _SLOW * self._w + math.sqrt(1 - _SLOW**2) * plant.wander * n
        if t == 0:
            self.kl = torch.full_like(self.kl, plant.first)
            return
        acting = self._values[max(0, t - plant.delay)]
        goal = goal_of(plant, acting, t) + self._w + math.log(push)
        self.kl = torch.exp(moved(plant, torch.log(self.kl), goal))


def without_noise(plant: Plant, coefficient: Tensor) -> Tensor:
    """The KL [A, T] before each update under coefficients [A, T], without randomness."""
    policy = Policy(plant, (len(coefficient),))
    kl = []
    for value in coefficient.unbind(1):
        kl.append(policy.kl)
        policy.update(value)
    return torch.stack(kl, 1)


@dataclass(frozen=True)
class Records:
    """The coefficient and the KL of each step of [A] arms with [T] steps each, in fp64.

    Attributes:
        coefficient: [A, T], the coefficient in each step.
        kl: [A, T], the exact KL of the step's samples before the step, in nats per sequence.
        measured: [A, T], the estimate of this KL by k3, which controllers read.
    """

    coefficient: Tensor
    kl: Tensor
    measured: Tensor


def load_records() -> Records:
    columns = json.loads(RECORDED.read_text())
    tensors = {
        name: torch.tensor([own[name] for own in columns.values()], dtype=torch.float64)
        for name in ("coefficient", "kl", "measured")
    }
    return Records(**tensors)


def fit(records: Records) -> Plant:
    """Fits the parameters to recorded KLs, by the Huber loss of the logarithm.

    Arms without a penalty are left out, because they leave the region that controllers work in. The
    noise of a measurement is the noise of the recorded estimates around the exact KL. The deviation
    of the recorded exact KL from the fitted KL is taken as the wandering of the goal.
    """
    steered = (records.coefficient > 0).all(1)
    coefficient, kl = records.coefficient[steered], records.kl[steered]
    first = float(kl[:, 1].mean())
    found = [_fit(coefficient, kl, first, delay) for delay in _DELAYS]
    _, numbers, wander, delay = min(found, key=lambda one: one[0])
    of_estimate = torch.log(records.measured[steered][:, 1:] / kl[:, 1:])
    return Plant(**numbers, delay=delay, first=first, noise=float(of_estimate.std()), wander=wander)


def _fit(
    coefficient: Tensor, kl: Tensor, first: float, delay: int
) -> tuple[float, dict[str, Any], float, int]:
    """(loss, fitted parameters, standard deviation of the residuals, delay)."""
    raw = torch.tensor([-2.5, 0.3, -5.0, -2.0, -2.5, 0.0], dtype=torch.float64, requires_grad=True)

    def fitted() -> SimpleNamespace:
        return SimpleNamespace(
            level=raw[0],
            gain=raw[1].exp(),
            least=raw[2].exp(),
            rise=raw[3].sigmoid(),
            fall=raw[4].sigmoid(),
            drift=0.01 * raw[5],
        )

    def residual() -> Tensor:
        numbers = fitted()
        log_kl, rows = torch.full_like(kl[:, 0], math.log(first)), []
        for t in range(1, kl.shape[1]):
            rows.append(log_kl)
            goal = goal_of(numbers, coefficient[:, max(0, t - delay)], t)
            log_kl = moved(numbers, log_kl, goal)
        return torch.stack(rows, 1) - torch.log(kl[:, 1:])

    optimizer = torch.optim.LBFGS(
        [raw], max_iter=100, history_size=20, line_search_fn="strong_wolfe"
    )

    def huber(off: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(off, torch.zeros_like(off), delta=_FAR)

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = huber(residual())
        torch.autograd.backward(error)
        return error

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        off = residual()
        numbers = {name: float(value) for name, value in vars(fitted()).items()}
    return float(huber(off)), numbers, float(off.std()), delay
