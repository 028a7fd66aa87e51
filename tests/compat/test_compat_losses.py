"""klfast.compat's losses and rewards of SkyRL, NeMo-RL, slime, AReaL, open-instruct and ms-swift.

Each loss is the framework's per-token KL under the framework's mean: ``frameworks``, in float64.
"""

import enum
import math
import re
from functools import partial
from itertools import product
from types import SimpleNamespace

import frameworks
import pytest
import torch
from agreement import random_inputs
from refusals import NOT_NEGATIVE

from klfast.compat import areal, ms_swift, nemo_rl, open_instruct, presets, skyrl, slime

NAN, INF = math.nan, math.inf
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [0, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
    ]
)
SAMPLES = torch.tensor([1, 1, 1, 0, 1])
LENGTHS = [7, 5, 3, 1, 4]
"""Of slime's samples, which have no padding."""


def packed(tensor):
    """The samples of [5, 7], one after the other."""
    return torch.cat([row[:length] for row, length in zip(tensor, LENGTHS, strict=True)])


def rows(tensor):
    return list(packed(tensor).split(LENGTHS))


def old_of(logprobs, old, known):
    """The old log-probs that a loss gets."""
    return {"generation": old, "none": None, "itself": logprobs.detach()}[known]


def skyrls(mode):
    def theirs(logprobs, ref_logprobs, old):
        kl = frameworks.skyrl(logprobs, ref_logprobs, MASK, mode)
        return frameworks.masked_mean(kl, MASK).mean()

    def ours(logprobs, ref_logprobs, old):
        return skyrl.kl_loss(logprobs, ref_logprobs, MASK, mode)

    return ours, theirs


