"""Gradients over logits: inference tensors, scaling, freed logits, detached entropies."""

import agreement_logits as al
import pytest
import torch
from agreement import same_bits
from eager_divergences import EAGER

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")


def models(*shape, dtype=torch.float32):
    return al.leaves(*al.random_logits(*(shape or (2, 3, 37)), dtype=dtype))


def nudge_a_word(logits):
    logits[0, 0, 0] += 1e-3


def swap_two_words(logits):
    """If two logits of the policy are equal, only the gradients change."""
    logits[..., [0, 1]] = logits[..., [1, 0]]


@al.every_direction
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
@pytest.mark.parametrize("change", [nudge_a_word, swap_two_words])
def test_an_inference_tensor_that_changes_gives_no_gradient_of_other_logits(
    backend, direction, reduction, change
):
    logits, ref_logits = (t.detach() for t in models())
    (leaf,) = al.leaves(torch.zeros_like(logits))
    options = {"direction": direction, "reduction": reduction, "backend": backend}
    with torch.inference_mode():
        inferred = ref_logits.clone()
    before = klfast.kl_divergence(leaf, ref_logits, **options)
    (expected,) = torch.autograd.grad(before.sum(), leaf)
    found = klfast.kl_divergence(leaf, inferred, **options)
    with torch.inference_mode():
        change(inferred)
    for _ in range(3):
        (grad,) = torch.autograd.grad(found.sum(), leaf, retain_graph=True)
        assert same_bits(grad, expected)
        grad.fill_(torch.nan)  # the caller owns it
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    assert same_bits(grad, expected)
    if backend != "reference":
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(found.sum(), leaf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@al.every_direction
@al.every_compiled
def test_scaling_the_unit_gradient_equals_computing_it_anew(backend, direction, dtype):
    """They are equal for a power of two, else up to roundings on the row's scale."""
    inputs = models(2, 3, 37, dtype=dtype)
    options = {"direction": direction, "reduction": "token-mean", "coef": 0.2, "backend": backend}
    for factor in (0.0, 1.0, -0.5, 8.0, 0.3, 1e4):
        loss = factor * klfast.kl_divergence(*inputs, **options)
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        anew = torch.autograd.grad(loss, inputs)
        for scaled, computed in zip(first, anew, strict=True):
            if factor in (0.0, 1.0, -0.5, 8.0):
                assert torch.equal(scaled, computed)
            off = (scaled.double() - computed.double()).abs().amax(-1)
            scale = computed.double().abs().amax(-1)
            assert (off <= 8 * torch.finfo(dtype).eps * scale).all()  # each has some 4 roundings
            assert factor == 0 or computed.count_nonzero() > 200


@pytest.mark.parametrize("direction", [name for name, of in EAGER.items() if not of.jumps])
def test_the_reference_is_differentiable_twice_at_equal_models(direction):
    """Slopes that jump, as those of tv do, have no derivative there."""
    logits, _ = models(1, 2, 4, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda *logits: klfast.kl_divergence(*logits, direction=direction, backend="reference"),
        al.leaves(logits, logits.detach().clone()),
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda z, y, ids: klfast.token_logprobs(z, ids, backend="native"),
        lambda z, y, ids: klfast.token_logprobs(z, ids, inplace_backward=True, backend="native"),
        lambda z, y, ids: klfast.token_logprobs(z, ids, inplace_backward=True, backend="reference"),
        lambda z, y, ids: klfast.kl_divergence(z, y, backend="native"),
        lambda z, y, ids: klfast.kl_divergence(y, z, direction="forward", backend="native"),
    ],
    ids=["log-probs", "in-place", "in-place-reference", "kl", "kl-of-reference"],
)
def test_logits_that_are_freed_before_a_reading_backward_are_an_error(call):
    leaf, other = models()
    logits = leaf * 1
    found = call(logits, other.detach(), al.random_ids(leaf))
    logits.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"logits.* must keep its shape and storage .* freed"):
        found.sum().backward()


@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_detached_entropies_have_no_gradient(backend, reduction):
    inputs = models()
    options = {"reduction": reduction, "backend": backend}
    ids = al.random_ids(inputs[0])
    calls = [
        lambda e: klfast.kl_divergence(*inputs, return_entropy=e, **options),
        lambda e: klfast.token_logprobs(inputs[0], ids, return_entropy=e, backend=backend),
    ]
    for call in calls:
        wanted, found = call(True), call("detached")
        assert wanted.entropy.requires_grad
        assert not found.entropy.requires_grad
        assert same_bits(found.entropy, wanted.entropy.detach())
        grads = [torch.autograd.grad(outputs[0].sum(), inputs[0])[0] for outputs in (found, wanted)]
        assert same_bits(*grads)


@pytest.mark.exhaustive
def test_fp16_gradients_of_a_long_mean_keep_their_digits_under_loss_scaling(backend):
    """A token's share of 1 / 4,096 would move most gradients below fp16's range."""
    tokens, scale = 4096, 65536.0
    logits, ref_logits = al.random_logits(1, tokens, 4, dtype=torch.float16)
    (leaf,) = al.leaves(logits)
    divergence = klfast.kl_divergence(leaf, ref_logits, reduction="token-mean", backend=backend)
    (scale * divergence).backward()
    (wide,) = al.leaves(logits.double())
    exact = klfast.kl_divergence(wide, ref_logits.double(), backend="reference")
    (exact.sum() * (scale / tokens)).backward()
    error = (leaf.grad.double() - wide.grad).abs()
    half_a_unit = torch.finfo(torch.float16).eps / 2 * wide.grad.abs() + 2**-25
    assert (error <= half_a_unit + 1e-5 * wide.grad.abs() + 1e-6).all()
