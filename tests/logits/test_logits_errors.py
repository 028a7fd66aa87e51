"""Bad logits give one error that names the argument, the requirement and the given value."""

import re

import pytest
import torch
from agreement_logits import NOT_EMULATED
from refusals import assert_refused, cases
from torch._subclasses.fake_tensor import FakeTensorMode

import klfast

OF_A_SHARD = ": with tensor parallelism, pass group= for a shard of the vocabulary"


def ids(value, dtype=torch.int64):
    """Good token ids, except for the middle of the last row."""
    tensor = torch.ones(2, 3, dtype=dtype)
    tensor[1, 1] = value
    return tensor


OF_TOKENS = {
    **{
        f"{argument}-{shape}": (
            {argument: torch.zeros(shape, dtype=torch.int64)},
            rf"{argument} must have the shape of logits without the vocabulary, \[2, 3\], "
            rf"{or_k}got {re.escape(str(list(shape)))}",
        )
        for argument, or_k, shapes in (
            ("token_ids", r"(or K ids per token, \[2, 3, K\], )?", ((3,), (2, 1), (1, 3, 2))),
            ("mask", "", ((3,), (2, 1), (2, 3, 5))),
        )
        for shape in shapes
    },
    **{
        f"id-{value}-{dtype}": (
            {"token_ids": ids(value, dtype)},
            rf"token_ids must be in \[0, 5\) where tokens are kept, got {value} "
            rf"at token 4{remedy}$",
        )
        for value, dtype, remedy in (
            (-1, torch.int64, ""),
            (-100, torch.int32, ": it marks a token that is left out, so mask it"),
            (255, torch.uint8, OF_A_SHARD),
        )
    },
}
OF_DIVERGENCES = {
    **{
        f"ref-{shape}": (
            {"ref_logits": torch.zeros(shape)},
            rf"ref_logits must have the shape of logits, \[2, 3, 5\], "
            rf"got {re.escape(str(list(shape)))}{remedy}$",
        )
        for shape, remedy in (
            ((2, 3, 6), r": slice both to the common vocabulary, logits\[\.\.\., :5\]"),
            ((3, 2, 5), ""),
            ((1, 3, 5), ""),
        )
    },
    **{
        f"jsd_beta-{value!r}": (
            {"jsd_beta": value, "direction": "jsd"},
            f"jsd_beta must be a number between 0 and 1, got {value!r}: 0 is direction='forward', "
            "and 1 is direction='reverse'$",
        )
        for value in (0, 1.0)
    },
    **{
        f"skew_alpha-{value!r}": (
            {"skew_alpha": value, "direction": "tv"},
            f"skew_alpha must be 0 or a number from 1e-30 to below 1, got {value!r}: 0 is the KL "
            "itself, and at 1 the mixture is the first model$",
        )
        for value in (1, -0.1, 1e-31)
    },
}


pytestmark = pytest.mark.usefixtures("values_are_checked")
not_emulated = pytest.mark.parametrize("backend", NOT_EMULATED, indirect=True)


@pytest.mark.parametrize(("arguments", "error", "message"), cases({}, OF_TOKENS))
@not_emulated
def test_token_logprobs_refuses(backend, arguments, error, message):
    good = {"logits": torch.zeros(2, 3, 5), "token_ids": ids(0), "backend": backend}
    assert_refused(klfast.token_logprobs, good | arguments, error, message)


@pytest.mark.parametrize(("arguments", "error", "message"), cases({}, OF_TOKENS | OF_DIVERGENCES))
@not_emulated
def test_kl_divergence_refuses(backend, arguments, error, message):
    good = {"logits": torch.zeros(2, 3, 5), "ref_logits": torch.ones(2, 3, 5), "backend": backend}
    assert_refused(klfast.kl_divergence, good | arguments, error, message)


@not_emulated
def test_the_first_bad_id_is_the_one_that_is_named(backend):
    token_ids = torch.zeros(3, 5000, dtype=torch.int64)
    token_ids[1, 4097] = 7
    token_ids[2, 0] = -1
    with pytest.raises(ValueError, match=r"got 7 at token 9097"):
        klfast.token_logprobs(torch.zeros(3, 5000, 2), token_ids, backend=backend)


@not_emulated
def test_a_coefficient_beyond_the_arithmetics_dtype(backend):
    with pytest.raises(ValueError, match=r"^coef must be finite .*, got 1e\+39"):
        klfast.kl_divergence(torch.zeros(2, 5), torch.zeros(2, 5), coef=1e39, backend=backend)


def test_rows_too_long_for_the_cuda_kernels_are_refused():
    with FakeTensorMode():
        logits = torch.empty(1, 2**30 + 1, dtype=torch.bfloat16, device="cuda")
        ids = torch.zeros(1, dtype=torch.int64, device="cuda")
        message = "logits must have a vocabulary of at most 1073741824 on a GPU, got 1073741825"
        with pytest.raises(ValueError, match=message):
            klfast.token_logprobs(logits, ids)
        with pytest.raises(ValueError, match=message):
            klfast.kl_divergence(logits, logits)
