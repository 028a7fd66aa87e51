"""klfast.compat.verl's top-K distillation against verl's own."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from agreement_logits import differentiated, distinct_logits
from comparison import assert_close, same_numbers
from tensordict import TensorDict
from verl.trainer.distillation import losses
from verl.trainer.distillation.fsdp import losses as fsdp
from verl.utils import ulysses

import klfast
from klfast.compat import verl

WORDS = 300


def config(clamp=None, chunked=False, chunk=3):
    return SimpleNamespace(
        distillation_loss=SimpleNamespace(
            log_prob_min_clamp=clamp, use_chunked_topk=chunked, chunked_topk_chunk_size=chunk
        )
    )


def nested(rows, lengths=(3, 5)):
    """A tensor [N, K] as verl's nested tensor of two sequences."""
    return torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, *lengths]).cumsum(0))


def ours_of(logits, teacher, ids, options):
    return verl.compute_forward_kl_topk(logits, nested(teacher), nested(ids), options, "thd")


def batch(dtype, k=20):
    """(the student's logits [1, N, V], the teacher's log-probs and token ids [N, K])."""
    student, teacher = distinct_logits(8, WORDS, dtype=dtype)
    logprobs, ids = teacher.double().log_softmax(-1).topk(k)
    return student[None], logprobs.float(), ids


def of_verl(logits, teacher, ids, options):
    return fsdp.compute_forward_kl_topk(logits, nested(teacher), nested(ids), options, "thd")


def of_rows(logits, teacher, ids, options, form):
    """Verl's function on rows [1, N, K], which it takes as nested tensors."""
    given = (torch.nested.nested_tensor([*t], layout=torch.jagged) for t in (teacher, ids))
    return fsdp.compute_forward_kl_topk(logits, *given, options, form)


def chunked_rows(logits, teacher, ids, options, form):
    clamp = options.distillation_loss.log_prob_min_clamp
    return of_rows(logits, teacher, ids, config(clamp, chunked=True), form)


test_the_loss = same_numbers(verl, {"compute_forward_kl_topk": of_rows}, "verl top-k")
test_the_chunked_loss = same_numbers(verl, {"compute_forward_kl_topk": chunked_rows}, "verl top-k")


@pytest.mark.parametrize("clamp", [None, -10.0, -3.0])
def test_what_is_logged(clamp):
    student, teacher, ids = batch(torch.float32)
    mine, other, truth = (
        f(x, teacher, ids, config(clamp))
        for f, x in ((ours_of, student), (of_verl, student), (of_verl, student.double()))
    )
    assert [*mine] == [*other]
    assert torch.equal(mine["overlap_count"], truth["overlap_count"])
    for name in ("student_mass", "teacher_mass", "overlap_token_advantage"):
        assert not mine[name].requires_grad
        assert mine[name].shape == other[name].shape
        rounding = 4e-7 * (1 + truth[name].abs())
        off, theirs_is = ((each[name] - truth[name]).abs() for each in (mine, other))
        assert (off <= 2 * theirs_is + rounding).all(), name


def test_a_word_that_is_there_twice_counts_twice():
    """Such sequences pad a batch in verl: one token id, with log-probs of 0."""
    student, teacher, ids = batch(torch.float64, 3)
    teacher[2:5], ids[2:5] = 0.0, 7
    for clamp in (None, -10.0):
        ours, theirs = (
            differentiated(
                lambda x, f=f, c=clamp: f(x, teacher, ids, config(c))["distillation_losses"],
                student,
            )
            for f in (ours_of, of_verl)
        )
        assert_close(ours, theirs, check_dtype=False)  # verl converts its results to fp32


def test_a_rank_of_a_sequence_group_has_its_part(monkeypatch):
    student, teacher, ids = batch(torch.float64)
    for module in (ulysses, fsdp):
        monkeypatch.setattr(module, "get_ulysses_sequence_parallel_world_size", lambda: 2)
        monkeypatch.setattr(module, "slice_input_tensor", lambda x, dim: x[:, 4:])
    mine, other = (f(student[:, 4:], teacher, ids, config(-10.0)) for f in (ours_of, of_verl))
    for name, found in mine.items():
        torch.testing.assert_close(found, other[name], check_dtype=False)


def test_patch_reaches_the_engine_s_loss():
    student, teacher, ids = batch(torch.float32)
    actor = SimpleNamespace(strategy="fsdp")
    data = TensorDict({"teacher_logprobs": nested(teacher), "teacher_ids": nested(ids)}, [2])
    loss = partial(losses.compute_topk_loss, actor, config(-10.0), data, data_format="thd")
    before = fsdp.compute_forward_kl_topk
    theirs = loss(student_logits=student)
    with klfast.compat.patch("verl", strict=True):
        ours = loss(student_logits=student)
        expected = ours_of(student, teacher, ids, config(-10.0))
        for name, found in ours.items():
            assert torch.equal(found, expected[name])
            torch.testing.assert_close(found, theirs[name], rtol=1e-5, atol=1e-6)
    assert fsdp.compute_forward_kl_topk is before
