"""klfast.compat's losses, rewards and averages: the frameworks' numbers, with masks that hold.

The truth is ``frameworks`` in float64 on the stored inputs. Its reductions are sums of per-token
values times a share each, which autograd tells; a token's tolerance is ``oracle``'s.
"""

import math
from functools import partial
from types import SimpleNamespace

import frameworks
import oracle
import pytest
import torch
from agreement import random_inputs, same_bits
from refusals import POSITIVE

import klfast
from klfast import Estimator
from klfast.compat import openrlhf, presets, trl, trlx, verl

NAN, INF = math.nan, math.inf
U = oracle.unit_roundoff(torch.float32)
SUM = 16 * U  # relative to the sum of magnitudes

MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [0, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
    ]
)
SHAPE = MASK.shape
MASKS = {"integers": MASK, "boolean": MASK.bool(), "floats": MASK.float()}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
every_garbage = pytest.mark.parametrize("garbage", [NAN, INF, -INF], ids=str)


def masked_with(garbage, *tensors):
    """Copies of the tensors with garbage where the mask is 0."""
    return [torch.where(MASK == 0, garbage, t) for t in tensors]


def differentiated(function, *inputs):
    """(scalar, gradients to the inputs) under an upstream gradient of 1.5."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    value = function(*inputs)
    return value, *torch.autograd.grad(value, inputs, torch.tensor(1.5, dtype=value.dtype))


def doubles(*tensors):
    return [None if t is None else t.double() for t in tensors]


def shares(reduce):
    """What each token's value counts in the scalar that ``reduce`` makes of them."""
    return differentiated(reduce, torch.zeros(SHAPE, dtype=torch.float64))[1].abs() / 1.5


def assert_scalar_is(result, truth, share, per_token):
    """Value and gradients of a scalar; ``per_token`` is the oracle's truth of its tokens."""
    tolerance = (share * (per_token.result_tolerance + SUM * per_token.result.abs())).sum()
    oracle.assert_within(result[0], truth[0].detach(), tolerance, "value")
    for grad, exact in zip(result[1:], truth[1:], strict=True):
        oracle.assert_within(grad, exact, 1.5 * share * per_token.grad_tolerance, "gradient")


# verl's aggregation


AGGREGATIONS = [*verl.REDUCTIONS]
COUNTS = {
    "local": {},
    "global": {"dp_size": 4, "batch_num_tokens": 50, "global_batch_size": 12},
    "tensors": {
        "dp_size": 4,
        "batch_num_tokens": torch.tensor(50),
        "global_batch_size": torch.tensor(12.0),
    },
    "constant": {"loss_scale_factor": 1000},
}
every_aggregation = pytest.mark.parametrize("mode", AGGREGATIONS)
every_count = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@every_count
@every_aggregation
def test_agg_loss(mode, counts, dtype):
    loss = torch.randn(SHAPE).to(dtype)
    result = differentiated(lambda t: verl.agg_loss(t, MASK, mode, **counts), loss)
    theirs = partial(frameworks.verl_agg_loss, mask=MASK, mode=mode, **counts)
    assert [t.dtype for t in result] == [oracle.arithmetic_dtype(loss), dtype]
    per_token = oracle.kl_penalty(loss, torch.zeros_like(loss), estimator=Estimator("k1"))
    assert_scalar_is(result, differentiated(theirs, loss.double()), shares(theirs), per_token)


@every_mask
@every_aggregation
def test_agg_loss_takes_any_mask(mode, mask):
    loss = torch.randn(SHAPE)
    assert same_bits(verl.agg_loss(loss, mask, mode), verl.agg_loss(loss, MASK, mode))


