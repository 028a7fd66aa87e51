"""The two roads to the kernels: which one a call takes, and that they give the same bits.

Plain tensors in eager mode take the direct road; all that torch's dispatcher must see takes the
dispatcher's.
"""

import contextlib
import inspect
import json
import threading
import time

import numpy as np
import pytest
import torch
from agreement import random_inputs, same_bits
from fresh import run_fresh
from refusals import ONE_OF_THE_DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import klfast
from klfast import Estimator, shortcut
from klfast.backends import BACKENDS
from klfast.backends.compiled import compiled
from klfast.estimator import ESTIMATORS
from klfast.ops.direct import Direct, directly
from klfast.ops.table import Ops
from klfast.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

NATIVE = BACKENDS["native"]
DIRECT, DISPATCHER = ["direct"], ["dispatcher"]
PENALTY = {"mask": torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=torch.bool), "reduction": "seq-mean"}


class Spied:
    """The functions of the extension, which note when they serve a call."""

    def __init__(self, note):
        for name in Ops._fields:
            setattr(self, name, self.noting(getattr(NATIVE.direct.functions, name), note))

    @staticmethod
    def noting(function, note):
        def noted(*args):
            outputs = function(*args)
            if outputs is not NotImplemented:
                note("direct")
            return outputs

        return noted


@pytest.fixture
def roads(monkeypatch):
    """The roads that the calls of ops took, in order."""
    taken = []

    def noting(op):
        def noted(*args):
            taken.append("dispatcher")
            return op(*args)

        return noted

    dispatched = Ops(*map(noting, Ops.of("klfast")))
    functions = Spied(taken.append)
    direct = Direct(functions, directly(functions, dispatched), NATIVE.direct.serves)
    spied = compiled(
        "native",
        NATIVE.why_not,
        dispatched,
        checks_in_kernel=NATIVE.checks_in_kernel,
        direct=direct,
    )
    monkeypatch.setitem(BACKENDS, "native", spied)
    return taken


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    return random_inputs((2, 3), dtype)[:2]


def penalty(logprobs, ref_logprobs):
    return klfast.kl_penalty(logprobs, ref_logprobs, **PENALTY)


class Subclass(torch.Tensor):
    pass


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


PLAIN = {
    "tensor": lambda t: t,
    "parameter": torch.nn.Parameter,
    "leaf": lambda t: t.clone().requires_grad_(),
    "with-a-graph": lambda t: t.clone().requires_grad_() * 1,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.t().contiguous().t(),
    "inference-tensor": in_inference_mode,
    "bf16": lambda t: t.bfloat16(),
    "fp16": lambda t: t.half(),
    "fp64": lambda t: t.double(),
}
OTHER = {
    "subclass": lambda t: t.as_subclass(Subclass),
    "negated-view": lambda t: torch._neg_view(-t),
    "conjugate's-imaginary-part": lambda t: torch.conj(torch.complex(t, -t)).imag,
}


@pytest.mark.parametrize("second", PLAIN)
@pytest.mark.parametrize("first", PLAIN)
def test_plain_tensors_take_the_direct_road(roads, first, second):
    result = penalty(PLAIN[first](inputs()[0]), PLAIN[second](inputs()[1]))
    assert roads == DIRECT
    if result.requires_grad:
        result.sum().backward()
        assert roads == 2 * DIRECT


@pytest.mark.parametrize("where", [0, 1], ids=["logprobs", "ref_logprobs"])
@pytest.mark.parametrize("kind", OTHER)
def test_what_memory_does_not_hold_takes_the_dispatchers(roads, kind, where):
    given = list(inputs())
    expected = penalty(*given)
    given[where] = OTHER[kind](given[where])
    roads.clear()
    torch.testing.assert_close(penalty(*given), expected, rtol=0, atol=0, check_dtype=False)
    assert roads == DISPATCHER


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("mask", torch.ones(2, 3).as_subclass(Subclass)),
        ("mask", torch._neg_view(-torch.ones(2, 3))),
        ("old_logprobs", torch._neg_view(torch.ones(2, 3))),
    ],
    ids=["mask-subclass", "mask-negated", "old_logprobs-negated"],
)
def test_every_argument_is_looked_at(roads, argument, value):
    options = {argument: value}
    expected = klfast.kl_penalty(*inputs(), **options, backend="reference")
    torch.testing.assert_close(klfast.kl_penalty(*inputs(), **options), expected)
    assert roads == DISPATCHER


