"""The truth about calls from hidden states: the textbook's logits, log-softmax and sums.

Nothing here is shared with klfast. The same statement in the arithmetic's dtype is what eager
PyTorch makes of it: a backend may be off by twice as much as that is, and the rounding of results.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MODELS = (("hidden", "weight", "bias"), ("ref_hidden", "ref_weight", "ref_bias"))


@dataclass
class Call:
    """A call of either function: tensors by argument, the other options, and the leaves."""

    tensors: dict[str, Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)
    leaves: tuple[str, ...] = ("hidden",)
    mask: Tensor | None = None
    token_ids: Tensor | None = None

    @property
    def shape(self):
        return self.tensors["hidden"].shape[:-1]

    @property
    def has_reference(self):
        return "ref_hidden" in self.tensors

    def given(self):
        """The arguments, the leaves among them requiring gradients."""
        of = self.tensors.items()
        return {n: None if t is None else t.clone().requires_grad_(n in self.leaves) for n, t in of}


def arithmetic(call):
    wide = any(t is not None and t.dtype == torch.float64 for t in call.tensors.values())
    return torch.float64 if wide else torch.float32


def outputs(call, tensors, dtype):
    """What is asked for, by name, in a dtype; differentiable."""
    options = call.options
    keep = torch.ones(call.shape, dtype=torch.bool) if call.mask is None else call.mask != 0
    logprobs = [
        _log_softmax(tensors, names, model, call, keep, dtype)
        for model, names in enumerate(MODELS[: 2 if call.has_reference else 1])
    ]
    found = {}
    if call.has_reference:
        rows = torch.where(keep, _divergence(*logprobs, options), 0.0)
        found["kl"] = options.get("coef", 1.0) * _reduced(call, rows)
    if call.token_ids is not None:
        has_k = call.token_ids.dim() > len(call.shape)
        kept = keep[..., None] if has_k else keep
        ids = torch.where(kept, call.token_ids, 0)
        for name, own in zip(("logprobs", "ref_logprobs"), logprobs, strict=False):
            taken = own.gather(-1, ids if has_k else ids[..., None]).view(ids.shape)
            found[name] = torch.where(kept, taken, 0.0)
    if options.get("return_entropy"):
        p = logprobs[0]
        found["entropy"] = torch.where(keep, -(p.exp() * p).sum(-1), 0.0)
    return found


def _log_softmax(tensors, names, model, call, keep, dtype):
    hidden, weight, bias = (tensors.get(name) for name in names)
    if weight is None:  # the policy's head, without its graph
        weight = tensors["weight"].detach()
        policys = tensors.get("bias")
        bias = bias if bias is not None or policys is None else policys.detach()
    rows = torch.where(keep[..., None], hidden.to(dtype), 0.0)
    logits = rows @ weight.to(dtype).t()
    if bias is not None:
        logits = logits + bias.to(dtype)
    cap = call.options.get("softcap")
    cap = cap[model] if isinstance(cap, tuple) else cap
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    temperature = call.options.get("temperature", 1.0)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)
        temperature = temperature.reshape(
            *temperature.shape, *(1,) * (logits.dim() - temperature.dim())
        )
    return (logits / temperature).log_softmax(-1)


def _divergence(p, q, options):
    direction, b = options.get("direction", "reverse"), options.get("jsd_beta", 0.5)
    if direction == "reverse":
        return (p.exp() * (p - q)).sum(-1)
    if direction == "forward":
        return (q.exp() * (q - p)).sum(-1)
    m = torch.log((1 - b) * p.exp() + b * q.exp())
    return ((1 - b) * p.exp() * (p - m) + b * q.exp() * (q - m)).sum(-1)


def _sequences(call):
    """The weighted tokens of each sequence, as lists of flat positions."""
    edges = call.options.get("cu_seqlens")
    tokens = range(call.shape.numel())
    if edges is not None:
        return [tokens[a:b] for a, b in itertools.pairwise(edges.tolist())]
    if len(call.shape) == 1:
        return [tokens]
    return [tokens[i * call.shape[1] : (i + 1) * call.shape[1]] for i in range(call.shape[0])]


def _reduced(call, rows):
    reduction = call.options.get("reduction", "none")
    weights = torch.ones(call.shape) if call.mask is None else call.mask
    weights = weights.to(rows.dtype)
    if reduction == "none":
        return weights * rows
    weights, rows = weights.flatten(), rows.flatten()
    sums, lengths = [], []
    for tokens in _sequences(call):
        own = torch.tensor([*tokens], dtype=torch.int64)
        sums.append((weights[own] * rows[own]).sum())
        lengths.append(weights[own].sum())
    sums, lengths = torch.stack(sums), torch.stack(lengths)
    means = torch.where(lengths > 0, sums / torch.where(lengths > 0, lengths, 1.0), 0.0)
    if reduction in ("seq-sum", "seq-mean"):
        return sums if reduction == "seq-sum" else means
    total = means.sum() if reduction == "seq-mean-token-mean" else sums.sum()
    if reduction == "token-sum":
        return total
    count = lengths.sum() if reduction == "token-mean" else (lengths > 0).sum().to(rows.dtype)
    normalizer = call.options.get("normalizer")
    return total / (torch.where(count > 0, count, 1.0) if normalizer is None else normalizer)


def upstream(found):
    """A gradient for each output that has one, uneven, the same for every statement."""
    return {
        name: torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).view(t.shape).to(t.dtype)
        for name, t in found.items()
        if t.requires_grad
    }


def gradients(call, tensors, found):
    """Those of the leaves, by name."""
    names = [name for name in call.leaves if tensors.get(name) is not None]
    sent = upstream(found)
    if not sent or not names:
        return {}
    grads = torch.autograd.grad(
        [found[name] for name in sent],
        [tensors[name] for name in names],
        [*sent.values()],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(names, grads, strict=True))


def truth(call, dtype):
    """Outputs and gradients by the textbook in a dtype, as float64."""
    wide = {n: None if t is None else t.to(dtype) for n, t in call.tensors.items()}
    keep = None if call.mask is None else (call.mask != 0)[..., None]
    for name in ("hidden", "ref_hidden"):
        if keep is not None and wide.get(name) is not None:
            wide[name] = torch.where(keep, wide[name], 0.0)
    leaves = {n: None if t is None else t.requires_grad_(n in call.leaves) for n, t in wide.items()}
    found = outputs(call, leaves, dtype)
    grads = gradients(call, leaves, found)
    return {
        name: t.detach().double()
        for name, t in (found | {f"d {n}": g for n, g in grads.items()}).items()
    }


def assert_agrees(call, found, grads):
    """Outputs and gradients are the truth's, as nearly as twice eager PyTorch's error."""
    exact, own = truth(call, torch.float64), arithmetic(call)
    eager = truth(call, own)
    got = found | {f"d {name}": grad for name, grad in grads.items()}
    assert got.keys() == exact.keys()
    for name, value in got.items():
        wanted = exact[name]
        assert value.shape == wanted.shape, name
        dtype = call.tensors[name[2:]].dtype if name.startswith("d ") else own
        assert value.dtype == dtype, name
        if not wanted.numel():
            continue
        largest = wanted.abs().max()
        limit = 2 * (eager[name] - wanted).abs().max() + 256 * torch.finfo(own).eps * largest
        limit = limit + 2 * torch.finfo(dtype).eps * wanted.abs()
        limit = limit + 64 * torch.finfo(torch.float64).eps  # of the textbook, which cancels
        off = (value.detach().double() - wanted).abs()
        assert (off <= limit).all(), (name, (off / limit).max().item(), off.max().item())
