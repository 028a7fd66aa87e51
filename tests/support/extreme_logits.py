"""Rows of logits whose greatest is up to the largest number, and comparisons of any rows.

The truth is the reference's in float64. ``test_logits_oracle`` compares the reference with mpmath.
"""

import math

import oracle
import torch
from agreement_logits import leaves
from eager_divergences import EAGER

import klfast

EXTREME = (1e10, 1e14, 1e17, 1e20, 1e30, math.inf)
"""Heights of a row's greatest logits, in either sign, of dtypes that have them; infinity stands for
the largest number."""

PEAKS = (0, 10, 20, 30, 41, 50, 60, 70, 90, 100, 126, 300, 1000)
"""How far a row's greatest logits lie above the others, in nats. The terms of a row's sums end at
2**126 on some processors, which is 87 nats. A sum is useless beyond 69 nats."""


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


def rows_with_peaks(words, dtype, lowest=-math.inf, heights=PEAKS):
    """Random rows (logits, ref_logits) [N, V] whose peaks a guess from the first entries may miss.

    There is a row for each two ``heights``. Each model has 1 to 300 peaks, most of them behind two
    thirds of the row. Some rows are filtered: one model keeps its 50 most likely entries, and the
    others are at a filler, which is not below ``lowest``.
    """
    heights = torch.cartesian_prod(*2 * [torch.tensor(heights, dtype=torch.float64)])
    count, behind = len(heights), torch.arange(words) >= words * 2 // 3

    def drawn(*choices):
        return torch.tensor(choices, dtype=torch.float64)[torch.randint(len(choices), (count, 1))]

    models = []
    some = drawn(0, 0, 2, 2, 60, 180) * torch.randn(count, words, dtype=torch.float64)
    apart = drawn(0, 0, 0.3, 0.3, 60)
    for height, share in zip(heights.T, (1, drawn(0, 1)), strict=True):
        own = share * some + apart * torch.randn(count, words, dtype=torch.float64)
        order = torch.rand(count, words) + (behind != drawn(0, 1, 1, 1))
        is_peak = order.argsort(-1).argsort(-1) < drawn(1, 2, 50, 300)
        models.append(own + torch.where(is_peak, height[:, None], 0.0))
    filtered, filler = drawn(0, 1, 2), drawn(-1e4, -1e9, -largest_of(dtype), -math.inf)
    filler = filler.clamp(min=-largest_of(dtype)).where(filler.isfinite(), lowest)
    for i, own in enumerate(models):
        is_kept = own >= own.topk(50).values[:, -1:]
        models[i] = own.where(is_kept | (filtered != i), filler).to(dtype)
    return models


def distribution(logits, temperature):
    """(log p, p, the relative error of each p that is allowed, a rounding), in float64.

    A p below the smallest number of fp32 may be missing. Both the kernel and the truth round a
    log-sum-exp in float64, and its size is at most 1,024.
    """
    unit = 2.0**-47 if logits.dtype == torch.float64 else 2.0**-24
    largest = logits.double().amax(-1, keepdim=True)
    shifted = logits.double() - largest
    log_p = (shifted / temperature).log_softmax(-1)
    p = log_p.exp()
    of_lse = 2.0**-52 * (largest.abs() / temperature).clamp(max=1024)
    off = torch.where(p < 1e-36, 1.0, unit * (16 + 3 * (-log_p).clamp(max=200)) + of_lse)
    return log_p, p, off, unit


