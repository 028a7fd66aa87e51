"""Every public function refuses bad arguments with one error.

The error names the argument, the requirement and the given value. The call does not change its
tensors.
"""

import inspect
import math
import re

import pytest
import torch
from families import VARIANTS, Function
from refusals import A_TENSOR, GOOD_WEIGHTS, ONE_OF_THE_DTYPES, assert_refused

import klfast
from klfast.args.signature import SIGNATURES
from klfast.backends import BACKENDS
from klfast.cli.check.calls import arguments_of
from klfast.types.names import DIRECTIONS, NAMES, TAILS
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

NAN, INF = math.nan, math.inf
every_backend = pytest.mark.parametrize("backend", ["native", "reference"])


def good_calls():
    """Function -> arguments, with each of its tensors."""
    calls = {}
    for family, variants in VARIANTS.items():
        variant = next(iter(variants))
        call = Function(
            (family, variant), "reference", mask=torch.float32, dtypes=(torch.float32,) * 2
        ).call
        calls[call.function] = arguments_of(call, call.tensors)
    ones = torch.ones(4, 37)
    calls["kl_penalty"]["reduction"] = "token-mean"
    calls["reduce"] = {"values": ones, "mask": ones, "reduction": "token-mean"}
    return calls


GOOD = good_calls()
every_function = pytest.mark.parametrize("function", GOOD)


def parameters(function):
    return inspect.signature(getattr(klfast, function)).parameters


def refuse(function, changes, error, message, backend="reference"):
    arguments = {**GOOD[function], **changes}
    if "backend" in parameters(function):
        arguments.setdefault("backend", backend)
    assert_refused(getattr(klfast, function), arguments, error, message)


TENSORS = [(f, row.name) for f in GOOD for row in SIGNATURES[f] if row.name in GOOD[f]]
DTYPE, SHAPE = f"{{}} {ONE_OF_THE_DTYPES}", r"\w+ must (have|be)"
WRONG_TENSORS = [
    (torch.Tensor.tolist, TypeError, f"{{}} {A_TENSOR}, got list"),
    (lambda t: t.to(torch.complex64), TypeError, DTYPE + ".*, got torch.complex64"),
    (lambda t: t.float().to(torch.float8_e4m3fn), TypeError, DTYPE),
    (lambda t: t[None, None, None], ValueError, SHAPE),
    (lambda t: t[1:], ValueError, SHAPE),
    (torch.Tensor.to_sparse, ValueError, "{} must have the layout torch.strided, got torch.sparse"),
    (lambda t: t.to("meta"), ValueError, r"\w+ must be on the device of \w+"),
]
"""What makes a wrong tensor of a right one, the error, and what it says of an argument."""


@pytest.mark.parametrize(("function", "argument"), TENSORS)
@every_backend
def test_a_wrong_tensor(function, argument, backend):
    for change, error, message in WRONG_TENSORS:
        wrong = change(GOOD[function][argument])
        refuse(function, {argument: wrong}, error, message.replace("{}", argument), backend)


@pytest.mark.parametrize(
    ("function", "argument"),
    [(f, row.name) for f in GOOD for row in SIGNATURES[f] if not row.is_optional],
)
@every_backend
def test_a_missing_tensor(function, argument, backend):
    refuse(function, {argument: None}, TypeError, f"{argument} {A_TENSOR}, got None", backend)


def shifted(tensor):
    """The tensor without the first token of each sequence."""
    return tensor[:, 1:]


def over_vocabulary(tensor):
    return tensor[..., None].expand(*tensor.shape, 9)


@pytest.mark.parametrize(("function", "argument"), TENSORS)
def test_a_likely_mistake_is_answered_by_its_remedy(function, argument):
    first = SIGNATURES[function][0].name
    given = GOOD[function][argument]
    letters = next(row.shape for row in SIGNATURES[function] if row.name == argument)
    if argument == "scores":
        packed = {
            row.name: GOOD[function][row.name].flatten()[:6]
            for row in SIGNATURES[function]
            if row.shape == "B T" and row.name in GOOD[function]
        }
        wrong = {"scores": torch.ones(2), "cu_seqlens": torch.tensor([4, 2])}
        refuse(function, packed | wrong, ValueError, f"scores must .* got \\[2\\]: {CUMULATE}")
    elif argument != first:
        refuse(function, {argument: shifted(given)}, ValueError, rf"{argument} must .*: {SHIFT}")
        longer = torch.cat([given[:, :1], given], 1)
        refuse(function, {argument: longer}, ValueError, rf"{argument} must .*: {SHIFT}")
    if letters == "B T" and given.is_floating_point():
        wrong = over_vocabulary(given)
        text = rf"{argument} must have .*: {LOGITS}"
        refuse(function, {argument: wrong}, ValueError, text if argument != "values" else SHAPE)


