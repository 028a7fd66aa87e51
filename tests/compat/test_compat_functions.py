"""Promises of single functions of klfast.compat, and the errors of all functions.

``test_compat.py`` checks numbers, gradients, dtypes and masks of every function.
"""

import math
from functools import partial
from types import SimpleNamespace

import frameworks
import frameworks_distillation as theirs
import pytest
import torch
from agreement_logits import differentiated, leaves, random_logits
from compat_table import FULL, MASK, OBJECTIVES, SCORES, labels, logits, swift_teacher, various
from refusals import POSITIVE

import klfast
from klfast.compat import ms_swift, openrlhf, presets, roll, skyrl, trl, trlx, verl

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("mode", [mode for mode in presets.VERL if mode.endswith("+")])
def test_verl_s_plus_has_a_value_at_infinity(mode):
    logprobs, ref_logprobs = torch.tensor([-INF, 0.0]), torch.tensor([0.0, -INF])
    value = verl.kl_penalty(logprobs, ref_logprobs, mode)
    assert torch.equal(value, verl.kl_penalty(logprobs, ref_logprobs, mode.removesuffix("+")))
    assert not value.isnan().any()


@pytest.mark.parametrize("exact", [False, True])
def test_roll_s_k3_has_a_gradient_of_0_where_exp_overflows_and_nan_if_exact(exact):
    ours = partial(roll.compute_approx_kl, kl_penalty="k3", exact=exact)
    inputs = torch.tensor([-100.0, -1.0]), torch.tensor([0.0, -2.0])
    value, grad, _ = differentiated(ours, *inputs)
    assert value[0] == 10
    assert grad[0].isnan() if exact else grad[0] == 0
    assert grad[1] != 0


@pytest.mark.parametrize("mode", presets.OPENRLHF)
def test_openrlhf_s_third_argument_is_its_estimator_where_there_is_no_weight(mode):
    inputs = torch.tensor([-3.0, -0.5]), torch.tensor([-0.5, -2.5])
    unweighted = openrlhf.compute_approx_kl_unweighted(*inputs, mode)
    assert torch.equal(unweighted, openrlhf.compute_approx_kl(*inputs, kl_estimator=mode))


@pytest.mark.parametrize("ours", FULL.values(), ids=FULL)
def test_full_has_the_gradient_of_their_sum_at_the_logits_and_is_their_sum_if_exact(ours):
    models = random_logits(2, 3, 9, dtype=torch.float64)
    logprobs = [x.log_softmax(-1) for x in models]
    exact = differentiated(partial(ours, exact=True), *logprobs)
    for found, truth in zip(exact, differentiated(frameworks.full, *logprobs), strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-14)
    found, truth = (
        differentiated(lambda x, y, of=of: of(x.log_softmax(-1), y.log_softmax(-1)), *models)
        for of in (ours, frameworks.full)
    )
    for mine, other in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
    assert ours(*(x.bfloat16() for x in logprobs), exact=True).dtype == torch.bfloat16


@pytest.mark.parametrize("ours", FULL.values(), ids=FULL)
def test_full_of_rounded_log_probs_is_no_less_than_0_and_theirs_is(ours):
    """Theirs is e**a (KL + a - b), as ``divergences.full_kl`` says."""
    models = random_logits(200, 50, apart=0.01)
    logprobs, ref_logprobs = (x.log_softmax(-1).bfloat16() for x in models)
    kl = ours(logprobs, ref_logprobs)
    sums = frameworks.full(logprobs.double(), ref_logprobs.double())
    a, b = (x.double().logsumexp(-1) for x in (logprobs, ref_logprobs))
    torch.testing.assert_close(sums, a.exp() * (kl.double() + a - b), rtol=4e-6, atol=1e-7)
    assert (kl >= 0).all()
    assert (sums < 0).any()
    logprobs[:, 2] = -INF
    assert ours(logprobs, ref_logprobs).isfinite().all()


