"""The experiment as a whole: what it writes, how it stops and goes on, whose folder it takes."""

import json
import re
import shutil
import sys
import threading
from types import SimpleNamespace

import experiment
import pytest
from experiment import contents, metrics, no_pictures, without_times

from lab import compare as compare_module
from lab import run
from lab.__main__ import main
from lab.compare import Options, compare
from lab.settings import CompareError

TINY = {**experiment.TINY, "steps": 4, "arms": ("none", "adaptive")}
SHORT = ["--steps", "2", "--arms", "none", "--pretrain-steps", "2", "--no-bench"]


@pytest.fixture
def _no_picture():
    with no_pictures():
        yield


def options(out, resume=False, bench=False, **changes):
    chosen = {} if resume else TINY
    return Options(chosen={**chosen, **changes}, out=out, resume=resume, bench=bench)


def stop_after(checks):
    """True from the given check on; the run checks once before every step."""
    left = iter(range(checks))
    return lambda: next(left, None) is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "whole"
    assert compare(options(out))
    return out


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def test_metrics_have_every_quantity_at_every_step(whole):
    rows = metrics(whole)
    assert [(row["arm"], row["step"]) for row in rows] == [
        (arm, step) for arm in TINY["arms"] for step in range(1, 5)
    ]
    first = [row for row in without_times(rows) if row["step"] == 1]
    assert first[0]["kl_per_sequence_exact"] == first[1]["kl_per_sequence_k3"] == 0
    assert first[0]["reward"] == first[1]["reward"]  # from the same samples
    for row in rows:
        tokens = row["mean_length"] * TINY["prompts"] * TINY["group"]
        bins = row["token_errors"]
        assert sum(bins["tokens"]) == (tokens if row["step"] > 1 else 0)
        assert sum(bins["exact"]) == pytest.approx(tokens * row["kl_per_token_exact"])
        bias = row["kl_per_token_k2"] - row["kl_per_token_exact"]
        assert sum(bins["k2"]) == pytest.approx(tokens * bias, rel=1e-4, abs=1e-6)


def test_the_report_stands_alone_and_begins_with_the_answer(whole):
    html = (whole / "report.html").read_text()
    for name in ("curves.png", "estimators.png", "frontier.png"):
        assert (whole / name).read_bytes().startswith(b"\x89PNG")
    assert not re.search('https?://|@import|(src|href)="(?!data:image/png)', html)
    assert html.count("<img src=") == 3
    line = re.search(r"<strong>(.*?)</strong>", html)[1]
    assert re.match("Adaptive .Ziegler. (held the target best|came closest, and did not)", line)
    copied = re.search(r"<pre><code>(.*?)</code></pre>", html, re.DOTALL)[1]
    assert "controller = klfast.AdaptiveKLController(" in copied
    for text in ("no penalty", "pretrain_steps", "Off target", "This is one run with one seed (0)"):
        assert text in html
    assert html.count('class="prompt"') == 3


@pytest.mark.usefixtures("_no_picture")
@pytest.mark.parametrize("stops", [(0,), (2,), (5,), (3, 4), (9, 1)])
def test_an_interrupted_run_goes_on_bit_for_bit(whole, tmp_path, stops):
    for i, checks in enumerate(stops):
        assert not compare(options(tmp_path, resume=i > 0), stop=stop_after(checks))
        html = (tmp_path / "report.html").read_text()
        assert ("not finished" if metrics(tmp_path) else "nothing to read yet") in html
    assert compare(options(tmp_path, resume=True))
    assert without_times(metrics(tmp_path)) == without_times(metrics(whole))


@pytest.mark.usefixtures("_no_picture")
def test_a_run_killed_between_checkpoints_goes_on_from_the_last_one(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SAVE_EVERY", 2)
    train_step = run.train_step

    def killed_at_step_4(arm, world, settings):
        if len(arm.rows) == 3 and arm.name == "none":
            raise RuntimeError("killed")
        return train_step(arm, world, settings)

    monkeypatch.setattr(run, "train_step", killed_at_step_4)
    with pytest.raises(RuntimeError, match="killed"):
        compare(options(tmp_path))
    assert [row["step"] for row in metrics(tmp_path) if row["arm"] == "none"] == [1, 2, 3]
    monkeypatch.setattr(run, "train_step", train_step)
    assert compare(options(tmp_path, resume=True))
    assert without_times(metrics(tmp_path)) == without_times(metrics(whole))


@pytest.mark.usefixtures("_no_picture")
@pytest.mark.parametrize("cores", [1, 5])
def test_the_number_of_cores_changes_no_number(whole, tmp_path, monkeypatch, cores):
    monkeypatch.setattr(run, "cores", lambda: cores)
    monkeypatch.setattr(run, "SAVE_EVERY", 1)
    assert compare(options(tmp_path))
    assert without_times(metrics(tmp_path)) == without_times(metrics(whole))


@pytest.mark.usefixtures("_no_picture")
def test_an_arms_error_stops_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "cores", lambda: 2)
    train_step = run.train_step
    others = threading.Event()

    def diverges(arm, world, settings):
        if arm.name == "none":
            others.wait(60)
            raise CompareError("arm 'none' diverged")
        others.set()
        return train_step(arm, world, settings)

    monkeypatch.setattr(run, "train_step", diverges)
    with pytest.raises(CompareError, match="arm 'none' diverged"):
        compare(options(tmp_path, steps=100_000))
    assert {row["arm"] for row in metrics(tmp_path)} == {"adaptive"}


