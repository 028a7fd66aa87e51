"""Shared by the frameworks' files: klfast's functions in the shapes and dtypes that they expect."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klfast.args.checks import check_choice
from klfast.args.estimator import Estimator
from klfast.args.logits import why_not_inplace
from klfast.args.values import IGNORED as IGNORED
from klfast.functional.logits import token_logprobs as fused_token_logprobs
from klfast.functional.penalty import kl_penalty

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_shapes(*rows: tuple[str, Tensor | None, str]) -> None:
    """Check that each argument has the sizes that earlier rows gave the letters of its shape.

    A row is (name, tensor or None, letters), as ``("mask", mask, "...")`` after ``("logits",
    logits, "... V")``. The dots are all dimensions before the lettered ones.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for name, tensor, letters in rows:
        if tensor is None:
            continue
        last = letters.split()[1:]
        cut = tensor.dim() - len(last)
        found: dict[str, tuple[int, ...]] = {"...": tensor.shape[: max(cut, 0)]}
        found |= {letter: (size,) for letter, size in zip(last, tensor.shape[cut:], strict=False)}
        if cut < 0 or any(sizes.setdefault(each, size) != size for each, size in found.items()):
            before = ["..."] if "..." not in sizes else map(str, sizes["..."])
            wanted = [*before, *(str(sizes.get(each, (each,))[0]) for each in last)]
            shape = f"[{', '.join(wanted)}]"
            if name != rows[0][0]:
                shape = f"[{', '.join(letters.split())}] of {rows[0][0]}, {shape}"
            raise ValueError(f"{name} must have the shape {shape}, got {list(tensor.shape)}")


def choose(argument: str, mode: object, presets: Mapping[str, Estimator]) -> Estimator:
    """The preset that a framework's name selects."""
    check_choice(argument, mode, tuple(presets))
    return presets[str(mode)]


def per_token(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: Estimator,
    mask: Tensor | None = None,
    *,
    old_logprobs: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """The estimator of every token, in nats, of the shape of ``logprobs``: [], [T], [..., T].

    ``exact=True`` follows the frameworks' order. The value is limited after the exp, whose overflow
    makes the gradient NaN. The mask is multiplied, which lets NaN through. The result has the
    inputs' dtype.
    """
    # klfast limits before the overflow, the frameworks after it.
    limit = estimator.kl_clip if exact and estimator.gradient == "value" else None
    value = kl_penalty(
        _rows(logprobs),
        _rows(ref_logprobs),
        None if mask is None or exact else _rows(mask),
        estimator=estimator if limit is None else replace(estimator, kl_clip=None),
        old_logprobs=None if old_logprobs is None else _rows(old_logprobs),
    ).view(logprobs.shape)
    if not exact:
        return value
    if limit is not None:
        value = value.clamp(-limit, limit)
    # Rounded before the mask is multiplied, as the frameworks' own steps are.
    value = value.to(torch.promote_types(logprobs.dtype, ref_logprobs.dtype))
    return value if mask is None else value * mask


def _rows(tensor: Tensor) -> Tensor:
    """[..., T] as [N, T], [] as [1]; one or two dimensions as they are."""
    if tensor.dim() == 0:
        return tensor.reshape(1)
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int | None = None,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    exact: bool = False,
) -> Tensor:
    """``klfast.token_logprobs`` of the labels [...], which names the arguments.

    ``inplace_backward``: where that is forbidden, new memory takes the gradient. ``exact``: in the
    dtype of the logits.
    """
    logprobs = fused_token_logprobs(
        logits,
        labels,
        mask=mask,
        ignore_index=ignore_index,
        temperature=temperature,
        # klfast's function raises where that is forbidden, and the frameworks' do not.
        inplace_backward=inplace_backward and why_not_inplace(logits) is None,
    )
    return logprobs.to(logits.dtype) if exact else logprobs


def entropy(
    logits: Tensor,
    *,
    mask: Tensor | None = None,
    group: ProcessGroup | None = None,
    exact: bool = False,
) -> Tensor:
    """Entropies of softmax(logits), [..., V] -> [...], in nats; arguments as above."""
    any_id = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    # The entropy comes from the read for a token's log-prob, whichever token that is.
    _, entropies = fused_token_logprobs(logits, any_id, mask=mask, return_entropy=True, group=group)
    return entropies.to(logits.dtype) if exact else entropies


def tensor_parallel_group() -> ProcessGroup:
    """The ranks among which Megatron cuts the vocabulary."""
    # Megatron alone knows which ranks share a vocabulary.
    state = importlib.import_module("megatron.core.parallel_state")
    group: ProcessGroup = state.get_tensor_model_parallel_group()
    return group
