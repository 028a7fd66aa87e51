"""``klfast check`` passes here. If a backend returns wrong results, it fails and names the case."""

import json
import re
from itertools import combinations, islice

import pytest
import torch
from fresh import run_fresh

from klfast import backends
from klfast.__main__ import main
from klfast.cli.check import report as command
from klfast.cli.check.cases import BY_KIND, FAMILIES, Case, Family, covering_rows

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


@pytest.mark.exhaustive
@pytest.mark.long
def test_every_backend_of_the_cpu_passes(capsys):
    """The whole check runs in a process with torch alone."""
    report = json.loads(run_fresh(FRESH, arguments=["check", "--json"], timeout=300))
    assert report["passed"], report["failures"]
    on_cpu = [tally for tally in report["checks"] if tally["device"] == "cpu"]
    for name in ("native", "reference"):
        cases = {t["family"]: t["cases"] for t in on_cpu if t["backend"] == name}
        assert cases.keys() == FAMILIES.keys()
        assert min(cases.values()) > 25
    assert report["seconds"] < 240  # 6 s on an idle core
    assert report["info"]["versions"]["torch"] == torch.__version__
    assert report["info"]["backends"]["cpu"]["auto"] == "native"
    missing = [m for m in report["not_available"] if m["device"] == "cpu"]
    reason = "triton is not installed; run pip install triton"
    assert missing == [{"device": "cpu", "backend": "triton", "reason": reason}]

    command._print(report)
    summary, native, reference, verdict = capsys.readouterr().out.splitlines()[-4:]
    assert re.fullmatch(r"\d+ cases in [\d.]+ s, 0 failed", summary)
    assert re.fullmatch(r'cpu: "auto" uses native, which passed \d+ cases', native)
    assert re.fullmatch(r"cpu: reference passed \d+ cases", reference)
    assert verdict == "passed: use klfast"


def kind_of(name, value):
    if name in BY_KIND and value is not None and value != torch.bool:
        return value.is_floating_point
    return id(value)


def test_any_two_values_of_a_familys_options_meet():
    for family in FAMILIES.values():
        rows, basic = covering_rows(family.options)
        kinds = {n: {kind_of(n, value) for value in of} for n, of in family.options.items()}
        for first, second in combinations(kinds, 2):
            met = {(kind_of(first, row[first]), kind_of(second, row[second])) for row in rows}
            assert met == {(a, b) for a in kinds[first] for b in kinds[second]}, (first, second)
        for name, values in family.options.items():
            assert {id(row[name]) for row in rows[:basic]} == {id(value) for value in values}


def of_penalty(change):
    """Change the penalty's (call, result, stats)."""
    return "kl_penalty", lambda honest: lambda call: change(call, *honest(call))


def of_fields(function, **changes):
    """Change fields of a function's result."""

    def lying(honest):
        def lie(args):
            found = honest(args)
            given = {name: getattr(found, name) for name in changes}
            told = {n: changes[n](v) for n, v in given.items() if v is not None}
            return found._replace(**told)

        return lie

    return function, lying


def times(result):
    return result * SLIGHTLY


def with_other_gradient(result):
    if result.requires_grad:
        result.register_hook(times)
    return result


def leaking(call, result, stats):
    """NaN in a masked token reaches the result."""
    if result.shape == call.logprobs.shape:
        result = result + 0 * call.logprobs.detach().to(result.dtype)
    return result, stats


def other_bits_under_padding(call, result, stats):
    """The last bit changes if there is a mask."""
    if call.mask is not None:
        value = result.detach()
        step = torch.nextafter(value, torch.full_like(value, torch.inf)) - value
        result = result + torch.where(value == 0, 0, step)
    return result, stats


def with_textbook_k3(call, result, stats):
    """fp32 without a series loses all digits near 0."""
    plain = call.spec.estimator.name == "k3" and call.scores is None
    if not plain or result.shape != call.logprobs.shape or call.mask is not None:
        return result, stats
    x = call.logprobs.float() - call.ref_logprobs.float()
    return (torch.exp(-x) - 1 + x).to(result.dtype), stats


def refusing(call, result, stats):
    raise RuntimeError("no kernel image is available for this device")


OF_PENALTY = {
    "gradient of": lambda call, result, stats: (with_other_gradient(result), stats),
    "penalty[": leaking,
    "penalty of sequence": other_bits_under_padding,
    "near 0": with_textbook_k3,
    "stats.k2": lambda _, result, stats: (result, stats and stats._replace(k2=times(stats.k2))),
    "the call": refusing,
    "penalty": lambda call, result, stats: (result.double(), stats),
}
OF_ROWS = {name: "logprobs" if "log-probs" in name else "kl" for name in FAMILIES}
LIES = [
    *(("penalty", of_penalty(lie), name) for name, lie in OF_PENALTY.items()),
    ("rewards", of_penalty(lambda call, result, stats: (times(result), stats)), "rewards["),
    *(
        (family, of_fields("rows", **{field: times}), "loss" if "losses" in family else field)
        for family, field in OF_ROWS.items()
        if family not in ("penalty", "rewards", "rollout")
    ),
    ("divergences", of_fields("rows", kl=with_other_gradient), "gradient of"),
    ("token log-probs", of_fields("rows", entropy=times), "entropy"),
    ("rollout", of_fields("rollout_correction", weights=times), "weights"),
    (
        "rollout",
        of_fields("rollout_correction", stats=lambda s: s._replace(chi2=times(s.chi2))),
        "stats.chi2",
    ),
]


def lie_as(monkeypatch, name, function, lying):
    honest = backends.BACKENDS[name]
    told = honest._replace(**{function: lying(getattr(honest, function))})
    monkeypatch.setitem(backends.BACKENDS, name, told)


