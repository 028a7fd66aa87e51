"""The cases of each function: its options, and the call that a row of them makes.

Choices are klfast's own tables, so a new estimator, reduction or statistic is a case without an
edit. Where a row holds what does not go together, the option is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

import klfast
from klfast.cli.check.calls import MEMORIES, OF_POLICY, OF_REFERENCE, Call, Tensors, run
from klfast.cli.check.covering import Row, covering
from klfast.dtypes import FLOATS, INDICES, INTEGERS, MASKS
from klfast.names import DIRECTIONS, GRADIENTS, IMPORTANCE, NAMES, PLUS, TAILS
from klfast.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS
from klfast.rollout.call import NORMALIZE, OUTSIDE, WEIGHTS
from klfast.rollout.rejection import OVER, STATISTICS, Rejection


class Draw:
    """Random numbers that are the same on every machine: sums of uniform ones in float64."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1)."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float64, device="cpu")

    def bell(self, *shape: int) -> Tensor:
        """In [-3, 3), with a standard deviation of 1."""
        return 2 * (self.uniform(3, *shape).sum(0) - 1.5)


LENGTHS = (0, 5, 1, 0, 31, 8, 0)
FORMS = ("padded", *(("packed", dtype) for dtype in INDICES), "one", "empty")
"""The layouts: [B, T], packed with edges of a dtype, [N], and without a token."""

DTYPES = (
    *((dtype, dtype) for dtype in FLOATS),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
)
_LIMIT = {field.name: 0.7 for field in fields(klfast.Estimator) if field.default is None}
LIMITS = (
    {},
    *({name: limit} for name, limit in _LIMIT.items()),
    {"log_ratio_clip": (-0.3, 0.9)},
    _LIMIT | {"importance_cap": 1.1, "linear_tail": 0.5},
)
_TOKENS = {
    "dtypes": DTYPES,
    "form": FORMS,
    "memory": MEMORIES,
    "mask": (None, *MASKS),
    "spread": (1.0, 1e-3, 4.0),
}
_REDUCED = {
    "reduction": tuple(REDUCTIONS),
    "normalizer": (None, 7.5, "tensor"),
    "coef": (1.0, -0.4, "tensor"),
    "return_stats": (False, True),
}
_LOGITS = {
    "memory": MEMORIES,
    "mask": (None, *MASKS),
    "words": (37, 5, 2500),
    "temperature": (1.0, 0.7),
    "return_entropy": (False, True),
    "excluded": (False, True),
}


def _leaves(first: str, second: str) -> tuple[tuple[str, ...], ...]:
    return (first,), (first, second), (second,), ()


