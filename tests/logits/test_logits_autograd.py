"""The gradient as a citizen of autograd: who gets it, how often, and what may happen in between."""

import pytest
import torch
from agreement import SCALAR_REDUCTIONS, same_bits
from agreement_logits import COMPILED, DIRECTIONS, leaves, random_ids, random_logits, tensors_of

import klfast
from klfast.types.reduction import REDUCTIONS

pytestmark = pytest.mark.usefixtures("one_thread")

every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
one_of_each_kind = pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])
every_compiled = pytest.mark.parametrize("backend", COMPILED, indirect=True)


def models(*shape, dtype=torch.float32):
    return leaves(*random_logits(*(shape or (2, 3, 37)), dtype=dtype))


@pytest.mark.parametrize("reduction", ["none", "token-mean"])
@every_direction
def test_gradcheck_of_divergences(backend, direction, reduction):
    """Of both models, and of the log-probs where there is no one-read path."""
    inputs = models(1, 3, 4, dtype=torch.float64)
    mask, ids = torch.tensor([[1.0, 0.5, 0.0]]), random_ids(inputs[0])
    options = {"direction": direction, "reduction": reduction, "jsd_beta": 0.3, "temperature": 0.7}
    if reduction == "none":
        options["token_ids"] = ids
    assert torch.autograd.gradcheck(
        lambda *logits: tensors_of(klfast.kl_divergence(*logits, mask, **options, backend=backend)),
        inputs,
    )


def test_gradcheck_of_log_probs_and_entropies(backend):
    logits, _ = models(1, 3, 4, dtype=torch.float64)
    ids = random_ids(logits)
    keep = torch.tensor([[True, False, True]])
    assert torch.autograd.gradcheck(
        lambda logits: klfast.token_logprobs(
            logits, ids, mask=keep, temperature=0.7, return_entropy=True, backend=backend
        ),
        logits,
    )


def both_ways(outputs, sent, inputs):
    """Gradients of some of the outputs, where the others send none, and where they send zeros."""
    ones = [torch.rand_like(output) for output in outputs]
    grads = [one if i in sent else torch.zeros_like(one) for i, one in enumerate(ones)]
    some = [outputs[i] for i in sent], inputs, [ones[i] for i in sent]
    alone = torch.autograd.grad(*some, retain_graph=True, allow_unused=True)
    return alone, torch.autograd.grad(outputs, inputs, grads, allow_unused=True)


@pytest.mark.parametrize("sent", [(0,), (1,), (0, 1)], ids=str)
def test_log_probs_and_entropies_that_send_no_gradient_count_as_zeros(backend, sent):
    logits, _ = models()
    keep = torch.arange(6).reshape(2, 3) != 2
    options = {"mask": keep, "return_entropy": True, "backend": backend}
    outputs = klfast.token_logprobs(logits, random_ids(logits), **options)
    alone, with_zeros = both_ways(outputs, sent, [logits])
    assert same_bits(*alone, *with_zeros)


@pytest.mark.parametrize("sent", [(0,), (1,), (2,), (1, 2), (0, 2)], ids=str)
@every_direction
def test_divergences_that_send_no_gradient_count_as_zeros(backend, direction, sent):
    inputs = models()
    options = {"token_ids": random_ids(inputs[0]), "direction": direction, "backend": backend}
    outputs = tensors_of(klfast.kl_divergence(*inputs, **options))
    for alone, with_zeros in zip(*both_ways(outputs, sent, inputs), strict=True):
        # The reference's own graph does not reach a model of which no output sends a gradient.
        alone = torch.zeros_like(with_zeros) if alone is None else alone
        torch.testing.assert_close(alone, with_zeros, rtol=0, atol=0)


@pytest.mark.grid
@every_reduction
@every_direction
def test_a_gradient_does_not_depend_on_who_else_asks(backend, direction, reduction):
    both = models()
    options = {"direction": direction, "reduction": reduction, "backend": backend}
    klfast.kl_divergence(*both, **options).sum().backward()
    for asks in ((True, False), (False, True)):
        some = [t.detach().clone().requires_grad_(need) for t, need in zip(both, asks, strict=True)]
        klfast.kl_divergence(*some, **options).sum().backward()
        for alone, together, need in zip(some, both, asks, strict=True):
            assert (alone.grad is not None) == need
            if need and backend != "reference":
                assert same_bits(alone.grad, together.grad)
            elif need:
                torch.testing.assert_close(alone.grad, together.grad, rtol=1e-6, atol=1e-12)


