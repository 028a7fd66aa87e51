"""``klfast check``: it passes here, and a backend that lies makes it fail and name the case."""

import json
import re
from itertools import combinations

import pytest
import torch
from fresh import run_fresh

from klfast import backends
from klfast.__main__ import main
from klfast.args.rejection import OVER, STATISTICS
from klfast.cli.check import report as command
from klfast.cli.check.cases import FAMILIES, Case, covering
from klfast.types.names import DIRECTIONS, NAMES, TAILS
from klfast.types.reduction import REDUCTIONS

SLIGHTLY = 1 + 2e-5

FRESH = """
import sys
for name in ("triton", "numpy", "rich", "matplotlib", "jinja2"):
    sys.modules[name] = None  # from here on, importing it raises
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own
from klfast.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def checked(capsys, *options):
    """(exit code, the report) of ``klfast check --json`` on the CPU."""
    code = main(["check", "--json", "--device", "cpu", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.exhaustive
@pytest.mark.long
def test_every_backend_of_the_cpu_passes():
    """In a process that has torch alone."""
    report = json.loads(run_fresh(FRESH, arguments=["check", "--json"], timeout=300))
    assert report["passed"], report["failures"]
    on_cpu = [tally for tally in report["checks"] if tally["device"] == "cpu"]
    for name in ("native", "reference"):
        cases = {t["family"]: t["cases"] for t in on_cpu if t["backend"] == name}
        assert cases.keys() == FAMILIES.keys()
        assert min(cases.values()) > 40
    assert report["info"]["versions"]["torch"] == torch.__version__


def test_any_two_values_of_a_familys_options_meet():
    for family in FAMILIES.values():
        rows, basic = covering(family.options)
        for (first, values), (second, others) in combinations(family.options.items(), 2):
            met = {(id(row[first]), id(row[second])) for row in rows}
            assert met >= {(id(a), id(b)) for a in values for b in others}, (first, second)
        for name, values in family.options.items():
            assert {id(row[name]) for row in rows[:basic]} == {id(value) for value in values}


def test_the_options_are_klfasts_own_tables():
    assert FAMILIES["penalty"].options["estimator"] == NAMES
    assert FAMILIES["penalty"].options["reduction"] == tuple(REDUCTIONS)
    for name in ("divergences", "top-k divergences", "divergences from hidden states"):
        assert FAMILIES[name].options["direction"] == DIRECTIONS
    assert FAMILIES["top-k divergences"].options["tail"] == TAILS
    rollout = FAMILIES["rollout"].options
    assert (rollout["statistic"][1:], rollout["over"]) == (STATISTICS, OVER)


def test_the_inputs_are_the_same_in_every_run():
    family = FAMILIES["rollout"]
    case = next(iter(family.cases("rollout")))
    first, second = (family.call(case.row, case.seed).tensors for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first.values(), second.values(), strict=True))
    assert first["logprobs"].double().sum().item() == pytest.approx(-285.11897687652197)


# --- backends that lie -------------------------------------------------------------------------


def of_penalty(change):
    """The penalty's (result, stats), changed."""
    return {"kl_penalty": lambda honest: lambda call: change(call, *honest(call))}


def of_rows(change, field="kl"):
    """What a function over a vocabulary returns, with a field changed."""

    def lying(honest):
        def lie(args):
            found = honest(args)
            value = getattr(found, field)
            return found if value is None else found._replace(**{field: change(value)})

        return lie

    return {"rows": lying}


def with_other_gradient(result, by=SLIGHTLY):
    if result.requires_grad:
        result.register_hook(lambda grad: grad * by)
    return result


def leaking(call, result, stats):
    """NaN where NaN is, whatever the mask says."""
    if result.shape == call.first().shape:
        result = result + 0 * call.first().detach().to(result.dtype)
    return result, stats


def other_bits_under_padding(call, result, stats):
    """A step of the last bit, where there is a mask."""
    if call.mask is not None:
        value = result.detach()
        step = torch.nextafter(value, torch.full_like(value, torch.inf)) - value
        result = result + torch.where(value == 0, 0, step)
    return result, stats


def with_textbook_k3(call, result, stats):
    """fp32 without a series: all digits lost near 0."""
    plain = call.spec.estimator.name == "k3" and call.scores is None
    if not plain or result.shape != call.first().shape or call.mask is not None:
        return result, stats
    x = call.first().float() - call.ref_logprobs.float()
    return (torch.exp(-x) - 1 + x).to(result.dtype), stats


def other_statistic(call, result, stats):
    return result, stats and stats._replace(k2=stats.k2 * SLIGHTLY)


def other_rollout(**changes):
    def lie(honest):
        def rollout_correction(call):
            found = honest(call)
            changed = {name: change(getattr(found, name)) for name, change in changes.items()}
            return found._replace(**changed)

        return rollout_correction

    return {"rollout_correction": lie}


LIES = {
    "gradient": (
        "penalty",
        of_penalty(lambda call, result, stats: (with_other_gradient(result), stats)),
        "gradient of",
    ),
    "leak": ("penalty", of_penalty(leaking), "penalty["),
    "bits": ("penalty", of_penalty(other_bits_under_padding), "penalty of sequence"),
    "near-0": ("penalty", of_penalty(with_textbook_k3), "near 0"),
    "statistic": ("penalty", of_penalty(other_statistic), "stats.k2"),
    "top-k-gradient": ("top-k divergences", of_rows(with_other_gradient), "gradient of logits"),
    "linear-log-probs-gradient": (
        "log-probs from hidden states",
        of_rows(with_other_gradient, "logprobs"),
        "gradient of",
    ),
    "entropy": ("token log-probs", of_rows(lambda t: t * SLIGHTLY, "entropy"), "entropy"),
    "rollout-mask": ("rollout", other_rollout(mask=torch.zeros_like), "mask["),
}


