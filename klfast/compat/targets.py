"""What ``patch`` replaces in each framework, and how it recognises it.

A fingerprint is ``patching.fingerprint`` of the code that klfast was proved equal to. ROLL and trlx
have no releases to install: theirs are of their main branches as read in 2026, and these two
patches have not met the packages themselves.
"""

from __future__ import annotations

from klfast.compat import openrlhf, roll, trl, trl_trainers, trlx, verl
from klfast.compat.patching import Site, Target, replacement, replacement_of_compiled, rewriting


def _replace(where: str, code: str, new: object) -> Site:
    return Site(where, code, replacement(new))


_VERL = Target(
    "verl",
    ("0.9",),
    (
        _replace("verl.trainer.ppo.core_algos:kl_penalty", "3194e8e3a0b07d41", verl.kl_penalty),
        Site("verl.trainer.ppo.core_algos:kl_penalty_forward", "21b857ef8d407206"),
        _replace("verl.trainer.ppo.core_algos:agg_loss", "46f545d605af0451", verl.agg_loss),
        Site("verl.utils.torch_functional:masked_sum", "1f6f1c6daac8a62a"),
        Site("verl.utils.torch_functional:masked_mean", "a833f480d14c6d78"),
        _replace(
            "verl.trainer.ppo.core_algos:AdaptiveKLController",
            "20918bb44a36b301",
            verl.AdaptiveKLController,
        ),
        _replace(
            "verl.trainer.ppo.core_algos:FixedKLController",
            "1c206129c972cfb8",
            verl.FixedKLController,
        ),
        _replace(
            "verl.trainer.ppo.core_algos:get_kl_controller",
            "3f3f2ae7494e4993",
            verl.get_kl_controller,
        ),
        _replace(
            "verl.trainer.ppo.ray_trainer:apply_kl_penalty",
            "9992a9a9c23c6957",
            verl.apply_kl_penalty,
        ),
        _replace(
            "verl.utils.torch_functional:logprobs_from_logits",
            "55052f8356a158da",
            verl.logprobs_from_logits,
        ),
        Site("verl.utils.torch_functional:logprobs_from_logits_v2", "eb68b39926973cb1"),
        _replace(
            "verl.utils.torch_functional:entropy_from_logits",
            "a81547a47a26577e",
            verl.entropy_from_logits,
        ),
        _replace(
            "verl.utils.torch_functional:entropy_from_logits_with_chunking",
            "8238e2ad26ad701e",
            verl.entropy_from_logits_with_chunking,
        ),
    ),
    exact=True,
)

_OPENRLHF = Target(
    "openrlhf",
    ("0.11",),
    (
        _replace(
            "openrlhf.models.utils:compute_approx_kl",
            "9a31bec1e32b8ff1",
            openrlhf.compute_approx_kl,
        ),
        _replace(
            "openrlhf.models.utils:compute_reward", "ed3b03fa22353a97", openrlhf.compute_reward
        ),
        _replace(
            "openrlhf.models.utils:log_probs_from_logits",
            "66bc5702680a2331",
            openrlhf.log_probs_from_logits,
        ),
        Site("openrlhf.models.utils:_logsumexp_by_chunk", "ae51220665162669"),
        Site(
            "openrlhf.models.utils:compute_entropy",
            None,
            replacement_of_compiled(openrlhf.compute_entropy, "c3423c739cc25222"),
        ),
        _replace(
            "openrlhf.trainer.ppo_utils.kl_controller:AdaptiveKLController",
            "4599c61cfbfc12a6",
            openrlhf.AdaptiveKLController,
        ),
        _replace(
            "openrlhf.trainer.ppo_utils.kl_controller:FixedKLController",
            "a71d6a7c80f4a142",
            openrlhf.FixedKLController,
        ),
    ),
    exact=True,
)

