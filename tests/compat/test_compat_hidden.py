"""klfast.compat's functions from hidden states: values and gradients are the textbook's."""

import contextlib
import sys
import types
from functools import partial

import frameworks
import oracle_linear
import pytest
import torch
from oracle_linear import Call

from klfast.compat import liger, trl, verl, verl_linear
from klfast.compat.trl_linear import OPTIONAL_OUTPUTS

pytestmark = pytest.mark.usefixtures("one_thread", "auto")

N, D, D_TEACHER, V = 19, 8, 6, 300
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_head = pytest.mark.parametrize(
    "leaves",
    [("hidden",), ("hidden", "weight"), ("hidden", "weight", "bias"), ("bias",), ()],
    ids=["frozen", "weight", "all", "bias", "nothing"],
)
HEADS = ("weight", "bias", "ref_weight", "ref_bias")


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def tensors(dtype, bias=True, teacher=False, shape=(N,)):
    """By the oracle's names."""
    models = (("", D), ("ref_", D_TEACHER))[: 2 if teacher else 1]
    found = {}
    for prefix, width in models:
        found[f"{prefix}hidden"] = random(*shape, width, dtype=dtype)
        found[f"{prefix}weight"] = random(V, width, dtype=dtype)
        found[f"{prefix}bias"] = random(V, dtype=dtype) if bias else None
    return found


def words(*shape):
    return torch.randint(V, shape)


def scaled(call, **scales):
    """The call whose heads are multiplied by powers of two, which is exact."""
    of = {name: None if t is None else t.clone() for name, t in call.tensors.items()}
    for name in HEADS:
        if of.get(name) is not None:
            of[name] *= scales.get("ref_" if name.startswith("ref_") else "own", 1.0)
    return Call(of, call.options, call.leaves, call.mask, call.token_ids)


def assert_agrees(call, function, **scales):
    """Outputs by name of ``function(tensors)``, and gradients, are the oracle's of scaled heads."""
    given = call.given()
    found = function(given)
    grads = oracle_linear.gradients(call, given, found)
    for name in HEADS[:2]:
        if name in grads:
            grads[name] = grads[name] / scales.get("own", 1.0)
    oracle_linear.assert_agrees(scaled(call, **scales), found, grads)


# TRL


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
@every_head
@every_dtype
def test_trl_logprobs(dtype, leaves, softcap, scale):
    own, targets = tensors(dtype, bias="bias" in leaves), words(N)
    call = Call(
        own,
        {"temperature": 0.7, "softcap": softcap, "return_entropy": True},
        leaves,
        token_ids=targets,
    )

    def ours(given):
        logprobs, entropy, *_ = trl.ChunkedLogProbFunction.apply(
            *given.values(), targets, 0.7, 100, softcap, scale
        )
        return {"logprobs": logprobs, "entropy": entropy}

    assert_agrees(call, ours, own=scale)


@pytest.mark.parametrize("softcap", [None, 3.0])
@every_dtype
def test_trl_s_numbers_without_a_gradient(dtype, softcap):
    own, targets = tensors(dtype), words(N)
    own["weight"][7] = own["weight"][3]  # two likeliest words of the last token, which says either
    own["bias"][7] = own["bias"][3] = 100
    targets[-2:] = torch.tensor([7, 3])
    given = {name: t.requires_grad_() for name, t in own.items()}
    outputs = trl.ChunkedLogProbFunction.apply(*given.values(), targets, 0.7, 64, softcap, 0.5)
    hidden, weight, bias = (t.detach().double() for t in own.values())
    z = 0.5 * (hidden @ weight.T + bias)
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.7
    p = z.softmax(-1)
    truth = (p.square().sum(-1).log(), z.mean(-1), z.argmax(-1) == targets)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-4  # of fp32 logits up to 100
    for output, true in zip(outputs[2:4], truth[:2], strict=True):
        assert not output.requires_grad
        assert output.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(output.double(), true, rtol=tolerance, atol=tolerance)
    is_top1 = outputs[4]
    assert is_top1.dtype == torch.bool
    assert torch.equal(is_top1[:-2], truth[2][:-2])
    assert is_top1[-2:].tolist() == [False, True]


