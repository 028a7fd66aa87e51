"""Rows of logits whose greatest is up to the largest number, and comparisons of any rows.

The truth is the reference's in float64. ``test_logits_extreme`` compares the reference with mpmath.
"""

import math

import oracle
import torch
from agreement_logits import leaves

import klfast

EXTREME = (1e10, 1e14, 1e17, 1e20, 1e30, math.inf)
"""Heights of a row's greatest logits, in either sign, of dtypes that have them; infinity stands for
the largest number."""


def heights(dtype):
    """``EXTREME`` in a dtype, in both signs."""
    largest = largest_of(dtype)
    found = sorted({min(height, largest) for height in EXTREME})
    return [sign * height for height in found for sign in (1, -1)]


def largest_of(dtype):
    """In fp64 less than there is: the truth takes differences of two in it."""
    return torch.finfo(dtype).max / (4 if dtype == torch.float64 else 1)


def rows_at(height, words, dtype):
    """Rows [K, V] whose greatest logits are about ``height``."""
    largest, eps = largest_of(dtype), torch.finfo(dtype).eps
    place = torch.arange(words)
    some = 2 * torch.randn(words, dtype=torch.float64)
    level = torch.full((words,), height, dtype=torch.float64)
    lower = torch.full((words,), max(-2 * abs(height), -largest), dtype=torch.float64)
    last = place == words - 1
    grid = (1 - math.copysign(eps, height) * (place % 3)).double()
    rows = [
        level,
        torch.where(last | (place == 1), level, lower),
        torch.where(place % 3 == 1, level, -largest),
        torch.where(place % 3 == 2, level, -math.inf),
        level * grid,
    ]
    if height > 0:  # ordinary words besides
        rows += [torch.where(last, level, some), torch.where(place == 0, level, some)]
        rows += [torch.where(place % 4 == 0, level, torch.where(last, -math.inf, some))]
    return torch.stack(rows).clamp(-math.inf, largest).to(dtype)


def ordinary_rows(words, dtype):
    """Rows [K, V] that a kernel takes as they are."""
    some = 2 * torch.randn(3, words, dtype=torch.float64)
    some[1, ::3] = -largest_of(dtype)
    some[2, 1::2] = -math.inf
    return some.to(dtype)


def pairs(words, dtype):
    """(logits, ref_logits) [N, V]: extreme rows beside ordinary ones, each other and themselves."""
    plain = ordinary_rows(words, dtype)
    first, second = [], []
    for height in heights(dtype):
        own = rows_at(height, words, dtype)
        others = [plain, own, -own.clamp(min=-largest_of(dtype)), own.flip(0), 2e4 + plain]
        for other in others:
            rows = own.repeat(len(other), 1), other.repeat_interleave(len(own), 0)
            if len(other) == len(own):
                rows = own, other
            first += [*rows]
            second += [*rows[::-1]]
    return torch.cat(first), torch.cat(second)


def distribution(logits, temperature):
    """(log p, p, the relative error of each p that is allowed, a rounding), in float64.

    A p below the smallest number of fp32 may be missing.
    """
    unit = 2.0**-47 if logits.dtype == torch.float64 else 2.0**-24
    shifted = logits.double() - logits.double().amax(-1, keepdim=True)
    log_p = (shifted / temperature).log_softmax(-1)
    p = log_p.exp()
    off = torch.where(p < 1e-36, 1.0, unit * (16 + 3 * (-log_p).clamp(max=200)))
    return log_p, p, off, unit


def allowed_of_divergence(logits, ref_logits, direction, temperature):
    """(the value of log-ratios that are held at the largest number of the arithmetic, whether that
    changes it, the errors allowed of the value and of both gradients).
    """
    order = -1 if direction == "forward" else 1
    models = [distribution(t, temperature) for t in (logits, ref_logits)]
    (log_p, p, off_p, unit), (log_q, q, off_q, _) = models[::order]
    of_both = p * off_p + q * off_q
    if direction == "jsd":
        mixed = torch.where(p + q == 0, 0.0, of_both / (p + q))
        of_value = of_both.sum(-1, keepdim=True) + 32 * unit
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        ratios = [torch.where(own == 0, 0.0, log_own - log_m) for log_own, own, *_ in models]
        of_grads = [
            own * ((off.clamp(max=1) + mixed) * (1 + ratio.abs()) + 2 * of_value)
            for (_, own, off, _), ratio in zip(models, ratios, strict=True)
        ]
        held, is_held = torch.zeros_like(of_value), torch.zeros(len(p), dtype=torch.bool)
    else:
        largest = torch.finfo(oracle.arithmetic_dtype(logits, ref_logits)).max
        u = torch.where(p == 0, 0.0, log_p - log_q)
        held = (p * u.clamp(-largest, largest)).sum(-1, keepdim=True)
        is_held = ((p > 1e-36) & (u > largest)).any(-1)
        of_p = torch.where(p == 0, 0.0, p * off_p * (1 + u.abs()))
        of_value = (of_p + q * off_q).sum(-1, keepdim=True) + 32 * unit
        of_first = of_p + p * (off_p * held.abs() + of_value)
        of_grads = [of_first, of_both + 4 * unit * (p + q)][::order]
    of_value = of_value.nan_to_num(posinf=0)  # an infinite value is not near it
    return held[:, 0], is_held, of_value[:, 0], [of / temperature for of in of_grads]


