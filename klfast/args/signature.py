"""The signature table: for each public function a row for each tensor, and the check of a call.

Letters name the dimensions: B sequences of T tokens, or N packed tokens, S sequences (B, or
``len(cu_seqlens) - 1``), vocabulary size V, K token ids per token, hidden size D. ``"B T"`` means
[B, T], packed [N] with ``cu_seqlens``, or [N], which is one sequence. ``"..."`` means any
dimensions of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import (
    CONSTANTS,
    CUMULATE,
    PLAIN,
    check_cu_seqlens,
    check_device,
    check_tensor,
    shape_text,
)
from klfast.types.device import DEVICES
from klfast.types.dtypes import FLOATS, INTEGERS, MASKS


class Argument(NamedTuple):
    """A tensor that a function takes."""

    name: str
    shape: str
    dtypes: tuple[torch.dtype, ...] = FLOATS
    is_optional: bool = False  # True if None is allowed


_MASK = Argument("mask", "B T", MASKS, is_optional=True)
_WEIGHTS = Argument("weights", "B T or B 1 or S", is_optional=True)
_LOGPROBS = Argument("logprobs", "B T")
_LOGITS = Argument("logits", "B T V")
_HIDDEN = Argument("hidden", "B T D")
_ENTRIES = (Argument("ref_token_ids", "B T K", INTEGERS), Argument("ref_logprobs", "B T K"))
_TOKEN_IDS = Argument("token_ids", "B T or B T K", INTEGERS)

SIGNATURES: dict[str, tuple[Argument, ...]] = {
    "kl_penalty": (
        _LOGPROBS,
        Argument("ref_logprobs", "B T"),
        Argument("old_logprobs", "B T", is_optional=True),
        _MASK,
        _WEIGHTS,
    ),
    "kl_rewards": (
        _LOGPROBS,
        Argument("ref_logprobs", "B T"),
        _MASK,
        Argument("scores", "S", MASKS),
    ),
    "reduce": (Argument("values", "B T"), _MASK, _WEIGHTS),
    "data_parallel_normalizer": (_MASK._replace(is_optional=False),),
    "worst_tokens": (
        _LOGPROBS,
        Argument("ref_logprobs", "B T"),
        _MASK,
        Argument("token_ids", "B T", INTEGERS, is_optional=True),
    ),
    "rollout_correction": (
        _LOGPROBS,
        Argument("rollout_logprobs", "B T"),
        _MASK,
        Argument("advantages", "B T or S", is_optional=True),
    ),
    "token_logprobs": (_LOGITS._replace(shape="... V"), _TOKEN_IDS, _MASK),
    "kl_divergence": (
        _LOGITS,
        Argument("ref_logits", "B T V"),
        _MASK,
        Argument("token_ids", "B T", INTEGERS, is_optional=True),
        _WEIGHTS,
    ),
    "topk_kl_divergence": (_LOGITS, *_ENTRIES, _MASK, _WEIGHTS),
    "linear_token_logprobs": (_HIDDEN._replace(shape="... D"), _TOKEN_IDS, _MASK),
    "linear_token_loss": (_HIDDEN, _TOKEN_IDS._replace(shape="B T"), _MASK, _WEIGHTS),
    "linear_kl_divergence": (
        _HIDDEN,
        Argument("ref_hidden", "B T D"),
        _MASK,
        _TOKEN_IDS._replace(is_optional=True),
        _WEIGHTS,
    ),
    "linear_topk_kl_divergence": (_HIDDEN, *_ENTRIES, _MASK, _WEIGHTS),
}
"""The rows of each function. The first has the tokens and the device of the call. Functions over
sequences have ``cu_seqlens`` [S+1] too. ``klfast.args.heads`` checks weights and biases."""


class Tokens(NamedTuple):
    """The tokens of a call, from the argument of its first row. The others are checked with it."""

    function: str
    name: str
    tensor: Tensor
    shape: torch.Size  # the tokens' dimensions
    cu_seqlens: Tensor | None
    # True if the vocabulary is sharded. A shard may be empty.
    of_shard: bool

    @classmethod
    def of(
        cls,
        function: str,
        tensor: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        of_shard: bool = False,
    ) -> Tokens:
        """The tokens of a public function, after the checks of its first row and cu_seqlens."""
        row = _FIRST[function]
        name, letters, dtypes, _ = row
        check_tensor(name, tensor, dtypes)
        shape = tensor.shape
        if letters != "B T":
            _check_last(row, tensor, of_shard)
            shape = shape[:-1]
        if cu_seqlens is not None or (len(shape) not in (1, 2) and letters[0] == "B"):
            _check_layout(row, tensor, len(shape), cu_seqlens)
        return cls(function, name, tensor, shape, cu_seqlens, of_shard)

    def check(self, **tensors: Any) -> None:
        """Raise TypeError or ValueError unless each tensor is what the function's row says."""
        rows, device = _OTHERS[self.function], self.tensor.device
        shapes = {"B T": self.shape, "B T V": self.tensor.shape}
        for name, value in tensors.items():
            row = rows[name]
            if value is None and row.is_optional:
                continue
            # Most tensors pass this one condition. Python's calls, which say what is wrong with the
            # others, took a fifth of the time of a small kl_penalty.
            if not (
                type(value) in PLAIN
                and not value.is_nested  # which may have no shape
                and value.shape == shapes.get(row.shape)
                and value.dtype in row.dtypes
                and value.device == device
                and value.layout == torch.strided
                and not (value.requires_grad and name in CONSTANTS)
            ):
                self._check_row(row, value)

    def _check_row(self, row: Argument, value: object) -> None:
        name, letters, dtypes, _ = row
        tensor = check_tensor(name, value, dtypes)
        if not _fits(letters, tensor.shape, self):
            got = shape_text(tensor) + _remedy(letters, tensor, self)
            raise ValueError(f"{name} must have {_wanted(letters, self)}, got {got}")
        if tensor.device != self.tensor.device:
            check_device(name, tensor, self.tensor, self.name)


