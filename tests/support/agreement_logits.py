"""Logits as training makes them, and comparisons of calls over them with the oracle."""

import math

import oracle
import oracle_logits
import torch
from targets import TARGETS

import klfast

DIRECTIONS = ("reverse", "forward", "jsd")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

OF_ONE_WORD = 2**-22 + 2 * 2**-24
"""How far a row's sum may be off, relatively, where one word has all of it: a GPU's ex2.approx errs
by 2**-22, its argument and its result are rounded. Log-probs, entropies and divergences of 0 are
off by as much, absolutely."""

COMPILED = [name for name, target in TARGETS.items() if target.backend != "reference"]
"""Targets with kernels of their own. The reference cancels as the textbook does, and its last bits
are torch's."""

FAST = [name for name in COMPILED if not TARGETS[name].is_emulated]
"""Those for a whole vocabulary: the emulator takes a second for it."""

NOT_EMULATED = [name for name, target in TARGETS.items() if not target.is_emulated]
"""Those for what lies before the kernels, which are emulated behind the same Python."""


def random_logits(*shape, dtype=torch.float32, ref_dtype=None, apart=0.5):
    """(logits, ref_logits), some standard deviations wide, the reference ``apart`` beside."""
    logits = 2.5 * torch.randn(shape, dtype=torch.float64)
    ref_logits = logits + apart * torch.randn(shape, dtype=torch.float64)
    return logits.to(dtype), ref_logits.to(ref_dtype or dtype)


def random_ids(logits):
    return torch.randint(logits.shape[-1], logits.shape[:-1])


def uneven(like):
    """An upstream gradient that differs from token to token."""
    return torch.linspace(-1, 1.75, like.numel(), dtype=like.dtype).reshape(like.shape)


def leaves(*tensors):
    return tuple(t.detach().requires_grad_() for t in tensors)


def tensors_of(found):
    """The tensors of what ``kl_divergence`` returned, in order: all but statistics and None."""
    if isinstance(found, torch.Tensor):
        return (found,)
    return tuple(part for part in found if isinstance(part, torch.Tensor))


def assert_gradient(grad, to, truth, tolerance, what):
    assert grad.dtype == to.dtype, what
    oracle.assert_within(grad, truth, tolerance, what)


def assert_divergence_agrees(backend, logits, ref_logits, mask=None, **options):
    """Result, statistics and both gradients of ``kl_divergence`` are the oracle's.

    The gradient is asked for in the ways that backends compute differently: to both models, to
    either, and a second time.
    """
    inputs = leaves(logits, ref_logits)

    def call(*models, **others):
        return klfast.kl_divergence(*models, mask, **options, **others, backend=backend)

    found = call(*inputs, return_stats=True)
    result, stats = found.kl, found.stats
    upstream = uneven(result)
    truth = oracle_logits.kl_divergence(*inputs, mask, upstream=(upstream, None, None), **options)
    arithmetic = oracle.arithmetic_dtype(*inputs)
    assert result.dtype == arithmetic
    oracle.assert_within(result, truth.result, truth.result_tolerance, "result")
    oracle.assert_within(stats.kl, truth.kl, truth.kl_tolerance, "stats.kl")
    oracle.assert_within(stats.length, truth.length, truth.length_tolerance, "stats.length")

    of_policy = (truth.grad, truth.grad_tolerance, "grad")
    of_reference = (truth.grad_ref, truth.grad_ref_tolerance, "grad_ref")
    of_both = (of_policy, of_reference)
    alone = (call(inputs[0], ref_logits.detach()), call(logits.detach(), inputs[1]))
    for outcome, to, expected in (
        (result, inputs, of_both),
        (result, inputs, of_both),
        (alone[0], inputs[:1], of_both[:1]),
        (alone[1], inputs[1:], of_both[1:]),
    ):
        grads = torch.autograd.grad(outcome, to, upstream, retain_graph=True)
        for grad, leaf, of in zip(grads, to, expected, strict=True):
            assert_gradient(grad, leaf, *of)


