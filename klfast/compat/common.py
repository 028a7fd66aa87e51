"""Shared by the frameworks' files: klfast's functions in the shapes and dtypes that they expect."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from klfast import backends
from klfast.args.checks import check_choice
from klfast.args.estimator import Estimator
from klfast.args.inplace import why_not_inplace
from klfast.args.penalty import reduce_call
from klfast.args.values import IGNORED as IGNORED
from klfast.functional.logits import kl_divergence
from klfast.functional.logits import token_logprobs as fused_token_logprobs
from klfast.functional.penalty import kl_penalty

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_shapes(*rows: tuple[str, Tensor | None, str]) -> None:
    """Each argument has the sizes that the rows before it gave the letters of its shape.

    A row is (name, tensor or None, letters), as ``("mask", mask, "...")`` after ``("logits",
    logits, "... V")``. The dots stand for all dimensions before those of the letters.
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
    """The preset that a framework's word stands for."""
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

    ``exact=True`` is the order of the frameworks: the value is limited after the exp, whose
    overflow makes the gradient NaN; the mask is multiplied, which lets NaN through; the result has
    the inputs' dtype.
    """
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
    value = value.to(torch.promote_types(logprobs.dtype, ref_logprobs.dtype))
    return value if mask is None else value * mask


def _rows(tensor: Tensor) -> Tensor:
    """[..., T] as [N, T], [] as [1]; one or two dimensions as they are."""
    if tensor.dim() == 0:
        return tensor.reshape(1)
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor


def full_kl(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None, *, exact: bool = False
) -> Tensor:
    """The exact KL(policy || reference) of every token, [..., V] -> [...], in nats, by one read.

    ``mask * sum over V of p * log(p / q)``, where p and q are the distributions that the log-probs
    are of: ``klfast.kl_divergence``, to which log-probs are logits as good as any. A token id that
    the policy excludes (-inf) adds 0.

    The frameworks sum ``exp(logprobs) * (logprobs - ref_logprobs)``, which is the same as far as
    the log-probs sum to one. With a and b the log of what exp(logprobs) and exp(ref_logprobs) sum
    to, theirs is ``e**a * (KL + a - b)``: rounded to bf16, which makes a and b up to 2**-8 times
    the entropies, their sum is off by that, and negative near on-policy. Log-probs of a part of the
    vocabulary are not log-probs here: klfast makes distributions of them.

    The gradient is that of the distributions, ``p * (log(p / q) - KL)``, and ``q - p`` to the
    reference. Theirs, of numbers that need not sum to one, is ``p * (log(p / q) + 1)`` and ``-p``.
    They differ by multiples of p and of q, which the backward of ``log_softmax`` takes out: at the
    logits both are the same.

    ``exact=True`` is the frameworks' own, eagerly: their sum and gradient, NaN and the inputs'
    dtype.

    Raises:
        ValueError: there is no vocabulary dimension (log-probs of the sampled tokens alone make no
            sense here), or ``ref_logprobs`` or ``mask`` has another shape.
    """
    if logprobs.dim() < 2 or logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            "logprobs and ref_logprobs must be log-probs of the whole vocabulary, of one shape "
            f"[..., V], got {list(logprobs.shape)} and {list(ref_logprobs.shape)}"
        )
    check_shapes(("logprobs", logprobs, "... V"), ("mask", mask, "..."))
    if exact:
        terms = functional.kl_div(ref_logprobs, logprobs, reduction="none", log_target=True)
        kl = terms.sum(-1)
        return kl if mask is None else kl * mask
    kl = kl_divergence(
        _distributions(logprobs),
        _distributions(ref_logprobs),
        None if mask is None else _rows(mask),
    )
    return kl.view(logprobs.shape[:-1])


def _distributions(logprobs: Tensor) -> Tensor:
    """[..., V] as [N, T, V]; up to three dimensions as they are."""
    return logprobs.flatten(0, -3) if logprobs.dim() > 3 else logprobs


def per_token_or_full(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kl_penalty: str,
    presets: Mapping[str, Estimator],
    mask: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """``per_token`` by the framework's word for its estimator, or ``full_kl`` by ``full``."""
    check_choice("kl_penalty", kl_penalty, (*presets, "full"))
    if kl_penalty == "full":
        return full_kl(logprobs, ref_logprobs, mask, exact=exact)
    return per_token(logprobs, ref_logprobs, presets[kl_penalty], mask, exact=exact)


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
    _, entropies = fused_token_logprobs(logits, any_id, mask=mask, return_entropy=True, group=group)
    return entropies.to(logits.dtype) if exact else entropies


def rewards_of_kl(scores: Tensor, kl: Tensor, mask: Tensor | None, kl_coef: float) -> Tensor:
    """``klfast.kl_rewards`` of a KL per token [B, T] that is there already; ``scores`` [B]."""
    call = reduce_call(kl.detach(), mask, "none", None, None, kl_coef)
    call = call._replace(scores=scores.detach())
    return backends.choose("auto", call).kl_penalty(call)[0]


def tensor_parallel_group() -> ProcessGroup:
    """The ranks among which Megatron cuts the vocabulary.

    Raises:
        ImportError: there is no ``megatron.core``.
    """
    state = importlib.import_module("megatron.core.parallel_state")
    group: ProcessGroup = state.get_tensor_model_parallel_group()
    return group
