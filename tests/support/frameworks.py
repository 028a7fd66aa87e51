"""The frameworks' KL formulas in eager torch and autograd, in the dtype of their inputs.

The formulas follow the published behaviour as klfast states it, not the frameworks' code. ``x`` is
``logprobs - ref_logprobs``. A mask is multiplied, as in the frameworks, so masked NaN stays NaN.
"""

import torch


def k3(x, log_ratio_clip=None, kl_clip=None):
    """exp(-x) - 1 + x, of the limited log-ratio and then limited itself."""
    d = -x if log_ratio_clip is None else (-x).clamp(-log_ratio_clip, log_ratio_clip)
    value = d.exp() - 1 - d
    return value if kl_clip is None else value.clamp(-kl_clip, kl_clip)


def k1_abs_k2(x, mode):
    """The formulas that all frameworks name ``kl``, ``abs`` and ``mse``."""
    return {"kl": lambda: x, "abs": x.abs, "mse": lambda: x.square() / 2}[mode]()


def straight_through(value, surrogate):
    """A number with the first argument's value and the second argument's gradient."""
    return value.detach() + (surrogate - surrogate.detach())


def full(logprobs, ref_logprobs, mask=None):
    """KL(policy || reference) of log-probs [..., V]: ROLL and TRL <= 0.11."""
    kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)
    return kl if mask is None else kl * mask


def logprobs_of(logits, index, temperature=1.0):
    """Log-probs of one token id [...] or of several [..., K], for logits [..., V]."""
    logprobs = (logits / temperature).log_softmax(-1)
    if index.dim() == logits.dim():
        return logprobs.gather(-1, index)
    return logprobs.gather(-1, index[..., None])[..., 0]


