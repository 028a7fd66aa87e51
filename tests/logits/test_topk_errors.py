"""Bad input of topk_kl_divergence gives one error that names the argument and the place."""

import math
import re

import pytest
import torch
from agreement_logits import COMPILED, NOT_EMULATED, leaves, teacher
from refusals import assert_refused, cases

import klfast

NAN, INF = math.nan, math.inf
ENTRIES = r"must have the shape \[2, 3, K\], with K >= 1 entries per token"


OF_GPUS = [name for name in COMPILED if name != "native"]


def ids(value=None, token=4, entry=1):
    """[2, 3, 4] good ids, except for one."""
    good = torch.arange(4).expand(2, 3, 4).clone()
    if value is not None:
        good.view(-1, 4)[token, entry] = value
    return good


VALUES = {
    **{
        f"{name}-{shape}": (
            {name: torch.full(shape, -1).to(dtype)},
            rf"{name} {ENTRIES}, got {re.escape(str(list(shape)))}",
        )
        for name, dtype in (("ref_token_ids", torch.int64), ("ref_logprobs", torch.float32))
        for shape in ((), (2, 3), (3, 4), (2, 3, 0), (2, 2, 4), (1, 3, 4), (2, 3, 4, 1))
    },
    "other-entries": (
        {"ref_logprobs": torch.full((2, 3, 5), -1.0)},
        r"ref_logprobs must have the shape of ref_token_ids, \[2, 3, 4\], got \[2, 3, 5\]",
    ),
    "four-dims": (
        {"logits": torch.zeros(2, 3, 4, 9)},
        r"logits must have shape \[B, T, V\] or \[N, V\], got \[2, 3, 4, 9\]",
    ),
    "mask-of-K": (
        {"mask": torch.ones(2, 3, 4)},
        r"mask must have the shape of logits without the vocabulary, \[2, 3\], got \[2, 3, 4\]",
    ),
    "one-entry-renormalised": (
        {
            "tail": "renormalize",
            "ref_token_ids": ids()[..., :1],
            "ref_logprobs": torch.full((2, 3, 1), -1.0),
        },
        r"tail must not be 'renormalize' with one entry per token, got ref_.* \[2, 3, 1\]: ",
    ),
    **{
        f"id-{value}": (
            {"ref_token_ids": ids(value)},
            rf"ref_token_ids must be in \[0, 9\) where tokens are kept, got {value} at token 4, "
            r"entry 1",
        )
        for value in (-1, 9, -100, 2**40, -(2**63) + 1)
    },
    "lowest-id": (
        {"ref_token_ids": ids(-(2**63))},  # to the kernels no entry at all
        r"ref_token_ids must be in \[0, 9\) .* at token 4, entry 1",
    ),
    **{
        f"repeated-{entry}": (
            {"ref_token_ids": ids(2, entry=entry)},
            rf"ref_token_ids must be distinct within a token, got 2 in entries {entry} and 2 of "
            "token 4$",
        )
        for entry in (0, 1)
    },
}

pytestmark = pytest.mark.usefixtures("values_are_checked")
not_emulated = pytest.mark.parametrize("backend", NOT_EMULATED, indirect=True)


@pytest.mark.grid
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize(("arguments", "error", "message"), cases({}, VALUES))
@not_emulated
def test_what_is_refused(backend, arguments, error, message, requires_grad):
    good = {
        "logits": torch.zeros(2, 3, 9).requires_grad_(requires_grad),
        "ref_token_ids": ids(),
        "ref_logprobs": torch.full((2, 3, 4), -2.0),
    }
    given = {**good, "backend": backend, **arguments}
    assert_refused(klfast.topk_kl_divergence, given, error, message)


@not_emulated
def test_bad_ids_of_what_does_not_exist_are_not_refused(backend):
    """Bad and repeated ids are ignored under the mask or with a log-prob of -inf."""
    logits, own, ref_logprobs = teacher(2, 3, 9).values()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    own[0, 2] = torch.tensor([9, -1, 3, 3])
    own[1, 1, :2] = own[1, 1, 2]
    ref_logprobs[1, 1, :2] = -INF
    found = klfast.topk_kl_divergence(logits, own, ref_logprobs, mask, backend=backend)
    assert found.isfinite().all()
    assert found[0, 2] == 0


@pytest.mark.parametrize("backend", OF_GPUS, indirect=True)
@pytest.mark.parametrize("absurd", [-1, 37, 2**62, -(2**63) + 1])
def test_nothing_is_read_for_an_id_that_is_no_word(backend, absurd, monkeypatch):
    """GPUs do not check values. Only this token is NaN."""
    logits, own, ref_logprobs = teacher(2, 3, 37).values()
    own[1, 1, 2] = absurd
    monkeypatch.setattr("klfast.backends.are_checked", lambda *_, **__: False)
    monkeypatch.setattr("klfast.backends.can_be_read", lambda *_, **__: False)
    (leaf,) = leaves(logits)
    found = klfast.topk_kl_divergence(leaf, own, ref_logprobs, backend=backend)
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    for of in (found.isnan(), grad.isnan().any(-1)):
        assert of.flatten().tolist() == [False] * 4 + [True, False]
