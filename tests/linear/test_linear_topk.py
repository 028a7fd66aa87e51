"""linear_topk_kl_divergence against the oracle over the logits, whole and in shards."""

import oracle_topk
import pytest
import torch
from agreement import same_bits
from agreement_logits import DIRECTIONS, uneven
from agreement_topk import TAILS
from shards import ThreadRanks, on_threads

import klfast
from klfast.functional import rank_check

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS, WIDTH, CAP = 37, 8, 6.0
MASK = torch.tensor([[1.0, 0.0, 0.5], [2.0, 1.0, 1.0]])


def inputs():
    """hidden, weight, bias, and a teacher's ids and log-probs, of which one is missing."""
    hidden, weight, bias = torch.randn(2, 3, WIDTH), torch.randn(WORDS, WIDTH), torch.randn(WORDS)
    near = hidden @ weight.T + bias + 0.5 * torch.randn(2, 3, WORDS)
    ref_logprobs, ref_token_ids = near.log_softmax(-1).topk(4)
    ref_logprobs[1, 0, 3] = -torch.inf
    hidden[0, 1] = torch.nan  # masked
    return hidden, weight, bias, ref_token_ids, ref_logprobs


def truth_of(hidden, weight, bias, ids, ref_logprobs, **options):
    """The result and the gradients of hidden, weight, bias and ref_logprobs, in float64."""
    own = [t.double().requires_grad_() for t in (hidden.nan_to_num(), weight, bias)]
    logits = CAP * torch.tanh((own[0] @ own[1].T + own[2]) / CAP)
    exact = oracle_topk.topk_kl_divergence(
        logits.detach(), ids, ref_logprobs, MASK, upstream=upstream_of(options), **options
    )
    return (
        exact.result,
        *torch.autograd.grad(logits, own, exact.grad.view_as(logits)),
        exact.grad_ref,
    )


def upstream_of(options):
    return uneven(torch.ones(() if options["reduction"] == "token-mean" else MASK.shape))


def found_by(backend, given, leaves, ranks=None, edges=(0, WORDS), **options):
    """The same of a backend; None for what is no leaf."""
    names = ("hidden", "weight", "bias", "ref_token_ids", "ref_logprobs")
    own = dict(zip(names, given, strict=True))
    if ranks is not None:
        for name in ("weight", "bias"):
            own[name] = own[name][edges[ranks.rank] : edges[ranks.rank + 1]]
    own = {n: t.detach().clone().requires_grad_(n in leaves) for n, t in own.items()}
    result = klfast.linear_topk_kl_divergence(
        **own, mask=MASK, softcap=CAP, chunk=4, group=ranks, backend=backend, **options
    )
    grads = torch.autograd.grad(result, [own[n] for n in leaves], upstream_of(options))
    of = dict(zip(leaves, grads, strict=True))
    return result.detach(), *(of.get(n) for n in ("hidden", "weight", "bias", "ref_logprobs"))


def assert_near(found, truth):
    for x, exact in zip(found, truth, strict=True):
        if x is not None:
            error = (x.double() - exact.view_as(x)).norm()
            assert error <= 2e-5 * exact.norm() + 2e-6


every_case = pytest.mark.parametrize(
    ("tail", "direction", "reduction", "leaves"),
    [
        (tail, direction, ("none", "token-mean")[(i + j) % 2], (FROZEN, TRAINED)[i % 2])
        for FROZEN, TRAINED in [(("hidden", "ref_logprobs"), ("hidden", "weight", "bias"))]
        for i, tail in enumerate(TAILS)
        for j, direction in enumerate(DIRECTIONS)
    ],
)


@every_case
def test_result_and_gradients(backend, tail, direction, reduction, leaves):
    given = inputs()
    options = {"tail": tail, "direction": direction, "reduction": reduction, "temperature": 0.7}
    found = found_by(backend, given, leaves, **options)
    assert_near(found, truth_of(*given, **options))


@every_case
@pytest.mark.parametrize("edges", [(0, 20, WORDS), (0, 0, 3, WORDS)], ids=["two", "an empty one"])
def test_shards(backend, edges, tail, direction, reduction, leaves, monkeypatch):
    """Also of a jsd. Every rank has the same result, and the gradient of hidden of all words."""
    given = inputs()
    options = {"tail": tail, "direction": direction, "reduction": reduction, "temperature": 0.7}
    monkeypatch.setattr(rank_check, "ranks_of_shards", lambda group: group)
    of_ranks = on_threads(
        lambda ranks: found_by(backend, given, leaves, ranks, edges, **options),
        len(edges) - 1,
        ThreadRanks,
    )
    result, hidden, _, _, teacher = of_ranks[0]
    for own in of_ranks[1:]:
        assert same_bits(own[0], result)
        assert same_bits(own[1], hidden)
    heads = [torch.cat([own[i] for own in of_ranks]) if "bias" in leaves else None for i in (2, 3)]
    assert_near((result, hidden, *heads, teacher), truth_of(*given, **options))


def test_statistics_and_what_is_refused():
    hidden, weight, _, ids, ref_logprobs = inputs()
    hidden = hidden.nan_to_num()
    found = klfast.linear_topk_kl_divergence(hidden, weight, ids, ref_logprobs, return_stats=True)
    plain = klfast.topk_kl_divergence(hidden @ weight.T, ids, ref_logprobs, return_stats=True)
    torch.testing.assert_close(found.stats.kl, plain.stats.kl, rtol=1e-5, atol=1e-6)
    assert found.stats.k1.isnan().all()
    with pytest.raises(ValueError, match=r"ref_token_ids must have the shape \[2, 3, K\]"):
        klfast.linear_topk_kl_divergence(hidden, weight, ids[0], ref_logprobs)
    with pytest.raises(ValueError, match="ref_token_ids must be distinct within a token"):
        klfast.linear_topk_kl_divergence(
            hidden, weight, ids[..., :1].expand(-1, -1, 4), ref_logprobs
        )
    with pytest.raises(ValueError, match=r"ref_token_ids must be in \[0, 37\)"):
        klfast.linear_topk_kl_divergence(hidden, weight, ids + 37, ref_logprobs)
