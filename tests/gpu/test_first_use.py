"""Known answers before the first use of a family of kernels, on CPU tensors.

The tests have right kernels, wrong kernels, and the contexts in which a user may make the first
call.
"""

import itertools
import json
import os
import signal
import threading
import warnings

import emulated
import known_answers
import pytest
import torch
from around import default_dtype
from threads import in_threads
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import klfast
from klfast import backends
from klfast.backends import known_calls, self_test
from klfast.backends.compiled import compiled
from klfast.backends.self_test import FirstUse
from klfast.ops.schemas import Ops

CPU = torch.device("cpu")
NATIVE = Ops.of("klfast")
FUNCTIONS = tuple(known_calls.FUNCTIONS)
FAMILIES = tuple(family for op in FUNCTIONS for family in self_test.families(op))
CLOSE = 1e-9  # the relative difference between stored answers and this machine's float64 answers


class Counting:
    """Ops that count their calls."""

    def __init__(self, ops):
        self.calls = 0
        self.ops = Ops(*map(self._counting, ops))

    def _counting(self, op):
        def count(*args):
            self.calls += 1
            return op(*args)

        return count


def lying(name, lie, output=None):
    """The native ops. One of them returns wrong outputs, or one wrong output."""

    def spoil(tensor):
        if tensor is None:
            return None
        if tensor.dtype in (torch.bool, torch.uint8):
            tensor.logical_not_()
        elif tensor.numel():
            lie(tensor)
        return tensor

    def op(*args):
        returned = getattr(NATIVE, name)(*args)
        if returned is None:  # an op that writes in place
            spoil(args[0])
        elif isinstance(returned, torch.Tensor):
            spoil(returned)
        else:
            for index, tensor in enumerate(returned):
                if output in (None, index):
                    spoil(tensor)
        return returned

    return NATIVE._replace(**{name: op})


LIES = {
    "off": lambda tensor: tensor.mul_(1 + 2e-3),
    "nan": lambda tensor: tensor.view(-1)[-1:].fill_(float("nan")),
    "unwritten": lambda tensor: tensor.fill_(0.125),
}


def checked_by(ops):
    """The check of ops before they serve CPU tensors."""
    return FirstUse(ops, "cpu")


@pytest.fixture
def use(monkeypatch):
    """Make ops the native backend, which is checked before its first use on a CPU."""
    native = backends.BACKENDS["native"]

    def use(ops):
        first = checked_by(ops)
        kernels = compiled("native", native.why_not, ops, first_use=first)
        monkeypatch.setitem(backends.BACKENDS, "native", kernels)
        monkeypatch.setattr(backends, "_told", set())
        return first

    return use


def failures(first, *functions):
    """The failing families of these functions, or of all."""
    for op in functions or FUNCTIONS:
        first._failure(op, CPU, 2)
    return [family for family, text in first.results(CPU).items() if text.startswith("failed")]


def logprobs(**options):
    return torch.tensor([[-1.0, -2.0]], **options), torch.tensor([[-1.5, -2.0]])


def same(numbers, others):
    half = len(others) // 2
    sizes = (*others[half:], *others[half:])
    return len(numbers) == len(others) and all(
        abs(a - b) <= CLOSE * size for a, b, size in zip(numbers, others, sizes, strict=True)
    )


def test_the_stored_answers_are_those_of_the_reference():
    """`python tests/support/known_answers.py` writes them anew."""
    stored = json.loads(self_test.ANSWERS.read_text())
    computed = known_answers.all_answers()
    assert list(stored) == list(computed) == list(FAMILIES)
    for family, answers in stored.items():
        assert answers.keys() == computed[family].keys()
        different = [n for n, numbers in answers.items() if not same(computed[family][n], numbers)]
        assert not different, family


@pytest.mark.parametrize("ops", [lambda: NATIVE, emulated.ops], ids=["cpu", "emulated"])
def test_right_kernels_pass(ops):
    first = checked_by(ops())
    assert set(first.results(CPU).values()) == {"unchecked"}
    assert failures(first) == []
    assert first.results(CPU) == dict.fromkeys(FAMILIES, "ok")
    assert first.results(torch.device("meta")) == {}


def test_the_native_backend_checks_gpus_alone():
    native = backends.BACKENDS["native"]
    assert native.first_use.results(CPU) == {}
    assert list(native.first_use.results(torch.device("cuda:1"))) == list(FAMILIES)


def test_a_function_is_checked_once_with_and_without_gradient(use):
    counted = Counting(NATIVE)
    first = use(counted.ops)
    calls = []
    for requires_grad in (False, True, False, True):
        klfast.kl_penalty(*logprobs(requires_grad=requires_grad), coef=torch.tensor(2.0))
        calls.append(counted.calls)
    assert calls[0] > 8
    assert [after - before for before, after in itertools.pairwise(calls)] == [1, 1, 1]
    known = first.results(CPU)
    assert [family for family in FAMILIES if known[family] == "ok"] == [
        "kl_penalty",
        "kl_penalty, gradient",
    ]


