"""klfast.compat's distillation losses: values and gradients are the frameworks', more exactly.

The truth is ``frameworks_distillation`` in float64 on the stored logits, the tolerance what the
oracle allows a backend for each token's divergence, times the token's weight in the loss.
"""

import math
from functools import partial
from types import SimpleNamespace

import frameworks_distillation as theirs
import oracle
import oracle_logits
import pytest
import torch
from agreement_logits import leaves, random_logits, uneven
from refusals import NOT_NEGATIVE, POSITIVE

from klfast.compat import divergences, roll, skyrl, trl
from klfast.compat import ms_swift as swift

pytestmark = pytest.mark.usefixtures("one_thread", "auto")

NAN, INF = math.nan, math.inf
BETAS = [0, 0.1, 0.5, 0.9, 1]
VOCABULARIES = [1, 2, 3, 31, 257, 50257]
every_beta = pytest.mark.parametrize("beta", BETAS)
every_temperature = pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
every_vocabulary = pytest.mark.parametrize("words", VOCABULARIES)
DIRECTIONS = {0: "forward", 1: "reverse"}


def traced(test):
    """Importing all of dynamo warns, and it makes a Function object to trace an autograd.Function.

    The backend is the native one.
    """
    ignored = (
        "ignore:`torch.jit:DeprecationWarning",
        "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning",
    )
    for warning in ignored:
        test = pytest.mark.filterwarnings(warning)(test)
    return pytest.mark.parametrize("auto", ["native"], indirect=True)(test)


def labels_of(shape, kept):
    """Labels of words, but for -100 where none is kept."""
    keep = {"all": torch.ones(shape), "none": torch.zeros(shape)}.get(kept)
    if keep is None:
        keep = torch.rand(shape) < 0.6
        keep.view(-1)[:2] = torch.tensor([True, False])
    return torch.where(keep != 0, 1, theirs.IGNORED)


def assert_loss(
    ours, student, teacher, b, weights, *, temperature=1.0, per_token=False, formula=None,
    to_teacher=True, extra=0.0, entropy=False,
):  # fmt: skip
    """``ours(student, teacher)`` and its gradients are the formula's.

    ``extra``: by how much else a token may be off; ``entropy``: the value has the teacher's too.
    """
    formula = formula or partial(theirs.interpolated, b=b, temperature=temperature)
    inputs, doubles = leaves(student, teacher), leaves(student.double(), teacher.double())
    if not to_teacher:
        inputs, doubles = ((s, t.detach()) for s, t in (inputs, doubles))
    result, values = ours(*inputs), formula(*doubles)
    masked = torch.where(weights != 0, values * weights, 0.0)
    truth = masked if per_token else masked.sum()
    upstream = uneven(truth).double() if per_token else torch.tensor(1.75, dtype=torch.float64)

    allowed = oracle_logits.kl_divergence(
        student,
        teacher,
        weights != 0,
        direction=DIRECTIONS.get(b, "jsd"),
        jsd_beta=0.5 if b in DIRECTIONS else b,
        temperature=temperature,
        upstream=(weights * upstream, None, None),
    )
    dtype = oracle.arithmetic_dtype(student, teacher)
    off = allowed.result_tolerance + 32 * oracle.unit_roundoff(dtype) * values.detach().abs()
    if entropy:
        ids = torch.zeros(weights.shape, dtype=torch.int64)
        off += oracle_logits.token_logprobs(teacher, ids, weights != 0).entropy_tolerance
    off = torch.where(weights != 0, (off + extra) * weights.abs(), 0.0)
    assert result.dtype == dtype
    oracle.assert_within(result, truth.detach(), off if per_token else off.sum(), "value")

    wanted = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad(result, wanted, upstream.to(dtype))
    expected = torch.autograd.grad(truth, doubles[: len(wanted)], upstream)
    tolerances = (allowed.grad_tolerance, allowed.grad_ref_tolerance)
    for grad, x, exact, tolerance in zip(grads, wanted, expected, tolerances, strict=False):
        assert grad.dtype == x.dtype
        around = extra * (weights * upstream).abs().unsqueeze(-1)
        oracle.assert_within(grad, exact, tolerance + around, "gradient")


# TRL's GKD

SHAPES = [(2, 3), (5,)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=["[B, T, V]", "[N, V]"])
every_kept = pytest.mark.parametrize("kept", [None, "all", "some", "none"])
REDUCTIONS = {
    "batchmean": {"reduction": "batchmean"},
    "sum": {"reduction": "sum"},
    "mean": {"reduction": "mean"},
    "number": {"num_items_in_batch": 7, "reduction": "sum"},
    "number-tensor": {"num_items_in_batch": torch.tensor(7), "reduction": "none"},
}
every_reduction = pytest.mark.parametrize("options", REDUCTIONS.values(), ids=REDUCTIONS)


@pytest.mark.grid
@every_reduction
@every_kept
@every_shape
@every_beta
def test_gkd_reduces_as_trl(beta, shape, kept, options):
    student, teacher = random_logits(*shape, 37)
    labels = None if kept is None else labels_of(shape, kept)
    weights = theirs.gkd_weights(shape, 37, labels, **options)
    ours = partial(trl.generalized_jsd_loss, labels=labels, beta=beta, **options)
    assert_loss(ours, student, teacher, beta, weights)


