"""vLLM's log-probs as the tensors that ``topk_kl_divergence`` and ``rollout_correction`` take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import check_integer, shown

__all__ = ["sample_logprobs", "topk_logprobs"]

# vLLM's server writes -inf as this number (``clamp_prompt_logprobs``), as JSON has no infinity.
MINUS_INFINITY = -9999.0

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
            A token id is an integer, or a text such as ``"5"`` or ``"token_id:5"``. A request may
            also be vLLM's ``FlatLogprobs`` or ``ArrayLogprobs``.
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
    tables = _tables(prompt_logprobs, "prompt_logprobs", "prompt_logprobs=k", first=1)
    sizes = len(tables), max((len(t.counts) for t in tables), default=0)
    (ids, logprobs), mask = _absent(*sizes, k), torch.zeros(sizes, dtype=torch.bool)
    for b, table in enumerate(tables):
        length = max(0, len(table.counts) - 1)
        ids[b, :length], logprobs[b, :length] = table.best(k, first=1)
        mask[b, :length] = True
    return ids.to(device), logprobs.to(device), mask.to(device)


def sample_logprobs(
    outputs: Sequence[Any], k: int = 0, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sampled tokens of vLLM's outputs with their log-probs, and the K most likely tokens.

    Entry t of a result belongs to the completion's token t. The log-probs are ``rollout_logprobs``
    of :func:`klfast.rollout_correction` if the server has ``--logprobs-mode processed_logprobs``.

    Example::

        outputs = llm.generate(prompts, SamplingParams(n=4, logprobs=0))
        token_ids, rollout_logprobs, _, _, mask = klfast.compat.vllm.sample_logprobs(outputs)

    Args:
        outputs: what ``llm.generate`` returns, its completions, or their ``logprobs``. These are
            vLLM's lists of dicts, as in :func:`topk_logprobs`, its ``FlatLogprobs`` or its
            ``ArrayLogprobs``. A completion's ``token_ids`` name the sampled tokens. Without them,
            the first entries do. The last two are read without a loop over positions.
        k: how many of the most likely tokens to return per position, >= 0. Missing entries have a
            log-prob of -inf.
        device: the device of the results. None is the CPU.

    Returns:
        ``(token_ids, logprobs, top_ids, top_logprobs, mask)``: int64 and fp32 [B, T], the same
        [B, T, K], and bool [B, T]. B counts all completions, and T is the longest one's length.

    Raises:
        TypeError, ValueError: as :func:`topk_logprobs`. A token id of a completion has no entry in
            its ``logprobs``.
    """
    check_integer("k", k, "an integer >= 0", least=0)
    lists, sampled = [], []
    for b, output in enumerate(_checked(outputs, "outputs")):
        for each in output.outputs if hasattr(output, "outputs") else [output]:
            # A completion has ``logprobs``, and so has ``FlatLogprobs``, which has
            # ``start_indices`` too.
            is_list = hasattr(each, "start_indices") or not hasattr(each, "logprobs")
            lists.append(each if is_list else each.logprobs)
            sampled.append((b, None if is_list else each.token_ids))
    tables = _tables(lists, "logprobs", "logprobs=k")
    sizes = len(tables), max((len(t.counts) for t in tables), default=0)
    (ids, logprobs), (top_ids, top_logprobs) = _absent(*sizes), _absent(*sizes, k)
    mask = torch.zeros(sizes, dtype=torch.bool)
    for row, (table, (b, token_ids)) in enumerate(zip(tables, sampled, strict=True)):
        length = len(table.counts)
        if not length:
            continue
        places = table.places_of(f"outputs[{b}]", token_ids)
        for out, values in ((ids, table.ids), (logprobs, table.logprobs)):
            out[row, :length] = values.gather(-1, places)[:, 0]
        top_ids[row, :length], top_logprobs[row, :length] = table.best(k)
        mask[row, :length] = True
    found = ids, logprobs, top_ids, top_logprobs, mask
    return tuple([each.to(device) for each in found])  # type: ignore[return-value]