@pytest.mark.parametrize("of", ["hidden", "weight"])
def test_trl_s_outputs_are_those_asked_for(of):
    own, targets = tensors(torch.float32), words(N)
    own[of].requires_grad_()

    def apply(*outputs):
        return trl.ChunkedLogProbFunction.apply(
            *own.values(), targets, 1.0, 64, outputs=("log_probs", *outputs)
        )

    whole = apply(*OPTIONAL_OUTPUTS)
    assert all(each is not None for each in whole)
    for name, wanted in zip(OPTIONAL_OUTPUTS, whole[1:], strict=True):
        found = dict(zip(OPTIONAL_OUTPUTS, apply(name)[1:], strict=True))
        assert torch.equal(found.pop(name), wanted)
        assert all(other is None for other in found.values())
        assert torch.equal(apply(name)[0], whole[0])
    assert apply()[1:] == (None,) * 4


@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
@pytest.mark.parametrize("softcaps", [(None, None), (3.0, None), (4.0, 2.0)], ids=str)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.5), (0.25, 2.0)], ids=str)
@every_head
def test_trl_divergence(leaves, scales, softcaps, beta):
    own = tensors(torch.float32, "bias" in leaves, teacher=True)
    assert_trl_divergence(own, leaves, scales, softcaps, beta)


@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
@every_head
@every_dtype
def test_trl_divergence_of_other_dtypes(dtype, leaves, beta):
    own = tensors(dtype, "bias" in leaves, teacher=True)
    assert_trl_divergence(own, leaves, (0.5, 2.0), (None, 3.0), beta)


def assert_trl_divergence(own, leaves, scales, softcaps, beta):
    direction = {0: "forward", 1: "reverse"}.get(beta, "jsd")
    options = {
        "temperature": 1.5,
        "softcap": softcaps,
        "direction": direction,
        "jsd_beta": beta,
        "return_entropy": True,
    }

    def ours(given):
        divergence, entropy = trl.ChunkedDivergenceFunction.apply(
            *given.values(),
            beta,
            1.5,
            student_logit_scale=scales[0],
            student_final_logit_softcapping=softcaps[0],
            teacher_logit_scale=scales[1],
            teacher_final_logit_softcapping=softcaps[1],
        )
        assert not entropy.requires_grad
        return {"kl": divergence, "entropy": entropy}

    call = Call(own, options, leaves)
    given = call.given()
    found = ours(given)
    grads = oracle_linear.gradients(call, given, {"kl": found["kl"]})
    for name in HEADS[:2]:
        if name in grads:
            grads[name] = grads[name] / scales[0]
    heads = {"own": scales[0], "ref_": scales[1]}
    without = options | {"return_entropy": False}
    kl = scaled(Call(own, without, leaves), **heads)
    oracle_linear.assert_agrees(kl, {"kl": found["kl"]}, grads)
    oracle_linear.assert_agrees(scaled(Call(own, options, ()), **heads), found, {})


def test_trl_s_teacher_gets_no_gradient():
    own = tensors(torch.float32, teacher=True)
    given = {name: t.requires_grad_() for name, t in own.items()}
    divergence, _ = trl.ChunkedDivergenceFunction.apply(*given.values(), 0.5)
    found = torch.autograd.grad(divergence.sum(), [*given.values()], allow_unused=True)
    assert [grad is not None for grad in found] == [True] * 3 + [False] * 3


@every_head
def test_trl_without_tokens(leaves):
    own = {
        name: t.requires_grad_(name in leaves)
        for name, t in tensors(torch.bfloat16, shape=(0,)).items()
    }
    outputs = trl.ChunkedLogProbFunction.apply(*own.values(), words(0), 1.0, 64)
    assert [each.shape for each in outputs] == [(0,)] * 5
    teacher = (random(0, D_TEACHER), random(V, D_TEACHER), None)
    divergence, entropy = trl.ChunkedDivergenceFunction.apply(*own.values(), *teacher, 0.5)
    assert divergence.shape == entropy.shape == (0,)
    if not leaves:
        return
    for value in (outputs[0] + outputs[1], divergence):
        grads = torch.autograd.grad(value.sum(), [own[name] for name in leaves], retain_graph=True)
        assert all((grad == 0).all() for grad in grads)


