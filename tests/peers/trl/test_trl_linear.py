"""klfast.compat.trl from hidden states against ``trl.kernels``, and trainers that call it.

On a CPU TRL's functions are PyTorch of tiles, in fp32 whatever they are given.
"""

import inspect

import pytest
import tiny
import torch
from agreement_of_runs import assert_same_training
from transformers import PrinterCallback
from trl import GRPOTrainer
from trl.kernels import chunked_divergence as kernels
from trl.kernels import chunked_logprob
from trl.trainer import distillation_trainer as distillation
from trl.trainer import utils

import klfast
from klfast.compat import trl, trl_linear

N, D, D_TEACHER, V = 37, 16, 12, 1000
TILE = 300
EPS = torch.finfo(torch.float32).eps
PAIRS = {
    "logprobs": (trl.ChunkedLogProbFunction, chunked_logprob.ChunkedLogProbFunction),
    "divergence": (trl.ChunkedDivergenceFunction, kernels.ChunkedDivergenceFunction),
}


def models(dtype, bias=True):
    """Heads with a deviation of 3 nats in their logits; of the student, and of a teacher."""
    for width in (D, D_TEACHER):
        yield torch.randn(N, width).to(dtype)
        yield (3 / width**0.5 * torch.randn(V, width)).to(dtype)
        yield torch.randn(V).to(dtype) if bias else None


def differentiated(function, tensors, leaves, *rest, **options):
    """Outputs, and gradients of ``leaves`` first tensors under uneven gradients that come in."""
    given = [
        None if t is None else t.clone().requires_grad_(i < leaves and t.is_floating_point())
        for i, t in enumerate(tensors)
    ]
    outputs = function.apply(*given, *rest, **options)
    sent = [o for o in outputs if o is not None and o.requires_grad]
    upstream = [torch.linspace(0.5, 1.5, N).to(o.dtype) for o in sent]
    wanted = [t for t in given if t is not None and t.requires_grad]
    grads = torch.autograd.grad(sent, wanted, upstream) if sent else ()
    return [None if o is None else o.detach() for o in outputs], list(grads)


