"""The tests of Triton alone that ``test_triton_interpreted`` runs: bits, bounds, edges of tiles.

Shapes are small, because the interpreter takes milliseconds for a program.
"""

import math

import pytest
import torch
from agreement import assert_agrees, random_inputs, same_bits
from garbage import BAD_EDGES

import klfast
from klfast import Estimator
from klfast.args.penalty import Spec
from klfast.backends.triton import implementation, plan
from klfast.backends.triton import penalty_launch as triton_launch
from klfast.types.reduction import REDUCTIONS

BACKEND = "triton"
RICH = Estimator("k3", importance_cap=1.2, log_ratio_clip=3.0, linear_tail=1.0, kl_clip=2.0)
SEAMS = (1, 1025, 4096, 4097)  # lengths at the edges of tiles of 1024 and segments of 4096 tokens

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.int64], ids=str)
def test_scalars_are_read_from_tensors(kind):
    logprobs, ref_logprobs, _ = random_inputs((3, 8))
    scalars = {"coef": torch.tensor(3, dtype=kind), "normalizer": torch.tensor(7, dtype=kind)}
    options = {"estimator": Estimator("k2"), "reduction": "token-mean"}
    assert_agrees(BACKEND, logprobs, ref_logprobs, **options, **scalars)


def test_one_tensor_in_two_places_makes_no_plan():
    """A later call of the same kind has two tensors."""
    logprobs, other = random_inputs((2, 5))[:2]
    for ref_logprobs in (logprobs, other):
        found, truth = (
            klfast.kl_penalty(logprobs, ref_logprobs, backend=name)
            for name in (BACKEND, "reference")
        )
        torch.testing.assert_close(found, truth)


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("few_and_many", [(128, 1024), (2, 64), (2, 4)], ids=str)
@pytest.mark.parametrize("reduction", list(REDUCTIONS)[1:])
def test_any_way_to_combine_sequences(monkeypatch, reduction, few_and_many):
    """One program combines few or more sequences, and several programs combine many."""
    monkeypatch.setattr(triton_launch, "_FEW", few_and_many[0])
    monkeypatch.setattr(triton_launch, "_MANY", few_and_many[1])
    plan.PLANS.clear()
    logprobs, ref_logprobs, _ = random_inputs((7, 5))
    mask = torch.rand(7, 5) * (torch.rand(7, 5) < 0.7)
    mask[3] = 0
    options = {"estimator": Estimator("k3"), "reduction": reduction}
    assert_agrees(BACKEND, logprobs, ref_logprobs, mask, **options)


def compute(tensors, cu_seqlens=None, **options):
    """Values, gradients and everything per sequence."""
    logprobs, ref_logprobs = (t.detach().requires_grad_() for t in tensors[:2])
    options = {"estimator": RICH, "old_logprobs": tensors[2], "coef": 0.3} | options
    options |= {"cu_seqlens": cu_seqlens, "backend": BACKEND}
    result, stats = klfast.kl_penalty(
        logprobs, ref_logprobs, tensors[3], return_stats=True, **options
    )
    grads = torch.autograd.grad(result.sum(), (logprobs, ref_logprobs))
    return result.detach(), grads, stats


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [(torch.float32, SEAMS), pytest.param(torch.float64, (9, 5000), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_a_sequence_is_the_same_alone_padded_packed_and_strided(dtype, lengths):
    # The last token is kept, because it may be alone in the last segment.
    masks = [(torch.rand(n) < 0.8) | (torch.arange(n) == n - 1) for n in lengths]
    sequences = [
        (*random_inputs((n,), dtype), mask) for n, mask in zip(lengths, masks, strict=True)
    ]
    width = max(lengths) + 5
    pad = [[torch.nn.functional.pad(t, (0, width - len(t))) for t in s] for s in sequences]
    batch = compute([torch.stack(column) for column in zip(*pad, strict=True)])
    strided = compute(
        [torch.stack(column).t().contiguous().t() for column in zip(*pad, strict=True)]
    )
    edges = torch.tensor([0, *lengths]).cumsum(0)
    packed = compute([torch.cat(column) for column in zip(*sequences, strict=True)], edges)
    for s, sequence in enumerate(sequences):
        value, grads, stats = compute(sequence)
        assert stats.length == sequence[3].sum()
        for other, tokens in (
            (batch, (s, slice(lengths[s]))),
            (strided, (s, slice(lengths[s]))),
            (packed, slice(edges[s], edges[s + 1])),
        ):
            assert same_bits(value, other[0][tokens])
            assert all(same_bits(a, b[tokens]) for a, b in zip(grads, other[1], strict=True))
            assert all(same_bits(a, b[s : s + 1]) for a, b in zip(stats, other[2], strict=True))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("edges", BAD_EDGES.values(), ids=BAD_EDGES)
@every_reduction
def test_no_cu_seqlens_leads_out_of_bounds(monkeypatch, reduction, edges):
    """Every output lies between sentinels. The ops do not check cu_seqlens."""
    guarded = []

    def between_sentinels(like, *size, dtype=None, **of_interpreter):
        if of_interpreter:
            return new_empty(like, *size, dtype=dtype, **of_interpreter)
        shape = size if isinstance(size[0], int) else tuple(size[0])
        buffer = torch.full((math.prod(shape) + 128,), 77.0, dtype=dtype or like.dtype)
        guarded.append(buffer)
        return buffer[64 : buffer.numel() - 64].view(shape)

    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", between_sentinels)
    logprobs, ref_logprobs, _ = random_inputs((9,))
    call = (
        logprobs,
        ref_logprobs,
        None,
        torch.ones(9),
        torch.ones(9),
        torch.tensor(edges),
        None,
        None,
    )
    call += Spec(Estimator("k3"), REDUCTIONS[reduction]).encoded()
    scalar = REDUCTIONS[reduction].is_scalar()
    _, weights, *_ = implementation("kl_penalty_fwd")(*call, None, True, scalar, scalar, True)
    sequences = len(edges) - 1
    grad_out = torch.ones({"none": (9,)}.get(reduction, () if scalar else (sequences,)))
    implementation("kl_penalty_bwd")(*call, grad_out, weights, True, True)
    assert guarded
    assert all((buffer[:64] == 77).all() and (buffer[-64:] == 77).all() for buffer in guarded)


@pytest.mark.parametrize("edges", [[0, 5, 12], [0]], ids=["short", "no-sequence"])
@pytest.mark.parametrize("scalar", [False, True])
def test_tokens_after_the_last_sequence_are_zero(scalar, edges):
    """A packed buffer is longer than its sequences, and no mask covers the rest."""
    n, end = 1500, edges[-1]
    logprobs, ref_logprobs, _ = random_inputs((n,))
    call = (logprobs, ref_logprobs, None, None, None, torch.tensor(edges), None, None)
    call += Spec(Estimator("k3"), REDUCTIONS["token-sum" if scalar else "none"]).encoded()
    result, _, _, *grads = implementation("kl_penalty_fwd")(
        *call, None, False, scalar, scalar, False
    )
    grad_out = torch.ones(()) if scalar else torch.ones(n)
    grads += implementation("kl_penalty_bwd")(
        *call, grad_out, torch.ones(len(edges) - 1), True, True
    )
    for per_token in [grad for grad in grads if grad is not None] + ([] if scalar else [result]):
        assert per_token[:end].all()
        assert not per_token[end:].any()
