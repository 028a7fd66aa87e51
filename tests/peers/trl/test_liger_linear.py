"""klfast from hidden states against Liger's functions.

``LigerFusedLinearJSD`` is Triton, run in its interpreter; what verl calls under
``impl_backend="liger"`` is PyTorch where there is no GPU.
"""

import inspect
import itertools
from pathlib import Path

import pytest
import torch
from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction
from liger_kernel.transformers import LigerFusedLinearJSD, functional
from peer_kernels import interpreted

from klfast.compat import liger, verl

N, D, D_TEACHER, V = 13, 16, 12, 300
EPS = torch.finfo(torch.float32).eps


def model(dtype, width, *shape):
    """Hidden states and a head with a deviation of 3 nats in its logits."""
    hidden = torch.randn(*shape, width)
    return hidden.to(dtype), (3 / width**0.5 * torch.randn(V, width)).to(dtype)


def labels_of(kind):
    if kind == "all":
        return None
    labels = torch.randint(V, (N,))
    labels[:: 3 if kind == "some" else 1] = -100
    return labels


@pytest.mark.parametrize("part", ["__init__", "forward"])
def test_the_module_has_liger_s_arguments(part):
    theirs, ours = (
        [(p.name, p.default) for p in inspect.signature(getattr(m, part)).parameters.values()]
        for m in (LigerFusedLinearJSD, liger.LigerFusedLinearJSD)
    )
    assert ours == theirs


def test_the_function_has_liger_s_arguments():
    theirs, ours = (
        [
            (p.name, p.default)
            for p in inspect.signature(m.liger_fused_linear_jsd).parameters.values()
        ]
        for m in (functional, liger)
    )
    assert ours == theirs


def calls():
    """Every beta with every dtype and kind of labels; each form, gradient and temperature once."""
    others = itertools.cycle(
        [(True, 1.0, 1.0, None), (False, -0.5, 0.7, None), (True, 2.0, 1.5, torch.float32)]
    )
    for dtype, beta, kind in itertools.product(
        (torch.float32, torch.float64, torch.bfloat16), (0.0, 0.3, 1.0), ("all", "some", "none")
    ):
        is_module, upstream, temperature, accum_dtype = next(others)
        yield {
            "tensors": [*model(dtype, D, N), *model(dtype, D_TEACHER, N)],
            "labels": labels_of(kind),
            "upstream": upstream,
            "is_module": is_module,
            "jsd_beta": beta,
            "temperature": temperature,
            "accum_dtype": accum_dtype,
        }


def test_jsd(tmp_path):
    """fp32 as near as both round; fp64, of which Liger makes fp32, as near as that; of bf16 Liger's
    logits are rounded to it on a CPU.
    """
    made = [*calls()]
    script = Path(__file__).with_name("interpreted_jsd.py")
    for call, theirs in zip(made, interpreted(script, made, tmp_path), strict=True):
        given = {name: value for name, value in call.items() if name != "tensors"}
        leaves = [t.detach().requires_grad_(i < 2) for i, t in enumerate(call["tensors"])]
        labels, upstream, is_module = (given.pop(n) for n in ("labels", "upstream", "is_module"))
        if is_module:
            loss = liger.LigerFusedLinearJSD(**given)(*leaves, labels)
        else:
            loss = liger.liger_fused_linear_jsd(*leaves, labels, **given)
        ours = [loss.detach(), *torch.autograd.grad(loss * upstream, leaves[:2])]
        dtype = leaves[0].dtype
        assert [g.dtype for g in ours[1:]] == [g.dtype for g in theirs[1:]] == [dtype] * 2
        assert loss.shape == theirs[0].shape == ()
        # eps * z of a probability whose log is a difference of logits up to z nats, about 15 here.
        share = 16 * 15 * EPS / call["temperature"]
        if dtype == torch.bfloat16:
            share = 8 * torch.finfo(dtype).eps
        for mine, other in zip(ours, theirs, strict=True):
            if labels is not None and (labels == -100).all():
                assert (mine == 0).all()
                assert (other == 0).all()
            else:
                assert other.abs().max() > 0
                distance = (mine.double() - other.double()).norm()
                assert distance <= share * other.double().norm(), (call, distance)


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["some", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_verl_calls(dtype, kind, temperature, wants):
    """Where a word is -100, the log-prob, the entropy and their gradients are 0 in both."""
    tensors, ids = model(dtype, D, N), labels_of(kind)
    found = []
    for is_ours in (True, False):
        leaves = [t.clone().requires_grad_() for t in tensors]
        if is_ours:
            outputs = verl.FusedLinearForPPO(impl_backend="liger")(*leaves, ids, temperature)
        else:
            nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
                *leaves, ids, temperature, -100, 1, True
            )
            outputs = -nll, entropy
        sent = [o for o, want in zip(outputs, wants, strict=True) if want]
        upstream = [torch.linspace(0.5, 1.5, N).to(o.dtype) for o in sent]
        found.append([o.detach() for o in outputs] + [*torch.autograd.grad(sent, leaves, upstream)])
    share = 16 * 15 * EPS / temperature  # as of the JSD
    if dtype == torch.bfloat16:
        share = 16 * torch.finfo(dtype).eps
    for mine, other in zip(*found, strict=True):
        distance = (mine.double() - other.double()).norm()
        assert distance <= share * other.double().norm()
        assert kind == "some" or (mine == 0).all()
    missing = ids == -100
    assert all((t[missing] == 0).all() for own in found for t in own[:3])
