"""TRL's functions from hidden states, ``trl.kernels``, of 1.15 and 1.16: called by ``apply``, as
TRL calls them.

z = softcap(scale * (hidden @ weight.T + bias)) / temperature are the logits of softmax, N tokens of
width D, V words. Both functions break the graph of ``torch.compile``.

Heads that DeepSpeed's ZeRO-3 has partitioned are read as they are while the forward runs, and held
until the backward; TRL gathers them once more there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from klfast import backends
from klfast.checks.arguments import check_choice, check_number
from klfast.compat.divergences import interpolated
from klfast.compat.hidden import check_words
from klfast.compat.logits import entropy as entropy_of
from klfast.dtensors import refuse_dtensors
from klfast.linear.call import linear_kl_divergence_args, linear_token_logprobs_args
from klfast.linear.chunks import Chunk
from klfast.linear.graphs import breaks_graphs
from klfast.logits.call import Reducing, RowsArgs

OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What ``outputs`` of :class:`ChunkedLogProbFunction` may name."""


class ChunkedLogProbFunction:
    """Log-probs of tokens from hidden states: ``klfast.linear_token_logprobs`` by TRL's call."""

    @staticmethod
    @breaks_graphs
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: Sequence[str] = OPTIONAL_OUTPUTS,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """``(logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1)``, each [N]; None for what
        ``outputs`` does not name.

        ==================== ================================================================
        output               with p = softmax(z)
        ==================== ================================================================
        ``logprobs``         log p of the target, in nats
        ``entropy``          -sum p log p, in nats
        ``log_sum_sq_probs`` log sum p^2, in nats; no gradient, like those below
        ``mean_logits``      the mean of z over the words
        ``is_top1``          bool: the target is the likeliest word, the first of several
        ==================== ================================================================

        Args:
            hidden: [N, D]; fp64, fp32, bf16 or fp16.
            weight: [V, D], of the head. Gradients reach the three in their own dtypes.
            bias: [V], or None.
            targets: [N], words.
            temperature: a number > 0.
            chunk_size: the words that TRL has at a time; klfast has all words of some tokens (see
                ``chunk`` of ``klfast.linear_token_logprobs``).
            final_logit_softcapping: c > 0 of ``c * tanh(logits / c)``, or None.
            logit_scale: a number > 0, before the softcap.
            outputs: which of ``OPTIONAL_OUTPUTS``; ``"log_probs"``, which is always there, may be
                among them. All are of the logits that the log-probs are of, and the three without
                a gradient take torch's reads of these, but no product more.

        Differs from TRL: the logits are fp32 whatever the dtypes, where TRL's of lower dtypes are
        rounded to these (at 20 nats by up to 0.06); those of mixed dtypes are of what is stored,
        not rounded to the dtype of ``hidden``; fp64 stays fp64. On a CPU ids outside of the
        vocabulary are a ValueError. Under a head that needs no gradient the backward makes no
        product.

        Raises:
            ValueError, TypeError: a wrong shape, dtype, device, number or name.
        """
        refuse_dtensors(hidden=hidden, targets=targets)
        check_words("targets", targets, "hidden", hidden)
        for name in outputs:
            check_choice("outputs", name, ("log_probs", *OPTIONAL_OUTPUTS))
        scale = check_number("logit_scale", logit_scale, above=0)
        scaled_temperature = check_number("temperature", temperature, above=0) / scale
        cap = _scaled_cap("final_logit_softcapping", final_logit_softcapping, scale)
        args = linear_token_logprobs_args(
            hidden,
            _held(weight),
            targets,
            None,
            None if bias is None else _held(bias),
            cap,
            scaled_temperature,
            "entropy" in outputs,
            "auto",
        )
        beside = _Beside(outputs, targets, 1 / scaled_temperature, args.arithmetic())
        own = backends.rows("auto", args.showing(beside if beside.found else None))
        return own.logprobs, own.entropy, *map(beside.found.get, _OF_LOGITS)  # type: ignore[return-value]


