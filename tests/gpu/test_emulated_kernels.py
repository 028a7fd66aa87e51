"""CUDA kernels with values that are not checked on a GPU, such as a bad cu_seqlens."""

import itertools
import os
from pathlib import Path

import emulated
import pytest
import torch
from agreement import SCALAR_REDUCTIONS
from fresh import run_fresh
from garbage import GARBAGE, N

from klfast import Estimator
from klfast.args.penalty import PenaltyCall, Spec
from klfast.types.reduction import REDUCTIONS

HERE = Path(__file__).parent


def forward(
    n, cu_seqlens, reduction, *, mask=None, normalizer=None, scores=None, grads=False, dtype=None
):
    """Call the op itself, because only Python checks the arguments."""
    torch.manual_seed(0)
    logprobs, ref_logprobs = -torch.rand(2, n).to(dtype)
    spec = Spec(Estimator("k3"), REDUCTIONS[reduction], normalizer=normalizer)
    call = PenaltyCall(logprobs, ref_logprobs, None, mask, None, cu_seqlens, spec)
    return emulated.ops().kl_penalty_fwd(
        *call.tensors(), *spec.encoded(), scores, True, grads, grads, not grads
    )


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("reduction", ["none", "seq-sum", "token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("cu_seqlens", GARBAGE.values(), ids=GARBAGE)
def test_kernels_stay_inside_their_bounds_whatever_cu_seqlens_holds(cu_seqlens, reduction):
    cu_seqlens = torch.tensor(cu_seqlens)
    sequences = cu_seqlens.numel() - 1
    is_scalar = reduction not in ("none", "seq-sum")
    scores = torch.ones(sequences) if reduction == "none" else None
    forward(N, cu_seqlens, reduction, scores=scores)
    result, weights, *_ = forward(N, cu_seqlens, reduction, grads=is_scalar)
    assert result.shape == ({"none": (N,), "seq-sum": (sequences,)}.get(reduction, ()))
    assert weights.shape == (sequences,)


def test_no_score_is_written_outside_of_the_memory():
    """Sequences that overlap leave sums unwritten. A write outside ends the process."""
    code = "import test_emulated_kernels as kernels; kernels.write_scores()"
    path = os.pathsep.join([str(HERE), str(HERE.with_name("support"))])
    assert run_fresh(code, timeout=300, PYTHONPATH=path) == str(len(GARBAGE))


def write_scores():
    """Compute rewards under each ``GARBAGE``, and print how many there are."""
    for edges in GARBAGE.values():
        forward(N, torch.tensor(edges), "none", scores=torch.ones(len(edges) - 1))
    print(len(GARBAGE))


@pytest.mark.parametrize("n", [16, 8192, 30_000])
@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("are_many", [False, True], ids=["few", "many"])
def test_tokens_after_the_last_sequence_are_zero(are_many, dtype, grads, n):
    """A packed buffer is longer than its sequences, and no mask covers the rest. With many
    sequences a warp zeroes it. It starts within 16 bytes.
    """
    edges = torch.arange(0, n // 4, 3) if are_many else torch.tensor([0, 5, 11])
    end, rest = int(edges[-1]), torch.tensor([n])
    reduction = "token-sum" if grads else "none"
    outputs = forward(n, edges, reduction, grads=grads, dtype=dtype)
    alone = forward(n, torch.cat([edges, rest]), reduction, grads=grads, dtype=dtype)
    per_token = outputs[3:] if grads else outputs[:1]
    for output, whole in zip(per_token, alone[3:] if grads else alone[:1], strict=True):
        assert torch.equal(output[:end], whole[:end])
        # In bf16 some log-probs are equal.
        assert output[:end].all() or dtype == torch.bfloat16
        assert output[:end].count_nonzero() > 0.9 * end
        assert not output[end:].any()


@pytest.mark.parametrize("normalizer", [0.0, -2.0, float("nan")])
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 3, 10])], ids=["1-d", "packed"])
def test_a_bad_normalizer_means_the_same_to_value_and_gradient(cu_seqlens, reduction, normalizer):
    """The result shows a bad normalizer, as in eager PyTorch."""
    mask = torch.arange(10) % 3 == 0
    bad = torch.tensor(normalizer)
    result, _, _, grad, grad_ref = forward(
        10, cu_seqlens, reduction, mask=mask, normalizer=bad, grads=True
    )
    good = forward(10, cu_seqlens, reduction, mask=mask, normalizer=torch.tensor(1.0), grads=True)
    torch.testing.assert_close(result, good[0] / normalizer, equal_nan=True)
    for found, of_one in ((grad, good[3]), (grad_ref, good[4])):
        torch.testing.assert_close(found[mask], of_one[mask] / normalizer, equal_nan=True)
        assert not found[~mask].any()
    spec = Spec(Estimator("k1"), REDUCTIONS[reduction], normalizer=bad)
    arguments = (grad, mask, None, cu_seqlens, None, bad, *spec.encoded(), False)
    assert not emulated.ops().token_weights(*arguments)[~mask].any()


