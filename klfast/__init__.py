"""klfast: the KL penalty of reinforcement learning for language models."""

import importlib
from typing import TYPE_CHECKING

from klfast.args import rollout_presets
from klfast.args.estimator import Estimator
from klfast.args.rejection import Rejection
from klfast.backends.info import info
from klfast.controllers.grouped import GroupedKLController, KLController
from klfast.controllers.target import (
    AdaptiveKLController,
    ControlVAEKLController,
    DoublingKLController,
    DualKLController,
    ExponentialKLController,
    FixedKLController,
    NuPIKLController,
    PIDLagrangianKLController,
    ScheduledKLController,
    TargetController,
    get_kl_controller,
)
from klfast.controllers.watchers import (
    KLAdaptiveLR,
    KLDriftAlarm,
    KLEarlyStop,
    KLMonitor,
    ReferenceReset,
)
from klfast.functional.data_parallel import data_parallel_normalizer
from klfast.functional.hidden import (
    linear_kl_divergence,
    linear_token_logprobs,
    linear_token_loss,
    linear_topk_kl_divergence,
)
from klfast.functional.logits import kl_divergence, token_logprobs, topk_kl_divergence
from klfast.functional.penalty import kl_penalty, kl_rewards, reduce
from klfast.functional.profile import LogRatioProfile, WorstToken, log_ratio_profile, worst_tokens
from klfast.functional.rollout import rollout_correction
from klfast.stats.kl import KLStats
from klfast.stats.outputs import KLDivergence, TokenLogprobs, TokenLoss
from klfast.stats.rollout import RolloutCorrection, RolloutStats, RuleStats
from klfast.training.log import KLLog
from klfast.training.penalty import KLPenalty
from klfast.types import names
from klfast.types.names import (
    BackendName,
    DirectionName,
    EstimatorName,
    GradientName,
    ReductionName,
    TailName,
)
from klfast.version import __version__

if TYPE_CHECKING:
    from klfast import compat

__all__ = [
    "AdaptiveKLController",
    "BackendName",
    "ControlVAEKLController",
    "DirectionName",
    "DoublingKLController",
    "DualKLController",
    "Estimator",
    "EstimatorName",
    "ExponentialKLController",
    "FixedKLController",
    "GradientName",
    "GroupedKLController",
    "KLAdaptiveLR",
    "KLController",
    "KLDivergence",
    "KLDriftAlarm",
    "KLEarlyStop",
    "KLLog",
    "KLMonitor",
    "KLPenalty",
    "KLStats",
    "LogRatioProfile",
    "NuPIKLController",
    "PIDLagrangianKLController",
    "ReductionName",
    "ReferenceReset",
    "Rejection",
    "RolloutCorrection",
    "RolloutStats",
    "RuleStats",
    "ScheduledKLController",
    "TailName",
    "TargetController",
    "TokenLogprobs",
    "TokenLoss",
    "WorstToken",
    "__version__",
    "compat",
    "data_parallel_normalizer",
    "get_kl_controller",
    "info",
    "kl_divergence",
    "kl_penalty",
    "kl_rewards",
    "linear_kl_divergence",
    "linear_token_logprobs",
    "linear_token_loss",
    "linear_topk_kl_divergence",
    "log_ratio_profile",
    "names",
    "reduce",
    "rollout_correction",
    "rollout_presets",
    "token_logprobs",
    "topk_kl_divergence",
    "worst_tokens",
]


def __getattr__(name: str) -> object:
    """``klfast.compat`` is imported when it is first asked for."""
    if name == "compat":
        return importlib.import_module("klfast.compat")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