@pytest.mark.parametrize(("family", "lies", "output"), LIES.values(), ids=LIES)
def test_a_backend_that_lies_is_seen(monkeypatch, capsys, family, lies, output):
    honest = backends.BACKENDS["native"]
    told = {name: lie(getattr(honest, name)) for name, lie in lies.items()}
    monkeypatch.setitem(backends.BACKENDS, "native", honest._replace(**told))
    others = [other for other in FAMILIES if other != family]
    for other in others:
        monkeypatch.delitem(command.FAMILIES, other)
    monkeypatch.setattr(command, "promises", promises_of(family, command.promises))
    code, report = checked(capsys, "--backend", "native")
    assert code == 1
    assert not report["passed"]
    outputs = {failure["output"] for failure in report["failures"]}
    assert any(name.startswith(output) for name in outputs), outputs
    assert sum(tally["failed"] for tally in report["checks"]) == len(report["failures"])
    assert {f["family"] for f in report["failures"]} == {family}


@pytest.fixture(autouse=True)
def truths_are_kept(monkeypatch):
    """From test to test, as they take longer than what they are compared with."""

    def call(case):
        return CALLS.setdefault((case.family, case.seed), make(case))

    def truth_of(call):
        if id(call) not in TRUTHS:
            TRUTHS[id(call)] = compute(call)
        return TRUTHS[id(call)]

    make, compute = Case.call, command.truth_of
    monkeypatch.setattr(Case, "call", call)
    monkeypatch.setattr(command, "truth_of", truth_of)


CALLS, TRUTHS = {}, {}


def promises_of(family, promises):
    return lambda *target: (promise for promise in promises(*target) if promise[0] == family)


@pytest.fixture
def few(monkeypatch):
    """The basic cases of one family, for what does not depend on them."""
    for other in [name for name in FAMILIES if name != "token log-probs"]:
        monkeypatch.delitem(command.FAMILIES, other)
    monkeypatch.setattr(command, "promises", lambda *target: ())


def test_the_text_begins_with_info_and_names_the_case(monkeypatch, capsys, few):
    honest = backends.BACKENDS["native"]

    lie = of_rows(lambda logprobs: logprobs + 1, "logprobs")["rows"]
    monkeypatch.setitem(backends.BACKENDS, "native", honest._replace(rows=lie(honest.rows)))
    assert main(["info"]) == 0
    info = capsys.readouterr().out
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(info)
    lines = [
        line for line in printed.splitlines() if line.startswith("cpu native token log-probs ")
    ]
    assert len(lines) == command.SHOWN
    assert "logprobs[" in lines[0]
    assert "more, which --json has" in printed
    assert re.search(r'^cpu: "auto" uses native, which FAILED \d+ of \d+ cases$', printed, re.M)
    verdict = printed.splitlines()[-1]
    assert verdict.startswith("FAILED: use backend='reference' on cpu until native is right; ")
    assert verdict.endswith("open an issue with this output")


def lying_of_bf16(honest):
    """Log-probs that are wrong of bf16 alone: the truth is the reference's of float64."""

    def rows(args):
        found = honest.rows(args)
        return found._replace(logprobs=found.logprobs + (args.first().dtype == torch.bfloat16))

    return honest._replace(rows=rows)


AUTO = ("native", True, True, False)
STATUS = {
    "auto": ("native", (), 1, [(*AUTO[:3], True), ("reference", False, False, False)]),
    "elsewhere": ("reference", (), 0, [AUTO, ("reference", False, False, True)]),
    "strict": ("reference", ("--strict",), 1, [AUTO, ("reference", False, True, True)]),
    "named": (
        *("reference", ("--backend", "reference"), 1),
        [AUTO, ("reference", False, True, True)],
    ),
}


@pytest.mark.parametrize(("liar", "options", "status", "expected"), STATUS.values(), ids=STATUS)
def test_a_failure_counts_where_auto_chooses_the_backend(
    monkeypatch, capsys, few, liar, options, status, expected
):
    monkeypatch.setitem(backends.BACKENDS, liar, lying_of_bf16(backends.BACKENDS[liar]))
    code, report = checked(capsys, *options)
    assert (code, report["passed"]) == (status, not status)
    found = [(v["backend"], v["auto"], v["counts"], v["failed"] > 0) for v in report["verdict"]]
    assert found == expected
    assert "open an issue" in report["next"]
    assert ("use klfast" in report["next"]) == (status == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda:7"], "device must be one of cpu, got 'cuda:7'"),
        (["--device", "cuda"], "device must be one of cpu, got 'cuda'"),
        (["--backend", "jax"], "unknown backend 'jax'; expected one of 'native', 'triton'"),
        (["--backend", "triton"], "backend 'triton' cannot run here: cpu: Triton kernels run on"),
    ],
)
def test_what_is_not_here_is_one_line_and_exit_code_2(monkeypatch, capsys, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check", *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"klfast check: error: {message}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""