PENALTY = {
    "estimator": NAMES,
    "gradient": GRADIENTS,
    "importance": (None, *IMPORTANCE),
    "limits": LIMITS,
    "clip_weighted": (False, True),
    "leaves": _leaves("logprobs", "ref_logprobs"),
    **_TOKENS,
    **_REDUCED,
}
REWARDS = {
    "estimator": NAMES,
    "limits": LIMITS,
    "scores": MASKS,
    "coef": _REDUCED["coef"],
    "return_stats": (False, True),
    **_TOKENS,
}
LOGPROBS = {
    **_LOGITS,
    "ids": INTEGERS,
    "dtypes": DTYPES[: len(FLOATS)],
    "form": ("padded", "one", "empty", "none"),
    "ignore_index": (None, 1),
    "inplace_backward": (False, True),
    "leaves": (("logits",), ()),
}
DIVERGENCES = {
    "direction": DIRECTIONS,
    "jsd_beta": (0.5, 0.1),
    "apart": (0.5, 1e-3, 0.0),
    "ids": (None, *INTEGERS),
    "dtypes": DTYPES,
    "form": FORMS,
    "leaves": _leaves("logits", "ref_logits"),
    **_LOGITS,
    **_REDUCED,
}
TOPK = {
    "direction": DIRECTIONS,
    "tail": TAILS,
    "jsd_beta": (0.5, 0.1),
    "entries": (4, 2, 1),
    "missing": (False, True),
    "ids": INTEGERS,
    "dtypes": DTYPES,
    "form": FORMS,
    "leaves": _leaves("logits", "ref_logprobs"),
    **{name: values for name, values in _LOGITS.items() if name != "return_entropy"},
    **_REDUCED,
}
_HIDDEN = {
    "memory": MEMORIES,
    "mask": (None, *MASKS),
    "words": (37, 1030),
    "width": (8, 24),
    "bias": (False, True),
    "softcap": (None, 8.0),
    "temperature": (1.0, 0.7),
    "chunk": ("auto", 4),
    "return_entropy": (False, True),
    "dtypes": DTYPES,
}
LINEAR_LOGPROBS = {
    **_HIDDEN,
    "ids": INTEGERS,
    "form": ("padded", "one", "empty"),
    "leaves": (OF_POLICY, OF_POLICY[:1], OF_POLICY[1:2], ()),
}
LINEAR_DIVERGENCES = {
    **_HIDDEN,
    "direction": DIRECTIONS,
    "jsd_beta": (0.5, 0.1),
    "apart": (0.5, 1e-3, 0.0),
    "shared_head": (False, True),
    "ids": (None, *INTEGERS),
    "form": FORMS,
    "leaves": (
        OF_POLICY,
        OF_POLICY[:1],
        OF_POLICY + OF_REFERENCE,
        OF_POLICY[:1] + OF_REFERENCE[:1],
        (),
    ),
    **_REDUCED,
}
ROLLOUT = {
    "weight": WEIGHTS,
    "outside": OUTSIDE,
    "bounds": (
        {"cap": 1.2},
        {"floor": 0.8, "cap": None},
        {"floor": 0.9, "cap": 1.1},
        {"cap": None},
    ),
    "normalize": (None, *NORMALIZE),
    "statistic": (None, *STATISTICS),
    "over": OVER,
    "sides": (("high",), ("low",), ("low", "high")),
    "outward_only": (None, "token", "sequence"),
    "veto": (False, True),
    **_TOKENS,
}


def _tokens(row: Row, draw: Draw, padded: tuple[int, int], lengths: Sequence[int]) -> Any:
    """(shape of the tokens, cu_seqlens or nothing, how many sequences)."""
    form = row["form"]
    if isinstance(form, tuple):
        edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=form[1], device="cpu")
        return (sum(lengths),), {"cu_seqlens": edges}, len(lengths)
    shapes = {"padded": padded, "one": (padded[1],), "empty": (2, 0), "none": ()}
    shape = shapes[form]
    return shape, {}, shape[0] if len(shape) == 2 else 1


def _mask(row: Row, draw: Draw, shape: tuple[int, ...]) -> tuple[Tensors, Tensor]:
    """The mask as an argument, or nothing, and which tokens it keeps; of a padded batch not one of
    the second sequence.
    """
    dtype = row["mask"]
    if dtype is None:
        return {}, torch.ones(shape, dtype=torch.bool, device="cpu")
    kept = draw.uniform(*shape) < 0.7
    if len(shape) == 2:
        kept[1:2] = False
    weights = 1 + torch.floor(3 * draw.uniform(*shape))
    if dtype.is_floating_point:
        weights = weights / 4
    return {"mask": torch.where(kept, weights, 0.0).to(dtype)}, kept


