"""The cases of each function: its options, rows of them in which any two values meet, and the call
that a row makes.

Choices are klfast's own tables, so a new estimator, reduction or statistic is a case without an
edit. If values of a row exclude each other, an option is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, combinations
from typing import Any

import torch
from torch import Tensor

import klfast
from klfast.args.rejection import OVER, STATISTICS, Rejection
from klfast.args.rollout import NORMALIZE, OUTSIDE, WEIGHTS
from klfast.cli.check.calls import MEMORIES, OF_POLICY, OF_REFERENCE, Call, Tensors, run
from klfast.types.dtypes import FLOATS, INDICES, INTEGERS, MASKS
from klfast.types.names import DIRECTIONS, GRADIENTS, IMPORTANCE, NAMES, PLUS, TAILS
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

Row = dict[str, Any]
Made = tuple[Tensors, Tensor, Row]
"""Tensors of a call, the tokens that exist, and the options beside ``PASSED``."""


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
OF_TOKENS_OR_SEQUENCES = (
    *(None, ("token", torch.float32), ("sequence", torch.float64)),
    *(("column", torch.bfloat16), ("token", torch.float16)),
)
"""Whose they are, and their dtypes: [B, T] or [N], [S], and [B, 1] of padded tokens."""
_REDUCED = {
    "reduction": tuple(REDUCTIONS),
    "normalizer": (None, 7.5, "tensor"),
    "coef": (1.0, -0.4, "tensor"),
    "return_stats": (False, True),
    "weights": OF_TOKENS_OR_SEQUENCES,
}
TEMPERATURES = (1.0, 0.7, "one", "sequence", "token")  # numbers, and the shapes of tensors
_LOGITS = {
    "memory": MEMORIES,
    "mask": (None, *MASKS),
    "words": (37, 5, 2500),
    "temperature": TEMPERATURES,
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
    "picks": (None, 3),
    "dtypes": DTYPES[: len(FLOATS)],
    "form": ("padded", "one", "empty", "none"),
    "ignore_index": (None, 1),
    "inplace_backward": (False, True),
    "leaves": (("logits",), ()),
}
DIVERGENCES = {
    "direction": DIRECTIONS,
    "jsd_beta": (0.5, 0.1),
    "skew_alpha": (0.1, 0.7),
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
    "skew_alpha": (0.1, 0.7),
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
    "temperature": TEMPERATURES,
    "chunk": ("auto", 4),
    "return_entropy": (False, True),
    "dtypes": DTYPES,
}
LINEAR_LOGPROBS = {
    **_HIDDEN,
    "ids": INTEGERS,
    "picks": (None, 3),
    "form": ("padded", "one", "empty"),
    "leaves": (OF_POLICY, OF_POLICY[:1], OF_POLICY[1:2], ()),
}
LINEAR_LOSSES = {
    **_HIDDEN,
    "loss": ("grpo", "likelihood"),
    "inputs": ("token", "sequence"),
    "ids": INTEGERS,
    "form": FORMS,
    "leaves": (OF_POLICY, OF_POLICY[:1], OF_POLICY[1:2], ()),
    "reduction": tuple(name for name, of in REDUCTIONS.items() if of.is_scalar()),
    "normalizer": _REDUCED["normalizer"],
    "weights": _REDUCED["weights"],
}
LINEAR_TOPK = {
    **{name: values for name, values in _HIDDEN.items() if name != "return_entropy"},
    **{
        name: TOPK[name]
        for name in ("direction", "tail", "jsd_beta", "skew_alpha", "entries", "missing", "ids")
    },
    "form": FORMS,
    "leaves": (OF_POLICY, OF_POLICY[:1], (*OF_POLICY, "ref_logprobs"), ()),
    **_REDUCED,
}
LINEAR_DIVERGENCES = {
    **_HIDDEN,
    "direction": DIRECTIONS,
    "jsd_beta": (0.5, 0.1),
    "skew_alpha": (0.1, 0.7),
    "apart": (0.5, 1e-3, 0.0),
    "shared_head": (False, True),
    "softcap": (None, 8.0, (2.0, None), (None, 4.0)),
    "ids": (None, *INTEGERS),
    "picks": (None, 3),
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


def _tokens(row: Row, padded: tuple[int, int], lengths: Sequence[int]) -> Any:
    """(shape of the tokens, cu_seqlens or nothing, how many sequences)."""
    form = row["form"]
    if isinstance(form, tuple):
        edges = torch.tensor([0, *accumulate(lengths)], dtype=form[1], device="cpu")
        return (sum(lengths),), {"cu_seqlens": edges}, len(lengths)
    shapes = {"padded": padded, "one": (padded[1],), "empty": (2, 0), "none": ()}
    shape = shapes[form]
    return shape, {}, shape[0] if len(shape) == 2 else 1


def _mask(row: Row, draw: Draw, shape: tuple[int, ...]) -> tuple[Tensors, Tensor]:
    """The mask as an argument, or nothing, and which tokens it keeps."""
    dtype = row["mask"]
    if dtype is None:
        return {}, torch.ones(shape, dtype=torch.bool, device="cpu")
    kept = draw.uniform(*shape) < 0.7
    if len(shape) == 2:
        # A sequence without a token has no mean, which kernels must not make NaN.
        kept[1:2] = False
    weights = 1 + torch.floor(3 * draw.uniform(*shape))
    if dtype.is_floating_point:
        # Quarters are exact in every dtype of a mask.
        weights = weights / 4
    return {"mask": torch.where(kept, weights, 0.0).to(dtype)}, kept


def _poisoned(tensor: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in a dtype, with NaN and infinities where no token is."""
    # A kernel that reads a masked token shows it in its result.
    poison = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64, device="cpu")
    numbers = torch.arange(tensor.numel(), device="cpu") % 3
    kept = kept.view(*kept.shape, *[1] * (tensor.dim() - kept.dim()))
    return torch.where(kept, tensor, poison[numbers].view(tensor.shape)).to(dtype)


