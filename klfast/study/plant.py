"""The plant: how the KL of a policy answers to the coefficient of its penalty.

The policy is a distance s from its reference, KL = s**2. In every update the reward pushes it away
and the penalty pulls it back, through an optimiser with momentum::

    push    = force * (1 + drift * t) * exp(w)
    drive   = push - pull * value * s - friction * s
    speed   = momentum * speed + (1 - momentum) * drive        (the plant's delay)
    s       = max(0, s + speed)
    current = s**2 * exp(noise * n - noise**2 / 2)             (what the controller measures)

with standard normal n, and w a slow random walk back to 0:
``w = 0.95 * w + sqrt(1 - 0.95**2) * wander * n``. The gain of the plant falls with the coefficient:
in balance ``s = force / (pull * value + friction)``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from klfast.study.records import Records

_SLOW = 0.95
_LEAST = 0.05
"""Nats below which a KL is noise: the first steps, whose logarithm says nothing."""


@dataclass(frozen=True)
class Plant:
    """The numbers of the plant; see the module.

    Attributes:
        force: of the reward, nats**0.5 an update.
        pull: of the penalty, per unit of the coefficient and update.
        friction: what pulls back without a penalty, per update.
        momentum: of the optimiser, in [0, 1).
        drift: the relative change of the force in an update.
        noise: standard deviation of the logarithm of a measured KL.
        wander: standard deviation of the logarithm of the force.
    """

    force: float
    pull: float
    friction: float
    momentum: float
    drift: float
    noise: float
    wander: float

    def balance(self, target: float) -> float:
        """The coefficient that holds the target at first."""
        return max(0.0, (self.force / math.sqrt(target) - self.friction) / self.pull)


@dataclass
class Policy:
    """Policies on the plant, of any shape; ``s`` and ``speed`` begin at 0."""

    s: Tensor
    speed: Tensor
    w: Tensor

    @classmethod
    def at_reference(cls, shape: tuple[int, ...]) -> Policy:
        return cls(*torch.zeros(3, *shape, dtype=torch.float64).unbind())

    @property
    def kl(self) -> Tensor:
        return self.s**2


def advance(
    policy: Policy, plant: Plant | Leaves, value: Tensor, t: int, push: float = 1.0
) -> Policy:
    """The policies after update t under the coefficients ``value``; ``push`` multiplies the force.

    Args:
        policy: its ``w`` is this update's, see :func:`wandered`.
        plant: the numbers, or tensors of them.
        value: of the shape of the policies.
        t: how many updates there were before.
        push: a change of the task.
    """
    pushed = plant.force * (1 + plant.drift * t) * push * torch.exp(policy.w)
    drive = pushed - (plant.pull * value + plant.friction) * policy.s
    speed = plant.momentum * policy.speed + (1 - plant.momentum) * drive
    return Policy((policy.s + speed).clamp(min=0.0), speed, policy.w)


def wandered(policy: Policy, plant: Plant, n: Tensor) -> Policy:
    """The policies with the next w, of standard normal n."""
    w = _SLOW * policy.w + math.sqrt(1 - _SLOW**2) * plant.wander * n
    return Policy(policy.s, policy.speed, w)


def measured(policy: Policy, plant: Plant, n: Tensor) -> Tensor:
    """What a batch says the KL is, of standard normal n."""
    return policy.kl * torch.exp(plant.noise * n - plant.noise**2 / 2)


# The fit


@dataclass
class Leaves:
    """The numbers that are fitted, as tensors."""

    force: Tensor
    pull: Tensor
    friction: Tensor
    momentum: Tensor
    drift: Tensor


def without_noise(plant: Plant | Leaves, coefficient: Tensor) -> Tensor:
    """The KL [A, T] under recorded coefficients [A, T], where nothing is random."""
    policy = Policy.at_reference((len(coefficient),))
    kl = []
    for t, value in enumerate(coefficient.unbind(1)):
        kl.append(policy.kl)
        policy = advance(policy, plant, value, t)
    return torch.stack(kl, 1)


def fit(records: Records) -> Plant:
    """The plant whose KL is nearest to the recorded ones, in least squares of the logarithm.

    Arms without a penalty are left out: they leave the region that controllers work in. The noise
    of measuring is that of the recorded estimates around the exact KL; what the recorded exact KL
    does beside the fitted one is the force's wandering, twice of which is in the KL.
    """
    steered = (records.coefficient > 0).all(1)
    coefficient, kl = records.coefficient[steered], records.kl[steered]
    seen = kl > _LEAST
    raw = torch.tensor([-1.5, 0.0, -4.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)

    def leaves() -> Leaves:
        force, pull, friction = raw[:3].exp()
        return Leaves(force, pull, friction, torch.sigmoid(raw[3]), 0.01 * raw[4])

    def residual() -> Tensor:
        fitted = without_noise(leaves(), coefficient)
        return torch.log((fitted[seen] + 1e-9) / kl[seen])

    optimizer = torch.optim.LBFGS(
        [raw], max_iter=150, history_size=20, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = residual().square().mean()
        torch.autograd.backward(error)
        return error

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        numbers = {name: float(value) for name, value in asdict(leaves()).items()}
        off = residual()
        of_estimate = torch.log(records.measured[steered][seen] / kl[seen])
    return Plant(**numbers, noise=float(of_estimate.std()), wander=float(off.std()) / 2)
