"""The call objects of all public functions, as one type."""

from __future__ import annotations

from typing import TypeAlias

from klfast.call import PenaltyCall
from klfast.logits.call import RowsArgs
from klfast.rollout.call import RolloutCall

Call: TypeAlias = PenaltyCall | RowsArgs | RolloutCall
