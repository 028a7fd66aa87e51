"""The ops as torch sees them: schemas, fakes, every output written, no crash whatever comes in."""

import pytest
import torch
from agreement import SCALAR_REDUCTIONS, random_inputs
from masked import MASKS
from torch.library import opcheck

import klfast
from klfast import Estimator
from klfast.args.estimator import ESTIMATORS
from klfast.args.penalty import Choices, Numbers, Spec
from klfast.types.reduction import REDUCTIONS

assert klfast.kl_penalty(torch.zeros(1), torch.zeros(1), backend="native").item() == 0  # loads them
FORWARD = torch.ops.klfast.kl_penalty_fwd.default
BACKWARD = torch.ops.klfast.kl_penalty_bwd.default
WEIGHTS = torch.ops.klfast.token_weights.default
SCALE = torch.ops.klfast.scale_.default
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
one_of_each_kind = pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])

TENSORS = {
    "fewest": {},
    "mask": {"mask": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)},
    "weights-and-old": {
        "mask": torch.linspace(0, 2, 12).reshape(3, 4),
        "old_logprobs": torch.linspace(-3, -1, 12).reshape(3, 4),
    },
    "scalars": {"coef_tensor": torch.tensor(0.5), "normalizer_tensor": torch.tensor(7)},
    "strided": {"logprobs": torch.linspace(-3, -1, 24).reshape(4, 6)[:, ::2].t()},
    "bf16-and-fp64": {
        "logprobs": torch.linspace(-3, -1, 12, dtype=torch.bfloat16).reshape(3, 4),
        "ref_logprobs": torch.linspace(-3, -2, 12, dtype=torch.float64).reshape(3, 4),
    },
    "one-sequence": {"logprobs": torch.zeros(5), "ref_logprobs": torch.ones(5)},
    "packed": {
        "logprobs": torch.linspace(-3, -1, 6),
        "ref_logprobs": torch.zeros(6),
        "cu_seqlens": torch.tensor([0, 2, 2, 6]),
    },
    "no-tokens": {"logprobs": torch.zeros(3, 0), "ref_logprobs": torch.zeros(3, 0)},
    "no-sequences": {"logprobs": torch.zeros(0, 4), "ref_logprobs": torch.zeros(0, 4)},
}
every_layout = pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)


def common(reduction="none", estimator="k3", **changes):
    """The arguments that the forward and the backward share, by name.

    ``changes`` may name an argument, a choice or a number.
    """
    logprobs, ref_logprobs, _ = random_inputs((3, 4))
    options = Estimator(estimator, log_ratio_clip=changes.pop("log_ratio_clip", None))
    arguments = {
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "old_logprobs": None,
        "mask": None,
        "cu_seqlens": None,
        "coef_tensor": None,
        "normalizer_tensor": None,
    }
    choices, numbers = Spec(options, REDUCTIONS[reduction]).encoded()
    choices, numbers = Choices(*choices), Numbers(*numbers)
    for name in [name for name in changes if name not in arguments]:
        if name in Choices._fields:
            choices = choices._replace(**{name: changes.pop(name)})
        elif name in Numbers._fields:
            numbers = numbers._replace(**{name: changes.pop(name)})
    return {**arguments, "choices": choices, "numbers": numbers, **changes}


def forward_arguments(reduction="none", statistics=False, **changes):
    scores = changes.pop("scores", None)
    weights = changes.pop("want_weights", True)
    grads = changes.pop("grads", (False, False))
    return (*common(reduction, **changes).values(), scores, weights, *grads, statistics)


def backward_arguments(reduction="none", **changes):
    grads = changes.pop("grads", (True, True))
    replaced = {name: changes.pop(name) for name in ("grad_out", "weights") if name in changes}
    result, weights, *_ = FORWARD(*forward_arguments(reduction, **changes))
    outputs = {"grad_out": torch.rand_like(result), "weights": weights, **replaced}
    return (*common(reduction, **changes).values(), *outputs.values(), *grads)


