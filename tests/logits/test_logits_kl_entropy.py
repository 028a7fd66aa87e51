"""kl_divergence(return_entropy=True): the policy's entropies from the divergence's read."""

import math

import pytest
import torch
from agreement import same_bits
from agreement_logits import (
    COMPILED,
    DIRECTIONS,
    FAST,
    FLOATS,
    OF_ONE_WORD,
    assert_divergence_agrees,
    assert_entropy_agrees,
    leaves,
    random_ids,
    random_logits,
    tensors_of,
)
from extreme_logits import assert_close, heights, ordinary_rows, pairs, rows_at, tokens

import klfast
from klfast.types.reduction import REDUCTIONS

pytestmark = pytest.mark.usefixtures("one_thread")
INF, NAN = math.inf, math.nan
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
every_compiled = pytest.mark.parametrize("backend", COMPILED, indirect=True)


@pytest.mark.grid
@pytest.mark.parametrize("reduction", REDUCTIONS)
@every_direction
def test_every_reduction_leaves_the_entropies_per_token(backend, direction, reduction):
    for mask in (None, torch.rand(2, 3) < 0.7, torch.rand(2, 3) * (torch.rand(2, 3) < 0.7)):
        logits = random_logits(2, 3, 37)
        options = {"direction": direction, "reduction": reduction, "coef": 0.3}
        assert_entropy_agrees(backend, *logits, mask, **options)


@every_direction
def test_a_packed_batch(backend, direction):
    cu_seqlens = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    mask = torch.tensor([1, 1, 0, 2, 1, 1])
    for reduction in ("none", "seq-mean", "token-mean"):
        options = {"direction": direction, "reduction": reduction, "cu_seqlens": cu_seqlens}
        assert_entropy_agrees(backend, *random_logits(6, 9), mask, **options)


@pytest.mark.grid
@pytest.mark.parametrize("ref_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_direction
def test_dtypes_mix(backend, direction, dtype, ref_dtype):
    logits = random_logits(2, 3, 45, dtype=dtype, ref_dtype=ref_dtype)
    assert_entropy_agrees(backend, *logits, direction=direction)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [1, 2, 31, 64, 255, 1025, 4097])
@every_direction
@every_compiled
def test_vocabularies_of_any_size(backend, direction, words, dtype):
    assert_entropy_agrees(backend, *random_logits(1, 2, words, dtype=dtype), direction=direction)


@pytest.mark.parametrize("backend", FAST, indirect=True)
@pytest.mark.parametrize(
    ("words", "dtype"), [(32_000, torch.float32), (50_257, torch.bfloat16)], ids=str
)
def test_the_vocabularies_of_models(backend, words, dtype):
    for direction in DIRECTIONS:
        assert_entropy_agrees(
            backend, *random_logits(1, 2, words, dtype=dtype), direction=direction
        )


@pytest.mark.parametrize("temperature", [0.1, 0.7, 3, 10.0])
@every_direction
def test_temperatures(backend, direction, temperature):
    options = {"direction": direction, "temperature": temperature}
    assert_entropy_agrees(backend, *random_logits(2, 3, 37), **options)


@pytest.mark.parametrize("beta", [1e-4, 0.3, 0.9999])
def test_the_entropy_beside_a_jsd_is_the_policys_whatever_its_weight(backend, beta):
    logits = random_logits(2, 3, 130, apart=3.0)
    assert_entropy_agrees(backend, *logits, direction="jsd", jsd_beta=beta)


@pytest.mark.parametrize("apart", [0.0, 1e-4, 0.3, 4.0, 30.0])
@every_direction
def test_models_near_and_far(backend, direction, apart):
    """Near words' terms of one model follow from the other's, far words' do not."""
    assert_entropy_agrees(backend, *random_logits(2, 3, 700, apart=apart), direction=direction)


@pytest.mark.parametrize("ends", [(0, 0), (70, 0), (0, 70), (40, 90)], ids=str)
@every_direction
def test_rows_whose_first_words_say_nothing_of_the_others(backend, direction, ends):
    logits, ref_logits = random_logits(1, 3, 3000, apart=0.1)
    for model, end in zip((logits, ref_logits), ends, strict=True):
        model[0, 0, :2000] -= end
        model[0, 1, -3:] += end
        model[0, 2] += end * torch.linspace(-1, 1, 3000)
    assert_entropy_agrees(backend, logits, ref_logits, direction=direction)


