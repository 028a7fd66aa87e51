"""KLPenalty: a call is ``kl_penalty``, and a step is one update, however the batch was cut."""

import math
import warnings

import pytest
import readme
import torch
from agreement import random_inputs, same_bits
from around import RefusesReads
from refusals import NOT_NEGATIVE

import klfast
from klfast import KLPenalty
from klfast.types.reduction import REDUCTIONS

PIECES = {1: [10], 2: [4, 6], 5: [1, 3, 0, 2, 4]}


def batch(dtype=torch.float32):
    """(logprobs, ref_logprobs, mask) of ten sequences. One keeps nothing, one has a masked NaN."""
    torch.manual_seed(1)
    logprobs, ref_logprobs, _ = random_inputs((10, 21), dtype)
    lengths = torch.tensor([21, 1, 0, 20, 12, 7, 15, 3, 21, 2])
    logprobs[5, 8] = math.nan
    return logprobs, ref_logprobs, torch.arange(21) < lengths[:, None]


def controllers():
    return {
        "adaptive": klfast.AdaptiveKLController(0.2, target=6.0, horizon=100),
        "token": klfast.ExponentialKLController(0.2, target=0.1),
        "nupi": klfast.NuPIKLController(0.2, target=6.0),
        "device": klfast.AdaptiveKLController(0.2, target=6.0, horizon=100, device="cpu"),
        "scheduled": klfast.ScheduledKLController(0.2, 6.0, warmup=2, steps=5),
    }


every_controller = pytest.mark.parametrize("kind", controllers())


def float_of(value):
    return value.item() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_call_is_kl_penalty_with_the_coefficient(backend, reduction):
    logprobs, ref_logprobs, mask = batch()
    old_logprobs = logprobs + 0.1
    penalty = KLPenalty("k3", reduction, controller=0.3, backend=backend)
    normalizer = 7.0 if "mean" in reduction and reduction != "seq-mean" else None
    ways = [{}, {"old_logprobs": old_logprobs}, {"normalizer": normalizer}]
    for options in ways:
        expected = klfast.kl_penalty(
            logprobs,
            ref_logprobs,
            mask,
            estimator="k3",
            reduction=reduction,
            coef=0.3,
            backend=backend,
            **options,
        )
        assert same_bits(penalty(logprobs, ref_logprobs, mask, **options), expected)


def exact_calls(function):
    """(the function of a method of KLPenalty, inputs) with the mask of ``batch``."""
    torch.manual_seed(2)
    mask = batch()[2]
    logits, ref_logits = torch.randn(2, 10, 21, 5)
    weight, ref_weight = torch.randn(2, 6, 5)
    if function == "from_logits":
        return klfast.kl_divergence, (logits, ref_logits, mask)
    return klfast.linear_kl_divergence, (logits, weight, ref_logits, ref_weight, mask)


@pytest.mark.parametrize("method", ["from_logits", "from_hidden"])
@pytest.mark.parametrize("reduction", ["none", "seq-sum", "token-mean"])
def test_an_exact_call_is_the_divergence_with_the_coefficient(method, reduction):
    function, inputs = exact_calls(method)
    options = {"direction": "forward", "temperature": 0.7}
    if reduction == "token-mean":
        options["normalizer"] = 50.0
    expected, *_, stats = function(
        *inputs, reduction=reduction, coef=0.3, return_stats=True, **options
    )
    penalty = KLPenalty("k1", reduction, controller=0.3)
    leaf = inputs[0].clone().requires_grad_()
    loss = getattr(penalty, method)(leaf, *inputs[1:], **options)
    assert same_bits(loss, expected)
    assert leaf.grad is None
    loss.sum().backward()
    assert leaf.grad.abs().sum() > 0
    token_ids = torch.zeros(10, 21, dtype=torch.long)
    outputs = getattr(penalty, method)(*inputs, token_ids=token_ids, return_entropy=True, **options)
    assert same_bits(outputs.kl, expected)
    assert outputs.stats is None
    assert outputs.entropy.shape == outputs.logprobs.shape == (10, 21)
    penalty(*batch())
    both = klfast.KLStats.cat(
        [stats, stats, klfast.kl_penalty(*batch(), estimator="k1", return_stats=True)[1]]
    )
    numbers = {name: number.item() for name, number in both.as_dict().items()}
    expected = {**numbers, "kl/coef": 0.3, "kl/skipped": 0}
    assert penalty.step() == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_the_examples_of_exact_calls():
    logits, ref_logits, hidden, ref_hidden = torch.randn(4, 2, 3, 5)
    head = ref_head = torch.nn.Linear(5, 7)
    mask, penalty = torch.ones(2, 3), KLPenalty()
    given = locals()
    left = readme.run("klfast.training.penalty.KLPenalty.from_logits", **given)
    other = readme.run("klfast.training.penalty.KLPenalty.from_hidden", **given)
    assert left["loss"] > 0
    assert other["loss"] > 0


