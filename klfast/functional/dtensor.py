"""DTensors: every rank computes its own shard.

If a public function gets DTensors, it calls itself with their local tensors and makes DTensors from
the results. A per-token or per-sequence result is sharded like its tokens. A scalar is a sum over
the ranks (``Partial``), so a mean divides by the count of all ranks. Every rank has the statistics
of all sequences.

=============================================== ====================================================
placement of logprobs, values or logits         what happens
=============================================== ====================================================
``Replicate``                                   every rank computes the same
``Shard`` over sequences (dimension 0 of        only the count that a mean divides by is moved
[B, T] or [B, T, V])
``Shard`` over the tokens of sequences          the same, if a token's sequence does not matter
                                                (``token_logprobs``, and the reductions ``none``,
                                                ``token-sum`` and ``token-mean`` without
                                                ``cu_seqlens``, statistics and scores)
``Shard`` over the vocabulary, along one        a few values per token are gathered, and no logits
dimension of the mesh, if the ``direction`` of  (``group=`` of these functions), and results are
``kl_divergence`` accepts shards                ``Replicate`` along that dimension
everything else, such as ``Partial``            gathered first (``Replicate``)
=============================================== ====================================================

The other tensors are redistributed to the same placement. They must be DTensors on the same mesh,
except for 0-dim tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, distributed

from klfast.args.keywords import check_keywords
from klfast.args.signature import SIGNATURES
from klfast.distributed import is_dtensor
from klfast.formulas.divergences import DIRECTION_TABLE, DIVERGENCE_TABLE
from klfast.formulas.topk import without_missing
from klfast.stats.kl import KLStats
from klfast.types.dtypes import wide_dtype
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS, TOKENWISE_REDUCTIONS

if TYPE_CHECKING:
    # It takes long to import. A program that has DTensors has imported it.
    import torch.distributed.tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

P = ParamSpec("P")
R = TypeVar("R")

_ROWS = [row for rows in SIGNATURES.values() for row in rows]
# The arguments with a number for each token or sequence. They are sharded like the tokens.
_CUT = {row.name for row in _ROWS if row.shape[-1] != "D"} | {"temperature"}
_OVER_WORDS = {row.name for row in _ROWS if row.shape[-1] == "V"}


def serves_dtensors(function: Callable[P, R]) -> Callable[P, R]:
    """Return the public function, which then takes DTensors as well, and explains keywords."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def served(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            # A loop, because any() calls a generator for each argument.
            for value in (*args, *kwargs.values()):
                if type(value) not in _PLAIN and is_dtensor(value):
                    break
            else:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            check_keywords(function, args, kwargs)
            raise
        bound.apply_defaults()
        return cast(R, _over_shards(function, bound.arguments))

    return served


# Types that are never DTensors. Checking for them first is fast.
_PLAIN = (Tensor, torch.nn.Parameter, str, float, int, bool, type(None))


class _Shards(NamedTuple):
    """The placement of a call's tokens."""

    name: str  # the name of the argument with this placement
    of: DTensor
    rank: int  # the number of dimensions of tokens, which "of" has without a vocabulary
    placements: tuple[Placement, ...]  # only Shard and Replicate
    # The mesh dimension over which the vocabulary is sharded; None if it is not sharded.
    words_over: int | None

    @property
    def mesh(self) -> DeviceMesh:
        return self.of.device_mesh

    @property
    def dimensions(self) -> set[int]:
        """The dimensions that are sharded."""
        return {p.dim for p in self.placements if isinstance(p, distributed.tensor.Shard)}

    def local(self, name: str, value: object) -> object:
        """This rank's part of an argument."""
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, distributed.tensor.DTensor):
            if value.dim() == 0:
                return value
            raise TypeError(
                f"{name} must be a DTensor, like {self.name}, got {type(value).__name__}"
            )
        if value.device_mesh != self.mesh:
            raise ValueError(
                f"{name} must be on the mesh of {self.name}, {self.mesh}, got {value.device_mesh}"
            )
        placements: tuple[Placement, ...] = (distributed.tensor.Replicate(),) * self.mesh.ndim
        if name == "weights":
            placements = self._of_weights(value)
        elif name in _CUT and value.dim() > 0:
            self._check_shape(name, value)
            placements = self.placements
            if name in _OVER_WORDS and (over := self.words_over) is not None:
                words = distributed.tensor.Shard(self.rank)
                placements = (*placements[:over], words, *placements[over + 1 :])
        moved = value.redistribute(placements=placements)
        return moved.to_local(grad_placements=placements)

    def _of_weights(self, value: DTensor) -> tuple[Placement, ...]:
        """The placements of a weight for each token or sequence. The latter are not sharded over
        the tokens of a sequence.
        """
        tokens = self.of.shape[: self.rank]
        sequences = tokens[:-1] or (1,)
        if self.dimensions and value.shape not in (tokens, sequences, (*sequences, 1)):
            raise ValueError(
                f"weights must have the shape of {self.name}, {list(tokens)}, or one number for "
                f"each sequence, got {list(value.shape)}"
            )

        def serves(placement: Placement) -> bool:
            cut = placement.dim if isinstance(placement, distributed.tensor.Shard) else self.rank
            return cut < value.dim() and value.shape[cut] == tokens[cut]

        return tuple(p if serves(p) else distributed.tensor.Replicate() for p in self.placements)

    def _check_shape(self, name: str, value: Tensor) -> None:
        # Shapes of DTensors are the same on all ranks, so that all raise, or none.
        cut = self.dimensions
        if name in _OVER_WORDS and self.words_over is not None:
            cut = cut | {self.rank}
        if any(d >= value.dim() or value.shape[d] != self.of.shape[d] for d in cut):
            raise ValueError(
                f"{name} must have the shape of {self.name}, {list(self.of.shape)}, in its sharded "
                f"dimensions, got {list(value.shape)}"
            )

    def whole(self, local: Tensor, placements: tuple[Placement, ...]) -> DTensor:
        """The DTensor that consists of every rank's part."""
        shape = torch.Size(
            self.of.shape[d] if d in self.dimensions else n for d, n in enumerate(local.shape)
        )
        # from_local would take even shards for granted, and the last shard may be shorter.
        strides = torch.empty(shape, device="meta").stride() if shape else ()
        return distributed.tensor.DTensor.from_local(
            local.contiguous(), self.mesh, placements, shape=shape, stride=strides
        )

    def result(self, local: Tensor) -> DTensor:
        """The sum of the ranks' scalars, or every rank's values of its tokens or sequences."""
        if local.dim() > 0:
            return self.whole(local, self.placements)
        sums = (distributed.tensor.Partial() if p.is_shard() else p for p in self.placements)
        return self.whole(local, tuple(sums))