@pytest.mark.parametrize("exact", [False, True])
def test_openrlhf_s_reward_by_hand(exact):
    """The last action token gets the score, wherever the mask has holes."""
    mask = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]])
    reward = partial(openrlhf.compute_reward, kl_coef=0.5, exact=exact)
    rewards = reward(torch.tensor([10.0, 20.0]), kl=torch.ones(2, 4), action_mask=mask)
    masked = -0.5 if exact else 0.0
    assert rewards.tolist() == [[masked, -0.5, masked, 9.5], [-0.5, 19.5, masked, masked]]
    assert reward(3, kl=torch.ones(2, 4)).tolist() == [[-0.5, -0.5, -0.5, 2.5]] * 2
    assert reward(9.0, kl=torch.zeros(MASK.shape), action_mask=MASK).sum(-1).tolist() == [
        9, 9, 0, 9, 9
    ]  # fmt: skip
    kl = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    rewards = reward(3.0, kl=kl, action_mask=mask)
    assert rewards.dtype == (torch.bfloat16 if exact else torch.float32)
    assert not rewards.requires_grad


def test_trlx_s_mask_may_be_of_the_log_probs_themselves_and_it_has_all_statistics():
    inputs = -torch.rand(2, *MASK.shape)
    attention_mask = torch.cat([MASK, MASK[:, -1:]], 1)
    for function in (
        trlx.log_ratio,
        lambda *args: trlx.mean_kl(*args).mean_kl,
        lambda *args: trlx.kl_rewards(SCORES.float(), *args, 0.1),
    ):
        assert torch.equal(function(*inputs, attention_mask), function(*inputs, MASK))
    k3 = klfast.kl_penalty(*inputs, MASK, estimator="k3", reduction="seq-sum")
    assert torch.equal(trlx.mean_kl(*inputs, attention_mask).stats.k3, k3)


@pytest.mark.parametrize("level", trl.LEVELS)
def test_the_sampling_policy_of_trl_is_a_constant(level):
    logprobs, ref_logprobs, old = leaves(*-torch.rand(3, 2, 5))
    options = {"old_per_token_logps": old, "importance_sampling_level": level}
    loss, stats = trl.kl_loss(
        logprobs, ref_logprobs, torch.ones(2, 5), beta=1.0, loss_type="grpo", **options
    )
    loss.backward()
    assert old.grad is None
    assert not stats.kl.requires_grad


