"""``weights=`` multiplies values and gradients, and is in no denominator and no statistic."""

import functools
import math

import pytest
import torch
from agreement import assert_agrees, random_inputs, same_bits

import klfast
from klfast import backends
from klfast.types.reduction import REDUCTIONS

SHAPE = (4, 70)
EDGES = torch.tensor([0, 70, 70, 100, 280])
RICH = klfast.Estimator("k3", importance_cap=1.2, log_ratio_clip=3.0, linear_tail=1.0, kl_clip=2.0)

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def numbers(*shape, dtype=torch.float32):
    """Weights from 0 to 2, some of them 0, exact in every dtype."""
    return (torch.randint(0, 9, shape) / 4).to(dtype)


def per_token(weights, tokens, cu_seqlens):
    """A weight for each token, in a loop."""
    if weights.shape == tokens:
        return weights
    if cu_seqlens is None:
        return weights.reshape(-1, 1).expand(tokens) if len(tokens) == 2 else weights.expand(tokens)
    lengths = cu_seqlens.diff().tolist()
    return torch.cat([torch.full((n,), w) for n, w in zip(lengths, weights.tolist(), strict=True)])


LAYOUTS = {
    "[B, T]": (SHAPE, None, SHAPE),
    "[B, 1]": (SHAPE, None, (4, 1)),
    "[S]": (SHAPE, None, (4,)),
    "packed [N]": ((280,), EDGES, (280,)),
    "packed [S]": ((280,), EDGES, (4,)),
    "one sequence [N]": ((70,), None, (70,)),
    "one sequence [1]": ((70,), None, (1,)),
    "as many tokens as sequences": ((4,), torch.tensor([0, 1, 1, 3, 4]), (4,)),
}


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@every_reduction
def test_a_call_agrees_with_the_oracle(backend, reduction, dtype, layout):
    """``reduce`` has the bits of k1 against zeros."""
    tokens, cu_seqlens, shape = layout
    policy, reference, old = random_inputs(tokens, dtype)
    mask = torch.randint(0, 3, tokens) / 2
    options = {"reduction": reduction, "weights": numbers(*shape).to(dtype)}
    options |= {"coef": 0.7, "cu_seqlens": cu_seqlens}
    given = policy, reference, mask
    assert_agrees(backend, *given, estimator=RICH, old_logprobs=old, **options)
    if backend == backends.resolve("auto", policy.device).name:
        zeros = torch.zeros_like(policy)
        k1 = klfast.kl_penalty(policy, zeros, mask, estimator="k1", backend=backend, **options)
        assert same_bits(klfast.reduce(policy, mask, **options), k1)