def test_trl_s_names_and_defaults_are_keywords():
    own, targets = tensors(torch.float32, teacher=True), words(N)
    hidden, weight, bias, *teacher = own.values()
    by_name = trl.ChunkedLogProbFunction.apply(
        hidden=hidden, weight=weight, bias=bias, targets=targets, temperature=1.0, chunk_size=9
    )
    for mine, other in zip(
        by_name,
        trl.ChunkedLogProbFunction.apply(
            hidden, weight, bias, targets, 1.0, 9, None, 1.0, OPTIONAL_OUTPUTS
        ),
        strict=True,
    ):
        assert torch.equal(mine, other)
    short, long = (
        trl.ChunkedDivergenceFunction.apply(hidden, weight, bias, *teacher, 0.3, *rest)
        for rest in ((), (1.0, 1.0, None, 1.0, None))
    )
    assert torch.equal(short[0], long[0])


class Parameter(torch.nn.Parameter):
    """As ZeRO-3 partitions them: whole within a context, without memory outside of it."""

    ds_id = 0


@pytest.mark.parametrize("is_frozen", [False, True])
def test_trl_s_heads_that_zero3_takes_away_after_the_forward(is_frozen, monkeypatch):
    own, targets = tensors(torch.float32, teacher=True), words(N)
    hidden, weight, bias, *teacher = own.values()
    expected = tensors_of_runs(hidden, weight, bias, teacher, targets, is_frozen, None)
    heads = [Parameter(t, requires_grad=not is_frozen) for t in (weight, bias)]
    of_teacher = [Parameter(t, requires_grad=False) for t in teacher[1:]]
    shadows = {id(t): t.data for t in (*heads, *of_teacher)}

    class Gathered:
        def __init__(self, *parameters):
            self.parameters = [p for p in parameters if p is not None]

        def __enter__(self):
            for p in self.parameters:
                p.data = shadows[id(p)].clone()

        def __exit__(self, *_):
            for p in self.parameters:
                p.data = torch.empty(0)

    found = tensors_of_runs(
        hidden, *heads, [teacher[0], *of_teacher], targets, is_frozen, Gathered, monkeypatch
    )
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


def tensors_of_runs(hidden, weight, bias, teacher, targets, is_frozen, context, monkeypatch=None):
    """Values and gradients of both functions; the caller gathers for the first, as TRL does."""
    hidden = hidden.clone().requires_grad_()
    leaves = [hidden]
    if not is_frozen:
        leaves += [weight.requires_grad_(), bias.requires_grad_()]
    if context is not None:
        utils = types.ModuleType("trl.trainer.utils")
        utils.maybe_gather_lm_head_ctx = context
        for name in ("trl", "trl.trainer"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "trl.trainer.utils", utils)
    with context(weight, bias) if context else contextlib.nullcontext():
        logprobs, entropy, *_ = trl.ChunkedLogProbFunction.apply(
            hidden, weight, bias, targets, 1.0, 64
        )
    divergence, its_entropy = trl.ChunkedDivergenceFunction.apply(
        hidden, weight, bias, *teacher, 0.5
    )
    values = (logprobs, entropy, divergence)
    grads = torch.autograd.grad(sum(v.sum() for v in values), leaves)
    return [t.detach() for t in (*values, its_entropy, *grads)]


def wrong(function, *arguments, error=ValueError, match, **options):
    with pytest.raises(error, match=match):
        function(*arguments, **options)


