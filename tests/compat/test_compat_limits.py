"""klfast.compat's presets at their limits, in one read, without and with a weight.

The truth is ``frameworks`` in float64 on the stored inputs; a gradient of theirs that is 0 * inf is
0 here. Log-ratios and log-weights lie on both sides of every limit, on it, and far beyond.
"""

import math
from functools import partial

import frameworks
import oracle
import pytest
import torch

import klfast
from klfast.compat import presets, skyrl

LOG_RATIOS = [0.0, *(s * x for x in (2.6, 2.62, 10, 20, 40, 88, 90, 100) for s in (1, -1))]
LOG_WEIGHTS = [0.0, *(s * w for w in (1, 2.5, 20, 60) for s in (1, -1))]
HUGE_LOG_WEIGHTS = [89.0, 710.0, 1e4]
"""exp of the first is infinite in fp32, of the others in fp64 too."""

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def of(preset):
    """The preset's own function of (logprobs, ref_logprobs) or, weighted, old_logprobs too."""

    def ours(logprobs, ref_logprobs, old_logprobs=None):
        return klfast.kl_penalty(
            logprobs, ref_logprobs, estimator=preset, old_logprobs=old_logprobs
        )

    return ours


def table(framework, modes, theirs):
    """(preset's function, its framework's) of every mode."""
    return {f"{framework}-{mode}": (of(p), partial(theirs, mode=mode)) for mode, p in modes.items()}


OPEN_INSTRUCT = {mode: preset for mode, preset in presets.OPEN_INSTRUCT.items() if mode != 3}
ALONE = {
    **table("skyrl", presets.SKYRL, frameworks.skyrl),
    **table("nemo-rl", presets.NEMO_RL, frameworks.nemo_rl),
    **table("slime", presets.SLIME, frameworks.slime),
    **table("areal", presets.AREAL, frameworks.areal),
    **table("open-instruct", OPEN_INSTRUCT, frameworks.open_instruct),
    "ms-swift-k1": (of(presets.MS_SWIFT["k1"]), partial(frameworks.k1_abs_k2_of, mode="kl")),
    "ms-swift-k3": (of(presets.MS_SWIFT["k3"]), frameworks.ms_swift),
    **{
        f"skyrl-{mode}-function": (
            partial(skyrl.compute_approx_kl, kl_estimator_type=mode),
            partial(frameworks.skyrl, mode=mode),
        )
        for mode in presets.SKYRL
    },
}


def of_nemo_rls_loss(logprobs, ref_logprobs, old_logprobs, mode):
    weight = frameworks.nemo_rl_weight(logprobs, old_logprobs)
    return frameworks.nemo_rl(logprobs, ref_logprobs, mode, weight=weight)


def open_instruct_3(logprobs, ref_logprobs, old_logprobs):
    return frameworks.open_instruct(logprobs, ref_logprobs, 3, old_logprobs)


def slime_weighted(logprobs, ref_logprobs, old_logprobs, mode):
    weight = (logprobs - old_logprobs).exp()
    return frameworks.slime(logprobs, ref_logprobs, mode, weight)


WEIGHTED = {
    **table("nemo-rl", presets.NEMO_RL, of_nemo_rls_loss),
    **table("slime", presets.SLIME, slime_weighted),
    "open-instruct-3": (of(presets.OPEN_INSTRUCT[3]), open_instruct_3),
}
UNLIMITED = [f"slime-{mode}" for mode in ("k1", "k2", "k3")]


def at_the_limits(dtype, log_weights=(0.0,), log_ratios=LOG_RATIOS):
    """(logprobs, ref_logprobs, old_logprobs) of every pair, [log-ratios, log-weights]."""
    x, log_weight = torch.meshgrid(
        torch.tensor(log_ratios, dtype=dtype), torch.tensor(log_weights, dtype=dtype), indexing="ij"
    )
    logprobs = x.clamp(max=0)
    return logprobs, (-x).clamp(max=0), logprobs - log_weight


