"""kl_divergence against the oracle: directions, reductions, layouts, dtypes, options."""

import agreement_logits
import oracle
import oracle_logits
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
    leaves,
    random_ids,
    random_logits,
    tensors_of,
    uneven,
)

import klfast
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

pytestmark = pytest.mark.usefixtures("one_thread")
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)

MASKS = {
    "no-mask": lambda shape: None,
    "bool": lambda shape: torch.rand(shape) < 0.7,
    "int": lambda shape: torch.randint(0, 3, shape),
    "weights": lambda shape: torch.rand(shape) * (torch.rand(shape) < 0.7),
}
PACKINGS = {
    "empty-between": [0, 2, 2, 5, 6, 6],
    "one": [0, 6],
    "empty-ends": [0, 0, 6, 6],
}
EMPTY = {
    "no-sequences": ((0, 3), None),
    "no-tokens": ((3, 0), None),
    "flat": ((0,), None),
    "packed": ((0,), [0, 0, 0]),
    "packed-no-sequences": ((0,), [0]),
}


@pytest.mark.grid
@every_reduction
@every_direction
def test_every_reduction_of_a_padded_batch(backend, direction, reduction):
    for mask in MASKS.values():
        logits = random_logits(2, 3, 37)
        options = {"direction": direction, "reduction": reduction}
        assert_divergence_agrees(backend, *logits, mask((2, 3)), **options)


@pytest.mark.grid
@every_reduction
@every_direction
def test_every_reduction_of_a_packed_batch(backend, direction, reduction):
    for edges in PACKINGS.values():
        logits, mask = random_logits(6, 9), torch.rand(6) + 0.2
        mask[3] = 0
        cu_seqlens = torch.tensor(edges, dtype=torch.int32)
        options = {"direction": direction, "reduction": reduction, "cu_seqlens": cu_seqlens}
        assert_divergence_agrees(backend, *logits, mask, **options)


@every_reduction
def test_one_sequence_without_a_batch(backend, reduction):
    assert_divergence_agrees(backend, *random_logits(4, 11), reduction=reduction)


@pytest.mark.grid
@pytest.mark.parametrize("ref_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_direction
def test_dtypes_mix(backend, direction, dtype, ref_dtype):
    logits = random_logits(2, 3, 45, dtype=dtype, ref_dtype=ref_dtype)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    for reduction in ("none", "token-mean") if dtype == ref_dtype else ("token-mean",):
        options = {"direction": direction, "reduction": reduction}
        assert_divergence_agrees(backend, *logits, mask, **options)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [1, 2, 3, 31, 64, 255, 1025, 4097])
@every_direction
@pytest.mark.parametrize("backend", COMPILED, indirect=True)
def test_vocabularies_of_any_size(backend, direction, words, dtype):
    assert_divergence_agrees(backend, *random_logits(1, 2, words, dtype=dtype), direction=direction)


@pytest.mark.parametrize("backend", FAST, indirect=True)
@pytest.mark.parametrize(
    ("words", "dtype"), [(32_000, torch.float32), (50_257, torch.bfloat16)], ids=str
)
def test_the_vocabularies_of_models(backend, words, dtype):
    for direction in DIRECTIONS:
        logits = random_logits(1, 2, words, dtype=dtype)
        for reduction in ("none", "token-mean"):
            options = {"direction": direction, "reduction": reduction}
            assert_divergence_agrees(backend, *logits, **options)


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1, 3, 10.0])
@every_direction
def test_temperatures(backend, direction, temperature):
    for dtype in (torch.float32, torch.float64):
        logits = random_logits(2, 3, 37, dtype=dtype)
        assert_divergence_agrees(backend, *logits, direction=direction, temperature=temperature)


@pytest.mark.parametrize("beta", [1e-4, 0.1, 0.3, 0.9, 0.9999])
def test_jsd_of_any_weight(backend, beta):
    for apart in (0.01, 0.5, 5.0):
        logits = random_logits(2, 3, 37, apart=apart)
        assert_divergence_agrees(backend, *logits, direction="jsd", jsd_beta=beta)


def test_jsd_nears_each_kl_at_its_ends(backend):
    logits = random_logits(2, 3, 37, dtype=torch.float64)
    forward, reverse = (
        klfast.kl_divergence(*logits, direction=direction, backend=backend)
        for direction in ("forward", "reverse")
    )
    for beta, limit in ((1e-6, forward), (1 - 1e-6, reverse)):
        jsd = klfast.kl_divergence(*logits, direction="jsd", jsd_beta=beta, backend=backend)
        torch.testing.assert_close(jsd / min(beta, 1 - beta), limit, rtol=1e-4, atol=0)