def test_an_exact_call_may_be_packed_and_leaves_the_objects_options():
    inputs = exact_calls("from_logits")[1]
    cu_seqlens = torch.arange(11) * 21
    expected = KLPenalty(reduction="seq-mean-token-sum").from_logits(*inputs)
    packed = [tensor.flatten(0, 1) for tensor in inputs]
    penalty = KLPenalty(reduction="seq-mean-token-sum", cu_seqlens=cu_seqlens)
    assert same_bits(penalty.from_logits(*packed), expected)
    penalty.step()
    for name, value in {"reduction": "none", "coef": 2.0, "return_stats": True}.items():
        with pytest.raises(TypeError, match=rf"^{name} must be left to the KLPenalty, got "):
            penalty.from_logits(*packed, **{name: value})
    with pytest.raises(RuntimeError, match=r"call klfast\.kl_divergence there"):
        torch.func.grad(lambda logits: penalty.from_logits(logits, *packed[1:]))(packed[0])
    with pytest.raises(RuntimeError, match="must come after a call"):
        penalty.step()


@every_controller
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("pieces", PIECES.values(), ids=str)
def test_micro_batches_move_the_coefficient_as_the_batch_does(kind, dtype, pieces):
    whole, plain = batch(dtype), controllers()[kind]
    penalty = KLPenalty("k3", controller=controllers()[kind])
    for step in range(3):
        scaled = (whole[0], whole[1] - 0.5 * step, whole[2])
        for micro in zip(*(tensor.split(pieces) for tensor in scaled), strict=True):
            penalty(*micro)
        stats = klfast.kl_penalty(*scaled, estimator="k3", return_stats=True)[1]
        plain.update(stats)
        numbers = penalty.step()
        expected = {**stats.to_floats(), "kl/coef": float_of(plain.value), "kl/skipped": 0.0}
        assert numbers == expected
        assert float_of(penalty.coef) == float_of(plain.value) != 0.2
    assert penalty.controller.state_dict() == plain.state_dict()


