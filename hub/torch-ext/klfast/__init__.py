"""klfast: the KL penalty of reinforcement learning for language models, in Triton."""

from . import _requirements as _requirements  # first: it raises where torch is too old
from .args import rollout_presets
from .args.estimator import Estimator
from .args.rejection import Rejection
from .controllers.grouped import GroupedKLController, KLController
from .controllers.target import (
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
from .controllers.watchers import (
    KLAdaptiveLR,
    KLDriftAlarm,
    KLEarlyStop,
    KLMonitor,
    ReferenceReset,
)
from .functional.data_parallel import data_parallel_normalizer
from .functional.hidden import (
    linear_kl_divergence,
    linear_token_logprobs,
    linear_token_loss,
    linear_topk_kl_divergence,
)
from .functional.logits import kl_divergence, token_logprobs, topk_kl_divergence
from .functional.penalty import kl_penalty, kl_rewards, reduce
from .functional.profile import LogRatioProfile, WorstToken, log_ratio_profile, worst_tokens
from .functional.rollout import rollout_correction
from .stats.kl import KLStats
from .stats.outputs import KLDivergence, TokenLogprobs, TokenLoss
from .stats.rollout import RolloutCorrection, RolloutStats, RuleStats
from .training.penalty import KLPenalty
from .types import names
from .types.names import (
    BackendName,
    DirectionName,
    EstimatorName,
    GradientName,
    ReductionName,
    TailName,
)
from .version import __version__

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
    "data_parallel_normalizer",
    "get_kl_controller",
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
