"""Writes ``klfast/backends/known_answers.json``: `python tests/support/known_answers.py`.

klfast checks kernels with these answers before their first use. The reference and autograd compute
them in float64.
"""

import json

import torch

from klfast.backends import known_calls, self_test
from klfast.backends.reference import REFERENCE


def wide(tensor):
    """The tensor in float64, differentiable, for the reference."""
    return tensor.double().requires_grad_() if tensor.is_floating_point() else tensor


RUNS = {
    "kl_penalty": REFERENCE.kl_penalty,
    "token_logprobs": lambda args: REFERENCE.rows(args)[1::2],  # log-probs and entropies
    "kl_divergence": REFERENCE.rows,
}


def answers_of(op):
    """The checksums of the families of an op. Gradients are rounded to the dtypes of inputs."""
    run, (calls_at, _) = RUNS[op], known_calls.FUNCTIONS[op]
    calls = calls_at(wide)
    found = [known_calls.results(calls, run)]
    grads = known_calls.gradients(calls, run)
    for known, (call, seeds) in calls_at(torch.Tensor.clone).items():
        inputs = known_calls.ops_of(call)[1] if seeds else ()
        for name, tensor in zip(("grad", "grad_ref"), inputs, strict=False):
            grads[f"{known}: {name}"] = grads[f"{known}: {name}"].to(tensor.dtype)
        if op == "kl_divergence" and call.reduced.spec.reduction.is_scalar():
            for name, same in known_calls.IN_PLACE.items():
                grads[f"{known}: {name}"] = grads[f"{known}: {same}"]
    found.append(grads)
    return {
        family: {name: self_test.checksums(tensor) for name, tensor in results.items()}
        for family, results in zip(self_test.families(op), found, strict=True)
    }


def all_answers():
    """The contents of the file."""
    return {family: of for op in known_calls.FUNCTIONS for family, of in answers_of(op).items()}


if __name__ == "__main__":
    text = json.dumps(all_answers(), indent=1, allow_nan=False)
    self_test.ANSWERS.write_text(text + "\n", encoding="utf-8")