@every_direction
def test_words_left_out_by_either_model(backend, direction):
    """The entropy stays finite, where the divergence may be infinite."""
    logits, ref_logits = random_logits(1, 5, 1500)
    logits[0, 0, 10:] = -INF
    ref_logits[0, 1, 10:] = -INF
    logits[0, 2, ::2], ref_logits[0, 2, ::2] = -INF, -INF
    logits[0, 3, :1200], ref_logits[0, 3, :1300] = -INF, -INF
    logits[0, 4, 1:] = -INF
    assert_entropy_agrees(backend, logits, ref_logits, direction=direction)
    leaf = logits.requires_grad_()
    options = {"direction": direction, "return_entropy": True, "backend": backend}
    entropy = klfast.kl_divergence(leaf, ref_logits, **options).entropy
    assert entropy.isfinite().all()
    (grad,) = torch.autograd.grad(entropy.sum(), leaf)
    assert grad.isfinite().all()
    assert not grad[logits == -INF].any()
    assert entropy[0, 4] <= OF_ONE_WORD


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_direction
def test_logits_of_any_height(backend, direction, dtype):
    """Entropies and their gradients, under a reference as high, as low or ordinary."""
    logits, ref_logits = pairs(7, dtype)
    (leaf,) = leaves(logits)
    options = {"direction": direction, "temperature": 0.7, "backend": backend}
    entropy = klfast.kl_divergence(leaf, ref_logits, return_entropy=True, **options).entropy
    truth = tokens(logits, logits.argmax(-1), 0.7)
    everywhere = torch.ones(len(logits), dtype=torch.bool)
    assert_close(entropy, truth.entropy, everywhere, "entropy")
    (grad,) = torch.autograd.grad(entropy.sum(), leaf)
    assert_close(grad, truth.entropy_grad, everywhere, "gradient")


@pytest.mark.parametrize("backend", FAST, indirect=True)
@every_direction
def test_logits_of_any_height_beyond_the_first_look(backend, direction):
    rows = [rows_at(height, 3000, torch.float32) for height in heights(torch.float32)]
    logits = torch.cat([*rows, ordinary_rows(3000, torch.float32)])[::3]
    for ref_logits in (logits.flip(0), logits):
        options = {"direction": direction, "return_entropy": True, "backend": backend}
        entropy = klfast.kl_divergence(logits, ref_logits, **options).entropy
        truth = tokens(logits, logits.argmax(-1))
        assert_close(entropy, truth.entropy, torch.ones(len(logits), dtype=torch.bool), "entropy")


def test_by_hand(backend):
    """Of a flat, a certain, and an even choice."""
    logits = torch.tensor(
        [[2.0, 2.0, 2.0, 2.0], [0.0, 300.0, 0.0, 0.0], [9.0, -600.0, 9.0, -600.0]]
    )
    for direction in DIRECTIONS:
        for ref_logits in (logits, logits.flip(0), torch.zeros(3, 4)):
            options = {"direction": direction, "return_entropy": True, "backend": backend}
            entropy = klfast.kl_divergence(logits, ref_logits, **options).entropy
            expected = torch.tensor([4.0, 1.0, 2.0]).log()
            torch.testing.assert_close(entropy, expected, rtol=4e-7, atol=6e-8)
            assert (entropy >= 0).all()


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_direction
@every_compiled
def test_the_entropy_is_that_of_token_logprobs(backend, direction, dtype):
    """To twice the tolerance of either; and the divergence is bit for bit the one without it."""
    logits, ref_logits = random_logits(3, 4, 1500, dtype=dtype)
    ids = random_ids(logits)
    options = {"temperature": 0.7, "backend": backend}
    _, expected = klfast.token_logprobs(logits, ids, return_entropy=True, **options)
    for apart in (1.0, 5.0):
        models = (logits, ref_logits * apart)
        found = klfast.kl_divergence(*models, direction=direction, return_entropy=True, **options)
        unit = torch.finfo(found.entropy.dtype).eps
        torch.testing.assert_close(found.entropy, expected, rtol=8 * unit, atol=8 * unit)
        alone = klfast.kl_divergence(*models, direction=direction, **options)
        assert same_bits(found.kl, alone)