_ROLL = Target(
    None,
    (),
    (
        _replace(
            "roll.utils.functionals:compute_approx_kl", "503c0539649c821e", roll.compute_approx_kl
        ),
        _replace(
            "roll.utils.functionals:log_probs_from_logits",
            "b35fbb39a2cd0c30",
            roll.log_probs_from_logits,
        ),
        _replace(
            "roll.utils.functionals:entropy_from_logits",
            "139adf4da48b76ee",
            roll.entropy_from_logits,
        ),
        _replace(
            "roll.utils.kl_controller:AdaptiveKLController",
            "4599c61cfbfc12a6",
            roll.AdaptiveKLController,
        ),
        _replace(
            "roll.utils.kl_controller:FixedKLController",
            "a71d6a7c80f4a142",
            roll.FixedKLController,
        ),
        _replace(
            "roll.utils.kl_controller:get_kl_controller",
            "d4f14e44554b1dcf",
            roll.get_kl_controller,
        ),
    ),
    exact=True,
)

_TRLX = Target(
    None,
    (),
    (
        _replace(
            "trlx.models.modeling_ppo:AdaptiveKLController",
            "69113a2064d3257d",
            trlx.AdaptiveKLController,
        ),
        _replace(
            "trlx.models.modeling_ppo:FixedKLController",
            "a71d6a7c80f4a142",
            trlx.FixedKLController,
        ),
        Site(
            "trlx.trainer.accelerate_ppo_trainer:AcceleratePPOTrainer.make_experience",
            None,
            rewriting(
                {
                    "log_ratio = (logprobs - ref_logprobs) * attention_mask[:, :-1]": (
                        "log_ratio = klfast.log_ratio(logprobs, ref_logprobs, attention_mask)"
                    ),
                    "kl = log_ratio.exp() - 1 - log_ratio": (
                        "kl = klfast.mean_kl(logprobs, ref_logprobs, attention_mask)"
                    ),
                    "mean_kl_per_token = kl.mean()": "mean_kl_per_token = kl.mean_kl_per_token",
                    "mean_kl = kl.sum(1).mean()": "mean_kl = kl.mean_kl",
                },
                trlx,
            ),
        ),
    ),
)

_TRL = Target(
    "trl",
    ("1.16",),
    (
        Site(
            "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
            trl_trainers.COMPUTE_LOSS,
            trl_trainers.with_fused_kl,
        ),
        Site(
            "trl.trainer.rloo_trainer:RLOOTrainer._generate_and_score_completions",
            None,
            rewriting(
                {
                    "per_token_kl = old_per_token_logps - ref_per_token_logps": (
                        "per_token_kl = klfast.per_token_k1("
                        "old_per_token_logps, ref_per_token_logps, completion_mask)"
                    ),
                    "kl = (per_token_kl * completion_mask).sum(-1)": (
                        "kl = klfast.sequence_kl("
                        "old_per_token_logps, ref_per_token_logps, completion_mask)"
                    ),
                },
                trl_trainers.RLOO,
            ),
        ),
        _replace(
            "trl.trainer.utils:selective_log_softmax",
            "5108000636856a85",
            trl.selective_log_softmax,
        ),
        _replace(
            "trl.trainer.utils:entropy_from_logits", "a12b11326fe0f653", trl.entropy_from_logits
        ),
        _replace(
            "trl.trainer.utils:selective_log_softmax_and_entropy",
            "0194eb27f740d629",
            trl.selective_log_softmax_and_entropy,
        ),
    ),
    exact=True,
)

_TRL_PPO = Target(
    "trl",
    ("0.11",),
    (
        _replace(
            "trl.trainer.ppo_trainer:PPOTrainer._kl_penalty",
            "e8aa6467725bf91c",
            trl_trainers.kl_penalty_of_ppo,
        ),
        _replace(
            "trl.trainer.utils:AdaptiveKLController", "4599c61cfbfc12a6", trl.AdaptiveKLController
        ),
        _replace("trl.trainer.utils:FixedKLController", "a71d6a7c80f4a142", trl.FixedKLController),
    ),
    exact=True,
)

TARGETS = {
    "openrlhf": (_OPENRLHF,),
    "roll": (_ROLL,),
    "trl": (_TRL, _TRL_PPO),
    "trlx": (_TRLX,),
    "verl": (_VERL,),
}
"""By framework; of several targets the one whose version is installed."""
