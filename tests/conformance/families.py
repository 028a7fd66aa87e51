"""A row for each public function, for the tests of what holds in all of them.

The cases of ``klfast check`` make the inputs. A variant names the options in which a call differs
from the first values of these cases.
"""

import functools
from dataclasses import replace

import pytest
import torch
from targets import OF_ROLLOUT, TARGETS, serving

from klfast.cli.check.calls import outputs_of
from klfast.cli.check.cases import FAMILIES
from klfast.cli.check.compare import truth_of

PACKED = ("packed", torch.int32)
WIDE = (torch.float64, torch.float64)
"""The dtypes of two models in which derivatives are compared with quotients."""

_OF_LOGPROBS = {"leaves": ("logprobs", "ref_logprobs"), "mask": torch.float32}
_OF_LOGITS = {"leaves": ("logits", "ref_logits"), "mask": torch.float32}
_OF_HIDDEN = ("hidden", "weight")
_OF_BOTH = (*_OF_HIDDEN, "ref_hidden", "ref_weight")
_SCALAR = {"reduction": "token-mean", "coef": -0.4, "return_stats": True}
_HEATED = {"mask": torch.float32, "temperature": "token"}
_BY_SEQUENCE = {"reduction": "seq-mean", "form": PACKED, "mask": None}

_OF_TOKENS = {"weights": ("token", torch.float32)}
_OF_SEQUENCES = {"weights": ("sequence", torch.float64)}

VARIANTS = {
    "penalty": {
        "tokens": _OF_LOGPROBS | {"estimator": "k3", "importance": "differentiable"} | _OF_TOKENS,
        "sequences": _OF_LOGPROBS | {"estimator": "k2"} | _BY_SEQUENCE | _OF_SEQUENCES,
        "scalar": _OF_LOGPROBS | {"estimator": "k3"} | _SCALAR,
        "weights": _OF_LOGPROBS | {"estimator": "k3"} | _SCALAR | _OF_SEQUENCES,
    },
    "rewards": {"tokens": {"mask": torch.float32, "return_stats": True}},
    "token log-probs": {
        "tokens": {"leaves": ("logits",), "return_entropy": True, "ignore_index": 1},
        "picks": {"leaves": ("logits",), "return_entropy": True, "picks": 3} | _HEATED,
    },
    "divergences": {
        "tokens": _OF_LOGITS | {"ids": torch.int64, "return_entropy": True, "direction": "forward"},
        "sequences": _OF_LOGITS
        | {"direction": "jsd", "temperature": "token"}
        | _BY_SEQUENCE
        | _OF_SEQUENCES,
        "scalar": _OF_LOGITS | _SCALAR | _OF_TOKENS,
        "weights": _OF_LOGITS | {"mask": None, "reduction": "token-mean"} | _OF_TOKENS,
    },
    "top-k divergences": {
        "tokens": {"leaves": ("logits", "ref_logprobs"), "mask": torch.float32},
        "scalar": {"leaves": ("logits",), "tail": "bucket"} | _HEATED | _SCALAR | _OF_TOKENS,
    },
    "log-probs from hidden states": {"tokens": {"leaves": _OF_HIDDEN, "return_entropy": True}},
    "losses from hidden states": {
        "scalar": {
            "leaves": _OF_HIDDEN,
            "mask": torch.float32,
            "reduction": "seq-mean-token-mean",
            "return_entropy": True,
        }
    },
    "divergences from hidden states": {
        "tokens": {"leaves": _OF_BOTH, "ids": torch.int64, "return_entropy": True},
        "scalar": {"leaves": _OF_BOTH, "mask": torch.float32} | _SCALAR | _OF_TOKENS,
    },
    "top-k divergences from hidden states": {"scalar": {"leaves": _OF_HIDDEN} | _SCALAR},
    "rollout": {"tokens": {"weight": "token", "statistic": "k3", "over": "seq-mean"}},
}
"""Family -> name -> options of ``FAMILIES``."""

UNTRACED = tuple(name for name in FAMILIES if "hidden" in name)
"""The functions that split a batch by its data: torch.compile breaks its graph at a call, and
torch.func is refused."""
GRADED = [(f, v) for f, variants in VARIANTS.items() for v, o in variants.items() if "leaves" in o]
TRACED = [(f, v) for f, variants in VARIANTS.items() for v in variants if f not in UNTRACED]


def every(pairs):
    """A parameter ``of``: a family and a variant."""
    return pytest.mark.parametrize("of", pairs, ids="-".join)


def served(target, family):
    """A context in which a target serves a family, as the name of its backend."""
    if family == "rollout" and target not in OF_ROLLOUT:
        pytest.skip("this target has no kernels for rollout_correction")
    return serving(TARGETS[target])


@functools.cache
def cases_of(family):
    """The cases of a family, each with its call and the truth."""
    made = ((case, case.call()) for case in FAMILIES[family].cases(family))
    return [(case, call, truth_of(call)) for case, call in made]


class Function:
    """A call of a public function, as a function of its leaves that returns all its outputs.

    ``graded`` has the names of the outputs with a gradient.
    """

    def __init__(self, of, backend, **options):
        family, variant = of
        allowed = FAMILIES[family].options
        first = {name: values[0] for name, values in allowed.items()}
        own = {name: value for name, value in options.items() if value in allowed.get(name, ())}
        row = first | VARIANTS[family][variant] | own
        made = FAMILIES[family].call(row, seed=0)
        here = torch.get_default_device()  # where a target serves
        tensors = {name: tensor.to(here) for name, tensor in made.tensors.items()}
        self.call, self.backend = replace(made, tensors=tensors), backend
        found = outputs_of(self.call, self._given(self.leaves()), backend)
        self.graded = [name for name, output in found.items() if output.requires_grad]

    def _given(self, leaves):
        return self.call.tensors | dict(zip(self.call.leaves, leaves, strict=True))

    def leaves(self):
        """New leaves."""
        return [self.call.tensors[name].clone().requires_grad_() for name in self.call.leaves]

    def known(self):
        """New leaves, and the gradients that they get."""
        leaves = self.leaves()
        return leaves, self.gradients(*leaves)

    def outputs(self, tensors):
        """All outputs, with some of the call's tensors replaced."""
        return (*outputs_of(self.call, self.call.tensors | tensors, self.backend).values(),)

    def __call__(self, *leaves):
        return self.outputs(dict(zip(self.call.leaves, leaves, strict=True)))

    def values(self, *leaves):
        """The outputs that have a gradient."""
        found = outputs_of(self.call, self._given(leaves), self.backend)
        return tuple(found[name] for name in self.graded)

    def loss(self, *leaves):
        """A sum of them in which no two numbers have the same weight."""
        return sum((value * weights(value)).sum() for value in self.values(*leaves))

    def gradients(self, *leaves):
        """Those of ``loss``."""
        return torch.autograd.grad(self.loss(*leaves), leaves)


def weights(output):
    """Numbers from 1 to 2 in the shape of an output."""
    steps = torch.linspace(1, 2, output.numel(), dtype=output.dtype, device=output.device)
    return steps.view_as(output)
