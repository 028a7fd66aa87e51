"""klfast.compat per token: the frameworks' values and gradients, their faults only when asked for.

The truth is ``frameworks`` in float64 on the stored inputs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import frameworks
import oracle
import pytest
import torch
from agreement import same_bits

import klfast
from klfast import Estimator
from klfast.compat import (
    ms_swift,
    openrlhf,
    presets,
    roll,
    skyrl,
    trl,
    trlx,
    verl,
)

NAN, INF = math.nan, math.inf
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


class Case(NamedTuple):
    """One mode of one framework: two functions of (logprobs, ref_logprobs, old_logprobs)."""

    ours: Callable
    theirs: Callable
    preset: Estimator
    weight: str | None = None  # what has one: the "gradient" alone, or "both"; "own": exp(0)


def without_old(function, **options):
    return lambda logprobs, ref_logprobs, old: function(logprobs, ref_logprobs, **options)


def with_old(function, argument, **options):
    return lambda logprobs, ref_logprobs, old: function(
        logprobs, ref_logprobs, **options, **{argument: old}
    )


def table(framework, modes, ours, argument, theirs):
    """The cases of a function whose modes have no weight."""
    return {
        f"{framework}-{mode}": Case(
            without_old(ours, **{argument: mode}), without_old(theirs, mode=mode), preset
        )
        for mode, preset in modes.items()
    }


def unbiased(mode):
    """OpenRLHF's unbiased gradient, without and with the policy that sampled."""
    ours = partial(openrlhf.compute_approx_kl, kl_estimator=mode, unbiased_gradient=True)
    theirs = partial(frameworks.openrlhf, mode=mode, unbiased=True)
    preset = presets.OPENRLHF[mode]
    return {
        f"openrlhf-{mode}-unbiased": Case(without_old(ours), without_old(theirs), preset),
        f"openrlhf-{mode}-unbiased-old": Case(
            with_old(ours, "log_probs_old"),
            with_old(theirs, "old_logprobs"),
            preset,
            weight="gradient",
        ),
    }


FUNCTIONS = {
    **table("verl", presets.VERL, verl.kl_penalty, "kl_penalty", frameworks.verl),
    **table(
        "openrlhf",
        presets.OPENRLHF,
        openrlhf.compute_approx_kl,
        "kl_estimator",
        frameworks.openrlhf,
    ),
    **{name: case for mode in presets.OPENRLHF for name, case in unbiased(mode).items()},
    **table("roll", presets.ROLL, roll.compute_approx_kl, "kl_penalty", frameworks.roll),
    **table("trl-ppo", presets.TRL_PPO, trl.kl_penalty, "kl_penalty", frameworks.trl_ppo),
    "trl-grpo": Case(
        without_old(trl.per_token_kl, use_bias_correction_kl=False),
        without_old(frameworks.trl_grpo, corrected=False),
        presets.TRL_GRPO,
    ),
    "trl-grpo-corrected": Case(
        without_old(trl.per_token_kl), without_old(frameworks.trl_grpo), presets.TRL_GRPO, "own"
    ),
    "trl-grpo-corrected-old": Case(
        with_old(trl.per_token_kl, "old_per_token_logps"),
        with_old(frameworks.trl_grpo, "old_logprobs"),
        presets.TRL_GRPO,
        "both",
    ),
    **table("skyrl", presets.SKYRL, skyrl.compute_approx_kl, "kl_estimator_type", frameworks.skyrl),
    "ms-swift-k3": Case(
        without_old(ms_swift.per_token_kl),
        without_old(frameworks.ms_swift),
        presets.MS_SWIFT["k3"],
    ),
    "ms-swift-k1": Case(
        without_old(ms_swift.per_token_k1),
        without_old(frameworks.k1_abs_k2_of, mode="kl"),
        presets.MS_SWIFT["k1"],
    ),
}


def of_preset(theirs, preset, **options):
    """A case of a framework that klfast has a preset for, and no functions."""
    ours = without_old(klfast.kl_penalty, estimator=preset)
    return Case(ours, without_old(theirs, **options), preset)


