"""vLLM's ``prompt_logprobs`` as the tensors that ``topk_kl_divergence`` takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from klfast.args.checks import check_integer, shown

__all__ = ["topk_logprobs"]

MINUS_INFINITY = -9999.0
"""vLLM's server writes -inf as this number (``clamp_prompt_logprobs``), as JSON has no infinity."""

Position = Mapping[Any, Any] | None
"""One position of a request, as token id -> ``Logprob``. None or empty for the first."""


def topk_logprobs(
    prompt_logprobs: Sequence[Sequence[Position]],
    k: int,
    *,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The K most likely tokens of a teacher that vLLM serves, shifted to the student's logits.

    vLLM stores at position t the log-probs of token t given the tokens before it. A model's logits
    at position t predict token t + 1. Entry t of the result therefore comes from position t + 1 of
    the list. vLLM's first position has no log-probs, and the last logits have no teacher. Their
    entry in the mask is 0.

    Example::

        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=20))
        lists = [output.prompt_logprobs for output in outputs]
        ids, ref_logprobs, mask = klfast.compat.vllm.topk_logprobs(lists, 20)
        klfast.topk_kl_divergence(model(tokens).logits, ids, ref_logprobs, mask & completion_mask)

    A position has K entries, or K + 1 if the prompt's own token is not among the K. The K with the
    highest log-probs are kept, the highest first. Missing entries have a log-prob of -inf. So have
    entries of -9999.0 or less, because vLLM's server writes -inf as -9999.0. The server must return
    log-probs of its raw logits at the student's temperature (``--logprobs-mode raw_logprobs``).

    Args:
        prompt_logprobs: a list per request, of a dict per position: token id -> vLLM's ``Logprob``,
            a dict with the key ``"logprob"`` (as the server's JSON has it) or a number, in nats.
            A token id is an integer, or a text such as ``"5"`` or ``"token_id:5"``.
        k: how many tokens to keep per position, >= 1.
        device: the device of the results. None is the CPU.

    Returns:
        ``(ref_token_ids, ref_logprobs, mask)``: int64 [B, T, K], fp32 [B, T, K] and bool [B, T].
        T is the longest request's number of tokens.

    Raises:
        TypeError: the list, a request, a position, an entry or a token id is of another type.
        ValueError: ``k`` is less than 1, or a position after the first has no entry or a token id
            twice. A token id is negative or beyond int64. A log-prob is NaN or inf.
    """
    check_integer("k", k, "an integer >= 1", least=1)
    if not isinstance(prompt_logprobs, Sequence):
        raise TypeError(
            f"prompt_logprobs must be a list of requests, got {type(prompt_logprobs).__name__}"
        )
    requests = [_best(b, positions, k) for b, positions in enumerate(prompt_logprobs)]
    lengths = [len(positions) for positions in prompt_logprobs]
    shape = (len(requests), max(lengths, default=0))
    absent = [(0, -torch.inf)] * k
    rows = [row for best in requests for row in best + [absent] * (shape[1] - len(best))]
    ids = torch.tensor([[entry[0] for entry in row] for row in rows], dtype=torch.int64)
    logprobs = torch.tensor([[entry[1] for entry in row] for row in rows], dtype=torch.float32)
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None] - 1
    return ids.view(*shape, k).to(device), logprobs.view(*shape, k).to(device), mask.to(device)


def _best(b: int, positions: Sequence[Position], k: int) -> list[list[tuple[int, float]]]:
    """The K best entries of each position after the first; an entry of -inf where there is none."""
    if not isinstance(positions, Sequence):
        raise TypeError(
            f"prompt_logprobs[{b}] must be a list of positions, got {type(positions).__name__}: "
            "ask vLLM for them by SamplingParams(prompt_logprobs=k)"
        )
    best = []
    for t, entries in enumerate(islice(positions, 1, None), 1):
        found = _entries(f"prompt_logprobs[{b}][{t}]", entries)
        found = sorted(found, key=lambda entry: -entry[1])[:k]
        best.append(found + [(0, -torch.inf)] * (k - len(found)))
    return best


def _entries(where: str, entries: Position) -> list[tuple[int, float]]:
    """The (token id, log-prob) of a position."""
    if not isinstance(entries, Mapping):
        raise TypeError(f"{where} must be a dict from token id to Logprob, got {shown(entries)}")
    if not entries:
        raise ValueError(f"{where} must have an entry, got an empty dict")
    found = [(_token_id(where, key), _logprob(where, key, each)) for key, each in entries.items()]
    if len(dict(found)) < len(found):
        raise ValueError(f"{where} must have each token id once, got the keys {[*entries]}")
    return found


def _token_id(where: str, key: Any) -> int:
    """A key's token id. A server writes 5 as "5", or as "token_id:5"."""
    if type(key) is int and 0 <= key < 2**63:  # most often; a batch has millions of them
        return key
    number = _ID.fullmatch(key) if isinstance(key, str) else None
    wanted = "a token id >= 0"
    if isinstance(key, str) and number is None:
        wanted += ", which a server writes with return_tokens_as_token_ids"
    value = key if number is None else int(number[1])
    return check_integer(f"a key of {where}", value, wanted, least=0)


_ID = re.compile("(?:token_id:)?([0-9]{1,19})")


def _logprob(where: str, key: Any, entry: Any) -> float:
    number = entry.get("logprob") if isinstance(entry, Mapping) else entry
    number = getattr(number, "logprob", number)
    if isinstance(number, bool) or not isinstance(number, (float, Real)):
        raise TypeError(f"{where}[{key!r}] must be a Logprob or a number, got {shown(entry)}")
    value = float(number)
    if not value < torch.inf:
        raise ValueError(f"{where}[{key!r}] must be a log-prob, below inf, got {shown(number)}")
    return value if value > MINUS_INFINITY else -torch.inf
