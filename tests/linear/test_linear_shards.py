"""Heads in vocabulary shards against the textbook over whole ones, on every backend."""

import draws_linear
import oracle_linear
import pytest
import torch
from agreement import same_bits
from shards import ThreadRanks, on_threads
from torch.utils._python_dispatch import TorchDispatchMode

import klfast
from klfast.functional import rank_check

pytestmark = pytest.mark.usefixtures("one_thread")

OF_HEADS = ("weight", "bias", "ref_weight", "ref_bias")
NO_JSD = tuple(d for d in draws_linear.OF_DIVERGENCES["direction"] if d != "jsd")
SHARDS = {"words": (37,), "edges": ((20,), (1, 30), (16, 16), (0,), (37,))}
OF_TOKENS = draws_linear.rows(draws_linear.OPTIONS | SHARDS)
OF_DIVERGENCES = draws_linear.rows(
    draws_linear.OF_DIVERGENCES | SHARDS | {"direction": NO_JSD, "words": (37,)}
)


def found_by(call, backend, edges):
    """What ranks that have a shard each make of a call, by name, and the gradients of its leaves:
    one for all, or put together of those of the shards.
    """
    bounds = (0, *edges, call.tensors["weight"].shape[0])

    def work(ranks):
        own = slice(*bounds[ranks.rank : ranks.rank + 2])
        tensors = {
            name: tensor if tensor is None or name not in OF_HEADS else tensor.detach()[own]
            for name, tensor in call.tensors.items()
        }
        tensors = oracle_linear.Call(tensors, leaves=call.leaves).given()
        options = call.options | {"mask": call.mask, "token_ids": call.token_ids}
        function = klfast.linear_token_logprobs
        if call.has_reference:
            function = klfast.linear_kl_divergence
        found = function(**tensors, **options, backend=backend, group=ranks)
        if isinstance(found, torch.Tensor):
            found = {"kl" if call.has_reference else "logprobs": found}
        else:
            found = {n: t for n, t in found._asdict().items() if isinstance(t, torch.Tensor)}
        return found, oracle_linear.gradients(call, tensors, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_check, "ranks_of_shards", lambda group: group)
        of_ranks = on_threads(work, len(bounds) - 1)
    first, _ = of_ranks[0]
    for found, _ in of_ranks[1:]:
        for name, tensor in found.items():
            assert same_bits(tensor.detach(), first[name].detach()), name
    grads = {}
    for name in of_ranks[0][1]:
        parts = [of_rank[name] for _, of_rank in of_ranks]
        if name in OF_HEADS:
            grads[name] = torch.cat(parts)
        else:
            grads[name] = parts[0]
            assert all(same_bits(part, parts[0]) for part in parts)
    return first, grads


@pytest.mark.grid(each="backend", meet=1)
@pytest.mark.parametrize("row", OF_TOKENS, ids=draws_linear.name_of)
def test_token_logprobs(backend, row):
    call = draws_linear.call_of(row, reference=False)
    oracle_linear.assert_agrees(call, *found_by(call, backend, row["edges"]))


@pytest.mark.grid(each="backend", meet=1)
@pytest.mark.parametrize("row", OF_DIVERGENCES, ids=draws_linear.name_of)
def test_kl_divergence(backend, row):
    call = draws_linear.call_of(row)
    oracle_linear.assert_agrees(call, *found_by(call, backend, row["edges"]))


def arguments(tokens=6, words=37, width=8):
    """hidden, weight, ref_hidden, ref_weight and token_ids."""
    hidden, ref_hidden = torch.randn(2, 1, tokens, width)
    weight, ref_weight = torch.randn(2, words, width)
    return hidden, weight, ref_hidden, ref_weight, torch.randint(words, (1, tokens))