@pytest.mark.grid
@pytest.mark.parametrize("counts", [{}, COUNTS["global"]], ids=["local", "global"])
@every_aggregation
@pytest.mark.parametrize("name", ["kl", "abs", "mse", "k3", "k3+"])
def test_kl_loss_is_agg_loss_of_kl_penalty(name, mode, counts):
    logprobs, ref_logprobs, _ = random_inputs(SHAPE)
    result = differentiated(
        lambda a, b: verl.kl_loss(a, b, name, MASK, mode, **counts), logprobs, ref_logprobs
    )
    reduce = partial(frameworks.verl_agg_loss, mask=MASK, mode=mode, **counts)
    truth = differentiated(
        lambda a, b: reduce(frameworks.verl(a, b, name)), *doubles(logprobs, ref_logprobs)
    )
    per_token = oracle.kl_penalty(logprobs, ref_logprobs, estimator=presets.VERL[name])
    assert_scalar_is(result, truth, shares(reduce), per_token)


def graph_nodes(tensor):
    """The functions behind a tensor, without its leaves."""
    found, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and not hasattr(node, "variable"):
            found.add(node)
            todo.extend(function for function, _ in node.next_functions)
    return found


@every_aggregation
def test_kl_loss_is_one_op(mode):
    logprobs, ref_logprobs, _ = random_inputs(SHAPE)
    logprobs.requires_grad_()
    kl = verl.kl_penalty(logprobs, ref_logprobs, "k3")
    assert len(graph_nodes(verl.agg_loss(kl, MASK, mode))) > 1
    assert len(graph_nodes(verl.kl_loss(logprobs, ref_logprobs, "k3", MASK, mode))) == 1


@every_garbage
@every_aggregation
def test_aggregation_never_reads_what_is_masked(mode, garbage):
    clean = random_inputs(SHAPE)[:2]
    dirty = masked_with(garbage, *clean)
    functions = {
        1: lambda loss: verl.agg_loss(loss, MASK, mode),
        2: lambda a, b: verl.kl_loss(a, b, "k3", MASK, mode),
    }
    for inputs, function in functions.items():
        result = differentiated(function, *dirty[:inputs])
        expected = differentiated(function, *clean[:inputs])
        for a, b in zip(result, expected, strict=True):
            assert torch.equal(a, b)
        assert (result[1][MASK == 0] == 0).all()


@every_aggregation
def test_the_aggregate_of_nothing_is_0(mode):
    nothing = torch.zeros_like(MASK)
    value, grad = differentiated(lambda t: verl.agg_loss(t, nothing, mode), torch.randn(SHAPE))
    assert value == 0
    assert (grad == 0).all()


@pytest.mark.parametrize("function", ["agg_loss", "kl_loss"])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_ranks_need_the_global_count(mode, function):
    loss = torch.zeros(SHAPE)
    aggregate = {
        "agg_loss": partial(verl.agg_loss, loss, MASK),
        "kl_loss": partial(verl.kl_loss, loss, loss, "k3", MASK),
    }[function]
    if mode == "token-sum":
        assert aggregate(mode, dp_size=2) == 0
        return
    missing = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    present = {"batch_num_tokens": 9, "global_batch_size": 9}
    assert aggregate(mode, dp_size=2, **present) == 0
    del present[missing]
    with pytest.raises(ValueError, match=f"{missing} must be given when dp_size > 1"):
        aggregate(mode, dp_size=2, **present)


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("token-mean", "batch_num_tokens"),
        ("seq-mean-token-sum", "global_batch_size"),
        ("seq-mean-token-sum-norm", "loss_scale_factor"),
    ],
)
def test_a_count_that_is_not_positive_is_named(mode, count):
    loss = torch.ones(2, 3)
    with pytest.raises(ValueError, match=f"{count} {POSITIVE}, got 0"):
        verl.agg_loss(loss, loss, mode, **{count: 0})


@pytest.mark.parametrize("mode", verl.REDUCTIONS)
def test_losses_without_tokens_are_0(mode):
    assert verl.agg_loss(torch.ones(2, 0), torch.ones(2, 0), mode) == 0
    assert verl.agg_loss(torch.ones(0, 2), torch.ones(0, 2), mode) == 0