@pytest.mark.parametrize("kind", ["adaptive", "device"])
@pytest.mark.parametrize("case", ["masked", "empty", "nan", "overflow"])
def test_a_batch_without_a_mean_is_skipped(kind, case):
    logprobs, ref_logprobs, mask = batch()
    given = {
        "masked": (logprobs, ref_logprobs, torch.zeros_like(mask)),
        "empty": (logprobs[:0], ref_logprobs[:0], mask[:0]),
        "nan": (torch.full_like(logprobs, math.nan), ref_logprobs, mask),
        "overflow": (ref_logprobs - 120, ref_logprobs, mask),  # exp(120) in fp32
    }[case]
    penalty = KLPenalty(controller=controllers()[kind])
    assert penalty(*given).isinf() == (case == "overflow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        numbers = penalty.step()
    assert (numbers["kl/coef"], numbers["kl/skipped"]) == (0.2, 1.0)
    mean = {"nan": math.nan, "overflow": math.inf}.get(case, 0.0)
    assert numbers["kl/token_mean"] == pytest.approx(mean, nan_ok=True)
    assert numbers["kl/nonfinite"] == (mask.sum() if case in ("nan", "overflow") else 0)
    penalty(logprobs, ref_logprobs, mask)
    assert penalty.step()["kl/coef"] != 0.2


def test_a_call_that_raises_gathers_nothing():
    logprobs, ref_logprobs, mask = batch()
    penalty, plain = (KLPenalty(controller=controllers()["adaptive"]) for _ in range(2))
    penalty(logprobs, ref_logprobs, mask)
    plain(logprobs, ref_logprobs, mask)
    for bad in [(logprobs, ref_logprobs[:3]), (logprobs, ref_logprobs, -mask.float()), (None, 1)]:
        with pytest.raises((TypeError, ValueError)):
            penalty(*bad)
    assert penalty.step() == plain.step()


GROUPED = klfast.GroupedKLController(klfast.NuPIKLController, 0.1, {"a": 6.0})
WRONG = {
    "estimator": ({"estimator": "k9"}, ValueError, "unknown estimator 'k9'"),
    "reduction": ({"reduction": "mean"}, ValueError, "unknown reduction 'mean'"),
    "backend": ({"backend": "cpu"}, ValueError, "unknown backend 'cpu'"),
    "grouped": (
        {"controller": GROUPED},
        TypeError,
        "controller must be a controller with one coef",
    ),
    "bool": ({"controller": True}, TypeError, "controller must be a controller with one coef"),
    "negative": ({"controller": -0.1}, ValueError, f"controller {NOT_NEGATIVE}"),
    "nan": ({"controller": math.nan}, ValueError, f"controller {NOT_NEGATIVE}"),
    "unit": (
        {"controller": klfast.NuPIKLController(0.1, 0.1), "unit": "token"},
        ValueError,
        "unit must be the controller's, 'sequence', got 'token'",
    ),
}


@pytest.mark.parametrize(("options", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        KLPenalty(**options)


def test_a_normalizer_beyond_the_batch_is_warned_of_once():
    penalty, base = KLPenalty(), torch.full((2, 3), -4.0)
    with pytest.raises(TypeError, match="mask must be"):
        penalty(base, base, [1, 0])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    for normalizer in (4.0, torch.tensor(4.0), None, 2.0):
        penalty(base, base, mask, normalizer=normalizer)
        assert "normalizer" not in penalty.step()
    # Two micro-batches are one batch of 8 tokens. A number is a constant.
    penalty(base, base, mask, normalizer=torch.tensor(8.0))
    penalty(base, base, mask, normalizer=torch.tensor(8.0))
    penalty.step()
    for weights, normalizer in ((mask, 100.0), (0.5 * mask, torch.tensor(4.0))):
        penalty(base, base, weights, normalizer=normalizer)
        penalty.step()
    penalty(base, base, mask, weights=torch.ones(2), normalizer=torch.tensor(6.0))  # as rejection
    penalty.step()
    empty = torch.zeros_like(mask)
    penalty(base, base, empty, normalizer=klfast.data_parallel_normalizer(empty, "token-mean"))
    with pytest.warns(RuntimeWarning, match="skipped a KL of nan"):
        penalty.step()
    penalty(base, base, mask, normalizer=torch.tensor(6.0))
    with pytest.warns(RuntimeWarning, match=r"normalizer must be .*, got 6 in a step of 4 tokens"):
        penalty.step()
    penalty(base, base, mask, normalizer=torch.tensor(6.0))
    penalty.step()


@pytest.mark.parametrize("kind", ["adaptive", "device"])
def test_a_controller_is_a_coefficient(backend, kind):
    pair, mask, logits = batch()[:2], batch()[2], torch.randn(2, 2, 3, 5)
    options = {"backend": backend}
    for coef in (controllers()[kind], klfast.FixedKLController(0.2)):
        found, expected = (
            [
                klfast.kl_penalty(*pair, mask, reduction="token-mean", coef=own, **options),
                klfast.kl_rewards(torch.zeros(10), *pair, mask, kl_coef=own, **options),
                klfast.kl_divergence(*logits, coef=own, **options),
            ]
            for own in (coef, 0.2)
        )
        torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("reduction", ["token-mean", "none"])
def test_a_device_controller_may_move_before_the_backward(reduction):
    """Its tensor changes in place. The gradient has the coefficient of the call."""
    logprobs, ref_logprobs, mask = batch()
    gradients = []
    for controller in (controllers()["device"], 0.2):
        leaf = logprobs.clone().requires_grad_()
        penalty = KLPenalty(reduction=reduction, controller=controller)
        loss = penalty(leaf, ref_logprobs, mask).sum()
        penalty.step()
        loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=2e-7, atol=0)


@pytest.mark.parametrize("kind", ["adaptive", "device"])
def test_a_call_reads_nothing_back(kind):
    penalty = KLPenalty(controller=controllers()[kind])
    with RefusesReads():
        penalty(*batch())


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["adaptive", "device"])
def test_one_compilation_serves_every_micro_batch_and_step(kind):
    torch._dynamo.reset()
    whole = batch()
    eager, traced = (KLPenalty(controller=controllers()[kind]) for _ in range(2))
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def loss_of(logprobs, ref_logprobs, mask):
        return 2 * traced(logprobs, ref_logprobs, mask) + logprobs.nansum() * 0

    for _ in range(4):
        for _ in range(12):
            leaf = whole[0].clone().requires_grad_()
            loss = loss_of(leaf, *whole[1:])
            expected = 2 * eager(*whole)
            torch.testing.assert_close(loss, expected)
            loss.backward()
        assert traced.step() == pytest.approx(eager.step(), rel=1e-6)
    assert len(compilations) <= 2  # a changed coefficient becomes a symbol


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"kind": "adaptive"}, ValueError, "state\\['kind'\\] must be 'penalty'"),
        ({"version": 2}, ValueError, "state\\['version'\\] must be 1, got 2"),
        ({"pending": None}, TypeError, "state\\['pending'\\] must be a list, got NoneType"),
        ({"pending": ["int8"]}, ValueError, "unknown state\\['pending'\\]\\[0\\] 'int8'"),
        (
            {"pending": ["float32", [], ["x"]]},
            TypeError,
            "\\[2\\] must be a finite number, got 'x'",
        ),
        ({"pending": ["float32", *[[1.0]] * 7, []]}, ValueError, "got lists of .*, 1, 0\\]"),
        ({"controller": {"kind": "nupi"}}, ValueError, "state\\['kind'\\] must be 'adaptive'"),
    ],
)
def test_a_wrong_state_changes_nothing(change, error, text):
    penalty = KLPenalty(controller=controllers()["adaptive"])
    penalty(*batch())
    before = penalty.state_dict()
    with pytest.raises(error, match=text):
        penalty.load_state_dict({**before, **change})
    assert penalty.state_dict() == before
