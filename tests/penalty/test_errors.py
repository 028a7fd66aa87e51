"""Bad input: one clear error that names the argument, what it must be, and what it got."""

import inspect
import math
import re

import pytest
import torch
from every_function import KEPT, every_function
from refusals import A_TENSOR, FLOATS, ONE_OF_THE_DTYPES, POSITIVE, assert_refused, cases, weights

import klfast
from klfast import Estimator
from klfast.backends import BACKENDS
from klfast.types.names import NAMES
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

NAN, INF = math.nan, math.inf


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


def packed(cu_seqlens, tokens=6):
    return {"logprobs": zeros(tokens), "ref_logprobs": zeros(tokens), "cu_seqlens": cu_seqlens}


def normalized(value):
    return {"normalizer": value, "reduction": "token-mean"}


TYPES = {
    "list-logprobs": ({"logprobs": [[0.0]]}, f"logprobs {A_TENSOR}, got list"),
    "none-ref": ({"ref_logprobs": None}, f"ref_logprobs {A_TENSOR}, got NoneType"),
    "float-old": ({"old_logprobs": 1.0}, f"old_logprobs {A_TENSOR}, got float"),
    "list-mask": ({"mask": [[1, 1, 1]] * 2}, f"mask {A_TENSOR}, got list"),
    "list-cu_seqlens": (packed([0, 6]), f"cu_seqlens {A_TENSOR}, got list"),
    **{
        f"{dtype}-{argument}": (
            {argument: zeros(2, 3).to(dtype)},
            f"{argument} {ONE_OF_THE_DTYPES} {FLOATS}, got {dtype}",
        )
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
        for argument in ("logprobs", "ref_logprobs", "old_logprobs")
    },
    "complex-mask": (
        {"mask": zeros(2, 3, dtype=torch.complex64)},
        f"mask {ONE_OF_THE_DTYPES} torch.bool, .*{FLOATS}, got torch.complex64",
    ),
    "float8-mask": (
        {"mask": zeros(2, 3).to(torch.float8_e4m3fn)},
        f"mask {ONE_OF_THE_DTYPES} .*, got torch.float8_e4m3fn",
    ),
    **{
        f"{dtype}-cu_seqlens": (
            packed(torch.tensor([0, 6]).to(dtype)),
            f"cu_seqlens {ONE_OF_THE_DTYPES} torch.int32, torch.int64, got {dtype}",
        )
        for dtype in (torch.int16, torch.float32, torch.bool)
    },
    "estimator-none": ({"estimator": None}, "unknown estimator None; expected one of 'k1'"),
    "estimator-list": ({"estimator": ["k3"]}, r"unknown estimator \['k3'\]; expected one of 'k1'"),
    "reduction-none": ({"reduction": None}, "unknown reduction None; expected one of 'none'"),
    "reduction-list": ({"reduction": ["none"]}, r"unknown reduction \['none'\]; expected one of"),
    "backend-none": ({"backend": None}, "unknown backend None; expected one of 'auto'"),
    "backend-list": ({"backend": ["native"]}, r"unknown backend \['native'\]; expected one of"),
    **{
        f"coef-{value!r}": ({"coef": value}, f"coef must be a finite number, got {value!r} of type")
        for value in ("0.1", None, True, 1j)
    },
    "coef-list": ({"coef": [0.1]}, r"coef must be a finite number, got \[0.1\] of type list"),
    "coef-complex-tensor": (
        {"coef": torch.tensor(1j)},
        f"coef {ONE_OF_THE_DTYPES} .*, got torch.complex64",
    ),
    "normalizer-text": (normalized("7"), f"normalizer {POSITIVE}, got '7' of type"),
    "normalizer-bool": (normalized(True), f"normalizer {POSITIVE}, got True of"),
}