def _over_shards(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The function's result for DTensors. ``arguments`` are in the order of its signature."""
    shards = _shards_of(arguments)
    if arguments.get("inplace_backward"):
        raise ValueError("inplace_backward must be False for DTensors, got True")
    if arguments.get("group") is not None:
        raise ValueError(
            "group must be None for DTensors, whose placements say which shards there are, got "
            f"{type(arguments['group']).__name__}"
        )
    local = {name: shards.local(name, value) for name, value in arguments.items()}
    reduction = arguments.get("reduction", "none")
    if reduction in NORMALIZED_REDUCTIONS and arguments["normalizer"] is None and shards.dimensions:
        local["normalizer"] = _denominator(shards, local, reduction)
    if shards.words_over is not None:
        local["group"] = shards.mesh.get_group(shards.words_over)
    result = function(**local)
    if isinstance(result, tuple):
        first, *others = result
        parts = (shards.result(first), *(_whole(shards, other) for other in others))
        return type(result)(*parts) if hasattr(result, "_fields") else parts
    return shards.result(result)


def _shards_of(arguments: dict[str, Any]) -> _Shards:
    name = next(name for name in ("logits", "logprobs", "values") if name in arguments)
    of = arguments[name]
    if not is_dtensor(of):
        other = next(n for n, value in arguments.items() if is_dtensor(value))
        raise TypeError(f"{name} must be a DTensor, like {other}, got {type(of).__name__}")
    rank = of.dim() - (name == "logits")
    sequences, tokens = _may_shard(arguments)

    def serves(placement: Placement) -> bool:
        if type(placement) is not distributed.tensor.Shard or placement.dim >= rank:
            return False
        return sequences if placement.dim == 0 and rank == 2 else tokens

    placements = tuple(p if serves(p) else distributed.tensor.Replicate() for p in of.placements)
    return _Shards(name, of, rank, placements, _words_over(arguments, of))


def _words_over(arguments: dict[str, Any], of: DTensor) -> int | None:
    """The first mesh dimension that shards the vocabulary, if the function accepts shards."""
    row = DIRECTION_TABLE.get(arguments["direction"]) if "ref_logits" in arguments else None
    if "group" not in arguments or (row and DIVERGENCE_TABLE[row.divergence].why_no_shards):
        return None
    # Not is_shard: the strided shards of FSDP with tensor parallelism are no slices in rank order.
    shards = [type(p) is distributed.tensor.Shard and p.dim == of.dim() - 1 for p in of.placements]
    return shards.index(True) if True in shards else None


def _may_shard(arguments: dict[str, Any]) -> tuple[bool, bool]:
    """(sequences may be on several ranks, the tokens of one sequence may be on several ranks)."""
    if "token_ids" in arguments and "ref_logits" not in arguments:
        return True, True  # token_logprobs has no sequences
    if arguments["cu_seqlens"] is not None:
        return False, False
    by_token = arguments.get("reduction", "none") in TOKENWISE_REDUCTIONS
    return True, by_token and not arguments.get("return_stats") and "scores" not in arguments


def _denominator(shards: _Shards, local: dict[str, Any], reduction: str) -> Tensor:
    """The denominator of a mean over all ranks; 1 without tokens, so that the mean is 0."""
    like, mask = local[shards.name], local["mask"]
    if mask is None:
        mask = torch.ones((), device=like.device).expand(like.shape[: shards.rank])
    if "ref_token_ids" in local:
        mask = without_missing(mask, local["ref_logprobs"] != -torch.inf)
    with torch.no_grad():
        dtype = wide_dtype(mask.device)
        terms = REDUCTIONS[reduction].denominator_terms(mask.sum(-1, dtype=dtype))
        count = shards.result(terms.sum(dtype=dtype)).full_tensor()
        return torch.where(count == 0, 1.0, count)


def _whole(shards: _Shards, local: Tensor | KLStats | None) -> Any:
    """A result after the first: per-token values, or statistics per sequence."""
    if local is None:
        return None
    if not isinstance(local, KLStats):
        return shards.whole(local, shards.placements)
    together = shards.whole(torch.stack(local, -1), shards.placements)
    # Every rank gets all sequences: ``if`` and ``item()`` read only a DTensor's local part.
    everywhere = [distributed.tensor.Replicate()] * shards.mesh.ndim
    together = together.redistribute(placements=everywhere)
    return KLStats(*together.unbind(-1))