@pytest.mark.grid
@pytest.mark.parametrize("layout", ["[B, T]", "[S]", "packed [S]"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@every_reduction
def test_a_weight_of_0_selects_a_token_away(backend, reduction, layout, poison):
    """Its value and gradient are 0 whatever the token holds, and it stays in the denominator."""
    tokens, cu_seqlens, shape = LAYOUTS[layout]
    tensors = random_inputs(tokens)
    weights = numbers(*shape)
    weights[0] = 0.0
    idle = per_token(weights, tokens, cu_seqlens) == 0
    found = []
    for dirty in (False, True):
        policy, reference, old = (
            torch.where(idle & dirty, poison, t).requires_grad_() for t in tensors
        )
        result = klfast.kl_penalty(
            policy,
            reference,
            estimator=RICH,
            old_logprobs=old.detach(),
            reduction=reduction,
            weights=weights,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )
        upstream = torch.ones_like(result)
        if reduction == "none" and dirty:
            upstream[idle] = poison
        found.append((result, *torch.autograd.grad(result, (policy, reference), upstream)))
    for clean, dirty in zip(*found, strict=True):
        torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
    assert all((grad[idle] == 0).all() for grad in found[1][1:])


def test_a_weight_under_the_mask_is_not_read(backend):
    policy, reference, _ = random_inputs(SHAPE)
    policy.requires_grad_()
    mask = torch.rand(SHAPE) < 0.6
    found = []
    for poison in (0.5, math.nan, math.inf, -1.0):
        weights = torch.where(mask, numbers(1).expand(SHAPE) + 0.25, poison)
        torch.manual_seed(0)
        result = klfast.kl_penalty(
            policy, reference, mask, weights=weights, reduction="seq-mean", backend=backend
        )
        found.append([result.isfinite().all(), *torch.autograd.grad(result.sum(), policy)])
    assert all(finite for finite, _ in found)
    assert all((grad[~mask] == 0).all() and grad.isfinite().all() for _, grad in found)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_weight_of_a_kept_token_that_is_not_finite_shows(backend, poison):
    policy, reference, _ = random_inputs(SHAPE)
    weights = torch.ones(SHAPE)
    weights[2, 3] = poison
    call = functools.partial(klfast.kl_penalty, policy, reference, backend=backend)
    assert call(weights=weights).isfinite().logical_not().nonzero().tolist() == [[2, 3]]
    assert not call(weights=weights, reduction="token-mean").isfinite()


NEGATIVE = r"weights must be >= 0 where tokens are kept, got -0.5 at \[{}\]"


@pytest.mark.parametrize("layout", ["[B, T]", "[B, 1]", "packed [N]", "packed [S]"])
def test_a_negative_weight(backend, layout):
    tokens, cu_seqlens, shape = LAYOUTS[layout]
    policy, reference, _ = random_inputs(tokens)
    weights = torch.ones(shape)
    weights.view(-1)[-1] = -0.5
    mask = torch.ones(tokens, dtype=torch.bool)
    options = {"weights": weights, "cu_seqlens": cu_seqlens}
    where = [d - 1 for d in tokens]
    if layout.endswith(("1]", "[S]")):
        where[-1] = 0 if cu_seqlens is None else 100
    expected = NEGATIVE.format(", ".join(map(str, where)))
    with pytest.raises(ValueError, match=expected):
        klfast.kl_penalty(policy, reference, mask, backend=backend, **options)
    with pytest.raises(ValueError, match=expected):
        klfast.reduce(policy, mask, reduction="token-mean", **options)
    mask.view(-1)[0 if layout == "packed [N]" else -1] = False
    if shape == tokens:
        mask.view(-1)[-1] = False
        klfast.kl_penalty(policy, reference, mask, backend=backend, **options)


def test_a_weight_per_sequence_changes_the_gradient_of_every_mean(backend):
    """In the mask's place it cancels, because it is in the denominator too."""
    policy, reference, _ = random_inputs(SHAPE)
    policy.requires_grad_()
    weights = torch.tensor([0.5, 2.0, 1.0, 0.25])
    for reduction in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean", "token-mean"):
        call = functools.partial(
            klfast.kl_penalty, policy, reference, reduction=reduction, backend=backend
        )
        grad, of_weights = (
            torch.autograd.grad(call(weights=w).sum(), policy)[0] for w in (None, weights)
        )
        torch.testing.assert_close(of_weights, grad * weights[:, None])


@pytest.mark.parametrize("chosen", ["seq-tis", "tis", "icepop"])
def test_the_weights_of_rollout_correction(chosen):
    """The loss of the page equals the loss of ``token_weights``, also under a fractional mask."""
    policy, rollout, _ = random_inputs(SHAPE)
    advantages = torch.randn(4, 1)
    for mask in (torch.rand(SHAPE) < 0.7, torch.randint(0, 5, SHAPE) / 4, 2.0 * torch.ones(SHAPE)):
        corrected = klfast.rollout_correction(policy, rollout, mask, preset=chosen)
        total = corrected.stats.length.sum()
        loss = klfast.reduce(
            -advantages * policy,
            corrected.mask,
            weights=corrected.weights,
            reduction="token-mean",
            normalizer=total,
        )
        own = (corrected.token_weights * -advantages * policy).sum() / total
        torch.testing.assert_close(loss, own)


def test_token_weights_without_weights_are_the_mask():
    policy, rollout, _ = random_inputs(SHAPE)
    mask = torch.randint(0, 5, SHAPE) / 4
    corrected = klfast.rollout_correction(policy, rollout, mask, weight=None)
    assert torch.equal(corrected.token_weights, mask)
    weighted = klfast.rollout_correction(policy, rollout, mask)
    assert torch.equal(weighted.token_weights, weighted.weights * mask)


def test_a_penalty_object_weighs_its_losses_alone():
    policy, reference, _ = random_inputs(SHAPE)
    logits, ref_logits = torch.randn(2, *SHAPE, 7)
    hidden, head = torch.randn(*SHAPE, 3), torch.randn(7, 3)
    weights = numbers(4)
    penalty = klfast.KLPenalty("k3", "seq-mean-token-mean")
    calls = {
        klfast.kl_penalty: (penalty, (policy, reference)),
        klfast.kl_divergence: (penalty.from_logits, (logits, ref_logits)),
        klfast.linear_kl_divergence: (penalty.from_hidden, (hidden, head, hidden + 1)),
    }
    for function, (call, inputs) in calls.items():
        loss, numbers_of = call(*inputs, weights=weights), penalty.step()
        expected = function(*inputs, weights=weights, reduction="seq-mean-token-mean")
        torch.testing.assert_close(loss, expected)
        call(*inputs)
        assert repr(penalty.step()) == repr(numbers_of)  # NaN is not equal to itself


def test_vmap_and_compile(backend):
    policy, reference, _ = random_inputs((3, *SHAPE))
    of_tokens, of_sequences = numbers(3, *SHAPE), numbers(3, 4)

    def loss(policy, reference, weights):
        return klfast.kl_penalty(
            policy, reference, weights=weights, reduction="token-mean", backend=backend
        )

    for weights in (of_tokens, of_sequences):
        each = torch.stack([loss(*t) for t in zip(policy, reference, weights, strict=True)])
        torch.testing.assert_close(torch.func.vmap(loss)(policy, reference, weights), each)
        grads = torch.func.vmap(torch.func.grad(loss))(policy, reference, weights)
        leaf = policy.clone().requires_grad_()
        for part in zip(leaf, reference, weights, strict=True):
            loss(*part).backward()
        torch.testing.assert_close(grads, leaf.grad)