def rounding(tensors, scale=1.0, teacher_scale=1.0):
    """The share of a number that fp32 leaves uncertain, in TRL as in klfast: eps * z of a
    probability whose log is the difference of logits up to z nats, and some for the sums.
    """
    models = [(tensors[i : i + 3], of) for i, of in ((0, scale), (3, teacher_scale))]
    logits = [
        of * (hidden.double() @ weight.double().T + (0 if bias is None else bias.double()))
        for (hidden, weight, bias), of in models[: len(tensors) // 3]
    ]
    return 16 * EPS * max(z.abs().max() for z in logits)


def assert_close(mine, other, share):
    """Neither is there, or both are and no number is farther off than a share of the greatest."""
    assert (mine is None) == (other is None)
    if mine is None:
        return
    assert mine.shape == other.shape
    if mine.dtype == torch.bool:
        assert torch.equal(mine, other)
        return
    limit = share * other.double().abs().max()
    assert ((mine.double() - other.double()).abs() <= limit).all()


@pytest.mark.parametrize("name", PAIRS)
def test_arguments_have_trl_s_names_order_and_defaults(name):
    ours, theirs = PAIRS[name]
    mine, other = (
        [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (ours.apply, theirs.forward)
    )
    assert mine == other[1:]  # behind ctx
    assert trl_linear.OPTIONAL_OUTPUTS == chunked_logprob.OPTIONAL_OUTPUTS


@pytest.mark.parametrize("leaves", [0, 1, 2, 3], ids=["nothing", "frozen", "weight", "all"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("scale", "temperature"), [(1.0, 1.0), (0.5, 0.7), (3.0, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logprobs(dtype, scale, temperature, softcap, bias, leaves):
    tensors, targets = [*models(dtype, bias)][:3], torch.randint(V, (N,))
    (values, grads), (their_values, their_grads) = (
        differentiated(function, tensors, leaves, targets, temperature, TILE, softcap, scale)
        for function in PAIRS["logprobs"]
    )
    share = rounding(tensors, scale / temperature)
    for mine, other in zip(values + grads, their_values + their_grads, strict=True):
        assert_close(mine, other, share)
    for mine, other in zip(grads, their_grads, strict=True):
        assert mine.dtype == other.dtype == dtype


@pytest.mark.parametrize("outputs", [(), ("entropy",), ("is_top1", "log_probs"), ("mean_logits",)])
def test_outputs_that_are_not_asked_for_are_none(outputs):
    tensors, targets = [*models(torch.float32)][:3], torch.randint(V, (N,))
    found = [
        differentiated(function, tensors, 3, targets, 1.0, TILE, None, 1.0, outputs)
        for function in PAIRS["logprobs"]
    ]
    (values, grads), (their_values, their_grads) = found
    for mine, other in zip(values + grads, their_values + their_grads, strict=True):
        assert_close(mine, other, rounding(tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logprobs_of_lower_dtypes_are_nearer_the_truth(dtype):
    """TRL rounds the logits to the dtype: a log-prob moves by up to a rounding of two of them."""
    tensors, targets = [*models(dtype)][:3], torch.randint(V, (N,))
    ours, theirs = (
        differentiated(function, tensors, 3, targets, 0.7, TILE) for function in PAIRS["logprobs"]
    )
    hidden, weight, bias = (t.double() for t in tensors)
    logits = hidden @ weight.T + bias
    truth = (logits / 0.7).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    eps = torch.finfo(dtype).eps
    share, off = rounding(tensors, 1 / 0.7), (theirs[0][0].double() - truth).abs()
    assert off.max() > 100 * share
    assert (off <= 2 * eps * logits.abs().max() / 0.7).all()
    assert_close(ours[0][0], truth, share)
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine.dtype == other.dtype == dtype
        assert (mine - other).norm() <= 16 * eps * other.norm()
    assert [o.dtype for o in ours[0]] == [o.dtype for o in theirs[0]]


@pytest.mark.parametrize("leaves", [0, 1, 2, 3], ids=["nothing", "frozen", "weight", "all"])
@pytest.mark.parametrize("softcaps", [(None, None), (5.0, None), (4.0, 6.0)], ids=str)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.5), (2.0, 0.3)], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_divergence(dtype, beta, scales, softcaps, leaves):
    tensors = [*models(dtype)]
    options = {
        "student_logit_scale": scales[0],
        "student_final_logit_softcapping": softcaps[0],
        "teacher_logit_scale": scales[1],
        "teacher_final_logit_softcapping": softcaps[1],
    }
    (values, grads), (their_values, their_grads) = (
        differentiated(function, tensors, leaves, beta, 0.7, **options)
        for function in PAIRS["divergence"]
    )
    share = rounding(tensors, *(scale / 0.7 for scale in scales))
    for mine, other in zip(values + grads, their_values + their_grads, strict=True):
        assert_close(mine, other, share)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_divergence_of_bf16(beta):
    """TRL's logits are fp32 there too; their gradients it rounds to bf16 before the products."""
    tensors = [*models(torch.bfloat16)]
    ours, theirs = (differentiated(function, tensors, 3, beta) for function in PAIRS["divergence"])
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine.dtype == other.dtype == torch.float32
        assert_close(mine, other, rounding(tensors))
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine.dtype == other.dtype == torch.bfloat16
        assert_close(mine, other, 2 * torch.finfo(torch.bfloat16).eps)


def test_near_0_trl_s_fp32_is_rounding():
    """Of a teacher 1e-5 nats away klfast has the digits that the logits leave, TRL has none."""
    hidden, weight, _ = [*models(torch.float32)][:3]
    near = hidden + 5e-4 * torch.randn_like(hidden)
    wide = [(h.double() @ weight.double().T).log_softmax(-1) for h in (hidden, near)]
    truth = (wide[0].exp() * (wide[0] - wide[1])).sum(-1)
    arguments = (hidden, weight, None, near, weight, None, 1.0)
    ours, theirs = (
        (function.apply(*arguments)[0].double() - truth).abs() / truth
        for function in PAIRS["divergence"]
    )
    assert 1e-7 < truth.mean() < 1e-5
    assert theirs.median() > 0.1
    assert ours.median() < 0.01


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_under_autocast_both_take_its_dtype(is_frozen):
    tensors, targets = [*models(torch.float32)], torch.randint(V, (N,))
    leaves = 1 if is_frozen else 3
    with torch.autocast("cpu", torch.bfloat16):
        both = [
            [
                differentiated(PAIRS["logprobs"][i], tensors[:3], leaves, targets, 1.0, TILE),
                differentiated(PAIRS["divergence"][i], tensors, leaves, 0.5),
            ]
            for i in (0, 1)
        ]
    eps = torch.finfo(torch.bfloat16).eps
    for ours, theirs in zip(*both, strict=True):
        for mine, other in zip(ours[1], theirs[1], strict=True):
            assert mine.dtype == other.dtype == torch.float32
            assert (mine - other).norm() <= 16 * eps * other.norm()
    assert_close(both[0][1][0][0], both[1][1][0][0], 16 * eps)
    assert_close(both[0][0][0][0], both[1][0][0][0], 2 * eps)


def test_without_tokens_both_have_none():
    tensors, targets = [*models(torch.float32)], torch.randint(V, (0,))
    of_none = [t if t is None or i % 3 else t[:0] for i, t in enumerate(tensors)]
    for function in PAIRS["logprobs"]:
        assert [o.shape for o in function.apply(*of_none[:3], targets, 1.0, TILE)] == [(0,)] * 5
    for function in PAIRS["divergence"]:
        assert [o.shape for o in function.apply(*of_none, 0.5)] == [(0,)] * 2


# Trainers


def test_patch_reaches_every_module_that_imported_by_name():
    holders = [(chunked_logprob, "ChunkedLogProbFunction"), (utils, "_ChunkedLogProbFunction")]
    holders += [(module, "ChunkedDivergenceFunction") for module in (kernels, distillation)]
    before = [getattr(module, name) for module, name in holders]
    with klfast.compat.patch("trl"):
        for (module, name), ours in zip(holders, (0, 0, 1, 1), strict=True):
            assert issubclass(getattr(module, name), [*PAIRS.values()][ours][0])
    assert [getattr(module, name) for module, name in holders] == before


def test_distillation_trains_the_same(tmp_path, monkeypatch):
    theirs = distill(tmp_path / "theirs")
    calls = []
    real = trl_linear.linear_kl_divergence_call
    monkeypatch.setattr(
        trl_linear, "linear_kl_divergence_call", lambda *a: calls.append(a) or real(*a)
    )
    with klfast.compat.patch("trl"):
        ours = distill(tmp_path / "ours")
    assert len(calls) == 3
    assert_same_training(ours, theirs)
    assert theirs.logs[0]["loss"] != theirs.logs[-1]["loss"]


def distill(folder):
    settings = tiny.settings(folder, steps=3)
    del settings["num_generations"]
    trainer = distillation.DistillationTrainer(
        model=tiny.model(),
        teacher_model=tiny.model(seed=1),
        args=distillation.DistillationConfig(**settings, beta=0.5),
        train_dataset=tiny.dataset(),
        processing_class=tiny.tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    return tiny.finish(trainer)


def test_grpo_s_log_probs_are_klfast_s(tmp_path, monkeypatch):
    calls = []
    real = trl_linear.linear_token_logprobs_call
    monkeypatch.setattr(
        trl_linear, "linear_token_logprobs_call", lambda *a: calls.append(a) or real(*a)
    )
    with klfast.compat.patch("trl"):
        tiny.train(GRPOTrainer, tmp_path, steps=1)
    assert calls
