"""Backends whose kernels are ops: autograd is shared, the kernels are their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from klfast.args.heads import Hidden
from klfast.args.rollout import RolloutCall
from klfast.args.rows import RowsArgs
from klfast.autograd import hidden as over_hidden
from klfast.autograd import penalty as over_logprobs
from klfast.autograd import rows as over_logits
from klfast.autograd.lse import NATIVE, UnitsOf
from klfast.autograd.shards import over_shards
from klfast.backends.backend import Backend, FirstUse
from klfast.backends.finish import outputs_of, outputs_of_scalar
from klfast.ops.schemas import Ops
from klfast.stats.outputs import Outputs
from klfast.stats.rollout import RolloutCorrection, RolloutStats


def compiled(
    name: str,
    why_not: Callable[[torch.device], str | None],
    ops: Ops,
    *,
    rollout_devices: frozenset[str] = frozenset(),
    checks_in_kernel: frozenset[str] = frozenset(),
    first_use: FirstUse | None = None,
    units_of: UnitsOf = NATIVE,
) -> Backend:
    """The backend of ops that ``klfast.ops.schemas.define`` has defined, with ``Backend``'s fields.

    ``units_of``: the units in which the kernels over logits save log-sum-exps.
    """
    return Backend(
        name,
        why_not,
        partial(over_logprobs.kl_penalty, ops=ops),
        partial(rows, ops=ops, units_of=units_of),
        rollout_correction,
        rollout_devices,
        checks_in_kernel,
        first_use,
    )


def rows(args: RowsArgs, ops: Ops, units_of: UnitsOf = NATIVE) -> Outputs:
    """Compute the outputs of a call over rows, differentiable once."""
    source = args.source
    if args.shards is not None:
        ops = over_shards(ops, args.shards, units_of)
    if isinstance(source, Hidden):
        if over_hidden.is_one_read(args):
            return outputs_of_scalar(args, *over_hidden.one_read(args, source, ops))
        found = over_hidden.rows_of(args, source, ops)
    else:
        if args.divergence is not None and over_logits.is_one_read(args, source):
            return outputs_of_scalar(args, *over_logits.one_read(args, source, ops))
        found = over_logits.rows_of(args, source, ops)
    return outputs_of(args, found, partial(over_logprobs.kl_penalty, ops=ops))


@torch.no_grad()
def rollout_correction(call: RolloutCall) -> RolloutCorrection:
    """Weights, mask and statistics by the extension's op, which has a kernel for the CPU alone."""
    choices, numbers = call.spec.encoded()
    weights, mask, table = torch.ops.klfast.rollout_correction.default(
        call.logprobs,
        call.rollout_logprobs,
        call.mask,
        call.cu_seqlens,
        call.advantages,
        choices,
        numbers,
        *call.spec.encoded_rules(),
    )
    weighs = call.spec.weight != "none"
    return RolloutCorrection(weights if weighs else None, mask, RolloutStats.of_table(table))