def _log_sum_sq_probs(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    probs = (logits * scale).softmax(-1)  # of which one is at least 1 / V: its square is no 0
    lengths: Tensor = torch.linalg.vector_norm(probs, dim=-1)
    return lengths.log_().mul_(2)


def _mean_logits(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    return logits.mean(-1) * scale


def _is_top1(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    return logits.argmax(-1) == targets


_OF_LOGITS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "log_sum_sq_probs": _log_sum_sq_probs,
    "mean_logits": _mean_logits,
    "is_top1": _is_top1,
}
"""The outputs without a gradient, of a chunk's logits [n, V] and targets [n]."""


class _Beside:
    """The outputs without a gradient, chunk after chunk: ``on_chunk`` of a call.

    Args:
        outputs: which.
        targets: [N].
        scale: of the logits.
        dtype: of the outputs that are numbers.
    """

    def __init__(
        self, outputs: Sequence[str], targets: Tensor, scale: float, dtype: torch.dtype
    ) -> None:
        self._targets, self._scale = targets, scale
        dtypes = {name: torch.bool if name == "is_top1" else dtype for name in _OF_LOGITS}
        self.found = {
            name: targets.new_zeros(targets.shape, dtype=of)
            for name, of in dtypes.items()
            if name in outputs
        }

    def __call__(self, logits: Tensor, chunk: Chunk) -> None:
        for name, values in self.found.items():
            found = _OF_LOGITS[name](logits, self._targets[chunk.at], self._scale)
            chunk.put(values, found)


class ChunkedDivergenceFunction:
    """A divergence from both models' hidden states: ``klfast.linear_kl_divergence`` by TRL's
    call.
    """

    @staticmethod
    @breaks_graphs
    def apply(
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``(divergence, entropy)``, each [N], in nats; the entropy is the student's.

        Gradients reach the student alone, by way of the divergence.

        Args:
            student_hidden: [N, D]; fp64, fp32, bf16 or fp16.
            student_weight: [V, D], of the student's head.
            student_bias: [V], or None.
            teacher_hidden: [N, D_teacher].
            teacher_weight: [V, D_teacher].
            teacher_bias: [V], or None.
            beta: with p of the student and q of the teacher, 0 is the forward KL(q || p), 1 the
                reverse KL(p || q), between them the generalized Jensen-Shannon divergence (see
                ``klfast.compat.divergences``).
            temperature: a number > 0, of both.
            student_logit_scale: a number > 0, before the softcap.
            student_final_logit_softcapping: c > 0, or None.
            teacher_logit_scale: a number > 0. One that differs from the student's is multiplied
                into the teacher's hidden states and bias, in fp32.
            teacher_final_logit_softcapping: c > 0, or None.

        Differs from TRL: near 0 every digit is right but for the rounding of the logits, where
        TRL's fp32 is off by several times the divergence at 1e-5 nats, and may be negative; logits
        of mixed dtypes are of what is stored, not rounded to the dtypes of hidden states; fp64
        stays fp64. Under a student's head that needs no gradient the backward makes no product.

        Raises:
            ValueError, TypeError: a wrong shape, dtype, device or number.

        Source: R. Agarwal et al., "On-Policy Distillation of Language Models" (2024,
        arXiv:2306.13649).
        """
        refuse_dtensors(student_hidden=student_hidden, teacher_hidden=teacher_hidden)
        direction, jsd_beta = interpolated("beta", beta)
        scale = check_number("student_logit_scale", student_logit_scale, above=0)
        ratio = check_number("teacher_logit_scale", teacher_logit_scale, above=0) / scale
        caps = (
            _scaled_cap("student_final_logit_softcapping", student_final_logit_softcapping, scale),
            _scaled_cap("teacher_final_logit_softcapping", teacher_final_logit_softcapping, scale),
        )
        with _gathered(student_weight, student_bias), _gathered(teacher_weight, teacher_bias):
            args = linear_kl_divergence_args(
                student_hidden,
                _held(student_weight),
                _multiplied(teacher_hidden.detach(), ratio),
                teacher_weight.detach(),
                None,
                None if student_bias is None else _held(student_bias),
                None if teacher_bias is None else _multiplied(teacher_bias.detach(), ratio),
                caps,
                direction,
                jsd_beta,
                check_number("temperature", temperature, above=0) / scale,
                None,
                False,
                Reducing(),
                "auto",
            )
            entropies = _Entropies(args)
            divergence = backends.rows("auto", args.showing(entropies)).kl
        assert divergence is not None
        return divergence, entropies.found


class _Entropies:
    """The entropies of a call's policy, without a gradient, chunk after chunk: its ``on_chunk``.

    Under a frozen head those with one would take a product more.
    """

    def __init__(self, args: RowsArgs) -> None:
        self._temperature = args.temperature
        self.found = args.first().new_zeros(args.shape, dtype=args.arithmetic())

    def __call__(self, logits: Tensor, chunk: Chunk) -> None:
        chunk.put(self.found, entropy_of(logits, temperature=self._temperature))


def _scaled_cap(argument: str, softcap: float | None, scale: float) -> float | None:
    """The softcap of logits that ``1 / scale`` of the temperature scales behind it."""
    return None if softcap is None else check_number(argument, softcap, above=0) / scale


def _multiplied(tensor: Tensor, factor: float) -> Tensor:
    if factor == 1:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor


def _is_partitioned(tensor: Tensor | None) -> bool:
    """Whether ZeRO-3 may take a parameter's memory away after the forward."""
    return hasattr(tensor, "ds_id")


def _held(parameter: Tensor) -> Tensor:
    """The parameter, or of ZeRO-3's a view, which keeps the memory that it has now."""
    return parameter.view_as(parameter) if _is_partitioned(parameter) else parameter


@contextmanager
def _gathered(*parameters: Tensor | None) -> Iterator[None]:
    """Within it ZeRO-3's parameters are whole, as TRL sees to that."""
    if not any(map(_is_partitioned, parameters)):
        yield
        return
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    with maybe_gather_lm_head_ctx(*parameters):
        yield