VALUES = {
    **{
        f"{name}-logprobs": (
            {"logprobs": zeros(shape), "ref_logprobs": zeros(shape)},
            rf"logprobs must have shape \[B, T\] or \[N\], got {re.escape(str(list(shape)))}",
        )
        for name, shape in {"0-dim": (), "3-dim": (2, 3, 1), "4-dim": (1, 2, 3, 1)}.items()
    },
    **{
        f"{name}-{argument}": (
            {argument: torch.ones(shape)},
            rf"{argument} must have the shape of logprobs, \[2, 3\], "
            rf"got {re.escape(str(list(shape)))}",
        )
        for name, shape in {
            "0-dim": (),
            "row": (3,),
            "one-row": (1, 3),
            "column": (2, 1),
            "longer": (2, 4),
            "transposed": (3, 2),
            "3-dim": (2, 3, 1),
        }.items()
        for argument in ("ref_logprobs", "old_logprobs", "mask")
    },
    **{
        f"meta-{argument}": (
            {argument: torch.ones(2, 3, device="meta")},
            f"{argument} must be on the device of logprobs, cpu, got meta",
        )
        for argument in ("ref_logprobs", "old_logprobs", "mask")
    },
    "meta-logprobs": (
        {"logprobs": zeros(2, 3, device="meta")},
        "ref_logprobs must be on the device of logprobs, meta, got cpu",
    ),
    "meta-cu_seqlens": (
        packed(torch.tensor([0, 6], device="meta")),
        "cu_seqlens must be on the device of logprobs, cpu, got meta",
    ),
    "meta-coef": (
        {"coef": torch.ones((), device="meta")},
        "coef must be on the device of logprobs, cpu, got meta",
    ),
    **{
        f"{name}-{argument}": (
            {argument: convert(torch.ones(2, 3))},
            rf"{argument} must have the layout torch.strided, got {layout}",
        )
        for name, convert, layout in [
            ("sparse", torch.Tensor.to_sparse, "torch.sparse_coo"),
            ("mkldnn", torch.Tensor.to_mkldnn, "torch._mkldnn"),
        ]
        for argument in ("logprobs", "ref_logprobs", "old_logprobs", "mask")
    },
    "2-dim-packed": (
        {"cu_seqlens": torch.tensor([0, 6])},
        r"logprobs must be packed, of shape \[N\], with cu_seqlens, got \[2, 3\]",
    ),
    **{
        f"{name}-cu_seqlens": (packed(cu_seqlens), rf"cu_seqlens must {message}")
        for name, cu_seqlens, message in [
            ("empty", zeros(0, dtype=torch.int64), r"have shape \[S\+1\], got \[0\]"),
            ("0-dim", torch.tensor(6), r"have shape \[S\+1\], got \[\]"),
            ("2-dim", torch.tensor([[0, 6]]), r"have shape \[S\+1\], got \[1, 2\]"),
            ("late", torch.tensor([1, 6]), "start at 0, got 1"),
            ("late-int32", torch.tensor([2, 6], dtype=torch.int32), "start at 0, got 2"),
            ("early", torch.tensor([-1, 6]), "start at 0, got -1"),
            ("short", torch.tensor([0, 2, 5]), "end at the number of tokens in logprobs, 6, got 5"),
            ("long", torch.tensor([0, 2, 7]), "end at the number of tokens in logprobs, 6, got 7"),
            ("only-0", torch.tensor([0]), "end at the number of tokens in logprobs, 6, got 0"),
            ("falling", torch.tensor([0, 4, 3, 6]), r"not decrease, got 3 after 4 at \[2\]"),
            ("beyond", torch.tensor([0, 9, 6]), r"not decrease, got 6 after 9 at \[2\]"),
            ("below", torch.tensor([0, -3, 6]), r"not decrease, got -3 after 0 at \[1\]"),
            ("far", torch.tensor([0, 2**62, 6]), rf"not decrease, got 6 after {2**62} at \[2\]"),
        ]
    },
    **{
        f"mask-of-{value}-{dtype}": (
            {"mask": weights(value, dtype)},
            rf"mask must hold finite weights >= 0, got {float(value)} at \[1, 1\]",
        )
        for value, dtype in [
            (-1.0, torch.float32),
            (-0.5, torch.bfloat16),
            (-1.0, torch.float16),
            (-0.125, torch.float64),
            (-1, torch.int8),
            (-1, torch.int64),
            (NAN, torch.float32),
            (NAN, torch.bfloat16),
            (INF, torch.float16),
            (-INF, torch.float64),
        ]
    },
    "mask-beyond-fp32": (
        {"mask": weights(1e300, torch.float64)},
        r"mask must hold finite weights >= 0, got (inf|1e\+300) at \[1, 1\]",
    ),
    "packed-mask": (
        {**packed(torch.tensor([0, 2, 6])), "mask": torch.tensor([1.0, 1, 1, 1, 1, -2])},
        r"mask must hold finite weights >= 0, got -2.0 at \[5\]",
    ),
    "unknown-estimator": (
        {"estimator": "k9"},
        f"unknown estimator 'k9'; expected one of {re.escape(', '.join(map(repr, NAMES)))}$",
    ),
    "capital-estimator": ({"estimator": "K3"}, "unknown estimator 'K3'; expected one of"),
    "unknown-reduction": (
        {"reduction": "mean"},
        f"unknown reduction 'mean'; expected one of {', '.join(map(repr, REDUCTIONS))}$",
    ),
    "unknown-backend": (
        {"backend": "cuda"},
        f"unknown backend 'cuda'; expected one of {', '.join(map(repr, ('auto', *BACKENDS)))}$",
    ),
    **{
        f"coef-{value}": ({"coef": value}, f"coef must be a finite number, got {value}")
        for value in (NAN, INF, -INF)
    },
    **{
        f"coef-tensor-{value}": (
            {"coef": torch.tensor(value)},
            f"coef must be a finite number, got {value}",
        )
        for value in (NAN, INF, -INF)
    },
    "coef-beyond-float": ({"coef": 10**400}, "coef must be a finite number, got 1000"),
    "coef-1-dim": (
        {"coef": torch.ones(1)},
        r"coef must be a number or a 0-dim tensor, got \[1\]",
    ),
    **{
        f"normalizer-{value}": (
            normalized(value),
            f"normalizer {POSITIVE}, got {value}",
        )
        for value in (0, 0.0, -1, NAN, INF)
    },
    **{
        f"normalizer-tensor-{value}": (
            normalized(torch.tensor(value)),
            f"normalizer {POSITIVE}, got {value}",
        )
        for value in (0, 0.0, -1.0, NAN, INF)
    },
    "normalizer-1-dim": (
        normalized(torch.ones(1)),
        r"normalizer must be a number or a 0-dim tensor, got \[1\]",
    ),
    **{
        f"normalizer-with-{reduction}": (
            {"normalizer": 7.0, "reduction": reduction},
            f"normalizer must go with one of {', '.join(map(repr, NORMALIZED_REDUCTIONS))}, "
            f"got reduction '{reduction}'",
        )
        for reduction in REDUCTIONS
        if reduction not in NORMALIZED_REDUCTIONS
    },
}

