"""The arguments of the functions over rows of a vocabulary, after every check, as one object.

A call has a source: logits, or hidden states with heads, of one model or two. It asks for log-probs
of ids, for entropies, for divergences of two models, or for divergences from a teacher's entries.
As in ``klfast.args.penalty``, the tuples have methods and no properties. Shapes: R tokens,
vocabulary size V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import (
    Coefficient,
    check_choice,
    check_integer,
    check_normalizer,
    check_reduction,
    coef_argument,
    shape_text,
)
from klfast.args.inplace import check_inplace
from klfast.args.logits import (
    NO_ID,
    Temperature,
    ids_of_k,
    jsd_beta_of,
    kept,
    picked,
    rows_of,
    skew_alpha_of,
    temperature_of,
    wants_entropy,
)
from klfast.args.penalty import AS_IT_IS, PenaltyCall, Spec, contiguous, per_token_or_row
from klfast.args.signature import check
from klfast.args.values import (
    are_tracing,
    check_distinct,
    check_keeping_mask,
    check_temperatures,
    check_token_ids,
)
from klfast.types.divergences import DIRECTION_TABLE, DIVERGENCES, Direction
from klfast.types.dtypes import arithmetic_dtype, wide
from klfast.types.layout import per_token
from klfast.types.names import (
    DIRECTIONS,
    TAILS,
    DirectionName,
    ReductionName,
    ReturnEntropy,
    TailName,
)
from klfast.types.reduction import REDUCTIONS
from klfast.types.topk import divergence_of_entries, without_missing

if TYPE_CHECKING:
    from klfast.args.shards import Shards

ENTROPIES = ("none", "first", "second")
"""The model whose entropies these ops return, in the order of ``EntropyOf`` in
``csrc/formulas/entropy.h``."""


class Logits(NamedTuple):
    """A source of rows: logits, each [A, T, V] with any strides, R = A * T."""

    models: tuple[Tensor, ...]
    """The models in the order of the ops, which compute KL(first || second)."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Those that may carry a graph."""
        return self.models

    def words(self) -> int:
        """This rank's number of vocabulary entries."""
        return self.models[0].shape[-1]

    def must_match(self) -> dict[str, object]:
        """The values that must be the same on every rank of a sharded vocabulary."""
        names = ("the dtype of logits", "the dtype of ref_logits")
        return {n: t.dtype for n, t in zip(names, self.models, strict=False)}


class Head(NamedTuple):
    """The output layer of a model: logits = softcap(hidden @ weight.T + bias)."""

    weight: Tensor
    """[V, D]; like the bias it may carry a graph."""
    bias: Tensor | None
    """[V]."""
    softcap: float | None
    """c of c * tanh(logits / c)."""


class Model(NamedTuple):
    """Hidden states, and the head that they go through."""

    hidden: Tensor
    """[R, D]; may carry a graph."""
    head: Head

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those that may carry a graph."""
        return self.hidden, self.head.weight, self.head.bias

    def of(self, hidden: Any, weight: Any, bias: Tensor | None) -> Model:
        """The model with other tensors."""
        return Model(hidden, Head(weight, bias, self.head.softcap))


class Hidden(NamedTuple):
    """A source of rows: hidden states and heads."""

    models: tuple[Model, ...]
    """As for ``Logits``."""
    chunk: int | None
    """Tokens per chunk; None for "auto"."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All models' tensors that may carry a graph."""
        return tuple([tensor for model in self.models for tensor in model.tensors()])

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Hidden:
        """The source with other tensors in place of ``tensors()``."""
        places = range(0, 3 * len(self.models), 3)
        models = zip(self.models, places, strict=True)
        return self._replace(models=tuple([m.of(*tensors[at : at + 3]) for m, at in models]))

    def words(self) -> int:
        """As for ``Logits``."""
        return self.models[0].head.weight.shape[0]

    def must_match(self) -> dict[str, object]:
        """As for ``Logits``."""
        tensors = [t for t in self.tensors() if t is not None]
        return {
            "the widths of hidden states": [model.hidden.shape[1] for model in self.models],
            "the dtypes": [t.dtype for t in tensors],
            "requires_grad": [t.requires_grad for t in tensors],
            "softcap": [model.head.softcap for model in self.models],
            "chunk": self.chunk,
        }


