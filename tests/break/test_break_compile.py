"""torch.compile and torch.export: bad values, dynamic shapes, graph breaks, files."""

import functools
import itertools
import math
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export

import klfast

NAN, INF = math.nan, math.inf
CATEGORY = "compile and export"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning"),
]
IDS = torch.tensor([[0, 4, 6], [1, 1, 3]])


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    klfast.kl_penalty(torch.zeros(2, 3), torch.zeros(2, 3))
    klfast.kl_divergence(torch.zeros(2, 3, 7), torch.zeros(2, 3, 7))


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


CALLS = {
    "penalty": lambda a, b, **k: klfast.kl_penalty(a, b, **{"reduction": "token-mean", **k}),
    "divergence": lambda a, b, **k: klfast.kl_divergence(a, b, **{"reduction": "token-mean", **k}),
    "tokens": lambda a, _, **k: klfast.token_logprobs(a, IDS[: a.shape[0]], **k),
}


def tensors(name, rows=2):
    shape = (rows, 3) if name == "penalty" else (rows, 3, 7)
    return torch.randn(shape), torch.randn(shape)


BAD = [
    ("penalty", "mask", torch.full((2, 3), NAN)),
    ("penalty", "mask", torch.ones(2, 4)),
    ("penalty", "mask", None.__class__),
    ("penalty", "estimator", "k9"),
    ("penalty", "estimator", 3),
    ("penalty", "reduction", "mean"),
    ("penalty", "reduction", None),
    ("penalty", "backend", "cuda"),
    ("penalty", "coef", NAN),
    ("penalty", "coef", "1"),
    ("penalty", "coef", True),
    ("penalty", "coef", torch.ones(2)),
    ("penalty", "normalizer", 0.0),
    ("penalty", "normalizer", -1.0),
    ("penalty", "normalizer", torch.tensor(0.0)),
    ("penalty", "old_logprobs", torch.zeros(3)),
    ("penalty", "cu_seqlens", torch.tensor([0, 2])),
    ("divergence", "mask", torch.full((2, 3), -1.0)),
    ("divergence", "direction", "sideways"),
    ("divergence", "temperature", 0.0),
    ("divergence", "temperature", -1.0),
    ("divergence", "temperature", NAN),
    ("divergence", "temperature", True),
    ("divergence", "temperature", "1"),
    ("divergence", "jsd_beta", 0.0),
    ("divergence", "jsd_beta", 1.0),
    ("divergence", "jsd_beta", True),
    ("divergence", "token_ids", torch.full((2, 3), 7)),
    ("divergence", "token_ids", torch.full((2, 3), -1)),
    ("divergence", "token_ids", torch.zeros(2, 3)),
    ("divergence", "coef", INF),
    ("tokens", "temperature", 0.0),
    ("tokens", "temperature", INF),
    ("tokens", "temperature", True),
    ("tokens", "ignore_index", 1.5),
    ("tokens", "ignore_index", 2**70),
    ("tokens", "mask", torch.ones(2)),
    ("tokens", "inplace_backward", True),
]


def test_bad_values_are_refused(hunt):
    for number, (name, argument, bad) in enumerate(BAD):
        if number % 3 and not hunt.whole:
            continue
        torch._dynamo.reset()
        a, b = tensors(name)
        options = {argument: bad}
        if argument == "jsd_beta":
            options["direction"] = "jsd"
        call = compiled(lambda x, y, n=name, k=options: CALLS[n](x, y, **k))
        names = (argument, "logprobs") if argument == "cu_seqlens" else argument
        hunt.refuses(lambda c=call, x=a, y=b: c(x, y), names, name, argument, bad)


def value_and_grads(function, leaves):
    found = function(*leaves)
    grads = torch.autograd.grad(found.sum(), leaves, allow_unused=True)
    return [found.detach(), *(g for g in grads if g is not None)]


ROWS = (2, 1, 3, 5, 8, 16, 17)


