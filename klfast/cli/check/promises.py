"""Promises that need no truth: a sequence's bits, and signs near 0.

Only backends with their own kernels promise bits. The reference uses torch's kernels over logits,
whose bits change with a token's place. It converts log-probs first, so one dtype of them is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import klfast
from klfast.cli.check.calls import Call, Tensors, run
from klfast.cli.check.cases import Draw
from klfast.cli.check.compare import Wrong
from klfast.types.names import DIRECTIONS, NAMES

LENGTHS, ROWS = (1, 63, 65, 16_500, 1025), (3, 1, 6)
"""Tokens of sequences, one longer than a kernel's segments, and of those with logits."""

Sequences = list[Tensors]

_RICH = klfast.Estimator("k3", importance_cap=1.2, log_ratio_clip=2.0, linear_tail=1.0, kl_clip=2.0)
_RULES = (klfast.Rejection("k3", "seq-mean", high=0.6), klfast.Rejection("ratio", low=0.2))
_ALL = {"reduction": "seq-sum", "return_stats": True}
_MODELS, _LOGITS = ("logprobs", "ref_logprobs"), ("logits", "ref_logits", "token_ids")

SUBJECTS: tuple[tuple[str, str, tuple[str, ...], dict[str, Any]], ...] = (
    ("penalty", "kl_penalty", _MODELS, _ALL),
    ("penalty", "kl_penalty", _MODELS, {"estimator": "k3+"}),
    ("penalty", "kl_penalty", (*_MODELS, "old_logprobs"), _ALL | {"estimator": _RICH}),
    ("rewards", "kl_rewards", (*_MODELS, "scores"), {"kl_coef": 0.1}),
    (
        *("rollout", "rollout_correction", ("logprobs", "rollout_logprobs")),
        {"weight": "sequence", "reject": _RULES},
    ),
    ("token log-probs", "token_logprobs", ("logits", "token_ids"), {"return_entropy": True}),
    *(
        (
            "divergences",
            "kl_divergence",
            _LOGITS,
            _ALL | {"return_entropy": True, "direction": name},
        )
        for name in DIRECTIONS
    ),
)
"""Families, their functions, the tensors of calls, and options."""

Promise = tuple[str, str, Callable[[], list[Wrong]]]
"""A family, a case, and what says how it is broken."""


def promises(backend: str, device: torch.device) -> Iterator[Promise]:
    """All that a backend promises on a device."""
    for number, (family, function, names, options) in enumerate(SUBJECTS):
        if "logits" in names and backend == "reference":
            continue  # torch adds up its rows, in an order of its own
        # Rewards have no gradient, and ids cannot have one.
        leaves = tuple(n for n in names[:2] if function != "kl_rewards" and n != "token_ids")
        of = Call(function, {}, options, leaves)
        for dtype in (torch.float32, torch.bfloat16)[: 1 if backend == "reference" else 2]:
            sequences = _sequences(names, dtype, Draw(number))
            name = f"same bits, {function} {str(dtype).removeprefix('torch.')}"
            yield family, name, partial(_other_bits, of, sequences, backend, device)
    for name in NAMES:
        yield "penalty", f"sign, {name}", partial(_wrong_signs, name, backend, device)
    for direction in DIRECTIONS:
        check = partial(_wrong_signs_of_divergences, direction, backend, device)
        yield "divergences", f"sign, {direction}", check


def _sequences(names: tuple[str, ...], dtype: torch.dtype, draw: Draw) -> Sequences:
    """The tensors of each sequence, with logits over 2,500 token ids."""
    made = []
    for length in ROWS if "logits" in names else LENGTHS:
        if "logits" in names:
            common = draw.bell(length, 2500)
            apart = common + 0.5 * draw.bell(length, 2500)
            values = {"logits": common.to(dtype), "ref_logits": apart.to(dtype)}
            values["token_ids"] = torch.floor(2500 * draw.uniform(length)).long()
        else:
            first = -4 * draw.uniform(length) - 0.01
            values = {name: (first - 0.5 * draw.bell(length)).to(dtype) for name in names}
        if "scores" in names:
            values["scores"] = draw.bell(1).to(dtype)
        made.append({name: values[name] for name in names})
    return made


def _other_bits(of: Call, sequences: Sequences, backend: str, device: torch.device) -> list[Wrong]:
    """The differences from the padded batch in other arrangements of the sequences."""
    threads = torch.get_num_threads()
    expected: Tensor | None = None
    for name, arrange in ARRANGEMENTS.items():
        torch.set_num_threads(4 if name == "with four threads" else threads)
        try:
            parts = arrange(of, sequences, lambda call: run(call, backend, device, 1.0))
        finally:
            torch.set_num_threads(threads)
        found = {f"{n} of sequence {s}": t for s, part in enumerate(parts) for n, t in part.items()}
        # In one tensor, so that a GPU is waited for once per arrangement.
        bits = torch.cat([_bits(t) for t in found.values()]).cpu()
        # The first arrangement is the measure of all others.
        if expected is None:
            expected = bits
        elif not torch.equal(bits, expected):
            at = int((bits != expected).nonzero()[0])
            ends = torch.tensor([t.numel() for t in found.values()], device="cpu").cumsum(0)
            output = list(found)[int(torch.searchsorted(ends, at, right=True))]
            got, wanted = (f"bits {int(t[at]):#x}" for t in (bits, expected))
            return [Wrong(f"{output}, {name}", got, wanted, "-", "0")]
    return []


