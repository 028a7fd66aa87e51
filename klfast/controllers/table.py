"""The controllers with a target, by name: a row is all that drop-ins, laboratory and tests read."""

from __future__ import annotations

from klfast.controllers import controllers, feedback, scheduled
from klfast.controllers.base import CoefficientController

CONTROLLERS: dict[str, type[CoefficientController]] = {
    controller._kind: controller
    for controller in (
        controllers.AdaptiveKLController,
        controllers.ExponentialKLController,
        feedback.NuPIKLController,
        feedback.PIDLagrangianKLController,
        feedback.DualKLController,
        feedback.DoublingKLController,
        feedback.ControlVAEKLController,
        scheduled.ScheduledKLController,
    )
}
"""The kind of its state -> a controller that is made as ``controller(init_kl_coef, target)``."""