@one_of_each_kind
@pytest.mark.parametrize("with_ids", [False, True])
def test_without_a_need_there_is_no_graph(backend, reduction, with_ids):
    logits = models()
    ids = random_ids(logits[0]) if with_ids else None
    options = {"reduction": reduction, "token_ids": ids, "backend": backend}

    def call(*logits):
        return tensors_of(klfast.kl_divergence(*logits, **options))

    expected = call(*logits)
    assert all(t.requires_grad for t in expected)
    detached = call(*(t.detach() for t in logits))
    with torch.no_grad():
        in_no_grad = call(*logits)
    with torch.inference_mode():
        in_inference = call(*logits)
    for outputs in (detached, in_no_grad, in_inference):
        assert not any(t.requires_grad for t in outputs)
        assert all(same_bits(a, b.detach()) for a, b in zip(outputs, expected, strict=True))


def test_without_a_need_log_probs_have_no_graph(backend):
    logits, _ = models()
    ids = random_ids(logits)
    expected = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
    assert all(t.requires_grad for t in expected)
    with torch.no_grad():
        quiet = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
    with torch.inference_mode():
        inferred = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
    for outputs in (quiet, inferred):
        assert not any(t.requires_grad for t in outputs)
        assert all(same_bits(a, b.detach()) for a, b in zip(outputs, expected, strict=True))


@every_direction
def test_inference_tensors_may_be_the_reference(backend, direction):
    logits, ref_logits = (t.detach() for t in models())
    with torch.inference_mode():
        inferred, keep = ref_logits.clone(), torch.rand(2, 3) < 0.7
    expected_leaf, leaf = leaves(logits, logits.clone())
    for reduction in ("none", "token-mean"):
        options = {"direction": direction, "reduction": reduction, "backend": backend}
        expected = klfast.kl_divergence(expected_leaf, ref_logits, keep.clone(), **options)
        found = klfast.kl_divergence(leaf, inferred, keep, **options)
        for _ in range(2):
            grads = [
                torch.autograd.grad(result.sum(), to, retain_graph=True)[0]
                for result, to in ((expected, expected_leaf), (found, leaf))
            ]
            assert same_bits(*grads)


def nudge_a_word(logits):
    logits[0, 0, 0] += 1e-3


def swap_two_words(logits):
    """Where the policy's words are equal, no divergence shows it, and every gradient does."""
    logits[..., [0, 1]] = logits[..., [1, 0]]


@every_direction
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
@pytest.mark.parametrize("change", [nudge_a_word, swap_two_words])
def test_an_inference_tensor_that_changes_gives_no_gradient_of_other_logits(
    backend, direction, reduction, change
):
    logits, ref_logits = (t.detach() for t in models())
    (leaf,) = leaves(torch.zeros_like(logits))
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
        grad.fill_(torch.nan)  # it is autograd's from here on
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    assert same_bits(grad, expected)
    if backend != "reference":
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(found.sum(), leaf)


@pytest.mark.grid
@every_reduction
@every_direction
def test_a_second_backward_is_right_after_the_first_gradient_was_changed(
    backend, direction, reduction
):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        inputs = models(2, 3, 70, dtype=dtype)
        result = klfast.kl_divergence(
            *inputs, direction=direction, reduction=reduction, backend=backend
        )
        grad_output = torch.ones_like(result)
        first = torch.autograd.grad(result, inputs, grad_output, retain_graph=True)
        expected = [grad.clone() for grad in first]
        for grad in first:
            grad.fill_(torch.nan)
        second = torch.autograd.grad(result, inputs, grad_output)
        assert all(same_bits(a, b) for a, b in zip(second, expected, strict=True))