@pytest.mark.grid(meet=1)
@every_layout
@one_of_each_kind
def test_the_forward_keeps_its_contract_with_torch(reduction, tensors):
    opcheck(FORWARD, forward_arguments(reduction, True, **tensors))


@pytest.mark.parametrize("want_weights", [False, True])
@every_reduction
def test_every_forward_without_statistics_does(reduction, want_weights):
    arguments = forward_arguments(reduction, False, want_weights=want_weights, **TENSORS["mask"])
    opcheck(FORWARD, arguments)
    assert FORWARD(*arguments)[1].shape == (3 if want_weights else 0,)


@pytest.mark.parametrize("grads", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("reduction", SCALAR_REDUCTIONS)
def test_the_forward_with_unit_gradients_does(reduction, grads):
    opcheck(FORWARD, forward_arguments(reduction, grads=grads, **TENSORS["strided"]))


def test_the_forward_with_scores_does():
    opcheck(FORWARD, forward_arguments(scores=torch.ones(3), **TENSORS["mask"]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_forward_with_limits_does(estimator):
    opcheck(FORWARD, forward_arguments(estimator=estimator, log_ratio_clip=0.5))


@pytest.mark.grid(meet=1)
@every_layout
@one_of_each_kind
def test_the_backward_keeps_its_contract_with_torch(reduction, tensors):
    opcheck(BACKWARD, backward_arguments(reduction, **tensors))


@every_reduction
def test_every_backward_does(reduction):
    opcheck(BACKWARD, backward_arguments(reduction, **TENSORS["mask"]))


@pytest.mark.parametrize("grads", [(True, False), (False, True), (False, False)], ids=str)
def test_the_backward_of_some_gradients_does(grads):
    opcheck(BACKWARD, backward_arguments("seq-mean", grads=grads))


@every_layout
@pytest.mark.parametrize("reduction", SCALAR_REDUCTIONS)
def test_token_weights_keep_their_contract_with_torch(reduction, tensors):
    """They are the gradient of values, which k1 of log-probs is."""
    arguments = common(reduction, "k1", **{**tensors, "old_logprobs": None})
    like, _, _, *others = arguments.values()
    for is_double in (False, True):
        opcheck(WEIGHTS, (like, *others, is_double))
        arguments["logprobs"] = torch.zeros(
            like.shape, dtype=[torch.float32, torch.float64][is_double]
        )
        arguments["ref_logprobs"] = None
        wants = (None, False, True, False, False)
        gradient = FORWARD(*arguments.values(), *wants)[3]
        assert torch.equal(WEIGHTS(like, *others, is_double), gradient.flatten())


@pytest.mark.parametrize("reduction", ["none", "seq-mean"])
def test_token_weights_are_of_scalars_alone(reduction):
    like, _, _, *others = common(reduction).values()
    with pytest.raises(RuntimeError, match="only scalar reductions have token weights"):
        WEIGHTS(like, *others, False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scale_keeps_its_contract_with_torch(dtype):
    opcheck(SCALE, (torch.ones(5, dtype=dtype), torch.tensor(3.0)))
    opcheck(SCALE, (torch.ones(0, 5, dtype=dtype), torch.tensor(3.0)))


SHAPES = {"one": (1, 1), "odd": (3, 67), "long": (2, 1500), "no-tokens": (3, 0), "none": (0, 5)}


@pytest.mark.grid
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@every_reduction
def test_every_output_is_written(backend, reduction, shape, mask):
    assert torch.empty(3).isnan().all()
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [t.requires_grad_() for t in random_inputs(shape, dtype)[:2]]
        result, stats = klfast.kl_penalty(
            *inputs, mask(shape), reduction=reduction, return_stats=True, backend=backend
        )
        first = torch.autograd.grad(result.sum(), inputs, retain_graph=True)
        again = torch.autograd.grad(result.sum(), inputs)
        rewards = klfast.kl_rewards(
            torch.zeros(shape[0]), *inputs, mask(shape), kl_coef=0.1, backend=backend
        )
        assert not any(t.isnan().any() for t in (result, *stats, *first, *again, rewards))


@pytest.mark.usefixtures("poisoned_memory")
@every_reduction
def test_every_output_of_a_packed_batch_is_written(backend, reduction):
    cu_seqlens = torch.tensor([0, 0, 3, 3, 1500, 1500])
    inputs = [t.requires_grad_() for t in random_inputs((1500,))[:2]]
    result, stats = klfast.kl_penalty(
        *inputs, cu_seqlens=cu_seqlens, reduction=reduction, return_stats=True, backend=backend
    )
    grads = torch.autograd.grad(result.sum(), inputs)
    assert not any(t.isnan().any() for t in (result, *stats, *grads))


WRONG = {
    "complex": {"logprobs": torch.zeros(3, 4, dtype=torch.complex64)},
    "integers": {"logprobs": torch.zeros(3, 4, dtype=torch.int64)},
    "float8": {"ref_logprobs": torch.zeros(3, 4).to(torch.float8_e4m3fn)},
    "3-dimensional": {"logprobs": torch.zeros(1, 3, 4), "ref_logprobs": torch.zeros(1, 3, 4)},
    "0-dimensional": {"logprobs": torch.zeros(()), "ref_logprobs": torch.zeros(())},
    "smaller-ref": {"ref_logprobs": torch.zeros(3, 3)},
    "transposed-ref": {"ref_logprobs": torch.zeros(4, 3)},
    "flat-ref": {"ref_logprobs": torch.zeros(12)},
    "smaller-old": {"old_logprobs": torch.zeros(2, 4)},
    "integer-old": {"old_logprobs": torch.zeros(3, 4, dtype=torch.int32)},
    "smaller-mask": {"mask": torch.ones(3, 1)},
    "complex-mask": {"mask": torch.ones(3, 4, dtype=torch.complex64)},
    "negative-mask": {"mask": -torch.ones(3, 4)},
    "2-d-with-cu-seqlens": {"cu_seqlens": torch.tensor([0, 12])},
    "coef-of-1": {"coef_tensor": torch.ones(1)},
    "nan-coef": {"coef": float("nan")},
    "nan-coef-tensor": {"coef_tensor": torch.tensor(float("nan"))},
    "normalizer-of-2": {"normalizer_tensor": torch.ones(2)},
    "negative-normalizer": {"normalizer": -1.0},
    "zero-normalizer-tensor": {"normalizer_tensor": torch.zeros(())},
    "unknown-estimator": {"choices": [len(ESTIMATORS), *[0] * 6]},
    "negative-estimator": {"choices": [-1, *[0] * 6]},
    "unknown-gradient": {"gradient": 3},
    "unknown-importance": {"importance": 2},
    "unknown-result": {"result": 3},
    "huge-result": {"result": 2**40},
    "unknown-own-length": {"own_length": 2},
    "unknown-denominator": {"over": 3},
    "6-choices": {"choices": [0] * 6},
    "no-choices": {"choices": []},
    "8-numbers": {"numbers": [1.0] * 8},
    "no-numbers": {"numbers": []},
}
WRONG_PACKED = {
    "empty": torch.zeros(0, dtype=torch.int64),
    "2-d": torch.tensor([[0, 6]]),
    "floating": torch.tensor([0.0, 6.0]),
    "int16": torch.tensor([0, 6], dtype=torch.int16),
    "late-start": torch.tensor([1, 6]),
    "early-end": torch.tensor([0, 5]),
    "beyond": torch.tensor([0, 7]),
    "far-beyond": torch.tensor([0, 2**62, 6]),
    "negative": torch.tensor([0, -(2**40), 6]),
    "decreasing": torch.tensor([0, 5, 3, 6]),
    "decreasing-int32": torch.tensor([0, 5, 3, 6], dtype=torch.int32),
}


def replaced(changes):
    return common("token-mean", **changes)


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_a_direct_call_with_a_wrong_argument_raises(changes):
    arguments = tuple(replaced(changes).values())
    with pytest.raises(RuntimeError, match=r"."):
        FORWARD(*arguments, None, True, True, True)
    if "mask" not in changes or changes["mask"].shape != (3, 4):
        with pytest.raises(RuntimeError, match=r"."):
            BACKWARD(*arguments, torch.ones(()), torch.ones(3), True, True)


@pytest.mark.parametrize("cu_seqlens", WRONG_PACKED.values(), ids=WRONG_PACKED)
def test_a_direct_call_with_wrong_cu_seqlens_raises(cu_seqlens):
    changes = {"logprobs": torch.zeros(6), "ref_logprobs": torch.ones(6), "cu_seqlens": cu_seqlens}
    arguments = tuple(replaced(changes).values())
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        FORWARD(*arguments, None, True, True, True)
    weights = torch.ones(max(cu_seqlens.numel() - 1, 0))
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        BACKWARD(*arguments, torch.ones(()), weights, True, True)


def test_a_direct_forward_with_wrong_extras_raises():
    arguments = forward_arguments("none")
    for scores in (torch.ones(2), torch.ones(3, 1), torch.ones(3, dtype=torch.complex64)):
        with pytest.raises(RuntimeError, match="scores"):
            FORWARD(*arguments[:-4], scores, False, False, False)
    with pytest.raises(RuntimeError, match="scores"):
        FORWARD(*forward_arguments("token-mean")[:-4], torch.ones(3), False, False, False)
    for reduction in set(REDUCTIONS) - set(SCALAR_REDUCTIONS):
        with pytest.raises(RuntimeError, match="unit gradient"):
            FORWARD(*forward_arguments(reduction, grads=(True, False)))


@pytest.mark.parametrize(
    ("reduction", "changes"),
    [
        ("none", {"grad_out": torch.ones(3, 3)}),
        ("none", {"grad_out": torch.ones(())}),
        ("none", {"grad_out": torch.ones(3, 4, dtype=torch.complex64)}),
        ("seq-sum", {"grad_out": torch.ones(2)}),
        ("seq-sum", {"grad_out": torch.ones(3, 1)}),
        ("token-mean", {"grad_out": torch.ones(1)}),
        ("token-mean", {"weights": torch.ones(2)}),
        ("token-mean", {"weights": torch.ones(1, 3)}),
        ("token-mean", {"weights": torch.ones(())}),
        ("token-mean", {"weights": torch.ones(3, dtype=torch.complex64)}),
    ],
    ids=str,
)
def test_a_direct_backward_with_wrong_extras_raises(reduction, changes):
    with pytest.raises(RuntimeError, match=next(iter(changes))):
        BACKWARD(*backward_arguments(reduction, **changes))


@pytest.mark.parametrize(
    ("tensor", "factor"),
    [
        (torch.ones(4, 6).t(), torch.tensor(2.0)),
        (torch.ones(4, dtype=torch.int64), torch.tensor(2.0)),
        (torch.ones(4, dtype=torch.complex64), torch.tensor(2.0)),
        (torch.ones(4), torch.ones(1)),
        (torch.ones(4), torch.tensor(2j)),
    ],
    ids=["transposed", "integer", "complex", "1-d-factor", "complex-factor"],
)
def test_a_direct_scale_with_a_wrong_argument_raises_and_changes_nothing(tensor, factor):
    with pytest.raises(RuntimeError, match=r"."):
        SCALE(tensor, factor)
    assert torch.equal(tensor, torch.ones_like(tensor))


@pytest.mark.parametrize("argument", ["ref_logprobs", "mask", "coef_tensor"])
def test_a_direct_call_with_a_meta_tensor_is_traced(argument):
    """The dispatcher sends it to the fakes: nothing is read, the result holds nothing."""
    shape = () if argument == "coef_tensor" else (3, 4)
    arguments = replaced({argument: torch.ones(shape, device="meta")})
    arguments["logprobs"] = arguments["logprobs"].to("meta")
    result = FORWARD(*arguments.values(), None, False, False, False, False)[0]
    assert result.is_meta
