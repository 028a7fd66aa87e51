"""klfast.compat at the limits: presets in one read, and functions whose weight is a tensor.

The truth is ``frameworks`` in float64 on the stored inputs; a gradient of theirs that is 0 * inf is
0 here. Log-ratios and log-weights lie on both sides of every limit, on it, and far beyond.
"""

import math
from functools import partial

import frameworks
import oracle
import pytest
import torch
from refusals import A_TENSOR

import klfast
from klfast.compat import areal, nemo_rl, open_instruct, presets, skyrl, slime

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


def functions(framework, ours, argument, modes, theirs):
    """(klfast.compat's function, its framework's) of every mode."""
    return {
        f"{framework}-{mode}-function": (
            partial(ours, **{argument: mode}),
            partial(theirs, mode=mode),
        )
        for mode in modes
    }


def areal_kl(logprobs, ref_logprobs, mode):
    return areal.KLEstimator(mode)(logprobs, ref_logprobs)


OPEN_INSTRUCT = {mode: preset for mode, preset in presets.OPEN_INSTRUCT.items() if mode != 3}
ALONE = {
    **table("skyrl", presets.SKYRL, frameworks.skyrl),
    **table("nemo-rl", presets.NEMO_RL, frameworks.nemo_rl),
    **table("slime", presets.SLIME, frameworks.slime),
    **table("areal", presets.AREAL, frameworks.areal),
    **table("open-instruct", OPEN_INSTRUCT, frameworks.open_instruct),
    "ms-swift-k1": (of(presets.MS_SWIFT["k1"]), partial(frameworks.k1_abs_k2_of, mode="kl")),
    "ms-swift-k3": (of(presets.MS_SWIFT["k3"]), frameworks.ms_swift),
    **functions(
        "skyrl", skyrl.compute_approx_kl, "kl_estimator_type", presets.SKYRL, frameworks.skyrl
    ),
    **functions("nemo-rl", nemo_rl.calculate_kl, "kl_type", presets.NEMO_RL, frameworks.nemo_rl),
    **functions("slime", slime.compute_approx_kl, "kl_loss_type", presets.SLIME, frameworks.slime),
    **functions("areal", areal_kl, "mode", presets.AREAL, frameworks.areal),
    **functions(
        "open-instruct",
        open_instruct.per_token_kl,
        "kl_estimator",
        OPEN_INSTRUCT,
        frameworks.open_instruct,
    ),
}


def weighing(function, argument, **options):
    """A function whose weight is a tensor: ``exp(logprobs - old_logprobs)``."""

    def ours(logprobs, ref_logprobs, old_logprobs, mode):
        weight = (logprobs - old_logprobs).exp()
        return function(logprobs, ref_logprobs, mode, **{argument: weight}, **options)

    return ours


def of_nemo_rls_loss(logprobs, ref_logprobs, old_logprobs, mode):
    weight = frameworks.nemo_rl_weight(logprobs, old_logprobs)
    return frameworks.nemo_rl(logprobs, ref_logprobs, mode, weight=weight)


def open_instruct_3(logprobs, ref_logprobs, old_logprobs):
    return frameworks.open_instruct(logprobs, ref_logprobs, 3, old_logprobs)


slime_weighted = weighing(frameworks.slime, "weight")
WEIGHTED = {
    **table("nemo-rl", presets.NEMO_RL, of_nemo_rls_loss),
    **table("slime", presets.SLIME, slime_weighted),
    "open-instruct-3": (of(presets.OPEN_INSTRUCT[3]), open_instruct_3),
    **functions(
        "nemo-rl",
        weighing(nemo_rl.calculate_kl, "importance_sampling_weights"),
        "mode",
        presets.NEMO_RL,
        of_nemo_rls_loss,
    ),
    **functions(
        "slime",
        weighing(slime.compute_approx_kl, "importance_ratio"),
        "mode",
        presets.SLIME,
        slime_weighted,
    ),
    "open-instruct-3-function": (
        partial(open_instruct.per_token_kl, kl_estimator=3),
        open_instruct_3,
    ),
}
UNLIMITED = [f"slime-{mode}{end}" for mode in ("k1", "k2", "k3") for end in ("", "-function")]


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
    nemo_rl.kl_loss(
        logprobs,
        torch.zeros(3),
        torch.ones(3),
        reference_policy_kl_penalty=1.0,
        global_valid_toks=1,
    ).backward()  # x up to the limit, which -2.7 is beyond
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.5, 0.0, 0.0]))

    weighted = {"estimator": presets.SLIME["low_var_kl"], "old_logprobs": torch.tensor([-4.0])}
    assert klfast.kl_penalty(torch.tensor([-3.0]), torch.zeros(1), **weighted) == 10
    assert areal.KLEstimator("k3")(torch.tensor([-4.0]), torch.zeros(1)) == 10


# A weight with a graph of its own


def nemo_rl_limits(mode, log_ratio, value):
    """NeMo-RL's function and ours, of (logprobs, ref_logprobs, weight)."""
    return (
        lambda a, b, w, **exact: nemo_rl.calculate_kl(a, b, mode, log_ratio, value, w, **exact),
        lambda a, b, w: frameworks.nemo_rl(a, b, mode, log_ratio, value, w),
    )


def slimes(mode):
    return (
        lambda a, b, w: slime.compute_approx_kl(a, b, mode, w),
        lambda a, b, w: frameworks.slime(a, b, mode, w),
    )