@pytest.mark.grid
@every_dtype
@every_temperature
@every_beta
def test_gkd_of_temperatures_and_dtypes(beta, temperature, dtype):
    student, teacher = random_logits(2, 3, 45, dtype=dtype)
    labels = labels_of((2, 3), "some")
    weights = theirs.gkd_weights((2, 3), 45, labels)
    ours = partial(trl.generalized_jsd_loss, labels=labels, beta=beta, temperature=temperature)
    assert_loss(ours, student, teacher, beta, weights, temperature=temperature)


@pytest.mark.grid
@every_vocabulary
@every_beta
def test_gkd_of_vocabularies(beta, words):
    student, teacher = random_logits(1, 2, words)
    weights = theirs.gkd_weights((1, 2), words)
    assert_loss(partial(trl.generalized_jsd_loss, beta=beta), student, teacher, beta, weights)


def test_gkd_s_defaults():
    student, teacher = random_logits(2, 3, 11)
    default = trl.generalized_jsd_loss(student, teacher)
    said = trl.generalized_jsd_loss(student, teacher, None, 0.5, 1.0, "batchmean", None)
    assert torch.equal(default, said)
    assert_loss(trl.generalized_jsd_loss, student, teacher, 0.5, torch.full((2, 3), 0.5).double())


def test_gkd_of_models_of_two_dtypes():
    student, teacher = random_logits(2, 3, 11, dtype=torch.bfloat16, ref_dtype=torch.float32)
    weights = theirs.gkd_weights((2, 3), 11)
    assert_loss(trl.generalized_jsd_loss, student, teacher, 0.5, weights)


def test_gkd_of_shifted_logits_as_trl_s_trainer_slices_them():
    student, teacher = random_logits(2, 4, 11)
    labels = labels_of((2, 4), "some")[:, 1:]
    ours = partial(trl.generalized_jsd_loss, labels=labels)
    sliced = ours(student[:, :-1], teacher[:, :-1])
    assert torch.equal(sliced, ours(student[:, :-1].contiguous(), teacher[:, :-1].contiguous()))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,)], ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean"])
def test_gkd_of_no_tokens_is_zero(reduction, shape):
    student, teacher = torch.zeros(2, *shape, 7)
    assert trl.generalized_jsd_loss(student, teacher, reduction=reduction) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "none"}, "reduction must be 'batchmean', 'sum' or 'mean'.*got 'none'"),
        ({"reduction": "token-mean"}, "reduction must be .*got 'token-mean'"),
        ({"beta": 1.1}, "beta must be a number between 0 and 1, got 1.1"),
        ({"beta": -0.1}, f"beta {NOT_NEGATIVE}, got -0.1"),
        ({"beta": NAN}, f"beta {NOT_NEGATIVE}, got nan"),
        ({"temperature": 0.0}, f"temperature {POSITIVE}, got 0.0"),
        ({"num_items_in_batch": 0}, f"num_items_in_batch {POSITIVE}, got 0"),
        ({"num_items_in_batch": torch.tensor(0)}, "num_items_in_batch must be .* > 0, got 0"),
        ({"num_items_in_batch": torch.ones(1)}, r"num_items_in_batch must be .* shape \[1\]"),
        ({"labels": torch.zeros(2, 4)}, r"labels must have .*\[2, 3\], got \[2, 4\]"),
        ({"teacher_logits": torch.zeros(2, 3, 8)}, r"teacher_logits must .*got \[2, 3, 8\]"),
        ({"teacher_logits": torch.zeros(2, 1, 7)}, r"teacher_logits must .*got \[2, 1, 7\]"),
    ],
    ids=str,
)
def test_gkd_s_errors_name_trl_s_arguments(change, message):
    arguments = {"student_logits": torch.zeros(2, 3, 7), "teacher_logits": torch.zeros(2, 3, 7)}
    with pytest.raises(ValueError, match=message):
        trl.generalized_jsd_loss(**{**arguments, **change})


# TRL's SDFT and SDPO


@pytest.mark.grid
@every_dtype
@every_beta
def test_self_distillation_from_logits(beta, dtype):
    student, teacher = random_logits(2, 3, 37, dtype=dtype)
    ours = partial(trl.compute_full_logit_self_distillation_loss, distillation_alpha=beta)
    assert_loss(ours, student, teacher, beta, torch.ones(2, 3).double(), per_token=True)


@pytest.mark.grid
@every_vocabulary
@every_beta
def test_self_distillation_of_vocabularies(beta, words):
    student, teacher = random_logits(2, words)
    ours = partial(trl.compute_full_logit_self_distillation_loss, distillation_alpha=beta)
    assert_loss(ours, student, teacher, beta, torch.ones(2).double(), per_token=True)


@every_beta
def test_self_distillation_under_a_mask_of_weights(beta):
    student, teacher = random_logits(2, 3, 11)
    mask = torch.tensor([[1, 0, 2], [0.5, 1, 0]])
    for rows in (student, teacher):
        rows[mask == 0] = NAN
    ours = partial(
        trl.compute_full_logit_self_distillation_loss, distillation_alpha=beta, mask=mask
    )
    value = ours(*leaves(student, teacher))
    assert (value[mask == 0] == 0).all()
    unhurt = [torch.where(mask[..., None] == 0, 0.0, rows) for rows in (student, teacher)]
    assert_loss(ours, *unhurt, beta, mask.double(), per_token=True)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("of_logprobs", [False, True], ids=["logits", "log-probs"])