PRESETS = {
    "trl-rloo": of_preset(frameworks.k1_abs_k2_of, presets.TRL_RLOO, mode="kl"),
    "trlx-reward": of_preset(frameworks.k1_abs_k2_of, presets.TRLX["reward"], mode="kl"),
    "trlx-kl": of_preset(frameworks.k3_upside_down, presets.TRLX["kl"]),
}
CASES = FUNCTIONS | PRESETS


def every(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp64": (torch.float64, torch.float64),
    "bf16-and-fp32": (torch.bfloat16, torch.float32),
    "fp32-and-fp64": (torch.float32, torch.float64),
}
SHAPES = {"tokens": (30,), "groups": (2, 3, 5)}
MAGNITUDES = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1, 2, 3, 6, 9, 14, 30, 60]
LOG_RATIOS = [sign * magnitude for magnitude in MAGNITUDES for sign in (1, -1)]
"""Far from every limit, so that rounding to bf16 carries none across."""


def inputs(shape=(6, 5), dtypes=DTYPES["fp32"]):
    """(logprobs, ref_logprobs, old_logprobs) with the log-ratios above, rounded to their dtypes."""
    x = torch.tensor(LOG_RATIOS, dtype=torch.float64).reshape(shape)
    both = torch.where(x.abs() < 0.1, 0.0, -4 * torch.rand_like(x))
    logprobs, ref_logprobs = x.clamp(max=0) + both, (-x).clamp(max=0) + both
    old = logprobs + 2 * torch.randn_like(x)
    return logprobs.to(dtypes[0]), ref_logprobs.to(dtypes[1]), old.to(dtypes[0])


def differentiated(function, logprobs, ref_logprobs, old, upstream=None):
    """(value, gradient to logprobs, gradient to ref_logprobs) under an uneven upstream gradient."""
    logprobs, ref_logprobs = (t.detach().requires_grad_() for t in (logprobs, ref_logprobs))
    value = function(logprobs, ref_logprobs, old)
    if upstream is None:
        upstream = torch.linspace(1, 1.75, value.numel(), dtype=value.dtype).reshape(value.shape)
    return value, *torch.autograd.grad(value, (logprobs, ref_logprobs), upstream.to(value.dtype))


def promised(case, logprobs, ref_logprobs, old, truth, dtype):
    """What klfast promises of value and gradients in ``dtype``, and what cancels in the truth.

    A gradient with a weight that has one is the sum of two terms, of which that to the reference is
    one and the value the other, and each is allowed its share.
    """
    value, _, grad_ref = (t.abs() for t in truth)
    x = (logprobs - ref_logprobs).flatten()
    relative = torch.tensor([oracle.promise(ratio, dtype) for ratio in x.tolist()])
    textbook = torch.tensor([oracle.textbook_error(ratio) for ratio in x.tolist()])
    relative, textbook = (t.double().reshape(value.shape) for t in (relative, textbook))
    if case.weight is None:
        return relative * value + textbook, relative * grad_ref + 2 * textbook
    log_weight = logprobs - (logprobs if case.weight == "own" else old)
    of_weight = [oracle.promise(max(1, abs(lw)), dtype) for lw in log_weight.flatten().tolist()]
    weighted = relative + torch.tensor(of_weight).double().reshape(value.shape)
    textbook = textbook * log_weight.exp().clamp(min=1)
    if case.weight == "gradient":
        return relative * value + textbook, weighted * grad_ref + 2 * textbook
    in_grad = weighted * (grad_ref + 2 * value) + 4 * textbook
    return weighted * value + textbook, in_grad


