"""Checks of the arguments over logits that need no data, and the rows made from them.

Shapes: rows are [A, T, V], any strides; R = A * T.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from klfast.args.checks import (
    check_choice,
    check_device,
    check_number,
    check_tensor,
    shape_text,
)
from klfast.args.signature import Tokens
from klfast.formulas.divergences import DIRECTION_TABLE, DIVERGENCE_TABLE, Direction
from klfast.types.dtypes import FLOATS, INTEGERS, wide, wide_dtype
from klfast.types.names import DIRECTIONS, DirectionName

# The tokens' shape in error messages, by the argument that has it.
_TOKENS_OF = {"logits": "logits without the vocabulary", "hidden": "hidden without the hidden size"}
# Marks a missing token id. kNoId in csrc/logits/call.h.
NO_ID = -(2**63)

# The least skew_alpha above 0: kLeastSkew in csrc/formulas/divergences.h.
LEAST_SKEW = 1e-30

# The parameters of divergences: the least number above 0, and the error of another number.
_PARAMETERS = {
    "jsd_beta": (
        math.ulp(0.0),
        "a number between 0 and 1, got {!r}: 0 is direction='forward', and 1 is "
        "direction='reverse'",
    ),
    "skew_alpha": (
        LEAST_SKEW,
        f"0 or a number from {LEAST_SKEW} to below 1, got {{!r}}: 0 is the KL itself, and at 1 the "
        "mixture is the first model",
    ),
}

Temperature = float | Tensor
"""A number, or a tensor that is 0-dim or has the first dimensions of the tokens' shape."""


class Chosen(NamedTuple):
    """A divergence as the caller has chosen it."""

    direction: Direction
    parameter: float  # the number that the divergence depends on, if it has one

    @classmethod
    def of(
        cls,
        direction: DirectionName,
        jsd_beta: float = 0.5,
        skew_alpha: float = 0.1,
        *,
        of_shard: bool = False,
    ) -> Chosen:
        """The checked choice. ``of_shard``: whether it must be a sum over vocabulary shards."""
        if not (isinstance(direction, str) and direction in DIRECTION_TABLE):
            check_choice("direction", direction, DIRECTIONS)
        row = DIRECTION_TABLE[direction]
        divergence = DIVERGENCE_TABLE[row.divergence]
        if of_shard and divergence.why_no_shards is not None:
            raise ValueError(
                f"direction must be 'reverse' or 'forward' with group, got {direction!r}: "
                f"{divergence.why_no_shards}, so that its divergence is no sum over shards"
            )
        parameters = {"jsd_beta": jsd_beta, "skew_alpha": skew_alpha}
        _check_parameters(parameters)
        parameter = parameters.get(divergence.parameter or "", 0.5)
        if parameter == 0:  # a skewed KL with this skew_alpha is the KL
            return cls(row._replace(divergence="kl"), 0.5)
        return cls(row, parameter)


class Logits(NamedTuple):
    """A source of rows: logits, each [A, T, V] with any strides, R = A * T."""

    # The models in the order of the ops, which compute KL(first || second). They may carry a graph.
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tokens: Tokens, ref_logits: Any = None, chosen: Chosen | None = None) -> Logits:
        """The source of checked logits. With a reference, ``chosen`` orders the two models."""
        policy = rows_of(tokens.tensor)
        if chosen is None:
            return cls((policy,))
        tokens.check(ref_logits=ref_logits)
        reference = rows_of(ref_logits)
        return cls((reference, policy) if chosen.direction.policy else (policy, reference))

    def words(self) -> int:
        """This rank's number of vocabulary entries."""
        return self.tensors[0].shape[-1]

    def must_match(self) -> dict[str, object]:
        """The values that must be the same on every rank of a sharded vocabulary."""
        names = ("the dtype of logits", "the dtype of ref_logits")
        return {n: t.dtype for n, t in zip(names, self.tensors, strict=False)}


def _check_parameters(given: dict[str, float]) -> None:
    """Raise unless each parameter of a divergence is in its range; integers become floats."""
    for name, value in given.items():
        least, text = _PARAMETERS[name]
        if type(value) is float and least <= value < 1:
            continue
        given[name] = number = check_number(name, value)
        if not (least <= number < 1 or (number == 0 and name == "skew_alpha")):
            raise ValueError(f"{name} must be {text.format(value)}")


def temperature_of(
    temperature: Temperature, tokens: Tokens, keep: Tensor | None
) -> tuple[float, Tensor | None]:
    """A checked temperature: (number, None) for a number, (1, inverse) for a tensor or a symbol of
    torch.compile. A row that is not in ``keep`` has an inverse of 1.
    """
    if isinstance(temperature, Tensor):
        inverse = _inverse_of(temperature, tokens)
        if keep is not None and inverse.dim() > 0:
            inverse = torch.where(keep, inverse, 1.0)
        return 1.0, inverse
    if torch.compiler.is_compiling() and type(temperature) in (int, float):
        # May be symbolic. As a tensor it stays so, and a new value needs no new compilation.
        device = tokens.tensor.device
        one = torch.ones((), dtype=wide_dtype(device), device=device)
        return 1.0, one / temperature
    if type(temperature) is float and 1e-30 < temperature < 1e30:
        return temperature, None
    number = check_number("temperature", temperature, above=0)
    if not torch.finfo(torch.float32).tiny < 1 / number < torch.finfo(torch.float32).max:
        raise ValueError(f"temperature must have a reciprocal within fp32, got {temperature!r}")
    return number, None


