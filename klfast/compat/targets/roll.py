"""ROLL, whose releases are git tags: v0.1.0 to v0.3.0 and its main branch of August 2026."""

from __future__ import annotations

from klfast.compat import roll
from klfast.compat.patching.sites import Group, known

_FUNCTIONALS = "roll.utils.functionals"
_CONTROLLERS = "roll.utils.kl_controller"
_DIVERGENCES = "roll.pipeline.distill.various_divergence:VariousDivergence"
_ALL = "v0.1.0 to v0.3.0, main"


def _divergence(method: str, code: str) -> Group:
    """A method of its own, so that objectives that klfast does not compute stay as they are."""
    new = getattr(roll.VariousDivergence, method)
    return (known(f"{_DIVERGENCES}.{method}", code, new, "v0.1.3 to v0.3.0, main"),)


_GROUPS = (
    (known(f"{_FUNCTIONALS}:compute_approx_kl", "503c0539649c821e", roll.compute_approx_kl, _ALL),),
    (
        known(
            f"{_FUNCTIONALS}:log_probs_from_logits",
            "b35fbb39a2cd0c30",
            roll.log_probs_from_logits,
            _ALL,
        ),
    ),
    (
        known(
            f"{_FUNCTIONALS}:entropy_from_logits",
            "139adf4da48b76ee",
            roll.entropy_from_logits,
            _ALL,
        ),
    ),
    (
        known(
            f"{_CONTROLLERS}:AdaptiveKLController",
            "4599c61cfbfc12a6",
            roll.AdaptiveKLController,
            _ALL,
        ),
        known(
            f"{_CONTROLLERS}:FixedKLController", "a71d6a7c80f4a142", roll.FixedKLController, _ALL
        ),
        known(
            f"{_CONTROLLERS}:get_kl_controller", "d4f14e44554b1dcf", roll.get_kl_controller, _ALL
        ),
    ),
    _divergence("compute_forward_kl_divergence", "e666096a7693be98"),
    _divergence("compute_reverse_kl_divergence", "c2647239834d01cd"),
    _divergence("compute_js_divergence", "5ce774e327e9d6a8"),
)
TARGETS = (_GROUPS,)