_FIRST = {function: rows[0] for function, rows in SIGNATURES.items()}
_OTHERS = {name: {row.name: row for row in rows[1:]} for name, rows in SIGNATURES.items()}


def _check_last(row: Argument, tokens: Tensor, of_shard: bool) -> None:
    """Raise unless the first argument has a last dimension of a vocabulary or of hidden states."""
    name, last = row.name, row.shape[-1]
    least = 0 if of_shard and last == "V" else 1
    if tokens.dim() < 1 or tokens.shape[-1] < least:
        at_least = {"V": " with V >= 1", "D": " with D >= 1"}[last] * least
        raise ValueError(
            f"{name} must have shape [..., {last}]{at_least}, got {shape_text(tokens)}"
        )
    most = DEVICES[tokens.device.type].most_words
    if last == "V" and most is not None and tokens.shape[-1] > most:
        raise ValueError(
            f"{name} must have a vocabulary of at most {most} on a GPU, got {tokens.shape[-1]}"
        )


def _check_layout(row: Argument, tokens: Tensor, dims: int, cu_seqlens: Tensor | None) -> None:
    """Raise unless the first argument has tokens of ``dims`` dimensions, padded or packed."""
    name, last = row.name, "" if row.shape == "B T" else f", {row.shape[-1]}"
    if cu_seqlens is None:
        got = shape_text(tokens) + (_OF_LOGITS if name == "logprobs" else "")
        raise ValueError(f"{name} must have shape [B, T{last}] or [N{last}], got {got}")
    if dims != 1:
        raise ValueError(
            f"{name} must be packed, of shape [N{last}], with cu_seqlens, got {shape_text(tokens)}"
        )
    check_cu_seqlens(cu_seqlens, tokens, of=name)


def _fits(letters: str, own: torch.Size, of: Tokens) -> bool:
    """True if a tensor has the shape of its row. Sizes may be symbols, which have no text."""
    if letters in ("B T K", "B T D"):
        return len(own) > 0 and own[:-1] == of.shape and own[-1] > 0
    if letters == "B T or B T K":
        return own == of.shape or own[:-1] == of.shape
    if letters == "B T V":
        return own == of.tensor.shape
    return any(own == shape for shape in _shapes(letters, of))  # ``in`` is wrong about symbols


def _shapes(letters: str, of: Tokens) -> list[tuple[int, ...]]:
    """The shapes of a number for each token or sequence."""
    sequences = of.shape[:-1] or (1,)
    if of.cu_seqlens is not None:
        sequences = (of.cu_seqlens.shape[0] - 1,)
    shapes: list[tuple[int, ...]] = [] if letters == "S" else [of.shape]
    if letters != "B T":
        shapes.append(sequences)
    if letters == "B T or B 1 or S" and len(of.shape) == 2:
        shapes.append((*sequences, 1))
    return shapes


def _wanted(letters: str, of: Tokens) -> str:
    """The shape of a row in words."""
    with_k = f"[{', '.join(map(str, [*of.shape, 'K']))}]"
    without = {"logits": " without the vocabulary", "hidden": " without the hidden size"}
    text = f"the shape of {of.name}{without.get(of.name, '')}, {list(of.shape)}"
    *_, of_sequence = shapes = [str(list(shape)) for shape in _shapes(letters, of)]
    return {
        "B T": text,
        "S": f"shape {of_sequence}, one per sequence",
        "B T or S": f"{text}, or {of_sequence}, one per sequence",
        "B T or B 1 or S": f"{text}, or, with one for each sequence, {' or '.join(shapes[1:])}",
        "B T or B T K": f"{text}, or K ids per token, {with_k}",
        "B T K": f"the shape {with_k}, with K >= 1 entries per token",
        "B T V": f"the shape of {of.name}, {shape_text(of.tensor)}",
        "B T D": f"shape {with_k[:-2]}D_ref], with the tokens of {of.name}",
    }[letters]


def _remedy(letters: str, value: Tensor, of: Tokens) -> str:
    """The remedy of a likely mistake, after a colon. Other wrong shapes have none."""
    own, rank = list(value.shape), len(of.shape)
    if letters == "S":
        is_lengths = of.cu_seqlens is not None and own == [*of.cu_seqlens.shape]
        return f": {CUMULATE}" if is_lengths else ""
    is_prefix = rank > 0 and len(own) >= rank and own[: rank - 1] == [*of.shape[:-1]]
    if is_prefix and abs(own[rank - 1] - of.shape[-1]) == 1:
        return ": shift by one, as logits[:, :-1] predict ids[:, 1:]"
    if letters == "B T" and own[:-1] == [*of.shape]:
        return _OF_LOGITS
    if letters != "B T V" or own[:-1] != [*of.shape] or of.of_shard:
        return ""
    least = min(own[-1], of.tensor.shape[-1])
    return f": slice both to the common vocabulary, {of.name}[..., :{least}]" if least else ""


_OF_LOGITS = (
    ": klfast.kl_divergence takes logits, and klfast.token_logprobs makes log-probs of logits"
)
