"""klfast.compat from logits: the frameworks' log-probs and entropies, values and gradients.

The truth is ``frameworks`` in float64 on the stored logits.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import frameworks
import oracle
import oracle_logits
import pytest
import torch

import klfast
from klfast.compat import ms_swift, openrlhf, roll, skyrl, trl, verl

NAN, INF = math.nan, math.inf
V = 37
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Case(NamedTuple):
    """A function of (logits, index), its temperature, and how many words it takes of each row."""

    ours: Callable
    temperature: float = 1.0
    words: int | None = None


def joint(logits, index, **options):
    return trl.selective_log_softmax_and_entropy(logits, index, **options)


LOGPROBS = {
    "verl": Case(verl.logprobs_from_logits),
    "verl-new-memory": Case(partial(verl.logprobs_from_logits, inplace_backward=False)),
    "openrlhf": Case(openrlhf.log_probs_from_logits),
    "openrlhf-tempered": Case(partial(openrlhf.log_probs_from_logits, temperature=0.7), 0.7),
    "roll": Case(roll.log_probs_from_logits),
    "trl": Case(trl.selective_log_softmax),
    "trl-tempered": Case(partial(trl.selective_log_softmax, temperature=1.3), 1.3),
    "trl-five-words": Case(partial(trl.selective_log_softmax, temperature=1.3), 1.3, 5),
    "trl-joint": Case(lambda x, index: joint(x, index, temperature=0.7)[0], 0.7),
    "skyrl": Case(skyrl.logprobs_from_logits),
}
ENTROPIES = {
    "verl": Case(verl.entropy_from_logits),
    "verl-chunked": Case(verl.entropy_from_logits_with_chunking),
    "openrlhf": Case(openrlhf.compute_entropy),
    "roll": Case(roll.entropy_from_logits),
    "trl": Case(trl.entropy_from_logits),
    "trl-joint": Case(
        lambda x: joint(x, torch.zeros(x.shape[:-1]).long(), temperature=0.7)[1], 0.7
    ),
    "skyrl": Case(partial(skyrl.chunked_entropy_from_logits, requires_grad=True)),
    "ms-swift": Case(ms_swift.entropy_from_logits),
}


def every(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


def inputs(shape=(3, 4), dtype=torch.float32, words=None):
    """(logits, index): of one word in ten the model is sure."""
    logits = 2 * torch.randn(*shape, V, dtype=torch.float64)
    logits[..., 3] += 12 * (torch.rand(shape) < 0.1)
    index = torch.randint(V, shape if words is None else (*shape, words))
    return logits.to(dtype), index


def uneven(shape):
    return torch.linspace(-1, 1.75, math.prod(shape), dtype=torch.float64).reshape(shape)


def differentiated(function, logits):
    """(value, gradient) under an uneven upstream gradient."""
    leaf = logits.detach().requires_grad_()
    value = function(leaf)
    return value, torch.autograd.grad(value, leaf, uneven(value.shape).to(value.dtype))[0]


@pytest.mark.grid
@every_dtype
@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 3, 2)], ids=str)
@every(LOGPROBS)
def test_log_probs_and_their_gradient(case, shape, dtype):
    logits, index = inputs(shape, dtype, case.words)
    value, grad = differentiated(lambda x: case.ours(x, index), logits)
    truth, true_grad = differentiated(
        lambda x: frameworks.logprobs_of(x, index, case.temperature), logits.double()
    )
    assert (value.dtype, grad.dtype) == (oracle.arithmetic_dtype(logits), dtype)

    upstream, rows, of_grad = uneven(value.shape), logits, 0.0
    if case.words is not None:  # a row for each of them, whose gradients add up in two parts
        rows = logits.unsqueeze(-2).expand(*index.shape, V)
        of_grad = torch.finfo(dtype).eps * upstream.abs().sum(-1)[..., None]
    of = oracle_logits.token_logprobs(
        rows, index, temperature=case.temperature, upstream=(upstream, None)
    )
    of_grad = of_grad + of.grad_tolerance.reshape(*shape, -1, V).sum(-2)
    oracle.assert_within(value, truth.detach(), of.logprobs_tolerance, "value")
    oracle.assert_within(grad, true_grad, of_grad, "gradient")


@every_dtype
@every(ENTROPIES)
def test_entropies_and_their_gradient(case, dtype):
    logits, index = inputs((6,), dtype)
    value, grad = differentiated(case.ours, logits)
    truth, true_grad = differentiated(
        lambda x: frameworks.entropy_of(x, case.temperature), logits.double()
    )
    assert (value.dtype, grad.dtype) == (oracle.arithmetic_dtype(logits), dtype)
    of = oracle_logits.token_logprobs(
        logits, index, temperature=case.temperature, upstream=(None, uneven(value.shape))
    )
    oracle.assert_within(value, truth.detach(), of.entropy_tolerance, "value")
    oracle.assert_within(grad, true_grad, of.grad_tolerance, "gradient")


@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), ()], ids=str)
@every(ENTROPIES)
def test_entropies_of_other_shapes(case, shape):
    logits, _ = inputs(shape)
    flat = case.ours(logits.reshape(-1, V))
    assert torch.equal(case.ours(logits), flat.reshape(shape))


def test_both_at_once_are_each_alone():
    logits, index = inputs()
    mask = (torch.rand(index.shape) < 0.6).int()
    logprobs, entropy = joint(logits, index, temperature=0.7, row_mask=mask)
    assert torch.equal(logprobs, trl.selective_log_softmax(logits, index, 0.7, mask))
    assert torch.equal(entropy, joint(logits, index, temperature=0.7)[1] * mask)


def test_an_entropy_without_a_gradient_lets_that_of_the_log_probs_through():
    logits, index = inputs()
    logits.requires_grad_()
    logprobs, entropy = joint(logits, index, entropy_requires_grad=False)
    assert not entropy.requires_grad
    (alone,) = torch.autograd.grad(trl.selective_log_softmax(logits, index).sum(), logits)
    assert torch.equal(torch.autograd.grad(logprobs.sum(), logits)[0], alone)


def test_skyrl_has_verl_s_function():
    assert skyrl.logprobs_from_logits is verl.logprobs_from_logits


# exact=True


EXACT = {
    "verl": verl.logprobs_from_logits,
    "openrlhf": openrlhf.log_probs_from_logits,
    "trl": trl.selective_log_softmax,
    "skyrl": skyrl.logprobs_from_logits,
    "skyrl-entropy": lambda x, _, **options: skyrl.chunked_entropy_from_logits(x, **options),
    "verl-entropy": lambda x, _, **options: verl.entropy_from_logits(x, **options),
    "openrlhf-entropy": lambda x, _, **options: openrlhf.compute_entropy(x, **options),
    "trl-entropy": lambda x, _, **options: trl.entropy_from_logits(x, **options),
    "trl-joint": joint,
}


@pytest.mark.grid
@every_dtype
@pytest.mark.parametrize("words", [None, 3])
@pytest.mark.parametrize("ours", EXACT.values(), ids=EXACT)
def test_exact_gives_the_same_in_the_dtype_of_the_logits(ours, words, dtype):
    logits, index = inputs(dtype=dtype, words=words if ours is trl.selective_log_softmax else None)
    default, exact = ours(logits, index), ours(logits, index, exact=True)
    if ours is not joint:
        default, exact = (default,), (exact,)
    for usual, theirs in zip(default, exact, strict=True):
        assert usual.dtype == oracle.arithmetic_dtype(logits)
        assert theirs.dtype == dtype
        assert torch.equal(theirs, usual.to(dtype))


def test_exact_divides_openrlhf_s_logits_in_place_as_it_does():
    logits, index = inputs()
    before = logits.clone()
    default = openrlhf.log_probs_from_logits(logits, index, 0.5)
    assert torch.equal(logits, before)
    exact = openrlhf.log_probs_from_logits(logits, index, 0.5, exact=True)
    assert torch.equal(logits, before / 0.5)
    assert torch.equal(exact, default)  # 0.5 rounds nothing


# Words and rows that are not there


IGNORING = {
    name: case for name, case in LOGPROBS.items() if name.startswith(("verl", "openrlhf", "skyrl"))
}


@every(IGNORING)
def test_a_label_of_minus_100_is_no_token(case):
    logits, index = inputs()
    value, grad = differentiated(lambda x: case.ours(x, index), logits)
    gone = torch.rand(index.shape) < 0.5
    labels = torch.where(gone, -100, index)
    logits[gone] = NAN
    fewer, fewer_grad = differentiated(lambda x: case.ours(x, labels), logits)
    assert torch.equal(fewer, torch.where(gone, 0.0, value))
    assert torch.equal(fewer_grad, torch.where(gone[..., None], 0.0, grad))


OUTSIDE = [
    pytest.param(case, label, id=f"{name}{label}")
    for name, case in LOGPROBS.items()
    for label in ([-1, V] if name in IGNORING else [-100, -1, V])
]


@pytest.mark.parametrize(("case", "label"), OUTSIDE)
def test_other_labels_outside_of_the_vocabulary_are_errors(case, label):
    logits, index = inputs(words=case.words)
    index.view(-1)[4] = label
    with pytest.raises((ValueError, RuntimeError), match=r"token_ids must be in|out of bounds"):
        case.ours(logits, index)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("words", [None, 4])
def test_a_row_mask_keeps_what_it_hides(words, mask_dtype):
    """Rows of garbage, and single words of rows that are there."""
    logits, index = inputs((5, 4), words=words)
    keep = torch.rand(index.shape) < 0.6
    keep[0] = False
    ours = partial(trl.selective_log_softmax, row_mask=keep.to(mask_dtype))
    whole, whole_grad = differentiated(lambda x: trl.selective_log_softmax(x, index) * keep, logits)
    clean = torch.where(keep, index, 0)
    dirty = torch.where(keep, index, -100)
    rows = keep if words is None else keep.any(-1)
    logits[~rows] = torch.where(torch.rand(V) < 0.5, NAN, INF)
    for hidden in (clean, dirty):
        value, grad = differentiated(lambda x, hidden=hidden: ours(x, hidden), logits)
        assert torch.equal(value[~keep], torch.zeros_like(value[~keep]))
        assert torch.equal(grad[~rows], torch.zeros_like(grad[~rows]))
        torch.testing.assert_close(value, whole)
        torch.testing.assert_close(grad, whole_grad)


def test_skyrls_entropy_has_a_gradient_if_asked_for_and_reads_no_masked_row():
    logits, _ = inputs()
    mask = torch.tensor([1, 0, 1, 1]).expand(3, 4)
    logits.requires_grad_()
    whole = skyrl.chunked_entropy_from_logits(logits, True)
    assert not skyrl.chunked_entropy_from_logits(logits).requires_grad
    (grad,) = torch.autograd.grad((whole * mask).sum(), logits)
    dirty = logits.detach().masked_fill(mask[..., None] == 0, NAN).requires_grad_()
    masked = skyrl.chunked_entropy_from_logits(dirty, requires_grad=True, attention_mask=mask)
    assert torch.equal(masked, torch.where(mask == 0, 0.0, whole))
    assert torch.equal(torch.autograd.grad(masked.sum(), dirty)[0], grad)


@every(ENTROPIES)
def test_a_word_that_is_never_said_adds_no_entropy(case):
    logits, _ = inputs((4,))
    logits[:, 5:9] = -INF
    value, grad = differentiated(case.ours, logits)
    few, few_grad = differentiated(case.ours, logits[:, [*range(5), *range(9, V)]])
    assert frameworks.entropy_of(logits).isnan().all()
    torch.testing.assert_close(value, few)
    assert (grad[:, 5:9] == 0).all()
    torch.testing.assert_close(grad[:, 9:], few_grad[:, 5:])


@every(LOGPROBS)
def test_the_log_prob_of_a_word_that_is_never_said(case):
    logits, index = inputs(words=case.words)
    logits[..., 7] = -INF
    index[..., 0] = 7
    value = case.ours(logits, index)
    theirs = frameworks.logprobs_of(logits, index, case.temperature)
    torch.testing.assert_close(value, theirs)
    assert (value == -INF).any()


def test_several_words_none_of_which_is_ever_said():
    logits, _ = inputs((2,))
    logits[:, :4] = -INF
    index = torch.tensor([[0, 1], [2, 3]])
    assert (trl.selective_log_softmax(logits, index) == -INF).all()
    logits[1, 30] = NAN
    assert trl.selective_log_softmax(logits, index)[1].isnan().all()


def test_several_words_as_likely_as_each_other_have_each_its_gradient():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, -1.0]], dtype=torch.float64)
    index = torch.tensor([[0, 3, 1, 1]])
    _, grad = differentiated(lambda x: trl.selective_log_softmax(x, index), logits)
    _, expected = differentiated(lambda x: frameworks.logprobs_of(x, index), logits)
    torch.testing.assert_close(grad, expected, rtol=1e-14, atol=1e-15)


def test_several_words_far_apart_keep_their_digits():
    """The log-prob of the likeliest is near 0, where the others' distance would drown it."""
    logits = torch.tensor([[20.0, 0.0, -3.0, -80.0]])
    index = torch.tensor([[3, 0, 1]])
    truth = frameworks.logprobs_of(logits.double(), index)
    value = trl.selective_log_softmax(logits, index)
    assert ((value - truth) / truth).abs().max() < 1e-6
    eager = frameworks.logprobs_of(logits, index)
    assert ((eager - truth) / truth).abs().max() > 1e-3