def test_a_second_backward_of_log_probs(backend):
    logits, _ = models()
    outputs = klfast.token_logprobs(
        logits, random_ids(logits), return_entropy=True, backend=backend
    )
    upstream = [torch.randn(2, 3) for _ in outputs]
    (first,) = torch.autograd.grad(outputs, logits, upstream, retain_graph=True)
    expected = first.clone()
    first.fill_(torch.nan)
    assert same_bits(torch.autograd.grad(outputs, logits, upstream)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@every_direction
@every_compiled
def test_scaling_the_unit_gradient_equals_computing_it_anew(backend, direction, dtype):
    """Exactly for a power of two, else to roundings on the row's own scale."""
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
            assert (off <= 4 * torch.finfo(dtype).eps * scale).all()
            assert factor == 0 or computed.count_nonzero() > 200


@one_of_each_kind
def test_gradients_accumulate_over_calls_and_over_backwards(backend, reduction):
    logits, ref_logits = models()
    options = {"reduction": reduction, "backend": backend}
    ref_logits = ref_logits.detach()
    plain = klfast.kl_divergence(logits, ref_logits, **options)
    (once,) = torch.autograd.grad(plain.sum(), logits)
    divergence = klfast.kl_divergence(logits, ref_logits, **options).sum()
    divergence.backward(retain_graph=True)
    divergence.backward()
    klfast.kl_divergence(logits, ref_logits, coef=2.0, **options).sum().backward()
    torch.testing.assert_close(logits.grad, 4 * once)


@pytest.mark.grid
@one_of_each_kind
@every_direction
def test_a_tensor_against_itself_gets_both_gradients(backend, direction, reduction):
    logits, _ = models()
    options = {"direction": direction, "reduction": reduction, "backend": backend}
    klfast.kl_divergence(logits, logits, **options).sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(2, 3, 37), rtol=0, atol=1e-15)


@one_of_each_kind
def test_the_two_gradients_do_not_share_memory(backend, reduction):
    logits, ref_logits = models()
    klfast.kl_divergence(logits, ref_logits, reduction=reduction, backend=backend).sum().backward()
    before = logits.grad.clone()
    ref_logits.grad.zero_()
    assert same_bits(logits.grad, before)


@one_of_each_kind
def test_an_expanded_leaf_gets_the_sum_over_its_copies(backend, reduction):
    row, ref_logits = models(1, 3, 7, dtype=torch.float64)
    ref_logits = ref_logits.detach() + torch.randn(4, 3, 7, dtype=torch.float64)
    copies = row.detach().repeat(4, 1, 1).requires_grad_()
    for logits in (row.expand(4, 3, 7), copies):
        result = klfast.kl_divergence(logits, ref_logits, reduction=reduction, backend=backend)
        result.sum().backward()
    torch.testing.assert_close(row.grad, copies.grad.sum(0, keepdim=True), rtol=1e-13, atol=1e-15)


@one_of_each_kind
def test_a_result_may_be_used_twice_and_changed_in_place(backend, reduction):
    inputs = models(dtype=torch.float64)
    options = {"reduction": reduction, "backend": backend}
    result = klfast.kl_divergence(*inputs, **options)
    twice = torch.autograd.grad(3 * result.sum() + result.square().sum(), inputs)
    again = klfast.kl_divergence(*inputs, **options)
    expected = torch.autograd.grad(again, inputs, 3 + 2 * again.detach())
    torch.testing.assert_close(twice, expected, rtol=1e-12, atol=1e-15)
    changed = klfast.kl_divergence(*inputs, **options)
    changed.mul_(4)
    grads = torch.autograd.grad(changed.sum(), inputs)
    expected = torch.autograd.grad(klfast.kl_divergence(*inputs, **options).sum(), inputs)
    assert all(same_bits(a, 4 * b) for a, b in zip(grads, expected, strict=True))