def test_full_is_nowhere_in_verl():
    with pytest.raises(NotImplementedError, match="'full'"):
        verl.kl_loss(*[torch.ones(2, 3)] * 2, "full", torch.ones(2, 3), "token-mean")


def test_unknown_words_name_the_argument_and_the_choices():
    loss = torch.zeros(SHAPE)
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'") as raised:
        verl.agg_loss(loss, MASK, "mean")
    assert all(repr(mode) in str(raised.value) for mode in AGGREGATIONS)
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'"):
        verl.kl_loss(loss, loss, "k3", MASK, "mean")
    with pytest.raises(ValueError, match="unknown kl_penalty 'k4'") as raised:
        verl.kl_loss(loss, loss, "k4", MASK, "token-mean")
    assert all(repr(mode) in str(raised.value) for mode in presets.VERL)


# verl's reward


class Batch(dict):
    """What ``apply_kl_penalty`` needs of verl's TensorDict."""

    @property
    def batch_size(self):
        return self["response_mask"].shape[:1]


class Controller:
    """Takes an update under verl's argument names alone."""

    value = 0.25

    def update(self, *, current_kl, n_steps):
        self.updates = [*getattr(self, "updates", []), (current_kl, n_steps)]


def batch_of(logprobs, ref_logprobs, mask=MASK):
    """A stand-in for verl's DataProto."""
    return SimpleNamespace(
        batch=Batch(
            old_log_probs=logprobs,
            ref_log_prob=ref_logprobs,
            response_mask=mask,
            token_level_scores=torch.linspace(-2, 3, MASK.numel()).reshape(SHAPE),
        )
    )


@pytest.mark.parametrize("name", presets.VERL)
def test_apply_kl_penalty(name):
    logprobs, ref_logprobs, _ = random_inputs(SHAPE)
    data, controller = batch_of(logprobs, ref_logprobs), Controller()
    scores = data.batch["token_level_scores"]
    before = scores.clone()
    returned, metrics = verl.apply_kl_penalty(data, controller, name)
    assert returned is data
    assert data.batch["token_level_scores"] is scores
    assert same_bits(scores, before)

    rewards, current_kl = frameworks.verl_rewards(
        *doubles(scores, logprobs, ref_logprobs), MASK, controller.value, name
    )
    per_token = oracle.kl_penalty(logprobs, ref_logprobs, estimator=presets.VERL[name])
    tolerance = MASK * per_token.result_tolerance
    rounding = U * (scores.abs() + per_token.result.abs())  # of a difference
    got = data.batch["token_level_rewards"]
    oracle.assert_within(got, rewards, controller.value * tolerance + rounding, "rewards")

    assert sorted(metrics) == ["actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"]
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.25
    assert type(metrics["actor/reward_kl_penalty"]) is float
    share = shares(lambda kl: frameworks.masked_mean(kl, MASK).mean())
    tolerance = (share * (per_token.result_tolerance + 2 * SUM * per_token.result.abs())).sum()
    kl = torch.tensor(metrics["actor/reward_kl_penalty"])
    oracle.assert_within(kl, current_kl, tolerance, "current_kl")
    assert controller.updates == [(metrics["actor/reward_kl_penalty"], 5)]


def test_apply_kl_penalty_takes_k1_if_nothing_is_said():
    inputs = random_inputs(SHAPE)[:2]
    default, k1 = batch_of(*inputs), batch_of(*inputs)
    assert (
        verl.apply_kl_penalty(default, Controller())[1]
        == (verl.apply_kl_penalty(k1, Controller(), kl_penalty="kl")[1])
    )
    assert same_bits(default.batch["token_level_rewards"], k1.batch["token_level_rewards"])