def _log_probs(
    row: Row, draw: Draw, names: Sequence[str]
) -> tuple[Tensors, Tensor, tuple[int, ...], int]:
    """Log-probs of two models and a third, under as many of the names; mask and cu_seqlens."""
    shape, edges, sequences = _tokens(row, (4, 37), LENGTHS)
    mask, kept = _mask(row, draw, shape)
    first = -4 * draw.uniform(*shape) - 0.01
    others = (first - row["spread"] * draw.bell(*shape), first - 0.3 * draw.bell(*shape))
    dtypes = (*row["dtypes"], row["dtypes"][0])
    of_models = {
        name: _poisoned(values, kept, dtype)
        for name, values, dtype in zip(names, (first, *others), dtypes, strict=False)
    }
    return of_models | mask | edges, kept, shape, sequences


def _penalty(row: Row, draw: Draw) -> Made:
    names = ["logprobs", "ref_logprobs"] + ["old_logprobs"] * (row["importance"] is not None)
    tensors, kept, _, _ = _log_probs(row, draw, names)
    # A name with "+" has the gradient of k2, and refuses to have none.
    never = row["estimator"] in PLUS and row["gradient"] == "none"
    estimator = klfast.Estimator(
        row["estimator"],
        gradient="value" if never else row["gradient"],
        importance=row["importance"] or IMPORTANCE[0],
        clip_weighted=row["clip_weighted"],
        **row["limits"],
    )
    return tensors, kept, {"estimator": estimator}


def _rewards(row: Row, draw: Draw) -> Made:
    tensors, kept, _, sequences = _log_probs(row, draw, ("logprobs", "ref_logprobs"))
    tensors["scores"] = (3 * draw.uniform(sequences)).to(row["scores"])
    return tensors, kept, {"estimator": klfast.Estimator(row["estimator"], **row["limits"])}


def _tokens_of_rows(row: Row, draw: Draw) -> tuple[tuple[int, ...], Tensors, Tensor]:
    """The shape of the tokens of a call over a vocabulary, mask and cu_seqlens, the kept tokens."""
    shape, edges, _ = _tokens(row, (3, 5), (0, 5, 1, 0, 4))
    mask, kept = _mask(row, draw, shape)
    return shape, mask | edges, kept


