"""The names of choices, as types for annotations; the lists of names at run time come from here.

``def loss(estimator: klfast.EstimatorName) -> ...`` takes what :func:`klfast.kl_penalty` takes.
"""

from __future__ import annotations

from typing import Literal, get_args

FormulaName = Literal["k1", "abs", "k2", "k3", "k3_ref", "r_log_r"]
"""Estimators that have a formula of their own, in the order of the ops."""

AliasName = Literal["mse", "low_var_kl"]
"""Other names of ``k2`` and ``k3``."""

PlusName = Literal["k1+", "k2+", "k3+"]
"""The value of the estimator before the ``+``, with the gradient of k2 and a detached weight."""

EstimatorName = Literal[FormulaName, AliasName, PlusName]
"""The names that ``estimator=`` takes. It also takes a :class:`klfast.Estimator`."""

GradientName = Literal["value", "k2", "none"]
"""``gradient`` of a :class:`klfast.Estimator`, in the order of the ops."""

ImportanceName = Literal["differentiable", "detached"]
"""``importance`` of a :class:`klfast.Estimator`, in the order of the ops."""

ReturnEntropy = bool | Literal["detached"]
"""``return_entropy=`` of the functions over a vocabulary; detached entropies have no gradient."""

ReductionName = Literal[
    "none",
    "seq-sum",
    "seq-mean",
    "token-sum",
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
]
"""``reduction=`` of :func:`klfast.kl_penalty` and :func:`klfast.kl_divergence`."""

DirectionName = Literal["reverse", "forward", "jsd", "tv", "skew-reverse", "skew-forward"]
"""``direction=`` of :func:`klfast.kl_divergence`."""

TailName = Literal["bucket", "renormalize", "generalized", "drop"]
"""``tail=`` of :func:`klfast.topk_kl_divergence`."""

BackendName = Literal["auto", "native", "triton", "reference"]
"""``backend=`` of every function; ``auto`` tries the others in this order."""

ESTIMATORS: tuple[FormulaName, ...] = get_args(FormulaName)
NAMES: tuple[EstimatorName, ...] = get_args(EstimatorName)
ALIASES: dict[str, FormulaName] = {"mse": "k2", "low_var_kl": "k3"}
FRAMEWORKS_NAMES: dict[str, EstimatorName] = {"kl": "k1", "kl+": "k1+"}
"""Frameworks' names for estimators that klfast does not use -> klfast's names."""
PLUS: dict[str, FormulaName] = {"k1+": "k1", "k2+": "k2", "k3+": "k3"}
GRADIENTS: tuple[GradientName, ...] = get_args(GradientName)
IMPORTANCE: tuple[ImportanceName, ...] = get_args(ImportanceName)
DIRECTIONS: tuple[DirectionName, ...] = get_args(DirectionName)
TAILS: tuple[TailName, ...] = get_args(TailName)
