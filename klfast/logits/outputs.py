"""From the divergences of rows to what ``kl_divergence`` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from klfast.call import PenaltyCall
from klfast.logits.call import KLDivergenceCall
from klfast.stats import KLStats, with_tokens_of, without_tokens

Penalty = Callable[[PenaltyCall], tuple[Tensor, KLStats | None]]
KLOutputs = tuple[Tensor, Tensor | None, Tensor | None, KLStats | None, Tensor | None]
"""The divergence, the tokens' log-probs under both models, the statistics, the policy's entropies;
None for what was not asked for."""


class BesideDivergences(NamedTuple):
    """What a backend returns of rows beside their divergences, [R]; None if not asked for."""

    logprobs: Tensor | None = None
    """Of the tokens, under the policy."""
    ref_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    """Of the policy."""


def outputs_of(
    call: KLDivergenceCall,
    reduced: tuple[Tensor, KLStats | None],
    beside: BesideDivergences,
    kl_penalty: Penalty,
) -> KLOutputs:
    """The results in the call's shapes, of the rows' and of the reduced divergence.

    What statistics say of tokens is of those that were taken, and NaN where they are not known.
    """
    result, stats = reduced
    logprobs, ref_logprobs, entropies = (
        None if rows is None else rows.view(call.shape) for rows in beside
    )
    if logprobs is None or ref_logprobs is None:
        return result, None, None, stats and without_tokens(stats), entropies
    if stats is not None:
        _, taken = kl_penalty(call.compare_tokens(logprobs, ref_logprobs))
        stats = taken and with_tokens_of(stats, taken)
    return result, logprobs, ref_logprobs, stats, entropies