SHIFT = r"shift by one, as logits\[:, :-1\] predict ids\[:, 1:\]$"
LOGITS = "klfast.kl_divergence takes logits, and klfast.token_logprobs makes log-probs of logits$"
CUMULATE = r"cumulate lengths, torch.nn.functional.pad\(lengths.cumsum\(0\), \(1, 0\)\)$"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@every_function
def test_a_nested_tensor(function, layout):
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=layout)
    for name in (SIGNATURES[function][0].name, "mask"):
        refuse(function, {name: nested}, ValueError, f"{name} must have the layout torch.strided")


@every_function
def test_a_mask_or_normalizer_that_requires_a_gradient(function):
    """A product of mask and importance ratio is such a mask."""
    text = "must be a constant, got a tensor that requires a gradient"
    mask = GOOD[function]["mask"].float().clone().requires_grad_()
    refuse(function, {"mask": mask}, ValueError, rf"mask {text}: .*old_logprobs=.*mask\.detach")
    if "weights" in parameters(function):
        weights = mask.detach().requires_grad_()
        refuse(function, {"weights": weights}, ValueError, rf"weights {text}: .*weights\.detach")
    if "normalizer" in parameters(function):
        changes = {"normalizer": torch.tensor(2.0, requires_grad=True), "reduction": "token-mean"}
        refuse(function, changes, ValueError, rf"normalizer {text}: .*normalizer\.detach")


def choices(names):
    return [
        ("cuda", ValueError, f"expected one of {re.escape(', '.join(map(repr, names)))}$"),
        (None, TypeError, "unknown .* None; expected one of"),
        (["none"], TypeError, r"unknown .* \['none'\]; expected one of"),
    ]


def numbers(name, wanted, *wrong):
    start = f"{name} must be"
    return [
        *(
            (value, TypeError, f"{start} {wanted}.*, got {re.escape(repr(value))} of type")
            for value in ("0.1", [0.1], 1j, True)
        ),
        *((value, ValueError, f"{start} .*, got {value!r}") for value in (NAN, INF, *wrong)),
        (10**400, ValueError, f"{start} .*, got 1000"),
    ]


SCALARS = [
    (torch.ones(1), ValueError, r"must be a number or a 0-dim tensor, got \[1\]"),
    (torch.tensor(1j), TypeError, ONE_OF_THE_DTYPES),
    (torch.tensor(NAN), ValueError, "must be a finite number.*, got nan"),
    (torch.ones((), device="meta"), ValueError, "must be on the device of"),
]
A_TEMPERATURE = [
    *numbers("temperature", "a finite number > 0", 0, -1.0),
    (5e-324, ValueError, "temperature must have a reciprocal within fp32, got 5e-324"),
]
A_FLAG = [(v, TypeError, r"\w+ must be True or False, got") for v in ("yes", torch.ones(2), None)]
OTHERS = {
    "return_stats": A_FLAG,
    "inplace_backward": A_FLAG,
    "return_entropy": [*A_FLAG[1:], ("no", ValueError, "must be True, False or 'detached', got")],
    "estimator": choices(NAMES),
    "reduction": choices(REDUCTIONS),
    "direction": choices(DIRECTIONS),
    "tail": choices(TAILS),
    "backend": choices(("auto", *BACKENDS)),
    "coef": [*numbers("coef", "a finite number"), *SCALARS],
    "kl_coef": [*numbers("kl_coef", "a finite number"), *SCALARS],
    "normalizer": [*numbers("normalizer", "a finite number > 0", 0, -1.0), *SCALARS],
    "temperature": A_TEMPERATURE,
    "jsd_beta": numbers("jsd_beta", "a finite number", 0, 1.0, 2.0),
    "skew_alpha": numbers("skew_alpha", "a finite number", -0.1, 1.0, 2.0),
    "softcap": numbers("softcap", "a finite number > 0", 0, -1.0),
    "chunk": [(0, ValueError, "chunk must be"), ("all", TypeError, "chunk must be")],
    "ignore_index": [
        *((v, TypeError, "ignore_index must be an integer or None") for v in (1.0, "1", True)),
        (2**63, ValueError, f"ignore_index must be within int64, got {2**63}"),
        (10**5000, ValueError, "ignore_index must be within int64, got a number of type int with"),
    ],
}
"""Argument -> wrong values, the error and what it says."""