def assert_is_the_frameworks(case, logprobs, ref_logprobs, old):
    dtype = oracle.arithmetic_dtype(logprobs, ref_logprobs)
    results = differentiated(case.ours, logprobs, ref_logprobs, old)
    assert [t.dtype for t in results] == [dtype, logprobs.dtype, ref_logprobs.dtype]

    doubles = [t.double() for t in (logprobs, ref_logprobs, old)]
    truth = differentiated(case.theirs, *doubles)
    tolerance, grad_tolerance = promised(case, *doubles, truth, dtype)
    oracle.assert_within(results[0], truth[0].detach(), tolerance, "value")
    oracle.assert_within(results[1], truth[1], grad_tolerance, "gradient")
    oracle.assert_within(results[2], truth[2], grad_tolerance, "gradient to the reference")


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@every(CASES)
def test_value_and_gradients_are_the_frameworks(case, dtypes):
    assert_is_the_frameworks(case, *inputs(dtypes=dtypes))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@every(FUNCTIONS)
def test_other_shapes_that_the_frameworks_take(case, shape):
    assert_is_the_frameworks(case, *inputs(shape))


@every(FUNCTIONS)
def test_a_reference_without_gradients(case):
    logprobs, ref_logprobs, old = inputs()
    both = differentiated(case.ours, logprobs, ref_logprobs, old)
    logprobs.requires_grad_()
    value = case.ours(logprobs, ref_logprobs, old)
    value.backward(torch.linspace(1, 1.75, value.numel()).reshape(value.shape))
    assert same_bits(value, both[0])
    assert torch.equal(logprobs.grad, both[1])


@every(FUNCTIONS)
def test_any_strides(case):
    whole = [t.expand(2, 6, 5).transpose(1, 2) for t in inputs()]
    strided = differentiated(case.ours, *whole)
    packed = differentiated(case.ours, *(t.contiguous() for t in whole))
    for a, b in zip(strided, packed, strict=True):
        assert torch.equal(a, b)


# Limits


LIMITED = {
    name: case
    for name, case in CASES.items()
    if case.weight is None and case.preset.gradient == "value" and "unbiased" not in name
}


@every(LIMITED)
def test_no_gradient_where_a_limit_acts_and_each_such_token_is_counted(case):
    logprobs, ref_logprobs, old = inputs()
    _, grad, grad_ref = differentiated(case.ours, logprobs, ref_logprobs, old)
    dead = differentiated(case.theirs, logprobs.double(), ref_logprobs.double(), old)[1] == 0
    assert torch.equal(grad == 0, dead)
    assert torch.equal(grad_ref == 0, dead)
    _, stats = klfast.kl_penalty(logprobs, ref_logprobs, estimator=case.preset, return_stats=True)
    assert torch.equal(stats.clipped, dead.sum(-1).float())
    limits = (case.preset.kl_clip, case.preset.log_ratio_clip)
    assert dead.any() == (limits != (None, None))


@pytest.mark.parametrize("mode", ["k3+", "low_var_kl+"])
def test_verls_plus_keeps_a_gradient_beyond_the_limits(mode):
    logprobs, ref_logprobs = torch.tensor([-60.0, -15.0, -1.0]), torch.tensor([0.0, 0.0, -31.0])
    _, grad, _ = differentiated(
        without_old(verl.kl_penalty, kl_penalty=mode), logprobs, ref_logprobs, None, torch.ones(3)
    )
    assert grad.tolist() == [-60, -15, 30]
    _, stats = klfast.kl_penalty(
        logprobs, ref_logprobs, estimator=presets.VERL[mode], return_stats=True
    )
    assert stats.clipped == 3


@pytest.mark.parametrize("mode", [mode for mode in presets.VERL if mode.endswith("+")])
def test_the_value_of_verls_plus_at_infinity_is_no_nan(mode):
    logprobs, ref_logprobs = torch.tensor([-INF, 0.0]), torch.tensor([0.0, -INF])
    value = verl.kl_penalty(logprobs, ref_logprobs, mode)
    assert frameworks.verl(logprobs, ref_logprobs, mode).isnan().all()
    assert torch.equal(value, verl.kl_penalty(logprobs, ref_logprobs, mode.removesuffix("+")))
    assert not value.isnan().any()