@every_direction
@every_compiled
def test_asking_for_the_entropy_changes_no_other_bit(backend, direction):
    """Of results, statistics, tokens' log-probs, and gradients where none comes from it."""
    logits, ref_logits = random_logits(2, 3, 900, apart=2.0)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    options = {"direction": direction, "token_ids": random_ids(logits), "return_stats": True}
    for reduction in ("none", "token-mean"):
        found = []
        for asked in ({}, {"return_entropy": True}):
            inputs = leaves(logits, ref_logits)
            results = klfast.kl_divergence(
                *inputs, mask, reduction=reduction, **options, **asked, backend=backend
            )
            kl, logprobs, ref_logprobs, _, stats = results
            loss = [kl.sum(), logprobs.sum(), (0.3 * ref_logprobs).sum()]
            grads = torch.autograd.grad(loss, inputs)
            found.append([kl, logprobs, ref_logprobs, *stats, *grads])
        for without, beside in zip(*found, strict=True):
            assert torch.equal(without.isnan(), beside.isnan())
            assert same_bits(without.detach().nan_to_num(), beside.detach().nan_to_num())


@every_direction
def test_masked_rows_have_entropy_0_and_no_gradient(backend, direction):
    inputs = [t.clone() for t in random_logits(2, 3, 37)]
    mask = torch.tensor([[1.0, 0.0, 0.25], [0.0, 3.0, 0.0]])
    for model in inputs:
        model[mask == 0] = torch.tensor([NAN, INF, -INF]).repeat(13)[:37]
    assert_entropy_agrees(backend, *inputs, mask, direction=direction)
    assert_divergence_agrees(backend, *inputs, mask, direction=direction)
    inputs = leaves(*inputs)
    for nothing in (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)):
        options = {"direction": direction, "return_entropy": True, "backend": backend}
        entropy = klfast.kl_divergence(*inputs, nothing, **options).entropy
        assert same_bits(entropy.detach(), torch.zeros(2, 3))
        grads = torch.autograd.grad(entropy.sum(), inputs, materialize_grads=True)
        assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_empty_batches(backend, shape):
    inputs = leaves(torch.zeros(*shape, 5), torch.zeros(*shape, 5))
    for direction in DIRECTIONS:
        for reduction in ("none", "token-mean"):
            options = {"direction": direction, "reduction": reduction, "backend": backend}
            found = klfast.kl_divergence(*inputs, return_entropy=True, **options)
            assert torch.equal(found.entropy, torch.zeros(shape))
            grads = torch.autograd.grad(
                [found.kl.sum(), found.entropy.sum()], inputs, materialize_grads=True
            )
            assert all(torch.equal(grad, torch.zeros(*shape, 5)) for grad in grads)