def test_self_distillation_of_any_shape(of_logprobs, shape):
    student, teacher = random_logits(*shape, 9)
    if of_logprobs:
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
        ours = partial(trl.compute_divergence, alpha=0.3)
    else:
        ours = partial(trl.compute_full_logit_self_distillation_loss, distillation_alpha=0.3)
    flat = ours(student.reshape(-1, 9), teacher.reshape(-1, 9))
    assert torch.equal(ours(student, teacher), flat.reshape(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_beta
def test_divergences_of_log_probs_are_those_of_the_distributions(beta, dtype):
    student, teacher = (x.log_softmax(-1).to(dtype) for x in random_logits(2, 3, 37))
    ours = partial(trl.compute_divergence, alpha=beta)
    assert_loss(ours, student, teacher, beta, torch.ones(2, 3).double(), per_token=True)


FEW = {
    "whole vocabulary": lambda x, indices: x.log_softmax(-1),
    "few, renormalised": partial(theirs.likeliest, with_tail=False),
    "few and a tail": partial(theirs.likeliest, with_tail=True),
}


@pytest.mark.parametrize("logprobs_of", FEW.values(), ids=FEW)
@every_beta
def test_the_gradient_of_log_probs_is_trl_s_at_the_logits(beta, logprobs_of):
    student, teacher = leaves(*random_logits(4, 23, dtype=torch.float64))
    indices = student.detach().topk(5).indices

    def differentiated(divergence):
        value = divergence(*(logprobs_of(x, indices) for x in (student, teacher)), beta)
        return value.detach(), *torch.autograd.grad(value.sum(), (student, teacher))

    results = differentiated(trl.compute_divergence)
    expected = differentiated(theirs.interpolated_of_logprobs)
    for result, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-12, atol=1e-13)


def test_self_distillation_s_errors_name_trl_s_arguments():
    few, many = torch.zeros(2, 3), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"teacher_log_probs must have .*\[2, 3\], got \[2, 4\]"):
        trl.compute_divergence(few, many, 0.5)
    with pytest.raises(ValueError, match="alpha must be a number between 0 and 1, got 2"):
        trl.compute_divergence(few, few, 2)
    full = trl.compute_full_logit_self_distillation_loss
    with pytest.raises(ValueError, match=r"teacher_logits must have .*\[2, 3\], got \[2, 4\]"):
        full(few, many, distillation_alpha=0.5)
    with pytest.raises(ValueError, match=f"distillation_alpha {NOT_NEGATIVE}, got -1"):
        full(few, few, distillation_alpha=-1)
    with pytest.raises(ValueError, match=r"mask must have .*\[2\], got \[3\]"):
        full(few, few, distillation_alpha=0.5, mask=torch.ones(3))


# ms-swift


def teacher_output(full_logits=None, labels=None, topk_logprobs=None, topk_indices=None):
    """ms-swift's ``TeacherOutput``, as far as klfast asks for it."""
    return SimpleNamespace(
        full_logits=full_logits,
        labels=labels,
        topk_logprobs=topk_logprobs,
        topk_indices=topk_indices,
    )


def gkd(student, teacher, labels, beta, temperature=1.0, teacher_labels=None):
    """ms-swift's loss of full logits, without the number of tokens, which is checked."""
    output = teacher_output(teacher, teacher_labels)
    loss, number = swift.gkd_loss(student, output, labels, beta, temperature)
    assert number.dtype == torch.int64
    assert number == (labels != theirs.IGNORED).sum()
    return loss


@pytest.mark.grid
@every_dtype
@every_beta
def test_swift_s_jsd_loss_is_a_sum(beta, dtype):
    student, teacher = random_logits(5, 37, dtype=dtype)
    ours = partial(swift.jsd_loss, beta=beta)
    assert_loss(ours, student, teacher, beta, torch.ones(5).double())


@pytest.mark.grid
@pytest.mark.parametrize("kept", ["all", "some", "none"])
@every_temperature
@every_beta
def test_swift_s_gkd_loss_of_a_full_vocabulary(beta, temperature, kept):
    student, teacher = random_logits(2, 3, 37)
    labels = labels_of((2, 3), kept)
    weights = (labels != theirs.IGNORED).double()
    ours = partial(gkd, labels=labels, beta=beta, temperature=temperature)
    assert_loss(ours, student, teacher, beta, weights, temperature=temperature)
    same = partial(ours, teacher_labels=labels.clone())
    assert torch.equal(same(student, teacher), ours(student, teacher))


