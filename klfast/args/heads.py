"""Checks of the arguments from hidden states that need no data: heads, models, a caller's loss.

Shapes: hidden states [..., D], weight [V, D], bias [V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import (
    GATHERED,
    check_device,
    check_integer,
    check_number,
    check_tensor,
    dtypes_text,
    is_freed,
    reduction_of,
    shape_text,
    shown,
)
from klfast.args.logits import Chosen
from klfast.args.signature import Tokens
from klfast.args.values import are_tracing
from klfast.distributed import averaged_full_tensor, is_dtensor
from klfast.types.device import DEVICES
from klfast.types.dtypes import FLOATS, MASKS
from klfast.types.reduction import REDUCTIONS

Softcap = float | tuple[float | None, float | None] | None
"""A number for all models, or (the policy's, the reference's)."""


class Head(NamedTuple):
    """The output layer of a model: logits = softcap(hidden @ weight.T + bias)."""

    weight: Tensor  # [V, D]; like the bias it may carry a graph
    bias: Tensor | None  # [V]
    softcap: float | None  # c of c * tanh(logits / c)


class Model(NamedTuple):
    """Hidden states, and the head that they go through."""

    hidden: Tensor  # [R, D]; may carry a graph
    head: Head


class Hidden(NamedTuple):
    """A source of rows: hidden states and heads."""

    # Hidden states, weight and bias of each model, in the order of the ops, which compute KL(first
    # || second). They may carry a graph.
    tensors: tuple[Tensor | None, ...]
    softcaps: tuple[float | None, ...]  # one per model
    chunk: int | None  # tokens per chunk; None for "auto"

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        weight: Tensor,
        bias: Tensor | None,
        softcap: Softcap,
        chunk: int | str,
        reference: tuple[Any, Tensor | None, Tensor | None] | None = None,
        chosen: Chosen | None = None,
    ) -> Hidden:
        """The source of checked hidden states, and their heads after all checks.

        ``reference``: its hidden states, weight and bias. ``chosen`` orders the two models.
        """
        hidden, least = tokens.tensor, 0 if tokens.of_shard else 1
        ref_hidden: Any
        ref_hidden, ref_weight, ref_bias = reference or (None, None, None)
        if reference is not None:
            tokens.check(ref_hidden=ref_hidden)
        heads = {"weight": weight, "bias": bias, "ref_weight": ref_weight, "ref_bias": ref_bias}
        for name, part in heads.items() if tokens.of_shard else ():
            if is_dtensor(part):  # it does not say how the vocabulary is cut
                raise TypeError(
                    f"{name} must be a plain tensor with group, this rank's rows of the head, got "
                    f"DTensor: pass {name}.to_local()"
                )
        weight, bias = whole_head(weight, bias)
        check_head(("weight", "bias"), weight, bias, hidden, "hidden", least)
        caps = softcaps_of(softcap, 1 if reference is None else 2)
        models = [_model_of(hidden, weight, bias, caps[0])]
        if reference is not None:
            head = reference_head(weight, bias, ref_hidden, ref_weight, ref_bias, least)
            models.append(_model_of(ref_hidden, *head, caps[1]))
        # The ops compute KL(first || second).
        if chosen is not None and chosen.direction.policy:
            models.reverse()
        tensors = [t for rows, head in models for t in (rows, head.weight, head.bias)]
        softcaps = [head.softcap for _, head in models]
        size = None
        if not (isinstance(chunk, str) and chunk == "auto"):
            size = check_integer("chunk", chunk, '"auto" or an integer >= 1', least=1)
        return cls(tuple(tensors), tuple(softcaps), size)

    def models(self) -> list[Model]:
        """The models, first and second."""
        found, parts = [], iter(self.tensors)
        for softcap in self.softcaps:
            hidden, weight, bias = next(parts), next(parts), next(parts)
            assert hidden is not None
            assert weight is not None
            found.append(Model(hidden, Head(weight, bias, softcap)))
        return found

    def words(self) -> int:
        """This rank's number of vocabulary entries."""
        return self.models()[0].head.weight.shape[0]

    def must_match(self) -> dict[str, object]:
        """The values that must be the same on every rank of a sharded vocabulary."""
        tensors = [t for t in self.tensors if t is not None]
        return {
            "the widths of hidden states": [model.hidden.shape[1] for model in self.models()],
            "the dtypes": [t.dtype for t in tensors],
            "requires_grad": [t.requires_grad and torch.is_grad_enabled() for t in tensors],
            "softcap": [*self.softcaps],
            "chunk": self.chunk,
        }


