"""Functions of klfast.compat that are imported: their arguments are the framework's.

Of frameworks that ``patch`` serves, tests/peers compares them with the real ones.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch

from klfast.compat import areal, megatron_lm, ms_swift, nemo_rl, open_instruct, slime

CALLS = {
    "nemo-rl": (
        nemo_rl.calculate_kl,
        {
            "logprobs": ...,
            "logprobs_reference": ...,
            "kl_type": "k3",
            "input_clamp_value": 20.0,
            "output_clamp_value": 10.0,
            "importance_sampling_weights": None,
        },
    ),
    "megatron-lm": (
        megatron_lm.topk_kl_div,
        {
            "student_logits": ...,
            "teacher_topk_logprobs": ...,
            "teacher_topk_indices": ...,
            "tp_size": 1,
            "tp_rank": 0,
            "tp_group": None,
            "add_ghost_token": False,
        },
    ),
    "slime": (
        slime.compute_approx_kl,
        {"log_probs": ..., "log_probs_base": ..., "kl_loss_type": ..., "importance_ratio": None},
    ),
    "areal": (areal.KLEstimator, {"kl_estimator": "k1", "apply_clamp": True}),
    "areal-static": (
        areal.KLEstimator._compute_approx_kl,
        {"log_probs": ..., "log_probs_base": ..., "kl_estimator": "k1", "apply_clamp": True},
    ),
    "areal-logprobs": (
        areal.gather_logprobs,
        {"logits": ..., "labels": ..., "temperature": 1.0, "tp_group": None, "chunk_size": 1024},
    ),
    "open-instruct": (open_instruct.estimate_kl, {"ref_logprobs_diff": ..., "ratio": ...}),
    "open-instruct-logprobs": (open_instruct.log_softmax_and_gather, {"logits": ..., "index": ...}),
}


@pytest.mark.parametrize(("function", "expected"), CALLS.values(), ids=CALLS)
def test_arguments_have_the_frameworks_names_order_and_defaults(function, expected):
    parameters = inspect.signature(function).parameters.values()
    positional = {
        p.name: ... if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    }
    assert positional == expected
    assert list(positional) == list(expected)


def test_areals_estimator_keeps_its_settings_as_attributes():
    estimator = areal.KLEstimator("k2", apply_clamp=False)
    assert (estimator.kl_estimator, estimator.apply_clamp) == ("k2", False)


def test_ms_swifts_loss_of_no_tokens_has_a_gradient():
    """As ``jsd_loss`` has since 4.6, and without harm to the releases before it."""
    logits = torch.randn(1, 3, 5, requires_grad=True)
    labels = torch.full((1, 3), -100)
    teacher = SimpleNamespace(
        full_logits=torch.randn(1, 3, 5), topk_logprobs=None, topk_indices=None, labels=labels
    )
    total, count = ms_swift.gkd_loss(logits, teacher, labels, 0.5, 1.0)
    total.backward()
    assert (total.item(), count.item()) == (0, 0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))