class Chosen(NamedTuple):
    """The arguments of a divergence as public functions take them."""

    direction: DirectionName
    jsd_beta: float = 0.5
    skew_alpha: float = 0.1

    def row(self) -> tuple[Direction, float]:
        """The direction's row, and its parameter. A skewed KL with ``skew_alpha`` 0 is the KL."""
        row = DIRECTION_TABLE[self.direction]
        parameters = {
            "jsd_beta": jsd_beta_of(self.jsd_beta),
            "skew_alpha": skew_alpha_of(self.skew_alpha),
        }
        parameter = parameters.get(row.row().parameter or "", 0.5)
        return (row._replace(divergence="kl"), 0.5) if parameter == 0 else (row, parameter)


class Entries(NamedTuple):
    """A teacher whose log-probs are known at K token ids per token."""

    ref_logprobs: Tensor
    """[R, K], in ``wide_dtype``, with its graph."""
    direction: Direction
    tail: TailName


class Reducing(NamedTuple):
    """The arguments of a reduction as public functions take them."""

    reduction: ReductionName = "none"
    weights: Tensor | None = None
    cu_seqlens: Tensor | None = None
    normalizer: float | Tensor | None = None
    coef: Coefficient = 1.0
    return_stats: bool = False


class Reduced(NamedTuple):
    """How the rows' divergences are reduced."""

    mask: Tensor | None
    weights: Tensor | None
    """In the shape of the mask."""
    cu_seqlens: Tensor | None
    spec: Spec
    return_stats: bool


class Loss(NamedTuple):
    """A caller's loss per token, a function of log-probs [n] and of the same tokens of each input,
    that returns [n].
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    """[R] each, without a graph."""
    is_autocast: bool
    """Whether the caller has autocast on."""


class Rows(NamedTuple):
    """The requested values of each token, [R] or [R, K]; None if not requested."""

    kl: Tensor | None = None
    """The divergences, or a caller's losses."""
    logprobs: Tensor | None = None
    """Log-probs of the ids under the first model, and under the second."""
    second_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    """Entropies of the policy."""