def test_apply_kl_penalty_by_hand():
    """A fully masked sequence is a mean of 0 among the others, as in verl."""
    mask = torch.zeros(SHAPE, dtype=torch.int64)
    mask[0, :2] = mask[1, 0] = 1
    logprobs = torch.zeros(SHAPE)
    logprobs[0, 0], logprobs[0, 1], logprobs[1, 0] = 1.0, 2.0, 6.0
    data, controller = batch_of(logprobs, torch.zeros(SHAPE), mask), Controller()
    _, metrics = verl.apply_kl_penalty(data, controller)
    assert metrics["actor/reward_kl_penalty"] == 1.5  # (1.5 + 6 + 0 + 0 + 0) / 5
    penalty = data.batch["token_level_scores"] - data.batch["token_level_rewards"]
    torch.testing.assert_close(penalty[:2, :2], torch.tensor([[0.25, 0.5], [1.5, 0]]))
    assert penalty.count_nonzero() == 3


def test_apply_kl_penalty_steers_klfasts_controller():
    controller = verl.AdaptiveKLController(0.1, target_kl=0.1, horizon=100)
    _, metrics = verl.apply_kl_penalty(batch_of(*random_inputs(SHAPE)[:2]), controller, "k2")
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    kl = metrics["actor/reward_kl_penalty"]
    assert controller.value == frameworks.controller_step(0.1, kl, 0.1, n_steps=5, horizon=100)
    assert controller.value > 0.1


@every_garbage
def test_apply_kl_penalty_never_reads_what_is_masked(garbage):
    clean = random_inputs(SHAPE)[:2]
    results = []
    for inputs in (clean, masked_with(garbage, *clean)):
        data = batch_of(*inputs)
        _, metrics = verl.apply_kl_penalty(data, Controller(), "k3")
        results.append((data.batch["token_level_rewards"], metrics))
    assert same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_apply_kl_penalty_has_no_gradient():
    logprobs, ref_logprobs, _ = random_inputs(SHAPE)
    data = batch_of(logprobs.requires_grad_(), ref_logprobs)
    verl.apply_kl_penalty(data, Controller())
    assert not data.batch["token_level_rewards"].requires_grad


def test_apply_kl_penalty_of_an_unknown_word_changes_nothing():
    data, controller = batch_of(*random_inputs(SHAPE)[:2]), Controller()
    with pytest.raises(ValueError, match="unknown kl_penalty 'k4'"):
        verl.apply_kl_penalty(data, controller, "k4")
    assert "token_level_rewards" not in data.batch
    assert not hasattr(controller, "updates")


# OpenRLHF's reward


KEEPING = MASK[[0, 1, 3, 4]]  # OpenRLHF has no word for a sequence without an action
R = torch.tensor([7.0, -3.0, 0.5, 20.0])
EXACT = pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])


@pytest.mark.grid
@EXACT
@pytest.mark.parametrize("clip", [None, (-1.0, 5.0)], ids=["no-clip", "clip"])
@pytest.mark.parametrize("kl_coef", [0.1, 0.0, -0.5])
@pytest.mark.parametrize("r", [R, R.bfloat16(), 4.5, -8.0], ids=["fp32", "bf16", "4.5", "-8.0"])
def test_compute_reward(r, kl_coef, clip, exact):
    kl = torch.randn(KEEPING.shape)
    rewards = openrlhf.compute_reward(r, kl_coef, kl, KEEPING, clip, exact=exact)
    truth = frameworks.openrlhf_rewards(r, kl_coef, kl.double(), KEEPING, clip)
    truth = truth if exact else truth * KEEPING
    tolerance = 2 * U * (max(kl_coef, 0) * kl.abs() + 20)  # of a product and a sum
    oracle.assert_within(rewards, truth, tolerance.double(), "rewards")
    if kl_coef <= 0:
        assert rewards.count_nonzero() == 4


@EXACT
def test_compute_reward_by_hand(exact):
    """The score lies at the last action token, wherever holes are; without a mask, at the end."""
    kl = torch.ones(2, 4)
    mask = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]])
    rewards = openrlhf.compute_reward(torch.tensor([10.0, 20.0]), 0.5, kl, mask, exact=exact)
    masked = -0.5 if exact else 0.0
    assert rewards.tolist() == [[masked, -0.5, masked, 9.5], [-0.5, 19.5, masked, masked]]
    assert (
        openrlhf.compute_reward(3, 0.5, kl, exact=exact).tolist() == [[-0.5, -0.5, -0.5, 2.5]] * 2
    )


