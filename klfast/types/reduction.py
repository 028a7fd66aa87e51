"""The table of reductions of per-token values, which all other code reads."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from klfast.types.names import ReductionName

RESULTS = ("token", "sequence", "scalar")
DENOMINATORS = ("one", "tokens", "sequences")

EncodedReduction = tuple[int, int, int]
"""(result, own_length, over): a reduction as the ops take it."""


class Reduction(NamedTuple):
    """The result of a reduction, and its denominator.

    ``sum_s`` is the sum of the weighted values of sequence s, and ``length_s`` the sum of its mask.
    A sequence counts ``sum_s`` or, with ``own_length``, ``sum_s / length_s``. A scalar is the sum
    of these over the sequences, divided by 1, by the sum of all masks (``tokens``) or by the number
    of sequences that keep a token (``sequences``). ``normalizer`` replaces the last two.
    """

    result: Literal["token", "sequence", "scalar"]
    own_length: bool
    over: Literal["one", "tokens", "sequences"]

    def is_scalar(self) -> bool:
        return self.result == "scalar"

    def encoded(self) -> EncodedReduction:
        """The reduction as the ops take it: positions in ``RESULTS`` and ``DENOMINATORS``."""
        return RESULTS.index(self.result), int(self.own_length), DENOMINATORS.index(self.over)

    def denominator_terms(self, length: Tensor) -> Tensor:
        """One term per sequence of these lengths. The terms sum to the denominator of the mean."""
        return {"tokens": length, "sequences": length > 0}[self.over]


REDUCTIONS: dict[str, Reduction] = {
    "none": Reduction("token", False, "one"),
    "seq-sum": Reduction("sequence", False, "one"),
    "seq-mean": Reduction("sequence", True, "one"),
    "token-sum": Reduction("scalar", False, "one"),
    "token-mean": Reduction("scalar", False, "tokens"),
    "seq-mean-token-sum": Reduction("scalar", False, "sequences"),
    "seq-mean-token-mean": Reduction("scalar", True, "sequences"),
}
"""The reduction of every name in ``klfast.types.names.ReductionName``."""
# A look-up takes a third of the time. Not every dynamo may trace one by a named tuple.
ENCODED = {reduction: reduction.encoded() for reduction in REDUCTIONS.values()}
NORMALIZED_REDUCTIONS = tuple(name for name, r in REDUCTIONS.items() if r.over != "one")
"""Scalar means, whose outer denominator ``normalizer`` replaces."""
TOKENWISE_REDUCTIONS = tuple(
    name
    for name, r in REDUCTIONS.items()
    if r.result != "sequence" and not r.own_length and r.over in ("one", "tokens")
)
"""Reductions that do not need each token's sequence."""
TORCHS_REDUCTIONS: dict[str, ReductionName] = {
    "mean": "token-mean",
    "sum": "token-sum",
    "batchmean": "seq-mean-token-sum",
}
"""The names that torch's losses have for reductions."""
FRAMEWORKS_REDUCTIONS = {
    # verl's loss_agg_mode; T is its loss_scale_factor, by default the padded length.
    "seq-mean-token-sum-norm": "reduction='seq-mean-token-sum', coef=1/T",
    # TRL's loss_type: L is max_completion_length, N the number of tokens of the whole batch.
    "grpo": "reduction='seq-mean-token-mean'",
    "bnpo": "reduction='token-mean'",
    "dapo": "reduction='token-mean', normalizer=N",
    "dr_grpo": "reduction='seq-mean-token-sum', coef=1/L",
}
"""The frameworks' names -> klfast's options with the same result."""
