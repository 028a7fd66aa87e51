"""The code does not grow unseen: its lines, and the Python calls of a warm call.

A change that needs more raises a number here, and its commit says why.
"""

import sys
from pathlib import Path

import pytest
import torch

import klfast

ROOT = Path(__file__).parents[2]
LINES = {"klfast/**/*.py": 26_095, "csrc/**/*": 16_430, "tests/**/*.py": 37_294}
"""The most lines of the files that match."""


@pytest.mark.parametrize("pattern", LINES)
def test_lines(pattern):
    files = [path for path in ROOT.glob(pattern) if path.is_file()]
    assert sum(len(path.read_text().splitlines()) for path in files) <= LINES[pattern]


def _tensors():
    torch.manual_seed(0)
    tokens, words, width = (2, 8), 16, 4
    first, second = (torch.randn(*tokens, words) for _ in range(2))
    ids, logprobs = first.topk(3).indices, -torch.rand(tokens)
    return {
        "logprobs": logprobs.clone().requires_grad_(),
        "ref_logprobs": logprobs - torch.rand(tokens),
        "mask": (torch.arange(8) < torch.tensor([[5], [8]])).float(),
        "logits": first.requires_grad_(),
        "ref_logits": second,
        "ids": ids,
        "teacher": second.log_softmax(-1).gather(-1, ids),
        "hidden": torch.randn(*tokens, width, requires_grad=True),
        "ref_hidden": torch.randn(*tokens, width),
        "weight": torch.randn(words, width, requires_grad=True),
        "ref_weight": torch.randn(words, width),
    }


def _calls():
    """Name -> a step with this function: forward and backward."""
    t = _tensors()
    mask, options = t["mask"], {"reduction": "token-mean"}
    controller = klfast.AdaptiveKLController(0.1, target=1.0, horizon=100)
    penalty = klfast.KLPenalty(controller=controller)

    def with_step():
        penalty(t["logprobs"], t["ref_logprobs"], mask).backward()
        penalty.step()

    models = (t["hidden"], t["weight"], t["ref_hidden"], t["ref_weight"])
    losses = {
        "kl_penalty": lambda: klfast.kl_penalty(t["logprobs"], t["ref_logprobs"], mask, **options),
        "kl_divergence": lambda: klfast.kl_divergence(
            t["logits"], t["ref_logits"], mask, **options
        ),
        "topk_kl_divergence": lambda: klfast.topk_kl_divergence(
            t["logits"], t["ids"], t["teacher"], mask, **options
        ),
        "linear_kl_divergence": lambda: klfast.linear_kl_divergence(*models, mask, **options),
    }
    steps = {name: lambda loss=loss: loss().backward() for name, loss in losses.items()}
    return {**steps, "KLPenalty": with_step}


MOST_CALLS = {
    "kl_penalty": 37,
    "kl_divergence": 58,
    "topk_kl_divergence": 101,
    "linear_kl_divergence": 164,
    "KLPenalty": 111,
}
"""The most Python functions of klfast that a warm step may call, with its backward."""


@pytest.mark.parametrize("name", MOST_CALLS)
def test_python_calls(name):
    step, package, calls = _calls()[name], f"{Path(klfast.__file__).parent}", 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(package)

    before, counts = sys.getprofile(), []
    for _ in range(20):  # past the calls that look for likely mistakes
        step()
    for _ in range(2):  # every 64th call looks again
        calls = 0
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(before)
        counts.append(calls)
    assert 0 < min(counts) <= MOST_CALLS[name]
