"""Arguments of a wrong type, shape, dtype, layout or device: each error names the argument."""

import itertools

import numpy as np
import pytest
import torch

import klfast

CATEGORY = "bad shapes, dtypes and layouts"
BACKENDS = ("native", "reference")

# Torch's warnings at the making of exotic tensors are not klfast's.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(nested|ComplexHalf|[Ss]parse|quantiz|deprecated).*"
)

NOT_TENSORS = {
    "none": None,
    "int": 1,
    "float": 0.5,
    "text": "logprobs",
    "bytes": b"0",
    "list": [[0.0] * 3] * 2,
    "tuple": (0.0,) * 3,
    "dict": {},
    "set": {1},
    "array": np.zeros((2, 3)),
    "function": len,
    "type": torch.Tensor,
    "dtype": torch.float32,
    "generator": (number for number in (1, 2)),
}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BAD_DTYPES = {
    "floats": (*FLOAT8, *COMPLEX, *INTEGERS, *UNSIGNED, torch.bool),
    "mask": (*FLOAT8, *COMPLEX, *UNSIGNED),
    "ids": (*FLOAT8, *COMPLEX, *UNSIGNED, *FLOATS, torch.bool),
    "edges": (*FLOAT8, *COMPLEX, *UNSIGNED, *FLOATS, torch.bool, *INTEGERS[:3]),
}
SHAPES = ((), (1,), (3,), (6,), (2,), (2, 1), (1, 3), (3, 2), (2, 4), (2, 3, 1), (1, 2, 3), (0,))


def functions():
    """Name -> (function, good arguments, argument -> which dtypes it refuses)."""
    a = torch.full((2, 3), -1.0)
    z = torch.zeros(2, 3, 5)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    tokens = {"logprobs": "floats", "ref_logprobs": "floats", "mask": "mask"}
    return {
        "kl_penalty": (
            klfast.kl_penalty,
            {"logprobs": a, "ref_logprobs": a, "old_logprobs": a, "mask": torch.ones(2, 3)},
            {**tokens, "old_logprobs": "floats"},
        ),
        "kl_rewards": (
            klfast.kl_rewards,
            {
                "scores": torch.ones(2),
                "logprobs": a,
                "ref_logprobs": a,
                "mask": torch.ones(2, 3),
                "kl_coef": 0.1,
            },
            {**tokens, "scores": "mask"},
        ),
        "token_logprobs": (
            klfast.token_logprobs,
            {"logits": z, "token_ids": ids, "mask": torch.ones(2, 3)},
            {"logits": "floats", "token_ids": "ids", "mask": "mask"},
        ),
        "kl_divergence": (
            klfast.kl_divergence,
            {"logits": z, "ref_logits": z, "mask": torch.ones(2, 3), "token_ids": ids},
            {"logits": "floats", "ref_logits": "floats", "mask": "mask", "token_ids": "ids"},
        ),
    }


OPTIONAL = ("mask", "old_logprobs", "token_ids")
PARTNERS = {
    "logprobs": ("logprobs", "ref_logprobs", "scores"),
    "logits": ("logits", "ref_logits", "token_ids"),
}
"""Which argument an error about one may name as well, where two do not fit."""


def each_argument():
    for name, (function, good, kinds) in functions().items():
        for argument, kind in kinds.items():
            yield name, function, good, argument, kind


def refuse(hunt, function, good, argument, bad, *case):
    for backend in BACKENDS:
        given = {**good, argument: bad}
        names = PARTNERS.get(argument, (argument,))
        hunt.refuses(lambda g=given, b=backend: function(**g, backend=b), names, *case, backend)


def test_what_is_no_tensor(hunt):
    for name, function, good, argument, _ in each_argument():
        for what, bad in NOT_TENSORS.items():
            optional = argument in OPTIONAL and name != "token_logprobs"
            if bad is None and (optional or argument == "mask"):
                continue
            refuse(hunt, function, good, argument, bad, name, argument, what)


def test_dtypes(hunt):
    for name, function, good, argument, kind in each_argument():
        for dtype in BAD_DTYPES[kind]:
            bad = good[argument].to(dtype)
            refuse(hunt, function, good, argument, bad, name, argument, dtype)


def test_shapes(hunt):
    for name, function, good, argument, kind in each_argument():
        for shape in SHAPES:
            over_words = argument in ("logits", "ref_logits")
            bad = torch.zeros((*shape, 5) if over_words else shape, dtype=good[argument].dtype)
            is_k_ids = name == "token_logprobs" and argument == "token_ids"
            if bad.shape == good[argument].shape or (is_k_ids and shape == (2, 3, 1)):
                continue
            refuse(hunt, function, good, argument, bad, name, argument, shape, kind)


