"""A call of a public function as data, made on the CPU and run on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import klfast

Tensors = dict[str, Tensor]

OUTPUTS = {
    "kl_penalty": ("penalty", "stats"),
    "kl_rewards": ("rewards", "stats"),
    "token_logprobs": ("logprobs",),
    "kl_divergence": ("kl",),
    "topk_kl_divergence": ("kl",),
    "linear_token_logprobs": ("logprobs",),
    "linear_kl_divergence": ("kl",),
}
"""Names of what functions return, but for named tuples, which have their own."""

OF_POLICY = ("hidden", "weight", "bias")
OF_REFERENCE = ("ref_hidden", "ref_weight", "ref_bias")
"""The arguments that logits are made from."""

MEMORIES = ("dense", "transposed", "gaps", "unaligned")
"""How the tensors of a call lie in memory."""


@dataclass(frozen=True)
class Call:
    """Arguments of ``klfast.<function>``.

    Attributes:
        function: its name.
        tensors: on the CPU, by argument.
        options: the other arguments.
        leaves: the arguments that gradients are taken of.
        memory: one of ``MEMORIES``.
        words: whether a vocabulary is behind: logits, or hidden states and heads.
    """

    function: str
    tensors: Tensors
    options: Mapping[str, Any]
    leaves: tuple[str, ...]
    memory: str = "dense"
    words: bool = False
    kept: Tensor | None = field(default=None)
    """[tokens], bool: which exist; None for all."""

    @property
    def policy(self) -> Tensor:
        """The tensor that has the call's shape."""
        return next(iter(self.tensors.values()))


def run(call: Call, tensors: Tensors, backend: str, most: float = 1.75) -> Tensors:
    """The results of a call by name, and the gradients of its leaves for grad_outputs of 1 to
    ``most``.
    """
    leaves = {name: tensors[name].detach().requires_grad_() for name in call.leaves}
    given = tensors | leaves
    if call.options.get("inplace_backward") and leaves:
        given |= {name: leaf.clone() for name, leaf in leaves.items()}  # leaves are refused
    returned = getattr(klfast, call.function)(**given, **call.options, backend=backend)
    found = dict(_named(returned, OUTPUTS.get(call.function, ())))
    graded = [output for output in found.values() if output.requires_grad]
    if graded and leaves:
        numbers = (torch.linspace(1, most, t.numel(), dtype=t.dtype, device="cpu") for t in graded)
        upstream = [n.to(t.device).view(t.shape) for n, t in zip(numbers, graded, strict=True)]
        # A scalar needs no grad_outputs, whose check in torch imports sympy.
        products = [(t * n).flatten() for t, n in zip(graded, upstream, strict=True)]
        total = torch.cat(products).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        found |= {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}
    return {name: output.detach() for name, output in found.items()}


def _named(value: Any, names: tuple[str, ...], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a result, of named tuples and tuples in it too."""
    if isinstance(value, Tensor):
        yield prefix or names[0], value
    elif isinstance(value, tuple):
        names = getattr(value, "_fields", names or tuple(map(str, range(len(value)))))
        for name, part in zip(names, value, strict=True):
            yield from _named(part, (), f"{prefix}.{name}" if prefix else name)


def placed(call: Call, device: torch.device) -> Tensors:
    """The tensors of a call on a device, each in memory as the call says."""
    return {name: _laid_out(t.to(device), call.memory) for name, t in call.tensors.items()}


def _laid_out(tensor: Tensor, memory: str) -> Tensor:
    if memory == "dense" or tensor.dim() == 0:
        return tensor
    if memory == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if memory == "unaligned":
        whole = tensor.new_zeros(tensor.numel() + 1)
        return whole[1:].view(tensor.shape).copy_(tensor)
    return torch.stack([tensor, tensor], -1)[..., 0]
