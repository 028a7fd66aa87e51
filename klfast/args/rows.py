"""The arguments of the functions over rows of a vocabulary, after every check, as one object.

A call has a source: logits, or hidden states with heads, of one model or two. It asks for log-probs
of ids, for entropies, for divergences of two models, or for divergences from a teacher's entries.
Shapes: R tokens, vocabulary size V.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import check_choice, check_flag, check_integer, shape_text
from klfast.args.heads import Hidden, Loss
from klfast.args.logits import (
    NO_ID,
    Chosen,
    Logits,
    Temperature,
    ids_of_k,
    ids_of_rows,
    rows_to_read,
    temperature_of,
    why_not_inplace,
)
from klfast.args.penalty import PenaltyCall, Reduced, Reducing
from klfast.args.signature import Tokens
from klfast.args.values import (
    check_coef,
    check_distinct,
    check_keeping_mask,
    check_temperatures,
    check_token_ids,
)
from klfast.distributed.ranks import Ranks
from klfast.formulas.divergences import DIVERGENCE_TABLE, DIVERGENCES, Direction
from klfast.formulas.sequences import per_token
from klfast.formulas.topk import without_missing
from klfast.types.dtypes import arithmetic_dtype, wide
from klfast.types.names import DIRECTIONS, TAILS, ReturnEntropy, TailName

ENTROPIES = ("none", "first", "second")
"""The model whose entropies these ops return, in the order of ``EntropyOf`` in
``csrc/formulas/entropy.h``."""


class Teacher(NamedTuple):
    """A teacher whose log-probs are known at K token ids per token."""

    token_ids: Tensor  # [R, K]; NO_ID for an entry that does not exist
    exist: Tensor  # [..., K]: True for entries with a probability
    ref_logprobs: Tensor  # [R, K], in wide_dtype, with its graph
    direction: Direction
    parameter: float
    tail: TailName

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        ref_token_ids: Tensor,
        ref_logprobs: Tensor,
        chosen: Chosen,
        tail: TailName,
    ) -> Teacher:
        """The teacher of the call's tokens, after all checks that need no data."""
        if not (isinstance(tail, str) and tail in TAILS):
            check_choice("tail", tail, TAILS)
        tokens.check(ref_token_ids=ref_token_ids, ref_logprobs=ref_logprobs)
        if ref_logprobs.shape != ref_token_ids.shape:
            raise ValueError(
                "ref_logprobs must have the shape of ref_token_ids, "
                f"{shape_text(ref_token_ids)}, got {shape_text(ref_logprobs)}"
            )
        if tail == "renormalize" and ref_token_ids.shape[-1] == 1:
            raise ValueError(
                "tail must not be 'renormalize' with one entry per token, got ref_token_ids "
                f"{shape_text(ref_token_ids)}: both models' probability is then 1, and the "
                "divergence 0"
            )
        exist = ref_logprobs.detach() != -torch.inf
        ids = ids_of_k(ref_token_ids, exist)
        return cls(ids, exist, wide(ref_logprobs).reshape(ids.shape), *chosen, tail)


class Shards(NamedTuple):
    """The shards of a vocabulary, one per rank, in the order of ranks."""

    ranks: Ranks
    edges: Tensor  # [S + 1], int64: the first id of each shard, and the vocabulary size
    words: int | None  # the vocabulary size; None if only the GPU knows it
    # True if the ranks do not agree about the call, 0-dim; None if the host has checked this.
    are_apart: Tensor | None = None
    widest: int = 0  # the size of the largest shard; 0 if only the GPU knows it

    def to(self, device: torch.device) -> Shards:
        apart = None if self.are_apart is None else self.are_apart.to(device)
        edges, words = self.edges.to(device), self.words
        if words is None and device.type == "cpu":
            words = int(edges[-1])
        return self._replace(edges=edges, words=words, are_apart=apart)

    def has(self, token_ids: Tensor) -> Tensor:
        """True for ids in this rank's shard."""
        first, end = self.edges[self.ranks.rank], self.edges[self.ranks.rank + 1]
        return (token_ids >= first) & (token_ids < end)

    def own_ids(self, token_ids: Tensor, elsewhere: int) -> Tensor:
        """Ids as positions in this rank's shard; ``elsewhere`` for ids of other shards."""
        own = token_ids - self.edges[self.ranks.rank]
        return torch.where(self.has(token_ids), own, elsewhere)

    def owners(self, token_ids: Tensor) -> Tensor:
        """The shard of each id; ``NO_ID`` stays, and an id outside of the vocabulary gives S."""
        size = self.ranks.size
        owners = torch.searchsorted(self.edges[1:], token_ids, right=True)
        owners = torch.where(token_ids < 0, size, owners)
        return torch.where(token_ids == NO_ID, NO_ID, owners)


class Rows(NamedTuple):
    """The requested values of each token, [R] or [R, K]; None if not requested."""

    kl: Tensor | None = None  # the divergences, or a caller's losses
    # Log-probs of the ids under the first model, and under the second.
    logprobs: Tensor | None = None
    second_logprobs: Tensor | None = None
    entropy: Tensor | None = None  # entropies of the policy