@pytest.mark.grid
@pytest.mark.parametrize("words", [1, 36, 38, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_beta
def test_swift_fills_up_the_narrower_vocabulary(beta, words, dtype):
    """Against the filled-up logits: of each model's gradient, what goes through the filling too."""
    student, _ = random_logits(2, 3, 37, dtype=dtype)
    teacher, _ = random_logits(2, 3, words, dtype=dtype)
    labels = labels_of((2, 3), "some")
    value, *grads = _with_gradients(partial(gkd, labels=labels, beta=beta), student, teacher)
    keep = (labels != theirs.IGNORED).double()

    def truth(student, teacher):
        return theirs.total(theirs.interpolated(*theirs.filled_up(student, teacher), beta), keep)

    expected, *exact = _with_gradients(truth, student.double(), teacher.double())
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    for grad, of, true in zip(grads, (student, teacher), exact, strict=True):
        assert grad.dtype == of.dtype
        torch.testing.assert_close(grad.double(), true, **close)


def _with_gradients(function, *tensors):
    inputs = leaves(*tensors)
    value = function(*inputs)
    return value.detach(), *torch.autograd.grad(value, inputs)


@pytest.mark.parametrize("length", [3, 4])
@every_beta
def test_swift_s_teacher_may_have_its_tokens_elsewhere(beta, length):
    """OPSD: another prompt, the same answer; token by token in order."""
    student, teacher = random_logits(2, 3, 11)[0], random_logits(2, length, 11)[0]
    labels = torch.tensor([[-100, 1, 1], [-100, -100, 1]])
    teacher_labels = torch.full((2, length), -100)
    teacher_labels[0, 0] = teacher_labels[1, 1] = teacher_labels[1, 2] = 1
    ours = partial(gkd, labels=labels, beta=beta, teacher_labels=teacher_labels)
    value, grad, grad_teacher = _with_gradients(ours, student, teacher)
    pairs = student[labels > 0], teacher[teacher_labels > 0]
    rows, row_grad, row_grad_teacher = _with_gradients(partial(swift.jsd_loss, beta=beta), *pairs)
    assert torch.equal(value, rows)
    assert torch.equal(grad[labels > 0], row_grad)
    assert torch.equal(grad_teacher[teacher_labels > 0], row_grad_teacher)
    assert grad[labels < 0].count_nonzero() == grad_teacher[teacher_labels < 0].count_nonzero() == 0


@pytest.mark.grid
@pytest.mark.parametrize("gather_fn", [None, lambda x, at: x.gather(-1, at)], ids=["own", "given"])
@every_temperature
@every_beta
def test_swift_s_gkd_loss_of_a_few_words(beta, temperature, gather_fn):
    student, teacher = random_logits(2, 3, 37)
    logprobs, indices = teacher.log_softmax(-1).topk(4)
    labels = torch.tensor([[1, -100, 1], [1, 1, -100]])
    logprobs[1, 0] = -INF  # the teacher has nothing for this token
    indices[0, 1] = -1  # nor does padding name a word
    logprobs[0, 1] = NAN
    weights = torch.tensor([[1, 0, 1], [0, 1, 0]]).double()
    output = teacher_output(topk_logprobs=logprobs, topk_indices=indices)

    def ours(student, _):
        loss, number = swift.gkd_loss(
            student, output, labels, beta, temperature, gather_fn, print, print
        )
        assert number == 3
        return loss

    def few(student, _):
        words = student.gather(-1, indices.clamp(min=0))
        return theirs.interpolated(words, logprobs.double(), beta, temperature)

    value, grad = _with_gradients(lambda x: ours(x, None), student)
    truth, expected = _with_gradients(
        lambda x: theirs.total(few(x, None), weights), student.double()
    )
    torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-7)
    kept = weights != 0
    torch.testing.assert_close(grad[kept].double(), expected[kept], rtol=1e-5, atol=1e-7)
    assert grad[~kept].count_nonzero() == 0


def test_swift_s_few_words_come_before_full_logits():
    student, teacher = random_logits(1, 2, 7)
    logprobs, indices = teacher.log_softmax(-1).topk(3)
    labels = torch.ones(1, 2)
    few = teacher_output(topk_logprobs=logprobs, topk_indices=indices)
    both = teacher_output(teacher, topk_logprobs=logprobs, topk_indices=indices)
    assert torch.equal(*(swift.gkd_loss(student, t, labels, 0.5, 1.0)[0] for t in (few, both)))


def test_swift_s_errors_say_what_klfast_does_not_do():
    logits, labels = torch.zeros(2, 3, 7), torch.ones(2, 3)
    full = teacher_output(logits)
    call = partial(swift.gkd_loss, logits, labels=labels, beta=0.5, temperature=1.0)
    for function in ("log_softmax_fn", "kl_div_fn"):
        with pytest.raises(ValueError, match=r"must be None: .* not of their shards"):
            call(full, **{function: print})
        with pytest.raises(ValueError, match=r"must be None: .* not of their shards"):
            swift.jsd_loss(logits[0], logits[0], 0.5, **{function: print})
    with pytest.raises(ValueError, match="must have full_logits, or topk_logprobs and topk_indice"):
        call(teacher_output(topk_logprobs=logits))
    fewer = torch.tensor([[1, 1, -100], [1, 1, 1]])
    with pytest.raises(ValueError, match="must keep as many tokens as labels, 6, got 5"):
        call(teacher_output(logits, fewer))
    with pytest.raises(ValueError, match=r"t_logits must have .*\[3, 7\], got \[3, 8\]"):
        swift.jsd_loss(logits[0], torch.zeros(3, 8), 0.5)
    with pytest.raises(ValueError, match=r"teacher_output must have .*\[2, 3, 7\], got \[2, 4, 7"):
        call(teacher_output(torch.zeros(2, 4, 7)))
    with pytest.raises(ValueError, match="beta must be a number between 0 and 1, got 3"):
        swift.gkd_loss(logits, full, labels, 3, 1.0)


# ROLL

OBJECTIVES = {"forward_kl": 0, "reverse_kl": 1, "js_divergence": 0.5}
METHODS = {
    "forward_kl": "compute_forward_kl_divergence",
    "reverse_kl": "compute_reverse_kl_divergence",
    "js_divergence": "compute_js_divergence",
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


def various(objective, temperature=1.0):
    return roll.VariousDivergence(
        SimpleNamespace(kd_objective=objective, kd_temperature=temperature)
    )


def inputs_of_roll(*shape, temperature=1.0, dtype=torch.float32):
    """(logits, the teacher's log-probs of softmax(teacher logits / temperature))."""
    logits, teacher = random_logits(*shape, dtype=dtype)
    logprobs = (teacher.double() / temperature).log_softmax(-1)
    return logits, logprobs.to(torch.promote_types(dtype, torch.float32))


@pytest.mark.grid
@every_dtype
@every_temperature
@every_objective
def test_roll_s_divergences(objective, temperature, dtype):
    logits, logprobs = inputs_of_roll(2, 3, 37, temperature=temperature, dtype=dtype)
    loss = various(objective, temperature)
    _assert_roll(loss, logits, logprobs, objective, temperature)
    method = getattr(loss, METHODS[objective])
    _assert_roll(method, logits, logprobs, objective, temperature)


def _assert_roll(loss, logits, logprobs, objective, temperature=1.0):
    teacher = temperature * logprobs.double()  # logits whose softmax over the temperature it is
    unit = oracle.unit_roundoff(oracle.arithmetic_dtype(logits, logprobs))
    rounded = 4 * unit * logprobs.double().abs().amax()  # the product with the temperature
    smooth = logits.shape[-1] * 4e-9 if objective == "js_divergence" else 0.0

    def formula(student, _):
        return theirs.roll(student, logprobs.double().softmax(-1), objective, temperature)

    assert_loss(
        lambda student, _: loss(student, logprobs.softmax(-1), logprobs, logprobs.isinf()),
        logits,
        teacher.to(logprobs.dtype),
        OBJECTIVES[objective],
        torch.ones(logits.shape[:-1]).double(),
        temperature=temperature,
        per_token=True,
        formula=formula,
        to_teacher=False,
        extra=rounded + smooth,
    )


@every_vocabulary
@every_objective
def test_roll_s_divergences_of_vocabularies(objective, words):
    logits, logprobs = inputs_of_roll(1, 2, words)
    _assert_roll(various(objective), logits, logprobs, objective)


WEIGHTS = {"mean": lambda keep: keep / keep.sum().clamp(min=1), "sum": lambda keep: keep}


@pytest.mark.grid
@pytest.mark.parametrize("by", ["labels", "attention_mask"])
@pytest.mark.parametrize("kept", ["all", "some", "none"])
@pytest.mark.parametrize("few", [False, True], ids=["whole vocabulary", "four words"])
@pytest.mark.parametrize("reduction", WEIGHTS)
@every_objective
def test_roll_s_op_reduces(objective, reduction, few, kept, by):
    logits, teacher = random_logits(2, 3, 37)
    labels = labels_of((2, 3), kept)
    keep = (labels != theirs.IGNORED).double()
    logprobs, indices = teacher.topk(4) if few else (teacher, None)
    logprobs = logprobs.log_softmax(-1)
    masks = (labels, None) if by == "labels" else (None, keep.long())
    if few:
        indices[keep == 0] = -1

    def ours(student, _):
        loss, number = roll.op_compute_various_divergence(
            various(objective), student, None, logprobs, indices, None, *masks, reduction
        )
        assert number.dtype == torch.float32
        assert number == keep.sum()
        return loss

    def formula(student):
        words = student.gather(-1, indices.clamp(min=0)) if few else student
        values = theirs.roll(words, logprobs.double().softmax(-1), objective, 1.0)
        return theirs.total(values, WEIGHTS[reduction](keep))

    value, grad = _with_gradients(lambda x: ours(x, None), logits)
    truth, expected = _with_gradients(formula, logits.double())
    torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-7)


def test_roll_s_op_without_a_reduction_is_per_token_and_unmasked():
    logits, logprobs = inputs_of_roll(2, 3, 11)
    loss = various("reverse_kl")
    rows, number = roll.op_compute_various_divergence(
        loss, logits, None, logprobs, None, None, torch.full((2, 3), -100), reduction="none"
    )
    assert torch.equal(rows, loss(logits, None, logprobs))
    assert number == 0


@every_objective
def test_roll_s_teacher_gets_no_gradient(objective):
    logits, logprobs = leaves(*inputs_of_roll(2, 11))
    various(objective)(logits, logprobs.softmax(-1), logprobs).sum().backward()
    assert logits.grad.isfinite().all()
    assert logprobs.grad is None


def test_without_its_mask_words_that_roll_leaves_out_have_their_value_here():
    logits, logprobs = inputs_of_roll(3, 11)
    logits[0, 4] = logprobs[1, 4] = -INF  # excluded by the student, by the teacher, by both
    logits[2, 4] = logprobs[2, 4] = -INF
    forward, reverse, js = (various(name)(logits, None, logprobs) for name in OBJECTIVES)
    assert forward[0] == reverse[1] == INF
    for value in (forward[1:], reverse[::2], js):
        assert value.isfinite().all()


def padded_teacher(*shape, temperature, dtype):
    """(logits, the teacher's log-probs, which of them are -inf).

    The vocabulary is padded; the teacher has one word of token [0, 0], and none of token [1, 1].
    """
    logits, teacher = random_logits(*shape, dtype=dtype)
    teacher[..., -5:] = -INF
    teacher[0, 0, 1:] = -INF
    teacher[1, 1] = -INF
    excluded = teacher == -INF
    return logits, (teacher / temperature).log_softmax(-1), excluded


TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.mark.grid
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@every_temperature
@every_objective
def test_roll_leaves_out_the_words_that_its_mask_excludes(objective, temperature, dtype):
    arithmetic = torch.promote_types(dtype, torch.float32)
    logits, logprobs, excluded = padded_teacher(2, 3, 37, temperature=temperature, dtype=arithmetic)
    logits = logits.to(dtype)
    probs = logprobs.double().exp().nan_to_num(0)
    upstream = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.5, 0.25]]).to(arithmetic)

    def differentiated(divergence, logits):
        (logits,) = leaves(logits)
        value = divergence(logits)
        return value.detach(), *torch.autograd.grad(value, logits, upstream.to(value.dtype))

    expected = differentiated(
        lambda x: theirs.roll(x, probs, objective, temperature, excluded), logits.double()
    )
    loss = various(objective, temperature)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    if objective == "js_divergence":
        close["atol"] += 37 * 4e-9  # ROLL's 1e-9 in logarithms
    for function in (loss, getattr(loss, METHODS[objective])):
        value, grad = differentiated(lambda x, f=function: f(x, None, logprobs, excluded), logits)
        assert value.dtype == arithmetic
        assert value[1, 1] == 0
        assert grad[1, 1].count_nonzero() == 0
        for result, truth in zip((value, grad), expected, strict=True):
            torch.testing.assert_close(result.double(), truth, **close)