def test_jsd_of_a_half_is_symmetric_and_below_log_2(backend):
    logits, ref_logits = random_logits(2, 3, 37, apart=9.0)
    one = klfast.kl_divergence(logits, ref_logits, direction="jsd", backend=backend)
    other = klfast.kl_divergence(ref_logits, logits, direction="jsd", backend=backend)
    torch.testing.assert_close(one, other, rtol=3e-6, atol=0)
    apart = torch.tensor([[200.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 200.0], [0.0, 0.0]])
    largest = klfast.kl_divergence(*apart, direction="jsd", backend=backend)
    # A mass of either model, and the quotient of their mean, by an approximate reciprocal.
    rtol = 2 * OF_ONE_WORD + 2**-23
    torch.testing.assert_close(largest, torch.tensor([2.0, 1.0]).log(), rtol=rtol, atol=0)


@pytest.mark.grid
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
@every_reduction
def test_coefficients_and_normalizers(backend, reduction, as_tensor):
    options = {"coef": -0.3, "normalizer": 7.5}
    if reduction not in NORMALIZED_REDUCTIONS:
        del options["normalizer"]
    if as_tensor:
        options = {name: torch.tensor(value) for name, value in options.items()}
    mask = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]])
    assert_divergence_agrees(backend, *random_logits(2, 3, 9), mask, reduction=reduction, **options)


def test_a_coefficient_that_asks_for_a_gradient_gets_none(backend):
    coef = torch.tensor(0.5, requires_grad=True)
    logits = leaves(*random_logits(2, 3, 9))
    result = klfast.kl_divergence(*logits, reduction="token-sum", coef=coef, backend=backend)
    result.backward()
    assert coef.grad is None
    assert logits[0].grad.any()


