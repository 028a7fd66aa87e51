"""No option falls off a cliff. How fast things are is for `klfast bench` to say."""

import timeit

import pytest
import torch

import klfast
from klfast import Estimator

OPTIONS = {
    "limits": {"estimator": Estimator("k3", log_ratio_clip=20, kl_clip=10)},
    "tail": {"estimator": Estimator("k3", linear_tail=5)},
    "k2-gradient": {"estimator": Estimator("k3", gradient="k2")},
    "importance": {"old_logprobs": True},
    "statistics": {"return_stats": True},
}


def seconds(inputs, options):
    """The best of a few calls, forward."""
    return min(timeit.repeat(lambda: klfast.kl_penalty(*inputs, **options), number=1, repeat=7))


@pytest.mark.skipif(klfast.info()["extension"] is not None, reason="the extension is not built")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_costs_a_few_times_the_plain_pass(name):
    """About 4 times; 30 when the compiler gave up on vectorising that pass, as it once did."""
    logprobs = -4 * torch.rand(64, 4096)
    inputs = (logprobs, logprobs - 0.1 * torch.randn(64, 4096))
    options = dict(OPTIONS[name])
    if "old_logprobs" in options:
        options["old_logprobs"] = logprobs + 0.1
    plain, with_option = (
        seconds(inputs, {"reduction": "seq-sum", "backend": "native", **extra})
        for extra in ({}, options)
    )
    assert with_option < 12 * plain