def test_rolls_k3_has_a_gradient_of_0_where_exp_overflows_and_nan_if_asked_for():
    logprobs, ref_logprobs = torch.tensor([-100.0, -1.0]), torch.tensor([0.0, -2.0])
    grads = {}
    for exact in (False, True):
        ours = without_old(roll.compute_approx_kl, kl_penalty="k3", exact=exact)
        value, grads[exact], _ = differentiated(ours, logprobs, ref_logprobs, None)
        assert value[0] == 10
    theirs = without_old(frameworks.roll, mode="k3")
    assert differentiated(theirs, logprobs, ref_logprobs, None)[1][0].isnan()
    assert grads[True][0].isnan()
    assert grads[False][0] == 0
    assert grads[True][1] == grads[False][1] > 0


# exact=True


EXACT = {
    **{f"verl-{mode}": partial(verl.kl_penalty, kl_penalty=mode) for mode in presets.VERL},
    **{f"roll-{mode}": partial(roll.compute_approx_kl, kl_penalty=mode) for mode in presets.ROLL},
    **{f"trl-{mode}": partial(trl.kl_penalty, kl_penalty=mode) for mode in presets.TRL_PPO},
    "trl-grpo": partial(trl.per_token_kl, use_bias_correction_kl=False),
    "trl-grpo-corrected": trl.per_token_kl,
    **{f"skyrl-{m}": partial(skyrl.compute_approx_kl, kl_estimator_type=m) for m in presets.SKYRL},
    "ms-swift": ms_swift.per_token_kl,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("function", EXACT.values(), ids=EXACT)
def test_exact_keeps_the_dtype_and_changes_no_other_value_or_gradient(function, dtype):
    logprobs, ref_logprobs, _ = inputs(dtypes=(dtype, dtype))
    ours = without_old(function)
    ones = torch.ones(logprobs.shape)
    default = differentiated(ours, logprobs, ref_logprobs, None, ones)
    exact = differentiated(without_old(function, exact=True), logprobs, ref_logprobs, None, ones)
    assert default[0].dtype == oracle.arithmetic_dtype(logprobs)
    assert same_bits(exact[0], default[0].to(dtype))
    assert torch.equal(exact[1], default[1])
    assert torch.equal(exact[2], default[2])


def test_exact_gives_mixed_inputs_the_wider_dtype():
    bf16, fp32 = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.5])
    for pair in [(bf16, fp32), (fp32, bf16)]:
        assert verl.kl_penalty(*pair, "k3", exact=True).dtype == torch.float32


# Masks


MASKS = {
    "boolean": torch.tensor([True, False, True, True, False]),
    "integers": torch.tensor([1, 0, 1, 0, 0]),
    "weights": torch.tensor([1.0, 0.25, 0.0, 2.0, 0.5]),
}


MASKED = {
    **{
        f"roll-{mode}": (
            partial(roll.compute_approx_kl, kl_penalty=mode),
            partial(frameworks.roll, mode=mode),
        )
        for mode in presets.ROLL
    },
    "trlx-log-ratio": (trlx.log_ratio, partial(frameworks.roll, mode="kl")),
    "ms-swift-k1": (ms_swift.per_token_k1, partial(frameworks.roll, mode="kl")),
    **{
        f"skyrl-{mode}": (
            partial(skyrl.compute_approx_kl, kl_estimator_type=mode),
            partial(frameworks.skyrl, mode=mode),
        )
        for mode in presets.SKYRL
    },
}
every_masked = pytest.mark.parametrize(("ours", "theirs"), MASKED.values(), ids=MASKED)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@every_masked
def test_masks_and_weights(ours, theirs, mask):
    logprobs, ref_logprobs, old = inputs()
    mask = mask.expand(logprobs.shape)
    doubles = [t.double() for t in (logprobs, ref_logprobs, old)]
    unweighted = differentiated(without_old(theirs, mask=None), *doubles)
    case = Case(None, None, None)
    tolerances = promised(case, *doubles, unweighted, torch.float32)
    for exact in (False, True):
        ours_masked = lambda a, b, _, exact=exact: ours(a, b, mask, exact=exact)  # noqa: E731
        results = differentiated(ours_masked, logprobs, ref_logprobs, old)
        truth = differentiated(lambda a, b, _: theirs(a, b, mask), *doubles)
        oracle.assert_within(results[0], truth[0].detach(), mask * tolerances[0], "value")
        oracle.assert_within(results[1], truth[1], mask * tolerances[1], "gradient")
        oracle.assert_within(results[2], truth[2], mask * tolerances[1], "gradient to reference")
        assert (results[1][mask == 0] == 0).all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF], ids=str)
