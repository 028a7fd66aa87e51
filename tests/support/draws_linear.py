"""Calls from hidden states: rows of options in which any two values meet, with random tensors."""

import torch
from oracle_linear import Call

from klfast.cli.check.cases import covering
from klfast.types.names import DIRECTIONS
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

LEAVES = {
    "frozen": ("hidden",),
    "weight": ("hidden", "weight"),
    "policy": ("hidden", "weight", "bias"),
    "all": ("hidden", "weight", "bias", "ref_hidden", "ref_weight", "ref_bias"),
    "hidden of both": ("hidden", "ref_hidden"),
    "bias": ("bias",),
    "reference": ("ref_hidden", "ref_weight", "ref_bias"),
    "nothing": (),
}
OPTIONS = {
    "leaves": (*LEAVES,),
    "dtypes": (
        *(
            (dtype, dtype)
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        ),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ),
    "form": ("padded", "packed", "one", "empty"),
    "mask": ("none", "bool", "weights", "nothing kept"),
    "ids": (None, "one", "K"),
    "words": (37, 1030),
    "head": ("own", "other width", "shared"),
    "bias": (False, True),
    "softcap": (None, 3.0, (2.0, None), (None, 4.0)),
    "temperature": (1.0, 0.7, "0-dim", "per token"),
    "return_entropy": (False, True),
    "chunk": ("auto", 1, 4, 100),
}
OF_DIVERGENCES = OPTIONS | {
    "direction": DIRECTIONS,
    "reduction": (*REDUCTIONS,),
    "normalizer": (None, 7.5),
    "coef": (1.0, -0.4),
    "return_stats": (False, True),
}
WIDTH, OTHER_WIDTH = 8, 6


def rows(options):
    return covering(options)[0]


def name_of(row):
    return "-".join(str(value).replace("torch.", "") for value in row.values())


def _random(*shape, dtype, scale=1.0):
    return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype)


def _tokens(form):
    """(shape of the tokens, cu_seqlens or None)."""
    if form == "packed":
        return (10,), torch.tensor([0, 3, 3, 10])
    return {"padded": (2, 5), "one": (7,), "empty": (2, 0)}[form], None


def _mask(kind, shape):
    if kind == "none":
        return None
    mask = torch.rand(shape) < (0 if kind == "nothing kept" else 0.6)
    return mask if kind != "weights" else mask * torch.rand(shape)


def _ids(kind, shape, words):
    """Of K ids, the last is the first again."""
    if kind is None:
        return None
    ids = torch.randint(words, (*shape, 3) if kind == "K" else shape)
    if kind == "K" and ids.numel():
        ids[..., 2] = ids[..., 0]
    return ids


def call_of(row, reference=True):
    """The call of a row, whose masked tokens hold what no number may come from."""
    shape, cu_seqlens = _tokens(row["form"])
    of_hidden, of_weight = row["dtypes"]
    words, head = row["words"], row["head"]
    width = OTHER_WIDTH if head == "other width" else WIDTH
    bias = lambda: _random(words, dtype=of_weight) if row["bias"] else None  # noqa: E731
    tensors = {
        "hidden": _random(*shape, WIDTH, dtype=of_hidden),
        "weight": _random(words, WIDTH, dtype=of_weight),
        "bias": bias(),
    }
    if reference:
        tensors |= {
            "ref_hidden": _random(*shape, width, dtype=of_hidden),
            "ref_weight": None if head == "shared" else _random(words, width, dtype=of_weight),
            "ref_bias": None if head == "shared" else bias(),
        }
    mask = _mask(row["mask"], shape)
    if mask is not None:
        tensors["hidden"][mask == 0] = torch.nan
        if reference:
            tensors["ref_hidden"][mask == 0] = torch.inf
    own = ("return_entropy", "chunk", *(("direction", "reduction", "coef") if reference else ()))
    options = {name: row[name] for name in own}
    temperature = row["temperature"]
    if isinstance(temperature, str):
        temperature = torch.rand(shape if temperature == "per token" else ()) + 0.5
    options["temperature"] = temperature
    softcap = row["softcap"]
    options["softcap"] = softcap if reference or not isinstance(softcap, tuple) else softcap[0]
    if reference and cu_seqlens is not None:
        options["cu_seqlens"] = cu_seqlens
    if reference and row["reduction"] in NORMALIZED_REDUCTIONS:
        options["normalizer"] = row["normalizer"]
    leaves = tuple(name for name in LEAVES[row["leaves"]] if tensors.get(name) is not None)
    ids = _ids(row["ids"] if reference else row["ids"] or "one", shape, words)
    if ids is not None and mask is not None:  # no word, where none is looked for
        kept = mask != 0
        ids = torch.where(kept[..., None] if ids.dim() > len(shape) else kept, ids, -100)
    return Call(tensors, options, leaves, mask, ids)