def assert_entropy_agrees(backend, logits, ref_logits, mask=None, **options):
    """The policy's entropies beside a ``kl_divergence`` and their gradient are the oracle's, alone
    and together with the divergence's, whoever asks; and the divergence is the one without them.
    """
    inputs = leaves(logits, ref_logits)
    detached = [t.detach() for t in inputs]

    def call(*models, **others):
        return klfast.kl_divergence(*models, mask, **options, **others, backend=backend)

    result, entropy = tensors_of(call(*inputs, return_entropy=True))
    alone = call(*detached)
    assert result.detach().isclose(alone, rtol=0, atol=0, equal_nan=True).all()
    first, second = uneven(result), uneven(entropy).flip(-1) + 0.1

    def truth_for(of_result, of_entropy):
        upstream = (of_result, None, None)
        return oracle_logits.kl_divergence(
            *inputs, mask, upstream=upstream, entropy_upstream=of_entropy, **options
        )

    both = truth_for(first, second)
    assert entropy.shape == logits.shape[:-1]
    assert entropy.dtype == oracle.arithmetic_dtype(*inputs)
    oracle.assert_within(entropy, both.entropy, both.entropy_tolerance, "entropy")
    finite = result.isfinite().all()
    only_entropy = truth_for(torch.zeros_like(first), second)
    of_policy = call(inputs[0], detached[1], return_entropy=True)
    of_reference = call(detached[0], inputs[1], return_entropy=True)
    cases = [([entropy], inputs, [second], only_entropy)]
    if finite:
        cases += [
            ([result, entropy], inputs, [first, second], both),
            ([result, entropy], inputs, [first, second], both),
            (tensors_of(of_policy), inputs[:1], [first, second], both),
            ([of_reference.kl], inputs[1:], [first], truth_for(first, None)),
        ]
    for outputs, to, sent, truth in cases:
        grads = torch.autograd.grad(outputs, to, sent, retain_graph=True, materialize_grads=True)
        for grad, leaf in zip(grads, to, strict=True):
            policy = leaf is inputs[0]
            exact = truth.grad if policy else truth.grad_ref
            tolerance = truth.grad_tolerance if policy else truth.grad_ref_tolerance
            assert_gradient(grad, leaf, exact, tolerance, "grad")


def assert_tokens_agree(backend, logits, token_ids, keep=None, **options):
    """Log-probs, entropies and the gradients of ``token_logprobs``, of either and of both."""
    leaf = logits.detach().requires_grad_()
    temperature = options.get("temperature", 1.0)

    def call(**others):
        return klfast.token_logprobs(leaf, token_ids, **options, **others, backend=backend)

    def truth_for(*upstream):
        return oracle_logits.token_logprobs(
            logits, token_ids, keep, temperature=temperature, upstream=upstream
        )

    alone, (logprobs, entropy) = call(), call(return_entropy=True)
    truth = truth_for(None, None)
    for found in (alone, logprobs):
        assert found.dtype == oracle.arithmetic_dtype(logits)
        oracle.assert_within(found, truth.logprobs, truth.logprobs_tolerance, "logprobs")
    oracle.assert_within(entropy, truth.entropy, truth.entropy_tolerance, "entropy")
    first, second = uneven(alone), uneven(entropy).flip(-1) + 0.1
    for outputs, upstream, of in (
        ([alone], [first], (first, None)),
        ([alone], [first], (first, None)),
        ([entropy], [second], (None, second)),
        ([logprobs, entropy], [first, second], (first, second)),
    ):
        (grad,) = torch.autograd.grad(outputs, leaf, upstream, retain_graph=True)
        truth = truth_for(*of)
        assert_gradient(grad, leaf, truth.grad, truth.grad_tolerance, "grad")


def differentiated(function, *models):
    """The value, and the gradient of each model under an uneven gradient that comes in."""
    inputs = leaves(*models)
    value = function(*inputs)
    upstream = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return value.detach(), *torch.autograd.grad(value, inputs, upstream)


def distinct_logits(*shape, dtype):
    """(logits, others) of which no two of a row are equal in any dtype: topk finds the same."""
    words = shape[-1]
    assert words <= 512
    steps = torch.stack([torch.randperm(words) for _ in range(math.prod(shape[:-1]))])
    logits = (steps.view(shape) - words // 2).double() / 32
    return logits.to(dtype), (logits + 0.5 * torch.randn(shape, dtype=torch.float64)).to(dtype)
