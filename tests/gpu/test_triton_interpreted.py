"""The Triton kernels against the oracle without a GPU: Triton's interpreter, in its own process.

Triton decides at its import whether it compiles or interprets.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

HERE = Path(__file__).parent
OF_TRITON = {
    "logits": ["triton_interpreted_logits_suite.py"],
    "penalty": ["triton_interpreted_suite.py"],
}
OF_EVERY_BACKEND = [
    *(
        f"../conformance/test_numbers.py::test_any_two_options[{family}-triton]"
        for family in ("penalty", "rewards", "token log-probs", "divergences")
    ),
    "../conformance/test_infinities.py",
    "../penalty/test_limits.py::test_extreme_products_agree_with_the_oracle",
    "../penalty/test_limits.py::test_at_a_bound_the_weights_gradient_flows_and_beyond_it_is_0",
    "../logits/test_topk.py::test_a_tail_of_the_student_near_nothing_keeps_its_digits",
    "../penalty/test_masking.py::test_masked_gradients_are_0_under_any_upstream_gradient",
    "../penalty/test_rewards.py::test_scores_of_any_dtype",
    "../penalty/test_weights.py",
    "../logits/test_logits_weights.py",
]
"""Only the cases with "triton" in their id run. Triton has no kernels for rollout_correction."""

SUITES = {**OF_TRITON, "every-backend": OF_EVERY_BACKEND}
INFINITIES = "../conformance/test_infinities.py::test_a_bad_number_is_the_same_everywhere"
SMOKE = {
    "triton_interpreted_logits_suite.py::test_mixtures": 4,
    "triton_interpreted_logits_suite.py::test_shards_of_a_vocabulary": 2,
    "triton_interpreted_logits_suite.py::test_tokens": 6,
    "triton_interpreted_suite.py::test_scalars_are_read_from_tensors": 3,
    "triton_interpreted_suite.py::test_tokens_after_the_last_sequence_are_zero": 4,
    "../penalty/test_masking.py::test_lazily_negated_tensors_are_negated": 1,
    "../penalty/test_rewards.py::test_scores_of_any_dtype": 1,
    "../penalty/test_limits.py::test_at_a_bound_the_weights_gradient_flows_and_beyond_it_is_0": 4,
    "../penalty/test_limits.py::test_at_importance_cap_the_weights_gradient_flows": 1,
    "../penalty/test_weights.py::test_a_weight_per_sequence_changes_the_gradient_of_every_mean": 1,
    f"{INFINITIES}[inf-divergences-sequences-triton]": 1,
    f"{INFINITIES}[-inf-penalty-scalar-triton]": 1,
}
"""The tests of ``make test``, and the least number of their calls. The whole suites take minutes of
processor time.
"""

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")
pytestmark = pytest.mark.skipif(
    triton.__version__ < "3.7" and numpy.__version__ >= "2.4",
    reason="Triton's interpreter before 3.7 does not work with numpy 2.4 and later",
)
exhaustive = pytest.mark.exhaustive


def passed(process):
    """The number of passed tests in a run without failures."""
    assert process.returncode == 0, process.stdout + process.stderr
    summary = process.stdout.strip().splitlines()[-1]
    found = re.search(r"\b([1-9]\d*) passed", summary)
    assert found, process.stdout
    return int(found[1])


def run_interpreted(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "triton_interpreter", *arguments]
    path = os.pathsep.join([str(HERE.with_name("support")), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    options = ("-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist")
    options += ("-k", "triton and not rollout")
    options += ("-W", "ignore:Conversion of an array:DeprecationWarning")  # Triton 3.6's, of numpy
    return subprocess.run(
        [*command, *options], cwd=HERE, env=environment, capture_output=True, text=True
    )


@pytest.mark.long
def test_a_call_of_each_kind_passes_in_the_interpreter():
    assert passed(run_interpreted("-m", "not exhaustive", *SMOKE)) >= sum(SMOKE.values())


@exhaustive
@pytest.mark.long
@pytest.mark.parametrize("part", ["1/1", "1/4", "2/4", "3/4", "4/4"])
@pytest.mark.parametrize("suite", SUITES)
def test_kernels_pass_in_the_interpreter(suite, part, record_property):
    marker = "not exhaustive" if part == "1/1" else "exhaustive"
    process = run_interpreted("-m", marker, "--part", part, *SUITES[suite])
    record_property("interpreted", passed(process))
    assert "skipped" not in process.stdout.strip().splitlines()[-1]
