"""Backward from hidden states: again, twice, under checkpointing, accumulation and autocast."""

import pytest
import torch
from agreement import same_bits
from agreement_logits import COMPILED
from torch.utils.checkpoint import checkpoint

import klfast

WORDS = 40


def inputs(rows=9, width=8, dtype=torch.float32):
    hidden, weight = torch.randn(rows, width), torch.randn(WORDS, width)
    ref_hidden = hidden + 0.1 * torch.randn(rows, width)
    return [t.to(dtype).requires_grad_(n < 2) for n, t in enumerate((hidden, weight, ref_hidden))]


def mean_kl(hidden, weight, ref_hidden, **options):
    return klfast.linear_kl_divergence(
        hidden, weight, ref_hidden, reduction="token-mean", chunk=4, **options
    )


def rows_kl(hidden, weight, ref_hidden, **options):
    kl = klfast.linear_kl_divergence(hidden, weight, ref_hidden, chunk=4, **options)
    return (kl * torch.linspace(0, 1, len(kl))).sum()


def log_probs(hidden, weight, ref_hidden, **options):
    ids = torch.arange(len(hidden)) % WORDS
    return klfast.linear_token_logprobs(hidden, weight, ids, chunk=4, **options).sum()


CALLS = [mean_kl, rows_kl, log_probs]
every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


@pytest.fixture(params=COMPILED)
def compiled(request, monkeypatch):
    """The backends of ops."""
    from targets import TARGETS, serving

    with serving(TARGETS[request.param]):
        yield TARGETS[request.param].backend


@every_call
def test_a_retained_graph_gives_the_same_gradients(compiled, call):
    tensors = inputs()
    result = call(*tensors, backend=compiled)
    first = torch.autograd.grad(result, tensors[:2], retain_graph=True)
    handed_out = [grad.clone() for grad in first]
    for grad in first:
        grad.fill_(torch.nan)
    second = torch.autograd.grad(result, tensors[:2])
    assert all(same_bits(a, b) for a, b in zip(handed_out, second, strict=True))


def test_a_scalar_whose_graph_is_gone_says_so(compiled):
    tensors = inputs()
    result = mean_kl(*tensors, backend=compiled)
    torch.autograd.grad(result, tensors[:2])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(result, tensors[:2])


@every_call
def test_a_second_derivative_is_refused(compiled, call):
    tensors = inputs()
    (grad,) = torch.autograd.grad(call(*tensors, backend=compiled), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), tensors[0])


@every_call
def test_the_reference_is_differentiable_twice(call):
    tensors = [t.double().detach().requires_grad_(t.requires_grad) for t in inputs(3, 4)]
    options = {} if call is log_probs else {"ref_weight": tensors[1].detach().clone()}
    of = lambda h, w: call(h, w, tensors[2], **options, backend="reference")  # noqa: E731
    assert torch.autograd.gradgradcheck(of, tensors[:2], fast_mode=True)


@every_call
def test_grad_out_scales_the_gradient(compiled, call):
    tensors = inputs()
    once = torch.autograd.grad(call(*tensors, backend=compiled), tensors[:2])
    scaled = torch.autograd.grad(-2.5 * call(*tensors, backend=compiled), tensors[:2])
    for a, b in zip(once, scaled, strict=True):
        torch.testing.assert_close(-2.5 * a, b, rtol=1e-5, atol=1e-7)


@every_call
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(compiled, call, use_reentrant):
    tensors = inputs()
    plain = torch.autograd.grad(call(*tensors, backend=compiled), tensors[:2])
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    run = lambda *t: call(*t, backend=compiled)  # noqa: E731
    checkpoint(run, *leaves, use_reentrant=use_reentrant).backward()
    assert all(same_bits(a, t.grad) for a, t in zip(plain, leaves, strict=False))


@every_call
def test_gradients_accumulate(compiled, call):
    tensors = inputs()
    once = torch.autograd.grad(call(*tensors, backend=compiled), tensors[:2])
    for _ in range(2):
        call(*tensors, backend=compiled).backward()
    for grad, tensor in zip(once, tensors, strict=False):
        assert same_bits(2 * grad, tensor.grad)


def test_a_head_without_gradient_gets_none(compiled):
    hidden, weight, ref_hidden = inputs()
    weight = weight.detach()
    for call in CALLS:
        call(hidden, weight, ref_hidden, backend=compiled).backward()
    assert weight.grad is None


def test_a_shared_head_is_learnt_from_the_policy_alone(compiled):
    """ref_weight=None: nothing flows to the weight by way of the reference."""
    hidden, weight, ref_hidden = inputs()
    ref_hidden.requires_grad_()
    bias = torch.randn(WORDS, requires_grad=True)
    kl = lambda *head, **bias: klfast.linear_kl_divergence(  # noqa: E731
        hidden, weight, ref_hidden, *head, reduction="token-sum", **bias, backend=compiled
    )
    leaves = [hidden, weight, ref_hidden, bias]
    shared = torch.autograd.grad(kl(bias=bias), leaves)
    apart = torch.autograd.grad(kl(weight.detach(), bias=bias, ref_bias=bias.detach()), leaves)
    assert all(same_bits(a, b) for a, b in zip(shared, apart, strict=True))


@every_call
def test_autocast_is_that_of_a_linear_layer(compiled, call):
    """Hidden states and weight in bf16, as a linear layer takes them; logits are not rounded."""
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        result = call(*tensors, backend=compiled)
    assert result.dtype == torch.float32
    grads = torch.autograd.grad(result, tensors[:2])
    rounded = [t.detach().bfloat16().requires_grad_(t.requires_grad) for t in tensors]
    wanted = call(*rounded, backend=compiled)
    assert same_bits(result, wanted)
    for grad, own in zip(grads, torch.autograd.grad(wanted, rounded[:2]), strict=True):
        assert grad.dtype == torch.float32
        assert same_bits(grad.bfloat16(), own)


@every_call
def test_inputs_may_be_changed_where_autograd_would_not_see_them(compiled, call):
    """Inference tensors, no_grad, and memory with strides."""
    hidden, weight, ref_hidden = inputs()
    with torch.inference_mode():
        ref_hidden = ref_hidden.clone()
    wanted = torch.autograd.grad(call(hidden, weight, ref_hidden, backend=compiled), hidden)
    strided = torch.empty(9, 16)[:, ::2].copy_(hidden.detach()).requires_grad_()
    column = torch.empty(8, WORDS).copy_(weight.detach().t()).t()
    found = torch.autograd.grad(call(strided, column, ref_hidden, backend=compiled), strided)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not call(hidden, weight, ref_hidden, backend=compiled).requires_grad


# Dynamo asks a tensor that a graph has made for its gradient, and hides torch's warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_graph_breaks_at_a_call():
    hidden, weight, ref_hidden = inputs()

    def loss(hidden, weight):
        return 2 * mean_kl(hidden * 3, weight, ref_hidden)

    wanted = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    compiled = torch.compile(loss, backend="aot_eager")
    found = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it walks over the batch in Python"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, weight)