class LossType(enum.Enum):
    """NeMo-RL's."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


def nemo_rls(mode, loss_type, off_policy, count):
    names = {"token_level": "global_valid_toks", "sequence_level": "global_valid_seqs"}

    def ours(logprobs, ref_logprobs, old):
        return nemo_rl.kl_loss(
            logprobs,
            ref_logprobs,
            MASK,
            SAMPLES,
            generation_logprobs=old if off_policy else None,
            reference_policy_kl_penalty=0.3,
            reference_policy_kl_type=mode,
            loss_type=LossType(loss_type) if count else loss_type,
            **{names[loss_type]: count},
        )

    def theirs(logprobs, ref_logprobs, old):
        weight = frameworks.nemo_rl_weight(logprobs, old if off_policy else None)
        kl = 0.3 * frameworks.nemo_rl(logprobs, ref_logprobs, mode, weight=weight)
        return frameworks.nemo_rl_loss(kl, MASK, SAMPLES, loss_type, count)

    return ours, theirs


DENOMINATORS = {
    "own": None,
    "rollout": torch.tensor([10.0, 10.0, 4.0, 0.0, 4.0]),
    "per-token": "per-token",
}


def slimes(mode, unbiased, denominator):
    per_token = denominator == "per-token"
    given = None if per_token else DENOMINATORS[denominator]

    def ours(logprobs, ref_logprobs, old):
        return slime.kl_loss(
            packed(logprobs),
            packed(ref_logprobs),
            LENGTHS,
            rows(MASK),
            mode,
            old_log_probs=packed(old) if unbiased else None,
            kl_loss_coef=0.3,
            rollout_mask_sums=given,
            calculate_per_token_loss=per_token,
        )

    def theirs(logprobs, ref_logprobs, old):
        weight = (logprobs - old).exp() if unbiased else None
        kl = 0.3 * frameworks.slime(logprobs, ref_logprobs, mode, weight)
        sums = torch.stack([(k * m).sum() for k, m in zip(rows(kl), rows(MASK), strict=True)])
        if per_token:
            return sums.sum()
        own = torch.stack([mask.sum() for mask in rows(MASK)])
        return (sums / (own if given is None else given).clamp(min=1)).sum()

    return ours, theirs


def open_instructs(mode, denominator):
    def ours(logprobs, ref_logprobs, old):
        return open_instruct.kl_loss(
            logprobs,
            ref_logprobs,
            MASK,
            beta=0.3,
            old_logprobs=old,
            kl_estimator=mode,
            denominator=denominator,
        )

    def theirs(logprobs, ref_logprobs, old):
        kl = 0.3 * frameworks.open_instruct(logprobs, ref_logprobs, mode, old)
        return (kl * MASK).sum() / (MASK.sum() if denominator is None else denominator)

    return ours, theirs


LOSSES = {
    **{f"skyrl-{mode}": skyrls(mode) for mode in presets.SKYRL},
    **{
        f"nemo-rl-{mode}-{level}-{'off' if off else 'on'}-policy-{count or 'local'}": nemo_rls(
            mode, level, off, count
        )
        for mode, level, off, count in product(
            presets.NEMO_RL, nemo_rl.LOSS_TYPES, (False, True), (None, 40)
        )
    },
    **{
        f"slime-{mode}-{'unbiased-' * unbiased}{denominator}": slimes(mode, unbiased, denominator)
        for mode, unbiased, denominator in product(presets.SLIME, (False, True), DENOMINATORS)
    },
    **{
        f"open-instruct-{mode}-{denominator or 'local'}": open_instructs(mode, denominator)
        for mode, denominator in product(presets.OPEN_INSTRUCT, (None, 40))
    },
}
every_loss = pytest.mark.parametrize(("ours", "theirs"), LOSSES.values(), ids=LOSSES)


def inputs(dtype=torch.float64):
    """Log-ratios on both sides of the limits: spread 4."""
    return random_inputs(tuple(MASK.shape), dtype, spread=4.0)


def differentiated(function, logprobs, ref_logprobs, old):
    """(value, gradients to logprobs and ref_logprobs)."""
    leaves = [t.detach().requires_grad_() for t in (logprobs, ref_logprobs)]
    value = function(*leaves, old)
    return value.detach(), *torch.autograd.grad(value, leaves)


@every_loss
def test_loss_and_gradients(ours, theirs):
    given = inputs()
    for result, truth in zip(
        differentiated(ours, *given), differentiated(theirs, *given), strict=True
    ):
        assert result.shape == truth.shape
        torch.testing.assert_close(result, truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_loss
def test_lower_dtypes_give_fp32_and_gradients_of_their_own(ours, theirs, dtype):
    given = inputs(dtype)
    results = differentiated(ours, *given)
    truths = differentiated(theirs, *(t.double() for t in given))
    assert [t.dtype for t in results] == [torch.float32, dtype, dtype]
    for result, truth in zip(results, truths, strict=True):
        rounding = torch.finfo(result.dtype).eps
        torch.testing.assert_close(result.double(), truth, rtol=2 * rounding + 1e-5, atol=1e-6)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF], ids=str)
@every_loss
def test_what_is_masked_is_not_read(ours, theirs, garbage):
    clean = inputs()
    dirty = [torch.where(MASK == 0, garbage, t) for t in clean]
    for result, expected in zip(
        differentiated(ours, *dirty), differentiated(ours, *clean), strict=True
    ):
        assert torch.equal(result, expected)


def test_nemo_rls_loss_without_sample_mask_keeps_all_samples():
    given = inputs()[:2]
    for loss_type in nemo_rl.LOSS_TYPES:
        all_of_them = torch.ones_like(SAMPLES)
        ours = [
            nemo_rl.kl_loss(*given, MASK, samples, loss_type=loss_type)
            for samples in (None, all_of_them)
        ]
        torch.testing.assert_close(*ours)


def test_losses_of_nothing_are_0():
    nothing, masks = torch.zeros(2, 3), torch.zeros(2, 3)
    assert skyrl.kl_loss(nothing, nothing, masks) == 0
    assert skyrl.kl_loss(torch.zeros(0, 3), torch.zeros(0, 3)) == 0
    for loss_type in nemo_rl.LOSS_TYPES:
        loss = nemo_rl.kl_loss(nothing, nothing, masks, torch.zeros(2), loss_type=loss_type)
        assert loss == 0
    assert open_instruct.kl_loss(nothing, nothing, masks, beta=1.0) == 0
    assert slime.kl_loss(nothing[0], nothing[0], [2, 1], [torch.zeros(2), torch.zeros(1)]) == 0


ONES = torch.ones(2, 3)
NONE_KEPT = torch.zeros(2, 3)
COUNTS = {
    "global_valid_toks": lambda x, mask, count: nemo_rl.kl_loss(
        x, -x, mask, global_valid_toks=count
    ),
    "global_valid_seqs": lambda x, mask, count: nemo_rl.kl_loss(
        x, -x, mask, loss_type="sequence_level", global_valid_seqs=count
    ),
    "denominator": lambda x, mask, count: open_instruct.kl_loss(
        x, -x, mask, beta=0.3, denominator=count
    ),
}
every_count = pytest.mark.parametrize(("argument", "loss"), COUNTS.items(), ids=COUNTS)


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)], ids=repr)
@every_count
def test_a_count_of_0_goes_with_a_loss_of_0(argument, loss, zero):
    x = ONES.clone().requires_grad_()
    value = loss(x, NONE_KEPT, zero)
    value.backward()
    assert value == 0
    assert x.grad.count_nonzero() == 0


@pytest.mark.parametrize("count", [-1, NAN, INF, torch.tensor(-1), torch.tensor(NAN)], ids=repr)
@every_count
def test_a_count_that_is_none_is_named(argument, loss, count):
    with pytest.raises(ValueError, match=f"^{argument} {NOT_NEGATIVE}, got "):
        loss(ONES, ONES, count)


@every_count
def test_a_count_that_is_no_number_is_named(argument, loss):
    with pytest.raises(ValueError, match=rf"^{argument} must be a number or .* shape \[1\]"):
        loss(ONES, ONES, torch.ones(1))
    with pytest.raises(TypeError, match=f"^{argument} must be .* got '3' of type str"):
        loss(ONES, ONES, "3")


@every_count
def test_ranks_whose_gradients_are_averaged_divide_the_count_by_the_world_size(argument, loss):
    x = torch.tensor([[-1.0, -0.5, -2.0], [-0.25, -1.5, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    count = 2 if argument == "global_valid_seqs" else 4
    whole = loss(x, mask, count)
    ranks = [loss(x[r : r + 1], mask[r : r + 1], count / 2) for r in (0, 1)]
    torch.testing.assert_close(sum(ranks) / 2, whole)


# Importing all of dynamo warns, and it makes a Function object to trace any autograd.Function.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"
)
@every_count
def test_counts_that_torch_compile_traces(argument, loss):
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    x = -ONES
    for count in (5, 6, 7.5, 8.5, torch.tensor(9), torch.tensor(2.5)):
        torch.testing.assert_close(compiled(x, ONES, count), loss(x, ONES, count))
    assert compiled(x, NONE_KEPT, 0) == compiled(x, NONE_KEPT, torch.tensor(0)) == 0


def test_slime_s_losses_and_rewards_of_no_samples():
    nothing = torch.zeros(0, requires_grad=True)
    for options in ({}, {"rollout_mask_sums": torch.zeros(0)}, {"calculate_per_token_loss": True}):
        loss = slime.kl_loss(nothing, torch.zeros(0), [], [], **options)
        loss.backward()
        assert loss == 0
    assert slime.kl_rewards([], [], [], kl_coef=0.1) == []
    assert slime.kl_rewards([], [], [], [], kl_coef=0.1) == []


WRONG = {
    "skyrl": (partial(skyrl.kl_loss, kl_estimator_type="k4"), "kl_estimator_type 'k4'", "abs"),
    "nemo-rl": (
        lambda a, b: nemo_rl.kl_loss(a, b, a, reference_policy_kl_type="k4"),
        "kl_type 'k4'",
        "k3",
    ),
    "nemo-rl-loss-type": (
        lambda a, b: nemo_rl.kl_loss(a, b, a, loss_type="token"),
        "loss_type 'token'",
        "sequence_level",
    ),
    "slime": (
        lambda a, b: slime.kl_loss(a, b, [2], [a], "kl"),
        "kl_loss_type 'kl'",
        "low_var_kl",
    ),
    "areal": (lambda a, b: areal.KLEstimator("low_var_kl"), "kl_estimator 'low_var_kl'", "k2"),
    "open-instruct": (
        partial(open_instruct.per_token_kl, kl_estimator=4),
        "kl_estimator 4",
        "3",
    ),
    "open-instruct-old-name": (
        partial(open_instruct.per_token_kl, kl_estimator="kl3"),
        "kl_estimator 'kl3'",
        "0, 1, 2, 3",
    ),
}


@pytest.mark.parametrize(("function", "wrong", "choice"), WRONG.values(), ids=WRONG)
def test_an_unknown_word_names_the_argument_and_the_choices(function, wrong, choice):
    with pytest.raises(ValueError, match=f"unknown {wrong}; expected one of .*{choice}"):
        function(torch.zeros(2), torch.zeros(2))


OF_OPEN_INSTRUCT = {
    "per_token_kl": (open_instruct.per_token_kl, "old_logprobs or ratio must .* 3, got neither"),
    "kl_loss": (
        partial(open_instruct.kl_loss, response_mask=torch.ones(2), beta=1.0),
        "old_logprobs must be given for kl_estimator 3, got None",
    ),
}
of_open_instruct = pytest.mark.parametrize(
    ("function", "message"), OF_OPEN_INSTRUCT.values(), ids=OF_OPEN_INSTRUCT
)


@of_open_instruct
def test_open_instructs_last_estimator_needs_a_weight(function, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        function(torch.zeros(2), torch.zeros(2), kl_estimator=3)


@pytest.mark.parametrize("wrong", [[3], True, 2.0, "2", None], ids=repr)
@of_open_instruct
def test_open_instructs_estimators_are_integers(function, message, wrong):
    expected = re.escape(f"unknown kl_estimator {wrong!r}; expected one of 0, 1, 2, 3")
    with pytest.raises(ValueError, match=expected):
        function(torch.zeros(2), torch.zeros(2), kl_estimator=wrong)


# Rewards


class SkyRLTrainer:
    """What SkyRL's method needs of its trainer."""

    def __init__(self, mode, controller=None):
        algorithm = SimpleNamespace(kl_estimator_type=mode, kl_loss_coef=0.3)
        self.cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm))
        self.reward_kl_controller = controller
        self.all_metrics = {"other": 1}


