"""klfast.compat.verl from hidden states against verl's own functions.

``FusedLinearForPPO`` is PyTorch, in fp32 whatever it is given; ``linear_cross_entropy`` is Triton,
run in its interpreter.
"""

import inspect
from pathlib import Path

import pytest
import torch
from peer_kernels import interpreted
from verl.utils.experimental import torch_functional
from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

import klfast
from klfast.compat import verl

N, D, V = 37, 16, 1000
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _without_flash_attn(monkeypatch):
    """What ``stand_ins`` serves in its place is no cross entropy."""
    monkeypatch.setattr(torch_functional, "_FLASH_ATTN_CROSS_ENTROPY_AVAILABLE", False)


def model(dtype, *shape, width=D):
    """Hidden states and a head with a deviation of 3 nats in its logits."""
    hidden = torch.randn(*shape, width)
    return hidden.to(dtype), (3 / width**0.5 * torch.randn(V, width)).to(dtype)


def rounding(hidden, weight, temperature=1.0):
    """The share of a number that fp32 leaves uncertain, in verl as in klfast: eps * z of a
    probability whose log is the difference of logits up to z nats, and some for the sums.
    """
    return 16 * EPS * (hidden.double() @ weight.double().T).abs().max() / temperature


def differentiated(function, hidden, weight, ids, temperature, leaves, wants=(True, True)):
    """Outputs, and gradients of the first ``leaves`` under uneven gradients of what ``wants``."""
    given = [t.clone().requires_grad_(i < leaves) for i, t in enumerate((hidden, weight))]
    outputs = function(*given, ids, temperature)
    sent = [o for o, want in zip(outputs, wants, strict=True) if want and leaves]
    upstream = [torch.linspace(0.5, 1.5, o.numel()).view(o.shape).to(o.dtype) for o in sent]
    grads = torch.autograd.grad(sent, given[:leaves], upstream) if sent else ()
    return [o.detach() for o in outputs], list(grads)


def assert_close(mine, other, share):
    """No number is farther off than a share of the greatest."""
    assert mine.shape == other.shape
    limit = share * other.double().abs().max()
    assert ((mine.double() - other.double()).abs() <= limit).all()


