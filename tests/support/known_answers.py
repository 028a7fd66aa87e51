"""The known answers before the first use of kernels: `python tests/support/known_answers.py`.

Writes ``klfast/backends/known_answers.json``, by the reference and autograd in float64.
"""

import json

import torch

from klfast.backends import known_calls, self_test
from klfast.backends.reference import REFERENCE


def wide(tensor):
    """As the reference takes it: in float64, differentiable."""
    return tensor.double().requires_grad_() if tensor.is_floating_point() else tensor


def differentiated(call):
    """The tensors of a call that get gradients, by what these are named."""
    _, tensors = known_calls.ops_of(call)
    return dict(zip(("grad", "grad_ref"), tensors, strict=False))


def reference_gradients(op, known):
    """The gradients of a call in the dtypes of its tensors, and the first of its results."""
    results = list(known_calls.named(getattr(REFERENCE, op)(known.call)).values())
    outputs = [t for t in results if t.requires_grad]
    inputs = differentiated(known.call)
    grads = torch.autograd.grad(outputs, [*inputs.values()], known.incoming)
    return {"result": results[0], **dict(zip(inputs, grads, strict=True))}


def answers_of(op):
    """The checksums of the families of an op."""
    calls, narrow = known_calls.CALLS[op](wide), known_calls.CALLS[op](torch.Tensor.clone)
    found = [{known.name: getattr(REFERENCE, op)(known.call) for known in calls}]
    if op in known_calls.GRADIENTS:
        grads = {}
        for known, small in zip(calls, narrow, strict=True):
            if known.incoming:
                grads[known.name] = reference_gradients(op, known)
                for name, tensor in differentiated(small.call).items():
                    grads[known.name][name] = grads[known.name][name].to(tensor.dtype)
                if op == "kl_divergence" and known.call.spec.reduction.is_scalar():
                    own = grads[known.name]
                    own |= {name: own[same] for name, same in known_calls.ALONE.items()}
        found.append(grads)
    return {
        family: {name: self_test.checksums(t.detach()) for name, t in known_calls.named(r).items()}
        for family, r in zip(self_test.families(op), found, strict=True)
    }


def all_answers():
    """What the file holds."""
    return {family: of for op in known_calls.CALLS for family, of in answers_of(op).items()}


if __name__ == "__main__":
    text = json.dumps(all_answers(), indent=1, allow_nan=False)
    self_test.ANSWERS.write_text(text + "\n", encoding="utf-8")