@EXACT
def test_a_sequence_without_actions_has_no_reward(exact):
    rewards = openrlhf.compute_reward(9.0, 0.1, torch.zeros(SHAPE), MASK, exact=exact)
    assert rewards.sum(-1).tolist() == [9, 9, 0, 9, 9]


@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.float()], ids=[*MASKS])
@every_garbage
def test_garbage_under_the_mask_reaches_the_reward_only_if_exact(mask, garbage):
    kl = torch.randn(SHAPE)
    (dirty,) = masked_with(garbage, kl)
    default = openrlhf.compute_reward(1.0, 0.1, dirty, mask)
    assert same_bits(default, openrlhf.compute_reward(1.0, 0.1, kl, mask))
    exact = openrlhf.compute_reward(1.0, 0.1, dirty, mask, exact=True)
    assert torch.equal(exact.isfinite(), MASK == 1)
    assert torch.equal(exact[MASK == 1], default[MASK == 1])


def test_the_dtype_of_the_reward():
    kl = torch.ones(SHAPE).bfloat16()
    assert openrlhf.compute_reward(R[0], 0.1, kl, MASK).dtype == torch.float32
    assert openrlhf.compute_reward(R[0], 0.1, kl, MASK, exact=True).dtype == torch.bfloat16
    assert openrlhf.compute_reward(R[0], 0.1, kl.double(), MASK).dtype == torch.float64


@EXACT
def test_the_reward_has_no_gradient(exact):
    kl = torch.randn(SHAPE, requires_grad=True)
    assert not openrlhf.compute_reward(1.0, 0.1, kl, MASK, exact=exact).requires_grad


# trlx


ATTENTION = torch.cat([MASK, MASK[:, -1:]], dim=1)  # of T = 8 tokens, which have 7 log-probs


@every_mask
def test_trlx_averages(mask):
    logprobs, ref_logprobs, _ = random_inputs(SHAPE)
    attention_mask = torch.cat([mask, mask[:, -1:]], dim=1)
    result = trlx.mean_kl(logprobs, ref_logprobs, attention_mask)
    truth = frameworks.trlx_mean_kl(*doubles(logprobs, ref_logprobs), ATTENTION)
    per_token = oracle.kl_penalty(logprobs, ref_logprobs, estimator=presets.TRLX["kl"])
    for got, expected, slots in zip(result[:2], truth, (5 * 7, 5), strict=True):
        of_tokens = per_token.result_tolerance + 2 * SUM * per_token.result
        oracle.assert_within(got, expected, (MASK * of_tokens).sum() / slots, "mean")
    assert result.stats.length.tolist() == MASK.sum(-1).tolist()


def test_trlx_statistics_have_the_right_k3_beside_its_own():
    logprobs, ref_logprobs, _ = random_inputs(SHAPE)
    stats = trlx.mean_kl(logprobs, ref_logprobs, ATTENTION).stats
    for name, field in (("k3", stats.k3), ("k3_ref", stats.kl)):
        expected = klfast.kl_penalty(
            logprobs, ref_logprobs, MASK, estimator=name, reduction="seq-sum"
        )
        assert torch.equal(field, expected)


def test_a_trlx_mask_of_the_slots_themselves():
    logprobs, ref_logprobs, _ = random_inputs(SHAPE)
    scores = torch.randn(5)
    for function in (
        trlx.log_ratio,
        lambda *args: trlx.mean_kl(*args).mean_kl,
        lambda *args: trlx.mean_kl(*args).mean_kl_per_token,
        lambda *args: trlx.kl_rewards(scores, *args, 0.1),
    ):
        whole = function(logprobs, ref_logprobs, ATTENTION)
        assert same_bits(whole, function(logprobs, ref_logprobs, MASK))
        assert not same_bits(whole, function(logprobs, ref_logprobs, ATTENTION[:, 1:]))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_trlx_averages_of_nothing_are_0(shape):
    nothing = torch.zeros(shape)
    result = trlx.mean_kl(nothing, nothing, torch.ones(shape))
    assert result.mean_kl == result.mean_kl_per_token == 0