@pytest.mark.parametrize("leaves", [("hidden", "weight"), ("hidden",)])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_shard_that_a_bias_excludes(backend, leaves, direction):
    """As of words that fill a head up to a round number: the last shard may have no other."""
    hidden, weight, ref_hidden, ref_weight, ids = arguments()
    bias = torch.where(torch.arange(37) < 20, 0.0, -torch.inf)
    tensors = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "ref_hidden": ref_hidden,
        "ref_weight": ref_weight,
        "ref_bias": bias,
    }
    options = {"direction": direction, "return_entropy": True}
    call = oracle_linear.Call(tensors, options, leaves, None, ids % 20)
    found, grads = found_by(call, backend, (20,))
    kept = {n: t if t is None or n not in OF_HEADS else t[:20] for n, t in tensors.items()}
    whole = oracle_linear.Call(kept, options, leaves, None, ids % 20)
    if "weight" in leaves:
        assert not grads["weight"][20:].any()
        grads["weight"] = grads["weight"][:20]
    oracle_linear.assert_agrees(whole, found, grads)


@pytest.mark.parametrize("leaves", [("hidden", "weight"), ("hidden",)])
@pytest.mark.parametrize("place", [3, 36])
def test_the_gradient_of_a_confident_token(backend, leaves, place):
    """1 - p keeps its digits, in the shard of the word and in the other."""
    tensors = dict(zip(("hidden", "weight"), arguments()[:2], strict=True))
    tensors["bias"] = torch.where(torch.arange(37) == place, 30.0, 0.0)
    call = oracle_linear.Call(tensors, {}, leaves, None, torch.full((1, 6), place))
    _, grads = found_by(call, backend, (20,))
    exact = oracle_linear.truth(call, torch.float64)
    for name, grad in grads.items():
        error = (grad.double() - exact[f"d {name}"]).norm()
        assert error <= 2e-3 * exact[f"d {name}"].norm(), name


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return function(*args, **(kwargs or {}))


class CountedRanks(ThreadRanks):
    """Counts all-reduces."""

    added = 0

    def add_up(self, tensor):
        self.added += 1
        super().add_up(tensor)


CALLS = {
    "mean": ("linear_kl_divergence", {"reduction": "token-mean"}),
    "per token": ("linear_kl_divergence", {}),
    "log-probs": ("linear_token_logprobs", {}),
}


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_shards_add_no_product(name, is_trained, monkeypatch):
    """There are as many as without a group, one all-reduce, and a table a chunk and one before."""
    function, options = CALLS[name]
    hidden, weight, ref_hidden, ref_weight, ids = arguments()
    monkeypatch.setattr(rank_check, "ranks_of_shards", lambda group: group)

    def products(own, ranks=None):
        head = weight[own].clone().requires_grad_(is_trained)
        given = hidden.clone().requires_grad_(), head
        others = (ids,) if "logprobs" in function else (ref_hidden, ref_weight[own].clone())
        with Products() as found:
            result = getattr(klfast, function)(*given, *others, **options, group=ranks, chunk=3)
            result.sum().backward()
        return found.count

    whole = products(slice(None))

    def work(ranks):
        own = slice(0, 20) if ranks.rank == 0 else slice(20, None)
        return products(own, ranks), ranks.added, len(ranks.gathered) - ranks.added

    assert on_threads(work, 2, CountedRanks) == [(whole, 1, 1 + 2)] * 2


def refused(function, *given, **options):
    def work(ranks):
        return getattr(klfast, function)(*given, **options, group=ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_check, "ranks_of_shards", lambda group: group)
        on_threads(work, 2)


def test_what_is_refused():
    hidden, weight, ref_hidden, _, ids = arguments()
    with pytest.raises(ValueError, match="direction must be 'reverse' or 'forward' with group"):
        refused("linear_kl_divergence", hidden, weight, ref_hidden, direction="jsd")
    with pytest.raises(ValueError, match="group must have a rank with at least one word"):
        refused("linear_token_logprobs", hidden, weight[:0], ids)
    with pytest.raises(ValueError, match=r"token_ids must be in \[0, 74\)"):
        refused("linear_token_logprobs", hidden, weight, ids + 74)