@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f in GOOD for a in parameters(f) if a in OTHERS]
)
def test_a_wrong_option(function, argument):
    reduction = {"reduction": "token-mean"} if argument == "normalizer" else {}
    for wrong, error, message in OTHERS[argument]:
        own = {"backend": wrong} if argument == "backend" else {argument: wrong}
        refuse(function, reduction | own, error, message)


@every_function
@every_backend
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no-grad", "grad"])
def test_a_wrong_number_in_a_tensor(function, backend, requires_grad):
    mask, first = GOOD[function]["mask"], SIGNATURES[function][0].name
    leaf = {first: GOOD[function][first].clone().requires_grad_(requires_grad)}
    at = tuple(n - 1 for n in mask.shape)
    for wrong, dtype in WEIGHTS:
        bad = mask.clone().to(dtype)
        bad[at] = wrong
        text = rf"mask {GOOD_WEIGHTS}, got {float(wrong)} at \[{at[0]}, {at[1]}\]"
        refuse(function, leaf | {"mask": bad}, ValueError, text, backend)
    for name in {"token_ids", "ref_token_ids"} & GOOD[function].keys():
        for wrong in (-1, 2**62, -(2**62)):
            ids = torch.full_like(GOOD[function][name], wrong, dtype=torch.int64)
            text = rf"{name} must be in \[0, \d+\) where tokens are kept, got {wrong} at token"
            refuse(function, leaf | {name: ids}, ValueError, text, backend)


WEIGHTS = ((-1.0, torch.float32), (-1, torch.int8), (NAN, torch.bfloat16), (INF, torch.float64))
CU_SEQLENS = [
    ([0, 6], TypeError, f"cu_seqlens {A_TENSOR}, got list"),
    (
        torch.tensor([0.0, 6.0]),
        TypeError,
        f"cu_seqlens {ONE_OF_THE_DTYPES} torch.int32, torch.int64, got",
    ),
    (torch.tensor([], dtype=torch.int64), ValueError, r"have shape \[S\+1\], got \[0\]"),
    (torch.tensor([[0, 6]]), ValueError, r"have shape \[S\+1\], got \[1, 2\]"),
    (torch.tensor([1, 6]), ValueError, "start at 0, got 1"),
    (torch.tensor([-1, 6]), ValueError, "start at 0, got -1"),
    (torch.tensor([0, 2, 5]), ValueError, r"end at the number of packed tokens, 6, got 5"),
    (torch.tensor([0]), ValueError, r"end at the number of packed tokens, 6, got 0"),
    (torch.tensor([0, 4, 3, 6]), ValueError, r"not decrease, got 3 after 4 at \[2\]"),
    (torch.tensor([0, 2**62, 6]), ValueError, rf"not decrease, got 6 after {2**62} at \[2\]"),
    (torch.tensor([0, 6], device="meta"), ValueError, "be on the device of"),
    *(
        (torch.tensor(lengths), ValueError, f"{text}: {CUMULATE}")
        for lengths, text in (
            ([4, 2], "start at 0, got 4"),
            ([6], "start at 0, got 6"),
            ([0, 4, 2], r"not decrease, got 2 after 4 at \[2\]"),
            ([0, 2, 4], "end at the number of packed tokens, 6, got 4"),
        )
    ),
    (torch.tensor([8, -2]), ValueError, "start at 0, got 8$"),
]


@pytest.mark.parametrize("function", [f for f in GOOD if "cu_seqlens" in parameters(f)])
@every_backend
def test_wrong_boundaries(function, backend):
    packed = {}
    for row in SIGNATURES[function]:
        if row.name in GOOD[function] and row.shape.startswith("B T"):
            packed[row.name] = GOOD[function][row.name].flatten(0, 1)[:6]
    if inputs := GOOD[function].get("inputs"):
        packed["inputs"] = [tensor.flatten()[:6] for tensor in inputs]
    for wrong, error, message in CU_SEQLENS:
        scores = {}
        if function == "kl_rewards":
            size = wrong.shape[-1] - 1 if isinstance(wrong, torch.Tensor) else 1
            scores = {"scores": torch.ones(max(size, 0))}
        refuse(function, packed | scores | {"cu_seqlens": wrong}, error, message, backend)
    padded = {"cu_seqlens": torch.tensor([0, 6])}
    refuse(
        function, padded, ValueError, r"must be packed, of shape \[N.*\], with cu_seqlens", backend
    )


