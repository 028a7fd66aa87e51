"""The corrections of papers and frameworks, as options of ``rollout_correction``.

Use ``klfast.rollout_correction(logprobs, rollout_logprobs, mask, preset="icepop")``. The presets
are from the frameworks' sources and threads of May to November 2026. Bounds on a ratio are
bounds on policy over rollout policy. verl's ``*_k1`` options bound the inverse ratio: see
``klfast.compat.verl``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from klfast.args.rejection import Rejection

_GEOMETRIC = Rejection("ratio", "seq-mean", low=0.999, high=1.001)


def _of_tokens(cap: float | None, *reject: Rejection) -> dict[str, Any]:
    return {"weight": "token", "cap": cap, "reject": reject}


PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        # F. Yao et al. 2025, fengyao.notion.site/off-policy-rl; verl's decoupled_token_is.
        "tis": {"weight": "token", "cap": 2.0},
        # slime, examples/train_infer_mismatch_helper/mis.yaml with tis_mode "mask".
        "mis": {"weight": "token", "floor": 0.5, "cap": 2.0, "outside": "mask"},
        # Ring-1T, arXiv:2510.18855, verl's decoupled_token_icepop, NeMo-RL's ProRLv2 guide.
        "icepop": {"weight": "token", "floor": 0.5, "cap": 5.0, "outside": "mask"},
        # prime-rl's IcePopLossConfig (PR 3526), of INTELLECT-3, arXiv:2512.16144.
        "icepop-prime-rl": {"weight": "token", "floor": 0.2, "cap": 5.0, "outside": "mask"},
        # Y. Liu et al. 2025, richardli.xyz/rl-collapse; verl's decoupled_seq_is.
        "seq-tis": {"weight": "sequence", "cap": 2.0},
        # The same; verl's decoupled_seq_is_rs.
        "seq-mis": {
            "weight": "sequence",
            "cap": 2.0,
            "reject": (Rejection("ratio", "seq-sum", low=0.5, high=2.0),),
        },
        # TRL's GRPO: vllm_importance_sampling_mode "sequence_mask", its default.
        "trl": {"weight": "sequence", "cap": 3.0, "outside": "mask"},
        # The same source as seq-tis; verl's decoupled_geo_rs.
        "geo-mask": {"weight": None, "reject": (_GEOMETRIC,)},
        # verl's decoupled_geo_rs_token_tis.
        "geo-mask-tis": _of_tokens(2.0, _GEOMETRIC),
        # SkyRL's sequence_mask_metric "geometric".
        "geo-mask-skyrl": {
            "weight": None,
            "reject": (Rejection("ratio", "seq-mean", low=0.99, high=1.01),),
        },
        # NeMo-RL's truncated_importance_sampling_type "seq-mask-tis".
        "seq-mask-tis": _of_tokens(None, Rejection("ratio", "seq-mean", low=0.999, high=1.002)),
        # verl's decoupled_k3_rs.
        "k3-mask": {"weight": None, "reject": (Rejection("k3", "seq-mean", high=0.01),)},
        # slime's rs_veto_threshold beside TIS; SkyRL suggests the same threshold.
        "veto": _of_tokens(2.0, Rejection("ratio", "seq-min", low=1e-4)),
        # J. Guo et al. 2026, ringtech.notion.site/kpop: phi = 0.1 (prime-rl PR 3283).
        "kpop": _of_tokens(
            None, Rejection("binary_kl", high=0.1), Rejection("binary_kl_reverse", high=0.1)
        ),
        # arXiv:2602.04879, with the thresholds of verl's examples/dppo_trainer and the ratio
        # truncated at 20, as its dppo_tv and dppo_kl do. Needs advantages=.
        "dppo-tv": _of_tokens(20.0, Rejection("binary_tv", high=0.15, outward_only=True)),
        "dppo-kl": _of_tokens(20.0, Rejection("binary_kl", high=0.05, outward_only=True)),
        # prime-rl's IPO, its default loss, the same in both directions. The eps is from PR 3586 of
        # 18 September 2026, which removed the KL term. The cap is from later code, which limits the
        # ratio and keeps its gradient (IPOLossConfig in
        # packages/prime-rl-configs/src/prime_rl/configs/trainer.py).
        "prime-rl": _of_tokens(1e4, Rejection("binary_tv", high=0.3)),
        # IPO from PR 3418 of 27 August 2026 on, with the eps of PRs 1930 and 2798. Its loss also
        # had the term 1e-3 * x**2 for all tokens, even for rejected tokens.
        "prime-rl-2026-08": _of_tokens(None, Rejection("binary_tv", high=0.1)),
        # prime-rl's loss for on-policy distillation (ref_kl_loss_fn, August 2026): one side alone.
        # Its loss also has the term 1e-3 * x**2 for all tokens.
        "prime-rl-distillation": _of_tokens(None, Rejection("difference", low=-0.2)),
        # AReaL's RejectionSamplingConfig: its defaults (level token, action mask, metric ratio).
        "areal": _of_tokens(None, Rejection("ratio", high=5.0)),
    }
)
"""Name -> keyword arguments of ``klfast.rollout_correction``."""