class RowsArgs(NamedTuple):
    """The arguments of a function over rows after every check that needs no data."""

    function: str
    """The name of the public function."""
    source: Logits | Hidden
    shape: torch.Size
    """The shape of results per token."""
    token_ids: Tensor | None
    """[R] or [R, K], int64, contiguous; in [R, K] ``NO_ID`` for an entry that does not exist."""
    keep: Tensor | None
    """[R], bool, contiguous: True for rows that are read."""
    temperature: float
    inverse_temperature: Tensor | None
    """[R] or 0-dim, in ``wide_dtype``. Replaces a temperature that is a tensor or a symbol of
    torch.compile. It is 1 in rows that are not read."""
    return_entropy: ReturnEntropy = False
    """True or "detached" if the policy's entropies are returned. Detached means no gradient."""
    divergence: str | None = None
    """The divergence of two models, an entry of ``DIVERGENCES``."""
    parameter: float = 0.5
    """The parameter of a divergence, if it has one."""
    policy: int = 0
    """The policy's index among the models. KL(ref || policy) is KL(policy || ref) with the roles
    exchanged: under direction="forward" the reference is the first."""
    entries: Entries | None = None
    loss: Loss | None = None
    reduced: Reduced | None = None
    """None if neither a divergence nor a loss is requested."""
    inplace_backward: bool = False
    rounds_logprobs: bool = True
    """False for log-probs of K ids per token as the backend has them, in float64 if it can."""
    shards: Shards | None = None
    """The vocabulary's shards, if the source is a shard. Ids are ids of the whole vocabulary."""

    def first(self) -> Tensor:
        """The tensor that has the device of the call."""
        tensor = self.source.tensors()[0]
        assert tensor is not None
        return tensor

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The source's tensors that may carry a graph."""
        return self.source.tensors()

    def arithmetic(self) -> torch.dtype:
        """The dtype of arithmetic and results."""
        return arithmetic_dtype(*self.source.tensors())

    def families(self) -> tuple[str, ...]:
        """The public functions whose kernels the call takes."""
        if isinstance(self.source, Hidden) and self.divergence is not None:
            return "token_logprobs", "kl_divergence"
        own = "token_logprobs" if self.divergence is None else "kl_divergence"
        return (own,) if self.reduced is None or self.divergence else (own, "kl_penalty")

    def acting(self) -> Tensor | None:
        """[R]: the rows whose weight is not 0, for a call that differentiates divergences alone.
        None without weights, or with other differentiable outputs.
        """
        of = self.reduced
        has_others = self.entries is None and self.loss is None and self.token_ids is not None
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

    def add_up(self, grad: Tensor) -> None:
        """Add up the ranks' gradients of hidden states in place; each is from the rank's shard."""
        if self.shards is not None:
            self.shards.ranks.add_up(grad)

    def ids_argument(self) -> str:
        """The name of the ids in the public function."""
        return "token_ids" if self.entries is None else "ref_token_ids"

    def are_checked_first(self) -> bool:
        """True if values are checked before the backend runs, because the backend would use them in
        matmuls, or does not read all of them.
        """
        return self.entries is not None or isinstance(self.source, Hidden)

    def check_values(self) -> None:
        """Raise ValueError for a refused value of the reduction, a temperature that is not > 0, ids
        outside of the vocabulary, and an entry that a token has twice.
        """
        if self.reduced is not None:
            self.reduce(self.zeros()).check_values()
        check_temperatures(self.inverse_temperature)
        if self.token_ids is None:
            return
        ids, name = self.token_ids, self.ids_argument()
        check_token_ids(
            ids,
            self.keep,
            self.words(),
            none=NO_ID if ids.dim() == 2 else None,
            argument=name,
            may_be_shard=self.shards is None,
        )
        if self.entries is not None:
            check_distinct(name, ids, self.keep, none=NO_ID)

    def explain(self) -> None:
        """Raise ValueError if a tensor on a CPU or a number has a value that kernels refuse."""
        if not are_tracing() and self.first().device.type == "cpu":
            self.check_values()
        if self.reduced is not None:
            self.reduce(self.zeros()).explain()

    def must_match(self) -> dict[str, object]:
        """The values that all ranks of shards must share (``klfast.functional.rank_check``)."""
        ids, mask, of, entries = self.token_ids, "mask", self.reduced, self.entries
        if self.function == "token_logprobs":
            mask = "mask, with ignore_index,"
        inverse = self.inverse_temperature
        fields = {
            "the function": self.function,
            "the number of tokens": self.shape.numel(),
            "the shape of the tokens": tuple(self.shape),
            "the kind of device": self.first().device.type,
            **self.source.must_match(),
            f"the number of {self.ids_argument()}": 0 if ids is None else ids.numel(),
            self.ids_argument(): ids,
            "weights": None if of is None else of.weights,
            mask: self.keep,
            "temperature": self.temperature if inverse is None else inverse,
            "return_entropy": self.return_entropy,
        }
        if of is not None:
            reduction, coef, normalizer = of.spec[1:]
            fields |= {
                "direction": DIRECTIONS[self.policy] if entries is None else entries.direction.name,
                "the weights of mask": of.mask,
                "cu_seqlens": of.cu_seqlens,
                "reduction": reduction,
                "coef": coef,
                "normalizer": normalizer,
            }
        if self.loss is not None:
            of_kept = self.loss.inputs
            if self.keep is not None:
                of_kept = tuple([torch.where(self.keep, value, 0) for value in of_kept])
            fields["inputs"] = of_kept
        if entries is not None:
            fields |= {
                "tail": entries.tail,
                entries.direction.row().parameter or "parameter": self.parameter,
                "ref_logprobs": entries.ref_logprobs,
            }
        return fields

    def zeros(self) -> Tensor:
        """[R] zeros that take no memory, in place of divergences of rows."""
        zero = torch.zeros((), dtype=self.arithmetic(), device=self.first().device)
        return zero.expand(self.shape.numel())

    def reduce(self, kl: Tensor) -> PenaltyCall:
        """The call that reduces [R] divergences, one per row of logits."""
        assert self.reduced is not None
        return PenaltyCall(kl.view(self.shape), None, None, *self.reduced, is_of_rows=True)

    def compare_tokens(self, rows: Rows) -> PenaltyCall | None:
        """The call over log-probs of the sampled tokens, only for its statistics. None without
        log-probs, or with several ids per token.
        """
        first, second = rows.logprobs, rows.second_logprobs
        if self.reduced is None or first is None or second is None or first.dim() > 1:
            return None
        first, second = (x.detach().view(self.shape) for x in (first, second))
        policy, reference = (second, first) if self.policy else (first, second)
        return PenaltyCall(policy, reference, None, *self.reduced._replace(weights=None))

    def divergence_of_entries(self, logprobs: Tensor) -> Tensor:
        """[R] divergences from the teacher, from the student's log-probs [R, K]."""
        assert self.entries is not None
        assert self.token_ids is not None
        teacher, direction, tail = self.entries
        exist = self.token_ids != NO_ID
        if self.keep is not None:
            exist = exist & self.keep[:, None]
        if tail == "renormalize":  # the teacher's tail at this temperature is not known
            inverse = self.inverse_temperature
            if inverse is None:
                teacher = teacher / self.temperature
            else:
                teacher = teacher * (inverse if inverse.dim() == 0 else inverse[:, None])
        student = wide(logprobs.view(exist.shape))
        if (acting := self.acting()) is not None:  # a gradient of 0 times an infinite slope is NaN
            teacher, student = (
                torch.where(acting[:, None], x, x.detach()) for x in (teacher, student)
            )
        dtype = self.arithmetic()
        kl = divergence_of_entries(teacher, student, exist, direction, tail, self.parameter, dtype)
        return kl.to(dtype)