def _poisoned(tensor: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in a dtype, with NaN and infinities where no token is."""
    poison = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64, device="cpu")
    numbers = torch.arange(tensor.numel(), device="cpu") % 3
    kept = kept.view(*kept.shape, *[1] * (tensor.dim() - kept.dim()))
    return torch.where(kept, tensor, poison[numbers].view(tensor.shape)).to(dtype)


def _log_probs(
    row: Row, draw: Draw, names: Sequence[str]
) -> tuple[Tensors, Tensor, tuple[int, ...], int]:
    """Log-probs of two models and a third, under as many of the names; mask and cu_seqlens."""
    shape, edges, sequences = _tokens(row, draw, (4, 37), LENGTHS)
    mask, kept = _mask(row, draw, shape)
    first = -4 * draw.uniform(*shape) - 0.01
    others = (first - row["spread"] * draw.bell(*shape), first - 0.3 * draw.bell(*shape))
    dtypes = (*row["dtypes"], row["dtypes"][0])
    of_models = {
        name: _poisoned(values, kept, dtype)
        for name, values, dtype in zip(names, (first, *others), dtypes, strict=False)
    }
    return of_models | mask | edges, kept, shape, sequences


def _scalars(row: Row, coef: str = "coef") -> tuple[Tensors, Row]:
    """Coefficient and normalizer as tensors, and as other options."""
    given = {coef: row["coef"]}
    if row.get("reduction") in NORMALIZED_REDUCTIONS:
        given["normalizer"] = row["normalizer"]
    tensors = {n: torch.tensor(0.3, device="cpu") for n, v in given.items() if v == "tensor"}
    return tensors, {n: v for n, v in given.items() if n not in tensors}


def _penalty(row: Row, draw: Draw) -> Call:
    names = ["logprobs", "ref_logprobs"] + ["old_logprobs"] * (row["importance"] is not None)
    tensors, kept, _, _ = _log_probs(row, draw, names)
    scalars, options = _scalars(row)
    options |= {name: row[name] for name in ("reduction", "return_stats")}
    never = row["estimator"] in PLUS and row["gradient"] == "none"
    options["estimator"] = klfast.Estimator(
        row["estimator"],
        gradient="value" if never else row["gradient"],
        importance=row["importance"] or IMPORTANCE[0],
        clip_weighted=row["clip_weighted"],
        **row["limits"],
    )
    return Call("kl_penalty", tensors | scalars, options, row["leaves"], row["memory"], kept=kept)


def _rewards(row: Row, draw: Draw) -> Call:
    tensors, kept, _, sequences = _log_probs(row, draw, ("logprobs", "ref_logprobs"))
    scalars, options = _scalars(row, "kl_coef")
    options["return_stats"] = row["return_stats"]
    options["estimator"] = klfast.Estimator(row["estimator"], **row["limits"])
    tensors["scores"] = (3 * draw.uniform(sequences)).to(row["scores"])
    return Call("kl_rewards", tensors | scalars, options, (), row["memory"], kept=kept)


def _logits(row: Row, draw: Draw) -> tuple[Tensors, Tensor, Callable[..., Tensor]]:
    """Logits, mask and cu_seqlens; which tokens are kept; and what stores other logits."""
    shape, edges, _ = _tokens(row, draw, (3, 5), (0, 5, 1, 0, 4))
    mask, kept = _mask(row, draw, shape)
    words = row["words"]

    def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
        if row["excluded"]:
            values[..., words // 2 :: 3] = -math.inf
        return _poisoned(values, kept, dtype)

    tensors = {"logits": draw.bell(*shape, words)}
    if row["ids"] is not None:
        tensors["token_ids"] = torch.floor(words // 2 * draw.uniform(*shape)).clamp(max=120)
        tensors["token_ids"] = tensors["token_ids"].to(row["ids"])
    return tensors | mask | edges, kept, stored


def _token_logprobs(row: Row, draw: Draw) -> Call:
    tensors, kept, stored = _logits(row, draw)
    tensors["logits"] = stored(tensors["logits"], row["dtypes"][0])
    names = ("temperature", "ignore_index", "return_entropy", "inplace_backward")
    options = {name: row[name] for name in names}
    if row["ignore_index"] is not None:
        kept = kept & (tensors["token_ids"] != row["ignore_index"])
    memory = "dense" if row["inplace_backward"] else row["memory"]  # which must be contiguous
    return Call("token_logprobs", tensors, options, row["leaves"], memory, True, kept)


def _kl_divergence(row: Row, draw: Draw) -> Call:
    tensors, kept, stored = _logits(row, draw)
    first = tensors["logits"]
    second = first + row["apart"] * draw.bell(*first.shape)
    models = (("logits", first), ("ref_logits", second))
    for (name, values), dtype in zip(models, row["dtypes"], strict=True):
        tensors[name] = stored(values, dtype)
    scalars, options = _scalars(row)
    names = ("direction", "jsd_beta", "temperature", "reduction", "return_stats", "return_entropy")
    options |= {name: row[name] for name in names}
    return Call(
        "kl_divergence", tensors | scalars, options, row["leaves"], row["memory"], True, kept
    )


def _topk(row: Row, draw: Draw) -> Call:
    tensors, kept, stored = _logits({**row, "ids": None}, draw)
    logits, (dtype, of_teacher) = tensors["logits"], row["dtypes"]
    some = min(row["words"] // 2, 120)  # which are not excluded, and which any integers hold
    least = 2 if row["tail"] == "renormalize" else 1
    count = min(max(row["entries"], least), some)
    ids = draw.uniform(*kept.shape, some).argsort(-1)[..., :count]
    teacher = (logits + 0.5 * draw.bell(*logits.shape)).log_softmax(-1).gather(-1, ids)
    absent = draw.uniform(*ids.shape) < 0.4 * row["missing"]
    teacher = teacher.masked_fill(absent, -math.inf)
    tensors["logits"] = stored(logits, dtype)
    tensors["ref_token_ids"] = ids.to(row["ids"])
    tensors["ref_logprobs"] = _poisoned(teacher, kept, of_teacher)
    kept = kept & ~absent.all(-1)
    scalars, options = _scalars(row)
    names = ("direction", "tail", "jsd_beta", "temperature", "reduction", "return_stats")
    options |= {name: row[name] for name in names}
    memory = row["memory"]
    return Call("topk_kl_divergence", tensors | scalars, options, row["leaves"], memory, True, kept)


def _model(row: Row, draw: Draw, hidden: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
    """Hidden states in their dtype, a head, and its bias where the row has one."""
    of_hidden, of_head = row["dtypes"]
    weight = 2 * row["width"] ** -0.5 * draw.bell(row["words"], row["width"])
    head = (weight, draw.bell(row["words"])) if row["bias"] else (weight,)
    return _poisoned(hidden, kept, of_hidden), *(each.to(of_head) for each in head)


def _hidden(row: Row, draw: Draw) -> tuple[Tensors, Tensor, Tensor, Row]:
    """The policy, mask, ids and cu_seqlens; its hidden states; which tokens are kept; options."""
    shape, edges, _ = _tokens(row, draw, (3, 5), (0, 5, 1, 0, 4))
    mask, kept = _mask(row, draw, shape)
    hidden = draw.bell(*shape, row["width"])
    model = _model(row, draw, hidden, kept)
    tensors = dict(zip(OF_POLICY, model, strict=False))
    if row["ids"] is not None:
        ids = torch.floor(row["words"] * draw.uniform(*shape)).clamp(max=120)
        tensors["token_ids"] = ids.to(row["ids"])
    names = ("softcap", "temperature", "chunk", "return_entropy")
    return tensors | mask | edges, hidden, kept, {name: row[name] for name in names}


def _linear_call(function: str, row: Row, tensors: Tensors, options: Row, kept: Tensor) -> Call:
    leaves = tuple(name for name in row["leaves"] if name in tensors)
    return Call(function, tensors, options, leaves, row["memory"], True, kept)


def _linear_logprobs(row: Row, draw: Draw) -> Call:
    tensors, _, kept, options = _hidden(row, draw)
    return _linear_call("linear_token_logprobs", row, tensors, options, kept)


def _linear_divergence(row: Row, draw: Draw) -> Call:
    tensors, hidden, kept, options = _hidden(row, draw)
    apart = hidden + row["apart"] * draw.bell(*hidden.shape)
    model = _model(row, draw, apart, kept)
    own = OF_REFERENCE[:1] if row["shared_head"] else OF_REFERENCE
    tensors |= dict(zip(own, model, strict=False))
    scalars, of_result = _scalars(row)
    names = ("direction", "jsd_beta", "reduction", "return_stats")
    options |= of_result | {name: row[name] for name in names}
    return _linear_call("linear_kl_divergence", row, tensors | scalars, options, kept)


def _rollout(row: Row, draw: Draw) -> Call:
    tensors, kept, shape, sequences = _log_probs(row, draw, ("logprobs", "rollout_logprobs"))
    bounds, weight = row["bounds"], None if row["weight"] == "none" else row["weight"]
    options = {"weight": weight, "outside": row["outside"], **bounds}
    options["normalize"] = row["normalize"] if weight else None
    if weight is None:
        options.pop("floor", None)
    rules = [Rejection("ratio", "seq-min", low=0.05)] * row["veto"]
    if row["statistic"] is not None and not (
        row["veto"] and (row["statistic"], row["over"]) == ("ratio", "seq-min")
    ):
        rule = _rule(row, tensors)
        rules.append(rule)
        if rule.outward_only:
            of = shape if row["outward_only"] == "token" else (sequences,)
            tensors["advantages"] = draw.bell(*of).to(row["dtypes"][0])
    options["reject"] = tuple(rules)
    return Call("rollout_correction", tensors, options, (), row["memory"], kept=kept)


def _rule(row: Row, tensors: Tensors) -> Rejection:
    """A rule whose bounds lie between the least and the greatest number that it sees."""
    statistic, over = row["statistic"], row["over"]
    lax = Rejection(statistic, over, high=1e30)
    call = Call("rollout_correction", tensors, {"reject": lax}, ())
    found = run(call, tensors, "reference")
    seen = torch.stack([found["stats.rules.0.least"], found["stats.rules.0.greatest"]]).double()
    least, greatest = float(seen.min()), float(seen.max())
    wider = 0.1 * max(abs(least), abs(greatest))  # one number is no bound of itself
    bounds = {}
    for side, share in (("low", 0.37), ("high", 0.67)):
        number = least - wider + share * (greatest - least + 2 * wider)
        bound = math.exp(number) if statistic == "ratio" else number
        bounds[side] = bound if number < 0 else max(bound, 1e-3)
    outward = over == "token" and row["outward_only"] is not None
    chosen = {side: bounds[side] for side in row["sides"]}
    return Rejection(statistic, over, **chosen, outward_only=outward)


@dataclass(frozen=True)
class Case:
    """A row of a family. ``is_basic``: of those that hold every value of an option once."""

    family: str
    name: str
    row: Row
    seed: int
    is_basic: bool

    def call(self) -> Call:
        """The call of this case, on tensors made anew."""
        return FAMILIES[self.family].build(self.row, Draw(self.seed))


@dataclass(frozen=True)
class Family:
    """A function, its options, and the call of a row."""

    function: str
    options: Mapping[str, Sequence[Any]]
    build: Callable[[Row, Draw], Call]

    def cases(self, family: str) -> Iterator[Case]:
        """So many that any two values meet."""
        rows, basic = covering(self.options)
        for seed, row in enumerate(rows):
            yield Case(family, _name(row, self.options), row, seed, seed < basic)


FAMILIES = {
    "penalty": Family("kl_penalty", PENALTY, _penalty),
    "rewards": Family("kl_rewards", REWARDS, _rewards),
    "token log-probs": Family("token_logprobs", LOGPROBS, _token_logprobs),
    "divergences": Family("kl_divergence", DIVERGENCES, _kl_divergence),
    "top-k divergences": Family("topk_kl_divergence", TOPK, _topk),
    "log-probs from hidden states": Family(
        "linear_token_logprobs", LINEAR_LOGPROBS, _linear_logprobs
    ),
    "divergences from hidden states": Family(
        "linear_kl_divergence", LINEAR_DIVERGENCES, _linear_divergence
    ),
    "rollout": Family("rollout_correction", ROLLOUT, _rollout),
}


def _name(row: Row, options: Mapping[str, Sequence[Any]]) -> str:
    """The options that differ from the first values."""
    texts = [f"{n}={_text(v)}" for n, v in row.items() if v is not options[n][0]]
    return " ".join(texts) or "plain"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_text, value)) or "none"
    if isinstance(value, dict):
        return ",".join(f"{name}:{part}" for name, part in value.items()) or "none"
    return str(value).removeprefix("torch.")
