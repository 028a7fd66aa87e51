"""klfast: the KL penalty of reinforcement learning for language models."""

from klfast import compat
from klfast.api import kl_penalty, kl_rewards
from klfast.control.controllers import (
    AdaptiveKLController,
    ExponentialKLController,
    FixedKLController,
    get_kl_controller,
)
from klfast.control.monitor import KLMonitor
from klfast.estimator import Estimator
from klfast.info import info
from klfast.logits.api import kl_divergence, token_logprobs
from klfast.stats import KLStats
from klfast.version import __version__

__all__ = [
    "AdaptiveKLController",
    "Estimator",
    "ExponentialKLController",
    "FixedKLController",
    "KLMonitor",
    "KLStats",
    "__version__",
    "compat",
    "get_kl_controller",
    "info",
    "kl_divergence",
    "kl_penalty",
    "kl_rewards",
    "token_logprobs",
]