# The gradient in the logits' memory


def computed(leaf):
    """Logits as a model computes them."""
    return leaf * 1.0


INPLACE = {
    "whole": computed,
    "a view": lambda leaf: computed(leaf).unsqueeze(0).squeeze(0),
    "divided in place": lambda leaf: computed(leaf).div_(1.0),
}
ELSEWHERE = {
    "a leaf": lambda leaf: leaf,
    "a view of a leaf": lambda leaf: leaf.view(leaf.shape),
    "not contiguous": lambda leaf: computed(leaf.transpose(0, 1).contiguous()).transpose(0, 1),
}
every_inplace = pytest.mark.parametrize("inplace", [True, False])


@every_inplace
@pytest.mark.parametrize("of_leaf", (INPLACE | ELSEWHERE).values(), ids=INPLACE | ELSEWHERE)
def test_verl_s_gradient_is_the_same_wherever_it_lies(of_leaf, inplace):
    values, index = inputs()
    leaf = values.clone().requires_grad_()
    logits = of_leaf(leaf)
    logprobs = verl.logprobs_from_logits(logits, index, inplace_backward=inplace)
    upstream = uneven(logprobs.shape).float()
    (grad,) = torch.autograd.grad(logprobs, leaf, upstream)
    truth, expected = differentiated(lambda x: trl.selective_log_softmax(x, index), values)
    assert torch.equal(logprobs, truth)
    assert torch.equal(grad, expected)
    assert torch.equal(leaf, values)
    overwritten = inplace and of_leaf in INPLACE.values()
    assert torch.equal(logits, expected if overwritten else values)