def gradients_of(*functions):
    return {f"{function}, gradient" for function in functions}


OUTPUTS = {
    "kl_penalty_fwd": 5,
    "kl_penalty_bwd": 2,
    "token_logprobs_fwd": 3,
    "token_logprobs_bwd": 1,
    "token_logprobs_bwd_": 1,
    "kl_divergence_fwd": 7,
    "kl_divergence_fwd_": 2,
    "kl_divergence_bwd": 2,
    "kl_divergence_bwd_": 1,
    "token_weights": 1,
    "scale_": 1,
}
FAILING = {
    **{name: gradients_of(name[: name.index("_bwd")]) for name in OUTPUTS if "_bwd" in name},
    "kl_penalty_fwd": {"kl_penalty", "kl_divergence"},
    "kl_penalty_bwd": gradients_of("kl_penalty", "kl_divergence"),
    "token_logprobs_fwd": {"token_logprobs"},
    "kl_divergence_fwd": {"kl_divergence"},
    "kl_divergence_fwd_": gradients_of("kl_divergence"),
    "token_weights": gradients_of("kl_divergence"),
    "scale_": gradients_of("kl_penalty", "kl_divergence"),
}
"""Op -> the families that fail if its outputs are wrong. A function's gradient fails with it."""


def refused_by(name):
    return FAILING[name] | gradients_of(*(f for f in FAILING[name] if f in FUNCTIONS))


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", Ops._fields)
def test_kernels_that_lie_are_refused_and_no_others(name, lie):
    assert set(failures(checked_by(lying(name, LIES[lie])))) == refused_by(name)


@pytest.mark.parametrize(
    ("name", "output"), [(name, i) for name, n in OUTPUTS.items() for i in range(n)]
)
def test_a_lie_in_one_output_is_found(name, output):
    """A wrong gradient, or a wrong number saved for the backward, does not fail the forward."""
    found = set(failures(checked_by(lying(name, LIES["off"], output))))
    assert found
    assert found <= refused_by(name)


OF_GRADIENTS = lying("kl_penalty_bwd", LIES["off"])
WRONG = r"known answers of kl_penalty, gradient failed: fp32, packed, seq-mean: grad\w*: got \S+, "


def test_auto_goes_on_and_warns_once(use):
    first = use(OF_GRADIENTS)
    assert klfast.info()["first_use"]["cpu"] == dict.fromkeys(FAMILIES, "unchecked")
    slow = r"slow reference backend on cpu \(native: the " + WRONG
    with pytest.warns(RuntimeWarning, match=slow) as caught:
        klfast.kl_penalty(*logprobs(requires_grad=True))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        klfast.kl_penalty(*logprobs(requires_grad=True), reduction="token-mean").backward()
        klfast.token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    known = klfast.info()["first_use"]["cpu"]
    assert known == first.results(CPU)
    assert known["kl_penalty"] == known["token_logprobs"] == "ok"
    assert known["kl_penalty, gradient"].startswith("failed: fp32, packed, seq-mean: grad")


def test_by_name_a_family_that_fails_raises_and_others_serve(use):
    use(OF_GRADIENTS)
    with pytest.raises(RuntimeError, match=WRONG) as caught:
        klfast.kl_penalty(*logprobs(requires_grad=True), backend="native")
    message = str(caught.value)
    assert "backend 'native' cannot run on cpu: the known answers" in message
    for part in (", expected ", "(relative error ", "run `klfast check` and open an issue"):
        assert part in message
    assert klfast.kl_penalty(*logprobs(), backend="native").tolist()[0][1] == 0
    with torch.no_grad():
        klfast.kl_penalty(*logprobs(requires_grad=True), backend="native")


def raising(error):
    def op(*args):
        raise error

    return NATIVE._replace(kl_penalty_bwd=op)


def test_kernels_that_raise_are_refused_but_not_for_want_of_memory(use):
    first = checked_by(raising(RuntimeError("no kernel image\nmore")))
    assert failures(first, "kl_penalty") == ["kl_penalty, gradient"]
    assert first.results(CPU)["kl_penalty, gradient"] == "failed: RuntimeError: no kernel image"
    first = use(raising(torch.OutOfMemoryError("out of memory")))
    klfast.kl_penalty(*logprobs(requires_grad=True))
    assert set(first.results(CPU).values()) == {"unchecked"}