OF_ANY_WEIGHT = {
    **{f"nemo-rl-{mode}": nemo_rl_limits(mode, 20, 10) for mode in presets.NEMO_RL},
    "nemo-rl-unlimited": nemo_rl_limits("k3", None, None),
    "nemo-rl-value-limited": nemo_rl_limits("k3", None, 4),
    "nemo-rl-log-ratio-limited": nemo_rl_limits("k3", 5, None),
    **{f"slime-{mode}": slimes(mode) for mode in presets.SLIME},
}
every_weight = pytest.mark.parametrize(
    ("ours", "theirs"), OF_ANY_WEIGHT.values(), ids=OF_ANY_WEIGHT
)


def with_a_weight_of_its_own(function, *inputs):
    """(value, gradients to logprobs, ref_logprobs and the weight)."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    value = function(*leaves)
    return value.detach(), *torch.autograd.grad(value.sum(), leaves)


@every_weight
def test_any_weight_and_its_gradient(ours, theirs):
    weights = [0.0, -0.5, 0.3, 1.0, 2.0, 1e-3, -30.0]
    logprobs, ref_logprobs, old = at_the_limits(torch.float64, weights)
    inputs = logprobs, ref_logprobs, logprobs - old
    results, truths = (with_a_weight_of_its_own(f, *inputs) for f in (ours, theirs))
    for result, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["nemo-rl-value-limited", "slime-low_var_kl"])
def test_no_gradient_is_nan_where_exp_overflows_under_a_limit(name):
    ours, theirs = OF_ANY_WEIGHT[name]
    inputs = torch.tensor([-100.0, -1.0]), torch.zeros(2), torch.tensor([1.0, 1.0])
    truth = with_a_weight_of_its_own(theirs, *inputs)
    results = with_a_weight_of_its_own(ours, *inputs)
    torch.testing.assert_close(results[0], truth[0])
    for result, exact in zip(results[1:], truth[1:], strict=True):
        assert result[0] == 0
        torch.testing.assert_close(result[1], exact[1])
    assert truth[1][0].isnan()
    if name.startswith("nemo"):
        exactly = with_a_weight_of_its_own(partial(ours, exact=True), *inputs)
        assert exactly[1][0].isnan()


TAKE_A_WEIGHT = {
    "nemo-rl": (
        "importance_sampling_weights",
        lambda x, w: nemo_rl.calculate_kl(x, x, importance_sampling_weights=w),
    ),
    "slime": ("importance_ratio", lambda x, w: slime.compute_approx_kl(x, x, "k1", w)),
    "open-instruct": (
        "ratio",
        lambda x, w: open_instruct.per_token_kl(x, x, kl_estimator=3, ratio=w),
    ),
    "open-instruct-four": ("ratio", open_instruct.estimate_kl),
}
every_weighted = pytest.mark.parametrize(
    ("argument", "function"), TAKE_A_WEIGHT.values(), ids=TAKE_A_WEIGHT
)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (), (1, 2, 3)], ids=str)
@every_weighted
def test_a_weight_of_another_shape_is_named(argument, function, shape):
    message = rf"^{argument} must have a number for every token, of shape \[2, 3\], got \["
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(2, 3), torch.ones(shape))


@every_weighted
def test_a_weight_that_is_no_tensor_is_named(argument, function):
    message = f"^{argument} {A_TENSOR}, got float"
    with pytest.raises(TypeError, match=message):
        function(torch.zeros(2, 3), 2.0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", presets.SLIME)
def test_slimes_function_takes_one_number(mode, weighted):
    one = [torch.tensor([t], dtype=torch.float64) for t in (-3.0, -0.5, 1.5)]
    inputs = one if weighted else one[:2]
    results, truths = (
        with_a_weight_of_its_own(
            lambda a, b, *w, f=f: f(a, b, mode, *w), *inputs if shape else [t[0] for t in inputs]
        )
        for f, shape in ((slime.compute_approx_kl, ()), (frameworks.slime, (1,)))
    )
    for result, truth in zip(results, truths, strict=True):
        assert result.shape == ()
        torch.testing.assert_close(result, truth[0], rtol=1e-13, atol=1e-14)


@every_weight
def test_weights_that_are_no_numbers(ours, theirs):
    logprobs, ref_logprobs = torch.tensor([-1.0, -1.0]), torch.zeros(2)
    weight = torch.tensor([math.inf, math.nan])
    assert torch.equal(
        ours(logprobs, ref_logprobs, weight).nan_to_num(-7),
        theirs(logprobs, ref_logprobs, weight).nan_to_num(-7),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_exact_gives_the_dtype_that_inputs_and_weights_promote_to(dtype, weight_dtype):
    logprobs, ref_logprobs, _ = (t.to(dtype) for t in at_the_limits(torch.float32))
    for weight in (torch.full_like(logprobs, 1.5, dtype=weight_dtype), None):
        usual = nemo_rl.calculate_kl(logprobs, ref_logprobs, importance_sampling_weights=weight)
        exact = nemo_rl.calculate_kl(
            logprobs, ref_logprobs, importance_sampling_weights=weight, exact=True
        )
        assert usual.dtype == torch.float32
        assert exact.dtype == torch.promote_types(dtype, dtype if weight is None else weight.dtype)
        torch.testing.assert_close(exact.float(), usual, rtol=2**-6, atol=1e-6)