@every_garbage
def test_trlx_never_reads_what_is_masked(garbage):
    clean = random_inputs(SHAPE)[:2]
    dirty = masked_with(garbage, *clean)
    for function in (
        lambda *args: trlx.mean_kl(*args).mean_kl,
        lambda *args: trlx.mean_kl(*args).mean_kl_per_token,
        lambda *args: trlx.kl_rewards(torch.ones(5), *args, 0.1),
        trlx.log_ratio,
    ):
        assert same_bits(function(*dirty, ATTENTION), function(*clean, ATTENTION))
    assert not trlx.log_ratio(*dirty, ATTENTION, exact=True).isfinite()[MASK == 0].any()


@pytest.mark.parametrize("kl_coef", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_trlx_rewards(kl_coef):
    logprobs, ref_logprobs = (t[[0, 1, 3, 4]] for t in random_inputs(SHAPE)[:2])
    attention_mask = ATTENTION[[0, 1, 3, 4]]
    rewards = trlx.kl_rewards(R, logprobs, ref_logprobs, attention_mask, kl_coef)
    truth = frameworks.trlx_rewards(
        *doubles(R, logprobs, ref_logprobs), attention_mask, float(kl_coef)
    )
    per_token = oracle.kl_penalty(logprobs, ref_logprobs, estimator=presets.TRLX["reward"])
    # 0.1 as fp32 is off by one rounding more.
    tolerance = 0.1 * (per_token.result_tolerance + U * per_token.result.abs()) + U * 20
    oracle.assert_within(rewards, truth, tolerance, "rewards")


def test_trlx_log_ratio():
    logprobs, ref_logprobs, _ = random_inputs(SHAPE)
    truth = frameworks.trlx_log_ratio(*doubles(logprobs, ref_logprobs), ATTENTION)
    per_token = oracle.kl_penalty(logprobs, ref_logprobs, estimator=presets.TRLX["reward"])
    for exact in (False, True):
        result = trlx.log_ratio(logprobs, ref_logprobs, ATTENTION, exact=exact)
        oracle.assert_within(result, truth, per_token.result_tolerance, "log-ratio")


# TRL


NORMALIZERS = {
    "dr_grpo": 5 * 20,
    "cispo": torch.tensor(37.0),
    "dapo": torch.tensor(37),
    "vespo": 37.5,
}
BETA = 0.04
every_loss_type = pytest.mark.parametrize("loss_type", trl.REDUCTIONS)


def sequence_weights(logprobs, old):
    """(weights [B, 1] of the sequences, their relative error in fp32): exp of means of k1."""
    log_ratio = logprobs - old
    error = frameworks.masked_mean(log_ratio.abs(), MASK) * (oracle.promise(0, torch.float32) + SUM)
    weight = frameworks.masked_mean(log_ratio, MASK).exp()
    return weight[:, None], (error + oracle.promise(0, torch.float32))[:, None]


def trl_tolerances(share, logprobs, ref_logprobs, old, sequence_level):
    """(of the loss, of its gradients), per unit of the loss's upstream gradient."""
    inputs = (logprobs, ref_logprobs)
    if not sequence_level:
        per_token = oracle.kl_penalty(*inputs, estimator=presets.TRL_GRPO, old_logprobs=old)
        value = share * (per_token.result_tolerance + SUM * per_token.result)
        return value.sum(), share * per_token.grad_tolerance
    per_token = oracle.kl_penalty(*inputs, estimator=presets.TRL_GRPO)
    weight, relative = sequence_weights(*doubles(logprobs, old))
    share = share * weight
    value = share * (per_token.result_tolerance + (relative + SUM) * per_token.result)
    through_kl = share * (per_token.grad_tolerance + relative * per_token.grad.abs())
    through_weight = value.sum(-1) / MASK.sum(-1).clamp(min=1)
    return value.sum(), through_kl + MASK * through_weight[:, None]


@pytest.mark.grid
@pytest.mark.parametrize("sampler", ["old", "itself"])
@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("level", trl.LEVELS)
@every_loss_type
def test_trl_kl_loss(loss_type, level, corrected, sampler):
    logprobs, ref_logprobs, old = random_inputs(SHAPE)
    given = old if sampler == "old" else None
    normalizer = NORMALIZERS.get(loss_type)
    options = {"use_bias_correction_kl": corrected, "importance_sampling_level": level}
    stats = []

    def ours(a, b):
        loss, of_read = trl.kl_loss(
            a, b, MASK, beta=BETA, loss_type=loss_type, normalizer=normalizer,
            old_per_token_logps=given, **options,
        )  # fmt: skip
        stats.append(of_read)
        return loss

    per_token = partial(
        frameworks.trl_grpo, mask=MASK, old_logprobs=doubles(given)[0], corrected=corrected,
        level=level,
    )  # fmt: skip

    def reduce(values):
        return BETA * frameworks.trl_reduce(values, MASK, loss_type, normalizer)

    result = differentiated(ours, logprobs, ref_logprobs)
    truth = differentiated(lambda a, b: reduce(per_token(a, b)), *doubles(logprobs, ref_logprobs))
    sampled_by = (logprobs if given is None else old) if corrected else None
    tolerances = partial(
        trl_tolerances, logprobs=logprobs, ref_logprobs=ref_logprobs, old=sampled_by,
        sequence_level=corrected and level == "sequence",
    )  # fmt: skip
    tolerance, grad_tolerance = tolerances(shares(reduce))
    oracle.assert_within(result[0], truth[0].detach(), tolerance, "loss")
    oracle.assert_within(result[1], truth[1], 1.5 * grad_tolerance, "gradient")
    oracle.assert_within(result[2], truth[2], 1.5 * grad_tolerance, "gradient to the reference")

    metric = stats[0].kl.sum() / stats[0].length.sum()
    of_metric = partial(frameworks.trl_reduce, mask=MASK, loss_type="bnpo")
    truth = of_metric(per_token(*doubles(logprobs, ref_logprobs)))
    oracle.assert_within(metric, truth, tolerances(shares(of_metric))[0], "TRL's metric")
    assert not metric.requires_grad


@pytest.mark.parametrize("level", trl.LEVELS)
@every_mask
def test_trl_kl_loss_takes_any_mask(mask, level):
    logprobs, ref_logprobs, old = random_inputs(SHAPE)
    losses = [
        trl.kl_loss(
            logprobs, ref_logprobs, m, beta=BETA, loss_type="grpo", old_per_token_logps=old,
            importance_sampling_level=level,
        )[0]
        for m in (mask, MASK)
    ]  # fmt: skip
    assert same_bits(*losses)


@every_garbage
@pytest.mark.parametrize("level", trl.LEVELS)
@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "bnpo", "dr_grpo"])
def test_trl_kl_loss_never_reads_what_is_masked(loss_type, level, garbage):
    clean = random_inputs(SHAPE)
    results = []
    for logprobs, ref_logprobs, old in (clean, masked_with(garbage, *clean)):
        loss = partial(
            trl.kl_loss, mask=MASK, beta=BETA, loss_type=loss_type, old_per_token_logps=old,
            normalizer=NORMALIZERS.get(loss_type), importance_sampling_level=level,
        )  # fmt: skip
        results.append(differentiated(lambda a, b, f=loss: f(a, b)[0], logprobs, ref_logprobs))
    for unharmed, result in zip(*results, strict=True):
        assert torch.equal(result, unharmed)
    assert (results[1][1][MASK == 0] == 0).all()