@pytest.mark.parametrize("name", CALLS)
def test_dynamic_shapes_and_coefficients(hunt, name):
    number = "temperature" if name == "tokens" else "coef"
    ids = torch.randint(7, (max(ROWS), 3))

    def call(a, b, amount):
        if name == "tokens":
            return klfast.token_logprobs(a, ids[: a.shape[0]], **{number: amount})
        return CALLS[name](a, b, **{number: amount})

    fast = compiled(call, fullgraph=True, dynamic=True)
    amounts = (0.5, 0.25) if name == "tokens" else (0.5, 0.25, 1.5, -2.0)
    for rows, amount in hunt.some(itertools.product(ROWS, amounts), 4):
        leaves = [t.requires_grad_() for t in tensors(name, rows)]
        got, wanted = (
            value_and_grads(functools.partial(f, amount=amount), leaves) for f in (fast, call)
        )
        for one, other in zip(got, wanted, strict=True):
            scale = 1e-6 * (1 + other.abs().max())
            hunt.close(one, other.double(), scale, name, rows, amount)


@pytest.mark.parametrize("name", CALLS)
def test_graph_breaks_and_modes(hunt, name):
    def broken(a, b):
        first = CALLS[name](a * 1, b * 1)
        torch._dynamo.graph_break()
        return first * 2

    def read(a, b):
        found = CALLS[name](a * 1, b * 1)
        return found * (2 if found.sum().item() > 0 else 3)

    leaves = [t.requires_grad_() for t in tensors(name)]
    for what, function in (("break", broken), ("item", read), ("plain", CALLS[name])):
        wanted = value_and_grads(function, leaves)
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = value_and_grads(torch.compile(function, backend=backend), leaves)
            for one, other in zip(got, wanted, strict=True):
                scale = 1e-6 * (1 + other.abs().max())
                hunt.close(one, other.double(), scale, name, what, backend)


class Module(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, a, b):
        if self.name == "tokens":
            return klfast.token_logprobs(a, b.argmax(-1))
        return CALLS[self.name](a, b)


@pytest.mark.parametrize("name", CALLS)
def test_exported_programs(hunt, name, tmp_path):
    module = Module(name)
    shape = ({0: Dim("rows")},) * 2
    program = export(module, tensors(name, 3), dynamic_shapes=shape)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    decomposed = program.run_decompositions().module()
    for what, run in (("program", program.module()), ("file", loaded), ("split", decomposed)):
        for rows in hunt.some(ROWS[2:], 2):
            given = tensors(name, rows)
            expected = module(*given)
            hunt.bits(run(*given), expected, name, what, rows)


@pytest.mark.parametrize("name", CALLS)
def test_traced_programs(hunt, name, tmp_path):
    module = Module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, tensors(name, 3), check_trace=False)
        traced.save(str(tmp_path / "traced.pt"))
        loaded = torch.jit.load(str(tmp_path / "traced.pt"))
        for _ in range(5):
            given = tensors(name, 3)
            for what, run in (("traced", traced), ("loaded", loaded)):
                hunt.bits(run(*given), module(*given), name, what)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_profiles_of_any_width(hunt, packed):
    """A graph for each number of buckets, and one more where the last of them has one place."""
    counter, first = CompileCounter(), set()
    fast = torch.compile(klfast.log_ratio_profile, fullgraph=True, backend=counter)
    for width in hunt.some((7, 3, *range(1, 70), 100, 127, 128, 129, 200), 4):
        a = -torch.rand(width) if packed else -torch.rand(2, width)
        options = {"cu_seqlens": torch.tensor([0, width // 3, width])} if packed else {}
        with torch._dynamo.config.patch(recompile_limit=32):
            found = fast(a, a - 1, **options)
        expected = klfast.log_ratio_profile(a, a - 1, **options)
        first.add(expected.first)
        for one, other in zip(found, expected, strict=True):
            hunt.bits(torch.as_tensor(one), torch.as_tensor(other), width, packed)
    graphs = counter.frame_count
    hunt.check(graphs <= 2 * len(first) + 1, packed, got=f"{graphs} graphs")
