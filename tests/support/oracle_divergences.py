"""The truth about rows of logits: divergences, log-probs, entropies and gradients, in float64.

Textbook formulas cancel: of KL = 5e-7 float64 keeps nine digits, of its gradient fewer. Here a
divergence is a sum of terms that are never negative, over u = log q - log p. As p and q add up to
1, with m = (1 - b) p + b q,

    KL(p || q) = sum p (e^u - 1 - u),
    JSD = sum (1 - b) (p log(p/m) - p + m) + b (q log(q/m) - q + m).

``test_logits_oracle`` holds this to the textbook in mpmath. Nothing here is shared with klfast.

Tolerances come with the truth: to first order what rounding in the arithmetic's dtype may do to
each word, and the promise of 2e-6, of a divergence and of the mean abs(u) in each u. Shapes: R rows
of V words; [R, 1] of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import oracle
import torch
from torch import Tensor

PROMISE = 2e-6
"""Relative error of a sum over the vocabulary in fp32."""


def promise(dtype):
    return PROMISE * oracle.unit_roundoff(dtype) / oracle.unit_roundoff(torch.float32)


def total(terms):
    return terms.sum(-1, keepdim=True)


def finite(values):
    """What is not finite as 0: a distance or an error that does not count."""
    return torch.where(values.isfinite(), values, 0.0)


def exp_minus_1_minus(u):
    """e^u - 1 - u for u <= 1."""
    series = 1 + u / 3 * (1 + u / 4 * (1 + u / 5 * (1 + u / 6 * (1 + u / 7))))
    return torch.where(u.abs() < 0.01, u * u / 2 * series, torch.expm1(u) - u)


def bregman(a, m, log_ratio):
    """The terms a log(a/m) - a + m, with log_ratio = log(m/a)."""
    near = a * exp_minus_1_minus(log_ratio.clamp(max=1))
    far = m - a * (1 + log_ratio)
    return torch.where(a == 0, m, torch.where(log_ratio > 1, far, near))


def log_mixture(u, b):
    """log(1 - b + b e^u)."""
    far = u + torch.log(b + (1 - b) * torch.exp(-u.clamp(min=1)))
    return torch.where(u > 1, far, torch.log1p(b * torch.expm1(u.clamp(max=1))))


class Words:
    """A model's words."""

    def __init__(self, logits, temperature, dtype):
        self.scaled = logits.double().reshape(-1, logits.shape[-1]) / temperature
        largest, at = self.scaled.max(-1, keepdim=True)
        shifted = self.scaled - largest
        log_sum = torch.log1p(total(shifted.exp().scatter(-1, at, 0.0)))
        self.lse = largest + log_sum
        self.logprobs = shifted - log_sum
        self.p = self.logprobs.exp()
        self.unit = oracle.unit_roundoff(dtype)
        # What float64 takes from textbook formulas: from the reference, and from this in fp64.
        largest = finite(self.scaled).abs().amax(-1, keepdim=True)
        self.textbook = 16 * oracle.unit_roundoff(torch.float64) * (largest + 1)
        # A shifted logit was rounded thrice before its exp; the sum has the mean of that error.
        distance = finite(shifted).abs()
        self.distance = distance + total(self.p * distance)
        self.relative = self.unit * (3 * self.distance + 16) + self.textbook
        """Error of p."""


class Pair:
    """Two models' words, and u = log q - log p to all its digits."""

    def __init__(self, first, second, temperature, dtype):
        self.first = Words(first, temperature, dtype)
        self.second = Words(second, temperature, dtype)
        self.p, self.q = self.first.p, self.second.p
        x, y = self.first.scaled, self.second.scaled
        nobody = (x == -torch.inf) & (y == -torch.inf)
        apart = (second.double() - first.double()).reshape(self.p.shape) / temperature
        rough = self.second.lse - self.first.lse
        self.u = torch.where(nobody, 0.0, apart - rough)
        self.u = torch.where(nobody, 0.0, self.u - torch.log1p(total(self.change)))
        self.unit = oracle.unit_roundoff(dtype)
        self.promise = promise(dtype)
        self.u_error = 4 * self.unit * finite(apart.abs() + rough.abs() + self.u.abs())
        self.u_error += self.promise * total(self.change.abs())  # of what is taken off each
        self.excluded = ((x > -torch.inf) & (y == -torch.inf)).any(-1, keepdim=True)
        self.textbook = torch.maximum(self.first.textbook, self.second.textbook)
        for words in (self.first, self.second):  # either may be normalised by way of the other
            words.relative = words.relative + self.textbook

    @property
    def change(self):
        """Of a probability: q - p."""
        near = torch.where(self.p == 0, 0.0, self.p * torch.expm1(self.u.clamp(max=1)))
        return torch.where(self.u > 1, self.q - self.p, near)

    @property
    def change_error(self):
        p, q, e_p, e_q = self.p, self.q, self.first.relative, self.second.relative
        near = e_p * self.change.abs() + (p + q) * (self.u_error + self.textbook)
        return torch.where(self.u > 1, e_p * p + e_q * q, near)


