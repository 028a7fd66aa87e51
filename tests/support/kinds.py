"""The controllers with a target, by name, and how they are made."""

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