def allowed_of_divergence(logits, ref_logits, direction, temperature):
    """(the value of log-ratios that are held at the largest number of the arithmetic, whether that
    changes it, the errors allowed of the value and of both gradients).
    """
    order = -1 if "forward" in direction else 1
    models = [distribution(t, temperature) for t in (logits, ref_logits)]
    (log_p, p, off_p, unit), (log_q, q, off_q, _) = models[::order]
    of_both = p * off_p + q * off_q
    if direction not in ("reverse", "forward"):
        mixed = torch.where(p + q == 0, 0.0, of_both / (p + q))
        of_value = of_both.sum(-1, keepdim=True) + 32 * unit
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        if EAGER[direction].jumps:  # the sign of a small log-ratio is open
            is_open = ~((log_p - log_q).abs() > off_p + off_q)
            mixed = mixed + is_open.double()
            of_value = of_value + (is_open * (p + q)).sum(-1, keepdim=True)
            log_m = torch.maximum(log_p, log_q)
        ratios = [torch.where(own == 0, 0.0, log_own - log_m) for log_own, own, *_ in models]
        # The slopes of a skewed KL in q are up to p / q.
        others = (0, p * (off_p.clamp(max=1) + mixed) if "skew" in direction else 0)
        of_grads = [
            own * ((off.clamp(max=1) + mixed) * (1 + ratio.abs()) + 2 * of_value) + other
            for (_, own, off, _), ratio, other in zip(
                models[::order], ratios[::order], others, strict=True
            )
        ][::order]
        held, is_held = torch.zeros_like(of_value), torch.zeros(len(p), dtype=torch.bool)
    else:
        largest = torch.finfo(oracle.arithmetic_dtype(logits, ref_logits)).max
        u = torch.where(p == 0, 0.0, log_p - log_q)
        held = (p * u.clamp(-largest, largest)).sum(-1, keepdim=True)
        is_held = ((p > 1e-36) & (u >= largest)).any(-1)
        of_p = torch.where(p == 0, 0.0, p * off_p * (1 + u.abs()))
        of_value = (of_p + q * off_q).sum(-1, keepdim=True) + 32 * unit
        # A likely entry's gradient is minus the sum of all others, with their errors.
        of_first = of_p + torch.where(p > 0.5, 1.0, p) * (off_p * held.abs() + of_value)
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


def of_shards(of_value, of_grads):
    """The errors allowed over shards, whose weights have the error of the row's greatest entry."""
    return of_value, [of + of.amax(-1, keepdim=True) for of in of_grads]


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


def from_hidden(logits, ref_logits, **options):
    """``kl_divergence`` by way of hidden states that choose a column of the head."""
    hidden, ref_hidden = (torch.eye(len(t), dtype=t.dtype) for t in (logits, ref_logits))
    return klfast.linear_kl_divergence(hidden, logits.T, ref_hidden, ref_logits.T, **options)


def assert_divergence(
    backend, logits, ref_logits, direction, temperature=1.0, function=None, shards=False
):
    """Values, bounds, tokens' log-probs, the policy's entropies and both gradients, of rows [N, V].

    ``function`` computes them. It is ``klfast.kl_divergence`` unless given. ``shards``
    says that it cuts the vocabulary.
    """
    function = function or klfast.kl_divergence
    inputs, wide = leaves(logits, ref_logits), leaves(logits.double(), ref_logits.double())
    ids = logits.argmin(-1).where(torch.arange(len(logits)) % 2 == 0, ref_logits.argmax(-1))
    options = {"direction": direction, "temperature": temperature}
    found = function(*inputs, token_ids=ids, backend=backend, **options)
    truth = klfast.kl_divergence(
        *wide, token_ids=ids, return_entropy=True, backend="reference", **options
    )
    held, is_held, *allowed = allowed_of_divergence(logits, ref_logits, direction, temperature)
    if shards:
        allowed = of_shards(*allowed)
    value, exact = found.kl.detach(), truth.kl.detach()
    most = EAGER[direction].most * (1 + 2.0**-47)  # the reference rounds each log-prob in float64
    assert ((value >= 0) & (value <= torch.tensor(most, dtype=value.dtype))).all()
    assert ((value >= held * (1 - 1e-5)) | value.isinf())[is_held & exact.isfinite()].all()
    rows = ~is_held | exact.isinf()
    assert_output(found.kl, truth.kl, inputs, wide, allowed, rows, direction)
    rows &= exact < torch.finfo(value.dtype).max / 4
    models = inputs[0][rows], ref_logits[rows]
    one_read = function(*models, reduction="token-sum", backend=backend, **options)
    (grad,) = torch.autograd.grad(one_read, inputs[0])
    (exact,) = torch.autograd.grad(truth.kl, wide[0], rows.double(), retain_graph=True)
    oracle.assert_within(grad[rows], exact[rows], allowed[1][0][rows], "gradient of one read")
    every = torch.ones(len(logits), dtype=torch.bool)
    for i, model in enumerate((logits, ref_logits)):
        allowed = allowed_of_tokens(model, ids, temperature)[0]
        allowed = of_shards(*allowed) if shards else allowed
        of_model = found[1 + i], truth[1 + i], inputs[i], wide[i]
        assert_output(*of_model, allowed, every, "log-probs")
    with_entropy = function(*inputs, return_entropy=True, backend=backend, **options)
    allowed = allowed_of_tokens(logits, ids, temperature)[1]
    allowed = of_shards(*allowed) if shards else allowed
    entropies = with_entropy.entropy, truth.entropy, inputs[0], wide[0]
    assert_output(*entropies, allowed, rows, "entropy")


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