def _weights_of_both(
    shape, cu_seqlens, reduction, mask, weights=None, *, is_double=False, with_cpu=True
):
    """The weights of tokens by the CUDA kernels and by the CPU's kernels."""
    spec = Spec(Estimator("k1"), REDUCTIONS[reduction], coef=0.7)
    like = torch.empty(shape)
    arguments = (like, mask, weights, cu_seqlens, None, None, *spec.encoded(), is_double)
    found = emulated.ops().token_weights(*arguments)
    return found, torch.ops.klfast.token_weights(*arguments) if with_cpu else None


MASKS = {
    "all": lambda shape: None,
    "bool": lambda shape: torch.rand(shape) < 0.7,
    "none-kept": lambda shape: torch.zeros(shape, dtype=torch.bool),
    "int64": lambda shape: torch.randint(0, 2, shape),
    "fp32": torch.rand,
    "bf16-strided": lambda shape: torch.rand(2, *shape).bfloat16().movedim(0, -1)[..., 0],
    "one-for-all-rows": lambda shape: (torch.rand(shape[-1:]) < 0.5).expand(shape),
}
LAYOUTS = {
    "padded": ((7, 33), None),
    "one": ((50,), None),
    "packed": ((60,), [0, 0, 9, 40, 40, 60]),
    "packed-with-a-rest": ((60,), [0, 9, 40]),
    "many": ((3, 4000), None),
    "many-packed": ((12_000,), [0, 1, 9000, 12_000]),
}


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("shape", "cu_seqlens"), LAYOUTS.values(), ids=LAYOUTS)
def test_token_weights_are_those_of_the_cpu(shape, cu_seqlens, make):
    """One block computes few tokens, and several blocks compute more."""
    mask = make(shape)
    if cu_seqlens is not None:
        cu_seqlens = torch.tensor(cu_seqlens)
        rest = int(cu_seqlens[-1])
        if rest < shape[0]:  # the CPU refuses this
            found, _ = _weights_of_both(shape, cu_seqlens, "token-mean", mask, with_cpu=False)
            assert not found[rest:].any()
            shape, mask = (rest,), None if mask is None else mask[:rest]
            alone, _ = _weights_of_both(shape, cu_seqlens, "token-mean", mask)
            assert torch.equal(found[:rest], alone)
    sequences = len(cu_seqlens) - 1 if cu_seqlens is not None else (*shape[:-1], 1)[0]
    given = None, (torch.rand(shape) - 0.3).relu(), (torch.rand(sequences, 1) - 0.3).relu().half()
    for reduction, weights in itertools.product(SCALAR_REDUCTIONS, given):
        for options in ({}, {"is_double": True}):
            found, expected = _weights_of_both(
                shape, cu_seqlens, reduction, mask, weights, **options
            )
            torch.testing.assert_close(found, expected, rtol=1e-15 if options else 1e-6, atol=0)


@pytest.mark.parametrize("cu_seqlens", GARBAGE.values(), ids=GARBAGE)
def test_token_weights_stay_inside_their_bounds_whatever_cu_seqlens_holds(cu_seqlens):
    mask = torch.rand(N) < 0.5
    for reduction in SCALAR_REDUCTIONS:
        found, _ = _weights_of_both((N,), torch.tensor(cu_seqlens), reduction, mask, with_cpu=False)
        assert found.isfinite().all()  # unwritten memory is NaN here
        assert not found[~mask].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "shifted"])
@pytest.mark.parametrize("width", [3_000, 9_001])
def test_a_sequence_has_the_same_sums_whether_one_warp_reads_it_or_several(width, offset, dtype):
    """The emulated device is full with 32 segments. With more segments one warp reads each."""
    torch.manual_seed(0)
    storage = -torch.rand(2, 33, width + 8).to(dtype)
    storage[0, :, ::97] -= 3  # far from the others
    logprobs, ref_logprobs = storage[..., offset : offset + width]
    mask = torch.rand(33, width) < 0.7

    def call(rows):
        spec = Spec(Estimator("k3"), REDUCTIONS["seq-mean"])
        inputs = logprobs[rows], ref_logprobs[rows], None, mask[rows], None, None
        asked = PenaltyCall(*inputs, spec, return_stats=True)
        return emulated.ops().kl_penalty_fwd(
            *asked.tensors(), *spec.encoded(), None, True, False, False, True
        )

    many = call(slice(None))
    for row in (0, 32):
        for one, all_rows in zip(call(slice(row, row + 1))[:3], many[:3], strict=True):
            if one.numel():
                assert torch.equal(one[..., 0], all_rows[..., row])
