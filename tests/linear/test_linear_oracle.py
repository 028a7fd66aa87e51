"""Both functions from hidden states against the textbook, every option with every other."""

import draws_linear
import oracle_linear
import pytest
import torch

import klfast

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
