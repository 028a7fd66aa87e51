"""klfast.compat's losses over a few words of each token: values and gradients are the frameworks'.

The truth is ``frameworks_distillation`` in float64 on the stored logits; how near is near, eager
torch in the dtype of the logits says.
"""

import math
from functools import partial
from types import SimpleNamespace

import frameworks_distillation as theirs
import pytest
import torch
from agreement_logits import assert_models_agree, differentiated, distinct_logits, leaves

from klfast.compat import megatron_lm, nemo_rl, trl, verl
from klfast.compat.nemo_rl_distillation import KL_TYPES

pytestmark = pytest.mark.usefixtures("one_thread", "auto")

INF = torch.inf
WORDS = 300
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
every_beta = pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
every_k = pytest.mark.parametrize("k", [1, 2, 20])


def models(dtype, *shape):
    return distinct_logits(*(shape or (2, 4)), WORDS, dtype=dtype)


# TRL


@pytest.mark.parametrize("tail", [False, True], ids=["renormalized", "tail"])
@every_k
@every_dtype
@every_beta
def test_trl_self_distillation(beta, dtype, k, tail):
    ours = partial(
        trl.compute_topk_self_distillation_loss,
        distillation_topk=k,
        distillation_alpha=beta,
        distillation_add_tail=tail,
    )

    def formula(student, teacher):
        ids = student.topk(k).indices
        few = (theirs.likeliest(logits, ids, tail) for logits in (student, teacher))
        return theirs.interpolated_of_logprobs(*few, beta)

    assert_models_agree(ours, formula, *models(dtype))


@pytest.mark.parametrize("shape", [(4,), (1, 2, 3)], ids=["[N, V]", "[A, B, T, V]"])
def test_trl_self_distillation_of_other_shapes(shape):
    student, teacher = models(torch.float32, *shape)
    for tail in (False, True):
        loss = partial(
            trl.compute_topk_self_distillation_loss,
            distillation_topk=5,
            distillation_alpha=0.5,
            distillation_add_tail=tail,
        )
        mask = torch.rand(shape) < 0.5
        value = loss(student, teacher, mask=mask)
        flat = loss(student.view(1, -1, WORDS), teacher.view(1, -1, WORDS)).view(shape)
        assert torch.equal(value, flat * mask)


@pytest.mark.parametrize("tail", [False, True], ids=["renormalized", "tail"])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
@every_dtype
@every_beta
def test_iw_opd(beta, dtype, temperature, tail):
    labels = torch.tensor([[1, -100, 1, 1], [-100, -100, 1, -100]])
    k = 20
    ours = partial(
        trl.iw_opd_generalized_jsd_loss,
        labels=labels,
        beta=beta,
        temperature=temperature,
        top_k=k,
        add_tail=tail,
    )

    def of_token(student, teacher):
        own, its = (set(logits.topk(k).indices.tolist()) for logits in (student, teacher))
        ids = torch.tensor(sorted({0: its, 1: own}.get(beta, own | its)))
        few = (theirs.likeliest(logits, ids, tail) for logits in (student, teacher))
        return theirs.interpolated_of_logprobs(*few, beta)

    def formula(student, teacher):
        kept = (logits[labels != -100] / temperature for logits in (student, teacher))
        return torch.stack([of_token(*pair) for pair in zip(*kept, strict=True)]).mean()

    assert_models_agree(ours, formula, *models(dtype))


def test_iw_opd_without_a_token_is_0():
    student, teacher = leaves(*models(torch.float32))
    labels = torch.full((2, 4), -100)
    for tail in (False, True):
        loss = trl.iw_opd_generalized_jsd_loss(student, teacher, labels, top_k=3, add_tail=tail)
        assert loss == 0
        assert all((g == 0).all() for g in torch.autograd.grad(loss, (student, teacher)))


def test_trl_s_errors():
    student, teacher = models(torch.float32)
    loss = partial(
        trl.compute_topk_self_distillation_loss,
        distillation_topk=5,
        distillation_alpha=0.5,
        distillation_add_tail=True,
    )
    for wrong, name in (
        (lambda: loss(student, teacher[:1]), "teacher_logits"),
        (lambda: loss(student, teacher, mask=torch.ones(2, 3)), "mask"),
        (lambda: loss(student, teacher, distillation_alpha=1.5), "distillation_alpha"),
        (lambda: trl.iw_opd_generalized_jsd_loss(student, teacher[:1]), "teacher_logits"),
        (lambda: trl.iw_opd_generalized_jsd_loss(student, teacher, torch.ones(3)), "labels"),
        (lambda: trl.iw_opd_generalized_jsd_loss(student, teacher, beta=-1), "beta"),
        (
            lambda: trl.iw_opd_generalized_jsd_loss(student, teacher, reduction="none", top_k=3),
            "reduction",
        ),
    ):
        with pytest.raises(ValueError, match=name):
            wrong()


# verl


