"""Backward from hidden states: heads that change, saved tensors, and autocast."""

import pytest
import torch
from agreement import same_bits
from agreement_logits import FAST
from targets import TARGETS, serving

import klfast
from klfast.autograd import chunks, frozen_head

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


def mean_loss(hidden, weight, ref_hidden, **options):
    ids = torch.arange(len(hidden)) % WORDS
    given = hidden, weight, ids, lambda logprobs: logprobs.exp()
    return klfast.linear_token_loss(*given, chunk=4, **options).loss


CALLS = [mean_kl, rows_kl, log_probs, mean_loss]
every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


@pytest.fixture(params=FAST)
def compiled(request):
    """The backends of ops."""
    with serving(TARGETS[request.param]):
        yield TARGETS[request.param].backend


CHANGES = {
    "emptied": lambda weight: setattr(weight, "data", torch.empty(0)),
    "replaced": lambda weight: setattr(weight, "data", torch.randn(WORDS, 8)),
    "freed": lambda weight: weight.untyped_storage().resize_(0),
}


@every_call
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_head_that_changed_unseen_gives_an_error_or_the_gradient(compiled, call, trained, change):
    """DeepSpeed ZeRO-3 and FSDP change parameters without autograd's knowledge."""
    hidden, weight, ref_hidden = inputs()
    weight = torch.nn.Parameter(weight.detach(), requires_grad=trained)
    ref_weight = weight.detach().clone()
    options = {"ref_weight": ref_weight} if call in (mean_kl, rows_kl) else {}
    wanted = torch.autograd.grad(
        call(hidden, weight, ref_hidden, **options, backend=compiled), hidden
    )
    result = call(hidden, weight, ref_hidden, **options, backend=compiled)
    CHANGES[change](weight)
    # These calls read the weight again, or have a gradient of its shape.
    needs_weight = call is log_probs or (trained and (call is rows_kl or change == "emptied"))
    if needs_weight:
        message = "weight must keep its shape and storage .* DeepSpeed ZeRO-3 .* around the forward"
        with pytest.raises(RuntimeError, match=message):
            result.backward()
        assert hidden.grad is None
    else:
        result.backward()
        assert same_bits(hidden.grad, wanted[0])


@every_call
@pytest.mark.parametrize("trained", [False, True])
def test_a_storage_that_is_freed_and_filled_again_is_the_same(compiled, call, trained):
    """FSDP does so between the forward and the backward."""
    hidden, weight, ref_hidden = inputs()
    weight.requires_grad_(trained)
    wanted = torch.autograd.grad(call(hidden, weight, ref_hidden, backend=compiled), hidden)
    whole = weight.detach().clone()
    result = call(hidden, weight, ref_hidden, backend=compiled)
    storage = weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(whole)
    assert same_bits(torch.autograd.grad(result, hidden)[0], wanted[0])


def kept_by(result):
    """The tensors in the attributes of a graph's Functions."""
    nodes, found = [result.grad_fn], []
    for node in nodes:  # grows as it is read
        nodes += [following for following, _ in node.next_functions if following is not None]
        values = [*getattr(node, "__dict__", {}).values()]
        for value in values:
            values += value if isinstance(value, tuple | list) else ()
        found += [value for value in values if isinstance(value, torch.Tensor)]
    return found


@every_call
@pytest.mark.parametrize("trained", [False, True])
def test_all_that_a_call_keeps_is_freed_with_its_graph(compiled, call, trained):
    """Saved tensors are freed and can be offloaded. Attributes of Functions are not."""
    hidden, weight, ref_hidden = inputs()
    weight.requires_grad_(trained)
    with torch.inference_mode():
        ref_hidden = ref_hidden.clone()
    result = call(hidden, weight, ref_hidden, backend=compiled)
    assert not kept_by(result)
    result.backward()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_a_detached_entropy_costs_no_matmul(compiled, monkeypatch, trained, reduction):
    hidden, weight, ref_hidden = inputs()
    weight.requires_grad_(trained)
    ids, counted = torch.arange(len(hidden)), []
    to_hidden = chunks.to_hidden

    def count(*args):
        counted.append(args)
        return to_hidden(*args)

    for module in (chunks, frozen_head):
        monkeypatch.setattr(module, "to_hidden", count)

    def run(return_entropy, **options):
        counted.clear()
        if reduction == "none":
            outputs = klfast.linear_token_logprobs(
                hidden, weight, ids, return_entropy=return_entropy, **options
            )
        else:
            outputs = klfast.linear_kl_divergence(
                *(hidden, weight, ref_hidden, weight.detach()),
                reduction=reduction,
                return_entropy=return_entropy,
                **options,
            )
        result = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        grad = torch.autograd.grad(result.sum(), hidden)[0]
        return grad, getattr(outputs, "entropy", None), len(counted)

    plain, _, matmuls = run(False, backend=compiled)
    grad, entropy, same = run("detached", backend=compiled)
    assert same_bits(grad, plain)
    assert same == matmuls
    assert not entropy.requires_grad
    assert same_bits(entropy, run(True, backend=compiled)[1].detach())
    torch.testing.assert_close(entropy, run("detached", backend="reference")[1])