@pytest.mark.parametrize("level", trl.LEVELS)
@pytest.mark.parametrize("cap", [None, 1.05])
def test_another_estimator_in_trl_s_loss(level, cap):
    """k3+ has the value of k3 and the gradient of k2, times a weight without a gradient."""
    logps, ref, old = -torch.rand(3, 2, 5, dtype=torch.float64)
    logps.requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]])
    estimator = klfast.Estimator("k3", gradient="k2", importance="detached", importance_cap=cap)
    found, stats = trl.kl_loss(
        *(logps, ref, mask),
        beta=0.5,
        loss_type="grpo",
        old_per_token_logps=old,
        importance_sampling_level=level,
        estimator=estimator if cap else "k3+",
    )
    log_weight, x = (logps - old).detach(), logps - ref
    if level == "sequence":
        log_weight = (log_weight * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    weight = log_weight.exp().clamp(max=cap or math.inf)
    means = [
        (weight * v * mask).sum(1) / mask.sum(1) for v in (torch.expm1(-x) + x, x.square() / 2)
    ]
    value, of_gradient = (0.5 * each.mean() for each in means)
    torch.testing.assert_close(found, value)
    grads = (torch.autograd.grad(each, logps)[0] for each in (found, of_gradient))
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(stats.kl / stats.length, means[0].detach())


def test_estimators_that_trl_s_loss_refuses():
    logps = torch.zeros(1, 2)
    weighted = klfast.Estimator("k3", kl_clip=1.0, clip_weighted=True)
    for level, estimator, message in (
        ("token", "k4", "unknown estimator 'k4'; expected one of"),
        ("sequence", weighted, "estimator must have clip_weighted=False with one weight per seq"),
    ):
        options = {"importance_sampling_level": level, "estimator": estimator, "loss_type": "grpo"}
        with pytest.raises(ValueError, match=message):
            trl.kl_loss(logps, logps, logps + 1, beta=1.0, **options)
    with pytest.raises(ValueError, match="estimator must be None for 'verl', whose settings name"):
        klfast.compat.patch("verl", estimator="k3+")
    with pytest.raises(ValueError, match="unknown estimator 'k4'"):
        klfast.compat.patch("trl", estimator="k4")


def test_trl_s_entropy_without_a_gradient_lets_that_of_the_log_probs_through():
    x, index = logits(None)
    x.requires_grad_()
    joint = trl.selective_log_softmax_and_entropy
    logprobs, entropy = joint(x, index, entropy_requires_grad=False)
    assert not entropy.requires_grad
    (alone,) = torch.autograd.grad(trl.selective_log_softmax(x, index).sum(), x)
    assert torch.equal(torch.autograd.grad(logprobs.sum(), x)[0], alone)
    assert not skyrl.chunked_entropy_from_logits(x).requires_grad
    assert skyrl.logprobs_from_logits is verl.logprobs_from_logits


def test_exact_divides_openrlhf_s_logits_in_place_as_it_does():
    x, index = logits(None)
    before = x.clone()
    default = openrlhf.log_probs_from_logits(x, index, 0.5)
    assert torch.equal(x, before)
    assert torch.equal(openrlhf.log_probs_from_logits(x, index, 0.5, exact=True), default)
    assert torch.equal(x, before / 0.5)


@pytest.mark.parametrize(
    ("ours", "label"),
    [
        (verl.logprobs_from_logits, -1),
        (openrlhf.log_probs_from_logits, 37),
        (roll.log_probs_from_logits, -100),
        (trl.selective_log_softmax, -100),
        (trl.selective_log_softmax, 37),
    ],
)
def test_labels_outside_of_the_vocabulary_are_errors(ours, label):
    x, index = logits(None)
    index[1, 1] = label
    with pytest.raises(ValueError, match="token_ids must be in"):
        ours(x, index)


FEW = {
    "whole vocabulary": lambda x, indices: x.log_softmax(-1),
    "few, renormalised": partial(theirs.likeliest, with_tail=False),
    "few and a tail": partial(theirs.likeliest, with_tail=True),
}


@pytest.mark.parametrize("logprobs_of", FEW.values(), ids=FEW)
@pytest.mark.parametrize("alpha", [0, 0.1, 1])
def test_the_gradient_of_log_probs_is_trl_s_at_the_logits(alpha, logprobs_of):
    models = random_logits(4, 23, dtype=torch.float64)
    indices = models[0].topk(5).indices
    found, truth = (
        differentiated(
            lambda x, y, f=f: f(*(logprobs_of(z, indices) for z in (x, y)), alpha), *models
        )
        for f in (trl.compute_divergence, theirs.interpolated_of_logprobs)
    )
    for mine, other in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_buckets_of_two_confident_models_keep_their_digits(beta):
    """1 - P and 1 - Q are 1e-5 and 5e-6."""
    models = random_logits(4, 60)
    likely = torch.stack([torch.randperm(60)[:3] for _ in range(4)])
    models = [
        x.clone().scatter_(-1, likely, margin + torch.rand(4, 3))
        for x, margin in zip(models, (14.0, 15.0), strict=True)
    ]
    found, exact = (
        trl.iw_opd_generalized_jsd_loss(*(x.to(dtype) for x in models), top_k=3, beta=beta)
        for dtype in (torch.float32, torch.float64)
    )
    assert (found - exact).abs() <= 2**-22 * exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trl_s_bucket(dtype):
    logprobs = torch.tensor([[0.5, 0.25, 0.0]]).log().to(dtype).requires_grad_()
    found, valid = trl.add_tail_bucket_and_mask(logprobs, logprobs > -1)
    assert torch.equal(found, trl.add_tail_bucket(logprobs))
    assert found.dtype == dtype
    assert torch.equal(found[:, :3], logprobs)
    assert found[0, 3].item() == pytest.approx(math.log(0.25), abs=0.02)
    assert valid.tolist() == [[True, False, False, True]]
    assert torch.autograd.grad(found[0, 3], logprobs)[0].isfinite().all()


@pytest.mark.parametrize("length", [3, 4])
@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_swift_s_teacher_may_have_its_tokens_elsewhere(beta, length):
    """In OPSD the teacher has another prompt and the same completion. Tokens match in order."""
    student, teacher = random_logits(2, 3, 11)[0], random_logits(2, length, 11)[0]
    own = torch.tensor([[-100, 1, 1], [-100, -100, 1]])
    its = torch.full((2, length), -100)
    its[0, 0] = its[1, 1] = its[1, 2] = 1

    def ours(student, teacher):
        return ms_swift.gkd_loss(student, swift_teacher(teacher, its), own, beta, 1.0)[0]

    value, grad, grad_teacher = differentiated(ours, student, teacher)
    rows = differentiated(partial(ms_swift.jsd_loss, beta=beta), student[own > 0], teacher[its > 0])
    for mine, other in zip((value, grad[own > 0], grad_teacher[its > 0]), rows, strict=True):
        assert torch.equal(mine, other)
    assert grad[own < 0].count_nonzero() == grad_teacher[its < 0].count_nonzero() == 0


def test_swift_s_teacher_without_words_for_a_token():
    """The token does not count. Padding names no token id. K token ids come before logits."""
    student, teacher = random_logits(2, 3, 37)
    top = teacher.log_softmax(-1).topk(4)
    logprobs, indices = top.values.clone(), top.indices.clone()
    logprobs[1, 0] = -INF
    logprobs[0, 1], indices[0, 1] = NAN, -1
    own = torch.tensor([[1, -100, 1], [1, 1, -100]])
    expected = ms_swift.gkd_loss(
        student, swift_teacher(logprobs=top.values, indices=top.indices),
        torch.tensor([[1, -100, 1], [-100, 1, -100]]), 0.3, 1.0,
    )  # fmt: skip
    given = swift_teacher(teacher, own.clone(), logprobs, indices)
    for gather_fn in (None, lambda x, at: x.gather(-1, at)):
        total, number = ms_swift.gkd_loss(student, given, own, 0.3, 1.0, gather_fn, print, print)
        torch.testing.assert_close(total, expected[0])
        assert number == expected[1] == 3


@pytest.mark.parametrize("excluded", [1e-6, 0.5, 1 - 1e-6])
def test_roll_s_reverse_kl_has_its_digits_whatever_the_student_gives_excluded_words(excluded):
    each = (1 - excluded) / 2
    logits = torch.tensor([[each, each, excluded]], dtype=torch.float64).log().float()
    logprobs = torch.tensor([[0.5, 0.5, 0.0]]).log()
    halves = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    truth = theirs.roll(logits.double(), halves, "reverse_kl", 1.0, logprobs == -INF)
    value = various("reverse_kl")(logits, None, logprobs, logprobs == -INF)
    torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_roll_s_teacher_gets_no_gradient_and_a_mask_of_nothing_changes_nothing(objective):
    student, teacher = random_logits(2, 3, 11)
    logits, logprobs = leaves(student, teacher.log_softmax(-1))
    loss = various(objective)
    rows = loss(logits, None, logprobs)
    rows.sum().backward()
    assert logprobs.grad is None
    assert torch.equal(rows, loss(logits, None, logprobs, torch.zeros(2, 3, 11, dtype=torch.bool)))
    given = logits, None, logprobs, None, None, torch.full((2, 3), -100)
    unmasked, number = roll.op_compute_various_divergence(loss, *given, reduction="none")
    assert torch.equal(unmasked, rows)
    assert number == 0


def test_skyrl_s_tokens_are_counted_exactly_in_bf16():
    models = (x.expand(1, 999, 5) for x in random_logits(1, 1, 5))
    ours = partial(skyrl.draft_soft_ce, *models)
    assert torch.equal(ours(torch.ones(1, 999).bfloat16()), ours(torch.ones(1, 999)))


def test_verl_s_log_of_a_distillation():
    """The log has both masses, the number of common ids, and the mean of these ids' terms."""
    logits = torch.tensor([[[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]]).log()
    teacher, ids = torch.tensor([[[0.5, 0.3], [0.5, 0.4]]]).log(), torch.tensor([[[1, 3], [0, 1]]])
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))
    found = verl.compute_forward_kl_topk(logits, teacher, ids, config, "thd")
    expected = {
        "student_mass": [[0.4, 0.3]],
        "teacher_mass": [[0.8, 0.9]],
        "overlap_count": [[1, 0]],
        "overlap_token_advantage": [[-0.5 * math.log(0.5 / 0.3), 0]],
    }
    for name, values in expected.items():
        torch.testing.assert_close(found[name], torch.tensor(values))


