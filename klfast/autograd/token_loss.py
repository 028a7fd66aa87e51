"""A caller's loss per token: its call on a chunk's log-probs, its checks, and its derivative."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from klfast.args.checks import shape_text
from klfast.args.rows import RowsArgs
from klfast.args.values import are_tracing, can_be_read
from klfast.autograd import context
from klfast.autograd.chunks import Chunk

_REMEDY = "apply the loss to the log-probs of klfast.linear_token_logprobs"


class Losses(NamedTuple):
    """The losses of a chunk's tokens."""

    values: Tensor  # [n], 0 where masked
    gradient: Tensor | None = None
    """[n], of sum(weights * values) to the log-probs; None without weights."""


def loss_of(
    args: RowsArgs, chunk: Chunk, logprobs: Tensor, weights: Tensor | None = None
) -> Losses:
    """The caller's losses of a chunk's tokens, from the log-probs of all tokens, [R]. With
    ``weights``, [n], also their derivative.
    """
    # A copy, because a loss may change its argument in place.
    own = chunk.of(logprobs).clone()
    if weights is None:
        return Losses(_values(args, chunk, own))
    leaf = own.detach().requires_grad_()
    with torch.enable_grad(), _kept_as_they_are():
        values = _values(args, chunk, leaf)
        if not values.requires_grad:
            return Losses(values, torch.zeros_like(leaf))
        (gradient,) = torch.autograd.grad(values, leaf, weights)
    return Losses(values.detach(), gradient)


def _kept_as_they_are() -> AbstractContextManager[Any]:
    """No hooks of a caller over saved tensors. A checkpoint's hooks would run the forward again."""
    if not context.are_packed():
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _values(args: RowsArgs, chunk: Chunk, logprobs: Tensor) -> Tensor:
    """The checked losses [n] of log-probs [n]."""
    assert args.loss is not None
    function, inputs, is_autocast = args.loss
    with torch.autocast(logprobs.device.type) if is_autocast else nullcontext():
        found: Any = function(logprobs, *(chunk.of(each) for each in inputs))
    if not isinstance(found, Tensor):
        raise TypeError(f"loss must return a torch.Tensor, got {type(found).__name__}")
    if not found.is_floating_point():
        raise TypeError(f"loss must return a floating dtype, got {found.dtype}")
    if found.shape != logprobs.shape or found.device != logprobs.device:
        raise ValueError(
            f"loss must return one loss per token, {shape_text(logprobs)} on {logprobs.device}, "
            f"got {shape_text(found)} on {found.device}: leave means to reduction="
        )
    _check_graph(found, logprobs)
    values = found.to(logprobs.dtype)
    if chunk.keep is not None:
        values = torch.where(chunk.keep, values, 0.0)
    _check_numbers(args, chunk, values.detach(), logprobs.detach())
    return values


def _check_graph(found: Tensor, logprobs: Tensor) -> None:
    """Raise if losses depend on another leaf of a graph than the log-probs."""
    if not found.requires_grad or are_tracing():
        return
    seen = {get_gradient_edge(logprobs).node} if logprobs.requires_grad else set()
    nodes = [get_gradient_edge(found).node]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        if hasattr(node, "variable"):
            raise ValueError(
                "loss must not depend on a tensor that requires a gradient, besides its log-probs, "
                f"got one of shape {shape_text(node.variable)}: detach it, or {_REMEDY}"
            )
        seen.add(node)
        nodes += [below for below, _ in node.next_functions]


def _check_numbers(args: RowsArgs, chunk: Chunk, values: Tensor, logprobs: Tensor) -> None:
    """Raise for NaN at a token with a finite log-prob and a weight, where values are checked."""
    if not can_be_read(values):
        return
    bad = values.isnan() & logprobs.isfinite()
    if (acting := args.acting()) is not None:
        bad = bad & chunk.of(acting)
    if not bad.any():
        return
    place = int(bad.nonzero()[0])
    token = place + chunk.at.start if isinstance(chunk.at, slice) else int(chunk.at[place])
    where = [int(at) for at in torch.unravel_index(torch.tensor(token), args.shape)]
    raise ValueError(
        f"loss must return a number for every kept token, got nan at {where}, whose log-prob is "
        f"{logprobs[place].item():.6g}: mask the token, or look for nan in inputs"
    )