def _bits(tensor: Tensor) -> Tensor:
    """As integers: NaN equals itself, and -0 is not 0."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.contiguous().flatten()
    return (flat if flat.dtype == torch.bool else flat.view(sizes[flat.element_size()])).long()


Result = Callable[[Call], Tensors]


def _padded(of: Call, sequences: Sequences, result: Result, extra: int = 0) -> list[Tensors]:
    """As one padded batch, with NaN behind each sequence; ``extra`` columns more than needed."""
    lengths = [len(next(iter(sequence.values()))) for sequence in sequences]
    width = max(lengths) + extra

    def wide(tensor: Tensor) -> Tensor:
        fill = math.nan if tensor.is_floating_point() else 0
        # NaN behind a sequence shows in its results if anything reads it.
        shape = (width - len(tensor), *tensor.shape[1:])
        return torch.cat([tensor, tensor.new_full(shape, fill)])

    tensors = {
        name: torch.stack([s[name] if name == "scores" else wide(s[name]) for s in sequences])
        for name in sequences[0]
    }
    if "scores" in tensors:
        tensors["scores"] = tensors["scores"][:, 0]
    place = torch.arange(width, device="cpu")
    tensors["mask"] = place < torch.tensor(lengths, device="cpu")[:, None]
    found = result(replace(of, tensors=tensors))
    return [
        {name: t[row, :length] if t.dim() > 1 else t[row] for name, t in found.items()}
        for row, length in enumerate(lengths)
    ]


def _packed(of: Call, sequences: Sequences, result: Result) -> list[Tensors]:
    """One behind the other, without a mask."""
    tensors = {name: torch.cat([s[name] for s in sequences]) for name in sequences[0]}
    edges = [0]
    for sequence in sequences:
        edges.append(edges[-1] + len(next(iter(sequence.values()))))
    if of.function != "token_logprobs":
        tensors["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32, device="cpu")
    found = result(replace(of, tensors=tensors))
    return [
        {
            name: t[edges[s] : edges[s + 1]] if len(t) == edges[-1] else t[s]
            for name, t in found.items()
        }
        for s in range(len(sequences))
    ]


ARRANGEMENTS: dict[str, Callable[[Call, Sequences, Result], list[Tensors]]] = {
    "in a padded batch": _padded,
    "run again": _padded,
    "with four threads": _padded,
    "with more padding": lambda of, sequences, result: _padded(of, sequences, result, 77),
    "in reverse order": lambda of, sequences, result: _padded(of, sequences[::-1], result)[::-1],
    "packed": _packed,
    "alone": lambda of, sequences, result: [_packed(of, [s], result)[0] for s in sequences],
}


def _wrong_signs(name: str, backend: str, device: torch.device) -> list[Wrong]:
    """An estimate that is positive on both sides of 0 is never negative; every one is 0 at 0."""
    # Down to sizes where a difference of rounded numbers would have no digits.
    sizes = 10.0 ** -torch.arange(-1, 13, dtype=torch.float64, device="cpu")
    x = torch.cat([sizes.new_zeros(1), sizes, -sizes]).float()
    tensors = {"logprobs": x, "ref_logprobs": torch.zeros_like(x)}
    call = Call("kl_penalty", tensors, {"estimator": name}, ("logprobs",))
    positive = bool((run(call, "reference")["penalty"][[1, -len(sizes)]] > 0).all())
    return _wrong_near_0(run(call, backend, device)["penalty"], positive)


def _wrong_signs_of_divergences(direction: str, backend: str, device: torch.device) -> list[Wrong]:
    """A divergence is never negative, and 0 of equals."""
    logits = Draw(0).bell(5, 2500).float()
    apart = 1 + torch.tensor([0.0, 1e-6, 1e-5, 1e-4, 1e-3], device="cpu")[:, None]
    tensors = {"logits": logits, "ref_logits": logits * apart}
    call = Call("kl_divergence", tensors, {"direction": direction}, ())
    return _wrong_near_0(run(call, backend, device)["kl"], True)


def _wrong_near_0(found: Tensor, positive: bool) -> list[Wrong]:
    """The faults of numbers of which the first must be 0, and none negative if ``positive``."""
    at_0, *others = found.tolist()
    wrong = [Wrong("at 0", f"{at_0:.9g}", "0", f"{abs(at_0):.9g}", "0")] if at_0 != 0 else []
    if positive and not min(others) >= 0:
        wrong.append(Wrong("near 0", f"{min(others):.9g}", ">= 0", f"{-min(others):.9g}", "0"))
    return wrong
