"""Bad input over logits: one clear error that names the argument, what it must be, what it got."""

import math
import re

import pytest
import torch
from agreement_logits import NOT_EMULATED
from refusals import A_TENSOR, FLOATS, ONE_OF_THE_DTYPES, POSITIVE, assert_refused, cases, weights
from torch._subclasses.fake_tensor import FakeTensorMode

import klfast
from klfast.backends import BACKENDS
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

NAN, INF = math.nan, math.inf
OF_A_SHARD = ": with tensor parallelism, pass group= for a shard of the vocabulary$"
INTEGERS = "torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64"


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


def ids(value, dtype=torch.int64):
    """Good token ids but for the last row's middle."""
    tensor = torch.ones(2, 3, dtype=dtype)
    tensor[1, 1] = value
    return tensor


LOGITS_TYPES = {
    "list-logits": ({"logits": [[0.0]]}, f"logits {A_TENSOR}, got list"),
    **{
        f"{dtype}-logits": (
            {"logits": zeros(2, 3, 5).to(dtype)},
            f"logits {ONE_OF_THE_DTYPES} {FLOATS}, got {dtype}",
        )
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    },
    "list-token_ids": ({"token_ids": [[0] * 3] * 2}, f"token_ids {A_TENSOR}, got list"),
    **{
        f"{dtype}-token_ids": (
            {"token_ids": zeros(2, 3, dtype=dtype)},
            f"token_ids {ONE_OF_THE_DTYPES} {INTEGERS}, got {dtype}",
        )
        for dtype in (torch.float32, torch.bool, torch.complex64)
    },
    "list-mask": ({"mask": [[1, 1, 1]] * 2}, f"mask {A_TENSOR}, got list"),
    "complex-mask": (
        {"mask": zeros(2, 3, dtype=torch.complex64)},
        f"mask {ONE_OF_THE_DTYPES} torch.bool, .*{FLOATS}, got torch.complex64",
    ),
    **{
        f"temperature-{value!r}": (
            {"temperature": value},
            f"temperature {POSITIVE}, got {re.escape(repr(value))} of type",
        )
        for value in ("1", None, True, [1.0])
    },
    "backend-none": ({"backend": None}, "unknown backend None; expected one of 'auto'"),
}
LOGITS_VALUES = {
    **{
        f"{name}-logits": (
            {"logits": zeros(shape)},
            r"logits must have shape \[..., V\] with at least one word, "
            rf"got {re.escape(str(list(shape)))}",
        )
        for name, shape in {"0-dim": (), "no-words": (2, 3, 0)}.items()
    },
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
        f"meta-{argument}": (
            {argument: torch.ones(2, 3, dtype=torch.int64, device="meta")},
            f"{argument} must be on the device of logits, cpu, got meta",
        )
        for argument in ("token_ids", "mask")
    },
    "sparse-logits": (
        {"logits": torch.ones(2, 3, 5).to_sparse()},
        "logits must have the layout torch.strided, got torch.sparse_coo",
    ),
    "sparse-token_ids": (
        {"token_ids": torch.ones(2, 3, dtype=torch.int64).to_sparse()},
        "token_ids must have the layout torch.strided, got torch.sparse_coo",
    ),
    **{
        f"temperature-{value}": (
            {"temperature": value},
            f"temperature {POSITIVE}, got {value}",
        )
        for value in (0, 0.0, -1, NAN, INF)
    },
    "temperature-without-reciprocal": (
        {"temperature": 5e-324},
        "temperature must have a reciprocal within fp32, got 5e-324",
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
    "unknown-backend": (
        {"backend": "cuda"},
        f"unknown backend 'cuda'; expected one of {', '.join(map(repr, ('auto', *BACKENDS)))}$",
    ),
}

TOKENS_TYPES = {
    "none-token_ids": ({"token_ids": None}, f"token_ids {A_TENSOR}, got NoneType"),
    **{
        f"ignore_index-{value!r}": (
            {"ignore_index": value},
            f"ignore_index must be an integer or None, got {re.escape(repr(value))}",
        )
        for value in (1.0, "1", True, torch.tensor(1))
    },
}
TOKENS_VALUES = {
    **{
        f"ignore_index-{name}": (
            {"ignore_index": value},
            f"ignore_index must be within int64, got {got}",
        )
        for name, value, got in (
            ("2**63", 2**63, 2**63),
            ("2**70", 2**70, 2**70),
            ("-2**63-1", -(2**63) - 1, -(2**63) - 1),
            ("10**5000", 10**5000, "a number of type int with too many digits to print"),
        )
    },
    "an-id-beside-ignored-ones": (
        {"token_ids": ids(-2), "ignore_index": 1},
        r"token_ids must be in \[0, 5\) where tokens are kept, got -2 at token 4$",
    ),
}

DIVERGENCE_TYPES = {
    "none-ref": ({"ref_logits": None}, f"ref_logits {A_TENSOR}, got NoneType"),
    "integer-ref": (
        {"ref_logits": zeros(2, 3, 5, dtype=torch.int32)},
        f"ref_logits {ONE_OF_THE_DTYPES} {FLOATS}, got torch.int32",
    ),
    "list-cu_seqlens": (
        {"logits": zeros(6, 5), "ref_logits": zeros(6, 5), "cu_seqlens": [0, 6]},
        f"cu_seqlens {A_TENSOR}, got list",
    ),
    "direction-none": ({"direction": None}, "unknown direction None; expected one of 'reverse'"),
    "direction-list": ({"direction": ["jsd"]}, r"unknown direction \['jsd'\]; expected one of"),
    "reduction-none": ({"reduction": None}, "unknown reduction None; expected one of 'none'"),
    **{
        f"jsd_beta-{value!r}": (
            {"jsd_beta": value},
            f"jsd_beta must be a finite number, got {value!r} of type",
        )
        for value in ("0.5", None, True)
    },
    "coef-text": ({"coef": "0.1"}, "coef must be a finite number, got '0.1' of type str"),
    "normalizer-text": (
        {"normalizer": "7", "reduction": "token-mean"},
        f"normalizer {POSITIVE}, got '7' of type str",
    ),
}