def check_head(
    names: tuple[str, str],
    weight: Any,
    bias: Tensor | None,
    hidden: Tensor,
    of: str,
    least_words: int = 1,
) -> None:
    """Raise unless weight and bias fit the hidden states. ``names``: their argument names."""
    of_weight, of_bias = names
    if isinstance(weight, torch.nn.Module):
        raise TypeError(
            f"{of_weight} must be a torch.Tensor, got the module {type(weight).__name__}: pass "
            "head.weight, and head.bias as the bias"
        )
    if isinstance(weight, Tensor) and weight.dtype not in FLOATS and weight.itemsize == 1:
        raise TypeError(
            f"{of_weight} must have one of the dtypes {dtypes_text(FLOATS)}, got {weight.dtype}: "
            "dequantize a quantized head first (bitsandbytes.functional.dequantize_4bit)"
        )
    check_tensor(of_weight, weight, FLOATS)
    width = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width or weight.shape[0] < least_words:
        remedy = ""
        if weight.numel() == 0 and weight.shape != (0, width):
            remedy = f": {GATHERED}"
        elif weight.dim() == 2 and weight.shape[0] == width:
            remedy = f": pass {of_weight}.T"
        raise ValueError(
            f"{of_weight} must have shape [V, {width}], V >= {least_words}, to fit the hidden size "
            f"of {of}, got {shape_text(weight)}{remedy}"
        )
    check_device(of_weight, weight, hidden, of)
    words, most = weight.shape[0], DEVICES[weight.device.type].most_words
    if most is not None and words > most:
        raise ValueError(f"{of_weight} must have at most {most} rows on a GPU, got {words}")
    if bias is not None:
        check_tensor(of_bias, bias, FLOATS)
        if tuple(bias.shape) != (words,):
            remedy = f": {GATHERED}" if bias.numel() == 0 else ""
            raise ValueError(
                f"{of_bias} must have shape [{words}], one number per token id, got "
                f"{shape_text(bias)}{remedy}"
            )
        check_device(of_bias, bias, hidden, of)
    if not are_tracing():
        for name, tensor in ((of_weight, weight), (of_bias, bias)):
            if tensor is not None and is_freed(tensor):
                raise ValueError(
                    f"{name} must have memory, got a storage that was freed: FSDP frees parameters "
                    "outside of the forward of their module, so call klfast in that forward"
                )


def softcaps_of(softcap: Softcap, models: int) -> list[float | None]:
    caps = softcap if isinstance(softcap, tuple) else (softcap,) * models
    if isinstance(softcap, tuple) and models == 1:
        raise TypeError(f"softcap must be a number > 0 or None, got {softcap!r}")
    if len(caps) != models:
        raise ValueError(
            "softcap must be a number > 0, None, or (the policy's, the reference's), got "
            f"{softcap!r}"
        )
    numbers = [None if cap is None else check_number("softcap", cap, above=0) for cap in caps]
    within = torch.finfo(torch.float32)
    for cap, number in zip(caps, numbers, strict=True):
        if number is not None and not within.tiny <= number <= within.max:
            raise ValueError(f"softcap must be a number > 0 within fp32, got {shown(cap)}")
    return numbers


def _model_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Model:
    """The model of checked arguments, in the dtypes of a linear layer under autocast."""
    rows, kind = hidden.reshape(-1, hidden.shape[-1]), hidden.device.type
    # torch's autocast leaves fp64 as it is, and has no answer for meta tensors.
    if not rows.is_meta and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, weight = (t if t.dtype == torch.float64 else t.to(dtype) for t in (rows, weight))
        if bias is not None and bias.dtype != torch.float64:
            bias = bias.to(dtype)
    return Model(rows, Head(weight, bias, softcap))