def test_zero_tensors_take_the_dispatchers(roads):
    """They have no memory."""
    result = penalty(torch._efficientzerotensor((2, 3)), inputs()[1])
    assert roads == DISPATCHER
    assert same_bits(result, penalty(torch.zeros(2, 3), inputs()[1]))


def test_the_gradient_of_a_negated_view_comes_back(roads):
    logprobs, ref_logprobs = inputs()
    logprobs.requires_grad_()
    penalty(torch._neg_view(-logprobs), ref_logprobs).sum().backward()
    expected = logprobs.grad.clone()
    assert "direct" not in roads[:1]
    logprobs.grad = None
    penalty(logprobs, ref_logprobs).sum().backward()
    assert same_bits(logprobs.grad, expected)


MODES = {
    "torch-function": FunctionMode,
    "dispatch": DispatchMode,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}
NO_MODES = {
    "no-grad": torch.no_grad,
    "inference-mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved-tensor-hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(), lambda t: t
    ),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:.*Profiler clears events")
@pytest.mark.parametrize("needs", [False, True], ids=["constant", "differentiable"])
@pytest.mark.parametrize(
    ("mode", "road"),
    [(mode, DISPATCHER) for mode in MODES.values()]
    + [(mode, DIRECT) for mode in NO_MODES.values()],
    ids=[*MODES, *NO_MODES],
)
def test_a_mode_s_road(roads, mode, road, needs):
    logprobs, ref_logprobs = inputs()
    logprobs.requires_grad_(needs)
    expected = penalty(logprobs, ref_logprobs)
    roads.clear()
    with mode():
        result = penalty(logprobs, ref_logprobs)
        assert roads == road
        if result.requires_grad:
            result.sum().backward()
            # A torch-function mode is left while it calls what it was given, here backward.
            assert roads[1:] == (DIRECT if mode is FunctionMode else road)
    assert same_bits(result, expected)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_the_profiler_shows_the_op():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        penalty(*inputs())
    assert "klfast::kl_penalty_fwd" in {event.key for event in profile.key_averages()}


def test_fake_tensors_take_the_dispatchers(roads):
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in inputs()]
        assert klfast.kl_penalty(*fakes).shape == (2, 3)
    klfast.kl_penalty(*fakes)
    assert roads == 2 * DISPATCHER


def test_functional_tensors_take_the_dispatchers(roads):
    functional = [torch._to_functional_tensor(t) for t in inputs()]
    result = torch._from_functional_tensor(klfast.kl_penalty(*functional))
    assert roads == DISPATCHER
    assert same_bits(result, klfast.kl_penalty(*inputs()))


