"""The ops write KL's gradients over the logits. The bits are the same as in new memory."""

import emulated
import pytest
import torch
from agreement import same_bits
from agreement_logits import COMPILED, FLOATS, random_logits
from targets import TARGETS

import klfast
from klfast.args.rows import ENTROPIES
from klfast.formulas.divergences import DIVERGENCES

assert klfast.info()  # loads the extension
KEEP = torch.tensor([True, False, True, True, False, True])
NONE = ENTROPIES.index("none")
WANTS = [(True, False), (False, True), (True, True)]


@pytest.fixture(params=COMPILED)
def ops(request):
    target = TARGETS[request.param]
    if target.is_emulated:
        emulated.ops()
        return torch.ops.klfast_emulated
    return {"native": torch.ops.klfast, "triton": torch.ops.klfast_triton}[target.backend]


@pytest.mark.grid(each="ops")
@pytest.mark.parametrize("wants", WANTS, ids=str)
@pytest.mark.parametrize("words", [7, 301, 1100, 5000])
@pytest.mark.parametrize(
    ("divergence", "beta"),
    [("kl", 0.5), ("jsd", 0.3), ("jsd", 0.8), ("tv", 0.5), ("skew", 0.1), ("skew", 0.7)],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_are_those_of_gradients_apart(ops, dtype, divergence, beta, words, wants):
    logits, ref_logits = random_logits(1, 6, words, dtype=dtype)
    logits[0, 2, 5] += 30  # one id has nearly all the probability
    options = (KEEP, DIVERGENCES.index(divergence), beta, 0.7)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.linspace(0.5, 2, 6, dtype=arithmetic)
    rows, _, _, saved, *grads, _ = ops.kl_divergence_fwd(
        logits, ref_logits, None, *options, NONE, weights, *wants, None
    )
    models = [logits.clone(), ref_logits.clone()]
    own_rows, own_saved = ops.kl_divergence_fwd_(*models, *options, weights, *wants, None)
    assert same_bits(own_rows, rows)
    assert same_bits(own_saved, saved)
    for model, before, grad, want in zip(models, (logits, ref_logits), grads, wants, strict=True):
        assert same_bits(model, grad if want else before)
    again = [logits.clone(), ref_logits.clone()]
    ops.kl_divergence_bwd_(*again, *options, rows, saved, weights, *wants, None)
    apart = ops.kl_divergence_bwd(
        logits, ref_logits, None, *options, NONE, rows, saved, None, weights, None, None, None,
        *wants, None,
    )  # fmt: skip
    for model, before, grad, want in zip(again, (logits, ref_logits), apart, wants, strict=True):
        assert same_bits(model, grad if want else before)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_gradient_stays_in_its_place(ops, offset):
    """Rows may begin at any address and share a 32-bit word."""
    logits, ref_logits = random_logits(1, 3, 301, dtype=torch.bfloat16)
    weights, options = torch.ones(3), (None, 0, 0.5, 1.0)
    wanted = [logits.clone(), ref_logits.clone()]
    ops.kl_divergence_fwd_(*wanted, *options, weights, True, True, None)
    memory = torch.full((2, logits.numel() + 16), 7.0, dtype=torch.bfloat16)
    end = offset + logits.numel()
    models = [
        own[offset:end].view_as(logits).copy_(t)
        for own, t in zip(memory, (logits, ref_logits), strict=True)
    ]
    ops.kl_divergence_fwd_(*models, *options, weights, True, True, None)
    assert all(same_bits(a, b) for a, b in zip(models, wanted, strict=True))
    assert (memory[:, :offset] == 7).all()
    assert (memory[:, end:] == 7).all()


def test_what_cannot_be_written_over_is_refused():
    logits, ref_logits = random_logits(1, 3, 8)
    strided = random_logits(1, 3, 16)[0][..., ::2]
    rest = (None, 0, 0.5, 1.0, torch.ones(3))
    op = torch.ops.klfast.kl_divergence_fwd_
    with pytest.raises(RuntimeError, match="logits must be contiguous to be written over"):
        op(strided, ref_logits, *rest, True, False, None)
    with pytest.raises(RuntimeError, match="ref_logits must be contiguous to be written over"):
        op(logits, strided, *rest, False, True, None)
    with pytest.raises(RuntimeError, match="logits must not be ref_logits"):
        op(logits, logits, *rest, True, False, None)