@pytest.mark.parametrize("part", ["__init__", "forward"])
def test_the_module_has_verl_s_arguments(part):
    theirs, ours = (
        [(p.name, p.default) for p in inspect.signature(getattr(m, part)).parameters.values()]
        for m in (torch_functional.FusedLinearForPPO, verl.FusedLinearForPPO)
    )
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (verl.FusedLinearForPPOFunction.apply, torch_functional.FusedLinearForPPOFunction),
        (verl.linear_cross_entropy, LinearCrossEntropy),
    ],
    ids=["ppo", "cross entropy"],
)
def test_arguments_have_verl_s_names_order_and_defaults(ours, theirs):
    mine, other = (
        [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (ours, theirs.forward)
    )
    assert mine[: len(other) - 1] == other[1:]  # behind ctx


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("leaves", [0, 1, 2], ids=["nothing", "frozen", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("chunk_size", [8, 512])
@pytest.mark.parametrize("shape", [(N,), (3, 11)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fused_linear(dtype, shape, chunk_size, temperature, leaves, wants):
    hidden, weight = model(dtype, *shape)
    ids = torch.randint(V, shape)
    ours, theirs = (
        differentiated(of(chunk_size), hidden, weight, ids, temperature, leaves, wants)
        for of in (verl.FusedLinearForPPO, torch_functional.FusedLinearForPPO)
    )
    share = rounding(hidden, weight, temperature)
    for mine, other in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        assert_close(mine, other, share)
    assert [g.dtype for g in ours[1]] == [g.dtype for g in theirs[1]] == [dtype] * leaves


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_linear_of_lower_dtypes_is_nearer_the_truth(dtype):
    """Verl rounds the logits to the dtype twice: before the division by the temperature and behind
    it.
    """
    hidden, weight = model(dtype, N)
    ids = torch.randint(V, (N,))
    ours, theirs = (
        differentiated(of(), hidden, weight, ids, 0.7, 2)
        for of in (verl.FusedLinearForPPO, torch_functional.FusedLinearForPPO)
    )
    eps = torch.finfo(dtype).eps
    logits = hidden.double() @ weight.double().T / 0.7
    truth = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    off = (theirs[0][0].double() - truth).abs()
    share = rounding(hidden, weight, 0.7)
    assert off.max() > 100 * share
    assert (off <= 2 * eps * logits.abs().max()).all()
    assert_close(ours[0][0], truth, share)
    assert [o.dtype for o in ours[0]] == [torch.float32, torch.float32]
    assert [o.dtype for o in theirs[0]] == [torch.float32, dtype]
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine.dtype == other.dtype == dtype
        assert (mine - other).norm() <= 16 * eps * other.norm()
    exact = verl.FusedLinearForPPO()(hidden, weight, ids, 0.7, exact=True)
    assert [o.dtype for o in exact] == [o.dtype for o in theirs[0]]
    assert (exact[1].double() - theirs[0][1].double()).abs().max() <= 8 * eps * exact[1].abs().max()


def test_ids_of_32_bits_and_no_tokens():
    hidden, weight = model(torch.float32, N)
    ids = torch.randint(V, (N,), dtype=torch.int32)
    for own in (ids, ids[:0]):
        found = [
            of()(hidden[: len(own)], weight, own)
            for of in (verl.FusedLinearForPPO, torch_functional.FusedLinearForPPO)
        ]
        for mine, other in zip(*found, strict=True):
            assert mine.shape == other.shape
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reach", ["import", "patch"])
def test_a_model_of_verl_s_has_the_same_log_probs(reach, monkeypatch):
    """By klfast's module in the place of verl's, or by verl's, made before the patch."""
    hidden, weight = model(torch.float32, 2, 9)
    ids = torch.randint(V, (2, 9))
    before = torch_functional.FusedLinearForPPO()
    theirs = before(hidden, weight, ids, 0.7)
    calls = []
    real = klfast.compat.verl_linear.linear_token_logprobs
    monkeypatch.setattr(
        klfast.compat.verl_linear,
        "linear_token_logprobs",
        lambda *a, **options: calls.append(options) or real(*a, **options),
    )
    if reach == "import":
        own = torch_functional.FusedLinearForPPO
        monkeypatch.setattr(torch_functional, "FusedLinearForPPO", verl.FusedLinearForPPO)
        found = torch_functional.FusedLinearForPPO()(hidden, weight, ids, 0.7)
        assert torch_functional.FusedLinearForPPO is not own
    else:
        with klfast.compat.patch("verl"):
            found = before(hidden, weight, ids, 0.7)
    assert len(calls) == 1
    for mine, other in zip(found, theirs, strict=True):
        assert_close(mine, other, rounding(hidden, weight, 0.7))


@pytest.mark.parametrize(("exact", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_patch_passes_exact_on(exact, dtype):
    hidden, weight = model(torch.bfloat16, N)
    with klfast.compat.patch("verl", exact=exact):
        logprobs, entropy = torch_functional.FusedLinearForPPO()(
            hidden, weight, torch.randint(V, (N,))
        )
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, dtype)


def cross_entropy_call(dtype, rows, reduction, temperature):
    """Arguments, and what flows to log-probs and entropies."""
    hidden, weight = model(dtype, rows, width=128)
    of_logprobs = torch.linspace(0.5, 1.5, rows) if reduction == "none" else torch.ones(())
    return {
        "hidden": hidden,
        "weight": weight,
        "labels": torch.randint(V, (rows,)),
        "temperature": temperature,
        "reduction": reduction,
        "upstream": (of_logprobs, torch.linspace(1, 2, rows)),
    }


def test_linear_cross_entropy(tmp_path):
    """Values and gradients of verl's Triton kernels, of rows that are a multiple of 16 and others:
    of these its sums over the log-probs are infinite, and its gradients right.
    """
    calls = [
        cross_entropy_call(torch.float32, 5, "none", 1.0),
        cross_entropy_call(torch.float32, 5, "sum", 0.7),
        cross_entropy_call(torch.float32, 16, "mean", 0.7),
        cross_entropy_call(torch.float16, 16, "none", 1.5),  # the interpreter multiplies no bf16
    ]
    script = Path(__file__).with_name("interpreted_entropy.py")
    for call, theirs in zip(calls, interpreted(script, calls, tmp_path, "-O"), strict=True):
        given = {name: value for name, value in call.items() if name != "upstream"}
        leaves = [given[name].clone().requires_grad_() for name in ("hidden", "weight")]
        given |= dict(zip(("hidden", "weight"), leaves, strict=True))
        outputs = verl.linear_cross_entropy(**given)
        grads = torch.autograd.grad(outputs, leaves, call["upstream"])
        share = rounding(call["hidden"], call["weight"], call["temperature"])
        if call["reduction"] != "none" and len(call["labels"]) % 16:
            assert theirs[0].isinf()
            assert outputs[0].isfinite()
        else:
            assert_close(outputs[0].detach(), theirs[0], share)
        assert_close(outputs[1].detach(), theirs[1], share)
        eps = torch.finfo(call["hidden"].dtype).eps  # to which verl rounds the logits' gradients
        for mine, other in zip(grads, theirs[2:], strict=True):
            assert mine.dtype == other.dtype == call["hidden"].dtype
            assert_close(mine, other, max(share, 2 * eps))
