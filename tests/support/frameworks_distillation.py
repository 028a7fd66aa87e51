"""The frameworks' distillation losses in eager torch and autograd, in the dtype of their inputs.

The formulas follow the published behaviour as klfast states it, not the frameworks' code. A loss is
a weighted sum of per-token ``values``, [..., V] -> [...]. The ``weights`` are 0 for tokens that do
not count. The student's distribution is p, the teacher's is q.
"""

import torch

IGNORED = -100


def total(values, weights):
    """The weighted sum. A value with the weight 0 may be anything."""
    return torch.where(weights != 0, values * weights, 0.0).sum()


def interpolated(student, teacher, b, temperature=1.0):
    """TRL, ms-swift: KL(q || p) for b = 0, KL(p || q) for b = 1, and a mixture between."""
    log_p, log_q = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    return interpolated_of_logprobs(log_p, log_q, b)


def interpolated_of_logprobs(log_p, log_q, b):
    """``interpolated`` on log-probs: SDFT, SDPO."""
    p, q = log_p.exp(), log_q.exp()
    if b == 0:
        return (q * (log_q - log_p)).sum(-1)
    if b == 1:
        return (p * (log_p - log_q)).sum(-1)
    log_m = ((1 - b) * p + b * q).log()
    of_student = (p * (log_p - log_m)).sum(-1)
    of_teacher = (q * (log_q - log_m)).sum(-1)
    return (1 - b) * of_student + b * of_teacher


def gkd_weights(shape, words, labels=None, reduction="batchmean", num_items_in_batch=None):
    """The weights of TRL's GKD. ``mean`` is over all terms of the vocabulary too."""
    keep = torch.ones(shape) if labels is None else (labels != IGNORED).float()
    if num_items_in_batch is not None:
        return keep.double() / float(num_items_in_batch)
    divisor = {
        "sum": 1,
        "mean": max(1, keep.sum().item()) * words,
        "batchmean": shape[0] if labels is None else max(1, keep.sum().item()),
    }[reduction]
    return keep.double() / divisor


def likeliest(logits, indices, with_tail):
    """Log-probs of some ids, renormalised or with a bucket for all others (SDFT, SDPO)."""
    logprobs = logits.log_softmax(-1).gather(-1, indices)
    if not with_tail:
        return logprobs.log_softmax(-1)
    others = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=1e-7).log()
    return torch.cat([logprobs, others], -1)


def filled_up(student, teacher):
    """ms-swift pads a smaller vocabulary with the logits of the other model."""
    width = max(student.shape[-1], teacher.shape[-1])
    student, teacher = (
        torch.cat([x, other[..., x.shape[-1] : width]], -1)
        for x, other in ((student, teacher), (teacher, student))
    )
    return student, teacher


def roll(logits, teacher_probs, objective, temperature, excluded=None):
    """ROLL's losses from a teacher's probabilities. Its Jensen-Shannon adds 1e-9 in logarithms.

    Token ids that the teacher excludes have no term. The student's p is over all ids.
    """
    p = (logits / temperature).softmax(-1)
    excluded = torch.zeros_like(p, dtype=torch.bool) if excluded is None else excluded
    q = teacher_probs.masked_fill(excluded, 1.0)  # any number whose logarithm is finite
    if objective == "forward_kl":
        terms = q * (q / p).log()
    elif objective == "reverse_kl":
        terms = p * (p / q).log()
    else:
        log_p, log_q, log_m = ((x + 1e-9).log() for x in (p, q, (p + q) / 2))
        terms = (q * (log_q - log_m) + p * (log_p - log_m)) / 2
    return terms.masked_fill(excluded, 0.0).sum(-1)


def soft_cross_entropy(student, teacher):
    """SkyRL's draft loss."""
    return -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1)


def draft_weights(mask, factor=None):
    """The masked mean of SkyRL, whose denominator is at least 1."""
    mask = mask.double()
    return mask / max(1.0, mask.sum().item() if factor is None else float(factor))


def truncated(log_x, log_y):
    """The sum of x log(x / y) over K token ids: verl."""
    return (log_x.exp() * (log_x - log_y)).sum(-1)


def verl_topk(logits, teacher_logprobs, ids, clamp=None):
    """``compute_forward_kl_topk``: neither log-prob is below ``clamp``."""
    student = logits.log_softmax(-1).gather(-1, ids)
    if clamp is not None:
        student, teacher_logprobs = student.clamp_min(clamp), teacher_logprobs.clamp_min(clamp)
    return truncated(teacher_logprobs, student)
