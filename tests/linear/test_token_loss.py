"""A caller's loss per token from hidden states: against plain code, what reaches it, and errors."""

from functools import partial

import pytest
import torch
from agreement import same_bits
from refusals import assert_refused

import klfast

WORDS, WIDTH, SHAPE = 40, 8, (3, 5)


def leaves():
    """hidden, weight and bias."""
    made = torch.randn(*SHAPE, WIDTH), torch.randn(WORDS, WIDTH), torch.randn(WORDS)
    return [t.requires_grad_() for t in made]


def tokens():
    """token_ids, and a mask of weights that keeps no token of the second sequence."""
    mask = torch.rand(SHAPE).where(torch.rand(SHAPE) < 0.7, 0.0)
    mask[0, 0], mask[1] = 0.5, 0.0
    return torch.randint(WORDS, SHAPE), mask


def grpo(logprobs, old, ref, advantages):
    ratio = (logprobs - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return 0.1 * klfast.kl_penalty(logprobs, ref, estimator="k3+", old_logprobs=old) - gain


def plain_grpo(hidden, weight, bias, ids, old, ref, advantages):
    """In float64. k3+ is k3 with the gradient of k2, times a detached weight."""
    logits = hidden.double() @ weight.double().T + bias.double()
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio, x = (logprobs - old).exp(), logprobs - ref
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    k2, k3 = x.square() / 2, torch.expm1(-x) + x
    return 0.1 * ratio.detach() * (k2 + (k3 - k2).detach()) - gain


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "token-sum"])
@pytest.mark.parametrize("frozen", [False, True])
def test_grpo_with_a_clip_and_a_kl_is_the_plain_computation(backend, reduction, frozen):
    given, (ids, mask) = leaves(), tokens()
    given[1].requires_grad_(not frozen)
    given[2].requires_grad_(not frozen)
    with torch.no_grad():
        old = klfast.linear_token_logprobs(*given[:2], ids, bias=given[2], backend="reference")
    old, ref = ((old + 0.3 * torch.randn(SHAPE)).clamp(max=0) for _ in range(2))
    inputs = old, ref, torch.randn(SHAPE[0], 1)
    kept = mask.bool()
    wanted = klfast.reduce(
        torch.where(kept, plain_grpo(*given, ids, *inputs), 0.0), mask, reduction=reduction
    )
    unknown = [torch.where(kept, t, torch.nan) for t in inputs[:2]] + [inputs[2]]
    hidden, weight, bias = given
    found = klfast.linear_token_loss(
        *(hidden, weight, ids, grpo, mask),
        inputs=unknown,
        bias=bias,
        reduction=reduction,
        chunk=4,
        return_entropy=True,
        backend=backend,
    )
    asked = [t for t in given if t.requires_grad]
    # A sum of 15 tokens of three matmuls; eager fp32 has errors of the same size.
    close = partial(torch.testing.assert_close, rtol=2e-5, atol=2e-6)
    close(found.loss.double(), wanted)
    truth = torch.autograd.grad(3 * wanted, asked)
    for grad, expected in zip(torch.autograd.grad(3 * found.loss, asked), truth, strict=True):
        close(grad, expected)
    of_tokens = klfast.linear_token_logprobs(
        *(hidden, weight, ids, mask), bias=bias, chunk=4, return_entropy=True, backend=backend
    )
    assert not found.logprobs.requires_grad
    assert not found.entropy.requires_grad
    assert same_bits(found.logprobs, of_tokens.logprobs.detach())
    assert same_bits(found.entropy, of_tokens.entropy.detach())


