"""Temperatures in tensors: their dtypes, layouts, shapes and bad values."""

import re

import agreement_logits as al
import pytest
import torch
from agreement import same_bits

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")

B, T, V = 2, 3, 37
BAD = {"zero": 0.0, "negative": -0.5, "nan": torch.nan, "infinite": torch.inf, "tiny": 2.0**-130}


@pytest.mark.parametrize("dtype", [*al.FLOATS, torch.int64, torch.uint8], ids=str)
def test_temperatures_of_any_dtype_and_layout(backend, dtype):
    """No call rounds the stored temperature."""
    logits, _ = al.random_logits(B, T, V)
    ids = al.random_ids(logits)
    stored = (1 + torch.arange(B * T).reshape(B, T) / 2).to(dtype)
    expected = klfast.token_logprobs(logits, ids, temperature=stored.double(), backend=backend)
    strided = torch.stack([stored, stored], -1)[..., 1]
    for own in (stored, stored.t().contiguous().t(), strided):
        found = klfast.token_logprobs(logits, ids, temperature=own, backend=backend)
        assert same_bits(found, expected)


@pytest.mark.grid
@pytest.mark.usefixtures("values_are_checked")
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("shape", [(), (B, T)], ids=["one", "token"])
@pytest.mark.parametrize("call", ["token_logprobs", "kl_divergence", "topk_kl_divergence"])
def test_a_temperature_that_is_none_is_named_with_its_place(backend, call, shape, bad):
    logits, ref_logits = al.random_logits(B, T, V)
    temperature = 0.5 + torch.rand(shape)
    temperature.view(-1)[-1] = bad
    place = "" if shape == () else " at token 5"
    text = rf"temperature must be > 0 with a reciprocal within fp32, got {bad:.6g}{place}$"
    others = {
        "token_logprobs": (al.random_ids(logits),),
        "kl_divergence": (ref_logits,),
        "topk_kl_divergence": ref_logits.log_softmax(-1).topk(2)[::-1],
    }[call]
    for grad in (False, True):
        with pytest.raises(ValueError, match=text):
            getattr(klfast, call)(
                logits.clone().requires_grad_(grad),
                *others,
                temperature=temperature,
                backend=backend,
            )


@pytest.mark.parametrize("shape", [(3,), (B, T, 1), (3, 1), (1, B), (B, T, V), (0,)], ids=str)
def test_shapes_that_are_not_the_tokens(shape):
    logits, ref_logits = al.random_logits(B, T, V)
    text = (
        r"temperature must be a number, a 0-dim tensor, or have the first dimensions of logits "
        rf"without the vocabulary, \[2, 3\], or 1 in their place, got {re.escape(str(list(shape)))}"
    )
    temperature = torch.ones(shape)
    with pytest.raises(ValueError, match=text):
        klfast.token_logprobs(logits, al.random_ids(logits), temperature=temperature)
    with pytest.raises(ValueError, match=text):
        klfast.kl_divergence(logits, ref_logits, temperature=temperature)
