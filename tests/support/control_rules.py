"""The published update formulas of controllers, as their sources state them, in plain floats.

Errors are relative, as in klfast. A source that subtracts a limit gets the KL in units of the
target, so its limit is 1.
"""

import math
from collections import deque


class Ziegler:
    """lm-human-preferences: a proportional controller with a horizon."""

    def __init__(self, value, target, horizon=10_000, clip=0.2):
        self.value, self.target, self.horizon, self.clip = value, target, horizon, clip

    def update(self, kl, n_steps):
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        self.value *= 1 + error * n_steps / self.horizon


class Exponential:
    def __init__(self, value, target, gain=0.1):
        self.value, self.target, self.gain = value, target, gain

    def update(self, kl, n_steps):
        self.value *= math.exp(self.gain * (kl - self.target))


class NuPI:
    """Sohrabi et al., algorithm 1, on theta: the multiplier, or its logarithm."""

    def __init__(self, value, target, kp=1.0, ki=0.1, nu=0.0, log=True):
        self.theta, self.log = (math.log(value) if log else value), log
        self.target, self.kp, self.ki, self.nu = target, kp, ki, nu
        self.xi = None

    @property
    def value(self):
        return math.exp(self.theta) if self.log else self.theta

    def update(self, kl, n_steps):
        e = (kl - self.target) / self.target
        previous = e if self.xi is None else self.xi
        self.xi = self.nu * previous + (1 - self.nu) * e
        self.theta += self.ki * e + self.kp * (self.xi - previous)


class PIDLagrangian:
    """Stooke et al. as omnisafe has it: a cost and its limit, averages, a deque of old costs."""

    def __init__(self, value, target, kp=0.1, ki=0.0025, kd=0.01, ema=0.95, delay=10):
        self.target, self.gains, self.ema = target, (kp, ki, kd), ema
        self.integral, self.error, self.cost, self.value = value, 0.0, 0.0, value
        self.costs = deque([0.0], maxlen=delay)

    def update(self, kl, n_steps):
        kp, ki, kd = self.gains
        cost = kl / self.target
        delta = cost - 1.0  # the limit of a cost in units of the target
        self.integral = max(0.0, self.integral + delta * ki)
        self.error = self.ema * self.error + (1 - self.ema) * delta
        self.cost = self.ema * self.cost + (1 - self.ema) * cost
        rise = max(0.0, self.cost - self.costs[0])
        self.value = max(0.0, kp * self.error + self.integral + kd * rise)
        self.costs.append(self.cost)


class Dual:
    """Gradient ascent on the multiplier's logarithm, of ``multiplier * (KL / target - 1)``."""

    def __init__(self, value, target, lr=0.03):
        self.theta, self.target, self.lr = math.log(value), target, lr

    @property
    def value(self):
        return math.exp(self.theta)

    def update(self, kl, n_steps):
        self.theta += self.lr * (kl - self.target) / self.target


class Doubling:
    """Schulman et al. 2017, section 4, once in ``every`` updates."""

    def __init__(self, value, target, every=10):
        self.value, self.target, self.every, self.updates = value, target, every, 0

    def update(self, kl, n_steps):
        self.updates += 1
        if self.updates % self.every:
            return
        if kl < self.target / 1.5:
            self.value /= 2
        elif kl > self.target * 1.5:
            self.value *= 2


class ControlVAE:
    """Shao et al., equation 9, in the paper's signs: e = set point - KL, gains kp > 0 > ki."""

    def __init__(self, value, target, kp=0.1, ki=-0.01):
        self.target, self.kp, self.ki, self.value = target, kp, ki, value
        self.integral = value - kp / 2

    def update(self, kl, n_steps):
        e = (self.target - kl) / self.target
        self.integral += self.ki * e
        self.value = self.kp / (1 + math.exp(e)) + self.integral


def schedule(t, shape, warmup=0, steps=1_000, start=0.0, final=0.0):
    """The factor after t updates."""
    if t < warmup:
        return start + (1 - start) * t / warmup
    s = min((t - warmup) / steps, 1)
    return 1 + (final - 1) * (s if shape == "linear" else (1 - math.cos(math.pi * s)) / 2)
