"""Chunks: their size, the bits of a token, and their memory."""

import json
import os

import pytest
import torch
from agreement import same_bits
from agreement_logits import wrong
from fresh import run_fresh

import klfast
from klfast.autograd import chunks as chunks_of_tokens
from klfast.types.names import DIRECTIONS


def test_a_chunk_is_any_integer():
    numpy = pytest.importorskip("numpy")
    hidden, weight, ids = torch.randn(3, 4), torch.randn(9, 4), torch.arange(3)
    wanted = klfast.linear_token_logprobs(hidden, weight, ids, chunk=16)
    for chunk in (numpy.int64(16), numpy.int32(16)):
        found = klfast.linear_token_logprobs(hidden, weight, ids, chunk=chunk)
        assert same_bits(found, wanted)
    logits = hidden @ weight.t()
    found = klfast.token_logprobs(logits, ids, ignore_index=numpy.int64(1))
    assert same_bits(found, klfast.token_logprobs(logits, ids, ignore_index=1))


def test_a_captured_graph_computes_all_tokens(monkeypatch):
    """Masked tokens are zeros, because counting the others would sync."""
    hidden = torch.randn(5, 4, requires_grad=True)
    weight, ref_hidden = torch.randn(9, 4, requires_grad=True), torch.randn(5, 4)
    keep = torch.tensor([True, False, True, True, False])
    with torch.no_grad():
        hidden[1], ref_hidden[4] = torch.nan, torch.inf

    def run():
        kl = klfast.linear_kl_divergence(
            hidden, weight, ref_hidden, mask=keep, reduction="token-mean", chunk=2
        )
        logprobs = klfast.linear_token_logprobs(hidden, weight, torch.arange(5), keep, chunk=2)
        loss = kl + logprobs.sum()
        ids, reciprocal = torch.arange(5), torch.where(keep, 2.0, torch.nan)
        given = hidden, weight, ids, lambda logprobs, factor: logprobs.exp() / factor
        loss = loss + klfast.linear_token_loss(*given, keep, inputs=(reciprocal,), chunk=2).loss
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    wanted = run()
    monkeypatch.setattr("klfast.autograd.chunks._is_unknown", lambda keep: True)
    for a, b in zip(run(), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("chunk", "width"), [(16, 64), (3, 33)])
def test_bits_are_the_tokens_own_at_a_fixed_chunk(chunk, width, dtype):
    """A token's bits do not depend on the batch, its position or the mask."""
    words, rows = 3000, 41
    hidden, weight = torch.randn(rows, width).to(dtype), torch.randn(words, width).to(dtype)
    ref_hidden = torch.randn(rows, width).to(dtype)
    ids = torch.randint(words, (rows,))

    def run(of, mask=None):
        return klfast.linear_kl_divergence(
            hidden[of], weight, ref_hidden[of], mask=mask, token_ids=ids[of], chunk=chunk
        )[:3]

    whole = run(slice(None))
    order = torch.randperm(rows)
    keep = torch.rand(rows) < 0.5
    for of in (slice(0, 1), slice(3, 20), order):
        assert all(same_bits(a, b[of]) for a, b in zip(run(of), whole, strict=True))
    for a, b in zip(run(slice(None), keep), whole, strict=True):
        assert same_bits(a[keep], b[keep])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gradients", [False, True])
def test_products_of_16_bits_have_fp32_results(monkeypatch, gradients, dtype):
    """A replacement for CUDA's matmuls multiplies the same numbers and sums in fp32. Gradients are
    never rounded to fp16.
    """
    mm, addmm = torch.mm, torch.addmm
    counted = []

    def wide(a, b, out_dtype=None, out=None):
        if out_dtype is None:
            return mm(a, b) if out is None else mm(a, b, out=out)
        assert a.dtype == b.dtype == dtype
        counted.append((a.shape, b.shape))
        result = mm(a.to(out_dtype), b.to(out_dtype))
        return result if out is None else out.copy_(result)

    def wide_sum(total, a, b, out_dtype, out):
        assert a.dtype == b.dtype == dtype
        counted.append((a.shape, b.shape))
        return out.copy_(addmm(total, a.to(out_dtype), b.to(out_dtype)))

    hidden, weight, ref_hidden = (
        torch.randn(rows, 8).to(dtype).requires_grad_(gradients) for rows in (11, 50, 11)
    )

    def run():
        kl = klfast.linear_kl_divergence(
            hidden, weight, ref_hidden.detach(), reduction="token-mean", chunk=4
        )
        return (kl, *(torch.autograd.grad(kl, (hidden, weight)) if gradients else ()))

    blocks = run()
    monkeypatch.setattr(
        chunks_of_tokens, "_is_wide_product", lambda a, b: a.dtype == b.dtype == dtype
    )
    monkeypatch.setattr(torch, "mm", wide)
    monkeypatch.setattr(torch, "addmm", wide_sum)
    found = run()
    assert len(counted) == 3 * (4 if gradients and dtype == torch.bfloat16 else 2)
    torch.testing.assert_close(found[0], blocks[0], rtol=1e-6, atol=0)
    for a, b in zip(found[1:], blocks[1:], strict=True):  # gradients are rounded to bf16
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@pytest.mark.parametrize("ref_noise", [1e-2, 3e-2])
def test_digits_near_the_policy(ref_noise):
    """A KL of 1e-5 keeps digits from bf16 hidden states and weights."""
    hidden, weight = torch.randn(64, 128).bfloat16(), torch.randn(2000, 128).bfloat16()
    ref_hidden = (hidden.float() + ref_noise * torch.randn(64, 128)).bfloat16()
    p, q = ((h.double() @ weight.double().t() / 4).log_softmax(-1) for h in (hidden, ref_hidden))
    exact = (p.exp() * (p - q)).sum(-1)
    found = klfast.linear_kl_divergence(hidden, weight, ref_hidden, temperature=4.0)
    error = ((found.double() - exact).abs() / exact)[exact > 1e-5]
    assert error.max() < 5e-2
    logits = ((h @ weight.t() / 4).float() for h in (hidden, ref_hidden))
    rounded = klfast.kl_divergence(*logits)
    assert (rounded - exact).abs().mean() > 10 * (found - exact).abs().mean()


