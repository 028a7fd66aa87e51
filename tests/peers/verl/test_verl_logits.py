"""klfast.compat.verl over logits against verl's own functions, which need no GPU."""

import pytest
import torch
from comparison import (
    assert_entropies_agree,
    assert_logprobs_agree,
    assert_no_farther,
    every_dtype,
    logits_and_index,
)
from verl.utils import torch_functional
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout.naive import naive_rollout

import klfast
from klfast.compat import verl

NAMES = ["logprobs_from_logits", "entropy_from_logits", "entropy_from_logits_with_chunking"]


@pytest.fixture(autouse=True)
def _without_flash_attn(monkeypatch):
    """What ``stand_ins`` serves in its place is no cross entropy."""
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", "1")


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (7,)], ids=str)
@every_dtype
def test_log_probs(dtype, shape, inplace):
    logits, labels = logits_and_index(dtype, shape)
    assert_logprobs_agree(
        lambda x, index: verl.logprobs_from_logits(x, index, inplace),
        torch_functional.logprobs_from_logits,
        logits,
        labels,
    )


@pytest.mark.parametrize("shape", [(3, 5), (7,)], ids=str)
@every_dtype
def test_entropies(dtype, shape):
    logits, _ = logits_and_index(dtype, shape)
    assert_entropies_agree(verl.entropy_from_logits, torch_functional.entropy_from_logits, logits)


@pytest.mark.parametrize("chunk_size", [3, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunked_entropies(dtype, chunk_size):
    logits, _ = logits_and_index(dtype, (7,))

    def theirs(x):
        """In float64 before its own upcast, which gives fp32."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.Tensor, "float", torch.Tensor.double)
            patched.setattr(torch, "zeros", lambda n, device: torch.empty(n).double())
            return torch_functional.entropy_from_logits_with_chunking(x, chunk_size)

    ours = verl.entropy_from_logits_with_chunking
    assert_entropies_agree(lambda x: ours(x, chunk_size), theirs, logits)
    own = torch_functional.entropy_from_logits_with_chunking(logits, chunk_size)
    assert own.dtype == ours(logits, chunk_size).dtype == torch.float32


def test_exact_keeps_verl_s_dtype():
    logits, labels = logits_and_index(torch.bfloat16)
    assert_no_farther(
        lambda x, index: verl.logprobs_from_logits(x, index, exact=True),
        torch_functional.logprobs_from_logits,
        logits,
        labels,
    )
    assert_no_farther(
        lambda x: verl.entropy_from_logits(x, exact=True),
        torch_functional.entropy_from_logits,
        logits,
    )


def test_patch_reaches_every_module_that_imported_by_name(monkeypatch):
    holders = [(torch_functional, name) for name in NAMES]
    holders += [(module, NAMES[0]) for module in (transformer_impl, naive_rollout)]
    before = [getattr(module, name) for module, name in holders]
    logits, labels = logits_and_index(torch.float32)
    with klfast.compat.patch("verl"):
        for (module, name), old in zip(holders, before, strict=True):
            assert getattr(module, name) is not old, (module, name)
        found = transformer_impl.logprobs_from_logits(logits=logits, labels=labels)
        assert torch.equal(found, verl.logprobs_from_logits(logits, labels))
        # Functions of verl's own that call it.
        response = torch_functional.log_probs_from_logits_response(labels, logits, 4)
        assert torch.equal(response, verl.logprobs_from_logits(logits[:, :-1], labels[:, 1:]))
        calls = []
        monkeypatch.setattr(klfast.compat.common, "entropy", lambda x, **_: calls.append(x) or x)
        transformer_impl.verl_F.entropy_from_logits(logits)
        assert len(calls) == 1
    assert [getattr(module, name) for module, name in holders] == before


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_an_engine_s_step_is_the_same_under_the_patch(checkpointed):
    """The lines of verl's engines that have logits: scaled in place, an entropy, log-probs."""
    values, labels = logits_and_index(torch.float32, (40,))
    weight = torch.randn(40)

    def step():
        leaf = values.clone().requires_grad_()
        logits = transformer_impl._scale_logits_by_temperature(
            leaf * 1.0, torch.full((40, 1), 0.7), is_unit_temperature=False
        )
        entropy_of = torch_functional.entropy_from_logits
        if checkpointed:
            entropy = torch.utils.checkpoint.checkpoint(entropy_of, logits, use_reentrant=False)
        else:
            entropy = entropy_of(logits)
        logprobs = transformer_impl.logprobs_from_logits(
            logits=logits, labels=labels, inplace_backward=False
        )
        loss = (logprobs * weight).mean() - 0.1 * entropy.mean()
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    theirs = step()
    with klfast.compat.patch("verl"):
        ours = step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
    assert ours[1].abs().amax() > 1e-3
