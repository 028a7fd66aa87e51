"""From the divergences of rows to what ``kl_divergence`` returns."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from klfast.call import PenaltyCall
from klfast.logits.call import KLDivergenceCall
from klfast.stats import KLStats, with_tokens_of, without_tokens

Penalty = Callable[[PenaltyCall], tuple[Tensor, KLStats | None]]
KLOutputs = tuple[Tensor, Tensor | None, Tensor | None, KLStats | None]


def outputs_of(
    call: KLDivergenceCall,
    reduced: tuple[Tensor, KLStats | None],
    logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    kl_penalty: Penalty,
) -> KLOutputs:
    """The divergence, the tokens' log-probs under both models, and the statistics.

    What statistics say of tokens is of those that were taken, and NaN where they are not known.
    """
    result, stats = reduced
    if call.token_ids is None or logprobs is None or ref_logprobs is None:
        return result, None, None, stats and without_tokens(stats)
    logprobs, ref_logprobs = logprobs.view(call.shape), ref_logprobs.view(call.shape)
    if stats is not None:
        _, taken = kl_penalty(call.compare_tokens(logprobs, ref_logprobs))
        stats = taken and with_tokens_of(stats, taken)
    return result, logprobs, ref_logprobs, stats