@pytest.mark.usefixtures("_no_picture")
def test_a_diverging_arm_is_named_and_the_rest_reported(tmp_path):
    with pytest.raises(CompareError, match="arm 'none' diverged at step"):
        compare(options(tmp_path, learning_rate=1e30, arms=("none",)))
    assert "stopped before any arm made a step" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("_no_picture")
def test_a_terminal_has_bars_in_place_of_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert compare(options(tmp_path))
    printed = capsys.readouterr().out
    assert "step 1 of" not in printed
    for name in ("pretraining", *TINY["arms"]):
        assert re.search(rf"{name} .*100%", printed)


# Another run, another process, somebody else's files


def damage_settings(out):
    (out / "settings.json").write_text("{")


def damage_checkpoint(out):
    path = out / "checkpoints" / "adaptive.pt"
    path.write_bytes(path.read_bytes()[:-100])


def damage_pretraining(out):
    (out / "checkpoints" / "pretrain.pt").unlink()


@pytest.mark.parametrize("damage", [damage_settings, damage_checkpoint, damage_pretraining])
def test_a_damaged_run_is_refused_and_left_as_it_is(copy, damage):
    damage(copy)
    before = contents(copy)
    with pytest.raises(CompareError, match=r"cannot resume: .* is damaged"):
        compare(options(copy, resume=True))
    assert {name: before[name] for name in before} == {
        name: data for name, data in contents(copy).items() if name in before
    }


def test_resuming_with_another_setting_or_text_is_refused(copy):
    with pytest.raises(CompareError, match=r"another steps: .* has 4, got 5"):
        compare(options(copy, resume=True, steps=5))
    record = json.loads((copy / "settings.json").read_text())
    record["environment"]["text"] = "0123456789abcdef"
    (copy / "settings.json").write_text(json.dumps(record))
    with pytest.raises(CompareError, match="text"):
        compare(options(copy, resume=True))


@pytest.mark.parametrize("name", [".git", "notes.txt"])
@pytest.mark.parametrize("arguments", [[], ["--force"], ["--resume"]], ids=str)
def test_a_folder_that_is_not_klfasts_is_refused_untouched(tmp_path, capsys, name, arguments):
    (tmp_path / name).write_text('{"editor": "vi"}')
    before = contents(tmp_path)
    assert main(["compare", "--out", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    if arguments != ["--resume"]:
        assert f"no folder of python -m lab compare, which did not write its {name};" in error
    assert error.count("\n") == 1
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("_no_picture")
def test_an_earlier_run_is_refused_without_force_and_kept_with_it(copy, whole, capsys):
    before = contents(copy)
    assert main(["compare", *SHORT, "--out", str(copy)]) == 2
    error = capsys.readouterr().err
    assert f"{copy} holds an earlier run: go on with it (--resume)" in error
    assert contents(copy) == before
    for count in (1, 2):
        assert main(["compare", *SHORT, "--out", str(copy), "--force"]) == 0
        places = sorted((copy / "earlier").iterdir())
        assert len(places) == count
        printed = capsys.readouterr().out
        assert any(f"The earlier run is kept in {place}\n" in printed for place in places)
    kept = [(place / "metrics.jsonl").read_bytes() for place in places]
    assert (whole / "metrics.jsonl").read_bytes() in kept


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path, capsys):
    with run.held(tmp_path):
        assert main(["compare", *SHORT, "--out", str(tmp_path)]) == 2
        assert "in use by another process" in capsys.readouterr().err
    with run.held(tmp_path):
        pass


def test_missing_extras_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module, "EXTRAS", ("rich", "no_such_package"))
    with pytest.raises(CompareError, match=r"needs no_such_package: pip install 'klfast\[demo\]'"):
        compare(options(tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("_no_picture")
def test_the_run_ends_with_the_speed_of_the_kl_step(tmp_path, monkeypatch, capsys):
    seen = []

    def timed(shape):
        seen.append(shape)
        row = {"case": "this run [4, 6]", "impl": "eager", "median_ms": 1.5, "min_ms": 0.75}
        return [{**row, "ratio": 12.5, "busy": True}]

    monkeypatch.setitem(sys.modules, "benchmarks.kl_step", SimpleNamespace(time_kl_step=timed))
    assert compare(options(tmp_path, bench=True))
    for bench in (False, True):  # a report that is written again keeps what was timed
        assert compare(options(tmp_path, resume=True, bench=bench))
    assert seen == [(4, 6)]
    html = (tmp_path / "report.html").read_text()
    printed = capsys.readouterr().out
    for text in ("this run [4, 6]", "eager", "12.5", "noisy, busy"):
        assert text in html
        assert text in printed
    assert printed.count(f"\nReport: {tmp_path / 'report.html'}\n") == 3
