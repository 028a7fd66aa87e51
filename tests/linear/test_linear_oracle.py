"""Both functions from hidden states against the textbook, every option with every other."""

import draws_linear
import oracle_linear
import pytest
import torch

import klfast
from klfast.types.names import DIRECTIONS

OF_TOKENS = draws_linear.rows(draws_linear.OPTIONS)
OF_DIVERGENCES = draws_linear.rows(draws_linear.OF_DIVERGENCES)


def found_by(call, backend):
    """What klfast makes of a call, by name, and the gradients of its leaves."""
    tensors = call.given()
    options = call.options | {"mask": call.mask, "token_ids": call.token_ids, "backend": backend}
    if call.has_reference:
        found = klfast.linear_kl_divergence(**tensors, **options)
    else:
        found = klfast.linear_token_logprobs(**tensors, **options)
    if isinstance(found, torch.Tensor):
        found = {"kl" if call.has_reference else "logprobs": found}
    else:
        found = {n: t for n, t in found._asdict().items() if isinstance(t, torch.Tensor)}
    return found, oracle_linear.gradients(call, tensors, found)


@pytest.mark.grid(each="backend", meet=1)
@pytest.mark.parametrize("row", OF_TOKENS, ids=draws_linear.name_of)
def test_token_logprobs(backend, row):
    call = draws_linear.call_of(row, reference=False)
    oracle_linear.assert_agrees(call, *found_by(call, backend))


@pytest.mark.grid(each="backend", meet=1)
@pytest.mark.parametrize("row", OF_DIVERGENCES, ids=draws_linear.name_of)
def test_kl_divergence(backend, row):
    call = draws_linear.call_of(row)
    oracle_linear.assert_agrees(call, *found_by(call, backend))


@pytest.mark.parametrize("apart", [0.0, 1e-9], ids=["equal", "near"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_reference_is_never_negative_and_0_at_equal_models(direction, apart):
    """In memory of any layout, which decides how a matmul rounds."""
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


@pytest.mark.parametrize("row", OF_DIVERGENCES[:60:4], ids=draws_linear.name_of)
def test_statistics_are_those_of_the_logits(row):
    """Those of ``kl_divergence`` on the logits in the arithmetic's dtype."""
    row = row | {"softcap": None, "head": "own", "ids": row["ids"] and "one"}
    call = draws_linear.call_of(row)
    tensors, dtype = call.tensors, oracle_linear.arithmetic(call)
    options = call.options | {"return_stats": True, "token_ids": call.token_ids}
    found = klfast.linear_kl_divergence(**tensors, mask=call.mask, **options).stats
    logits = []
    for hidden, weight, bias in oracle_linear.MODELS:
        rows = tensors[hidden].to(dtype) @ tensors[weight].to(dtype).t()
        logits.append(rows if tensors[bias] is None else rows + tensors[bias].to(dtype))
    options = {n: value for n, value in options.items() if n not in ("chunk", "softcap")}
    wanted = klfast.kl_divergence(*logits, call.mask, **options).stats
    for name, own, other in zip(found._fields, found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