class RowsArgs(NamedTuple):
    """The arguments of a function over rows after every check that needs no data."""

    function: str  # the name of the public function
    source: Logits | Hidden
    dtype: torch.dtype  # the dtype of arithmetic and results
    device: torch.device
    shape: torch.Size  # the shape of results per token
    # [R] or [R, K], int64, contiguous; in [R, K] NO_ID for an entry that does not exist.
    token_ids: Tensor | None
    keep: Tensor | None  # [R], bool, contiguous: True for rows that are read
    temperature: float
    # [R] or 0-dim, in wide_dtype. Replaces a temperature that is a tensor or a symbol of
    # torch.compile. It is 1 in rows that are not read.
    inverse_temperature: Tensor | None
    # True or "detached" if the policy's entropies are returned. Detached means no gradient.
    return_entropy: ReturnEntropy = False
    divergence: str | None = None  # the divergence of two models, an entry of DIVERGENCES
    parameter: float = 0.5  # the parameter of a divergence, if it has one
    # The policy's index among the models. KL(ref || policy) is KL(policy || ref) with the roles
    # exchanged: under direction="forward" the reference is the first.
    policy: int = 0
    teacher: Teacher | None = None
    loss: Loss | None = None
    # The reduction of divergences or losses, with weights in the shape of the tokens.
    reduced: Reduced | None = None
    inplace_backward: bool = False
    # False for log-probs of K ids per token as the backend has them, in float64 if it can.
    rounds_logprobs: bool = True
    # The vocabulary's shards, if the source is a shard. Ids are ids of the whole vocabulary.
    shards: Shards | None = None

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        source: Logits | Hidden,
        *,
        mask: Tensor | None,
        temperature: Temperature = 1.0,
        token_ids: Tensor | None = None,
        ignore_index: int | None = None,
        return_entropy: ReturnEntropy = False,
        chosen: Chosen | None = None,
        teacher: Teacher | None = None,
        loss: Loss | None = None,
        reducing: Reducing | None = None,
        inplace_backward: bool = False,
    ) -> RowsArgs:
        """The arguments of a call, after the checks that remain.

        ``chosen`` is the divergence of two models, and ``reducing`` the reduction of divergences or
        losses, if there are any.
        """
        dtype = arithmetic_dtype(*source.tensors)
        if isinstance(return_entropy, str) and return_entropy != "detached":
            raise ValueError(
                f"return_entropy must be True, False or 'detached', got {return_entropy!r}"
            )
        flags: dict[str, Any] = {
            "return_entropy": return_entropy == "detached" or return_entropy,
            "inplace_backward": inplace_backward,
        }
        for name, flag in flags.items():
            if flag is not True and flag is not False:  # mostly no call
                check_flag(name, flag)
        wanted: ReturnEntropy = bool(return_entropy)
        if wanted and (loss is not None or isinstance(return_entropy, str)):
            wanted = "detached"
        ids = exist = None
        given = {"mask": mask}
        if teacher is None:  # which has checked its own ids
            given["token_ids"] = token_ids
        if reducing is not None:
            given["weights"] = reducing.weights
        tokens.check(**given)
        if teacher is not None:
            ids, mask = teacher.token_ids, without_missing(mask, teacher.exist)
        elif token_ids is not None:
            if ignore_index is not None:
                ignore_index = check_integer("ignore_index", ignore_index, "an integer or None")
            ids, exist = ids_of_rows(token_ids, tokens.tensor, ignore_index)
        # A backend checks a reduction's mask. Without a reduction it gets only the rows to read.
        if mask is not None and reducing is None:
            check_keeping_mask(mask, dtype)
        keep = rows_to_read(mask, exist)
        number, inverse = temperature_of(temperature, tokens, keep)
        if inplace_backward and (reason := why_not_inplace(tokens.tensor)) is not None:
            raise ValueError(f"inplace_backward=True {reason}")
        reduced = None if reducing is None else Reduced.of(tokens, mask, reducing)
        if reduced is not None and reduced.weights is not None:
            like = tokens.tensor.new_empty(()).expand(tokens.shape)
            weights = per_token(reduced.weights, like, reduced.cu_seqlens)
            reduced = reduced._replace(weights=weights)
        divergence, parameter, policy = None, 0.5, 0
        if chosen is not None:
            (_, divergence, policy), parameter = chosen
        args = cls(
            tokens.function,
            source,
            dtype,
            tokens.tensor.device,
            tokens.shape,
            ids,
            keep,
            number,
            inverse,
            wanted,
            divergence,
            parameter,
            policy,
            teacher=teacher,
            loss=loss,
            reduced=reduced,
            inplace_backward=inplace_backward,
        )
        if reduced is None or reduced.weights is None or wanted or loss is not None:
            return args  # an entropy needs the rows of weight 0 too, and a loss is called on them
        return without_idle(args)

    def families(self) -> tuple[str, ...]:
        """The public functions whose kernels the call takes."""
        if isinstance(self.source, Hidden) and self.divergence is not None:
            return "token_logprobs", "kl_divergence"
        own = "token_logprobs" if self.divergence is None else "kl_divergence"
        return (own,) if self.reduced is None or self.divergence else (own, "kl_penalty")

    def acting(self) -> Tensor | None:
        """The rows [R] of weight other than 0. None without weights or with other gradients."""
        of = self.reduced
        has_others = self.teacher is None and self.loss is None and self.token_ids is not None
        if of is None or of.weights is None or has_others or self.return_entropy is True:
            return None
        return (of.weights != 0).reshape(-1)

    def options(self) -> tuple[int, float, float]:
        """A divergence of two models as the ops take it."""
        return DIVERGENCES.index(self.divergence or "kl"), self.parameter, self.temperature

    def entropy_of(self) -> int:
        """The model whose entropies are wanted, as the ops take it."""
        return ENTROPIES.index(ENTROPIES[1 + self.policy] if self.return_entropy else "none")

    def words(self) -> int:
        """The vocabulary size. With shards it must be known."""
        if self.shards is None:
            return self.source.words()
        assert self.shards.words is not None  # values are checked only where it is known
        return self.shards.words

    def own_ids(self, token_ids: Tensor) -> Tensor:
        """Ids as positions in this rank's shard; ``NO_ID`` for ids of other shards."""
        return token_ids if self.shards is None else self.shards.own_ids(token_ids, NO_ID)

    def check_values(self) -> None:
        """Raise ValueError for a refused value of the reduction, the temperature or the ids."""
        if self.reduced is not None:
            self.reduced.check_values(self.shape, self.dtype, "coef")
        if self.inverse_temperature is not None:
            check_temperatures(self.inverse_temperature)
        if self.token_ids is None:
            return
        ids, name = self.token_ids, "token_ids" if self.teacher is None else "ref_token_ids"
        check_token_ids(
            ids,
            self.keep,
            self.words(),
            none=NO_ID if ids.dim() == 2 else None,
            argument=name,
            may_be_shard=self.shards is None,
        )
        if self.teacher is not None:
            check_distinct(name, ids, self.keep, none=NO_ID)

    def check_numbers(self) -> None:
        """Raise ValueError for a refused number, which every device lets the host read."""
        if self.reduced is not None and not isinstance(self.reduced.spec.coef, Tensor):
            check_coef("coef", self.reduced.spec.coef, self.dtype)

    def must_match(self) -> dict[str, object]:
        """The values that all ranks of shards must share (``klfast.functional.rank_check``)."""
        ids, mask, of, teacher = self.token_ids, "mask", self.reduced, self.teacher
        if self.function == "token_logprobs":
            mask = "mask, with ignore_index,"
        inverse = self.inverse_temperature
        name = "token_ids" if teacher is None else "ref_token_ids"
        fields = {
            "the function": self.function,
            "the number of tokens": self.shape.numel(),
            "the shape of the tokens": tuple(self.shape),
            "the kind of device": self.device.type,
            **self.source.must_match(),
            f"the number of {name}": 0 if ids is None else ids.numel(),
            name: ids,
            "weights": None if of is None else of.weights,
            mask: self.keep,
            "temperature": self.temperature if inverse is None else inverse,
            "return_entropy": self.return_entropy,
        }
        if of is not None:
            reduction, coef, normalizer = of.spec[1:]
            fields |= {
                "direction": DIRECTIONS[self.policy] if teacher is None else teacher.direction.name,
                "the weights of mask": of.mask,
                "cu_seqlens": of.cu_seqlens,
                "reduction": reduction,
                "coef": coef,
                "normalizer": normalizer,
            }
        if self.loss is not None:
            # Ranks may have padded them differently under the mask.
            of_kept = self.loss.inputs
            if self.keep is not None:
                of_kept = tuple([torch.where(self.keep, value, 0) for value in of_kept])
            fields["inputs"] = of_kept
        if teacher is not None:
            fields |= {
                "tail": teacher.tail,
                DIVERGENCE_TABLE[teacher.direction.divergence].parameter
                or "parameter": teacher.parameter,
                "ref_logprobs": teacher.ref_logprobs,
            }
        return fields

    def reduction_call(self, kl: Tensor) -> PenaltyCall:
        """The call that reduces [R] divergences, one per row of logits."""
        assert self.reduced is not None
        return PenaltyCall(kl.view(self.shape), None, None, *self.reduced, is_of_rows=True)

    def compare_tokens(self, rows: Rows) -> PenaltyCall | None:
        """The call for statistics of sampled tokens; None without log-probs, or with K ids."""
        first, second = rows.logprobs, rows.second_logprobs
        if self.reduced is None or first is None or second is None or first.dim() > 1:
            return None
        first, second = (x.detach().view(self.shape) for x in (first, second))
        policy, reference = (second, first) if self.policy else (first, second)
        return PenaltyCall(policy, reference, None, *self.reduced._replace(weights=None))


def without_idle(args: RowsArgs) -> RowsArgs:
    """The call without the rows of weight 0, unless it needs their divergence for statistics."""
    acting = args.acting()
    if acting is None or (args.reduced is not None and args.reduced.return_stats):
        return args
    return args._replace(keep=rows_to_read(acting, args.keep))