def _over_logits(row: Row, draw: Draw) -> Made:
    """A policy's logits, and a reference's ``apart`` from them or the ``entries`` of a teacher."""
    shape, others, kept = _tokens_of_rows(row, draw)
    words = row["words"]
    logits = draw.bell(*shape, words)
    tensors, models = {"logits": logits}, {"logits": logits}
    if row["ids"] is not None and "entries" not in row:
        tensors["token_ids"] = _token_ids(row, draw, shape, words // 2)
    tensors |= others
    if "apart" in row:
        models["ref_logits"] = logits + row["apart"] * draw.bell(*logits.shape)
    counted = kept
    if "entries" in row:
        entries, counted = _entries(row, draw, logits, kept, row["dtypes"][1])
        tensors |= entries
    if row.get("ignore_index") is not None:
        exist = tensors["token_ids"] != row["ignore_index"]
        counted = kept & (exist.any(-1) if row["picks"] else exist)
    # Only now, because what a teacher has follows from logits that are finite.
    for (name, values), dtype in zip(models.items(), row["dtypes"], strict=False):
        if row["excluded"]:
            values[..., words // 2 :: 3] = -math.inf
        tensors[name] = _poisoned(values, kept, dtype)
    return tensors, counted, {}


def _token_ids(row: Row, draw: Draw, shape: tuple[int, ...], words: int) -> Tensor:
    """One id below ``words`` per token, or several, which may be equal."""
    if row.get("picks"):
        shape = (*shape, row["picks"])
    return torch.floor(words * draw.uniform(*shape)).clamp(max=120).to(row["ids"])


def _entries(
    row: Row, draw: Draw, logits: Tensor, kept: Tensor, dtype: torch.dtype
) -> tuple[Tensors, Tensor]:
    """A teacher's entries near a student's logits, and which tokens have some."""
    some = min(row["words"] // 2, 120)  # which are not excluded, and which any integers hold
    least = 2 if row["tail"] == "renormalize" else 1
    count = min(max(row["entries"], least), some)
    # Without repetition: a teacher lists each id once.
    ids = draw.uniform(*kept.shape, some).argsort(-1)[..., :count]
    teacher = (logits + 0.5 * draw.bell(*logits.shape)).log_softmax(-1).gather(-1, ids)
    absent = draw.uniform(*ids.shape) < 0.4 * row["missing"]
    teacher = teacher.masked_fill(absent, -math.inf)
    ref_logprobs = _poisoned(teacher, kept, dtype)
    entries = {"ref_token_ids": ids.to(row["ids"]), "ref_logprobs": ref_logprobs}
    return entries, kept & ~absent.all(-1)


def _model(row: Row, draw: Draw, hidden: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
    """Hidden states in their dtype, a head, and its bias where the row has one."""
    of_hidden, of_head = row["dtypes"]
    # So that logits have the same spread for every width.
    weight = 2 * row["width"] ** -0.5 * draw.bell(row["words"], row["width"])
    head = (weight, draw.bell(row["words"])) if row["bias"] else (weight,)
    return _poisoned(hidden, kept, of_hidden), *(each.to(of_head) for each in head)


def _over_hidden(row: Row, draw: Draw) -> Made:
    """A policy's hidden states and head, and what a row has beside them."""
    shape, others, kept = _tokens_of_rows(row, draw)
    hidden = draw.bell(*shape, row["width"])
    tensors = dict(zip(OF_POLICY, _model(row, draw, hidden, kept), strict=False))
    if row["ids"] is not None and "entries" not in row:
        tensors["token_ids"] = _token_ids(row, draw, shape, row["words"])
    tensors |= others
    if "apart" in row:
        apart = hidden + row["apart"] * draw.bell(*hidden.shape)
        own = OF_REFERENCE[:1] if row["shared_head"] else OF_REFERENCE
        tensors |= zip(own, _model(row, draw, apart, kept), strict=False)
    logits = hidden @ tensors["weight"].double().T
    if "loss" in row:
        tensors |= _inputs_of_loss(row, draw, logits, tensors["token_ids"], kept)
        return tensors, kept, {"loss": LOSSES[row["loss"]]}
    if "entries" in row:
        entries, kept = _entries(row, draw, logits, kept, row["dtypes"][1])
        tensors |= entries
    return tensors, kept, {}


def _grpo(logprobs: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
    """GRPO's loss with a clip and a KL, per token."""
    ratio = (logprobs - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = klfast.kl_penalty(logprobs, ref, estimator="k3+", old_logprobs=old, backend="reference")
    return kl / 4 - gain


LOSSES = {"grpo": _grpo, "likelihood": lambda logprobs, old, ref, advantages: -logprobs}


def _inputs_of_loss(row: Row, draw: Draw, logits: Tensor, ids: Tensor, kept: Tensor) -> Tensors:
    """The old and the reference's log-probs, near the policy's, and advantages."""
    tensors = {}
    logprobs = logits.log_softmax(-1).gather(-1, ids.long()[..., None])[..., 0]
    for name in ("old_logprobs", "ref_logprobs"):
        # Log-probs are below 0, and a hint would warn of others.
        moved = (logprobs - 0.3 * draw.bell(*logprobs.shape)).clamp(max=-1e-3)
        tensors[name] = _poisoned(moved, kept, row["dtypes"][1])
    advantages = draw.bell(*kept.shape)
    of_sequence = row["inputs"] == "sequence" and kept.dim() == 2
    return tensors | {"advantages": advantages[:, :1] if of_sequence else advantages}


def _rollout(row: Row, draw: Draw) -> Made:
    tensors, kept, shape, sequences = _log_probs(row, draw, ("logprobs", "rollout_logprobs"))
    options = {"weight": row["weight"], "normalize": row["normalize"], **row["bounds"]}
    if row["weight"] == "none":
        options |= {"weight": None, "normalize": None}
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
    return tensors, kept, options | {"reject": tuple(rules)}


def _rule(row: Row, tensors: Tensors) -> Rejection:
    """A rule whose bounds lie between the least and the greatest number that it sees."""
    statistic, over = row["statistic"], row["over"]
    # Bounds at random would reject all tokens or none.
    lax = Rejection(statistic, over, high=1e30)
    call = Call("rollout_correction", tensors, {"reject": lax}, ())
    found = run(call, "reference")
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


def _temperatures(of: str, kept: Tensor) -> Tensor:
    """In a tensor: one, of sequences or of tokens, where what does not exist has NaN."""
    shape = kept.shape[: {"one": 0, "sequence": 1, "token": 2}[of]]
    numbers = torch.linspace(0.5, 1.7, math.prod(shape), device="cpu").view(shape)
    return torch.where(kept, numbers, math.nan) if shape and shape == kept.shape else numbers


def _weights(row: Row, kept: Tensor, edges: Tensor | None, seed: int) -> Tensor:
    """Quarters from 0 to 1, with NaN where no token is."""
    of, dtype = row["weights"]
    sequences = kept.shape[:-1] or (1,) if edges is None else (len(edges) - 1,)
    shape = {"token": kept.shape, "sequence": sequences, "column": sequences}[of]
    # A seed of its own: the other tensors of a case do not depend on the weights.
    numbers = torch.floor(5 * Draw(1000 + seed).uniform(*shape)) / 4
    if of == "token":
        return torch.where(kept, numbers, math.nan).to(dtype)
    return (numbers[:, None] if of == "column" and kept.dim() == 2 else numbers).to(dtype)


PASSED = (
    *("reduction", "return_stats", "temperature", "softcap"),
    *("direction", "tail", "jsd_beta", "skew_alpha"),
    *("chunk", "return_entropy", "ignore_index", "inplace_backward", "outside"),
)
"""The options that a function gets as a row has them."""


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
        return FAMILIES[self.family].call(self.row, self.seed)


@dataclass(frozen=True)
class Family:
    """A function, its options, and what a row makes of them."""

    function: str
    options: Mapping[str, Sequence[Any]]
    build: Callable[[Row, Draw], Made]

    def cases(self, family: str) -> Iterator[Case]:
        """So many that any two values meet."""
        rows, basic = covering_rows(self.options)
        for seed, row in enumerate(rows):
            # A case has the name of the options that differ from the first values.
            others = [f"{n}={_text(v)}" for n, v in row.items() if v is not self.options[n][0]]
            yield Case(family, " ".join(others) or "plain", row, seed, seed < basic)

    def call(self, row: Row, seed: int) -> Call:
        """The call of a row."""
        tensors, kept, options = self.build(row, Draw(seed))
        options |= {name: row[name] for name in PASSED if name in row}
        if isinstance(row.get("temperature"), str):
            tensors["temperature"] = _temperatures(options.pop("temperature"), kept)
        if row.get("weights"):
            tensors["weights"] = _weights(row, kept, tensors.get("cu_seqlens"), seed)
        for name in ("coef", "normalizer"):
            if name in row and (name == "coef" or row["reduction"] in NORMALIZED_REDUCTIONS):
                argument = "kl_coef" if self.function == "kl_rewards" else name
                if row[name] == "tensor":
                    tensors[argument] = torch.tensor(0.3, device="cpu")
                else:
                    options[argument] = row[name]
        leaves = tuple(name for name in row.get("leaves", ()) if name in tensors)
        memory = "dense" if row.get("inplace_backward") else row["memory"]  # must be contiguous
        return Call(self.function, tensors, options, leaves, memory, kept)


FAMILIES = {
    "penalty": Family("kl_penalty", PENALTY, _penalty),
    "rewards": Family("kl_rewards", REWARDS, _rewards),
    "token log-probs": Family("token_logprobs", LOGPROBS, _over_logits),
    "divergences": Family("kl_divergence", DIVERGENCES, _over_logits),
    "top-k divergences": Family("topk_kl_divergence", TOPK, _over_logits),
    "log-probs from hidden states": Family("linear_token_logprobs", LINEAR_LOGPROBS, _over_hidden),
    "losses from hidden states": Family("linear_token_loss", LINEAR_LOSSES, _over_hidden),
    "divergences from hidden states": Family(
        "linear_kl_divergence", LINEAR_DIVERGENCES, _over_hidden
    ),
    "top-k divergences from hidden states": Family(
        "linear_topk_kl_divergence", LINEAR_TOPK, _over_hidden
    ),
    "rollout": Family("rollout_correction", ROLLOUT, _rollout),
}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_text, value)) or "none"
    if isinstance(value, dict):
        return ",".join(f"{name}:{part}" for name, part in value.items()) or "none"
    return str(value).removeprefix("torch.")


BY_KIND = ("mask", "scores", "ids")
"""Options whose dtypes meet other options by their kind: bool, an integer, a float."""


def covering_rows(options: Mapping[str, Sequence[Any]]) -> tuple[list[Row], int]:
    """Rows in which any two values meet, and how many of the first hold every value at least once.

    Rows have the first value of an option without a missing pair. Values of one kind take turns.
    """
    # A fault depends on one option or on how two meet: such rows find nearly all that every
    # combination would.
    kinds = [_kinds(name, values) for name, values in options.items()]
    places = [(option, kind) for option, own in enumerate(kinds) for kind in dict.fromkeys(own)]
    missing = {frozenset((a, b)): None for a, b in combinations(places, 2) if a[0] != b[0]}
    # Every value of every option within as few rows as the longest option has values.
    rows = [[i % len(own) for own in kinds] for i in range(max(map(len, kinds)))]
    basic = len(rows)
    for row in rows:  # grows as it is read
        met = [(option, kinds[option][at]) for option, at in enumerate(row)]
        for pair in combinations(met, 2):
            missing.pop(frozenset(pair), None)
        if row is rows[-1] and missing:
            rows.append(_next_row(missing, kinds, len(rows)))
    named = [dict(zip(options, row, strict=True)) for row in rows]
    return [{n: options[n][at] for n, at in row.items()} for row in named], basic


def _kinds(name: str, values: Sequence[Any]) -> list[int]:
    """The place of the first value of the same kind, for each value of an option."""

    def kind(value: Any) -> Any:
        # Dtypes of one kind differ only in how a number is loaded, so pairs of kinds are enough.
        is_dtype = name in BY_KIND and isinstance(value, torch.dtype)
        return value.is_floating_point if is_dtype and value != torch.bool else id(value)

    first: dict[Any, int] = {}
    return [first.setdefault(kind(value), at) for at, value in enumerate(values)]


def _next_row(
    missing: Mapping[frozenset[tuple[int, int]], None], kinds: Sequence[Sequence[int]], turn: int
) -> list[int]:
    """A missing pair, and for each other option the value that meets most others anew."""
    chosen = dict(next(iter(missing)))
    for option, own in enumerate(kinds):
        if option not in chosen:
            gains = {
                kind: sum(frozenset(((option, kind), place)) in missing for place in chosen.items())
                for kind in dict.fromkeys(own)
            }
            chosen[option] = max(gains, key=lambda kind: gains[kind])
    row = []
    for option, own in enumerate(kinds):
        alike = [at for at, kind in enumerate(own) if kind == chosen[option]]
        row.append(alike[turn % len(alike)])
    return row