def entropy_of(logits, temperature=1.0):
    """The entropy of logits [..., V]."""
    logprobs = (logits / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def masked_mean(values, mask):
    """The mean over the kept tokens of each row, or 0 if a row has none."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


# verl


def verl(logprobs, ref_logprobs, mode):
    """``kl_penalty``."""
    x = logprobs - ref_logprobs
    name = mode.removesuffix("+")
    if name in ("low_var_kl", "k3"):
        value = k3(x, log_ratio_clip=20, kl_clip=10)
    else:
        value = k1_abs_k2(x, {"k1": "kl", "k2": "mse"}.get(name, name))
    return value if name == mode else straight_through(value, x.square() / 2)


def verl_agg_loss(
    loss, mask, mode, dp_size=1, batch_num_tokens=None, global_batch_size=None,
    loss_scale_factor=None,
):  # fmt: skip
    """``agg_loss``, of a mask of zeros and ones."""
    if mode.startswith("token"):
        total = (loss * mask).sum() * dp_size
        return total if mode == "token-sum" else total / (batch_num_tokens or mask.sum())
    of_sequences = (loss * mask).sum(-1)
    if mode == "seq-mean-token-mean":
        of_sequences = masked_mean(loss, mask)
    elif mode == "seq-mean-token-sum-norm":
        of_sequences = of_sequences / (loss_scale_factor or mask.shape[-1])
    return of_sequences.sum() * dp_size / (global_batch_size or (mask.sum(-1) > 0).sum())


def verl_rewards(scores, logprobs, ref_logprobs, mask, beta, mode):
    """``apply_kl_penalty``: (token-level rewards, the KL that its controller gets)."""
    kl = verl(logprobs, ref_logprobs, mode)
    return scores - beta * kl * mask, masked_mean(kl, mask).mean()


# OpenRLHF


def openrlhf(logprobs, ref_logprobs, mode, unbiased=False, old_logprobs=None):
    """``compute_approx_kl``, in fp32 at least."""
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    logprobs, ref_logprobs = logprobs.to(dtype), ref_logprobs.to(dtype)
    x = logprobs - ref_logprobs
    value = {"k1": lambda: x, "k2": lambda: x.square() / 2, "k3": lambda: k3(x.clamp(min=-10))}
    value = value[mode]().clamp(-10, 10)
    if not unbiased:
        return value
    weight = 1.0
    if old_logprobs is not None:
        weight = (logprobs - old_logprobs.to(dtype)).exp().clamp(max=10).detach()
    return straight_through(value, weight * x.square() / 2)


def openrlhf_rewards(r, kl_coef, kl, mask, clip_range=None):
    """``compute_reward``: -kl_coef * kl for each token, plus the score at the last action token."""
    scores = torch.as_tensor(r, dtype=kl.dtype).expand(kl.shape[0])
    if clip_range is not None:
        scores = scores.clamp(*clip_range)
    last = ((mask != 0) * torch.arange(1, kl.shape[1] + 1)).argmax(-1, keepdim=True)
    return (-max(kl_coef, 0) * kl).scatter_add(-1, last, scores[:, None])


# ROLL


def roll(logprobs, ref_logprobs, mask=None, mode="kl"):
    """``compute_approx_kl``. k3 is limited, but the exp in it is not."""
    x = logprobs - ref_logprobs
    value = k3(x, kl_clip=10) if mode == "k3" else k1_abs_k2(x, mode)
    return value if mask is None else value * mask


# TRL


def trl_ppo(logprobs, ref_logprobs, mode):
    """``PPOTrainer._kl_penalty`` up to 0.11."""
    if mode == "full":
        return full(logprobs, ref_logprobs)
    return k1_abs_k2(logprobs - ref_logprobs, mode)


def trl_grpo(
    logprobs, ref_logprobs, mask=None, old_logprobs=None, corrected=True, level="token"
):  # fmt: skip
    """GRPO's per-token KL: k3 times exp(logprobs - old), per token or as a mean per sequence."""
    kl = k3(logprobs - ref_logprobs)
    if not corrected:
        return kl
    log_weight = logprobs - (logprobs.detach() if old_logprobs is None else old_logprobs)
    if level == "sequence":
        log_weight = masked_mean(log_weight, mask)[:, None]
    return kl * log_weight.exp()


def trl_reduce(values, mask, loss_type, normalizer=None):
    """The scalar that a ``loss_type`` of GRPO makes of per-token values."""
    if loss_type in ("grpo", "sapo"):
        return masked_mean(values, mask).mean()
    if loss_type == "luspo":
        return (values * mask).sum(-1).mean()
    return (values * mask).sum() / (mask.sum() if loss_type == "bnpo" else normalizer)


def trl_rloo(logprobs, ref_logprobs, mask):
    """The KL of each sequence in RLOO."""
    return ((logprobs - ref_logprobs) * mask).sum(-1)


# trlx


def trlx_log_ratio(logprobs, ref_logprobs, attention_mask):
    """X of T-1 tokens, times the mask [B, T] without its last column."""
    return (logprobs - ref_logprobs) * attention_mask[:, :-1]


def k3_upside_down(logprobs, ref_logprobs):
    """exp(x) - 1 - x, which trlx averages."""
    return k3(ref_logprobs - logprobs)


def trlx_mean_kl(logprobs, ref_logprobs, attention_mask):
    """(mean over all slots, mean over sequences of their sums) of exp(x) - 1 - x."""
    kl = k3(-trlx_log_ratio(logprobs, ref_logprobs, attention_mask))
    return kl.mean(), kl.sum(1).mean()


def trlx_rewards(scores, logprobs, ref_logprobs, attention_mask, kl_coef):
    """-kl_coef * x, plus the score in the last kept slot."""
    kl = trlx_log_ratio(logprobs, ref_logprobs, attention_mask)
    return openrlhf_rewards(scores, kl_coef, kl, attention_mask[:, :-1])


# SkyRL


def skyrl(logprobs, ref_logprobs, mask=None, mode="k3"):
    """``compute_approx_kl``. Its mask selects the value, unlike in other frameworks."""
    x = logprobs - ref_logprobs
    if mode == "k3":
        value = k3(x, log_ratio_clip=20, kl_clip=10)
    else:
        value = k1_abs_k2(x, {"k1": "kl", "k2": "mse"}.get(mode, mode))
    return value if mask is None else torch.where(mask != 0, value * mask, 0.0)


# NeMo-RL


def nemo_rl(logprobs, ref_logprobs, mode="k3", weight=None):
    """``calculate_kl``: the output clamp limits the weighted value.

    The weight has no gradient if the input clamp acts.
    """
    x = logprobs - ref_logprobs
    weight = None if weight is None else torch.where(x.abs() <= 20, weight, weight.detach())
    x = x.clamp(-20, 20)
    value = {"k1": lambda: x, "k2": lambda: x.square() / 2, "k3": lambda: k3(x)}[mode]()
    value = value if weight is None else weight * value
    return value.clamp(-10, 10)


def nemo_rl_weight(logprobs, old_logprobs=None):
    """The weight of NeMo-RL's loss: the ratio to the sampler or to itself, or 0 if not finite."""
    ratio = (logprobs - (logprobs.detach() if old_logprobs is None else old_logprobs)).exp()
    return torch.where(ratio.isfinite(), ratio, 0.0)


# slime


def slime(logprobs, ref_logprobs, mode, weight=None):
    """``compute_approx_kl``. ``low_var_kl`` limits the weighted k3, but not the exp in it."""
    x = logprobs - ref_logprobs
    value = {"k1": lambda: x, "k2": lambda: x.square() / 2}.get(mode, lambda: k3(x))()
    value = value if weight is None else weight * value
    return value.clamp(-10, 10) if mode == "low_var_kl" else value


# AReaL


def areal(logprobs, ref_logprobs, mode="k1", clamped=True):
    """``KLEstimator``, with a limit on all three estimators."""
    x = logprobs - ref_logprobs
    value = {"k1": lambda: x, "k2": lambda: x.square() / 2, "k3": lambda: k3(x)}[mode]()
    return value.clamp(-10, 10) if clamped else value


# labs-molt


def labs_molt(logprobs, ref_logprobs, mode):
    """``compute_approx_kl``, whose k1 has no limit."""
    return areal(logprobs, ref_logprobs, mode, clamped=mode != "k1")


# open-instruct


def open_instruct(logprobs, ref_logprobs, mode, old_logprobs=None):
    """``estimate_kl`` of the log-ratio, limited to 40. The weight keeps its gradient."""
    x = (logprobs - ref_logprobs).clamp(-40, 40)
    ratio = 1.0 if mode < 3 else (logprobs - old_logprobs).exp()
    return (x, x.square() / 2, torch.expm1(-x) + x, ratio * x)[mode]


# ms-swift


def ms_swift(logprobs, ref_logprobs):
    """K3 of GRPO's loss."""
    return k3(logprobs - ref_logprobs, log_ratio_clip=20, kl_clip=10)


# Controllers


def controller_step(value, current, target, n_steps, horizon):
    """The controller of Ziegler et al. 2019, section 2.2, which all frameworks use."""
    return value * (1 + min(max(current / target - 1, -0.2), 0.2) * n_steps / horizon)
