"""Liger 0.8: the fused linear JSD, ``LigerFusedLinearJSD`` of ``liger_kernel.transformers`` and
``liger_fused_linear_jsd`` of its ``functional``.

Use ``from klfast.compat.liger import LigerFusedLinearJSD`` in place of Liger's own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from klfast.checks.arguments import check_number
from klfast.compat.divergences import interpolated
from klfast.compat.hidden import check_words
from klfast.linear.api import linear_kl_divergence

__all__ = ["LigerFusedLinearJSD", "liger_fused_linear_jsd"]


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """The mean divergence of the tokens that exist, 0-dim, in nats, from both models' hidden
    states, by ``klfast.linear_kl_divergence``: N tokens, V words.

    Gradients reach the student alone; the forward makes them, as in Liger. For a divergence per
    token, another reduction or a gradient to the teacher call ``klfast.linear_kl_divergence``:
    Liger has the mean alone.

    Args:
        student_input: [N, D]; fp64, fp32, bf16 or fp16.
        student_weight: [V, D], of the student's head.
        teacher_input: [N, D_teacher].
        teacher_weight: [V, D_teacher].
        shift_labels: [N], ``ignore_index`` where the token does not exist: it enters no product.
        jsd_beta: with p of the student and q of the teacher, 0 is the forward KL(q || p), 1 the
            reverse KL(p || q), between them the generalized Jensen-Shannon divergence (see
            ``klfast.compat.divergences``).
        ignore_index: see ``shift_labels``.
        temperature: a number > 0, of both.
        accum_dtype: Liger's choice for the weight's gradient, which klfast sums in fp32 whatever
            this is (fp64 of fp64).

    Differs from Liger: near 0 every digit is right but for the rounding of the logits, which are
    fp32 on a CPU too, where Liger's are rounded to the inputs' dtype; gradients of the logits are
    not rounded to it there; the weight's gradient is rounded once, where Liger adds chunks in its
    dtype. Nothing waits for the device but the count of the labels. fp64 stays fp64, where Liger's
    is fp32; of no tokens, or of none that exists, the mean is 0, with gradients of 0.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or number.

    Source: R. Agarwal et al., "On-Policy Distillation of Language Models" (2024, arXiv:2306.13649).
    """
    direction, beta = interpolated("jsd_beta", jsd_beta)
    if shift_labels is not None:
        check_words("shift_labels", shift_labels, "student_input", student_input)
    return linear_kl_divergence(
        student_input,
        student_weight,
        teacher_input.detach(),
        teacher_weight.detach(),
        None if shift_labels is None else shift_labels != ignore_index,
        direction=direction,
        jsd_beta=beta,
        temperature=check_number("temperature", temperature, above=0),
        reduction="token-mean",
    )


class LigerFusedLinearJSD(nn.Module):
    """:func:`liger_fused_linear_jsd` as a module, with Liger's arguments.

    Args:
        jsd_beta: see there, like the others.
        ignore_index: see there.
        temperature: see there.
        accum_dtype: see there.
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        interpolated("jsd_beta", jsd_beta)
        check_number("temperature", temperature, above=0)
        self.jsd_beta = jsd_beta
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.accum_dtype = accum_dtype

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None,
    ) -> Tensor:
        """The mean divergence, 0-dim, in nats."""
        return liger_fused_linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            self.jsd_beta,
            self.ignore_index,
            self.temperature,
            self.accum_dtype,
        )