def test_many_ids_a_token_take_the_memory_of_a_chunk(compiled):
    """A chunk of one token has pieces of 5 ids. Frozen and trained heads have the same gradient."""
    hidden, weight, _ = inputs()
    ids = torch.randint(WORDS, (len(hidden), 12))
    upstream = torch.randn(ids.shape)
    found = []
    for trained in (False, True):
        weight.requires_grad_(trained)
        logprobs = klfast.linear_token_logprobs(hidden, weight, ids, chunk=1, backend=compiled)
        found += torch.autograd.grad(logprobs, hidden, upstream)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_shared_head_is_learnt_from_the_policy_alone(compiled):
    """With ref_weight=None the reference gives the weight no gradient."""
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
    """Hidden states and weight become bf16, as in a linear layer. Logits are not rounded."""
    tensors = inputs()
    with torch.autocast(tensors[0].device.type, torch.bfloat16):
        result = call(*tensors, backend=compiled)
    assert result.dtype == torch.float32
    grads = torch.autograd.grad(result, tensors[:2])
    rounded = [t.detach().bfloat16().requires_grad_(t.requires_grad) for t in tensors]
    wanted = call(*rounded, backend=compiled)
    assert same_bits(result, wanted)
    for grad, own in zip(grads, torch.autograd.grad(wanted, rounded[:2]), strict=True):
        assert grad.dtype == torch.float32
        assert same_bits(grad.bfloat16(), own)


PER_TOKEN = {
    "linear_token_logprobs": lambda hidden, weight, _, **options: klfast.linear_token_logprobs(
        hidden, weight, torch.arange(2 * len(hidden)).view(-1, 2) % WORDS, **options
    ),
    "linear_kl_divergence": lambda *inputs, **options: klfast.linear_kl_divergence(
        *inputs, token_ids=torch.arange(len(inputs[0])), **options
    ),
    "linear_topk_kl_divergence": lambda hidden, weight, _, **options: (
        klfast.linear_topk_kl_divergence(
            *(hidden, weight, torch.arange(3).expand(len(hidden), 3)),
            torch.full((len(hidden), 3), -2.0),
            **options,
        )
    ),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_many_gradients_at_once_are_right_or_refused(compiled, name, trained):
    """With ``is_grads_batched``, as ``torch.autograd.functional.jacobian(vectorize=True)`` asks."""
    entropy = {} if "topk" in name else {"return_entropy": True}
    for backend in (compiled, "reference"):
        leaves = [t.requires_grad_((trained and n == 1) or n == 0) for n, t in enumerate(inputs())]
        outputs = PER_TOKEN[name](*leaves, chunk=4, backend=backend, **entropy)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        outputs = [each for each in outputs if each is not None and each.requires_grad]
        sent = [torch.randn(3, *each.shape) for each in outputs]
        wanted = leaves[: 1 + trained]
        if trained and backend != "reference":
            with pytest.raises(RuntimeError, match=rf"klfast.{name} needs backend='reference' for"):
                torch.autograd.grad(outputs, wanted, sent, is_grads_batched=True)
            continue
        together = torch.autograd.grad(
            outputs, wanted, sent, is_grads_batched=True, retain_graph=True
        )
        for at, one in enumerate(zip(*sent, strict=True)):
            alone = torch.autograd.grad(outputs, wanted, one, retain_graph=True)
            for found, expected in zip(together, alone, strict=True):
                torch.testing.assert_close(found[at], expected, rtol=2e-6, atol=1e-6)
