"""klfast.compat.trl.kl_loss against the KL in Liger's fused linear GRPO loss.

With advantages of 0 Liger's loss is beta times its KL. Gradients are compared at the hidden states
and the head's weight, where Liger returns them.
"""

import pytest
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

from klfast.compat import trl

B, T, H, V = 4, 9, 16, 50
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"]
"""luspo is left out, because Liger averages it otherwise than TRL 1.16."""


def batch(dtype):
    """Hidden states, head, token ids, mask, and log-probs of the reference and an older policy."""
    torch.manual_seed(3)
    hidden = torch.randn(B, T, H).to(dtype).requires_grad_()
    head = (0.3 * torch.randn(V, H)).to(dtype).requires_grad_()
    tokens = torch.randint(V, (B, T))
    mask = (torch.arange(T) < torch.tensor([9, 5, 1, 7])[:, None]).long()
    now = logps(hidden, head, tokens).detach()
    ref_logps = now - 0.5 * torch.randn(B, T)
    old_logps = now + 0.2 * torch.randn(B, T)
    return hidden, head, tokens, mask, ref_logps, old_logps


def logps(hidden, head, tokens):
    """Log-probs of the tokens in fp32, from logits of the input's dtype, as in Liger."""
    logits = (hidden @ head.T).float()
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", [False, True], ids=["", "bias-correction"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_kl_term(loss_type, correction, level, dtype):
    if level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        level = "token"  # Liger has only this level for these losses
    hidden, head, tokens, mask, ref_logps, old_logps = batch(dtype)
    beta = 0.7
    liger = LigerFusedLinearGRPOLoss(
        beta=beta,
        compiled=False,
        loss_type=loss_type,
        max_completion_length=20,
        importance_sampling_level=level,
        use_bias_correction_kl=correction,
    )
    theirs, metrics = liger(
        hidden,
        head,
        tokens,
        mask,
        torch.zeros(B),
        ref_per_token_logps=ref_logps,
        old_per_token_logps=old_logps,
    )
    normalizer = {"dr_grpo": B * 20, "dapo": 22, "cispo": 22, "vespo": 22}.get(loss_type)
    ours, stats = trl.kl_loss(
        logps(hidden, head, tokens),
        ref_logps,
        mask,
        beta=beta,
        loss_type=loss_type,
        normalizer=normalizer,
        old_per_token_logps=old_logps,
        use_bias_correction_kl=correction,
        importance_sampling_level=level,
    )
    assert theirs > 1e-2
    # Both sum fp32 numbers in their own orders. bf16 gradients are rounded once more.
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=0)
    grads = torch.autograd.grad(ours, (hidden, head))
    true_grads = torch.autograd.grad(theirs, (hidden, head))
    eps = torch.finfo(dtype).eps
    for grad, true_grad in zip(grads, true_grads, strict=True):
        assert (grad - true_grad).norm() <= max(2 * eps, 1e-5) * true_grad.norm()
    torch.testing.assert_close(stats.kl.sum() / stats.length.sum(), metrics[0], rtol=1e-5, atol=0)
