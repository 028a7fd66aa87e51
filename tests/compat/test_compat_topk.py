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
from agreement_logits import assert_models_agree, distinct_logits, leaves

from klfast.compat import trl, verl

pytestmark = pytest.mark.usefixtures("one_thread", "auto")

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