def test_trl_s_errors():
    own, targets = tensors(torch.float32, teacher=True), words(N)
    hidden, weight, bias, *teacher = own.values()
    logprobs = trl.ChunkedLogProbFunction.apply
    wrong(logprobs, hidden, weight, bias, targets[1:], 1.0, 64, match="targets must have the shape")
    wrong(logprobs, hidden, weight, bias, targets + V, 1.0, 64, match="token_ids must be")
    wrong(logprobs, hidden, weight[:, 1:], bias, targets, 1.0, 64, match="weight must")
    wrong(logprobs, hidden, weight, bias[1:], targets, 1.0, 64, match="bias must")
    wrong(logprobs, hidden, weight, bias, targets, 0.0, 64, match="temperature must be")
    wrong(logprobs, hidden, weight, bias, targets, 1.0, 64, 0.0, match="final_logit_softcapping")
    wrong(logprobs, hidden, weight, bias, targets, 1.0, 64, None, -1.0, match="logit_scale must")
    wrong(logprobs, hidden, weight, bias, targets, 1.0, 64, outputs=("kl",), match="outputs")
    wrong(logprobs, hidden, weight, bias, targets, "1", 64, error=TypeError, match="temperature")
    divergence = trl.ChunkedDivergenceFunction.apply
    arguments = (hidden, weight, bias, *teacher)
    for beta in (-0.1, 1.1):
        wrong(divergence, *arguments, beta, match="beta must be")
    wrong(divergence, *arguments, 0.5, -1.0, match="temperature must be")
    wrong(divergence, *arguments, 0.5, 1.0, 0.0, match="student_logit_scale must be")
    wrong(divergence, *arguments, 0.5, 1.0, 1.0, -2.0, match="student_final_logit_softcapping")
    wrong(divergence, *arguments, 0.5, 1.0, 1.0, None, 0.0, match="teacher_logit_scale must be")
    wrong(divergence, *arguments, 0.5, 1.0, 1.0, None, 1.0, 0.0, match="teacher_final_logit_soft")
    wrong(divergence, *arguments[:3], teacher[0][1:], *teacher[1:], 0.5, match="ref_hidden must")
    wrong(divergence, *arguments[:4], teacher[1][1:], None, 0.5, match="ref_weight must")


# verl


def differentiated(function, own, leaves):
    """What it returns, and gradients of the leaves by name, uneven gradients coming in."""
    given = {
        n: None if t is None else t.clone().requires_grad_(n in leaves) for n, t in own.items()
    }
    found = dict(zip(("logprobs", "entropy"), function(given), strict=True))
    call = Call(own, leaves=leaves)
    return found, oracle_linear.gradients(call, given, found)


every_shape = pytest.mark.parametrize("shape", [(N,), (3, 7)], ids=str)


@pytest.mark.parametrize("chunk_size", [4, 512])
@every_shape
@pytest.mark.parametrize("leaves", [("hidden",), ("hidden", "weight"), ("weight",), ()], ids=str)
@every_dtype
def test_verl_fused_linear(dtype, leaves, shape, chunk_size):
    own, ids = tensors(dtype, bias=False, shape=shape), words(*shape)
    del own["bias"]
    options = {"temperature": 0.7, "return_entropy": True}
    call = Call(own, options, leaves, token_ids=ids)
    functions = (
        lambda given: verl.FusedLinearForPPO(chunk_size)(*given.values(), ids.int(), 0.7),
        lambda given: verl.FusedLinearForPPOFunction.apply(*given.values(), ids, 0.7, chunk_size),
        lambda given: linear_cross_entropy_of(given, ids, shape),
    )
    for function in functions:
        oracle_linear.assert_agrees(call, *differentiated(function, own, leaves))