@pytest.mark.parametrize("apart", [0.0, 1e-9], ids=["equal", "near"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_reference_is_never_negative_and_0_at_equal_models(direction, apart):
    """The memory layout decides how a matmul rounds, so any layout is tested."""
    hidden, weight = (torch.randn(n, 33, dtype=torch.float64) for n in (40, 301))
    near = hidden + apart * torch.randn_like(hidden)
    unaligned = torch.cat([near.new_zeros(1), near.flatten()])[1:].view(near.shape)
    for other in (unaligned, near.t().contiguous().t()):
        for head in (None, weight.t().contiguous().t()):
            found = klfast.linear_kl_divergence(
                hidden, weight, other, head, direction=direction, backend="reference"
            )
            assert (found >= 0).all()
            assert apart or not found.any()


def test_a_reference_may_have_another_width(backend):
    heads = {"weight": torch.randn(37, 8), "ref_weight": torch.randn(37, 6)}
    given = {"hidden": torch.randn(2, 3, 8), "ref_hidden": torch.randn(2, 3, 6), **heads}
    for leaves in (("hidden", "ref_weight"), (*given,)):
        assert not wrong(backend, "linear_kl_divergence", leaves, **given, chunk=4)


MEASURE = """
import json, torch, klfast
torch.set_num_threads(1)
ROWS, WIDTH, WORDS, CHUNK = 512, 32, 40_000, 64

def memory(field):
    lines = (line.split() for line in open("/proc/self/status"))
    return next(int(line[1]) * 1024 for line in lines if line[0] == field)

hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
weight = torch.randn(WORDS, WIDTH)
ref_hidden = torch.randn(ROWS, WIDTH)
ids = torch.randint(WORDS, (ROWS,))
kl = klfast.linear_kl_divergence
CALLS = {
    "scalar": lambda w: kl(hidden, w, ref_hidden, weight, reduction="token-mean", chunk=CHUNK),
    "per token": lambda w: kl(hidden, w, ref_hidden, weight, chunk=CHUNK).sum(),
    "log-probs": lambda w: klfast.linear_token_logprobs(hidden, w, ids, chunk=CHUNK).sum(),
    "loss": lambda w: klfast.linear_token_loss(hidden, w, ids, torch.neg, chunk=CHUNK).loss,
}

def taken(call, trained):
    own = weight.clone().requires_grad_(trained)
    grads = [torch.zeros_like(t) for t in (hidden, own)]
    before = memory("VmRSS:")
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    hidden.grad = own.grad = None
    call(own).backward()
    peak = memory("VmHWM:") - before
    made = own.numel() * 4 if trained else 0
    return (peak - made) / (4 * CHUNK * WORDS)

found = {}
for name, call in CALLS.items():
    for trained in (False, True):
        taken(call, trained)
        found[f"{name}, {'trained' if trained else 'frozen'}"] = taken(call, trained)
print(json.dumps(found))
"""


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak to reset on this system"
)
def test_memory_above_inputs_and_gradients():
    """A call holds one chunk of logits per model. Log-probs of a frozen head hold one more."""
    found = json.loads(run_fresh(MEASURE, timeout=120, MALLOC_MMAP_THRESHOLD_="65536"))
    models = {"scalar": 2, "per token": 2, "log-probs": 1, "loss": 1}
    for name, chunks in found.items():
        call, head = name.split(", ")
        held = 1 if (call, head) == ("log-probs", "frozen") else 0
        assert chunks < (models[call] + held) * 1.1, (name, chunks)