@every_loss_type
def test_the_normalizer_goes_with_the_loss_types_that_have_one(loss_type):
    inputs = random_inputs(SHAPE)[:2]
    has_one = loss_type in NORMALIZERS
    wrong = None if has_one else 7
    needs = "be given" if has_one else "be None"
    with pytest.raises(ValueError, match=f"normalizer must {needs} .*{loss_type!r}, got {wrong}"):
        trl.kl_loss(*inputs, MASK, beta=BETA, loss_type=loss_type, normalizer=wrong)


@pytest.mark.parametrize(
    ("argument", "choices"),
    [("loss_type", trl.REDUCTIONS), ("importance_sampling_level", trl.LEVELS)],
)
def test_an_unknown_word_of_trl_names_the_argument_and_the_choices(argument, choices):
    inputs = random_inputs(SHAPE)[:2]
    with pytest.raises(ValueError, match=f"unknown {argument} 'batch'") as raised:
        trl.kl_loss(*inputs, MASK, beta=BETA, **{"loss_type": "grpo", argument: "batch"})
    assert all(repr(choice) in str(raised.value) for choice in choices)


@pytest.mark.parametrize("level", trl.LEVELS)
def test_the_sampling_policy_is_a_constant(level):
    logprobs, ref_logprobs, old_logprobs = random_inputs((3, 5))
    old_logprobs.requires_grad_()
    loss, _ = trl.kl_loss(
        logprobs.requires_grad_(),
        ref_logprobs,
        torch.ones(3, 5),
        beta=1.0,
        loss_type="grpo",
        old_per_token_logps=old_logprobs,
        importance_sampling_level=level,
    )
    loss.backward()
    assert old_logprobs.grad is None
    assert logprobs.grad.abs().min() > 0


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "bnpo"])
def test_a_trl_batch_without_sequences_is_0(loss_type):
    empty = torch.zeros(0, 4)
    loss, _ = trl.kl_loss(empty, empty, empty, beta=1.0, loss_type=loss_type)
    assert loss == 0