def _absent(*shape: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of no entry."""
    return torch.zeros(shape, dtype=torch.int64), torch.full(shape, -torch.inf, dtype=torch.float32)


class _Table(NamedTuple):
    """The entries of T positions, of which the widest has S. vLLM's ``FlatLogprobs`` and
    ``ArrayLogprobs`` have a position's own token first, and repeat it among the most likely ones.
    """

    ids: Tensor  # [T, S], int64
    logprobs: Tensor  # [T, S], fp32; -inf where there is no entry
    counts: Tensor  # [T], how many entries there are

    def exist(self) -> Tensor:
        """The entries that there are, [T, S]."""
        return torch.arange(self.ids.shape[1]) < self.counts[:, None]

    def places_of(self, where: str, token_ids: Sequence[int] | None) -> Tensor:
        """The places of each position's own token, [T, 1]."""
        length = len(self.counts)
        if token_ids is None:
            return torch.zeros(length, 1, dtype=torch.int64)
        if len(token_ids) != length:
            raise ValueError(
                f"{where} must have logprobs of each of its {len(token_ids)} token_ids, got those "
                f"of {length} positions"
            )
        is_own = (self.ids == torch.tensor([*token_ids])[:, None]) & self.exist()
        missing = (~is_own.any(-1)).nonzero()[:, 0].tolist()
        if missing:
            raise ValueError(
                f"{where} must have logprobs of its token_ids, got none of token id "
                f"{token_ids[missing[0]]} at position {missing[0]}"
            )
        return is_own.int().argmax(-1, keepdim=True)  # the first, if an own token is there twice

    def best(self, k: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """The K best entries of the positions from ``first``, [T - first, K]."""
        ids, logprobs, exist = self.ids[first:], self.logprobs[first:].clone(), self.exist()[first:]
        # A position's own token is there twice if it is among the most likely ones.
        repeated = ((ids[:, 1:] == ids[:, :1]) & exist[:, 1:]).any(-1, keepdim=True)
        logprobs[:, :1] = torch.where(repeated, -torch.inf, logprobs[:, :1])
        # Stable, so that entries of one log-prob keep vLLM's order.
        best = logprobs.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        found = _absent(len(ids), k)
        for out, values in zip(found, (ids, logprobs), strict=True):
            out[:, : best.shape[1]] = values.gather(-1, best)
        return found


def _checked(requests: Any, name: str) -> Sequence[Any]:
    if not isinstance(requests, Sequence):
        raise TypeError(f"{name} must be a list of requests, got {type(requests).__name__}")
    return requests


def _tables(requests: Any, name: str, option: str, first: int = 0) -> list[_Table]:
    """The checked entries of every request's positions; those before ``first`` have none."""
    tables = []
    for b, positions in enumerate(_checked(requests, name)):
        where = f"{name}[{b}]"
        if not isinstance(positions, Sequence):
            raise TypeError(
                f"{where} must be a list of positions, got {type(positions).__name__}: "
                f"ask vLLM for them by SamplingParams({option})"
            )
        table = _table(where, positions, first)
        _check_table(where, table, first)
        small = table.logprobs <= MINUS_INFINITY
        tables.append(table._replace(logprobs=table.logprobs.masked_fill(small, -torch.inf)))
    return tables


def _table(where: str, positions: Any, first: int) -> _Table:
    # All positions of it have as many entries, so that no loop is needed.
    if hasattr(positions, "arrays") and getattr(positions, "is_regular", True):
        ids, logprobs, _ = map(torch.tensor, positions.arrays())
        counts = torch.full((len(ids),), ids.shape[1])
        return _Table(ids.long(), logprobs.float(), counts)
    if hasattr(positions, "start_indices"):
        edges = [torch.tensor(e).long() for e in (positions.start_indices, positions.end_indices)]
        ids, logprobs = (
            torch.tensor(positions.token_ids).long(),
            torch.tensor(positions.logprobs, dtype=torch.float32),
        )
        counts = edges[1] - edges[0]
    else:
        rows = [_entries(f"{where}[{t}]", each) for t, each in enumerate(positions) if t >= first]
        counts = torch.tensor([0] * min(first, len(positions)) + [*map(len, rows)]).long()
        flat = [entry for row in rows for entry in row]
        ids = torch.tensor([entry[0] for entry in flat]).long()
        logprobs = torch.tensor([entry[1] for entry in flat], dtype=torch.float32)
        edges = [counts.cumsum(0) - counts]
    own = torch.arange(int(counts.max()) if len(counts) else 0)
    exist = own < counts[:, None]
    at = torch.where(exist, edges[0][:, None] + own, 0)
    return _Table(
        torch.where(exist, ids[at], 0) if len(ids) else at,
        torch.where(exist, logprobs[at].float(), -torch.inf) if len(ids) else at.float(),
        counts,
    )


def _check_table(where: str, table: _Table, first: int) -> None:
    """Raise ValueError for a position without an entry, an id < 0, and a log-prob of NaN or inf."""
    exist, empty = table.exist(), table.counts == 0
    empty[:first] = False
    faults = {
        "have an entry, got none": empty,
        "have token ids >= 0": (exist & (table.ids < 0)).any(-1),
        "have log-probs below inf": (exist & ~(table.logprobs < torch.inf)).any(-1),
    }
    for wanted, bad in faults.items():
        if bad.any():
            raise ValueError(f"{where}[{int(bad.nonzero()[0])}] must {wanted}")


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