def test_verl_s_default_is_in_place():
    values, index = inputs()
    leaf = values.requires_grad_()
    logits = computed(leaf)
    verl.logprobs_from_logits(logits, index).sum().backward()
    assert torch.equal(logits, leaf.grad)


def test_autograd_says_when_verl_s_logits_were_needed_again():
    values, index = inputs()
    logits = computed(values.requires_grad_())
    entropy = verl.entropy_from_logits(logits)  # saved first, and so differentiated last
    logprobs = verl.logprobs_from_logits(logits, index)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (entropy + logprobs).sum().backward()
    logits = computed(values)
    logprobs = verl.logprobs_from_logits(logits, index)
    (logprobs + verl.entropy_from_logits(logits)).sum().backward()  # the other order works


def test_nothing_is_computed_twice(monkeypatch):
    """One call of klfast for both, which is one read of the logits."""
    calls = []
    real = klfast.compat.trl.token_logprobs
    monkeypatch.setattr(
        klfast.compat.trl,
        "token_logprobs",
        lambda *args, **options: calls.append(options) or real(*args, **options),
    )
    logits, index = inputs()
    joint(logits, index)
    assert [call["return_entropy"] for call in calls] == [True]


# torch.compile, as verl compiles its entropy; its gradient then never lies in the logits' memory


COMPILED = {
    "verl": lambda x, index: verl.logprobs_from_logits(x * 1.0, index),
    "verl-entropy": lambda x, index: verl.entropy_from_logits(x),
    "openrlhf": lambda x, index: openrlhf.log_probs_from_logits(x, index, 0.7),
    "trl-two-words": lambda x, index: trl.selective_log_softmax(
        x, torch.stack([index, 0 * index], -1)
    ),
    "roll-full": lambda x, index: roll.compute_approx_kl(x, x.flip(-1), kl_penalty="full"),
}


# Importing all of dynamo warns, and it makes a Function object to trace any autograd.Function.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"
)
@pytest.mark.parametrize("function", COMPILED.values(), ids=COMPILED)
def test_compiled_whole(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in [(3, 4), (2, 5)]:
        logits, index = inputs(shape)
        got = differentiated(lambda x, index=index: compiled(x, index), logits)
        eager = differentiated(lambda x, index=index: function(x, index), logits)
        for result, expected in zip(got, eager, strict=True):
            assert torch.equal(result, expected)
