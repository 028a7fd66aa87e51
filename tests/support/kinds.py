"""The controllers with a target, by name, and how they are made."""

from klfast import (
    AdaptiveKLController,
    ControlVAEKLController,
    DoublingKLController,
    DualKLController,
    ExponentialKLController,
    NuPIKLController,
    PIDLagrangianKLController,
    ScheduledKLController,
)

STEERING = {
    "adaptive": (AdaptiveKLController, {}),
    "exponential": (ExponentialKLController, {"min_coef": 1e-6}),
    "nupi": (NuPIKLController, {"nu": 0.5}),
    "nupi-linear": (NuPIKLController, {"nu": 0.5, "scale": "linear"}),
    "pid": (PIDLagrangianKLController, {"d_delay": 3}),
    "dual": (DualKLController, {}),
    "doubling": (DoublingKLController, {"every": 3}),
    "control-vae": (ControlVAEKLController, {}),
    "scheduled": (
        ScheduledKLController,
        {"shape": "cosine", "warmup": 5, "steps": 20, "start": 1.5, "final": 0.7, "nu": 0.5},
    ),
}


def make(kind, init_kl_coef, target, **options):
    cls, own = STEERING[kind]
    return cls(init_kl_coef, target, **{**own, **options})
