"""Strides, offsets and odd sizes: how logits lie in memory changes no bit of any result."""

import pytest
import torch
from agreement import same_bits
from agreement_logits import (
    COMPILED,
    DIRECTIONS,
    FAST,
    leaves,
    random_ids,
    random_logits,
    tensors_of,
)

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = 1100
"""More than a block of 1,024 on the CPU, and no multiple of a vector."""
FEW_WORDS = 270
"""Those that the emulator has time for."""


def between(t, dim, step):
    """Every ``step``-th index of a larger tensor that is NaN elsewhere."""
    shape = list(t.shape)
    shape[dim] *= step
    larger = torch.full(shape, torch.nan).to(t.dtype)
    index = [slice(None)] * t.dim()
    index[dim] = slice(step - 1, None, step)
    larger[tuple(index)] = t
    return larger[tuple(index)]


def in_buffer(t, offset):
    """The same numbers, ``offset`` elements into a larger memory that is NaN elsewhere."""
    buffer = torch.full((t.numel() + offset + 1,), torch.nan).to(t.dtype)
    buffer[offset : offset + t.numel()] = t.flatten()
    return buffer[offset : offset + t.numel()].view_as(t)


def as_permuted(*order):
    inverse = [order.index(dim) for dim in range(3)]
    return lambda t: t.permute(order).contiguous().permute(inverse)


def shifted(t):
    """What a causal model's loss takes: all but the last position."""
    return torch.cat([t, t[:, :1] * torch.nan], 1)[:, :-1]


LAYOUTS = {
    "all-but-the-last-position": shifted,
    "time-first": as_permuted(1, 0, 2),
    "words-before-time": as_permuted(0, 2, 1),
    "words-first": as_permuted(2, 0, 1),
    "every-2nd-word": lambda t: between(t, 2, 2),
    "every-3rd-position": lambda t: between(t, 1, 3),
    "every-2nd-sequence": lambda t: between(t, 0, 2),
    "all-but-some-words": lambda t: torch.cat([t, t, t], 2)[..., t.shape[2] : 2 * t.shape[2]],
    "one-sequence": lambda t: t[:1].expand_as(t),
    "one-position": lambda t: t[:, :1].expand_as(t),
    "one-word": lambda t: t[..., :1].expand_as(t),
    "one-number": lambda t: t[:1, :1, :1].expand_as(t),
    "overlapping": lambda t: t.flatten().as_strided(t.shape, (7, 3, 1)),
    "offset-1": lambda t: in_buffer(t, 1),
    "offset-3": lambda t: in_buffer(t, 3),
}
GRAD_OUTPUTS = {
    "expanded-rows": lambda g: g[:1].expand_as(g),
    "expanded-columns": lambda g: g[:, :1].expand_as(g),
    "one-number": lambda g: g[0, 0].expand_as(g),
    "transposed": lambda g: g.t().contiguous().t(),
    "stepped": lambda g: g.repeat_interleave(2, 1)[:, ::2],
    "offset": lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].view_as(g),
}

every_compiled = pytest.mark.parametrize("backend", COMPILED, indirect=True)
every_size = pytest.mark.parametrize(
    ("backend", "words"),
    [(name, WORDS if name in FAST else FEW_WORDS) for name in COMPILED],
    indirect=["backend"],
)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def divergences(backend, logits, ref_logits, ids):
    """Results and gradients of each direction, in every way that a backend computes them."""
    found = []
    models = leaves(logits, ref_logits)
    for direction in ("reverse", "jsd"):  # the forward one is the reverse of the other's
        options = {"direction": direction, "backend": backend}
        outputs = tensors_of(klfast.kl_divergence(*models, token_ids=ids, **options))
        scalar = klfast.kl_divergence(*models, reduction="token-sum", **options)
        found += [*outputs, scalar]
        found += torch.autograd.grad([output.sum() for output in outputs], models)
        found += torch.autograd.grad(scalar, models)
    return [t.detach() for t in found]


@pytest.mark.grid
@every_layout
@every_dtype
@every_size
def test_divergences_of_logits_of_any_layout(backend, words, dtype, layout):
    plain = random_logits(2, 3, words, dtype=dtype)
    ids = random_ids(plain[0])
    laid_out = [layout(t) for t in plain]
    contiguous = [t.contiguous() for t in laid_out]
    expected = divergences(backend, *contiguous, ids)
    assert not expected[0].isnan().any()
    for models in (laid_out, (laid_out[0], contiguous[1]), (contiguous[0], laid_out[1])):
        found = divergences(backend, *models, ids)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.grid
@every_layout
@every_dtype
@every_size
def test_log_probs_of_logits_of_any_layout(backend, words, dtype, layout):
    logits = layout(random_logits(2, 3, words, dtype=dtype)[0])
    ids = random_ids(logits)

    def call(logits):
        (leaf,) = leaves(logits)
        outputs = klfast.token_logprobs(leaf, ids, return_entropy=True, backend=backend)
        grads = torch.autograd.grad([o.sum() for o in outputs], leaf)
        return [*(o.detach() for o in outputs), *grads]

    found, expected = call(logits), call(logits.contiguous())
    assert not expected[0].isnan().any()
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@every_size
def test_flat_and_packed_logits_of_any_layout(backend, words):
    logits, ref_logits = random_logits(9, words)
    cu_seqlens = torch.tensor([0, 2, 2, 9])
    for layout in (lambda t: t.t().contiguous().t(), lambda t: between(t, 0, 2)):
        models = [leaves(logits, ref_logits), leaves(layout(logits), layout(ref_logits))]
        for reduction in ("none", "seq-mean", "token-mean"):
            options = {"reduction": reduction, "backend": backend}
            for edges in (None, cu_seqlens):
                expected, found = (
                    klfast.kl_divergence(*pair, cu_seqlens=edges, **options) for pair in models
                )
                assert same_bits(found.detach(), expected.detach())
                grads = [
                    torch.autograd.grad(result.sum(), pair)
                    for result, pair in zip((expected, found), models, strict=True)
                ]
                assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("shape", [(2, 2, 3, 11), (2, 1, 2, 2, 11)], ids=str)