def of_verl(logits, teacher, ids, clamp=None):
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp))
    return verl.compute_forward_kl_topk(logits, teacher, ids, config, "thd")


@pytest.mark.parametrize("clamp", [None, -3.0])
@every_k
@every_dtype
def test_verl_forward_kl(dtype, k, clamp):
    student, teacher = models(dtype, 1, 8)
    logprobs, ids = teacher.double().log_softmax(-1).topk(k)
    logprobs = logprobs.to(torch.promote_types(dtype, torch.float32))

    def ours(logits):
        return of_verl(logits, logprobs, ids, clamp)["distillation_losses"]

    assert_models_agree(ours, lambda x: theirs.verl_topk(x, logprobs, ids, clamp), student)


def test_verl_s_log():
    """Of two tokens: masses, how many words both name, and the mean of these words' terms."""
    logits = torch.tensor([[[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]]).log()
    teacher, ids = torch.tensor([[[0.5, 0.3], [0.5, 0.4]]]).log(), torch.tensor([[[1, 3], [0, 1]]])
    found = of_verl(logits, teacher, ids)
    expected = {
        "student_mass": [[0.4, 0.3]],
        "teacher_mass": [[0.8, 0.9]],
        "overlap_count": [[1, 0]],
        "overlap_token_advantage": [[-0.5 * math.log(0.5 / 0.3), 0]],
    }
    for name, values in expected.items():
        torch.testing.assert_close(found[name], torch.tensor(values))


# NeMo-RL


def nemo_batch(dtype, k):
    """(student's and teacher's logits, the teacher's words [B, T, k])."""
    student, teacher = models(dtype, 3, 5)
    return student, teacher, teacher.topk(k).indices


@pytest.mark.parametrize("zero_outside", [False, True], ids=["", "zero_outside_topk"])
@pytest.mark.parametrize("kl_type", KL_TYPES)
@every_k
@every_dtype
def test_nemo_rl(dtype, k, kl_type, zero_outside):
    student, teacher, ids = nemo_batch(dtype, k)
    ours = partial(
        nemo_rl.distillation_loss,
        teacher_topk_indices=ids,
        kl_type=kl_type,
        mixed_kl_weight=0.3,
        zero_outside_topk=zero_outside,
    )

    def formula(logits, of_teacher):
        values = theirs.nemo_rl_topk(logits, of_teacher, ids, kl_type, 0.3, zero_outside)
        return values[:, :-1].mean()

    assert_models_agree(ours, formula, student, teacher.gather(-1, ids))


@pytest.mark.parametrize("count", [None, 7, torch.tensor(7.0)])
@pytest.mark.parametrize("zero_outside", [False, True], ids=["", "zero_outside_topk"])
def test_nemo_rl_s_masks_are_of_the_tokens_that_follow(zero_outside, count):
    """And what is under them has no effect: NaN, infinite, or no word."""
    student, teacher, ids = nemo_batch(torch.float64, 6)
    of_teacher = teacher.gather(-1, ids)
    token_mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    sample_mask = torch.tensor([1, 1, 0])
    kept = (token_mask * sample_mask[:, None])[:, 1:].double()
    given = {"zero_outside_topk": zero_outside}
    values = theirs.nemo_rl_topk(student, of_teacher, ids, "mixed", zero_outside=zero_outside)
    expected = (values[:, :-1] * kept).sum() / (kept.sum() if count is None else 7)

    unread = torch.cat([kept == 0, torch.ones(3, 1, dtype=torch.bool)], 1)
    student[unread] = torch.tensor([math.nan, INF, -INF] * (WORDS // 3), dtype=torch.float64)
    of_teacher[unread], ids[unread] = math.nan, WORDS
    loss, grad, grad_teacher = differentiated(
        lambda s, t: nemo_rl.distillation_loss(
            s, t, ids, token_mask, sample_mask, global_valid_toks=count, **given
        ),
        student,
        of_teacher,
    )
    torch.testing.assert_close(loss, expected)
    for each in (grad, grad_teacher):
        assert (each[unread] == 0).all()
        assert (each[~unread] != 0).any(-1).all()


@pytest.mark.parametrize("zero_outside", [False, True], ids=["", "zero_outside_topk"])
def test_nemo_rl_s_loss_of_no_token_is_0(zero_outside):
    student, teacher, ids = nemo_batch(torch.float32, 6)
    mask = torch.zeros(3, 5)
    for count in (None, 0):
        found = differentiated(
            lambda s: nemo_rl.distillation_loss(
                s,
                teacher.gather(-1, ids),
                ids,
                mask,
                zero_outside_topk=zero_outside,
                global_valid_toks=count,  # noqa: B023
            ),
            student,
        )
        assert all((each == 0).all() for each in found)


def test_nemo_rl_s_words_that_the_student_excludes():
    student, teacher, ids = nemo_batch(torch.float64, 6)
    student.scatter_(-1, ids[..., :2], -INF)
    loss = partial(nemo_rl.distillation_loss, zero_outside_topk=True, kl_type="reverse")
    value, grad = differentiated(lambda s: loss(s, teacher.gather(-1, ids), ids), student)
    few, among = ids[..., 2:], teacher.gather(-1, ids).log_softmax(-1)[..., 2:]
    p = student.log_softmax(-1)
    expected = (p.exp() * torch.where(p == -INF, 0.0, p)).sum(-1)
    expected = expected - (p.gather(-1, few).exp() * among).sum(-1)
    expected = expected + 100 * (1 - p.gather(-1, few).exp().sum(-1))
    torch.testing.assert_close(value, expected[:, :-1].mean())
    assert grad.isfinite().all()


def test_nemo_rl_s_errors():
    student, teacher, ids = nemo_batch(torch.float32, 6)
    few = teacher.gather(-1, ids)
    loss = nemo_rl.distillation_loss
    for wrong, name in (
        (lambda: loss(student, few, ids, kl_type="jsd"), "kl_type"),
        (lambda: loss(student, few, ids, mixed_kl_weight=1.1), "mixed_kl_weight"),
        (lambda: loss(student, few, ids, mixed_kl_weight=-1), "mixed_kl_weight"),
        (lambda: loss(student, few[..., :2], ids), "teacher_topk_logits"),
        (lambda: loss(student[0], few[0], ids[0]), "student_logits"),
        (lambda: loss(student, few, ids, torch.ones(3, 4)), "token_mask"),
        (lambda: loss(student, few, ids, global_valid_toks=-1), "global_valid_toks"),
    ):
        with pytest.raises(ValueError, match=name):
            wrong()


# Megatron-LM


@pytest.mark.parametrize("ghost", [False, True], ids=["", "ghost"])
@every_k
@every_dtype
def test_megatron_lm(dtype, k, ghost):
    student, teacher = models(dtype)
    logprobs, ids = teacher.double().log_softmax(-1).topk(k)
    logprobs = logprobs.to(torch.promote_types(dtype, torch.float32))
    logprobs[0, 1, 1:], ids[0, 1, 1:] = megatron_lm.SENTINEL, (1 << 17) - 1  # as it stores none
    before = student.clone()
    ours = partial(
        megatron_lm.topk_kl_div,
        teacher_topk_logprobs=logprobs,
        teacher_topk_indices=ids,
        add_ghost_token=ghost,
    )
    assert ours(student).shape == (4, 2)
    assert torch.equal(student, before)  # theirs writes into fp32 logits
    assert_models_agree(ours, lambda x: theirs.megatron_lm_topk(x, logprobs, ids, ghost), student)


def test_megatron_lm_s_ghost_has_a_gradient_down_to_what_fp32_can_say():
    """The student leaves 8e-8, and the teacher 1 %."""
    logits = torch.zeros(1, 1, 2)
    logits[..., 1] = math.log(8e-8)
    teacher, ids = torch.full((1, 1, 1), math.log(0.99)), torch.zeros(1, 1, 1, dtype=torch.int64)
    ours, theirs_of = (
        differentiated(lambda x, f=f: f(x, teacher, ids, add_ghost_token=True), logits)
        for f in (
            megatron_lm.topk_kl_div,
            lambda x, *given, add_ghost_token: theirs.megatron_lm_topk(x, *given, add_ghost_token),
        )
    )
    q = torch.tensor([0.99, 0.01], dtype=torch.float64)
    p = logits[0, 0].double().softmax(-1)
    torch.testing.assert_close(
        ours[0], (q * (q / p).log()).sum().float().view(1, 1), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(ours[1][0, 0], (p - q).float(), rtol=1e-4, atol=0)
    assert (theirs_of[1].double() - (p - q)).abs().max() > 1e-3


def test_megatron_lm_s_token_without_entries_is_0():
    student, _ = models(torch.float32)
    logprobs, ids = torch.full((2, 4, 3), megatron_lm.SENTINEL), torch.full((2, 4, 3), -1)
    for ghost in (False, True):
        found = differentiated(
            partial(
                megatron_lm.topk_kl_div,
                teacher_topk_logprobs=logprobs,
                teacher_topk_indices=ids,
                add_ghost_token=ghost,
            ),
            student,
        )
        assert all((each == 0).all() for each in found)


def test_megatron_lm_s_errors():
    student, teacher = models(torch.float32)
    logprobs, ids = teacher.log_softmax(-1).topk(3)
    with pytest.raises(ValueError, match="tp_size must be 1"):
        megatron_lm.topk_kl_div(student, logprobs, ids, 2, 0, None)
    with pytest.raises(ValueError, match="teacher_topk_logprobs and teacher_topk_indices must be"):
        megatron_lm.topk_kl_div(student, logprobs, ids[..., :2], 1, 0, None)
    with pytest.raises(ValueError, match="ref_token_ids"):
        megatron_lm.topk_kl_div(student, logprobs, ids + WORDS, 1, 0, None)
