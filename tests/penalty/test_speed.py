"""No option falls off a cliff. How fast things are is for `python -m benchmarks` to say."""

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


@pytest.mark.skipif(klfast.info()["extension"] is not None, reason="the extension is not built")
def test_the_numbers_for_a_log_cost_little_beside_their_call():
    """About a tenth; as much as the call itself when each number was a sum of its own."""
    logprobs = -4 * torch.rand(64, 8192)
    inputs = (logprobs, logprobs - 0.1 * torch.randn(64, 8192))
    options = {"reduction": "token-mean", "return_stats": True, "backend": "native"}
    stats = klfast.kl_penalty(*inputs, **options)[1]
    assert min(timeit.repeat(stats.as_dict, number=1, repeat=50)) < seconds(inputs, options) / 4