def test_roll_s_mask_by_hand():
    """The student's probabilities are (1/2, 1/4, 1/4), the teacher's (1/2, 1/2, 0)."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    logprobs = torch.tensor([[0.5, 0.5, 0.0]]).log()
    two, three = math.log(2), math.log(3)
    of_mixture = (0.5 * (2 * two - three) + 0.25 * (two - three)) / 2  # m = 3/8 at the second word
    exact = {"forward_kl": 0.5 * two, "reverse_kl": -0.25 * two, "js_divergence": of_mixture}
    for objective, value in exact.items():
        result = various(objective)(logits, None, logprobs, logprobs.isinf())
        torch.testing.assert_close(result, torch.tensor([value]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("excluded", [1e-6, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-6])
def test_roll_s_reverse_kl_has_its_digits_whatever_the_student_gives_excluded_words(excluded):
    each = (1 - excluded) / 2
    logits = torch.tensor([[each, each, excluded]], dtype=torch.float64).log().float()
    logprobs = torch.tensor([[0.5, 0.5, 0.0]]).log()
    mask = logprobs == -INF
    halves = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    truth = theirs.roll(logits.double(), halves, "reverse_kl", 1.0, mask)
    value = various("reverse_kl")(logits, None, logprobs, mask)
    torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "mask", [None, torch.zeros(2, 3, 11, dtype=torch.bool)], ids=["none", "empty"]
)
@every_objective
def test_a_mask_that_excludes_nothing_changes_nothing(objective, mask):
    logits, logprobs = inputs_of_roll(2, 3, 11)
    loss = various(objective)
    assert torch.equal(loss(logits, None, logprobs, mask), loss(logits, None, logprobs))


@pytest.mark.parametrize("few", [False, True], ids=["whole vocabulary", "four words"])
@pytest.mark.parametrize("reduction", [*WEIGHTS, "none"])
@every_objective
def test_roll_s_op_leaves_out_the_words_that_its_mask_excludes(objective, reduction, few):
    logits, logprobs, excluded = padded_teacher(2, 3, 7, temperature=1.0, dtype=torch.float32)
    labels = torch.tensor([[1, 1, 1], [-100, 1, 1]])
    keep = (labels != theirs.IGNORED).double()
    indices = None
    if few:
        logprobs, indices = logprobs.nan_to_num(-INF, neginf=-INF).topk(4)
        excluded = logprobs == -INF
        logprobs = logprobs.log_softmax(-1)
    if reduction != "none":
        logits[1, 0] = NAN

    def ours(logits):
        return roll.op_compute_various_divergence(
            various(objective), logits, None, logprobs, indices, excluded, labels, None, reduction
        )[0]

    def formula(logits):
        words = logits if indices is None else logits.gather(-1, indices)
        probs = logprobs.double().exp().nan_to_num(0)
        values = theirs.roll(words, probs, objective, 1.0, excluded)
        return values if reduction == "none" else theirs.total(values, WEIGHTS[reduction](keep))

    result = ours(*leaves(logits))
    torch.testing.assert_close(
        result.detach().double(), formula(logits.double()), rtol=1e-5, atol=2e-7
    )
    if reduction != "none":
        (x,) = leaves(logits)
        ours(x).backward()
        clean = torch.where(logits.isnan(), 0.0, logits).double()
        (exact,) = leaves(clean)
        formula(exact).backward()
        torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=2e-7)


@traced
@every_objective
def test_roll_s_mask_under_torch_compile(objective):
    logits, logprobs, excluded = padded_teacher(2, 3, 11, temperature=1.0, dtype=torch.float32)
    loss = various(objective)
    eager = loss(logits, None, logprobs, excluded)
    compiled = torch.compile(
        lambda *x: loss(x[0], None, *x[1:]), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(logits, logprobs, excluded), eager, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("objective", ["adaptive_kl", "skewed_forward_kl", "skewed_reverse_kl"])
def test_roll_s_other_objectives_are_refused(objective):
    known = "'forward_kl', 'reverse_kl', 'js_divergence'"
    with pytest.raises(ValueError, match=f"unknown kd_objective '{objective}'; .* one of {known}"):
        various(objective)


def test_roll_s_errors():
    logits, logprobs = inputs_of_roll(2, 3, 11)
    loss, labels = various("forward_kl"), torch.ones(2, 3)
    op = roll.op_compute_various_divergence
    with pytest.raises(ValueError, match=r"teacher_log_probs must have .*11\], got \[2, 3, 10\]"):
        loss(logits, None, logprobs[..., :-1])
    with pytest.raises(ValueError, match=r"teacher_inf_mask must have .*11\], got \[2, 3, 1\]"):
        loss(logits, None, logprobs, torch.zeros(2, 3, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="unknown reduction 'batchmean'; expected one of 'mean'"):
        op(loss, logits, None, logprobs, None, None, labels, reduction="batchmean")
    with pytest.raises(ValueError, match="labels or attention_mask must be given, got neither"):
        op(loss, logits, None, logprobs, None, None, None)
    with pytest.raises(
        TypeError, match=r"loss_callable must be a klfast.*VariousDivergence, got bui"
    ):
        op(print, logits, None, logprobs, None, None, labels)


# SkyRL


@pytest.mark.grid
@pytest.mark.parametrize("factor", [None, 9, torch.tensor(9.0), torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_skyrl_s_soft_cross_entropy(chunk_size, scale, factor):
    student, teacher = random_logits(2, 3, 37)
    mask = scale * (labels_of((2, 3), "some") > 0).float()
    _assert_draft(student, teacher, mask, factor, chunk_size=chunk_size)


def _assert_draft(student, teacher, mask, factor=None, **options):
    ours = partial(skyrl.draft_soft_ce, mask=mask, global_normalization_factor=factor, **options)
    weights = theirs.draft_weights(mask, factor)
    formula = theirs.soft_cross_entropy
    assert_loss(ours, student, teacher, 0, weights, formula=formula, to_teacher=False, entropy=True)


@every_dtype
def test_skyrl_s_soft_cross_entropy_of_dtypes(dtype):
    _assert_draft(*random_logits(2, 3, 37, dtype=dtype), torch.ones(2, 3))


@every_vocabulary
def test_skyrl_s_soft_cross_entropy_of_vocabularies(words):
    _assert_draft(*random_logits(1, 2, words), torch.tensor([[True, True]]))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("k", [1, 3, 1000])
def test_skyrl_s_soft_cross_entropy_of_a_few_words(k, shift):
    student, teacher = random_logits(2, 4, 37)
    mask = torch.tensor([[1.0, 1, 0, 0], [0, 1, 1, 0]])
    ours = partial(
        skyrl.draft_soft_ce_topk, teacher_logits=teacher, mask=mask, k=k, roll_shift=shift
    )

    def truth(student):
        values, indices = teacher.roll(-shift, 1).double().topk(min(k, 37))
        few = theirs.soft_cross_entropy(student.gather(-1, indices), values)
        return theirs.total(few, theirs.draft_weights(mask))

    value, grad = _with_gradients(ours, student)
    expected, exact = _with_gradients(truth, student.double())
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=1e-7)


def test_skyrl_s_tokens_are_counted_exactly_in_bf16():
    student, teacher = random_logits(1, 1, 5)
    student, teacher = (x.expand(1, 999, 5) for x in (student, teacher))
    ours = partial(skyrl.draft_soft_ce, student, teacher)
    assert torch.equal(ours(torch.ones(1, 999).bfloat16()), ours(torch.ones(1, 999)))
    assert torch.ones(1, 999).bfloat16().sum().item() == 1000


def test_skyrl_s_errors(monkeypatch):
    student, teacher, mask = torch.zeros(2, 3, 7), torch.zeros(2, 3, 7), torch.ones(2, 3)
    for loss in (skyrl.draft_soft_ce, partial(skyrl.draft_soft_ce_topk, k=2)):
        with pytest.raises(ValueError, match="teacher_logits must be detached"):
            loss(student, teacher.clone().requires_grad_(), mask)
        with pytest.raises(ValueError, match=r"teacher_logits must have .*7\], got \[2, 3, 8\]"):
            loss(student, torch.zeros(2, 3, 8), mask)
        with pytest.raises(ValueError, match=r"mask must have .*\[2, 3\], got \[3\]"):
            loss(student, teacher, torch.ones(3))
        group = object()
        monkeypatch.setattr(torch.distributed, "get_world_size", {group: 1}.get)
        assert loss(student, teacher, mask, vocab_parallel_group=group).isfinite()
        monkeypatch.setattr(torch.distributed, "get_world_size", {group: 4}.get)
        with pytest.raises(ValueError, match=r"vocab_parallel_group must be None .*, got one of 4"):
            loss(student, teacher, mask, vocab_parallel_group=group)


# All of them


def _roll_loss(objective):
    def loss(student, teacher, labels):
        logprobs = teacher.log_softmax(-1)
        op = roll.op_compute_various_divergence
        return op(various(objective), student, None, logprobs, None, None, labels)[0]

    return loss


LOSSES = {
    **{
        f"trl-{beta}": partial(
            lambda student, teacher, labels, beta: trl.generalized_jsd_loss(
                student, teacher, labels, beta
            ),
            beta=beta,
        )
        for beta in BETAS
    },
    **{f"swift-{beta}": partial(gkd, beta=beta) for beta in BETAS},
    **{f"roll-{objective}": _roll_loss(objective) for objective in OBJECTIVES},
    "skyrl": lambda student, teacher, labels: skyrl.draft_soft_ce(
        student, teacher.detach(), (labels > 0).float()
    ),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@pytest.mark.grid
@every_loss
@pytest.mark.parametrize("garbage", [NAN, INF], ids=str)
def test_garbage_under_the_labels_stays_there(loss, garbage):
    student, teacher = random_logits(2, 3, 11)
    labels = labels_of((2, 3), "some")
    gone = (labels == theirs.IGNORED)[..., None]
    clean, clean_grad = _with_gradients(lambda x: loss(x, teacher, labels), student)
    student, teacher = (torch.where(gone, garbage, x) for x in (student, teacher))
    dirty, grad = _with_gradients(lambda x: loss(x, teacher, labels), student)
    assert torch.equal(dirty, clean)
    assert torch.equal(grad, clean_grad)
    assert grad[gone[..., 0]].count_nonzero() == 0


@every_loss
def test_if_nothing_is_kept_value_and_gradient_are_zero(loss):
    student, teacher = random_logits(2, 3, 11)
    labels = labels_of((2, 3), "none")
    value, grad = _with_gradients(lambda x: loss(x, teacher, labels), student)
    assert value == 0
    assert grad.count_nonzero() == 0


ZERO = {name: loss for name, loss in LOSSES.items() if not name.startswith(("skyrl", "roll"))}


@pytest.mark.grid
@pytest.mark.parametrize("auto", ["native"], indirect=True)
@pytest.mark.parametrize("words", [2, 1000])
@every_dtype
@pytest.mark.parametrize("loss", ZERO.values(), ids=ZERO)
def test_of_equal_logits_it_is_exactly_zero(loss, dtype, words):
    student, _ = random_logits(2, 3, words, dtype=dtype)
    assert loss(student, student.clone(), labels_of((2, 3), "all")) == 0


@pytest.mark.parametrize("auto", ["native"], indirect=True)
@every_objective
def test_of_equal_log_probs_roll_s_are_exactly_zero(objective):
    _, logprobs = inputs_of_roll(3, 37)
    assert (various(objective)(logprobs, None, logprobs) == 0).all()
    assert (trl.compute_divergence(logprobs, logprobs, OBJECTIVES[objective]) == 0).all()


@pytest.mark.parametrize("name", [name for name in LOSSES if name.startswith(("trl", "swift"))])
def test_a_word_that_neither_says_adds_nothing(name):
    student, teacher = random_logits(2, 3, 11)
    labels = labels_of((2, 3), "all")
    few = [x[..., torch.arange(11) != 4] for x in (student, teacher)]
    student[..., 4] = teacher[..., 4] = -INF
    beta = float(name.partition("-")[2])
    assert theirs.interpolated(student, teacher, beta).isnan().all()
    torch.testing.assert_close(
        LOSSES[name](student, teacher, labels), LOSSES[name](*few, labels), rtol=1e-5, atol=1e-7
    )


READ_ONCE = {name: loss for name, loss in LOSSES.items() if not name.startswith("roll")}


@pytest.mark.parametrize("loss", READ_ONCE.values(), ids=READ_ONCE)
def test_logits_are_not_copied_and_read_by_one_call(loss, monkeypatch):
    seen = []
    real = divergences.kl_divergence
    monkeypatch.setattr(
        divergences,
        "kl_divergence",
        lambda *args, **options: seen.append((args, options)) or real(*args, **options),
    )
    student, teacher = random_logits(2, 3, 11)
    loss(student.requires_grad_(), teacher, labels_of((2, 3), "some"))
    ((models, options),) = seen
    assert [x.data_ptr() for x in models[:2]] == [student.data_ptr(), teacher.data_ptr()]
    assert options["reduction"] in ("token-sum", "token-mean")  # whose forward makes the gradient


@traced
def test_a_loss_that_torch_compile_traces_follows_beta():
    student, teacher = random_logits(2, 3, 11)
    labels = labels_of((2, 3), "some")

    def loss(student, beta):
        return trl.generalized_jsd_loss(
            student, teacher, labels, beta, num_items_in_batch=torch.tensor(5)
        )

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for beta in (0.3, 0.6, 0.9, 1.0, 0.0):
        results, truth = (
            _with_gradients(partial(function, beta=beta), student) for function in (compiled, loss)
        )
        for result, exact in zip(results, truth, strict=True):
            torch.testing.assert_close(result, exact)


def test_ms_swifts_loss_of_no_tokens_has_a_gradient():
    """As ``jsd_loss`` has since 4.6, and without harm to the releases before it."""
    logits = torch.randn(1, 3, 5, requires_grad=True)
    labels = torch.full((1, 3), -100)
    teacher = SimpleNamespace(
        full_logits=torch.randn(1, 3, 5), topk_logprobs=None, topk_indices=None, labels=labels
    )
    total, count = swift.gkd_loss(logits, teacher, labels, 0.5, 1.0)
    total.backward()
    assert (total.item(), count.item()) == (0, 0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))
