"""A call of a public function as data, made on the CPU and run on any device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import klfast
from klfast.backends.known_calls import gradients_of, named

Tensors = dict[str, Tensor]

RESULTS = {
    "kl_penalty": "penalty",
    "kl_rewards": "rewards",
    "token_logprobs": "logprobs",
    "linear_token_logprobs": "logprobs",
}
"""Names of results that are no named tuples, which have their own; of others "kl"."""

OF_POLICY = ("hidden", "weight", "bias")
OF_REFERENCE = ("ref_hidden", "ref_weight", "ref_bias")
"""The arguments that logits are made from."""

OF_LOSS = ("old_logprobs", "ref_logprobs", "advantages")
"""The tensors that ``linear_token_loss`` takes as ``inputs``."""

MEMORIES = ("dense", "transposed", "gaps", "unaligned")  # how the tensors of a call lie in memory


@dataclass(frozen=True)
class Call:
    """Arguments of ``klfast.<function>``."""

    function: str
    tensors: Tensors  # on the CPU, by argument
    options: Mapping[str, Any]  # the other arguments
    leaves: tuple[str, ...]  # the arguments that have gradients
    memory: str = "dense"  # a name in ``MEMORIES``
    kept: Tensor | None = None  # [tokens], bool, True for tokens that exist; None for all

    @property
    def words(self) -> bool:
        """True if the call has a vocabulary: logits, or hidden states and heads."""
        return not next(iter(self.tensors)).endswith("logprobs")

    @property
    def policy(self) -> Tensor:
        """The tensor that has the call's shape."""
        return next(iter(self.tensors.values()))


CPU = torch.device("cpu")


def run(call: Call, backend: str, device: torch.device = CPU, most: float = 1.75) -> Tensors:
    """The results of a call by name, and its gradients for grad_outputs of 1 to ``most``."""
    tensors = {name: _laid_out(t.to(device), call.memory) for name, t in call.tensors.items()}
    leaves = {name: tensors[name].detach().requires_grad_() for name in call.leaves}
    given = tensors | leaves
    if call.options.get("inplace_backward"):
        given |= {name: leaf.clone() for name, leaf in leaves.items()}  # leaves are refused
    found = outputs_of(call, given, backend)
    graded = [output for output in found.values() if output.requires_grad]
    if graded and leaves:
        # Unequal, so that a gradient of the wrong token or output shows.
        numbers = (torch.linspace(1, most, t.numel(), dtype=t.dtype, device="cpu") for t in graded)
        upstream = [n.to(t.device).view(t.shape) for n, t in zip(numbers, graded, strict=True)]
        grads = gradients_of(graded, upstream, list(leaves.values()))
        found |= {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}
    return {name: output.detach() for name, output in found.items()}


def arguments_of(call: Call, tensors: Tensors) -> dict[str, Any]:
    """The arguments of a call on these tensors."""
    if call.function != "linear_token_loss":
        return {**tensors, **call.options}
    others = {name: tensor for name, tensor in tensors.items() if name not in OF_LOSS}
    return {**others, **call.options, "inputs": tuple(tensors[name] for name in OF_LOSS)}


def outputs_of(call: Call, tensors: Tensors, backend: str) -> Tensors:
    """The outputs of a call on these tensors, by name."""
    given = arguments_of(call, tensors)
    returned = getattr(klfast, call.function)(**given, backend=backend)
    if not hasattr(returned, "_fields"):
        several = returned if isinstance(returned, tuple) else (returned,)
        returned = dict(zip((RESULTS.get(call.function, "kl"), "stats"), several, strict=False))
    return named(returned, separator=".")


def _laid_out(tensor: Tensor, memory: str) -> Tensor:
    if memory == "dense" or tensor.dim() == 0:
        return tensor
    if memory == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if memory == "unaligned":
        # A vector load of a kernel must not begin at an address that is no multiple of its size.
        whole = tensor.new_zeros(tensor.numel() + 1)
        return whole[1:].view(tensor.shape).copy_(tensor)
    return torch.stack([tensor, tensor], -1)[..., 0]
