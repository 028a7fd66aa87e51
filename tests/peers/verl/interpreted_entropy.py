"""verl's Triton kernels behind ``linear_cross_entropy``, in Triton's interpreter, on stored inputs.

``TRITON_INTERPRET=1 python -O interpreted_entropy.py INPUTS OUTPUTS``: -O, as they assert a GPU.
"""

import sys

import torch
import triton_interpreter  # noqa: F401  # which mends it
from triton.runtime import interpreter
from verl.utils.kernel import kernels


def _takes_a_bool_mask(name, place):
    """Verl's masks are of integers at times, which the interpreter's memory refuses."""
    real = getattr(interpreter.InterpreterBuilder, name)

    def with_mask(self, *arguments):
        given = list(arguments)
        if given[place] is not None:
            mask = given[place].data.astype(bool)
            given[place] = interpreter.TensorHandle(mask, interpreter.tl.int1)
        return real(self, *given)

    setattr(interpreter.InterpreterBuilder, name, with_mask)


for name, place in (
    ("create_masked_load", 1),
    ("create_masked_store", 2),
    ("create_atomic_rmw", 3),
):
    _takes_a_bool_mask(name, place)


def run(hidden, weight, labels, temperature, reduction, upstream):
    """Log-probs, entropies, and the gradients of hidden states and weight."""
    kind = kernels.get_entropy_reduction_enum_number(reduction)
    logprobs, entropy, *saved = kernels.efficient_entropy_forward(
        hidden, weight, labels, kind, temperature, None
    )
    grads = kernels.efficient_entropy_backward(
        *upstream, hidden, weight, labels, *saved, kind, False, temperature, None
    )
    return [logprobs, entropy, *grads]


if __name__ == "__main__":
    calls = torch.load(sys.argv[1])
    torch.save([run(**call) for call in calls], sys.argv[2])