def packed(cu_seqlens):
    return {"logits": zeros(6, 5), "ref_logits": zeros(6, 5), "cu_seqlens": cu_seqlens}


MASK_VALUES = {
    f"mask-of-{value}-{dtype}": (
        {"mask": weights(value, dtype)},
        rf"mask must hold finite weights >= 0, got {float(value)} at \[1, 1\]",
    )
    for value, dtype in (
        (-1.0, torch.float32),
        (-0.5, torch.bfloat16),
        (-1, torch.int64),
        (-1, torch.int8),
        (NAN, torch.float32),
        (NAN, torch.float16),
        (INF, torch.float64),
    )
}

DIVERGENCE_VALUES = {
    **MASK_VALUES,
    **{
        f"{len(shape)}-dim-logits": (
            {"logits": zeros(shape), "ref_logits": zeros(shape)},
            rf"logits must have shape \[B, T, V\] or \[N, V\], got {re.escape(str(list(shape)))}",
        )
        for shape in ((5,), (1, 2, 3, 5))
    },
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
    "no-words-ref": (
        {"ref_logits": zeros(2, 3, 0)},
        r"ref_logits must have the shape of logits, \[2, 3, 5\], got \[2, 3, 0\]$",
    ),
    "meta-ref": (
        {"ref_logits": zeros(2, 3, 5, device="meta")},
        "ref_logits must be on the device of logits, cpu, got meta",
    ),
    "meta-coef": (
        {"coef": torch.ones((), device="meta")},
        "coef must be on the device of logits, cpu, got meta",
    ),
    "3-dim-packed": (
        {"cu_seqlens": torch.tensor([0, 6])},
        r"logits must be packed, of shape \[N, V\], with cu_seqlens, got \[2, 3, 5\]",
    ),
    **{
        f"{name}-cu_seqlens": (packed(cu_seqlens), rf"cu_seqlens must {message}")
        for name, cu_seqlens, message in (
            ("2-dim", torch.tensor([[0, 6]]), r"have shape \[S\+1\], got \[1, 2\]"),
            ("late", torch.tensor([1, 6]), "start at 0, got 1"),
            ("short", torch.tensor([0, 2, 5]), r"end at the number of tokens in \w+, 6, got 5"),
            ("falling", torch.tensor([0, 4, 3, 6]), r"not decrease, got 3 after 4 at \[2\]"),
        )
    },
    "unknown-direction": (
        {"direction": "backward"},
        "unknown direction 'backward'; expected one of 'reverse', 'forward', 'jsd'$",
    ),
    "unknown-reduction": (
        {"reduction": "mean"},
        f"unknown reduction 'mean'; expected one of {', '.join(map(repr, REDUCTIONS))}$",
    ),
    **{
        f"jsd_beta-{value}": (
            {"jsd_beta": value, "direction": "jsd"},
            f"jsd_beta must be a (finite number|number between 0 and 1), got {value}",
        )
        for value in (-0.5, 2.0, NAN, INF)
    },
    **{
        f"jsd_beta-{value!r}": (
            {"jsd_beta": value, "direction": "jsd"},
            f"jsd_beta must be a number between 0 and 1, got {value!r}: 0 is direction='forward', "
            "and 1 is direction='reverse'$",
        )
        for value in (0, 0.0, 1, 1.0)
    },
    **{
        f"coef-{value}": ({"coef": value}, f"coef must be a finite number, got {value}")
        for value in (NAN, INF)
    },
    "coef-tensor-nan": ({"coef": torch.tensor(NAN)}, "coef must be a finite number, got nan"),
    "coef-1-dim": (
        {"coef": torch.ones(1)},
        r"coef must be a number or a 0-dim tensor, got \[1\]",
    ),
    "normalizer-0": (
        {"normalizer": 0.0, "reduction": "token-mean"},
        f"normalizer {POSITIVE}, got 0.0",
    ),
    "normalizer-tensor-0": (
        {"normalizer": torch.tensor(0.0), "reduction": "token-mean"},
        f"normalizer {POSITIVE}, got 0.0",
    ),
    "normalizer-with-none": (
        {"normalizer": 7.0},
        f"normalizer must go with one of {', '.join(map(repr, NORMALIZED_REDUCTIONS))}, "
        "got reduction 'none'",
    ),
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
    cases({**LOGITS_TYPES, **TOKENS_TYPES}, {**LOGITS_VALUES, **TOKENS_VALUES, **MASK_VALUES}),
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
    cases({**LOGITS_TYPES, **DIVERGENCE_TYPES}, {**LOGITS_VALUES, **DIVERGENCE_VALUES}),
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@not_emulated
def test_nested_tensors_are_refused_by_name(backend, layout):
    nested = torch.nested.nested_tensor([zeros(3, 5), zeros(2, 5)], layout=layout)
    with pytest.raises((TypeError, ValueError), match="logits must"):
        klfast.kl_divergence(nested, nested, backend=backend)
    with pytest.raises((TypeError, ValueError), match="logits must"):
        klfast.token_logprobs(nested, ids(0), backend=backend)


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
