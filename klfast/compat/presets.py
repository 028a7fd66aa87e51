"""The KL estimators of each framework by its own names, as ``klfast.Estimator`` values.

All of them are data for ``klfast.kl_penalty(..., estimator=...)``. A limit on the value stops the
gradient through the log-ratio where it acts, as the frameworks' own ``clamp`` does. It stops the
weight's gradient too with ``clip_weighted``. For example, k3 limited to 10 has no gradient once
``logprobs - ref_logprobs < -2.61``. ``KLStats.clipped`` counts those tokens, which no framework
does. verl's ``k3+`` and ``Estimator("k3", linear_tail=c)`` keep a gradient there.

The values come from the frameworks' sources of August 2026, AReaL's of May.
"""

from __future__ import annotations

from dataclasses import replace

from klfast.args.estimator import Estimator

K3_LIMITED = Estimator("k3", kl_clip=10)
"""The value limited to 10. Several frameworks limit it after an exp that may have overflowed."""

K3_LIMITED_TWICE = Estimator("k3", log_ratio_clip=20, kl_clip=10)
"""The log-ratio limited to 20 before the exp, the value to 10 after it."""

_PLAIN = {"kl": Estimator("k1"), "abs": Estimator("abs"), "mse": Estimator("k2")}

_VERL = {
    **_PLAIN,
    "k1": Estimator("k1"),
    "k2": Estimator("k2"),
    "k3": K3_LIMITED_TWICE,
    "low_var_kl": K3_LIMITED_TWICE,
}

VERL = {**_VERL, **{name + "+": replace(e, gradient="k2") for name, e in _VERL.items()}}
"""A ``+`` keeps the value and takes the gradient of k2."""

OPENRLHF = {name: Estimator(name, kl_clip=10) for name in ("k1", "k2", "k3")}
ROLL = {**_PLAIN, "k3": K3_LIMITED}
TRL_PPO = _PLAIN
"""TRL up to 0.11."""
TRL_GRPO = Estimator("k3")
"""TRL 1.x, and torchrl. With ``old_logprobs`` it is ``use_bias_correction_kl``, TRL's default since
1.10."""
TRL_RLOO = Estimator("k1")
TRLX = {"reward": Estimator("k1"), "kl": Estimator("k3_ref")}
"""The reward is shaped with k1; what the controller sees is k3 with the ratio upside down."""

SKYRL = {**{name: Estimator(name) for name in ("k1", "abs", "k2")}, "k3": K3_LIMITED_TWICE}
"""``kl_estimator_type``, k3 by default."""

NEMO_RL = {
    name: Estimator(name, log_ratio_clip=20, kl_clip=10, clip_weighted=True)
    for name in ("k1", "k2", "k3")
}
"""``reference_policy_kl_type``, k3 by default. Its loss always has a weight: ``old_logprobs`` are
``logprobs.detach()`` (a weight of 1 that has a gradient), or the sampler's with
``use_on_policy_kl_approximation``. The value of 10 limits the weighted product, and a weight of NaN
or infinity counts as 0. Its reward, without ``old_logprobs``, has none."""

SLIME = {
    **{name: Estimator(name) for name in ("k1", "k2", "k3")},
    "low_var_kl": Estimator("k3", kl_clip=10, clip_weighted=True),
}
"""``--kl-loss-type``, k1 by default. With ``--use-unbiased-kl`` each takes ``old_logprobs``."""

AREAL = {name: Estimator(name, kl_clip=10) for name in ("k1", "k2", "k3")}
"""``kl_estimator``, k1 by default. Each is limited; ``apply_clamp=False`` is the name alone."""

LABS_MOLT = {**OPENRLHF, "k1": Estimator("k1")}
"""``--algo.kl.estimator`` of NVIDIA's labs-molt. k1, its default, alone has no limit. An infinite
log-ratio counts as 30 nats there, and NaN as 0."""

OPEN_INSTRUCT = {
    0: Estimator("k1", log_ratio_clip=40),
    1: Estimator("k2", log_ratio_clip=40),
    2: Estimator("k3", log_ratio_clip=40),
    3: Estimator("k1", log_ratio_clip=40),
}
"""``kl_estimator``, 2 by default. The last takes ``old_logprobs``, the others do not: it is
``ratio * x``, and the limit on x leaves the ratio its gradient."""

MS_SWIFT = {"k1": Estimator("k1"), "k3": K3_LIMITED_TWICE}
"""k3 in the loss, k1 with ``kl_in_reward``."""

LIGER = {"k3": Estimator("k3")}
"""The KL term of its GRPO loss, without a limit."""

MEGATRON_LM = {"k3": Estimator("k3")}
"""``kl_term`` of its GRPO loss, without a limit."""
