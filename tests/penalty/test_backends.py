"""The choice of a backend: the order of ``auto``, and a named backend works or raises."""

import json
import warnings

import pytest
import torch
from fresh import run_fresh

import klfast
from klfast import backends

CPU, META = torch.device("cpu"), torch.device("meta")


def inputs(device="cpu"):
    return torch.zeros(2, 3, device=device), torch.ones(2, 3, device=device)


def test_auto_takes_the_native_kernels_on_the_cpu():
    assert backends.resolve("auto", CPU) is backends.BACKENDS["native"]


@pytest.mark.parametrize("name", [name for name, why in backends.why_not(CPU).items() if not why])
def test_a_name_takes_that_backend(name, monkeypatch):
    """The backend of that name is the one that is called."""
    backend = backends.BACKENDS[name]
    called = []

    def kl_penalty(call):
        called.append(call)
        return backend.kl_penalty(call)

    monkeypatch.setitem(backends.BACKENDS, name, backend._replace(kl_penalty=kl_penalty))
    klfast.kl_penalty(*inputs(), backend=name)
    assert len(called) == 1


def test_the_last_backend_serves_every_device():
    reasons = backends.why_not(META)
    assert list(reasons) == list(backends.BACKENDS)
    assert reasons["reference"] is None
    assert reasons["native"] == "the extension has no kernels for meta"


def test_a_backend_asked_for_by_name_does_not_fall_back():
    with pytest.raises(RuntimeError, match="backend 'native' cannot run on meta: the extension"):
        klfast.kl_penalty(*inputs("meta"), backend="native")


def test_auto_says_once_why_it_is_slow(monkeypatch):
    monkeypatch.setattr(backends, "_told", set())
    with pytest.warns(RuntimeWarning, match=r"slow reference backend on meta \(native: ") as caught:
        klfast.kl_penalty(*inputs("meta"))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert klfast.kl_penalty(*inputs("meta")).is_meta


MISSING = """
import json, sys, warnings
{prepare}
import torch, klfast
logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
arguments = logprobs, torch.tensor([[-1.5, -2.0]])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    warnings.filterwarnings("ignore", "klfast.kl_penalty: the gradient of estimator 'k1'")
    for _ in range(3):
        penalty = klfast.kl_penalty(*arguments, estimator="k1", reduction="token-sum")
        klfast.kl_rewards(torch.zeros(1), *arguments, kl_coef=0.1)
    penalty.backward()
try:
    klfast.kl_penalty(*arguments, backend="native")
    error = None
except RuntimeError as raised:
    error = str(raised)
print(json.dumps({{
    "warnings": [(w.category.__name__, str(w.message), w.filename) for w in caught],
    "error": error,
    "penalty": penalty.item(),
    "grad": logprobs.grad.tolist(),
}}))
"""
NOT_BUILT = "sys.modules['klfast._C'] = None"
# A module that exists and does not load, as after an upgrade of torch.
NOT_LOADING = """
import importlib.abc
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "klfast._C":
            raise ImportError("libtorch.so: undefined symbol: aoti_torch_nothing")
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("prepare", "reasons"),
    [
        (NOT_BUILT, ["not built", "pip install --no-build-isolation ."]),
        (NOT_LOADING, ["does not load with torch", "undefined symbol: aoti_torch_nothing"]),
    ],
    ids=["not-built", "not-loading"],
)
def test_without_the_extension_auto_warns_once_and_native_raises(prepare, reasons):
    told = json.loads(run_fresh(MISSING.format(prepare=prepare)))
    [(category, message, filename)] = told["warnings"]
    assert category == "RuntimeWarning"
    assert filename == "<string>"
    for reason in reasons:
        assert reason in message
        assert reason in told["error"]
    assert "backend 'native' cannot run on cpu" in told["error"]
    assert (told["penalty"], told["grad"]) == (0.5, [[1.0, 1.0]])


CALLS = """
import torch, klfast
for tokens in (3, 100_000):  # on one thread, and on many
    try:
        klfast.kl_penalty(torch.zeros(tokens), torch.zeros(tokens), backend="native")
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""


def test_an_unknown_instruction_set_is_refused_by_name():
    for line in run_fresh(CALLS, KLFAST_CPU="sse9").splitlines():
        assert line.startswith("RuntimeError")
        assert "KLFAST_CPU must be 'baseline', 'avx2' or 'avx512', got 'sse9'" in line