@pytest.mark.parametrize("reduction", sorted(set(REDUCTIONS) - set(NORMALIZED_REDUCTIONS)))
def test_a_normalizer_without_a_mean(reduction):
    names = ", ".join(map(repr, NORMALIZED_REDUCTIONS))
    text = f"reduction must be one of {names} with a normalizer, got '{reduction}'"
    for function in GOOD:
        if "normalizer" in parameters(function):
            refuse(function, {"normalizer": 7.0, "reduction": reduction}, ValueError, text)


def meant(*names):
    return f"its argument for this is {' or '.join(map(repr, names))}$"


UNKNOWN = {
    **{name: {"beta": meant("coef")} for name in ("kl_penalty", "reduce")},
    **{
        name: {"beta": meant("coef", "jsd_beta"), "temprature": "did you mean 'temperature'"}
        for name in GOOD
        if "divergence" in name
    },
    "kl_rewards": {"beta": meant("kl_coef"), "coef": meant("kl_coef")},
    "KLPenalty": {name: meant("controller") for name in ("beta", "kl_coef", "coef")},
    "FixedKLController": {"beta": meant("kl_coef"), "horizon": "expected one of 'kl_coef', 'dev"},
    "AdaptiveKLController": {"coef": meant("init_kl_coef"), "target_kl": meant("target")},
    "NuPIKLController": {"horizon": meant("ki"), "beta": meant("init_kl_coef")},
    "DualKLController": {"horizon": meant("lr")},
    "ExponentialKLController": {"horizon": meant("gain")},
    "ScheduledKLController": {"horizon": meant("ki")},
    "GroupedKLController": {"horizon": meant("ki")},
    "KLMonitor": {"kl_target": meant("target")},
    "KLAdaptiveLR": {"target_kl": meant("target")},
    "KLLog": {"name": "did you mean 'names'"},
}
MADE = {
    "KLPenalty": (),
    "ScheduledKLController": (0.1, 6.0),
    "GroupedKLController": (klfast.NuPIKLController, 0.1, {"a": 6.0}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_keyword_is_answered_by_the_argument_that_was_meant(name):
    """As an option of another controller, it is refused by that controller's name."""
    inner = "NuPIKLController" if name[:7] in ("Schedul", "Grouped") else name
    for given, text in UNKNOWN[name].items():
        arguments = {given: 0.1, **GOOD.get(name, {})}
        start = rf"^{inner}\(\) got an unexpected keyword argument '{given}'; "
        with pytest.raises(TypeError, match=start + text) as caught:
            getattr(klfast, name)(*MADE.get(name, ()), **arguments)
        assert caught.value.__suppress_context__


@pytest.mark.parametrize("function", [*GOOD, "rollout_correction", "log_ratio_profile"])
def test_every_function_knows_its_keywords(function):
    names = ", ".join(map(repr, parameters(function)))
    with pytest.raises(TypeError, match="unexpected") as caught:
        getattr(klfast, function)(**GOOD.get(function, {}), xyz=1)
    text = f"{function}() got an unexpected keyword argument 'xyz'; expected one of {names}"
    assert str(caught.value) == text


def test_any_other_type_error_keeps_its_traceback():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'ref_logprobs'"):
        klfast.kl_penalty(torch.zeros(3))
    with pytest.raises(TypeError, match="ref_logprobs must be a torch") as caught:
        klfast.kl_penalty(torch.zeros(3), [1.0])
    assert caught.traceback[-1].name == "check_tensor"
    assert caught.value.__context__ is None


def test_a_controller_of_ones_own_has_its_name_in_the_error():
    class Own(klfast.TargetController):
        def __init__(self, init_kl_coef, target, power=2.0, **options):
            super().__init__(init_kl_coef, target, **options)

    assert "options" in inspect.signature(Own).parameters
    with pytest.raises(TypeError, match=r"^Own\(\) got .* 'beta'; .* 'init_kl_coef'$"):
        Own(0.1, 6.0, beta=3)