REWARD_TYPES = {
    "list": ({"scores": [0.0, 0.0]}, f"scores {A_TENSOR}, got list"),
    "complex": (
        {"scores": zeros(2, dtype=torch.complex64)},
        f"scores {ONE_OF_THE_DTYPES} .*, got torch.complex64",
    ),
    "kl_coef": ({"kl_coef": "0.1"}, "kl_coef must be a finite number, got '0.1' of type str"),
    "list-logprobs": ({"logprobs": [[0.0]]}, f"logprobs {A_TENSOR}, got list"),
    "list-logprobs-tensor-coef": (
        {"logprobs": [[0.0]], "kl_coef": torch.tensor(0.1)},
        f"logprobs {A_TENSOR}, got list",
    ),
}
REWARD_VALUES = {
    **{
        f"scores-{shape}": (
            {"scores": zeros(shape)},
            rf"scores must have shape \[2\], one per sequence, got {re.escape(str(list(shape)))}",
        )
        for shape in ((), (1,), (3,), (2, 1), (2, 3))
    },
    "packed-scores": (
        packed(torch.tensor([0, 2, 2, 6])),
        r"scores must have shape \[3\], one per sequence, got \[2\]",
    ),
    "meta-scores": (
        {"scores": zeros(2, device="meta")},
        "scores must be on the device of logprobs, cpu, got meta",
    ),
    "sparse-scores": (
        {"scores": torch.ones(2).to_sparse()},
        "scores must have the layout torch.strided, got torch.sparse_coo",
    ),
    "nan-kl_coef": ({"kl_coef": NAN}, "kl_coef must be a finite number, got nan"),
    "nan-kl_coef-tensor": (
        {"kl_coef": torch.tensor(NAN)},
        "kl_coef must be a finite number, got nan",
    ),
    "1-dim-kl_coef": (
        {"kl_coef": torch.ones(1)},
        r"kl_coef must be a number or a 0-dim tensor, got \[1\]",
    ),
    "estimator": ({"estimator": "k9"}, "unknown estimator 'k9'; expected one of 'k1'"),
    "mask": ({"mask": weights(-1.0)}, r"mask must hold finite weights >= 0, got -1.0 at \[1, 1\]"),
    "ref_logprobs": ({"ref_logprobs": zeros(2, 4)}, "ref_logprobs must have the shape of logprobs"),
}