def exotic(like):
    """(what, tensor of ``like``'s values in another layout or on another device)."""
    yield "coo", like.to_sparse()
    yield "meta", like.to("meta")
    if like.dim() >= 2:
        yield "csr", like.to_sparse_csr()
        yield "csc", like.to_sparse_csc()
        yield "nested", torch.nested.nested_tensor(list(like.unbind()))
        yield "jagged", torch.nested.nested_tensor(list(like.unbind()), layout=torch.jagged)
    if like.dtype == torch.float32:
        yield "mkldnn", like.to_mkldnn()
        yield "quantized", torch.quantize_per_tensor(like, 0.1, 0, torch.qint8)


def test_layouts_and_devices(hunt):
    for name, function, good, argument, _ in each_argument():
        for what, bad in exotic(good[argument]):
            refuse(hunt, function, good, argument, bad, name, argument, what)


EDGES = {
    "from 1": [1, 6],
    "from -1": [-1, 6],
    "short": [0, 5],
    "long": [0, 7],
    "decreasing": [0, 4, 3, 6],
    "decreasing at the end": [0, 7, 6],
    "negative": [0, -2, 6],
    "huge": [0, 2**40, 6],
    "least": [0, -(2**63), 6],
    "largest": [0, 2**63 - 1, 6],
    "huge at the end": [0, 2**62],
    "one": [0],
    "only the end": [6],
    "backwards": [6, 0],
    "zeros": [0, 0, 0],
}


def packed(edges, backend):
    a, z = torch.zeros(6), torch.zeros(6, 5)
    options = {"cu_seqlens": edges, "backend": backend}
    yield "kl_penalty", lambda **k: klfast.kl_penalty(a, a, **options, **k)
    yield "kl_divergence", lambda **k: klfast.kl_divergence(z, z, **options, **k)


def rewards(edges, backend, sequences):
    a = torch.zeros(6)
    scores = torch.ones(sequences)
    return lambda: klfast.kl_rewards(scores, a, a, kl_coef=0.1, cu_seqlens=edges, backend=backend)


REDUCED = ("none", "seq-sum", "token-mean", "seq-mean-token-mean")


def test_cu_seqlens_that_hold_what_they_must_not(hunt):
    for (what, edges), dtype in itertools.product(EDGES.items(), (torch.int32, torch.int64)):
        if max(map(abs, edges)) >= 2**31 and dtype == torch.int32:
            continue
        for backend in BACKENDS:
            bad = torch.tensor(edges, dtype=dtype)
            for (name, call), reduction in itertools.product(packed(bad, backend), REDUCED):
                hunt.refuses(
                    lambda c=call, r=reduction: c(reduction=r), "cu_seqlens", name, what, dtype
                )
            call = rewards(bad, backend, len(edges) - 1)
            hunt.refuses(call, "cu_seqlens", "kl_rewards", what, dtype, backend)


def test_cu_seqlens_of_a_wrong_kind(hunt):
    good = torch.tensor([0, 2, 6])
    kinds = {what: bad for what, bad in NOT_TENSORS.items() if bad is not None}
    kinds |= {str(dtype): good.to(dtype) for dtype in BAD_DTYPES["edges"]}
    kinds |= {"0-dim": good[0], "2-dim": good[None], "empty": good[:0], "3-dim": good[None, None]}
    kinds |= {"coo": good.to_sparse(), "meta": good.to("meta")}
    for (what, bad), backend in itertools.product(kinds.items(), BACKENDS):
        for (name, call), reduction in itertools.product(packed(bad, backend), REDUCED):
            hunt.refuses(lambda c=call, r=reduction: c(reduction=r), "cu_seqlens", name, what)
        hunt.refuses(rewards(bad, backend, 2), "cu_seqlens", "kl_rewards", what, backend)
    a, z = torch.zeros(2, 3), torch.zeros(2, 3, 5)
    for backend in BACKENDS:
        names = ("cu_seqlens",)
        hunt.refuses(lambda b=backend: klfast.kl_penalty(a, a, cu_seqlens=good, backend=b), names)
        hunt.refuses(
            lambda b=backend: klfast.kl_divergence(z, z, cu_seqlens=good, backend=b), names
        )


def test_unknown_choices(hunt):
    choices = ("reduction", "estimator", "backend")
    bad = (
        "",
        "K3",
        "mean",
        "k9",
        "none ",
        None,
        0,
        1.5,
        True,
        ["k3"],
        ("none",),
        b"k3",
        {},
        object(),
    )
    for name, (function, good, _) in functions().items():
        for argument, value in itertools.product(choices, bad):
            if argument == "reduction" and name not in ("kl_penalty", "kl_divergence"):
                continue
            if argument == "estimator" and name not in ("kl_penalty", "kl_rewards"):
                continue
            hunt.refuses(
                lambda f=function, g=good, a=argument, v=value: f(**g, **{a: v}),
                argument,
                name,
                value,
            )