FUNCTIONS = {
    "token_logprobs": lambda logits, ref, ids: klfast.token_logprobs(logits, ids, backend="native"),
    "entropy": lambda logits, ref, ids: (
        klfast.token_logprobs(logits, ids, return_entropy=True, backend="native").entropy
    ),
    "per-token": lambda logits, ref, ids: klfast.kl_divergence(logits, ref, backend="native"),
    "one-read": lambda logits, ref, ids: klfast.kl_divergence(
        logits, ref, reduction="token-sum", backend="native"
    ),
    "jsd": lambda logits, ref, ids: klfast.kl_divergence(
        logits, ref, direction="jsd", reduction="token-sum", backend="native"
    ),
    "kl-entropy": lambda logits, ref, ids: (
        klfast.kl_divergence(
            logits, ref, direction="forward", return_entropy=True, backend="native"
        ).entropy
    ),
    "ref-log-probs": lambda logits, ref, ids: (
        klfast.kl_divergence(logits, ref, token_ids=ids, backend="native").ref_logprobs
    ),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@every_function
def test_a_second_derivative_raises(function):
    """Above all it is not silently 0, by whatever it is asked."""
    logits = models()
    scale = torch.tensor(2.0, requires_grad=True)
    result = scale * function(*(t * 1 for t in logits), random_ids(logits[0])).sum()
    grads = torch.autograd.grad(result, logits, create_graph=True, allow_unused=True)
    total = sum(grad.square().sum() for grad in grads if grad is not None)
    used = [t for t, grad in zip(logits, grads, strict=True) if grad is not None]
    for by in (*used, scale):
        with pytest.raises(RuntimeError, match=r"differentiable once.*backend='reference'"):
            torch.autograd.grad(total + by.square().sum(), by, retain_graph=True)


@every_function
def test_a_gradient_that_could_have_been_differentiated_is_the_same(function):
    """create_graph alone, as in a penalty that is switched off, changes nothing."""
    inputs = models()
    ids = random_ids(inputs[0])
    both = {"materialize_grads": True}
    graphed = torch.autograd.grad(function(*inputs, ids).sum(), inputs, create_graph=True, **both)
    expected = torch.autograd.grad(function(*inputs, ids).sum(), inputs, **both)
    assert all(same_bits(a.detach(), b) for a, b in zip(graphed, expected, strict=True))


@one_of_each_kind
@every_direction
@pytest.mark.parametrize("are_equal", [False, True], ids=["apart", "equal"])
def test_the_reference_is_differentiable_twice(direction, reduction, are_equal):
    inputs = models(1, 2, 4, dtype=torch.float64)
    if are_equal:
        inputs = leaves(inputs[0].detach(), inputs[0].detach().clone())
    assert torch.autograd.gradgradcheck(
        lambda *logits: klfast.kl_divergence(
            *logits, direction=direction, reduction=reduction, backend="reference"
        ),
        inputs,
    )


def test_the_references_log_probs_are_differentiable_twice():
    logits, _ = models(1, 2, 4, dtype=torch.float64)
    ids = random_ids(logits)
    assert torch.autograd.gradgradcheck(
        lambda logits: klfast.token_logprobs(logits, ids, return_entropy=True, backend="reference"),
        logits,
    )


@pytest.mark.parametrize("side", [0, 1], ids=["logits", "ref_logits"])
@one_of_each_kind
def test_an_input_changed_before_a_recomputing_backward_is_an_error(reduction, side):
    leaf, ref_logits = models()
    tensors = [leaf * 1, ref_logits.detach()]
    result = klfast.kl_divergence(*tensors, reduction=reduction, backend="native").sum()
    if reduction in SCALAR_REDUCTIONS:
        result.backward(retain_graph=True)  # from the unit gradient
    with torch.no_grad():
        tensors[side].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


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
    found = call(logits, other.detach(), random_ids(leaf))
    logits.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"logits.* must keep its shape and storage .* freed"):
        found.sum().backward()


@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_detached_entropies_have_no_gradient(backend, reduction):
    inputs = models()
    options = {"reduction": reduction, "backend": backend}
    ids = random_ids(inputs[0])
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


def test_logits_changed_before_the_backward_of_log_probs_are_an_error():
    leaf, _ = models()
    logits = leaf * 1
    found = klfast.token_logprobs(logits, random_ids(logits), backend="native")
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_ids_and_masks_changed_in_between_do_not_change_the_gradient(backend):
    """They are the callers' own, of any dtype; what backward needs of them it keeps."""
    inputs = models()
    ids, mask = random_ids(inputs[0]).to(torch.int32), torch.rand(2, 3) + 0.5
    outputs = klfast.kl_divergence(*inputs, mask, token_ids=ids, backend=backend)
    loss = outputs.logprobs.sum() + outputs.ref_logprobs.sum()
    expected = torch.autograd.grad(loss, inputs, retain_graph=True)
    ids.fill_(0)
    found = torch.autograd.grad(loss, inputs)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@one_of_each_kind
