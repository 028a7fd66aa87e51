"""The call objects of all public functions, as one type."""

from __future__ import annotations

from typing import TypeAlias

from klfast.args.penalty import PenaltyCall
from klfast.args.rollout import RolloutCall
from klfast.args.rows import RowsArgs

Call: TypeAlias = PenaltyCall | RowsArgs | RolloutCall
