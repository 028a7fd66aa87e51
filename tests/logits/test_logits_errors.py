"""Bad input over logits: one clear error that names the argument, what it must be, what it got."""

import math
import re

import pytest
import torch
from agreement_logits import NOT_EMULATED
from refusals import assert_refused, cases, weights
from torch._subclasses.fake_tensor import FakeTensorMode

import klfast

NAN, INF = math.nan, math.inf
OF_A_SHARD = ": with tensor parallelism, pass group= for a shard of the vocabulary$"


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


def ids(value, dtype=torch.int64):
    """Good token ids but for the last row's middle."""
    tensor = torch.ones(2, 3, dtype=dtype)
    tensor[1, 1] = value
    return tensor


LOGITS_VALUES = {
    **{
        f"{argument}-{shape}": (
            {argument: torch.zeros(shape, dtype=torch.int64)},
            rf"{argument} must have the shape of logits without the vocabulary, \[2, 3\], "
            rf"{or_k}got {re.escape(str(list(shape)))}",
        )
        for argument, or_k in (
            ("token_ids", r"(or K ids a token, \[2, 3, K\], )?"),
            ("mask", ""),
        )
        for shape in ((), (3,), (1, 3), (2, 1), (2, 4), (3, 2), (1, 3, 2), (2, 3, 5, 1))
    },
    "mask-of-K": (
        {"mask": torch.zeros(2, 3, 5)},
        r"mask must have the shape of logits without the vocabulary, \[2, 3\], got \[2, 3, 5\]",
    ),
    **{
        f"id-{value}-{dtype}": (
            {"token_ids": ids(value, dtype)},
            rf"token_ids must be in \[0, 5\) where tokens are kept, got {value} at token 4"
            + {-100: ": it marks a token that is left out, so mask it$"}.get(
                value, "$" if value < 0 else OF_A_SHARD
            ),
        )
        for value, dtype in (
            (5, torch.int64),
            (-1, torch.int64),
            (-100, torch.int32),
            (255, torch.uint8),
            (2**62, torch.int64),
            (-(2**63), torch.int64),
        )
    },
}
TOKENS_VALUES = {
    "an-id-beside-ignored-ones": (
        {"token_ids": ids(-2), "ignore_index": 1},
        r"token_ids must be in \[0, 5\) where tokens are kept, got -2 at token 4$",
    ),
}
DIVERGENCE_VALUES = {
    **{
        f"ref-{shape}": (
            {"ref_logits": zeros(shape)},
            rf"ref_logits must have the shape of logits, \[2, 3, 5\], "
            rf"got {re.escape(str(list(shape)))}{remedy}$",
        )
        for shape, remedy in (
            ((2, 3, 6), r": slice both to the common vocabulary, logits\[\.\.\., :5\]"),
            ((2, 3, 1), r": slice both to the common vocabulary, logits\[\.\.\., :1\]"),
            *(((6, 5), ""), ((3, 2, 5), ""), ((1, 3, 5), "")),
        )
    },
    **{
        f"jsd_beta-{value!r}": (
            {"jsd_beta": value, "direction": "jsd"},
            f"jsd_beta must be a number between 0 and 1, got {value!r}: 0 is direction='forward', "
            "and 1 is direction='reverse'$",
        )
        for value in (0, 0.0, 1, 1.0)
    },
}


not_emulated = pytest.mark.parametrize("backend", NOT_EMULATED, indirect=True)


def asking_for_a_gradient(arguments, requires_grad):
    logits = arguments["logits"]
    if requires_grad and isinstance(logits, torch.Tensor) and logits.is_floating_point():
        arguments["logits"] = logits.detach().requires_grad_()
    return arguments


requires_grad = pytest.mark.parametrize("requires_grad", [False, True], ids=["no-grad", "grad"])


@pytest.mark.grid
@requires_grad
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    cases({}, LOGITS_VALUES | TOKENS_VALUES),
)
@not_emulated
def test_token_logprobs_refuses(backend, arguments, error, message, requires_grad):
    good = {"logits": zeros(2, 3, 5), "token_ids": ids(0), "backend": backend}
    arguments = asking_for_a_gradient({**good, **arguments}, requires_grad)
    assert_refused(klfast.token_logprobs, arguments, error, message)


@pytest.mark.grid
@requires_grad
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    cases({}, LOGITS_VALUES | DIVERGENCE_VALUES),
)
@not_emulated
def test_kl_divergence_refuses(backend, arguments, error, message, requires_grad):
    good = {"logits": zeros(2, 3, 5), "ref_logits": torch.ones(2, 3, 5), "backend": backend}
    arguments = asking_for_a_gradient({**good, **arguments}, requires_grad)
    assert_refused(klfast.kl_divergence, arguments, error, message)


@pytest.mark.parametrize("reduction", ["none", "seq-sum", "token-mean"])
@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
@not_emulated
def test_what_is_refused_is_refused_by_every_path(backend, direction, reduction):
    """With a gradient from the same read, from a second one, and without one."""
    for requires_grad in (False, True):
        logits = zeros(2, 3, 5).requires_grad_(requires_grad)
        options = {"direction": direction, "reduction": reduction, "backend": backend}
        with pytest.raises(ValueError, match=r"mask must hold finite weights >= 0, got -1.0"):
            klfast.kl_divergence(logits, zeros(2, 3, 5), weights(-1.0), **options)
        with pytest.raises(ValueError, match=r"token_ids must be in \[0, 5\)"):
            klfast.kl_divergence(logits, zeros(2, 3, 5), token_ids=ids(5), **options)


@not_emulated
def test_ids_under_the_mask_are_not_refused(backend):
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1, 1] = False
    logits = zeros(2, 3, 5)
    found = klfast.token_logprobs(logits, ids(2**62), mask=mask, backend=backend)
    assert found[1, 1] == 0
    found = klfast.kl_divergence(logits, logits, mask, token_ids=ids(-5), backend=backend)
    assert found.logprobs[1, 1] == found.ref_logprobs[1, 1] == 0


@not_emulated
def test_the_first_bad_id_is_the_one_that_is_named(backend):
    token_ids = torch.zeros(3, 5000, dtype=torch.int64)
    token_ids[1, 4097] = 7
    token_ids[2, 0] = -1
    with pytest.raises(ValueError, match=r"got 7 at token 9097"):
        klfast.token_logprobs(zeros(3, 5000, 2), token_ids, backend=backend)


@not_emulated
def test_a_coefficient_beyond_the_arithmetics_dtype(backend):
    with pytest.raises(ValueError, match=r"^coef must be finite .*, got 1e\+39"):
        klfast.kl_divergence(zeros(2, 5), zeros(2, 5), coef=1e39, backend=backend)


def test_rows_too_long_for_the_cuda_kernels_are_refused():
    with FakeTensorMode():
        logits = torch.empty(1, 2**30 + 1, dtype=torch.bfloat16, device="cuda")
        ids = torch.zeros(1, dtype=torch.int64, device="cuda")
        message = "logits must have at most 1073741824 words on a GPU, got 1073741825"
        with pytest.raises(ValueError, match=message):
            klfast.token_logprobs(logits, ids)
        with pytest.raises(ValueError, match=message):
            klfast.kl_divergence(logits, logits)
