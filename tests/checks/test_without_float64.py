"""Devices without float64, such as Apple's GPUs, compute accurately in fp32."""

import pytest
import torch
from agreement_logits import leaves
from every_function import KEPT, computed, every_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Estimator, Rejection
from klfast.controllers import CONTROLLERS
from klfast.types.device import DEVICES
from klfast.types.names import DIRECTIONS, ESTIMATORS, TAILS
from klfast.types.reduction import REDUCTIONS


class NoFloat64(TorchDispatchMode):
    """Refuses every tensor of float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                assert tensor.dtype != torch.float64, f"float64 from {func}"
        return outputs


@pytest.fixture
def without_float64(monkeypatch, only_backend):
    """Runs a function as on a device that lacks float64, which only the reference serves."""

    def run(function, *args):
        with monkeypatch.context() as patch, NoFloat64():
            patch.setitem(DEVICES, "cpu", DEVICES["mps"])
            return function(*args)

    only_backend("reference")
    return run


def stepped(**arguments):
    penalty = klfast.KLPenalty(controller=klfast.AdaptiveKLController(0.1, 6.0))
    loss = penalty(**arguments)
    return loss, *map(torch.tensor, penalty.step().values())


def steered(kind, kls):
    """The coefficients of a controller on the device."""
    controller = CONTROLLERS[kind](0.1, 6.0, device="cpu", ema=0.5, dead_band=0.1)
    values = []
    for kl in kls:
        controller.update(kl, 64)
        values.append(controller.value.clone())
    return values


STATS = {"return_stats": True}
EVERYTHING = {"return_entropy": True, **STATS, "token_ids": torch.tensor([[1, 0, 5], [2, 2, 3]])}
TENSORS = {"coef": torch.tensor(0.3), "normalizer": torch.tensor(2.0), "reduction": "token-mean"}
LIMITS = Estimator("k3", log_ratio_clip=1.0, kl_clip=0.5, linear_tail=0.2, importance_cap=1.5)
RULES = [Rejection(s, "token", high=0.5) for s in ("k1", "abs", "k3", "binary_kl", "binary_tv")]
HEAT = torch.tensor([[0.7], [1.3]])
OPTIONS = {
    "kl_penalty": [
        *({"estimator": name, **STATS} for name in (*ESTIMATORS, "k3+")),
        *({"reduction": name} for name in REDUCTIONS),
        TENSORS,
    ],
    "kl_penalty(old)": [{"estimator": LIMITS, **STATS}, {"estimator": "k3+"}],
    "kl_penalty(weights)": [STATS, {"reduction": "seq-mean-token-mean"}],
    "kl_rewards": [STATS],
    "reduce": [{"reduction": name} for name in REDUCTIONS] + [TENSORS],
    "token_logprobs": [
        {"return_entropy": True, "temperature": HEAT},
        {"token_ids": torch.tensor([[[1, 4]] * 3] * 2), "ignore_index": 4, "temperature": 0.7},
    ],
    "kl_divergence": [
        *({"direction": name, **EVERYTHING, "temperature": HEAT} for name in DIRECTIONS),
        *({"direction": name, **TENSORS} for name in DIRECTIONS),
    ],
    "kl_divergence(weights)": [STATS, TENSORS],
    "topk_kl_divergence": [
        {"direction": direction, "tail": tail, "temperature": HEAT, **STATS}
        for direction in DIRECTIONS
        for tail in TAILS
    ],
    "linear_token_logprobs": [{"return_entropy": True, "temperature": HEAT, "softcap": 3.0}],
    "linear_token_loss": [{"return_entropy": True, "temperature": HEAT, "softcap": 3.0}],
    "linear_topk_kl_divergence": [{"tail": tail, "softcap": 3.0, **STATS} for tail in TAILS],
    "linear_kl_divergence": [
        {"direction": name, **EVERYTHING, "bias": torch.linspace(-1, 1, 11)} for name in DIRECTIONS
    ],
    "rollout_correction": [
        {"weight": weight, "reject": RULES, "normalize": weight and "sequence"}
        for weight in (None, "token", "sequence", "geometric")
    ],
    "log_ratio_profile": [{}],
    "data_parallel_normalizer": [{"reduction": "token-mean"}, {}],
    "KLPenalty": [{}],
}
CASES = [
    pytest.param(name, options, id=f"{name}-{at}")
    for name, of_function in OPTIONS.items()
    for at, options in enumerate(of_function)
]


def test_every_function_is_here():
    assert OPTIONS.keys() == every_function().keys()


@pytest.mark.parametrize("mask", [None, KEPT], ids=["all", "masked"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_no_float64_and_its_numbers(without_float64, name, options, mask):
    function, arguments = every_function()[name]
    function = stepped if name == "KLPenalty" else function
    if name == "data_parallel_normalizer":
        mask = KEPT
    arguments = {**arguments, "mask": mask, **options}
    expected = computed(function, arguments)
    found = without_float64(computed, function, arguments)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.double(), other.double(), rtol=2e-5, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("name", ["k3", "k3_ref", *DIRECTIONS])
def test_digits_near_the_reference(without_float64, name, apart):
    """The textbook formulas cancel in fp32 here. Results are accurate and never negative."""

    def of(x, y):
        if name in DIRECTIONS:
            return klfast.kl_divergence(x, y, direction=name)
        return klfast.kl_penalty(x[..., 0], y[..., 0], estimator=name)

    x = torch.randn(4, 8, 50)
    inputs = leaves(x, x + apart * torch.randn(4, 8, 50))
    truth = of(*(t.double() for t in inputs))
    truth_grads = torch.autograd.grad(truth.sum(), inputs)
    found = without_float64(of, *inputs)
    grads = without_float64(lambda: torch.autograd.grad(found.sum(), inputs))
    assert (found >= 0).all()
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=0, check_dtype=False)
    for grad, exact in zip(grads, truth_grads, strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())


@pytest.mark.filterwarnings("ignore:.* skipped a KL of nan")
@pytest.mark.parametrize("kind", CONTROLLERS)
def test_controllers_on_the_device(without_float64, kind):
    kls = [3.0, 12.0, float("nan"), 50.0, 7.0, 6.2, 5.0]
    expected = steered(kind, kls)
    found = without_float64(steered, kind, kls)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=0)