class SkyRLBatch(dict):
    """SkyRL's TrainingInputBatch."""

    def __init__(self, logprobs, ref_logprobs, rewards, mask=MASK):
        super().__init__(
            action_log_probs=logprobs,
            base_action_log_probs=ref_logprobs,
            rewards=rewards,
            loss_mask=mask,
        )
        self.metadata = {}


@pytest.mark.parametrize("controlled", [False, True], ids=["fixed", "controlled"])
@pytest.mark.parametrize("mode", presets.SKYRL)
def test_skyrls_reward(mode, controlled):
    logprobs, ref_logprobs, rewards = inputs()
    controller = skyrl.AdaptiveKLController(0.2, 0.1, 100) if controlled else None
    coefficient = 0.2 if controlled else 0.3
    trainer, data = SkyRLTrainer(mode, controller), SkyRLBatch(logprobs, ref_logprobs, rewards)
    assert skyrl.apply_reward_kl_penalty(trainer, data) is data

    kl = frameworks.skyrl(logprobs, ref_logprobs, MASK, mode)
    torch.testing.assert_close(data["rewards"], rewards - coefficient * kl, rtol=1e-12, atol=1e-14)
    metrics = data.metadata["metrics"]
    average = frameworks.masked_mean(kl, MASK).mean().item()
    assert metrics == pytest.approx(
        {
            "avg_kl": average,
            "avg_kl_max": kl.abs().max(-1)[0].mean().item(),
            "kl_loss_coef": coefficient,
        }
    )
    logged = {f"loss/{name}": value for name, value in metrics.items()}
    assert trainer.all_metrics == {"other": 1, **logged}
    if controlled:
        step = frameworks.controller_step(0.2, metrics["avg_kl"], 0.1, len(MASK), 100)
        assert controller.value == step