def linear_cross_entropy_of(given, ids, shape):
    found = verl.linear_cross_entropy(*given.values(), ids, 0.7)
    assert [each.shape for each in found] == [ids.flatten().shape] * 2
    return [each.view(shape) for each in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_verl_exact(dtype):
    own, ids = tensors(dtype, bias=False), words(N)
    hidden, weight, _ = own.values()
    plain = verl.FusedLinearForPPO()(hidden, weight, ids)
    for function in (verl.FusedLinearForPPO(), verl.FusedLinearForPPOFunction.apply):
        logprobs, entropy = function(hidden, weight, ids, exact=True)
        assert torch.equal(logprobs, plain[0])
        assert torch.equal(entropy, plain[1].to(dtype))


def test_verl_s_temperature_may_be_a_tensor():
    own, ids = tensors(torch.float32, bias=False, shape=(3, 7)), words(3, 7)
    del own["bias"]
    for temperature in (torch.tensor(0.7), torch.rand(3) + 0.5, torch.rand(3, 7) + 0.5):
        options = {"temperature": temperature, "return_entropy": True}
        call = Call(own, options, ("hidden",), token_ids=ids)
        functions = (
            lambda given, t=temperature: verl.FusedLinearForPPO()(*given.values(), ids, t),
            lambda given, t=temperature: [
                each.view(3, 7) for each in verl.linear_cross_entropy(*given.values(), ids, t)
            ],
        )
        for function in functions:
            oracle_linear.assert_agrees(call, *differentiated(function, own, call.leaves))


def test_verl_s_words_of_minus_100_under_liger():
    own, ids = tensors(torch.float32, bias=False), words(N)
    del own["bias"]
    mask = torch.arange(N) % 3 > 0
    ids[~mask] = -100
    call = Call(own, {"return_entropy": True}, ("hidden", "weight"), mask, ids)
    function = lambda given: verl.FusedLinearForPPO(4, "liger")(*given.values(), ids)  # noqa: E731
    oracle_linear.assert_agrees(call, *differentiated(function, own, call.leaves))
    wrong(verl.FusedLinearForPPO(), *own.values(), ids, match="token_ids must be")


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "MEAN"])
def test_verl_linear_cross_entropy_reduces_the_log_probs(reduction):
    own, ids = tensors(torch.float32, bias=False, shape=(3, 7)), words(3, 7)
    hidden, weight, _ = own.values()
    logprobs, entropy = verl.linear_cross_entropy(hidden, weight, ids)
    of_tokens = (hidden.flatten(0, 1), ids.flatten())  # and labels alone, of packed hidden states
    for states, labels in (of_tokens, (hidden, of_tokens[1]), (of_tokens[0], ids)):
        found, own_entropy = verl.linear_cross_entropy(states, weight, labels, 1.0, reduction, None)
        kind = reduction.lower()
        wanted = logprobs if kind == "none" else getattr(logprobs, kind)()
        assert torch.equal(found, wanted)
        assert torch.equal(own_entropy, entropy)


def test_verl_without_tokens():
    hidden, weight = random(0, D).requires_grad_(), random(V, D).requires_grad_()
    for function in (verl.FusedLinearForPPO(), verl.linear_cross_entropy):
        logprobs, entropy = function(hidden, weight, words(0))
        assert logprobs.shape == entropy.shape == (0,)
        grads = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
        assert all((grad == 0).all() for grad in grads)


def test_verl_s_group_of_ranks_is_refused(monkeypatch):
    hidden, weight, ids = random(N, D), random(V, D), words(N)
    monkeypatch.setattr(verl_linear, "get_world_size", lambda group: group)
    alone = verl.linear_cross_entropy(hidden, weight, ids, dist_process_group=1)
    assert torch.equal(alone[0], verl.linear_cross_entropy(hidden, weight, ids)[0])
    wrong(
        verl.linear_cross_entropy, hidden, weight, ids, 1.0, "none", 2, match="dist_process_group"
    )


def test_verl_s_errors():
    hidden, weight, ids = random(N, D), random(V, D), words(N)
    fused, entropy = verl.FusedLinearForPPO(), verl.linear_cross_entropy
    wrong(verl.FusedLinearForPPO, 512, "triton", match="impl_backend")
    wrong(fused, hidden, weight, ids[1:], match="input_ids must have the shape")
    wrong(fused, hidden, weight, ids[:, None], match="input_ids must have the shape")
    wrong(entropy, hidden, weight, ids[1:], match="labels must have the shape")
    wrong(entropy, hidden, weight, ids, 1.0, "max", match="reduction")
    for function in (fused, entropy):
        wrong(function, hidden, weight, ids + V, match="token_ids must be")
        wrong(function, hidden, weight[:, 1:], ids, match="weight must")
        wrong(function, hidden, weight, ids, 0.0, match="temperature must be")
        wrong(function, hidden, weight, ids, "1", error=TypeError, match="temperature must be")
        wrong(function, hidden.long(), weight, ids, error=TypeError, match="hidden must")


# Liger

MODULE = {"module": True, "function": False}
every_form = pytest.mark.parametrize("is_module", MODULE.values(), ids=MODULE)