@pytest.mark.grid
@pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])
@every_direction
def test_token_ids_give_the_log_probs_of_both_models(backend, direction, reduction):
    """With their gradients, alone and beside the divergence's, and the divergence's own bits."""
    mask = torch.tensor([[1.0, 0.0, 0.5], [1.0, 1.0, 0.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = leaves(*random_logits(2, 3, 37, dtype=dtype))
        ids = random_ids(logits[0])
        options = {"direction": direction, "reduction": reduction, "temperature": 0.7}
        outputs = tensors_of(
            klfast.kl_divergence(*logits, mask, token_ids=ids, **options, backend=backend)
        )
        without = klfast.kl_divergence(*logits, mask, **options, backend=backend)
        assert same_bits(outputs[0].detach(), without.detach())
        for found, own in zip(outputs[1:], logits, strict=True):
            truth = oracle_logits.token_logprobs(own, ids, mask != 0, temperature=0.7)
            assert found.dtype == outputs[0].dtype
            oracle.assert_within(found, truth.logprobs, truth.logprobs_tolerance, "logprobs")
        upstream = [uneven(outputs[0]), uneven(outputs[1]), uneven(outputs[2]).flip(0)]
        for wanted in ((0,), (1,), (2,), (0, 1, 2)):
            of = [grad if i in wanted else None for i, grad in enumerate(upstream)]
            zeros = [torch.zeros_like(upstream[0]), None, None]
            truth = oracle_logits.kl_divergence(
                *logits,
                mask,
                token_ids=ids,
                upstream=[
                    own if own is not None else zero for own, zero in zip(of, zeros, strict=True)
                ],
                **options,
            )
            grads = torch.autograd.grad(
                [outputs[i] for i in wanted],
                logits,
                [upstream[i] for i in wanted],
                retain_graph=True,
                materialize_grads=True,
            )
            for grad, leaf, exact, tolerance in (
                (grads[0], logits[0], truth.grad, truth.grad_tolerance),
                (grads[1], logits[1], truth.grad_ref, truth.grad_ref_tolerance),
            ):
                agreement_logits.assert_gradient(grad, leaf, exact, tolerance, f"grad {wanted}")


@pytest.mark.parametrize("return_stats", [False, True], ids=["no-stats", "stats"])
@pytest.mark.parametrize("return_entropy", [False, True], ids=["no-entropy", "entropy"])
@pytest.mark.parametrize("with_ids", [False, True], ids=["no-ids", "ids"])
def test_what_was_not_asked_for_is_none(backend, with_ids, return_entropy, return_stats):
    """A tensor comes back where nothing is asked for beside it, else all fields by their names."""
    logits, ref_logits = random_logits(2, 3, 11)
    ids = random_ids(logits)
    options = {"reduction": "token-mean", "backend": backend}
    alone = klfast.kl_divergence(logits, ref_logits, **options)
    found = klfast.kl_divergence(
        logits,
        ref_logits,
        token_ids=ids if with_ids else None,
        return_entropy=return_entropy,
        return_stats=return_stats,
        **options,
    )
    if not (with_ids or return_entropy or return_stats):
        assert type(found) is torch.Tensor
        found = klfast.KLDivergence(found)
    assert type(found) is klfast.KLDivergence
    assert found._fields == ("kl", "logprobs", "ref_logprobs", "entropy", "stats")
    assert same_bits(found.kl, alone)
    known = {
        "logprobs": with_ids,
        "ref_logprobs": with_ids,
        "entropy": return_entropy,
        "stats": return_stats,
    }
    assert {name: getattr(found, name) is not None for name in known} == known
    of_policy = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
    of_reference = klfast.token_logprobs(ref_logits, ids, backend=backend)
    for own, expected in (
        (found.logprobs, of_policy.logprobs),
        (found.ref_logprobs, of_reference),
        (found.entropy, of_policy.entropy),
    ):
        if own is not None:
            torch.testing.assert_close(own, expected, rtol=2e-6, atol=2e-6)
    if return_stats:
        assert type(found.stats) is klfast.KLStats
        assert found.stats.k1.isnan().all() != with_ids


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_token_ids_of_any_dtype_and_layout(backend, dtype):
    logits = random_logits(2, 3, 37)
    ids = random_ids(logits[0])
    expected = klfast.kl_divergence(*logits, token_ids=ids, backend=backend)
    for laid_out in (ids.to(dtype), ids.to(dtype).t().contiguous().t()):
        found = klfast.kl_divergence(*logits, token_ids=laid_out, backend=backend)
        pairs = zip(tensors_of(found), tensors_of(expected), strict=True)
        assert all(same_bits(a, b) for a, b in pairs)


@pytest.mark.grid
@pytest.mark.parametrize(("shape", "edges"), EMPTY.values(), ids=EMPTY)
@every_reduction
def test_empty_batches_are_zero(backend, reduction, shape, edges):
    cu_seqlens = None if edges is None else torch.tensor(edges)
    options = {"reduction": reduction, "cu_seqlens": cu_seqlens, "backend": backend}
    for direction in DIRECTIONS:
        logits = leaves(torch.zeros(*shape, 5), torch.zeros(*shape, 5))
        ids = torch.zeros(shape, dtype=torch.int64)
        found = klfast.kl_divergence(
            *logits, direction=direction, token_ids=ids, return_stats=True, **options
        )
        without = klfast.kl_divergence(*logits, direction=direction, **options)
        sequences = oracle_logits.Sums(shape, "seq-sum", cu_seqlens).shape
        sums = {"none": shape, "seq-sum": sequences, "seq-mean": sequences}
        for result in (found.kl, without):
            assert torch.equal(result, torch.zeros(sums.get(reduction, ())))
            grads = torch.autograd.grad(result.sum(), logits)
            assert all(torch.equal(grad, torch.zeros(*shape, 5)) for grad in grads)
        for logprobs in (found.logprobs, found.ref_logprobs):
            assert torch.equal(logprobs, torch.zeros(shape))
        assert torch.equal(found.stats.kl, torch.zeros(sequences))
        assert torch.equal(found.stats.length, torch.zeros(sequences))


@pytest.mark.grid
@every_reduction
@every_direction
def test_fully_masked_batches_are_zero(backend, direction, reduction):
    logits = leaves(torch.full((2, 3, 9), torch.nan), torch.full((2, 3, 9), -torch.inf))
    ids = torch.full((2, 3), -100)
    for mask in (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)):
        options = {"direction": direction, "reduction": reduction, "backend": backend}
        with_stats = klfast.kl_divergence(*logits, mask, return_stats=True, **options)
        with_ids = klfast.kl_divergence(*logits, mask, token_ids=ids, **options)
        for found in (with_stats.kl, *tensors_of(with_ids)):
            assert torch.equal(found, torch.zeros(found.shape))
            grads = torch.autograd.grad(
                found.sum(), logits, retain_graph=True, materialize_grads=True
            )
            assert all(torch.equal(grad, torch.zeros(2, 3, 9)) for grad in grads)
        assert not with_stats.stats.kl.any()
        assert not with_stats.stats.nonfinite.any()