def whole_head(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias as plain tensors; DTensors, such as FSDP2's, are gathered once."""
    return averaged_full_tensor(weight), None if bias is None else averaged_full_tensor(bias)


def reference_head(
    weight: Tensor,
    bias: Tensor | None,
    ref_hidden: Tensor,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    least_words: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """The reference's weight and bias: its own, or the policy's without their graph."""
    if ref_weight is None:
        if ref_hidden.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"ref_weight must be given if ref_hidden has another hidden size than hidden, "
                f"{weight.shape[1]}, got ref_hidden {shape_text(ref_hidden)}"
            )
        ref_weight = weight.detach()
        if ref_bias is None:
            ref_bias = None if bias is None else bias.detach()
    ref_weight, ref_bias = whole_head(ref_weight, ref_bias)
    if isinstance(ref_weight, Tensor) and ref_weight.shape == ref_hidden.shape[:-1]:
        # A mask is often passed in the fourth place, as to the functions over logits.
        width = ref_hidden.shape[-1]
        if ref_weight.dtype not in FLOATS or ref_weight.shape[-1:] != (width,):
            raise ValueError(
                f"ref_weight must be the reference's head, [V, {width}], got "
                f"{shape_text(ref_weight)}, the shape of the tokens: pass a mask as mask="
            )
    names = "ref_weight", "ref_bias"
    check_head(names, ref_weight, ref_bias, ref_hidden, "ref_hidden", least_words)
    if ref_weight.shape[0] != weight.shape[0]:
        least = min(weight.shape[0], ref_weight.shape[0])
        remedy = f": slice both to the common vocabulary, weight[:{least}]" if least_words else ""
        raise ValueError(
            f"ref_weight must have the vocabulary size of weight, {weight.shape[0]}, got "
            f"{shape_text(ref_weight)}{remedy}"
        )
    return ref_weight, ref_bias


class Loss(NamedTuple):
    """A caller's loss per token: [n] of log-probs [n] and the same tokens of each input."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # [R] each, without a graph
    is_autocast: bool  # whether the caller has autocast on

    @classmethod
    def of(cls, function: Any, inputs: Any, token_ids: Tensor) -> Loss:
        """The checked loss, with inputs of one number for each token."""
        if not callable(function):
            raise TypeError(
                "loss must be a function of log-probs [n] and of the tensors in inputs, got "
                f"{type(function).__name__}"
            )
        if not isinstance(inputs, tuple | list):
            raise TypeError(
                f"inputs must be a tuple or list of tensors, got {type(inputs).__name__}"
                + (": pass inputs=(tensor,)" if isinstance(inputs, Tensor) else "")
            )
        rows = [_input_of(f"inputs[{at}]", value, token_ids) for at, value in enumerate(inputs)]
        is_autocast = not token_ids.is_meta and torch.is_autocast_enabled(token_ids.device.type)
        return cls(function, tuple(rows), is_autocast)


def check_scalar(reduction: str, *, is_normalized: bool) -> None:
    """Raise unless a reduction of losses has a scalar result."""
    if not reduction_of(reduction, is_normalized=is_normalized).is_scalar():
        scalars = ", ".join(repr(name) for name, of in REDUCTIONS.items() if of.is_scalar())
        raise ValueError(
            f"reduction must be one of {scalars}, got {reduction!r}: for another result, "
            "apply the loss to the log-probs of klfast.linear_token_logprobs"
        )


def _input_of(name: str, given: Any, token_ids: Tensor) -> Tensor:
    """A checked input, [R]."""
    value = check_tensor(name, given, MASKS)
    if value.requires_grad:
        raise ValueError(
            f"{name} must be a constant, got a tensor that requires a gradient: pass "
            f"{name}.detach(), or apply the loss to the log-probs of klfast.linear_token_logprobs"
        )
    shape = token_ids.shape
    fits = [own in (1, of) for own, of in zip(value.shape[::-1], shape[::-1], strict=False)]
    if value.dim() > len(shape) or not all(fits):
        raise ValueError(
            f"{name} must have the shape of token_ids, {list(shape)}, or broadcast to it, got "
            f"{shape_text(value)}"
        )
    check_device(name, value, token_ids, "token_ids")
    return value.expand(shape).reshape(-1)