def test_nothing_is_checked_while_a_graph_is_captured(use, monkeypatch):
    counted = Counting(lying("kl_penalty_fwd", LIES["off"]))
    first = use(counted.ops)
    with monkeypatch.context() as patch:
        patch.setattr(self_test, "is_capturing", lambda device: True)
        klfast.kl_penalty(*logprobs(), backend="native")
    assert counted.calls == 1
    assert set(first.results(CPU).values()) == {"unchecked"}
    with pytest.raises(RuntimeError, match="known answers of kl_penalty failed"):
        klfast.kl_penalty(*logprobs(), backend="native")


def test_nothing_is_checked_in_a_backward(use):
    """On a GPU the check's own backward would wait for this thread."""
    first = use(NATIVE)
    inner = []
    outer, _ = logprobs(requires_grad=True)
    outer.register_hook(lambda grad: inner.append(klfast.kl_penalty(grad, grad + 1)))
    outer.sum().backward()
    assert len(inner) == 1
    assert set(first.results(CPU).values()) == {"unchecked"}
    klfast.kl_penalty(*logprobs())
    assert first.results(CPU)["kl_penalty, gradient"] == "ok"


def test_it_can_be_turned_off(use, monkeypatch):
    monkeypatch.setenv("KLFAST_SELF_CHECK", "0")
    counted = Counting(lying("kl_penalty_fwd", LIES["off"]))
    first = use(counted.ops)
    assert first.results(CPU) == dict.fromkeys(FAMILIES, "off")
    klfast.kl_penalty(*logprobs(), backend="native")
    assert counted.calls == 1


def test_threads_wait_for_one_check(use):
    first = use(NATIVE)
    checks = []
    check = first._check
    first._check = lambda *args: checks.append(args) or check(*args)
    in_threads(lambda _: klfast.kl_penalty(*logprobs(requires_grad=True)), 6)
    assert len(checks) == 1
    assert first.results(CPU)["kl_penalty, gradient"] == "ok"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_check_leaves_the_child_no_lock(set_num_threads):
    first, held, done = checked_by(NATIVE), threading.Event(), threading.Event()

    def hold():
        with self_test._lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    set_num_threads(1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(first._failure("kl_penalty", CPU, 2) is not None)
    status = os.waitpid(child, 0)[1]
    done.set()
    holder.join()
    assert status == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning")
@pytest.mark.parametrize(
    "output",
    [None, pytest.param(3, marks=pytest.mark.exhaustive)],
    ids=["all", "gradient-of-one-read"],
)
def test_torch_compile_has_it_checked_and_leaves_kernels_that_lie(use, output):
    """An output may be wrong that only eager calls use."""
    first = use(lying("kl_penalty_fwd", LIES["off"], output))
    torch._dynamo.reset()
    options = {"estimator": "k1", "reduction": "token-sum"}
    loss = torch.compile(
        lambda *args: klfast.kl_penalty(*args, **options), fullgraph=True, backend="aot_eager"
    )
    assert loss(*logprobs()).item() == 0.5
    known = first.results(CPU)
    assert known["kl_penalty"].startswith("failed" if output is None else "ok")
    assert known["kl_penalty, gradient"].startswith("failed")


class SeeingOps(TorchDispatchMode):
    """Fails if it sees a bf16 tensor. The call itself has none, the check has some."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        flat = known_calls.named(tuple(args))
        assert not any(tensor.dtype == torch.bfloat16 for tensor in flat.values())
        return op(*args, **(kwargs or {}))


def refuse(tensor):
    raise AssertionError("the check saves tensors for a backward")


AROUND = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "default-dtype": default_dtype,
    "dispatch-mode": SeeingOps,
    "saved-tensor-hooks": lambda: torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_whatever_is_around_the_first_call(use, around):
    first = use(NATIVE)
    arguments = [tensor.double() for tensor in logprobs()]
    with around():
        klfast.kl_penalty(*arguments, coef=2.0)
        for op in FUNCTIONS:
            first._failure(op, CPU, 2)
    assert first.results(CPU) == dict.fromkeys(FAMILIES, "ok")


def by_checkpoint():
    leaf, other = logprobs(requires_grad=True)
    checkpoint(lambda x: klfast.kl_penalty(x, other), leaf, use_reentrant=False).sum().backward()


TRACES = {
    "grad": lambda: torch.func.grad(lambda x: klfast.kl_penalty(x, x + 1, reduction="token-sum"))(
        logprobs()[0]
    ),
    "make-fx": lambda: torch.fx.experimental.proxy_tensor.make_fx(
        lambda x: klfast.kl_penalty(x, x + 1)
    )(logprobs()[0]),
    "checkpoint": by_checkpoint,
}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_it_is_checked_beside_a_trace(use, trace):
    first = use(NATIVE)
    trace()
    assert first.results(CPU)["kl_penalty, gradient"] == "ok"