def token_logprobs_args(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    ignore_index: int | None,
    temperature: Temperature,
    return_entropy: ReturnEntropy,
    inplace_backward: bool,
    of_shard: bool = False,
) -> RowsArgs:
    """The checked arguments of ``token_logprobs``. ``of_shard``: whether the logits are a shard of
    the vocabulary, which may be empty.
    """
    check("token_logprobs", None, logits, token_ids, mask, of_shard=of_shard)
    if mask is not None:
        check_keeping_mask(mask, arithmetic_dtype(logits))
    if ignore_index is not None:
        ignore_index = check_integer("ignore_index", ignore_index, "an integer or None")
    ids, exist = picked(token_ids, logits, ignore_index)
    keep = kept(mask, exist)
    temperatures = temperature_of(temperature, logits, keep)
    if inplace_backward:
        check_inplace(logits)
    return RowsArgs(
        "token_logprobs",
        Logits((rows_of(logits),)),
        logits.shape[:-1],
        ids,
        keep,
        *temperatures,
        wants_entropy(return_entropy),
        inplace_backward=inplace_backward,
    )


def kl_divergence_args(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    chosen: Chosen,
    temperature: Temperature,
    token_ids: Tensor | None,
    return_entropy: ReturnEntropy,
    reducing: Reducing,
    of_shard: bool = False,
) -> RowsArgs:
    """The checked arguments of ``kl_divergence``; ``of_shard`` as in ``token_logprobs_args``."""
    check_divergence(chosen, reducing, of_shard)
    tensors = logits, ref_logits, mask, token_ids, reducing.weights
    check("kl_divergence", reducing.cu_seqlens, *tensors, of_shard=of_shard)
    source = Logits(in_order(chosen, rows_of(logits), rows_of(ref_logits)))
    of = ("kl_divergence", source, logits, "logits")
    return divergence_args(*of, mask, chosen, temperature, token_ids, return_entropy, reducing)


def divergence_args(
    function: str,
    source: Logits | Hidden,
    rows: Tensor,
    of: str,
    mask: Tensor | None,
    chosen: Chosen,
    temperature: Temperature,
    token_ids: Tensor | None,
    return_entropy: ReturnEntropy,
    reducing: Reducing,
) -> RowsArgs:
    """The checked arguments of a divergence of two models, from a checked source. ``rows`` is the
    argument ``of``, which has the tokens. The arguments after it are as given.
    """
    keep, (row, parameter) = kept(mask), chosen.row()
    args = RowsArgs(
        function,
        source,
        rows.shape[:-1],
        None if token_ids is None else picked(token_ids, rows, None)[0],
        keep,
        *temperature_of(temperature, rows, keep, of),
        wants_entropy(return_entropy),
        row.divergence,
        parameter,
        policy=row.policy,
        reduced=reduced_of(rows, of, mask, reducing),
    )
    return args if args.return_entropy else without_idle(args)


def without_idle(args: RowsArgs) -> RowsArgs:
    """The call without the rows of weight 0, unless it needs their divergence for statistics."""
    acting = args.acting()
    if acting is None or (args.reduced is not None and args.reduced.return_stats):
        return args
    return args._replace(keep=acting if args.keep is None else args.keep & acting)


