"""The controllers and watchers by name, with one way to make and update them."""

import warnings

import torch

import klfast
from klfast.controllers import CONTROLLERS

OPTIONS = {
    "exponential": {"min_coef": 1e-6},
    "nupi": {"nu": 0.5},
    "pid-lagrangian": {"d_delay": 3},
    "doubling": {"every": 3},
    "scheduled": {
        "shape": "cosine", "warmup": 5, "steps": 20, "start": 1.5, "final": 0.7, "nu": 0.5
    },
}  # fmt: skip
STEERING = {kind: (made, OPTIONS.get(kind, {})) for kind, made in CONTROLLERS.items()} | {
    "nupi-linear": (CONTROLLERS["nupi"], {"nu": 0.5, "scale": "linear"})
}


def make(kind, init_kl_coef, target, **options):
    cls, own = STEERING[kind]
    return cls(init_kl_coef, target, **{**own, **options})


def optimizer_of(*rates):
    """An optimizer with a parameter group for each learning rate."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def grouped(**options):
    given = {"controller": klfast.NuPIKLController, "init_kl_coef": 0.5} | options
    return klfast.GroupedKLController(**{"targets": {"a": 6.0, "b": 1.0}, **given})


READERS = {
    **{
        kind: lambda kind=kind, **o: make(kind, **{"init_kl_coef": 0.5, "target": 6.0, **o})
        for kind in STEERING
    },
    "fixed": lambda **o: klfast.FixedKLController(**{"kl_coef": 0.5, **o}),
    "schedule": lambda **o: klfast.ScheduledKLController(
        **{"init_kl_coef": 0.5, "shape": "cosine", "warmup": 3, "steps": 50, **o}
    ),
    "monitor": lambda **o: klfast.KLMonitor(**{"target": 6.0, "window": 3, **o}),
    "drift": lambda **o: klfast.KLDriftAlarm(**{"limit": 6.0, "window": 9, **o}),
    "early-stop": lambda **o: klfast.KLEarlyStop(**{"target": 6.0, **o}),
    "reset": lambda **o: klfast.ReferenceReset(**{"interval": 3, "budget": 9.0, **o}),
    "learning-rate": lambda **o: klfast.KLAdaptiveLR(
        **{"optimizer": optimizer_of(1e-3), "target": 6.0, **o}
    ),
}
"""All classes that read the KL of a batch."""
COEFFICIENTS = (*STEERING, "fixed", "schedule")
WATCHERS = tuple(READERS)[len(COEFFICIENTS) :]


def update(thing, current, n_steps=64, **options):
    """Update any of them, and return its result as plain numbers."""
    if isinstance(thing, klfast.GroupedKLController):
        values = thing.update({"a": current, "b": current / 6}, n_steps, **options)
        return {name: float(value) for name, value in values.items()}
    if isinstance(thing, klfast.KLAdaptiveLR):
        thing.step(current, n_steps, **options)
        return thing.last_lr
    if isinstance(thing, klfast.ReferenceReset):
        return thing.update(current, None, n_steps, **options)
    result = thing.update(current, n_steps, **options)
    return result.item() if isinstance(result, torch.Tensor) else result


def warned(function, *arguments, **options):
    """(the result of a call, its warnings)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*arguments, **options)
    assert all(each.category is RuntimeWarning for each in caught)
    return result, caught


def stats_of(kl, length):
    """Statistics of these sequences. Fields that controllers do not read by default are NaN."""
    return klfast.KLStats(
        torch.tensor(kl), torch.tensor(length), *[torch.full((len(kl),), torch.nan)] * 6
    )
