"""Heads in vocabulary shards. ``logits/test_shards.py`` tests the options that logits have too."""

import pytest
import torch
from shards import ThreadRanks, found_over_shards, on_threads
from torch.utils._python_dispatch import TorchDispatchMode

import klfast
from klfast.cli.check.calls import Call
from klfast.cli.check.compare import truth_of, wrong_of
from klfast.types.names import DIRECTIONS

pytestmark = pytest.mark.usefixtures("one_thread")


def arguments(tokens=6, words=37, width=8):
    """hidden, weight, ref_hidden, ref_weight and token_ids."""
    hidden, ref_hidden = torch.randn(2, 1, tokens, width)
    weight, ref_weight = torch.randn(2, words, width)
    return hidden, weight, ref_hidden, ref_weight, torch.randint(words, (1, tokens))


@pytest.mark.parametrize("leaves", [("hidden", "weight"), ("hidden",)])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_shard_that_a_bias_excludes(backend, leaves, direction):
    """A padded head has such ids, and its last shard may have no others."""
    hidden, weight, ref_hidden, ref_weight, ids = arguments()
    bias = torch.where(torch.arange(37) < 20, 0.0, -torch.inf)
    tensors = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "ref_hidden": ref_hidden,
        "ref_weight": ref_weight,
        "ref_bias": bias,
        "token_ids": ids % 20,
    }
    options = {"direction": direction, "return_entropy": True}
    found = found_over_shards(
        Call("linear_kl_divergence", tensors, options, leaves), backend, (20,)
    )
    if "weight" in leaves:
        grad = found.values["gradient of weight"]
        assert not grad[20:].any()
        found.values["gradient of weight"] = grad[:20]
    of_heads = ("weight", "bias", "ref_weight", "ref_bias")
    kept = {name: t[:20] if name in of_heads else t for name, t in tensors.items()}
    whole = Call("linear_kl_divergence", kept, options, leaves)
    assert not wrong_of(truth_of(whole), found)


class Products(TorchDispatchMode):
    """Counts matmuls."""

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
    "loss": ("linear_token_loss", {"loss": torch.neg}),
}


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_shards_add_no_product(name, is_trained):
    """A group adds one all-reduce, and one gathered table more than there are chunks."""
    function, options = CALLS[name]
    hidden, weight, ref_hidden, ref_weight, ids = arguments()

    def products(own, ranks=None):
        head = weight[own].clone().requires_grad_(is_trained)
        given = hidden.clone().requires_grad_(), head
        others = (ref_hidden, ref_weight[own].clone()) if "kl" in function else (ids,)
        with Products() as found:
            result = getattr(klfast, function)(*given, *others, **options, group=ranks, chunk=3)
            (result.loss if name == "loss" else result.sum()).backward()
        return found.count

    whole = products(slice(None))
    if name == "loss":
        assert whole == (3 if is_trained else 2) * 2  # chunks

    def work(ranks):
        own = slice(0, 20) if ranks.rank == 0 else slice(20, None)
        return products(own, ranks), ranks.added, len(ranks.gathered) - ranks.added

    assert on_threads(work, 2, CountedRanks) == [(whole, 1, 1 + 2)] * 2


def test_what_is_refused():
    hidden, weight, ref_hidden, _, ids = arguments()
    calls = {
        **{
            f"direction must be 'reverse' or 'forward' with group, got '{name}': ": (
                lambda ranks, name=name: klfast.linear_kl_divergence(
                    hidden, weight, ref_hidden, direction=name, group=ranks
                )
            )
            for name in DIRECTIONS[2:]
        },
        "shards of group must have at least one token id": lambda ranks: (
            klfast.linear_token_logprobs(hidden, weight[:0], ids, group=ranks)
        ),
        r"token_ids must be in \[0, 74\)": lambda ranks: klfast.linear_token_logprobs(
            hidden, weight, ids + 74, group=ranks
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            on_threads(call, 2)