@pytest.fixture
def only(monkeypatch):
    """Leave one family and its first cases. Tests share their truths."""

    def leave(family):
        for other in [name for name in FAMILIES if name != family]:
            monkeypatch.delitem(command.FAMILIES, other)

    def call(case):
        return CALLS.setdefault((case.family, case.seed), make(case))

    def truth_of(call):
        if id(call) not in TRUTHS:
            TRUTHS[id(call)] = compute(call)
        return TRUTHS[id(call)]

    make, compute, cases = Case.call, command.truth_of, Family.cases
    monkeypatch.setattr(Case, "call", call)
    monkeypatch.setattr(command, "truth_of", truth_of)
    monkeypatch.setattr(Family, "cases", lambda *args: islice(cases(*args), 24))
    return leave


CALLS, TRUTHS = {}, {}


def checked(capsys, *options):
    """(exit code, the report) of ``klfast check --json`` on the CPU."""
    code = main(["check", "--json", "--device", "cpu", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("family", "lie", "output"), LIES, ids=[f"{f}, {o}" for f, _, o in LIES])
def test_a_backend_that_lies_is_seen(monkeypatch, capsys, only, family, lie, output):
    lie_as(monkeypatch, "native", *lie)
    only(family)
    made = [p for p in command.promises("native", torch.device("cpu")) if p[0] == family]
    monkeypatch.setattr(command, "promises", lambda *target: made)
    code, report = checked(capsys, "--backend", "native")
    assert (code, report["passed"]) == (1, False)
    outputs = {failure["output"] for failure in report["failures"]}
    assert any(name.startswith(output) for name in outputs), outputs
    assert sum(tally["failed"] for tally in report["checks"]) == len(report["failures"])
    assert {f["family"] for f in report["failures"]} == {family}


@pytest.fixture
def few(monkeypatch, only):
    """Leave the cases of one family, for tests that need no more."""
    only("token log-probs")
    monkeypatch.setattr(command, "promises", lambda *target: ())


def wrong_of_bf16(honest):
    """Wrong log-probs of bf16 alone. The truth is the reference's in float64."""

    def rows(args):
        found = honest(args)
        return found._replace(
            logprobs=found.logprobs + (args.source.tensors[0].dtype == torch.bfloat16)
        )

    return rows


def test_the_text_begins_with_info_and_names_the_case(monkeypatch, capsys, few):
    lie_as(monkeypatch, "native", *of_fields("rows", logprobs=lambda logprobs: logprobs + 1))
    monkeypatch.setattr(command, "SHOWN", 2)
    assert main(["info"]) == 0
    info = capsys.readouterr().out
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(info)
    (heading,) = (line for line in printed.splitlines() if line.startswith("case "))
    assert heading.split() == ["case", "output", "got", "expected", "error", "tolerance"]
    lines = [
        line for line in printed.splitlines() if line.startswith("cpu native token log-probs ")
    ]
    assert len(lines) == command.SHOWN
    assert "logprobs[" in lines[0]
    assert "more, which --json prints" in printed
    assert re.search(r'^cpu: "auto" uses native, which FAILED \d+ of \d+ cases$', printed, re.M)
    verdict = printed.splitlines()[-1]
    assert verdict.startswith("FAILED: use backend='reference' on cpu until native is right; ")
    assert verdict.endswith("open an issue with this output")


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
    lie_as(monkeypatch, liar, "rows", wrong_of_bf16)
    code, report = checked(capsys, *options)
    assert (code, report["passed"]) == (status, not status)
    found = [(v["backend"], v["auto"], v["counts"], v["failed"] > 0) for v in report["verdict"]]
    assert found == expected
    assert "open an issue" in report["next"]
    assert ("use klfast" in report["next"]) == (status == 0)
    command._print(report)
    printed = capsys.readouterr().out
    assert printed.endswith(f"{'FAILED' if status else 'passed'}: {report['next']}\n")
    where = "which matters only with backend='reference'"
    assert (where in printed) == (liar == "reference")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda:7"], "--device must be one of cpu, got 'cuda:7'"),
        (["--backend", "jax"], "unknown backend 'jax'; expected one of 'native', 'triton'"),
        (["--backend", "triton"], "--backend triton cannot run here: cpu: Triton kernels run on"),
    ],
)
def test_what_is_not_here_is_one_line_and_exit_code_2(monkeypatch, capsys, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check", *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"klfast check: error: {message}")
    assert (printed.err.count("\n"), printed.out) == (1, "")


WRONG_CPU = """
import torch, klfast
from klfast.__main__ import main
from klfast.cli.check import report
torch.cuda.is_available = lambda: False
report.check = lambda targets: ([], [])
facts = klfast.info()
print(facts["cpu"], facts["backends"]["cpu"]["why_not"]["native"], sep="\\n")
for options in ([], ["--backend", "reference"], ["--backend", "native"]):
    print(options, "->", main(["check", *options]))
try:
    klfast.kl_penalty(torch.zeros(3), torch.zeros(3))
except RuntimeError as error:
    print(error)
"""


def test_a_wrong_klfast_cpu_is_named_and_is_no_bug():
    wrong = "KLFAST_CPU must be 'baseline', 'avx2' or 'avx512', got 'AVX2'"
    lines = run_fresh(WRONG_CPU, KLFAST_CPU="AVX2").splitlines()
    assert lines[:2] == [wrong, wrong]
    assert f"cpu: native is not available: {wrong}" in lines
    at = lines.index("[] -> 1")
    assert lines[at - 1] == f"FAILED: {wrong}"
    assert "['--backend', 'reference'] -> 0" in lines[at:]
    assert lines[-2:] == ["['--backend', 'native'] -> 2", wrong]