def test_lora_on_the_head(backend):
    (hidden, weight, _), (ids, mask) = leaves(), tokens()
    weight.requires_grad_(False)
    adapters = [t.requires_grad_() for t in (torch.randn(WORDS, 2), torch.randn(2, WIDTH))]
    head = weight + 0.1 * adapters[0] @ adapters[1]
    given = hidden, head, ids
    wanted = klfast.reduce(
        -klfast.linear_token_logprobs(*given, mask, backend="reference"),
        mask,
        reduction="token-mean",
    )
    found = klfast.linear_token_loss(*given, torch.neg, mask, backend=backend).loss
    truth = torch.autograd.grad(wanted, [hidden, *adapters], retain_graph=True)
    for grad, expected in zip(torch.autograd.grad(found, [hidden, *adapters]), truth, strict=True):
        torch.testing.assert_close(grad, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("differentiated", [True, False])
def test_a_loss_sees_kept_tokens_alone(backend, differentiated):
    """Each once, in order, with its part of each input, and with the caller's autocast."""
    (hidden, weight, _), (ids, mask) = leaves(), tokens()
    hidden.requires_grad_(differentiated)
    weight.requires_grad_(False)
    numbers, flags, seen = torch.arange(15).view(SHAPE), torch.rand(SHAPE) < 0.5, []

    def loss(logprobs, number, flag, sequence):
        seen.append((logprobs.detach().clone(), number, flag, sequence))
        assert torch.is_autocast_enabled(logprobs.device.type)
        assert logprobs.dtype == torch.float32
        logprobs.detach().fill_(1)  # its own memory
        return number.double() / 16

    inputs = numbers, flags, torch.arange(3)[:, None]
    with torch.autocast(hidden.device.type, torch.bfloat16):
        found = klfast.linear_token_loss(
            hidden, weight, ids, loss, mask, inputs=inputs, chunk=4, backend=backend
        )
    kept = mask != 0
    assert same_bits(found.loss, klfast.reduce(numbers / 16, mask, reduction="token-mean"))
    wanted = found.logprobs, numbers, flags, inputs[2].expand(SHAPE)
    for parts, whole in zip(zip(*seen, strict=True), wanted, strict=True):
        assert torch.equal(torch.cat(parts), whole[kept])
    assert backend == "reference" or all(len(logprobs) <= 4 for logprobs, *_ in seen)
    if differentiated:
        assert not torch.autograd.grad(found.loss, hidden)[0].any()


@pytest.mark.parametrize("poison", ["inputs", "hidden"])
def test_what_has_a_weight_of_0_is_selected_away(backend, poison):
    """NaN there changes neither the loss nor a gradient. Such tokens keep their log-probs."""
    (hidden, weight, _), (ids, mask) = leaves(), tokens()
    weights = torch.rand(SHAPE).where(torch.rand(SHAPE) < 0.6, 0.0)
    weights[0, 1], mask[0, 1] = 0.0, 1.0
    factors = torch.rand(SHAPE)

    def run(hidden, factors):
        given = hidden.detach().requires_grad_(), weight
        found = klfast.linear_token_loss(
            *(*given, ids, lambda logprobs, factor: factor * logprobs.exp(), mask),
            inputs=(factors,),
            weights=weights,
            chunk=4,
            backend=backend,
        )
        return found, torch.autograd.grad(found.loss, given)

    found, grads = run(hidden, factors)
    losses = factors * found.logprobs.exp()
    wanted = klfast.reduce(losses, mask, weights=weights, reduction="token-mean")
    torch.testing.assert_close(found.loss.detach(), wanted)
    if poison == "inputs":
        factors = torch.where(weights == 0, torch.nan, factors)
    else:
        hidden = torch.where(weights[..., None] == 0, torch.nan, hidden)
    other, same = run(hidden, factors)
    assert same_bits(other.loss, found.loss)
    assert all(map(same_bits, same, grads))
    assert not grads[0][weights == 0].any()
    assert found.logprobs[mask != 0].all()


def test_packed_sequences(backend):
    (hidden, weight, _), (ids, _) = leaves(), tokens()
    edges = torch.tensor([0, 0, 4, 15], dtype=torch.int32)
    given = hidden.flatten(0, 1), weight, ids.flatten(), torch.exp
    found = klfast.linear_token_loss(
        *given, cu_seqlens=edges, reduction="seq-mean-token-sum", normalizer=4.0, backend=backend
    )
    torch.testing.assert_close(found.loss, found.logprobs.exp().sum() / 4)


def test_backward_a_second_time(backend):
    """Its incoming gradient may be another."""
    (hidden, weight, _), (ids, _) = leaves(), tokens()
    loss = klfast.linear_token_loss(hidden, weight, ids, torch.neg, backend=backend).loss
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    again = torch.autograd.grad(loss, [hidden, weight], 2 * torch.ones_like(loss))
    for one, two in zip(first, again, strict=True):
        torch.testing.assert_close(2 * one, two)


OTHER = torch.ones((), requires_grad=True)
REFUSED = {
    "no function": (
        {"loss": torch.zeros(3, 5)},
        TypeError,
        r"loss must be a function of log-probs \[n\] .*, got Tensor",
    ),
    "one input": (
        {"inputs": torch.zeros(3, 5)},
        TypeError,
        r"inputs must be a tuple or list of tensors, got Tensor: pass inputs=\(tensor,\)",
    ),
    "a number": (
        {"inputs": (torch.zeros(3, 5), 0.5)},
        TypeError,
        r"inputs\[1\] must be a torch.Tensor, got float",
    ),
    "per sequence": (
        {"inputs": [torch.zeros(3)]},
        ValueError,
        r"inputs\[0\] must have the shape of token_ids, \[3, 5\], or broadcast to it, got \[3\]",
    ),
    "a graph": (
        {"inputs": (OTHER,)},
        ValueError,
        r"inputs\[0\] must be a constant, .*: pass inputs\[0\].detach\(\), or apply",
    ),
    "K ids": (
        {"token_ids": torch.zeros(3, 5, 2, dtype=torch.int64)},
        ValueError,
        r"token_ids must have the shape of hidden without the hidden size, \[3, 5\], got",
    ),
    "per token": (
        {"reduction": "none"},
        ValueError,
        "reduction must be one of 'token-sum', .* got 'none': .* klfast.linear_token_logprobs",
    ),
    "nothing": ({"loss": lambda logprobs: None}, TypeError, "loss must return a .*, got NoneType"),
    "an integer": (
        {"loss": lambda logprobs: logprobs.long()},
        TypeError,
        "loss must return a floating dtype, got torch.int64",
    ),
    "a mean": (
        {"loss": lambda logprobs: logprobs.mean()},
        ValueError,
        r"loss must return one loss per token, \[15\] .*, got \[\] on .*: leave means",
    ),
    "another leaf": (
        {"loss": lambda logprobs: logprobs * OTHER.exp()},
        ValueError,
        r"loss must not depend on a tensor that requires a gradient, .* shape \[\]: detach it, or",
    ),
    "nan": (
        {
            "loss": lambda logprobs, at: torch.where(at == 7, torch.nan, logprobs),
            "inputs": (torch.arange(15).view(3, 5),),
        },
        ValueError,
        r"loss must return a number for every kept token, got nan at \[1, 2\], whose log-prob is -",
    ),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_what_is_refused(backend, name, trained):
    arguments, error, message = REFUSED[name]
    (hidden, weight, _), (ids, _) = leaves(), tokens()
    tensors = [t.requires_grad_(trained) for t in (hidden, weight)]
    given = dict(zip(("hidden", "weight"), tensors, strict=True)) | {"token_ids": ids}
    given |= {"loss": torch.neg, "backend": backend} | arguments
    assert_refused(klfast.linear_token_loss, given, error, message)


def test_nan_of_the_model_reaches_the_loss(backend):
    """A loss scaler has to see it."""
    (hidden, weight, _), (ids, _) = leaves(), tokens()
    with torch.no_grad():
        hidden[0, 0] = torch.nan
    assert klfast.linear_token_loss(hidden, weight, ids, torch.neg, backend=backend).loss.isnan()
