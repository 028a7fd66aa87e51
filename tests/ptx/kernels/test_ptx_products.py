"""A grid of all special cases of the kernels over log-probs, compared with the CPU's kernels.

The grid has every dtype of a mask and of a scalar, every layout and estimator, in every copy of a
kernel. Only the numbers are random.
"""

import itertools
from typing import NamedTuple

import emulated
import pytest
import torch
from agreement import SCALAR_REDUCTIONS
from ptx_against import (
    FLOATS,
    MASKS_OR_NONE,
    OF_EXPONENTIALS,
    check,
    compare,
    flat,
    gradients,
    laid_out,
    named,
    on,
)

import klfast
from klfast import backends
from klfast.args.estimator import as_estimator
from klfast.args.penalty import Spec
from klfast.autograd import context
from klfast.types import names
from klfast.types.dtypes import INTEGERS, MASKS
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

# The dtypes of the log-probs. Each has a kernel, and mixed dtypes have kernels in fp32 and fp64.
DTYPES = (
    *((dtype, dtype) for dtype in FLOATS),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float64),
)
LAYOUTS = ("dense", "shifted", "strided")
WIDTH = 560  # of padded batches: whole vectors in every dtype, so that dense rows are aligned
# The layouts of log-probs, with the dtype of cu_seqlens, or None for padded batches.
TOKENS = (
    ("dense", None),
    ("shifted", None),
    ("strided", None),
    ("dense", torch.int32),
    ("shifted", torch.int64),
)


class Tokens(NamedTuple):
    """Log-probs under three models, padded or packed."""

    logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    cu_seqlens: torch.Tensor | None

    def mask(self, dtype, layout="dense"):
        """A mask with zeros, and with weights other than 0 and 1 in a float dtype."""
        if dtype is None:
            return None
        numbers = torch.arange(self.logprobs.numel()).view(self.logprobs.shape)
        kept = (numbers % 3 != 1).to(dtype)
        if dtype.is_floating_point:
            kept[..., ::5] *= 0.5
        return laid_out(kept, layout)


def tokens_of(dtypes, shape, *, layout="dense", spread=0.5, index=None):
    """Two padded sequences, or a packed batch with an empty third one if ``index`` is a dtype."""
    first, second = dtypes
    generator = torch.Generator().manual_seed(1)
    shape = (shape[0] * shape[1],) if index else shape
    base = -3 * torch.rand(*shape, generator=generator)
    made = [
        laid_out((base + spread * torch.randn(*shape, generator=generator)).to(dtype), layout)
        for dtype in (first, second, first)
    ]
    size = shape[0]
    ends = [0, size // 3, size // 3, size]
    return Tokens(*made, torch.tensor(ends, dtype=index) if index else None)


# Calls of kl_penalty that take each variant of the kernel (csrc/penalty/cuda_task.h).
PLAIN, GRADIENT, STATISTICS_TOO, LIMITED = "plain", "gradient", "statistics", "limited"
VARIANTS = (PLAIN, GRADIENT, STATISTICS_TOO, LIMITED)
LIMITS = (
    {"kl_clip": 0.5},
    {"log_ratio_clip": 1.5, "importance": "detached"},
    {"clip_weighted": True, "kl_clip": 0.5, "importance_cap": 1.5},
    {"linear_tail": 1.0},
)


def penalty(tokens, mask, variant, estimator, reduction, limits=LIMITS[0], **options):
    """A call of kl_penalty for ``check``."""
    leaves = [each.detach() for each in tokens[:2]]
    if variant != PLAIN:
        leaves = [each.requires_grad_() for each in leaves]
    if variant == LIMITED:
        options |= {"old_logprobs": tokens.old_logprobs}
        estimator = klfast.Estimator(estimator, **limits)
    options |= {"return_stats": variant in (STATISTICS_TOO, LIMITED)}

    def call():
        made = klfast.kl_penalty(
            *leaves,
            mask,
            estimator=estimator,
            reduction=reduction,
            cu_seqlens=tokens.cu_seqlens,
            backend="native",
            **options,
        )
        return flat(made) + gradients(made, leaves)

    return call


@pytest.fixture
def gradients_of_fp16(monkeypatch):
    """A forward may write gradients in fp16, which is an option of the ops."""
    monkeypatch.setattr(context, "holds_unit_gradient", lambda _: True)


@pytest.mark.parametrize("mask_dtype", MASKS_OR_NONE, ids=named)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.usefixtures("gradients_of_fp16")
def test_masks_of_a_penalty(dtypes, variant, mask_dtype, monkeypatch):
    """Every layout occurs. The backward reads the inputs again for results of tokens or sequences.
    The forward writes the gradient for scalars.
    """
    options = itertools.cycle(itertools.product(names.ESTIMATORS, LIMITS))
    scalar = itertools.cycle(SCALAR_REDUCTIONS)
    other = itertools.cycle(name for name in REDUCTIONS if name not in SCALAR_REDUCTIONS)
    for layout, index in TOKENS:
        tokens = tokens_of(dtypes, (2, WIDTH), layout=layout, index=index)
        for mask_layout in LAYOUTS:
            mask = tokens.mask(mask_dtype, mask_layout)
            for reduction in (next(scalar), next(other)):
                estimator, limits = next(options)
                call = penalty(tokens, mask, variant, estimator, reduction, limits)
                check(call, monkeypatch)
            if mask is None:
                break


@pytest.mark.parametrize("spread", [0.05, 3.0, 60.0])
@pytest.mark.parametrize("estimator", [*names.ESTIMATORS, *names.PLUS])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.usefixtures("gradients_of_fp16")
def test_estimators(dtypes, variant, estimator, spread, monkeypatch):
    """Log-ratios are small, large, or so large that they are computed again in fp64."""
    tokens = tokens_of(dtypes, (2, WIDTH), spread=spread)
    for limits, reduction in zip(LIMITS, REDUCTIONS, strict=False):
        check(penalty(tokens, None, variant, estimator, reduction, limits), monkeypatch)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=named)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.usefixtures("gradients_of_fp16")
