"""Controllers: update rules that steer the coefficient of the KL penalty after each batch.

A training loop takes its step with ``controller.value`` and then reports the KL it measured::

    controller = klfast.AdaptiveKLController(init_kl_coef=0.1, target=6.0)
    loss_kl, stats = klfast.kl_penalty(
        logprobs, ref_logprobs, mask, estimator="k3+",
        reduction="seq-mean-token-sum", coef=controller, return_stats=True,
    )
    loss_kl.backward()  # with the loss of the policy, then the optimizer's step
    controller.update(stats)

Controllers keep plain floats, and reading a KL that lives on a GPU waits for it. With ``device=``
``value`` is a tensor there, which ``update`` fills, so that a captured CUDA graph or a compiled
step reads the new coefficient. In data-parallel training ``process_group=`` makes every rank
measure with the others.

A checkpoint (``state_dict``) holds what a run has changed: the coefficient, the count of skipped
values and the controller's memory. The settings (horizon, bounds, ...) come from the constructor. A
run resumed with the same settings continues bit for bit, on any number of ranks. A checkpoint names
two settings, the unit and the target. A controller with another unit refuses the checkpoint. A
controller with another target takes it, and steers to its own target from the saved coefficient.
"""

from klfast.controllers.base import CoefficientController
from klfast.controllers.target import ScheduledKLController, TargetController

__all__ = ["CONTROLLERS"]

_STEERING: list[type[CoefficientController]] = [
    *TargetController.__subclasses__(),
    ScheduledKLController,
]
CONTROLLERS = {controller._kind: controller for controller in _STEERING}
"""The kind of its state -> a controller that is made as ``controller(init_kl_coef, target)``."""