def differentiated(function, *inputs):
    """(value, gradient to logprobs, to ref_logprobs) of the first two inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs[:2]]
    value = function(*leaves, *inputs[2:])
    return value.detach(), *torch.autograd.grad(value.sum(), leaves)


def assert_is_theirs(ours, theirs, inputs, *, weighted):
    """Value and both gradients, each within the promise on the terms that it adds up."""
    dtype, count = inputs[0].dtype, 3 if weighted else 2
    ours = differentiated(ours, *inputs[:count])
    truth = differentiated(theirs, *(t.double() for t in inputs[:count]))
    truth = [truth[0], *(t.nan_to_num(0, posinf=math.inf, neginf=-math.inf) for t in truth[1:])]

    x = (inputs[0].double() - inputs[1].double()).flatten().tolist()
    log_weight = (inputs[0].double() - inputs[2].double()).flatten().tolist()
    relative = [
        oracle.promise(x, dtype) + (oracle.promise(max(1, abs(w)), dtype) if weighted else 0)
        for x, w in zip(x, log_weight, strict=True)
    ]
    relative = 4 * torch.tensor(relative, dtype=torch.float64).reshape(truth[0].shape)
    of_grad = truth[2].abs() + (truth[0].abs() if weighted else 0)
    oracle.assert_within(ours[0], truth[0], relative * truth[0].abs(), "value")
    oracle.assert_within(ours[1], truth[1], relative * of_grad, "gradient")
    oracle.assert_within(ours[2], truth[2], relative * of_grad, "gradient to the reference")
    dead = (truth[1] == 0) & (truth[2] == 0)
    assert (ours[1][dead] == 0).all()
    assert (ours[2][truth[2] == 0] == 0).all()


@every_dtype
@pytest.mark.parametrize(("ours", "theirs"), ALONE.values(), ids=ALONE)
def test_without_a_weight(ours, theirs, dtype):
    assert_is_theirs(ours, theirs, at_the_limits(dtype), weighted=False)


@every_dtype
@pytest.mark.parametrize("name", WEIGHTED)
def test_with_a_weight(name, dtype):
    in_range = [x for x in LOG_RATIOS if name not in UNLIMITED or abs(x) <= 20]  # of fp32
    inputs = at_the_limits(dtype, LOG_WEIGHTS, in_range)
    assert_is_theirs(*WEIGHTED[name], inputs, weighted=True)


@every_dtype
@pytest.mark.parametrize("mode", presets.NEMO_RL)
def test_nemo_rls_weight_of_one_has_a_gradient_up_to_the_limits(mode, dtype):
    """``logprobs.detach()`` as the old log-probs, as its loss has it."""
    theirs = partial(of_nemo_rls_loss, mode=mode)
    assert_is_theirs(of(presets.NEMO_RL[mode]), theirs, at_the_limits(dtype), weighted=True)


LIMITED_PRODUCTS = {
    **{f"nemo-rl-{mode}": preset for mode, preset in presets.NEMO_RL.items()},
    "slime-low_var_kl": presets.SLIME["low_var_kl"],
}


@every_dtype
@pytest.mark.parametrize("preset", LIMITED_PRODUCTS.values(), ids=LIMITED_PRODUCTS)
def test_an_infinite_weight_counts_as_0(preset, dtype):
    """NeMo-RL's ``nan_to_num``; slime has 10 and NaN there. Infinite in the call's arithmetic."""
    inputs = at_the_limits(dtype, HUGE_LOG_WEIGHTS)
    infinite = (inputs[0] - inputs[2]).exp().isinf()
    assert infinite.any()
    options = {"estimator": preset, "old_logprobs": inputs[2]}
    for result in differentiated(partial(klfast.kl_penalty, **options), *inputs[:2]):
        assert (result[infinite] == 0).all()
        assert result.isfinite().all()


def test_single_tokens_by_hand():
    logprobs = torch.tensor([-2.5, -2.7, -5.0], requires_grad=True)
    klfast.kl_penalty(
        logprobs,
        torch.zeros(3),
        estimator=presets.NEMO_RL["k3"],
        old_logprobs=logprobs.detach(),
        reduction="token-sum",
    ).backward()  # x up to the limit, which -2.7 is beyond
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.5, 0.0, 0.0]))

    weighted = {"estimator": presets.SLIME["low_var_kl"], "old_logprobs": torch.tensor([-4.0])}
    assert klfast.kl_penalty(torch.tensor([-3.0]), torch.zeros(1), **weighted) == 10
    areal = presets.AREAL["k3"]
    assert klfast.kl_penalty(torch.tensor([-4.0]), torch.zeros(1), estimator=areal) == 10
