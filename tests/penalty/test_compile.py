"""torch.compile of kl_penalty, besides the tests that tests/conformance has for every function."""

import pytest
import torch
from agreement import random_inputs
from fresh import run_fresh
from torch._dynamo.testing import CompileCounterWithBackend

import klfast

# Dynamo makes a Function object to trace any autograd.Function.
pytestmark = pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"
)


def inputs(*shape):
    logprobs, ref_logprobs, _ = random_inputs(shape)
    return logprobs.requires_grad_(), ref_logprobs.requires_grad_()


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("argument", ["coef", "normalizer"])
def test_a_controllers_coefficient_changes_without_recompiling(argument, as_tensor):
    """Twenty values exceed recompile_limit, 8. Dynamo may compile twice."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    tensors = inputs(3, 7)

    def penalty(number):
        options = {argument: number, "reduction": "token-mean", "backend": "native"}
        value = klfast.kl_penalty(*tensors, **options)
        return value, value.sum()

    compiled = torch.compile(penalty, fullgraph=True, backend=counter)
    for step in range(20):
        number = 3 + step if argument == "normalizer" and step % 2 else 0.1 + 0.01 * step
        number = torch.tensor(float(number)) if as_tensor else float(number)
        found, expected = (
            [value.detach(), *torch.autograd.grad(total, tensors)]
            for value, total in (compiled(number), penalty(number))
        )
        torch.testing.assert_close(found, expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_compiled_autograd(reduction):
    tensors = inputs(3, 7)

    def loss():
        return 3 * klfast.kl_penalty(*tensors, reduction=reduction, backend="native").sum()

    expected = torch.autograd.grad(loss(), tensors)
    penalty = loss()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        penalty.backward()
    torch.testing.assert_close([t.grad for t in tensors], list(expected))


FIRST_CALL = """
import torch, klfast
penalty = torch.compile(
    lambda *tensors: klfast.kl_penalty(*tensors, reduction="token-mean"),
    fullgraph=True, backend="aot_eager",
)
logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
penalty(logprobs, torch.tensor([[-1.0, -2.5]])).backward()
print([round(slope, 4) for slope in logprobs.grad[0].tolist()])
"""


@pytest.mark.long
def test_the_first_call_of_a_process_may_be_a_compiled_one():
    assert eval(run_fresh(FIRST_CALL, timeout=120)) == [0.0, 0.1967]
