"""What the CUDA kernels do with values that nobody has checked: on a GPU nobody looks."""

import emulated
import pytest
import torch

from klfast import Estimator
from klfast.call import Layout, LogProbs, PenaltyCall, Spec
from klfast.reduction import REDUCTIONS

N = 40_000
GARBAGE = {
    "overlapping": [0, N, 8192, 8192],
    "decreasing": [0, 20_000, 10_000, N],
    "beyond": [0, 3 * N, 5 * N],
    "negative": [-N, -1, N],
    "all-the-same": [N, N, N],
    "no-sequence": [0],
    "not-from-zero": [9000, 9001, N],
}


def forward(n, cu_seqlens, reduction, *, mask=None, normalizer=None, scores=None, grads=False):
    """The op itself, as nothing but Python would check its arguments."""
    torch.manual_seed(0)
    logprobs, ref_logprobs = -torch.rand(2, n)
    spec = Spec(Estimator("k3"), REDUCTIONS[reduction], normalizer=normalizer)
    call = PenaltyCall(
        LogProbs(logprobs, ref_logprobs), Layout(mask, cu_seqlens), spec, return_stats=False
    )
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


@pytest.mark.parametrize("n", [16, 8192, 30_000])
@pytest.mark.parametrize("grads", [False, True])
def test_tokens_after_the_last_sequence_are_zero(n, grads):
    """A packed buffer that is longer than its sequences, with numbers that nothing masks."""
    cu_seqlens = torch.tensor([0, 5, 12])
    reduction = "token-sum" if grads else "none"
    outputs = forward(n, cu_seqlens, reduction, grads=grads)
    alone = forward(n, torch.tensor([0, 5, 12, n]), reduction, grads=grads)
    per_token = outputs[3:] if grads else outputs[:1]
    for output, whole in zip(per_token, alone[3:] if grads else alone[:1], strict=True):
        assert torch.equal(output[:12], whole[:12])
        assert output[:12].all()
        assert not output[12:].any()


@pytest.mark.parametrize("normalizer", [0.0, -2.0, float("nan")])
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 3, 10])], ids=["1-d", "packed"])
def test_a_bad_normalizer_means_the_same_to_value_and_gradient(cu_seqlens, reduction, normalizer):
    """It is taken as it is, and shows, as in eager PyTorch."""
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