def allowed_of_tokens(logits, token_ids, temperature):
    """The errors allowed of (log-probs, their gradient), and of (entropies, their gradient)."""
    log_p, p, off, unit = distribution(logits, temperature)
    one = torch.nn.functional.one_hot(token_ids, logits.shape[-1])
    of_words = 2 * p * off * (1 - torch.where(p == 0, 0.0, log_p))
    of_entropy = of_words.sum(-1, keepdim=True) + 16 * unit
    taken = log_p.gather(-1, token_ids[:, None])[:, 0]
    of_logprob = unit * (16 + 4 * taken.abs().nan_to_num(posinf=0)) + (p * off).sum(-1)
    of_grad = (p * off + 16 * unit * one) / temperature
    of_entropy_grad = (of_words + p * of_entropy) / temperature
    return (of_logprob, [of_grad]), (of_entropy[:, 0], [of_entropy_grad])


def assert_output(found, truth, inputs, wide, allowed, rows, what):
    """An output and its gradients are the truth's, within (error of the output, of each gradient).

    ``wide`` are the inputs of the truth. ``rows`` count.
    """
    of_value, of_grads = allowed
    oracle.assert_within(found[rows], truth[rows].detach(), of_value[rows], what)
    rows = rows & (truth.detach().abs() < torch.finfo(found.dtype).max / 4)
    grads = torch.autograd.grad(found, inputs, rows.to(found.dtype), retain_graph=True)
    exact = torch.autograd.grad(truth, wide, rows.to(truth.dtype), retain_graph=True)
    for grad, of, off in zip(grads, exact, of_grads, strict=True):
        oracle.assert_within(grad[rows], of[rows], off[rows], f"gradient of {what}")


def assert_divergence(backend, logits, ref_logits, direction, temperature=1.0):
    """Values, bounds, tokens' log-probs and both gradients, of rows [N, V]."""
    inputs, wide = leaves(logits, ref_logits), leaves(logits.double(), ref_logits.double())
    ids = logits.argmin(-1).where(torch.arange(len(logits)) % 2 == 0, ref_logits.argmax(-1))
    options = {"direction": direction, "temperature": temperature}
    found = klfast.kl_divergence(*inputs, token_ids=ids, backend=backend, **options)
    truth = klfast.kl_divergence(*wide, token_ids=ids, backend="reference", **options)
    held, is_held, *allowed = allowed_of_divergence(logits, ref_logits, direction, temperature)
    value, exact = found.kl.detach(), truth.kl.detach()
    most = math.log(2) + 1e-15 if direction == "jsd" else math.inf
    assert ((value >= -1e-15) & (value <= torch.tensor(most, dtype=value.dtype))).all()
    assert ((value >= held * (1 - 1e-5)) | value.isinf())[is_held & exact.isfinite()].all()
    rows = ~is_held | exact.isinf()
    assert_output(found.kl, truth.kl, inputs, wide, allowed, rows, direction)
    rows &= exact < torch.finfo(value.dtype).max / 4
    models = inputs[0][rows], ref_logits[rows]
    one_read = klfast.kl_divergence(*models, reduction="token-sum", backend=backend, **options)
    (grad,) = torch.autograd.grad(one_read, inputs[0])
    (exact,) = torch.autograd.grad(truth.kl, wide[0], rows.double(), retain_graph=True)
    oracle.assert_within(grad[rows], exact[rows], allowed[1][0][rows], "gradient of one read")
    every = torch.ones(len(logits), dtype=torch.bool)
    for i, model in enumerate((logits, ref_logits)):
        allowed = allowed_of_tokens(model, ids, temperature)[0]
        of_model = found[1 + i], truth[1 + i], inputs[i], wide[i]
        assert_output(*of_model, allowed, every, "log-probs")


def assert_tokens(backend, logits, token_ids, temperature=1.0):
    """Log-probs, entropies and the gradients of both."""
    (leaf,), (wide,) = leaves(logits), leaves(logits.double())
    options = {"temperature": temperature, "return_entropy": True}
    found = klfast.token_logprobs(leaf, token_ids, backend=backend, **options)
    truth = klfast.token_logprobs(wide, token_ids, backend="reference", **options)
    every = torch.ones(len(logits), dtype=torch.bool)
    allowed = allowed_of_tokens(logits, token_ids, temperature)
    for name, own, exact, of in zip(found._fields, found, truth, allowed, strict=True):
        assert_output(own, exact, leaf, wide, of, every, name)