def test_scalars_of_a_penalty(dtypes, variant, dtype, monkeypatch):
    tokens = tokens_of(dtypes, (2, 5))
    coef, normalizer = torch.tensor(2, dtype=dtype), torch.tensor(3, dtype=dtype)
    for reduction in NORMALIZED_REDUCTIONS:
        options = {"coef": coef, "normalizer": normalizer}
        check(penalty(tokens, None, variant, "k3", reduction, **options), monkeypatch)


@pytest.mark.parametrize("dtype", MASKS, ids=named)
@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
def test_scores(dtypes, is_limited, dtype, monkeypatch):
    for size, index in itertools.product((5, 9000), (None, torch.int32)):
        tokens = tokens_of(dtypes, (2, size), index=index)
        scores = torch.ones(3 if index else 2).to(dtype)
        estimator = klfast.Estimator("k3", kl_clip=0.5 if is_limited else None)

        def call(tokens=tokens, scores=scores, estimator=estimator):
            return flat(
                klfast.kl_rewards(
                    scores,
                    *tokens[:2],
                    tokens.mask(torch.bool),
                    kl_coef=0.1,
                    estimator=estimator,
                    cu_seqlens=tokens.cu_seqlens,
                    backend="native",
                )
            )

        check(call, monkeypatch)


@pytest.mark.parametrize("index", [None, torch.int32, torch.int64], ids=named)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.usefixtures("gradients_of_fp16")
def test_long_sequences_of_a_penalty(dtypes, variant, index, monkeypatch):
    """Sequences have several tiles and segments, and one or several warps read them."""
    reductions = itertools.cycle(REDUCTIONS)
    for size, chip in ((2100, "h200"), (9000, "h200"), (9000, "hopper")):
        tokens = tokens_of(dtypes, (2, size), layout="shifted", index=index)
        for mask_dtype in (None, torch.bool):
            mask = tokens.mask(mask_dtype)
            check(penalty(tokens, mask, variant, "k3", next(reductions)), monkeypatch, chip=chip)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.usefixtures("gradients_of_fp16")
def test_many_sequences(dtypes, variant, reduction, monkeypatch):
    """There are more sequences than threads of a block. One sequence has two segments."""
    padded = tokens_of(dtypes, (600, 3))
    check(penalty(padded, padded.mask(torch.bool), variant, "k3", reduction), monkeypatch)
    packed = tokens_of(dtypes, (1, 9000 + 599), index=torch.int32)
    ends = torch.cat([torch.arange(300), torch.arange(9299, 9600)])
    for mask, index in ((None, torch.int32), (packed.mask(torch.uint8), torch.int64)):
        tokens = packed._replace(cu_seqlens=ends.to(index))
        check(penalty(tokens, mask, variant, "k3", reduction), monkeypatch)