def liger_jsd(given, labels, beta, is_module, **options):
    if is_module:
        return liger.LigerFusedLinearJSD(beta, **options)(*given, labels)
    return liger.liger_fused_linear_jsd(*given, labels, beta, **options)


@every_form
@pytest.mark.parametrize("labelled", ["all", "some", "none"])
@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
@pytest.mark.parametrize("leaves", [("hidden",), ("hidden", "weight"), ("weight",), ()], ids=str)
@every_dtype
def test_liger_jsd(dtype, leaves, beta, labelled, is_module):
    own = tensors(dtype, bias=False, teacher=True)
    own = {name: t for name, t in own.items() if t is not None}
    labels, mask = None, None
    if labelled != "all":
        labels = words(N)
        labels[:: 3 if labelled == "some" else 1] = -1
        mask = labels != -1
    options = {
        "direction": {0: "forward", 1: "reverse"}.get(beta, "jsd"),
        "jsd_beta": beta,
        "temperature": 0.7,
        "reduction": "token-mean",
    }
    call = Call(own, options, leaves, mask)
    given = call.given()
    loss = liger_jsd(given.values(), labels, beta, is_module, ignore_index=-1, temperature=0.7)
    assert loss.shape == ()
    grads = oracle_linear.gradients(call, given, {"kl": loss})
    oracle_linear.assert_agrees(call, {"kl": loss}, grads)
    wide = [t.detach().double() for t in given.values()]
    keep = torch.ones(N) if mask is None else mask.double()
    truth = frameworks.liger_fused_linear_jsd(*wide, keep, beta, 0.7)
    torch.testing.assert_close(loss.detach().double(), truth, rtol=1e-5, atol=1e-12)


@every_form
def test_liger_s_teacher_gets_no_gradient_and_the_upstream_gradient_scales(is_module):
    own = [t for t in tensors(torch.float32, False, teacher=True).values() if t is not None]
    given = [t.requires_grad_() for t in own]
    losses = [liger_jsd(given, None, 0.5, is_module, accum_dtype=torch.float32) for _ in "ab"]
    once, twice = (
        torch.autograd.grad(scale * loss, given, allow_unused=True)
        for scale, loss in zip((1, 2), losses, strict=True)
    )
    assert [g is None for g in once] == [False, False, True, True]
    for mine, other in zip(once[:2], twice[:2], strict=True):
        torch.testing.assert_close(2 * mine, other, rtol=1e-6, atol=0)


@every_form
def test_liger_without_tokens_is_0(is_module):
    given = [random(0, D), random(V, D), random(0, D_TEACHER), random(V, D_TEACHER)]
    leaves = [t.requires_grad_() for t in given[:2]]
    for labels in (None, words(0)):
        loss = liger_jsd(given, labels, 0.5, is_module)
        assert loss == 0
        assert all((g == 0).all() for g in torch.autograd.grad(loss, leaves))


@every_form
def test_liger_s_masked_rows_hold_anything(is_module):
    own = [t for t in tensors(torch.float32, False, teacher=True).values() if t is not None]
    labels = words(N)
    labels[3], labels[7] = -100, -100
    expected = liger_jsd(own, labels, 0.5, is_module)
    own[0][3], own[2][7] = torch.nan, torch.inf
    assert torch.equal(liger_jsd(own, labels, 0.5, is_module), expected)


@every_form
def test_liger_s_errors(is_module):
    own = [t for t in tensors(torch.float32, False, teacher=True).values() if t is not None]
    loss = partial(liger_jsd, is_module=is_module)
    for beta in (-0.1, 1.1):
        wrong(loss, own, None, beta, match="jsd_beta must be")
    for temperature in (0.0, -1.0):
        wrong(loss, own, None, 0.5, temperature=temperature, match="temperature must be")
    wrong(loss, own, words(N - 1), 0.5, match="shift_labels must have the shape")
    wrong(loss, [own[0][1:], *own[1:]], None, 0.5, match="hidden must")
    wrong(loss, [*own[:3], own[3][1:]], None, 0.5, match="ref_weight must")
    wrong(loss, [own[0].long(), *own[1:]], None, 0.5, error=TypeError, match="hidden must")
