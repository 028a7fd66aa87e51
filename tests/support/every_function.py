"""A small differentiable call of every public function over tensors."""

from contextlib import nullcontext
from functools import partial, wraps

import torch
from torch.utils._pytree import tree_leaves

import klfast

B, T, V, K, D = 2, 3, 11, 3, 4
KEPT = torch.tensor([[1.0, 1.0, 0.5], [1.0, 0.0, 0.0]])


@wraps(klfast.linear_token_loss)
def token_loss(old_logprobs, **arguments):
    """With its tensor over tokens as an argument of its own."""
    inputs = {"loss": lambda logprobs, old: (logprobs - old).exp(), "inputs": (old_logprobs,)}
    return klfast.linear_token_loss(**inputs, **arguments)


def every_function():
    """Name -> (function, arguments without ``mask``). A leaf gets a gradient."""
    a, b, c = (-torch.rand(B, T) - 0.2 for _ in range(3))
    logits, ref_logits = torch.randn(2, B, T, V)
    hidden, ref_hidden = torch.randn(2, B, T, D)
    weight, ref_weight = torch.randn(2, V, D)
    ids = torch.randint(V, (B, T))
    ref_logprobs, words = ref_logits.log_softmax(-1).topk(K)
    leaves = [a, b, logits, ref_logits, hidden, ref_hidden, weight, ref_weight, ref_logprobs]
    for leaf in leaves:
        leaf.requires_grad_()
    teacher = {"ref_token_ids": words, "ref_logprobs": ref_logprobs}
    reference = {"ref_hidden": ref_hidden, "ref_weight": ref_weight}
    return {
        "kl_penalty": (klfast.kl_penalty, {"logprobs": a, "ref_logprobs": b}),
        "kl_penalty(old)": (
            klfast.kl_penalty,
            {"logprobs": a, "ref_logprobs": b, "old_logprobs": c},
        ),
        "kl_penalty(weights)": (
            klfast.kl_penalty,
            {"logprobs": a, "ref_logprobs": b, "weights": torch.tensor([0.5, 2.0])},
        ),
        "kl_rewards": (
            partial(klfast.kl_rewards, kl_coef=0.1),
            {"scores": torch.randn(B), "logprobs": a.detach(), "ref_logprobs": b.detach()},
        ),
        "reduce": (klfast.reduce, {"values": a, "reduction": "token-mean"}),
        "token_logprobs": (klfast.token_logprobs, {"logits": logits, "token_ids": ids}),
        "kl_divergence": (klfast.kl_divergence, {"logits": logits, "ref_logits": ref_logits}),
        "kl_divergence(weights)": (
            klfast.kl_divergence,
            {"logits": logits, "ref_logits": ref_logits, "weights": torch.rand(B, T)},
        ),
        "topk_kl_divergence": (klfast.topk_kl_divergence, {"logits": logits, **teacher}),
        "linear_token_logprobs": (
            klfast.linear_token_logprobs,
            {"hidden": hidden, "weight": weight, "token_ids": ids},
        ),
        "linear_token_loss": (
            token_loss,
            {"hidden": hidden, "weight": weight, "token_ids": ids, "old_logprobs": c},
        ),
        "linear_topk_kl_divergence": (
            klfast.linear_topk_kl_divergence,
            {"hidden": hidden, "weight": weight, **teacher},
        ),
        "linear_kl_divergence": (
            klfast.linear_kl_divergence,
            {"hidden": hidden, "weight": weight, **reference},
        ),
        "rollout_correction": (
            klfast.rollout_correction,
            {"logprobs": a.detach(), "rollout_logprobs": b.detach()},
        ),
        "log_ratio_profile": (
            klfast.log_ratio_profile,
            {"logprobs": a.detach(), "ref_logprobs": b.detach()},
        ),
        "data_parallel_normalizer": (
            klfast.data_parallel_normalizer,
            {"reduction": "seq-mean-token-mean"},
        ),
        "KLPenalty": (klfast.KLPenalty(), {"logprobs": a, "ref_logprobs": b}),
    }


def tensors_of(found):
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def computed(function, arguments, place=lambda tensor: tensor, around=nullcontext):
    """The outputs and the gradients of a call. ``place`` makes an argument of each tensor."""
    handed = {
        name: place(value.detach().clone().requires_grad_(value.requires_grad))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }
    leaves = [t for t in tensors_of(handed) if t.requires_grad]
    with around():
        outputs = tensors_of(function(**handed))
        graded = [output for output in outputs if output.requires_grad]
        incoming = [
            torch.linspace(1, 2, t.numel(), dtype=torch.float32, device="cpu").view(t.shape)
            for t in graded
        ]
        grads = torch.autograd.grad(graded, leaves, incoming) if graded else ()
    return [tensor.detach() for tensor in (*outputs, *grads)]