def test_skyrls_reward_reads_nothing_masked_and_keeps_other_metrics():
    clean = inputs()
    dirty = [torch.where(MASK == 0, NAN, t) for t in clean[:2]]
    batches = [SkyRLBatch(*given, clean[2]) for given in (clean[:2], dirty)]
    for data in batches:
        data.metadata["metrics"] = {"other": 2}
        skyrl.apply_reward_kl_penalty(SkyRLTrainer("k3"), data)
    assert torch.equal(batches[0]["rewards"], batches[1]["rewards"])
    assert batches[0].metadata == batches[1].metadata
    assert batches[0].metadata["metrics"]["other"] == 2


@pytest.mark.parametrize("mode", presets.NEMO_RL)
def test_nemo_rls_rewards(mode):
    logprobs, ref_logprobs, _ = inputs()
    scores = torch.randn(len(MASK), dtype=torch.float64)
    rewards = nemo_rl.token_level_rewards(
        scores, MASK, logprobs, ref_logprobs, kl_coef=0.3, kl_type=mode
    )
    expected = -0.3 * frameworks.nemo_rl(logprobs, ref_logprobs, mode) * MASK
    for row, last in ((0, 6), (1, 4), (3, 0), (4, 3)):
        expected[row, last] += scores[row]
    torch.testing.assert_close(rewards, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("masked", [False, True], ids=["ppo", "reinforce++"])
@pytest.mark.parametrize("mode", presets.SLIME)
def test_slimes_rewards(mode, masked):
    logprobs, ref_logprobs, _ = inputs()
    scores = [1.5, -2.0, 0.25, 3.0, 7.0]
    mask = MASK.clone()
    rewards = slime.kl_rewards(
        scores,
        rows(logprobs),
        rows(ref_logprobs),
        rows(mask) if masked else None,
        kl_coef=0.3,
        kl_loss_type=mode,
    )
    kls = rows(frameworks.slime(logprobs, ref_logprobs, mode))
    for reward, kl, kept, score in zip(rewards, kls, rows(mask), scores, strict=True):
        kept = kept if masked else torch.ones_like(kept)
        expected = -0.3 * kl * kept
        if kept.any():
            expected[kept.nonzero()[-1]] += score
        torch.testing.assert_close(reward, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("mode", presets.AREAL)
def test_areals_rewards(mode, drop):
    logprobs, ref_logprobs, _ = inputs()
    lengths = torch.tensor([7, 6, 1, 2, 5])
    attention_mask = (torch.arange(7) < lengths[:, None]).long()
    loss_mask = MASK * attention_mask.roll(-1, -1)
    scores = torch.randn(len(MASK), dtype=torch.float64)
    before = [t.clone() for t in (logprobs, ref_logprobs)]
    results = areal.kl_rewards(
        scores,
        logprobs,
        ref_logprobs,
        loss_mask,
        attention_mask,
        kl_ctl=0.3,
        kl_estimator=mode,
        mask_no_eos_with_zero=drop,
    )
    truths = frameworks.areal_rewards(
        scores, logprobs, ref_logprobs, loss_mask, attention_mask, 0.3, mode, drop
    )
    for result, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-12, atol=1e-14)
    assert torch.equal(logprobs, before[0])
    assert torch.equal(ref_logprobs, before[1])


def test_ms_swifts_reward():
    logprobs, ref_logprobs, _ = inputs()
    expected = frameworks.trl_rloo(logprobs, ref_logprobs, MASK)
    torch.testing.assert_close(ms_swift.sequence_kl(logprobs, ref_logprobs, MASK), expected)
    dirty = torch.where(MASK == 0, NAN, ref_logprobs)
    torch.testing.assert_close(ms_swift.sequence_kl(logprobs, dirty, MASK), expected)