def test_tokens_of_more_dimensions_of_any_layout(backend, shape):
    """Which no view brings to three."""
    logits, _ = random_logits(*shape)
    logits = logits.transpose(0, -2).contiguous().transpose(0, -2)
    ids = random_ids(logits)

    def call(logits):
        (leaf,) = leaves(logits)
        found = klfast.token_logprobs(leaf, ids, backend=backend)
        return found.detach(), *torch.autograd.grad(found.sum(), leaf)

    found, expected = call(logits), call(logits.contiguous())
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", GRAD_OUTPUTS.values(), ids=GRAD_OUTPUTS)
@every_compiled
def test_grad_outputs_of_any_layout(backend, layout):
    logits, ref_logits = random_logits(4, 5, 37)
    ids = random_ids(logits)
    grad_outputs = [layout(torch.randn(4, 5)) for _ in range(3)]
    plain = [g.contiguous() for g in grad_outputs]
    models = leaves(logits, ref_logits)
    for direction in DIRECTIONS:
        options = {"direction": direction, "backend": backend}
        outputs = tensors_of(klfast.kl_divergence(*models, token_ids=ids, **options))
        for count in (1, 3):
            found, expected = (
                torch.autograd.grad(outputs[:count], models, g[:count], retain_graph=True)
                for g in (grad_outputs, plain)
            )
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    outputs = klfast.token_logprobs(models[0], ids, return_entropy=True, backend=backend)
    for count in (1, 2):
        found, expected = (
            torch.autograd.grad(outputs[:count], models[0], g[:count], retain_graph=True)
            for g in (grad_outputs, plain)
        )
        assert same_bits(found[0], expected[0])


def test_an_expanded_grad_output_of_sequences(backend):
    models = leaves(*random_logits(4, 5, 37))
    sums = klfast.kl_divergence(*models, reduction="seq-mean", backend=backend)
    expected = torch.autograd.grad(sums, models, torch.ones(4), retain_graph=True)
    for grad_out in (torch.ones(()).expand(4), torch.ones(8)[::2]):
        found = torch.autograd.grad(sums, models, grad_out, retain_graph=True)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_a_gradient_of_a_view_reaches_its_base(backend):
    """The usual slices of a model's output: positions but the last, words but the padding."""
    base = torch.randn(2, 6, 50, requires_grad=True)
    ids = torch.randint(40, (2, 5))
    ref_logits = torch.randn(2, 5, 40)
    plain = base.detach()[:, :-1, :40].clone().requires_grad_()
    for function in (
        lambda t: klfast.token_logprobs(t, ids, backend=backend),
        lambda t: klfast.kl_divergence(t, ref_logits, reduction="token-mean", backend=backend),
    ):
        (grad,) = torch.autograd.grad(function(base[:, :-1, :40]).sum(), base)
        (expected,) = torch.autograd.grad(function(plain).sum(), plain)
        assert same_bits(grad[:, :-1, :40].contiguous(), expected)
        assert not grad[:, -1].any()
        assert not grad[..., 40:].any()


def test_lazily_negated_logits_are_negated(backend):
    complex_numbers = torch.randn(3, 70, dtype=torch.complex64)
    negated = complex_numbers.conj().imag
    assert negated.is_neg()
    ids = torch.randint(70, (3,))
    assert same_bits(
        klfast.token_logprobs(negated, ids, backend=backend),
        klfast.token_logprobs(-complex_numbers.imag, ids, backend=backend),
    )
    other = torch.randn(3, 70)
    assert same_bits(
        klfast.kl_divergence(other, negated, backend=backend),
        klfast.kl_divergence(other, -complex_numbers.imag, backend=backend),
    )


@pytest.mark.parametrize("backend", FAST, indirect=True)
def test_more_rows_than_a_16_bit_index_counts(backend):
    """Of 65,537 only the last is kept."""
    rows = 2**16 + 1
    logits = torch.full((1, rows, 2), torch.nan)
    logits[0, -1] = torch.tensor([0.0, 1.0])
    ref_logits = torch.zeros(1, 1, 2).expand(1, rows, 2)
    mask = torch.zeros(1, rows, dtype=torch.bool)
    mask[0, -1] = True
    ids = mask.long()
    one = klfast.kl_divergence(logits[:, -1:], ref_logits[:, -1:], backend=backend)
    found = klfast.kl_divergence(
        logits, ref_logits, mask, token_ids=ids, reduction="token-sum", backend=backend
    )
    assert found.kl == one.item()
    assert not found.logprobs[0, :-1].any()
    assert same_bits(
        found.logprobs[:, -1:], klfast.token_logprobs(logits[:, -1:], ids[:, -1:], backend=backend)
    )