@pytest.mark.grid
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize(("arguments", "error", "message"), cases(TYPES, VALUES))
def test_kl_penalty_refuses(backend, arguments, error, message, requires_grad):
    arguments = {
        "logprobs": zeros(2, 3),
        "ref_logprobs": torch.ones(2, 3),
        "backend": backend,
        **arguments,
    }
    logprobs = arguments["logprobs"]
    if requires_grad and isinstance(logprobs, torch.Tensor) and logprobs.is_floating_point():
        arguments["logprobs"] = logprobs.detach().requires_grad_()
    assert_refused(klfast.kl_penalty, arguments, error, message)


@pytest.mark.parametrize(("arguments", "error", "message"), cases(REWARD_TYPES, REWARD_VALUES))
def test_kl_rewards_refuses(backend, arguments, error, message):
    arguments = {
        "scores": zeros(2),
        "logprobs": zeros(2, 3),
        "ref_logprobs": torch.ones(2, 3),
        "kl_coef": 0.1,
        "backend": backend,
        **arguments,
    }
    assert_refused(klfast.kl_rewards, arguments, error, message)


@pytest.mark.parametrize("argument", ["mask", "normalizer"])
@pytest.mark.parametrize("name", every_function())
def test_no_function_drops_a_gradient_of_its_mask_or_normalizer(name, argument):
    """A product of mask and importance ratio is such a mask."""
    function, arguments = every_function()[name]
    arguments = {"mask": KEPT, **arguments}
    remedy = r"normalizer\.detach"
    if argument == "mask":
        arguments["mask"] = KEPT * torch.ones(2, 3, requires_grad=True)
        remedy = r"old_logprobs=.*mask\.detach"
    elif "normalizer" not in inspect.signature(function).parameters:
        pytest.skip("takes none")
    else:
        reduction = {} if name == "KLPenalty" else {"reduction": "token-mean"}
        arguments |= {"normalizer": torch.tensor(2.0, requires_grad=True), **reduction}
    text = f"{argument} must be a constant, got a tensor that requires a gradient: .*{remedy}"
    assert_refused(function, arguments, ValueError, text)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_by_name(backend, layout):
    nested = torch.nested.nested_tensor([zeros(3), zeros(2)], layout=layout)
    with pytest.raises((TypeError, ValueError), match="logprobs must"):
        klfast.kl_penalty(nested, nested, backend=backend)


def test_the_first_bad_weight_is_the_one_that_is_named(backend):
    mask = torch.ones(3, 5000)
    mask[1, 4097] = -1
    mask[2, 0] = NAN
    with pytest.raises(ValueError, match=r"got -1.0 at \[1, 4097\]"):
        klfast.kl_penalty(zeros(3, 5000), zeros(3, 5000), mask, backend=backend)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_bad_weight_is_refused_by_every_reduction(backend, reduction):
    for requires_grad in (False, True):
        logprobs = zeros(2, 3).requires_grad_(requires_grad)
        with pytest.raises(ValueError, match=r"mask must hold finite weights >= 0, got -1.0"):
            klfast.kl_penalty(
                logprobs, zeros(2, 3), weights(-1.0), reduction=reduction, backend=backend
            )


def test_an_estimator_is_checked_where_it_is_made():
    """So that a call which is handed one has nothing to refuse."""
    with pytest.raises(ValueError, match=f"kl_clip {POSITIVE}, got 0"):
        Estimator("k3", kl_clip=0)


def test_a_coefficient_beyond_the_arithmetics_dtype(backend):
    with pytest.raises(ValueError, match=r"^coef must be finite .*, got 1e\+39"):
        klfast.kl_penalty(torch.zeros(2), torch.zeros(2), coef=1e39, backend=backend)