def _inverse_of(temperature: Tensor, of: Tokens) -> Tensor:
    """1 / temperature, in ``wide_dtype``: 0-dim, or one per row, [R]."""
    check_tensor("temperature", temperature, (*INTEGERS, *FLOATS))
    check_device("temperature", temperature, of.tensor, of.name)
    tokens = of.shape
    # Not ``in``, which is wrong about symbols.
    pairs = zip(temperature.shape, tokens, strict=False)
    fits = [own == 1 or own == most for own, most in pairs]
    if temperature.dim() > len(tokens) or not all(fits):
        raise ValueError(
            "temperature must be a number, a 0-dim tensor, or have the first dimensions of "
            f"{_TOKENS_OF[of.name]}, {list(tokens)}, or 1 in their place, got "
            f"{shape_text(temperature)}"
        )
    inverse = wide(temperature.detach()).reciprocal()
    if inverse.dim() == 0:
        return inverse
    missing = (1,) * (len(tokens) - inverse.dim())
    return inverse.reshape(*inverse.shape, *missing).expand(tokens).reshape(-1).contiguous()


def rows_of(logits: Tensor) -> Tensor:
    """[..., V] as [A, T, V]: a view wherever strides allow one."""
    if logits.dim() > 3:
        return logits.flatten(0, -3)
    return logits.reshape((1,) * (3 - logits.dim()) + tuple(logits.shape))


def of_k(values: Tensor) -> Tensor:
    """[R] or [R, K] as [R, K]."""
    return values if values.dim() == 2 else values[:, None]


def ids_of_rows(
    token_ids: Tensor, logits: Tensor, ignore_index: int | None
) -> tuple[Tensor, Tensor | None]:
    """The ids, [R] or [R, K], and the rows that have one, [R]; None for all."""
    token_ids = token_ids.detach().to(torch.int64)  # uint8 cannot hold -100
    exist = None if ignore_index is None else token_ids != ignore_index
    if token_ids.dim() < logits.dim():
        return token_ids.reshape(-1).contiguous(), None if exist is None else exist.reshape(-1)
    ids = ids_of_k(token_ids, exist)
    return ids, None if exist is None else exist.reshape(ids.shape).any(-1)


def ids_of_k(token_ids: Tensor, exist: Tensor | None) -> Tensor:
    """Ids [..., K] as [R, K], int64; ``NO_ID`` where none exists."""
    # A wrong id that equals NO_ID becomes another wrong id.
    ids = token_ids.detach().to(torch.int64).clamp(min=NO_ID + 1)
    if exist is not None:
        ids = torch.where(exist, ids, NO_ID)
    # Not reshape: the number of rows is an int to torch.Size, and a constant to torch.export.
    return (ids if ids.dim() > 1 else ids[None]).flatten(0, -2).contiguous()


def rows_to_read(mask: Tensor | None, exist: Tensor | None = None) -> Tensor | None:
    """The rows that are read, [R] bool; None for all."""
    # Kernels read it without a stride. A reshaped tensor may have the stride of a vmap's batch.
    if mask is None:
        return None if exist is None else exist.contiguous()
    # Autograd saves a boolean mask as it is, but no inference tensor, which torch.compile lacks.
    is_saved = mask.dtype == torch.bool and (
        torch.compiler.is_compiling() or not mask.is_inference()
    )
    keep = (mask if is_saved else mask != 0).reshape(-1)
    return (keep if exist is None else keep & exist).contiguous()


SERVES_ONE_BACKWARD = (
    "inplace_backward must be False for a second backward or create_graph, got True: the first "
    "backward has put the gradient in the memory of logits"
)

_NEAR = 64


def why_not_inplace(logits: Tensor) -> str | None:
    """The reason not to write a gradient over the logits; None if there is none."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "cannot be used under torch.compile or torch.func"
    memory_of = logits if logits._base is None else logits._base
    if (memory_of.is_leaf and memory_of.requires_grad) or _is_leaf_passed_on(memory_of):
        return (
            "needs logits that a model has computed: it would overwrite a leaf, whose values "
            "autograd hands to the optimizer"
        )
    if not logits.is_contiguous():
        return f"needs contiguous logits, got strides {tuple(logits.stride())}"
    if logits.is_neg():
        return "needs logits whose memory holds their values, got a negated view"
    return None


def _is_leaf_passed_on(logits: Tensor) -> bool:
    """True if logits share the memory of a leaf that a Python Function has returned detached."""
    # Autograd sees a new result there, not a view.
    maker: Any = logits.grad_fn
    if not isinstance(maker, BackwardCFunction):
        return False
    memory = logits.untyped_storage()._cdata
    nodes: list[Any] = [maker]
    # The loop appends to nodes. A graph of more nodes is a model, whose logits are computed.
    for node in itertools.islice(nodes, _NEAR):
        leaf = getattr(node, "variable", None)  # AccumulateGrad nodes have it
        if (
            isinstance(leaf, Tensor)
            and leaf.layout == torch.strided
            and leaf.untyped_storage()._cdata == memory
        ):
            return True
        nodes += [following for following, _ in node.next_functions if following is not None]
    return False