def test_trl_sequence_kl():
    logprobs, ref_logprobs, _ = random_inputs(SHAPE)
    truth = frameworks.trl_rloo(*doubles(logprobs, ref_logprobs), MASK)
    per_token = oracle.kl_penalty(logprobs, ref_logprobs, estimator=presets.TRL_RLOO)
    of_tokens = MASK * (per_token.result_tolerance + SUM * per_token.result.abs())
    for garbage in (0.0, NAN, INF):
        dirty = masked_with(garbage, logprobs, ref_logprobs)
        result = trl.sequence_kl(*dirty, MASK)
        oracle.assert_within(result, truth, of_tokens.sum(-1), "KL of a sequence")


# torch.compile


# Dynamo makes a Function object to trace any autograd.Function whatever.
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"
)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, old: verl.kl_penalty(a, b, "k3+").sum(),
        lambda a, b, old: trl.kl_loss(
            a, b, MASK, beta=BETA, loss_type="grpo", old_per_token_logps=old,
            importance_sampling_level="sequence",
        )[0],
        lambda a, b, old: openrlhf.compute_approx_kl(a, b, old, "k3", unbiased_gradient=True).sum(),
    ],
    ids=["verl", "trl", "openrlhf"],
)  # fmt: skip
def test_compiled_whole(function):
    logprobs, ref_logprobs, old = random_inputs(SHAPE)
    for name in ("auto", "native", "reference"):  # resolved as in a used process
        klfast.kl_penalty(logprobs, ref_logprobs, backend=name)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    result = differentiated(lambda a, b: compiled(a, b, old), logprobs, ref_logprobs)
    expected = differentiated(lambda a, b: function(a, b, old), logprobs, ref_logprobs)
    for got, eager in zip(result, expected, strict=True):
        assert same_bits(got, eager)