def topk_args(
    logits: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    chosen: Chosen,
    tail: TailName,
    temperature: Temperature,
    reducing: Reducing,
    of_shard: bool = False,
) -> RowsArgs:
    """The checked arguments of ``topk_kl_divergence``. ``token_logprobs_args`` has ``of_shard``."""
    check_topk(chosen, tail, reducing)
    tensors = logits, ref_token_ids, ref_logprobs, mask, reducing.weights
    check("topk_kl_divergence", reducing.cu_seqlens, *tensors, of_shard=of_shard)
    of = ("topk_kl_divergence", Logits((rows_of(logits),)), logits, "logits")
    return entries_args(*of, ref_token_ids, ref_logprobs, mask, chosen, tail, temperature, reducing)


def entries_args(
    function: str,
    source: Logits | Hidden,
    rows: Tensor,
    of: str,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    chosen: Chosen,
    tail: TailName,
    temperature: Temperature,
    reducing: Reducing,
) -> RowsArgs:
    """The checked arguments of a function over a teacher's entries, from a checked source. ``rows``
    is the argument ``of``, which has the tokens. The arguments after it are as given.
    """
    if ref_logprobs.shape != ref_token_ids.shape:
        raise ValueError(
            f"ref_logprobs must have the shape of ref_token_ids, {shape_text(ref_token_ids)}, got "
            f"{shape_text(ref_logprobs)}"
        )
    if tail == "renormalize" and ref_token_ids.shape[-1] == 1:
        raise ValueError(
            "tail must not be 'renormalize' with one entry per token, got ref_token_ids "
            f"{shape_text(ref_token_ids)}: both models' probability is then 1, and the divergence 0"
        )
    exist = ref_logprobs.detach() != -torch.inf
    ids = ids_of_k(ref_token_ids, exist)
    keep, (row, parameter) = kept(mask, exist.reshape(ids.shape).any(-1)), chosen.row()
    args = RowsArgs(
        function,
        source,
        rows.shape[:-1],
        ids,
        keep,
        *temperature_of(temperature, rows, keep, of),
        parameter=parameter,
        entries=Entries(wide(ref_logprobs).reshape(ids.shape), row, tail),
        reduced=reduced_of(rows, of, without_missing(mask, exist), reducing),
    )
    return without_idle(args)


def in_order(chosen: Chosen, policy: Any, reference: Any) -> tuple[Any, Any]:
    """Two models in the order of the ops."""
    is_second = DIRECTION_TABLE[chosen.direction].policy
    return (reference, policy) if is_second else (policy, reference)


def check_divergence(chosen: Chosen, reducing: Reducing, of_shard: bool) -> None:
    """Raise for a choice that a divergence of two models refuses."""
    check_choice("direction", chosen.direction, DIRECTIONS)
    why = DIRECTION_TABLE[chosen.direction].row().why_no_shards
    if of_shard and why is not None:
        raise ValueError(
            f"direction must be 'reverse' or 'forward' with group, got {chosen.direction!r}: {why},"
            " so that its divergence is no sum over shards"
        )
    check_reduction(reducing.reduction, is_normalized=reducing.normalizer is not None)


def check_topk(chosen: Chosen, tail: str, reducing: Reducing) -> None:
    """Raise for a choice that a divergence from a teacher's entries refuses."""
    check_choice("direction", chosen.direction, DIRECTIONS)
    check_choice("tail", tail, TAILS)
    check_reduction(reducing.reduction, is_normalized=reducing.normalizer is not None)


def reduced_of(rows: Tensor, of: str, mask: Tensor | None, reducing: Reducing) -> Reduced:
    """The checked reduction of divergences of the tokens of ``rows``, the argument ``of``."""
    reduction, weights, cu_seqlens, normalizer, coef, return_stats = reducing
    spec = Spec(
        AS_IT_IS,
        REDUCTIONS[reduction],
        coef_argument("coef", coef, rows, of=of),
        check_normalizer(normalizer, rows, of=of),
    )
    if (weights := per_token_or_row(weights, rows.shape[:-1])) is not None:
        tokens = rows.new_empty(()).expand(rows.shape[:-1])
        weights = per_token(weights, tokens, cu_seqlens)
    return Reduced(mask, weights, contiguous(cu_seqlens), spec, return_stats)
