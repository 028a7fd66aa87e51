"""The page's lines of code, on two ranks that have a shard each."""

import pytest
import readme
import torch
from agreement import same_bits
from ranks import results_of_ranks

import klfast

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
WORDS = 30


def given():
    """The same in every process, with whole vocabularies."""
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(2, 5, 8),
        "ref_hidden": torch.randn(2, 5, 8),
        "head_words": torch.randn(WORDS, 8),
        "ref_head_words": torch.randn(WORDS, 8),
        "token_ids": torch.randint(WORDS, (2, 5)),
        "mask": torch.rand(2, 5) < 0.8,
    }


def logits_of(names):
    return [
        names[hidden] @ names[head].T
        for hidden, head in (("hidden", "head_words"), ("ref_hidden", "ref_head_words"))
    ]


def work(rank):
    names = given() | {"klfast": klfast}
    own = slice(0, 13) if rank == 0 else slice(13, None)
    for name in ("head_words", "ref_head_words"):
        names[name] = names[name][own].clone()
    names["logits"], names["ref_logits"] = logits_of(names)
    names["mesh"] = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2,), mesh_dim_names=("tp",)
    )
    left = readme.run("vocabulary-shards", **names)
    names["hidden"].requires_grad_()
    names["group"] = names["mesh"]
    linear = readme.run("vocabulary-shards-linear", **names)
    return left["logprobs"], left["loss_kl"], linear["loss_kl"].detach(), names["hidden"].grad


def test_the_page_has_the_numbers_of_whole_vocabularies(tmp_path):
    names = given()
    logits, ref_logits = logits_of(names)
    mask = names["mask"]
    logprobs = klfast.token_logprobs(logits, names["token_ids"], mask)
    kl = klfast.kl_divergence(logits, ref_logits, mask, reduction="token-mean")
    names["hidden"].requires_grad_()
    klfast.linear_kl_divergence(
        names["hidden"],
        names["head_words"],
        names["ref_hidden"],
        names["ref_head_words"],
        mask,
        reduction="token-mean",
    ).backward()
    found = results_of_ranks(work, tmp_path)
    for rank in found:
        for own, whole in zip(rank, (logprobs, kl, kl, names["hidden"].grad), strict=True):
            torch.testing.assert_close(own, whole, rtol=1e-5, atol=1e-6)
    for one, other in zip(*found, strict=True):
        assert same_bits(one, other)