def test_a_graph_that_was_freed_says_so(backend, reduction):
    result = klfast.kl_divergence(*models(), reduction=reduction, backend=backend).sum()
    result.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.backward()


@one_of_each_kind
def test_saved_tensors_may_be_kept_elsewhere(backend, reduction):
    """Offloading: whatever is saved comes back as a copy."""
    inputs = models()
    options = {"reduction": reduction, "backend": backend}
    expected = torch.autograd.grad(klfast.kl_divergence(*inputs, **options).sum(), inputs)
    unpacked = []

    def unpack(copy):
        unpacked.append(copy)
        return copy.clone()

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        result = klfast.kl_divergence(*inputs, **options).sum()
    for retain_graph in (True, False):
        grads = torch.autograd.grad(result, inputs, retain_graph=retain_graph)
        assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))
    assert unpacked


@pytest.mark.exhaustive
def test_fp16_gradients_of_a_long_mean_keep_their_digits_under_loss_scaling(backend):
    """A token's share of 4,096 in a mean would leave most words' gradients below fp16's range."""
    tokens, scale = 4096, 65536.0
    logits, ref_logits = random_logits(1, tokens, 4, dtype=torch.float16)
    (leaf,) = leaves(logits)
    divergence = klfast.kl_divergence(leaf, ref_logits, reduction="token-mean", backend=backend)
    (scale * divergence).backward()
    (wide,) = leaves(logits.double())
    exact = klfast.kl_divergence(wide, ref_logits.double(), backend="reference")
    (exact.sum() * (scale / tokens)).backward()
    error = (leaf.grad.double() - wide.grad).abs()
    half_a_unit = torch.finfo(torch.float16).eps / 2 * wide.grad.abs() + 2**-25
    assert (error <= half_a_unit + 1e-5 * wide.grad.abs() + 1e-6).all()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@one_of_each_kind
@every_compiled
def test_anomaly_detection_finds_nothing_in_good_gradients_and_nan_in_bad(backend, reduction):
    logits, ref_logits = models()
    options = {"reduction": reduction, "backend": backend}
    with torch.autograd.detect_anomaly():
        klfast.kl_divergence(logits, ref_logits, **options).sum().backward()
        bad = logits.detach().clone()
        bad[1, 2, 5] = torch.nan
        (bad,) = leaves(bad)
        divergence = klfast.kl_divergence(bad, ref_logits.detach(), **options).sum()
        with pytest.raises(RuntimeError, match="returned nan values"):
            divergence.backward()


def test_only_what_is_asked_of_three_results_comes_back(backend):
    """Gradients of some of a call's results, and of none of the others."""
    inputs = models()
    ids = random_ids(inputs[0])
    found = klfast.kl_divergence(*inputs, token_ids=ids, backend=backend)
    alone = klfast.token_logprobs(inputs[1], ids, backend=backend)
    expected = torch.autograd.grad(alone.sum(), inputs[1])[0]
    grads = torch.autograd.grad(found.ref_logprobs.sum(), inputs, materialize_grads=True)
    assert not grads[0].any()
    torch.testing.assert_close(grads[1], expected, rtol=3e-6, atol=1e-9)


def test_under_distributed_hooks_gradients_may_be_replaced(backend):
    logits, ref_logits = models()
    options = {"reduction": "token-mean", "backend": backend}
    expected = torch.autograd.grad(
        klfast.kl_divergence(logits, ref_logits, **options), (logits, ref_logits)
    )
    seen = []
    logits.register_hook(lambda grad: grad * 2)
    ref_logits.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    klfast.kl_divergence(logits, ref_logits, **options).backward()
    assert same_bits(logits.grad, 2 * expected[0])
    assert same_bits(seen[0], expected[1])
