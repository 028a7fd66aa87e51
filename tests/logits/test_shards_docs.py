"""The code blocks of the page, on two ranks with a shard each."""

import readme
import torch
from ranks import assert_same_on_ranks, here, on_ranks
from torch.distributed.device_mesh import init_device_mesh

import klfast

WORDS = 30


def given():
    """The same tensors in every process, with whole vocabularies."""
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(2, 5, 8),
        "ref_hidden": torch.randn(2, 5, 8),
        "weight": torch.randn(WORDS, 8),
        "ref_weight": torch.randn(WORDS, 8),
        "token_ids": torch.randint(WORDS, (2, 5)),
        "mask": torch.rand(2, 5) < 0.8,
    }


def logits_of(names):
    return [
        names[hidden] @ names[head].T
        for hidden, head in (("hidden", "weight"), ("ref_hidden", "ref_weight"))
    ]


@on_ranks
def test_the_page_has_the_numbers_of_whole_vocabularies():
    names = given()
    logits, ref_logits = logits_of(names)
    mask, heads = names["mask"], ("weight", "ref_weight")
    logprobs = klfast.token_logprobs(logits, names["token_ids"], mask)
    kl = klfast.kl_divergence(logits, ref_logits, mask, reduction="token-mean")
    hidden = names["hidden"].clone().requires_grad_()
    whole = hidden, names["weight"], names["ref_hidden"], names["ref_weight"]
    klfast.linear_kl_divergence(*whole, mask, reduction="token-mean").backward()

    own = (slice(13), slice(13, None))[here()[0]]
    names |= {name: names[name][own].clone() for name in heads} | {"klfast": klfast}
    names["logits"], names["ref_logits"] = logits_of(names)
    names["mesh"] = names["group"] = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    left = readme.run("vocabulary-shards", **names)
    names["hidden"].requires_grad_()
    linear = readme.run("vocabulary-shards-linear", **names)
    found = left["logprobs"], left["loss_kl"], linear["loss_kl"].detach(), names["hidden"].grad
    assert_same_on_ranks(*found)
    for one, exact in zip(found, (logprobs, kl, kl, hidden.grad), strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-5, atol=1e-6)