@pytest.fixture
def unchecked(monkeypatch):
    """Tokens may follow the last sequence, as on a GPU, which does not check cu_seqlens."""
    monkeypatch.setattr("klfast.args.penalty.check_cu_seqlens_values", lambda *_: None)


@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.usefixtures("gradients_of_fp16", "unchecked")
def test_tokens_of_no_sequence(dtypes, monkeypatch):
    """Their results are 0, and the other results do not change."""
    for size in (60, 9000):
        whole = tokens_of(dtypes, (2, size), index=torch.int32)
        whole = whole._replace(cu_seqlens=torch.tensor([0, 7, 20]))
        alone = Tokens(*(each[:20] for each in whole[:3]), whole.cu_seqlens)
        for variant, reduction in itertools.product(VARIANTS, REDUCTIONS):
            calls = [penalty(own, None, variant, "k3", reduction) for own in (alone, whole)]
            compare_alone(*calls, monkeypatch)


def compare_alone(alone, whole, monkeypatch):
    """Fail unless the PTX gives the CPU's results for the first tokens, and 0 for the rest."""
    expected = on(backends.BACKENDS["native"], alone, monkeypatch)
    got = on(emulated.backend(), whole, monkeypatch)
    cut = [b[: a.shape[0]] if a.dim() else b for a, b in zip(expected, got, strict=True)]
    assert not any(b[a.shape[0] :].any() for a, b in zip(expected, got, strict=True) if a.dim())
    compare(expected, cut, OF_EXPONENTIALS)


@pytest.mark.parametrize("mask_dtype", MASKS_OR_NONE, ids=named)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("is_double", [False, True])
def test_weights_of_tokens(is_double, is_wide, mask_dtype, monkeypatch):
    """One block stores few tokens. A grid on a chip with one processor stores many in several
    rounds.
    """
    monkeypatch.setenv("KLFAST_EMULATED_CHIP", "hopper")
    dtype = torch.bfloat16 if is_wide else torch.float32
    for reduction, size, index in itertools.product(
        SCALAR_REDUCTIONS, (1000, 4200), (None, torch.int32, torch.int64)
    ):
        tokens = tokens_of((dtype, dtype), (2, size), index=index)
        for mask_layout in LAYOUTS:
            mask = tokens.mask(mask_dtype, mask_layout)
            spec = Spec(as_estimator("k1"), REDUCTIONS[reduction])
            arguments = (mask, None, tokens.cu_seqlens, None, None, *spec.encoded(), is_double)
            compare(*weights_on_both(tokens.logprobs, *arguments))
            if mask is None:
                break


def weights_on_both(*arguments):
    """The results of ``token_weights`` on the CPU and on the PTX."""
    both = torch.ops.klfast, emulated.ops()
    return ([each.token_weights(*arguments)] for each in both)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=named)
@pytest.mark.parametrize("is_double", [False, True])
def test_scalars_of_weights(is_double, dtype):
    """The kernel runs with and without a pass over the lengths."""
    coef, normalizer = torch.tensor(2, dtype=dtype), torch.tensor(3, dtype=dtype)
    for own, reduction in itertools.product(FLOATS[:2], NORMALIZED_REDUCTIONS):
        tokens = tokens_of((own, own), (2, 5))
        spec = Spec(as_estimator("k1"), REDUCTIONS[reduction], coef, normalizer)
        for mask in (None, tokens.mask(torch.bool)):
            arguments = (mask, None, None, coef, normalizer, *spec.encoded(), is_double)
            compare(*weights_on_both(tokens.logprobs, *arguments))


@pytest.mark.parametrize("factor_dtype", MASKS, ids=named)
@pytest.mark.parametrize("dtype", FLOATS, ids=named)
def test_scale(dtype, factor_dtype):
    """Tensors have whole vectors and a tail, and are aligned or not."""
    for factor, start in itertools.product((1, 3), (0, 1)):
        made = [torch.linspace(-1, 1, 2100).to(dtype)[start:] for _ in range(2)]
        for ops, tensor in zip((torch.ops.klfast, emulated.ops()), made, strict=True):
            ops.scale_(tensor, torch.tensor(factor).to(factor_dtype))
        compare(*([each] for each in made))