ROW, TOK = torch.zeros(2, 3, 7), torch.zeros(2, 3)
ONES = torch.ones(2, 3)
GKD = partial(trl.generalized_jsd_loss, ROW)
SWIFT = partial(ms_swift.gkd_loss, ROW, labels=ONES, beta=0.5, temperature=1.0)
ROLL = partial(
    roll.op_compute_various_divergence, various("forward_kl"), ROW, None, ROW, None, None
)
VERL = partial(verl.agg_loss, ONES, ONES)
TRL = partial(trl.kl_loss, TOK, TOK, ONES, beta=0.1)
RATIO = partial(trl.importance_sampling_ratio, TOK, TOK, ONES)
OTHER = torch.zeros(2, 3, 8)
SHARDS = "must be None: .* not for a shard"
ERRORS = {
    "verl mode": (partial(verl.kl_penalty, TOK, TOK, "k4"), "unknown kl_penalty 'k4'.*'low_var_kl"),
    "verl agg": (partial(VERL, "mean"), "unknown loss_agg_mode.* torch's 'mean' is 'token"),
    "verl tokens": (partial(VERL, "token-mean", batch_num_tokens=0), f"tokens {POSITIVE}, got 0"),
    "verl threshold": (
        partial(
            verl.compute_rollout_rejection_mask, TOK, ONES, rollout_rs="seq_sum_k1",
            rollout_rs_threshold="0.5",
        ),
        "^rollout_rs_threshold must be >= 1 for 'seq_sum_k1'",
    ),
    "verl top-k": (
        partial(verl.compute_forward_kl_topk, ROW, OTHER[:, 1:], OTHER[:, 1:], None, "thd"),
        r"teacher_topk_log_probs must have the shape .*, got \[2, 2, 8\]",
    ),
    "full": (partial(FULL["trl"], torch.zeros(3), torch.zeros(3)), "whole vocabulary"),
    "full's mask": (partial(FULL["roll"], ROW, ROW, ROW), r"mask must .*\[2, 3\], got \[2, 3, 7"),
    "trl loss type": (partial(TRL, loss_type="batch"), "unknown loss_type 'batch'.*'luspo'"),
    "trl level": (
        partial(TRL, loss_type="grpo", importance_sampling_level="batch"),
        "unknown importance_sampling_level 'batch'.*'token'",
    ),
    "trl with a normalizer": (
        partial(TRL, loss_type="grpo", normalizer=7), "normalizer must be None .*'grpo', got 7"
    ),
    "trl without one": (partial(TRL, loss_type="dapo"), "normalizer must be given .*, got None"),
    "trl mode of vLLM": (partial(RATIO, mode="token"), "unknown mode 'token'"),
    "trl no bound": (
        partial(RATIO, mode="token_truncate", clip_max=None), "clip_min or clip_max must be given"
    ),
    "trl clip_max": (partial(RATIO, clip_max=0.0), f"^clip_max {POSITIVE}, got 0.0"),
    "gkd reduction": (
        partial(GKD, ROW, reduction="none"), "reduction must be 'batchmean', 'sum' or.*'none'"
    ),
    "gkd beta": (partial(GKD, ROW, beta=1.1), "beta must be a number between 0 and 1, got 1.1"),
    "gkd temperature": (partial(GKD, ROW, temperature=0.0), f"temperature {POSITIVE}, got 0.0"),
    "gkd number": (
        partial(GKD, ROW, num_items_in_batch=torch.tensor(0)), "num_items_in_batch must be .* > 0"
    ),
    "gkd labels": (
        partial(GKD, ROW, torch.zeros(2, 4)), r"labels must have .*\[2, 3\], got \[2, 4\]"
    ),
    "gkd teacher": (partial(GKD, OTHER), r"teacher_logits must .*got \[2, 3, 8\]"),
    "divergence": (
        partial(trl.compute_divergence, ROW, OTHER, 0.5), r"teacher_log_probs must .*\[2, 3, 8\]"
    ),
    "swift softmax": (partial(SWIFT, swift_teacher(ROW), log_softmax_fn=print), SHARDS),
    "swift nothing": (
        partial(SWIFT, swift_teacher(logprobs=ROW)), "must have full_logits, or topk_logprobs and"
    ),
    "swift labels": (
        partial(SWIFT, swift_teacher(ROW, labels(torch.tensor([[1, 1, 0], [1, 1, 1]])))),
        "must keep as many tokens as labels, 6, got 5",
    ),
    "swift shape": (
        partial(SWIFT, swift_teacher(torch.zeros(2, 4, 7))), r"teacher_output must .*\[2, 4, 7\]"
    ),
    "roll objective": (
        partial(various, "adaptive_kl"), "unknown kd_objective 'adaptive_kl'; .*'js_divergence'"
    ),
    "roll mask": (
        partial(various("forward_kl"), ROW, None, ROW, TOK), r"teacher_inf_mask must .*\[2, 3\]"
    ),
    "roll reduction": (partial(ROLL, ONES, reduction="batchmean"), "unknown reduction 'batchmean'"),
    "klfast's reduction": (partial(ROLL, ONES, reduction="token-sum"), "did you mean 'sum'"),
    "roll labels": (partial(ROLL, None), "labels or attention_mask must be given, got neither"),
    "skyrl gradient": (
        lambda: skyrl.draft_soft_ce(ROW, ROW.clone().requires_grad_(), ONES), "must be detached"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_framework_s_arguments(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: verl.kl_penalty(ROW, ROW, "full"), NotImplementedError, "'full' .*whole vocab"),
        (lambda: verl.kl_penalty(TOK, TOK, None), TypeError, "unknown kl_penalty None"),
        (
            lambda: openrlhf.compute_approx_kl(TOK, TOK, "k1"), TypeError,
            r"log_probs_old must be a torch\.Tensor or None, got 'k1'",
        ),
        (
            lambda: roll.op_compute_various_divergence(print, ROW, None, ROW, None, None, ONES),
            TypeError, r"loss_callable must be a klfast.*VariousDivergence, got bui",
        ),
    ],
)  # fmt: skip
def test_errors_of_other_types(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_skyrl_s_vocabulary_in_shards_is_refused(monkeypatch):
    group = object()
    for loss in (skyrl.draft_soft_ce, partial(skyrl.draft_soft_ce_topk, k=2)):
        monkeypatch.setattr(torch.distributed, "get_world_size", {group: 1}.get)
        assert loss(ROW, ROW, ONES, vocab_parallel_group=group).isfinite()
        monkeypatch.setattr(torch.distributed, "get_world_size", {group: 4}.get)
        with pytest.raises(ValueError, match=r"vocab_parallel_group must be None .*, got one of 4"):
            loss(ROW, ROW, ONES, vocab_parallel_group=group)
