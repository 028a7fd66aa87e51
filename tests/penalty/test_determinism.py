"""Equal bits, besides the tests that tests/conformance has for every function.

The tests cover sequences of many segments, formulas for tokens near 0, and further outputs.
"""

import itertools

import pytest
import torch
from agreement import all_same_bits, random_inputs, same_bits
from agreement_logits import every_compiled

import klfast
from klfast import Estimator
from klfast.args.estimator import ESTIMATORS
from klfast.types.reduction import REDUCTIONS

RICH = Estimator("k3", importance_cap=1.2, log_ratio_clip=3.0, linear_tail=1.0, kl_clip=2.0)
FORMS = {name: Estimator(name) for name in ESTIMATORS} | {
    "rich": RICH,
    "k2-gradient": Estimator("k3", gradient="k2", importance="detached"),
}
IDLE = {
    "clips": {"log_ratio_clip": 20.0, "kl_clip": 10.0},
    "tail": {"linear_tail": 2.0},
    "k2-gradient": {"gradient": "k2"},
    "weighted": {"importance_cap": 5.0},
    "detached": {"importance": "detached", "gradient": "k2"},
    "weighted-clip": {"kl_clip": 10.0, "clip_weighted": True},
}
"""Options that do not act on a token near 0."""

LONG = (16_384, 16_385, 70_001)

every_form = pytest.mark.parametrize("estimator", FORMS.values(), ids=FORMS)


def outputs_of(backend, tensors, estimator, reduction, weighs=True, **options):
    """[value, gradients, statistics] of a call on [logprobs, ref_logprobs, old_logprobs, mask]."""
    *models, old_logprobs, mask = tensors
    leaves = [t.detach().requires_grad_() for t in models]
    options |= {"old_logprobs": old_logprobs if weighs else None, "return_stats": True}
    value, stats = klfast.kl_penalty(
        *(*leaves, mask), estimator=estimator, reduction=reduction, backend=backend, **options
    )
    grads = torch.autograd.grad(value, leaves, torch.full_like(value, 0.7))
    return [value.detach(), *grads, *stats]


@pytest.mark.grid
@pytest.mark.parametrize("reduction", ["none", "seq-sum", "seq-mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("estimator", [Estimator("k3"), RICH], ids=["k3", "rich"])
@every_compiled
def test_a_long_sequence_is_the_same_in_any_company(
    backend, estimator, dtype, reduction, set_num_threads
):
    """Alone, packed and padded, on one thread and on three. fp64 shows the order of additions."""
    tensors = [*random_inputs((sum(LONG),), dtype), torch.rand(sum(LONG)) < 0.8]
    pieces = list(zip(*(t.split(LONG) for t in tensors), strict=True))
    width = max(LONG) + 37
    padded = [
        torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) for t in column])
        for column in zip(*pieces, strict=True)
    ]
    edges = torch.tensor([0, *itertools.accumulate(LONG)])

    def run(tensors, **options):
        return outputs_of(backend, tensors, estimator, reduction, coef=0.3, **options)

    set_num_threads(1)
    alone = [run(piece) for piece in pieces]
    for threads in (1, 3):
        set_num_threads(threads)
        packed, rows = run(tensors, cu_seqlens=edges), run(padded)
        for s, (expected, length) in enumerate(zip(alone, LONG, strict=True)):
            tokens = slice(int(edges[s]), int(edges[s + 1]))
            parts = (
                [t[tokens] if len(t) > len(LONG) else t[s] for t in packed],
                [t[s, :length] if t.dim() > 1 else t[s] for t in rows],
            )
            for part in parts:
                found = [t.view(e.shape) for t, e in zip(part, expected, strict=True)]
                assert all_same_bits(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
@every_compiled
def test_a_token_does_not_depend_on_its_neighbours(backend, name, dtype):
    """Kernels may compute faster where all tokens of a group are near 0, with the same bits."""
    near = [t / 8 for t in random_inputs((256,), dtype)] + [torch.rand(256) < 0.8]
    far = [t.clone() for t in near]
    far[1][::2] -= 30
    for options, weighs in itertools.product(({}, *IDLE.values()), (False, True)):
        estimator = Estimator(name, **options)
        alone, beside = (
            outputs_of(backend, tensors, estimator, "none", weighs)[:3] for tensors in (near, far)
        )
        odd = [[t[1::2] for t in found] for found in (alone, beside)]
        assert all_same_bits(*odd), estimator


@every_form
def test_statistics_and_gradients_change_no_value(backend, estimator):
    logprobs, ref_logprobs, old_logprobs = random_inputs((3, 500))
    mask = torch.rand(3, 500) < 0.8

    def run(*needs, **options):
        leaves = [
            t.clone().requires_grad_(need)
            for t, need in zip((logprobs, ref_logprobs), needs, strict=True)
        ]
        options |= {"estimator": estimator, "backend": backend, "old_logprobs": old_logprobs}
        return klfast.kl_penalty(*leaves, mask, **options)

    for reduction in REDUCTIONS:
        plain = run(False, False, reduction=reduction)
        others = [run(True, both, reduction=reduction).detach() for both in (False, True)]
        others.append(run(False, False, reduction=reduction, return_stats=True)[0])
        assert all(same_bits(plain, other) for other in others), reduction