def test_transforms_take_the_dispatchers(roads):
    logprobs, ref_logprobs = inputs()
    torch.func.vmap(lambda a, b: klfast.kl_penalty(a, b))(logprobs, ref_logprobs)
    assert set(roads) == {"dispatcher"}
    torch.func.grad(lambda a: klfast.kl_penalty(a, ref_logprobs).sum())(logprobs)
    torch.func.vmap(torch.func.grad(lambda a, b: klfast.kl_penalty(a, b).sum()))(
        logprobs, ref_logprobs
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_is_refused():
    logprobs, ref_logprobs = inputs()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward"):
        klfast.kl_penalty(forward_ad.make_dual(logprobs, logprobs), ref_logprobs)


def test_batched_gradients_come_back(roads):
    logprobs, ref_logprobs = inputs()
    logprobs.requires_grad_()
    result = penalty(logprobs, ref_logprobs)
    both = torch.autograd.grad(result, logprobs, torch.eye(2), is_grads_batched=True)[0]
    assert roads[0] == "direct"
    assert set(roads[1:]) == {"dispatcher"}
    alone = [torch.autograd.grad(penalty(logprobs, ref_logprobs)[i], logprobs)[0] for i in (0, 1)]
    assert same_bits(both, torch.stack(alone))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_calls_the_ops():
    torch._dynamo.reset()
    compiled_penalty = torch.compile(penalty, fullgraph=True, backend="aot_eager")
    logprobs, ref_logprobs = inputs()
    assert same_bits(compiled_penalty(logprobs, ref_logprobs), penalty(logprobs, ref_logprobs))
    torch._dynamo.reset()


class Module(torch.nn.Module):
    def forward(self, logprobs, ref_logprobs):
        return penalty(logprobs, ref_logprobs)


def ops_of(graph):
    return {node.target for node in graph.nodes if node.op == "call_function"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_the_op(strict):
    program = torch.export.export(Module(), inputs(), strict=strict)
    assert torch.ops.klfast.kl_penalty_fwd.default in ops_of(program.graph)


def test_traced_graphs_hold_the_op():
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(penalty)(*inputs())
    assert torch.ops.klfast.kl_penalty_fwd.default in ops_of(traced.graph)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_traces_hold_the_op():
    traced = torch.jit.trace(penalty, inputs(), check_trace=False)
    assert "klfast::kl_penalty_fwd" in str(traced.graph)


def test_logits_take_the_direct_road_too(roads):
    logits = torch.randn(2, 3, 7, requires_grad=True)
    ids = torch.randint(7, (2, 3))
    klfast.token_logprobs(logits, ids).sum().backward()
    assert set(roads) == {"direct"}
    klfast.kl_divergence(logits, torch.randn(2, 3, 7), reduction="token-mean").backward()
    klfast.kl_divergence(logits, torch.randn(2, 3, 7)).sum().backward()
    assert set(roads) == {"direct"}


def test_rewards_take_the_direct_road_too(roads):
    klfast.kl_rewards(torch.ones(2), *inputs(), kl_coef=0.1)
    assert roads == DIRECT


def test_scalars_in_tensors_are_checked_in_python_and_take_the_direct_road(roads):
    coef, normalizer = torch.tensor(0.5), torch.tensor(3.0)
    options = {"coef": coef, "normalizer": normalizer, "reduction": "token-mean"}
    result = klfast.kl_penalty(*inputs(), **options)
    assert roads == DIRECT
    numbers = {"coef": 0.5, "normalizer": 3.0, "reduction": "token-mean"}
    assert same_bits(result, klfast.kl_penalty(*inputs(), **numbers))


LIMITS = {
    "no-limit": {},
    "clips": {"log_ratio_clip": (-0.5, 0.4), "kl_clip": 0.3},
    "tail": {"linear_tail": 0.5},
    "weights": {"importance": "detached", "importance_cap": 1.1},
    "clip-weighted": {"clip_weighted": True, "kl_clip": 0.3},
}
LAYOUTS = {
    "padded": lambda t: t,
    "strided": lambda t: t.t(),
    "packed": lambda t: t.reshape(-1),
    "expanded": lambda t: t[:1].expand(4, -1),
}


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(
    ("dtype", "masked", "gradient"),
    [
        (torch.float64, "no-mask", "value"),
        (torch.float32, "weights", "k2"),
        (torch.bfloat16, "bool", "value"),
        (torch.float16, "bool", "none"),
    ],
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_both_roads_give_the_same_bits(
    estimator, reduction, dtype, masked, gradient, limits, layout
):
    torch.manual_seed(1)
    logprobs, ref_logprobs, old_logprobs = map(LAYOUTS[layout], random_inputs((4, 9), dtype))
    mask = LAYOUTS[layout](torch.rand(4, 9).round(decimals=1).clamp(min=0.3) - 0.3)
    options = {
        "mask": {"no-mask": None, "bool": mask > 0, "weights": mask}[masked],
        "estimator": Estimator(estimator, gradient, **LIMITS[limits]),
        "reduction": reduction,
        "coef": 0.3,
        "old_logprobs": old_logprobs if "weight" in limits else None,
        "cu_seqlens": torch.tensor([0, 5, 5, 36]) if layout == "packed" else None,
        "normalizer": 7.0 if reduction in NORMALIZED_REDUCTIONS and limits == "clips" else None,
        "return_stats": True,
    }
    for by_road in zip(
        *(outputs_of(logprobs, ref_logprobs, options, mode) for mode in (None, DispatchMode)),
        strict=True,
    ):
        assert same_bits(*by_road)


def outputs_of(logprobs, ref_logprobs, options, mode):
    """Result, statistics and the gradients of two backwards, on the road that a mode leads to."""
    leaves = [t.detach().requires_grad_() for t in (logprobs, ref_logprobs)]
    with contextlib.nullcontext() if mode is None else mode():
        with torch.no_grad():
            alone, _ = klfast.kl_penalty(*leaves, **options)
        result, stats = klfast.kl_penalty(*leaves, **options)
        outputs = [alone, result.detach(), *stats]
        if result.requires_grad:
            grad_out = torch.linspace(1, 2, result.numel(), dtype=result.dtype).view(result.shape)
            for again in (True, False):
                outputs += torch.autograd.grad(result, leaves, grad_out, retain_graph=again)
    return outputs


def test_other_threads_run_while_a_kernel_does():
    """A thread ticks on in the middle of a call."""
    logprobs = torch.randn(2_048, 8_192)
    done, ticks = threading.Event(), []

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(1e-4)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    klfast.kl_penalty(logprobs, logprobs, estimator="r_log_r")
    end = time.perf_counter()
    done.set()
    thread.join()
    quarter = (end - begin) / 4
    assert any(begin + quarter < at < end - quarter for at in ticks)


def test_outputs_have_memory_of_torchs_own(roads):
    """Foreign memory cannot be resized, and record_stream does not know it."""
    logprobs, ref_logprobs = inputs()
    result, stats = klfast.kl_penalty(logprobs, ref_logprobs, return_stats=True)
    logprobs.requires_grad_()
    penalty(logprobs, ref_logprobs).sum().backward()
    assert set(roads) == {"direct"}
    for tensor in (result, *stats, logprobs.grad):
        assert tensor.untyped_storage().resizable()


@pytest.mark.parametrize("flag", [1, "yes", torch.tensor(True)], ids=["int", "str", "tensor"])
def test_what_is_true_is_a_flag(flag):
    logits, ids = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    assert len(klfast.kl_penalty(*inputs(), return_stats=flag)) == 2
    entropies = "detached" if isinstance(flag, str) else flag  # the one name that is a choice
    assert len(klfast.token_logprobs(logits, ids, return_entropy=entropies)) == 2
    leaf = logits.clone().requires_grad_()
    found = klfast.kl_divergence(leaf, logits, reduction="token-mean", return_stats=flag)
    found.kl.backward()
    assert found.stats.length.tolist() == [3, 3]


def test_dtypes_that_pass_for_bytes_are_refused():
    nibbles = torch.ones(2, 3, dtype=torch.uint8).view(torch.uint4)
    with pytest.raises(TypeError, match=f"mask {ONE_OF_THE_DTYPES}"):
        klfast.kl_penalty(*inputs(), nibbles)
    with pytest.raises(TypeError, match=f"scores {ONE_OF_THE_DTYPES}"):
        klfast.kl_rewards(nibbles[0, :2], *inputs(), kl_coef=0.1)


def test_an_error_of_a_hook_is_raised_and_the_call_is_made_once():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        raise RuntimeError("of the hook")

    logprobs, ref_logprobs = inputs()
    logprobs.requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks, pytest.raises(RuntimeError, match="of the hook"):
        penalty(logprobs, ref_logprobs)
    assert len(packed) == 1


@pytest.mark.parametrize("needs", [False, True], ids=["constant", "differentiable"])
def test_want_of_memory_is_an_error(needs):
    huge = torch.zeros(1, requires_grad=needs).expand(2**24, 2**20)
    with pytest.raises(RuntimeError, match="memory"):
        klfast.kl_penalty(huge, huge)


@pytest.mark.parametrize(
    "odd", [["auto"], None, np.array(["auto", "b"])], ids=["list", "None", "array"]
)
def test_odd_names_are_refused(odd):
    with pytest.raises(TypeError, match="unknown backend"):
        klfast.kl_penalty(*inputs(), backend=odd)
    with pytest.raises(TypeError, match="unknown reduction"):
        klfast.kl_penalty(*inputs(), reduction=odd, normalizer=2.0)


def test_a_torch_without_the_functions_takes_the_dispatchers(monkeypatch):
    """The module says why, and the backend serves."""
    result = run_fresh(
        "import torch; del torch._C._is_tracing; import klfast, json;"
        "from klfast import _C; from klfast.backends import BACKENDS;"
        "x = torch.ones(2, 3); y = klfast.kl_penalty(x, x, backend='native');"
        "is_none = BACKENDS['native'].direct is None;"
        "print(json.dumps([_C.direct_problem(), is_none, y.sum().item()]))"
    )
    problem, is_none, total = json.loads(result)
    assert "_is_tracing" in problem
    assert is_none
    assert total == 0


@pytest.mark.parametrize("public", [klfast.kl_penalty, klfast.kl_rewards], ids=lambda f: f.__name__)
def test_a_shortcut_has_the_public_signature(public):
    parameters = inspect.signature(getattr(shortcut, public.__name__)).parameters
    assert parameters == inspect.signature(public).parameters
