"""The call objects of all public functions, as one type."""

from __future__ import annotations

from typing import TypeAlias

from klfast.call import PenaltyCall
from klfast.linear.call import LinearCall
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.rollout.call import RolloutCall

Call: TypeAlias = PenaltyCall | TokenLogprobsCall | KLDivergenceCall | LinearCall | RolloutCall