class Divergence(NamedTuple):
    """Of rows, with the gradients of each row's own and how far a backend may be off."""

    value: Tensor  # [R]
    value_tolerance: Tensor
    grad_first: Tensor  # [R, V]
    grad_first_tolerance: Tensor
    grad_second: Tensor
    grad_second_tolerance: Tensor


def divergence(pair, kind, beta, temperature):
    """A pair's ``kl`` or ``jsd``."""
    if kind == "kl":
        value, grads = kl(pair), kl_gradients(pair)
    else:
        value, grads = jsd(pair, beta), jsd_gradients(pair, beta)
    return Divergence(*(t[:, 0] for t in value), *(grad / temperature for grad in grads))


def kl(pair):
    """KL(p || q), and its tolerance; [R, 1]."""
    p, q, u, e_p, e_q = pair.p, pair.q, pair.u, pair.first.relative, pair.second.relative
    terms = bregman(p, q, u)
    value = torch.where(pair.excluded, torch.inf, total(terms))
    near = e_p * terms + finite(pair.change.abs() * pair.u_error)
    far = e_q * q + p * ((1 + finite(u)) * e_p + pair.u_error)
    tolerance = total(finite(torch.where(u > 1, far, near)))
    return value, tolerance + pair.promise * finite(value) + pair.textbook


def kl_gradients(pair):
    """(to the first, its tolerance, to the second, its tolerance)."""
    value, tolerance = kl(pair)
    centered = torch.where(pair.p == 0, 0.0, -pair.u - value)
    off = pair.first.relative * finite(centered).abs() + pair.u_error + tolerance + pair.textbook
    return pair.p * centered, pair.p * off, pair.change, pair.change_error


def mixture(pair, b):
    """Of the models, m = (1 - b) p + b q; log(m/p) and log(m/q)."""
    m = (1 - b) * pair.p + b * pair.q
    return m, log_mixture(pair.u, b), log_mixture(-pair.u, 1 - b)


def jsd(pair, b):
    """(1 - b) KL(p || m) + b KL(q || m), and its tolerance; [R, 1]."""
    m, log_m_p, log_m_q = mixture(pair, b)
    terms = (1 - b) * bregman(pair.p, m, log_m_p) + b * bregman(pair.q, m, log_m_q)
    value = total(terms)
    relative = pair.first.relative + pair.second.relative
    through_u = b * pair.q * finite(log_m_q).abs() * pair.u_error
    tolerance = total(relative * terms + through_u)
    return value, tolerance + pair.promise * value + pair.textbook


def jsd_gradients(pair, b):
    """(to the first, its tolerance, to the second, its tolerance)."""
    m, log_m_p, log_m_q = mixture(pair, b)
    _, tolerance = jsd(pair, b)
    relative = pair.first.relative + pair.second.relative

    def gradient(own, weight, other, log_m_own):
        """The weight of own times its log(own/m), centered; and how far it may be off."""
        log_ratio = torch.where(own == 0, 0.0, -log_m_own)
        in_m = torch.where(m == 0, 0.0, (1 - weight) * other / m)
        off = in_m * pair.u_error + 8 * pair.unit * log_ratio.abs() + pair.textbook
        off_mean = total(own * (off + relative * log_ratio.abs())) + tolerance / weight
        centered = log_ratio - total(own * log_ratio)
        off = relative * centered.abs() + off + off_mean
        return weight * own * centered, weight * own * off

    return *gradient(pair.p, 1 - b, pair.q, log_m_p), *gradient(pair.q, b, pair.p, log_m_q)


class Tokens(NamedTuple):
    """Log-probs of tokens, and entropies, [R], with the gradients of each row's own, [R, V]."""

    logprobs: Tensor
    logprobs_tolerance: Tensor
    grad: Tensor
    grad_tolerance: Tensor
    entropy: Tensor
    entropy_tolerance: Tensor
    entropy_grad: Tensor
    entropy_grad_tolerance: Tensor


def tokens(words, token_ids, temperature):
    """Of a model's words; token_ids [R]."""
    p, relative = words.p, words.relative
    ids = token_ids[:, None]
    taken = torch.zeros_like(p).scatter_(-1, ids, 1.0)
    # An absolute error: in fp32 log(1 + small) has no more digits than 1.
    off = words.unit * (3 * words.distance + 3 * finite(words.logprobs).abs() + 8)
    off += words.textbook
    logprobs = finite(words.logprobs)
    entropy = -total(p * logprobs)
    entropy_off = total(p * (off + relative * logprobs.abs()))
    centered = logprobs + entropy
    grad_off = p * relative + 2 * words.unit * taken
    entropy_grad_off = p * (relative * centered.abs() + off + entropy_off)
    return Tokens(
        words.logprobs.gather(-1, ids)[:, 0],
        off.gather(-1, ids)[:, 0],
        (taken - p) / temperature,
        grad_off / temperature,
        entropy[:, 0],
        entropy_off[:, 0],
        -p * centered / temperature,
        entropy_grad_off / temperature,
    )
