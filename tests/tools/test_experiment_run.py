"""Whole runs of the experiment: files, reports, interruptions, mistakes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import experiment
import pytest
from experiment import contents, metrics, no_pictures, without_times
from refusals import POSITIVE

from lab import compare as compare_module
from lab import run
from lab.__main__ import main
from lab.compare import Options, compare
from lab.settings import CompareError

TINY = {**experiment.TINY, "steps": 4, "arms": ("fixed-low", "adaptive", "corrected")}
SHORT = ["--steps", "2", "--arms", "none", "--pretrain-steps", "2", "--no-bench"]


@pytest.fixture
def _no_picture():
    with no_pictures():
        yield


def options(out, resume=False, **changes):
    return Options(
        chosen={**({} if resume else TINY), **changes}, out=out, resume=resume, bench=False
    )


@pytest.fixture
def stop_after(monkeypatch):
    """Interrupt a run before this many of its steps."""

    def stop(steps):
        left = iter(range(steps))

        @contextmanager
        def interruptible():
            yield lambda: next(left, None) is None

        monkeypatch.setattr(compare_module, "interruptible", interruptible)

    return stop


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "whole"
    with no_pictures():
        assert compare(options(out))
    return out


def test_metrics_have_every_quantity_at_every_step(whole):
    rows = metrics(whole)
    assert [(row["arm"], row["step"]) for row in rows] == [
        (arm, step) for arm in TINY["arms"] for step in range(1, 5)
    ]
    assert rows[0]["kl_per_sequence_exact"] == rows[4]["kl_per_sequence_k3"] == 0
    assert rows[0]["reward"] == rows[4]["reward"]  # the samples are the same
    for row in rows:
        assert ("rollout" in row) == (row["arm"] == "corrected") == ("token_errors" not in row)
    for row in rows[:8]:
        tokens = row["mean_length"] * TINY["prompts"] * TINY["group"]
        exact = sum(row["token_errors"]["exact"])
        assert exact == pytest.approx(tokens * row["kl_per_token_exact"])


def test_the_report_stands_alone_and_begins_with_the_answer(whole):
    html = (whole / "report.html").read_text()
    assert not re.search('https?://|@import|(src|href)="(?!data:image/png)', html)
    line = re.search(r"<strong>(.*?)</strong>", html)[1]
    assert re.match("Adaptive .Ziegler. (held the target best|came closest, and did not)", line)
    copied = re.search(r"<pre><code>(.*?)</code></pre>", html, re.DOTALL)[1]
    assert "controller = klfast.AdaptiveKLController(" in copied
    for text in ("fixed, low", "pretrain_steps", "Off target", "A sampler that is not the policy"):
        assert text in html
    assert html.count('class="prompt"') == 3


@pytest.mark.exhaustive
def test_the_report_has_its_pictures(tmp_path):
    assert compare(options(tmp_path))
    for name in run.PICTURES:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.html").read_text().count("<img src=") == len(run.PICTURES)


@pytest.mark.usefixtures("_no_picture")
def test_an_interrupted_run_goes_on_bit_for_bit(whole, tmp_path, stop_after):
    for i, steps in enumerate((0, 5, 4, 100)):
        stop_after(steps)
        assert compare(options(tmp_path, resume=i > 0)) == (steps == 100)
        html = (tmp_path / "report.html").read_text()
        partial = "not finished" if metrics(tmp_path) else "nothing to read yet"
        assert (partial in html) == (steps < 100)
    assert without_times(metrics(tmp_path)) == without_times(metrics(whole))


@pytest.mark.usefixtures("_no_picture")
def test_a_diverging_arm_stops_the_run_is_named_and_the_rest_reported(tmp_path):
    with pytest.raises(CompareError, match="arm 'none' diverged at step"):
        compare(options(tmp_path, learning_rate=1e30, arms=("none",), steps=100_000))
    assert "stopped before any arm made a step" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("_no_picture")
def test_an_earlier_run_is_refused_without_force_and_kept_with_it(whole, tmp_path, capsys):
    copy = shutil.copytree(whole, tmp_path / "copy")
    before = contents(copy)
    assert main(["compare", "--out", str(copy), "--resume", "--steps", "5"]) == 2
    assert "cannot resume with another steps" in capsys.readouterr().err
    assert main(["compare", *SHORT, "--out", str(copy)]) == 2
    assert f"{copy} has metrics.jsonl of an earlier run: go on with" in capsys.readouterr().err
    assert contents(copy) == before
    for _ in range(2):
        assert main(["compare", *SHORT, "--out", str(copy), "--force"]) == 0
    kept = [path.read_bytes() for path in copy.glob("earlier/*/metrics.jsonl")]
    assert len(kept) == 2
    assert (whole / "metrics.jsonl").read_bytes() in kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "adaptive,fixd"], "unknown arm 'fixd'; expected one of 'none', 'fixed-low'"),
        (["--arms", "stale"], "arms must have one that samples by the policy itself"),
        (["--steps", "0"], "steps must be a whole number >= 1, got 0"),
        (["--target", "nan"], f"target {POSITIVE}, got nan"),
        (["--correction", "tiss"], "unknown correction 'tiss'; expected one of 'tis', 'mis'"),
        (["--resume"], "nothing to resume: there is no"),
    ],
)
def test_a_mistake_is_one_clear_line_and_nothing_is_written(tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    assert main(["compare", "--out", str(out), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m lab compare: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_leaves_a_valid_partial_report(tmp_path):
    command = [sys.executable, "-m", "lab", "compare", "--steps", "1000", "--arms"]
    command += ["none,adaptive", "--pretrain-steps", "2", "--no-bench", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    records = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (records.exists() and records.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline, "no step was recorded"
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""
    assert re.search(r"^none: step 1 of 1000, KL 0, exact 0, coef 0, reward", printed, re.M)
    assert "go on with --resume" in printed
    assert printed.endswith(f"Open it in a browser: {(tmp_path / 'report.html').as_uri()}\n")
    assert "not finished" in (tmp_path / "report.html").read_text()