@pytest.mark.grid
@pytest.mark.parametrize("poison", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("side", [0, 1], ids=["policy", "reference"])
@every_direction
def test_the_entropy_is_nan_where_the_divergence_is(backend, direction, side, poison):
    """In that row alone, whichever model has it."""
    models = list(random_logits(1, 4, 1500))
    options = {"direction": direction, "return_entropy": True, "backend": backend}
    clean = klfast.kl_divergence(*models, **options).entropy
    models[side][0, 1, 700] = poison
    models[side][0, 2] = -INF
    found, entropy = tensors_of(klfast.kl_divergence(*models, **options))
    assert found.isnan().tolist() == entropy.isnan().tolist() == [[False, True, True, False]]
    assert same_bits(entropy[:, ::3], clean[:, ::3])


@pytest.mark.parametrize("reduction", ["none", "token-mean"])
@every_direction
def test_gradcheck(backend, direction, reduction):
    inputs = leaves(*random_logits(1, 3, 4, dtype=torch.float64))
    mask, ids = torch.tensor([[1.0, 0.5, 0.0]]), random_ids(inputs[0])
    options = {"direction": direction, "reduction": reduction, "jsd_beta": 0.3, "temperature": 0.7}
    options |= {"token_ids": ids, "return_entropy": True, "backend": backend}
    assert torch.autograd.gradcheck(
        lambda *logits: tensors_of(klfast.kl_divergence(*logits, mask, **options)), inputs
    )


@every_direction
def test_only_the_policy_gets_a_gradient_of_its_entropy(backend, direction):
    inputs = leaves(*random_logits(2, 3, 37))
    options = {"direction": direction, "return_entropy": True, "backend": backend}
    entropy = klfast.kl_divergence(*inputs, **options).entropy
    grads = torch.autograd.grad(entropy.sum(), inputs, materialize_grads=True, retain_graph=True)
    (leaf,) = leaves(inputs[0])
    ids = random_ids(leaf)
    _, expected = klfast.token_logprobs(leaf, ids, return_entropy=True, backend=backend)
    (own,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(grads[0], own, rtol=4e-6, atol=2e-7)
    assert not grads[1].any()
    again = torch.autograd.grad(entropy.sum(), inputs, materialize_grads=True)
    assert all(same_bits(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("sent", [(0,), (1,), (3,), (0, 3), (1, 3)], ids=str)
@every_direction
def test_results_that_send_no_gradient_count_as_zeros(backend, direction, sent):
    inputs = leaves(*random_logits(2, 3, 37))
    options = {"token_ids": random_ids(inputs[0]), "direction": direction, "backend": backend}
    outputs = tensors_of(klfast.kl_divergence(*inputs, return_entropy=True, **options))
    ones = [torch.rand_like(output) for output in outputs]
    zeros = [one if i in sent else torch.zeros_like(one) for i, one in enumerate(ones)]
    both = {"materialize_grads": True}
    alone = torch.autograd.grad(
        [outputs[i] for i in sent], inputs, [ones[i] for i in sent], retain_graph=True, **both
    )
    with_zeros = torch.autograd.grad(outputs, inputs, zeros, **both)
    torch.testing.assert_close(alone, with_zeros, rtol=0, atol=0)


@every_direction
@every_compiled
def test_a_masked_mean_has_the_gradient_of_one_read(backend, direction):
    """A scalar's gradient comes from a second read here, to a few roundings of the one-read's."""
    logits, ref_logits = random_logits(3, 4, 300)
    mask = torch.rand(3, 4) < 0.7
    options = {"direction": direction, "reduction": "token-mean", "backend": backend}
    grads = []
    for asked in (False, True):
        inputs = leaves(logits, ref_logits)
        result = klfast.kl_divergence(*inputs, mask, return_entropy=asked, **options)
        loss = result.kl if asked else result
        grads.append(torch.autograd.grad(loss, inputs))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-9)


@every_direction
def test_without_a_need_there_is_no_graph(backend, direction):
    inputs = leaves(*random_logits(2, 3, 37))
    options = {"direction": direction, "return_entropy": True, "backend": backend}

    def call(*models):
        return tensors_of(klfast.kl_divergence(*models, **options))

    expected = call(*inputs)
    assert all(t.requires_grad for t in expected)
    with torch.no_grad():
        in_no_grad = call(*inputs)
    with torch.inference_mode():
        in_inference = call(*inputs)
    for outputs in (call(*(t.detach() for t in inputs)), in_no_grad, in_inference):
        assert not any(t.requires_grad for t in outputs)
        assert all(same_bits(a, b.detach()) for a, b in zip(outputs, expected, strict=True))


def test_strided_and_transposed_logits(backend):
    logits, ref_logits = (t.transpose(1, 2)[:, :-1] for t in random_logits(2, 70, 4))
    for direction in DIRECTIONS:
        assert_entropy_agrees(backend, logits, ref_logits, direction=direction)


@pytest.mark.parametrize("words", [3000, 40_000])
@pytest.mark.parametrize("backend", FAST, indirect=True)
@every_direction
def test_a_row_does_not_depend_on_its_company(backend, direction, words):
    logits, ref_logits = random_logits(1, 5, words)
    options = {"direction": direction, "return_entropy": True, "backend": backend}
    together = klfast.kl_divergence(logits, ref_logits, **options).entropy
    alone = klfast.kl_divergence(logits[:, 3:4], ref_logits[:, 3:4], **options).entropy
    assert same_bits(together[:, 3:4], alone)
