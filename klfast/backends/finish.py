"""Finishes a call over rows: from the values of each token to the outputs in the call's shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from klfast.args.logits import NO_ID
from klfast.args.penalty import PenaltyCall
from klfast.args.rows import Rows, RowsArgs
from klfast.formulas.topk import divergence_of_entries
from klfast.stats.kl import KLStats, with_tokens_of, without_tokens
from klfast.stats.outputs import Outputs
from klfast.types.dtypes import wide


def outputs_of(
    args: RowsArgs, rows: Rows, kl_penalty: Callable[[PenaltyCall], tuple[Tensor, KLStats | None]]
) -> Outputs:
    """The outputs in the call's shapes, from the computed values of each token.

    A first step reduces the divergences. A second step computes the statistics of the sampled
    tokens, which are NaN if the tokens are not known.
    """
    if args.teacher is not None:
        assert rows.logprobs is not None
        rows = Rows(_divergence_of_teacher(args, rows.logprobs))
    elif args.rounds_logprobs:
        first, second = (None if x is None else x.to(args.dtype) for x in rows[1:3])
        rows = rows._replace(logprobs=first, second_logprobs=second)
    if rows.kl is None:
        return _shaped(args, rows, None, None)
    result, stats = kl_penalty(args.reduction_call(rows.kl))
    if stats is not None:
        call = args.compare_tokens(rows)
        taken = None if call is None else kl_penalty(call)[1]
        stats = without_tokens(stats) if taken is None else with_tokens_of(stats, taken)
    return _shaped(args, rows, result, stats)


def _divergence_of_teacher(args: RowsArgs, logprobs: Tensor) -> Tensor:
    """[R] divergences from the teacher, from the student's log-probs [R, K]."""
    assert args.teacher is not None
    _, _, teacher, direction, parameter, tail = args.teacher
    exist = args.teacher.token_ids != NO_ID
    if args.keep is not None:
        exist = exist & args.keep[:, None]
    if tail == "renormalize":  # the teacher's tail at this temperature is not known
        inverse = args.inverse_temperature
        if inverse is None:
            teacher = teacher / args.temperature
        else:
            teacher = teacher * (inverse if inverse.dim() == 0 else inverse[:, None])
    student = wide(logprobs.view(exist.shape))
    if args.reduced is not None and args.reduced.weights is not None:
        # A gradient of 0 times an infinite slope is NaN.
        acting = (args.reduced.weights != 0).reshape(-1, 1)
        teacher = torch.where(acting, teacher, teacher.detach())
        student = torch.where(acting, student, student.detach())
    of = (direction, tail, parameter, args.dtype)
    return divergence_of_entries(teacher, student, exist, *of).to(args.dtype)


def outputs_of_scalar(
    args: RowsArgs,
    result: Tensor,
    stats: KLStats | None,
    logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Outputs:
    """The outputs of a divergence or a loss that is already reduced."""
    stats = None if stats is None else without_tokens(stats)
    return _shaped(args, Rows(logprobs=logprobs, entropy=entropy), result, stats)


def _shaped(args: RowsArgs, rows: Rows, result: Tensor | None, stats: KLStats | None) -> Outputs:
    _, first, second, entropy = rows
    policy, reference = (second, first) if args.policy else (first, second)
    if entropy is not None:
        entropy = entropy.view(args.shape)
        entropy = entropy.detach() if args.return_entropy == "detached" else entropy
    shape = args.shape if args.token_ids is None else args.shape + args.token_ids.shape[1:]
    return Outputs(
        result,
        None if policy is None else policy.view(shape),
        None if reference is None else reference.view(shape),
        entropy,
        stats,
    )