@every_masked
def test_garbage_under_the_mask_stays_there(ours, theirs, garbage):
    mask = torch.tensor([1, 0, 1, 1, 0]).expand(6, 5)
    clean = inputs()
    dirty = [torch.where(mask == 0, garbage, t) for t in clean]
    expected = differentiated(lambda a, b, _: ours(a, b, mask), *clean)
    for result, unharmed in zip(
        differentiated(lambda a, b, _: ours(a, b, mask), *dirty), expected, strict=True
    ):
        assert torch.equal(result, unharmed)


@pytest.mark.parametrize("garbage", [NAN, INF], ids=str)
@every_masked
def test_garbage_under_the_mask_comes_through_if_exact_where_the_frameworks_do_so(
    ours, theirs, garbage
):
    """As 0 * NaN and 0 * inf do, but for k3, which makes a limited number of infinity."""
    mask = torch.tensor([1, 0, 1, 1, 0]).expand(6, 5)
    logprobs, ref_logprobs, _ = inputs()
    logprobs[mask == 0] = garbage
    exact = ours(logprobs, ref_logprobs, mask, exact=True)
    assert torch.equal(exact.isnan(), theirs(logprobs, ref_logprobs, mask).isnan())
    assert exact[mask == 1].isfinite().all()


# Wrong words


WORDS = {
    "verl": (verl.kl_penalty, "kl_penalty", [*presets.VERL]),
    "openrlhf": (openrlhf.compute_approx_kl, "kl_estimator", [*presets.OPENRLHF]),
    "roll": (roll.compute_approx_kl, "kl_penalty", [*presets.ROLL, "full"]),
    "trl": (trl.kl_penalty, "kl_penalty", [*presets.TRL_PPO, "full"]),
    "skyrl": (skyrl.compute_approx_kl, "kl_estimator_type", [*presets.SKYRL]),
}


@pytest.mark.parametrize(("wrong", "error"), [("k4", ValueError), (None, TypeError)], ids=str)
@pytest.mark.parametrize(("function", "argument", "choices"), WORDS.values(), ids=WORDS)
def test_an_unknown_mode_names_the_argument_and_the_choices(
    function, argument, choices, wrong, error
):
    with pytest.raises(error, match=f"unknown {argument} {wrong!r}") as raised:
        function(torch.zeros(2), torch.zeros(2), **{argument: wrong})
    for choice in choices:
        assert repr(choice) in str(raised.value)


def test_verl_passes_no_vocabulary():
    with pytest.raises(NotImplementedError, match="whole vocabulary"):
        verl.kl_penalty(torch.zeros(2, 3), torch.zeros(2, 3), "full")


@pytest.mark.parametrize("mode", presets.OPENRLHF)
def test_openrlhf_s_third_argument_is_its_estimator_where_there_is_no_weight(mode):
    inputs = torch.tensor([-3.0, -0.5]), torch.tensor([-0.5, -2.5])
    unweighted = openrlhf.compute_approx_kl_unweighted(*inputs, mode)
    assert torch.equal(unweighted, openrlhf.compute_approx_kl(*inputs, kl_estimator=mode))
    with pytest.raises(TypeError, match=r"log_probs_old must be a torch\.Tensor or None, got"):
        openrlhf.compute_approx_kl(*inputs, mode)
