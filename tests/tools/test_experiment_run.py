"""The experiment as a whole: what it writes, how it stops, how it goes on."""

import json
import re
import shutil
import sys
import threading
from html.parser import HTMLParser
from types import SimpleNamespace

import experiment
import pytest
import torch
from experiment import contents, metrics, no_pictures, without_times

from klfast.backends import info as provenance
from lab import compare as compare_module
from lab import folder, run
from lab.compare import Options, compare
from lab.settings import CompareError

TINY = {**experiment.TINY, "steps": 4, "arms": ("none", "adaptive")}


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


def policy(out, name):
    return torch.load(out / "checkpoints" / f"{name}.pt", weights_only=True)["policy"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert compare(options(out))
    return out


def test_metrics_have_every_quantity_at_every_step(whole):
    rows = metrics(whole)
    assert [(row["arm"], row["step"]) for row in rows] == [
        (arm, step) for arm in TINY["arms"] for step in range(1, 5)
    ]
    expected = {"arm", "step", "reward", "coefficient", "held_out_perplexity", "kl_step_seconds"}
    names = ("exact", "k1", "k2", "k3")
    expected |= {f"kl_per_{unit}_{name}" for unit in ("sequence", "token") for name in names}
    expected |= {f"kl_per_sequence_{name}_error_std" for name in names[1:]}
    assert all(expected <= row.keys() for row in rows)
    assert all(row["coefficient"] == 0 for row in rows if row["arm"] == "none")
    for row in rows:
        tokens = row["mean_length"] * TINY["prompts"] * TINY["group"]
        bins = row["token_errors"]
        assert sum(bins["tokens"]) == (tokens if row["step"] > 1 else 0)
        assert sum(bins["exact"]) == pytest.approx(tokens * row["kl_per_token_exact"])
        bias = row["kl_per_token_k2"] - row["kl_per_token_exact"]
        assert sum(bins["k2"]) == pytest.approx(tokens * bias, rel=1e-4, abs=1e-6)


def test_arms_start_alike_from_the_same_samples(whole):
    first = [row for row in without_times(metrics(whole)) if row["step"] == 1]
    for key in ("reward", "kl_per_sequence_k3", "mean_length"):
        assert first[0][key] == first[1][key]
    assert first[0]["kl_per_sequence_k3"] == 0
    assert first[0]["kl_per_sequence_exact"] == 0


class Page(HTMLParser):
    """The elements of a page, each with its attributes; the names of those that are not closed."""

    VOID = ("meta", "path", "use", "rect", "br", "line")

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_report_stands_alone(whole):
    html = (whole / "report.html").read_text()
    for name in ("curves.png", "estimators.png", "frontier.png"):
        assert (whole / name).read_bytes().startswith(b"\x89PNG")
    assert not re.search("https?://|@import", html)
    page = Page(html)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 10
    for _, attributes in page.elements:
        for name in ("src", "href", "xlink:href"):
            if name in attributes:  # a piece of the page itself
                assert attributes[name].startswith("#")
                assert attributes[name][1:] in ids
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)
    figures = [a for tag, a in page.elements if tag == "svg" and a.get("role") == "img"]
    assert len(figures) == 1 + 4 + 4
    assert all(figure["aria-label"] for figure in figures)
    for text in ("no penalty", "adaptive (Ziegler)", "reference", "pretrain_steps", "Off target"):
        assert text in html
    assert "Exact KL" in html
    assert "No bin holds 1,000 tokens of 10 steps" in html
    assert html.count('class="prompt"') == 3
    assert "the target: over the last step" in html


@pytest.mark.usefixtures("_no_picture")
@pytest.mark.parametrize("stops", [(0,), (2,), (5,), (3, 4), (9, 1)])
def test_an_interrupted_run_goes_on_bit_for_bit(whole, tmp_path, stops):
    for i, checks in enumerate(stops):
        assert not compare(options(tmp_path, resume=i > 0), stop=stop_after(checks))
        html = (tmp_path / "report.html").read_text()
        assert ("not finished" if metrics(tmp_path) else "nothing to read yet") in html
    assert compare(options(tmp_path, resume=True))
    assert without_times(metrics(tmp_path)) == without_times(metrics(whole))
    for name in TINY["arms"]:
        expected = policy(whole, name)
        assert all(torch.equal(w, expected[key]) for key, w in policy(tmp_path, name).items())


@pytest.mark.usefixtures("_no_picture")
def test_a_run_killed_between_checkpoints_goes_on_from_the_last_one(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SAVE_EVERY", 2)
    train_step = run.train_step

    def killed_at_step_4(arm, world, settings, team):
        if len(arm.rows) == 3 and arm.name == "none":
            raise RuntimeError("killed")
        return train_step(arm, world, settings, team)

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
    threads = set()
    train_step = run.train_step

    def watched(arm, world, settings, team):
        threads.add(threading.get_ident())
        assert torch.get_num_threads() == 1
        return train_step(arm, world, settings, team)

    monkeypatch.setattr(run, "train_step", watched)
    assert compare(options(tmp_path))
    assert len(threads) <= min(cores, len(TINY["arms"]))
    assert without_times(metrics(tmp_path)) == without_times(metrics(whole))


@pytest.mark.usefixtures("_no_picture")
def test_an_arms_error_stops_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "cores", lambda: 2)
    train_step = run.train_step
    others = threading.Event()

    def diverges(arm, world, settings, team):
        if arm.name == "none":
            others.wait(60)
            raise CompareError("arm 'none' diverged")
        others.set()
        return train_step(arm, world, settings, team)

    monkeypatch.setattr(run, "train_step", diverges)
    with pytest.raises(CompareError, match="arm 'none' diverged"):
        compare(options(tmp_path, steps=100_000))
    rows = metrics(tmp_path)
    assert {row["arm"] for row in rows} == {"adaptive"}
    saved = torch.load(tmp_path / "checkpoints" / "adaptive.pt", weights_only=True)
    assert saved["rows"] == rows


@pytest.mark.usefixtures("_no_picture")
def test_a_terminal_has_bars_in_place_of_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert compare(options(tmp_path))
    printed = capsys.readouterr().out
    assert "step 1 of" not in printed
    for name in ("pretraining", *TINY["arms"], "all"):
        assert re.search(rf"{name} .*100%", printed)


@pytest.mark.usefixtures("_no_picture")
def test_a_finished_run_can_be_resumed_to_no_effect(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    assert compare(options(tmp_path / "copy", resume=True, **TINY))
    assert metrics(tmp_path / "copy") == metrics(whole)


def damage_settings(out):
    (out / "settings.json").write_text("{")


def damage_version(out):
    record = json.loads((out / "settings.json").read_text())
    (out / "settings.json").write_text(json.dumps({**record, "version": 1}))


def damage_checkpoint(out):
    path = out / "checkpoints" / "adaptive.pt"
    path.write_bytes(path.read_bytes()[:-100])


def damage_other_file(out):
    (out / "checkpoints" / "adaptive.pt").write_bytes(b"no checkpoint at all")


def damage_missing_pretraining(out):
    (out / "checkpoints" / "pretrain.pt").unlink()


def damage_foreign(out):
    path = out / "checkpoints" / "none.pt"
    state = torch.load(path, weights_only=True)
    folder.save_checkpoint(path, {**state, "settings": {**state["settings"], "seed": 7}})


def damage_checkpoint_version(out):
    path = out / "checkpoints" / "none.pt"
    state = torch.load(path, weights_only=True)
    folder.save_checkpoint(path, {**state, "version": run.VERSION + 1})


def damage_missing_part(out):
    path = out / "checkpoints" / "none.pt"
    state = torch.load(path, weights_only=True)
    del state["controller"]
    folder.save_checkpoint(path, state)


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (damage_settings, "settings.json"),
        (damage_version, "settings.json"),
        (damage_checkpoint, "adaptive.pt"),
        (damage_other_file, "adaptive.pt"),
        (damage_missing_pretraining, "pretrain.pt"),
        (damage_foreign, "none.pt"),
        (damage_checkpoint_version, "none.pt"),
        (damage_missing_part, "none.pt"),
    ],
)
def test_a_damaged_run_is_refused_and_left_as_it_is(whole, tmp_path, damage, file):
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    damage(out)
    before = contents(out)
    with pytest.raises(CompareError, match=rf"cannot resume: .*{re.escape(file)} is damaged"):
        compare(options(out, resume=True))
    assert contents(out) == before


def test_records_whose_checkpoints_were_removed_are_not_overwritten(whole, tmp_path, monkeypatch):
    """To save space, say; --resume would begin their arm anew."""
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    (out / "checkpoints" / "adaptive.pt").unlink()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"arm": "adap')  # cut off by a crash
    before = contents(out)
    monkeypatch.setattr(run, "SAVE_EVERY", 3)
    with pytest.raises(CompareError, match="has 4 steps of the arm 'adaptive', its checkpoint 0"):
        compare(options(out, resume=True))
    assert contents(out) == before
    monkeypatch.setattr(run, "SAVE_EVERY", 4)  # so many a killed run may lose, and makes again
    with no_pictures():
        assert compare(options(out, resume=True))
    assert without_times(metrics(out)) == without_times(metrics(whole))


def test_resuming_with_another_setting_or_text_is_refused(whole, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    record = json.loads((out / "settings.json").read_text())
    with pytest.raises(CompareError, match=r"another steps: .* has 4, got 5"):
        compare(options(out, resume=True, steps=5))
    record["environment"]["text"] = "0123456789abcdef"
    (out / "settings.json").write_text(json.dumps(record))
    before = contents(out)
    with pytest.raises(CompareError, match="text"):
        compare(options(out, resume=True))
    assert contents(out) == before


@pytest.mark.usefixtures("_no_picture")
def test_a_diverging_arm_is_named_and_the_rest_reported(tmp_path):
    with pytest.raises(CompareError, match="arm 'none' diverged at step"):
        compare(options(tmp_path, learning_rate=1e30, arms=("none",)))
    assert "stopped before any arm made a step" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("_no_picture")
def test_arms_of_other_lengths_share_the_reports_table(tmp_path):
    """An arm without a sequence of some length has an empty cell there."""
    shutil.copytree(folder_of_a_run(tmp_path), tmp_path / "copy")
    path = tmp_path / "copy" / "checkpoints" / "none.pt"
    state = torch.load(path, weights_only=True)
    for row in state["rows"]:
        row["by_length"] = {"first": [64.0], "sequences": [4.0], "tokens": [9.0]} | {
            name: [1.0] for name in ("exact", "k3")
        }
    folder.save_checkpoint(path, state)
    assert compare(options(tmp_path / "copy", resume=True))
    html = (tmp_path / "copy" / "report.html").read_text()
    assert "64 to 127 tokens</th>" in html
    assert '<td class="n"></td>' in html


def folder_of_a_run(tmp_path):
    assert compare(options(tmp_path / "run"))
    return tmp_path / "run"


@pytest.mark.usefixtures("_no_picture")
def test_a_clip_is_recorded_and_reported(tmp_path):
    assert compare(options(tmp_path, clip=1e-4, arms=("none",)))
    rows = metrics(tmp_path)
    assert rows[0]["clipped"] == 0
    assert all(row["clipped"] > 0 for row in rows[1:])
    assert all(row["nonfinite"] == 0 for row in rows)
    for row in rows:
        assert sum(row["by_length"]["sequences"]) == TINY["prompts"] * TINY["group"]
        assert sum(row["by_length"]["exact"]) == pytest.approx(4 * row["kl_per_sequence_exact"])
    html = (tmp_path / "report.html").read_text()
    assert "Clips, bad tokens and lengths" in html
    assert "clipped at 1.00e-04 nats" in html
    assert "The clip at 1.00e-04 nats acted most in" in html


@pytest.mark.usefixtures("_no_picture")
def test_the_report_says_when_it_began_under_which_klfast_and_who_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KLFAST_COMMIT", "0ld5e1f")
    monkeypatch.setattr(run, "now", lambda: "2001-02-03 04:05 UTC")
    assert not compare(options(tmp_path), stop=stop_after(5))
    html = (tmp_path / "report.html").read_text()
    began = f"Begun 2001-02-03 04:05 UTC by klfast {provenance.__version__}, commit 0ld5e1f;"
    assert began in html
    assert html.count("0ld5e1f") == 2  # and among the settings
    monkeypatch.setenv("KLFAST_COMMIT", "newer42")
    monkeypatch.setattr(run, "now", lambda: "2002-02-03 04:05 UTC")
    assert compare(options(tmp_path, resume=True))
    html = (tmp_path / "report.html").read_text()
    assert began in html
    written = f"Report of 2002-02-03 04:05 UTC, by klfast {provenance.__version__}, commit newer42."
    assert written in html


@pytest.mark.usefixtures("_no_picture")
def test_a_run_that_was_begun_by_an_older_klfast_goes_on(tmp_path, capsys):
    assert not compare(options(tmp_path), stop=stop_after(5))
    record = json.loads((tmp_path / "settings.json").read_text())
    del record["began"], record["environment"]["klfast"], record["environment"]["commit"]
    (tmp_path / "settings.json").write_text(json.dumps(record))
    assert compare(options(tmp_path, resume=True))
    assert "klfast was None and is" in " ".join(capsys.readouterr().out.split())
    html = (tmp_path / "report.html").read_text()
    assert "Begun at a time not known by klfast not known, commit not known;" in html


def test_the_answer_is_on_top_of_the_report_and_of_what_is_printed(whole, tmp_path, capsys):
    html = (whole / "report.html").read_text()
    line = re.search(r"<strong>(.*?)</strong>", html)[1]
    assert re.match("Adaptive .Ziegler. (held the target best|came closest, and did not)", line)
    assert html.index(line, html.index("<body>")) < html.index("<h2>")
    assert "This is one run with one seed (0)" in html
    copied = re.search(r"<pre><code>(.*?)</code></pre>", html, re.DOTALL)[1]
    assert "controller = klfast.AdaptiveKLController(" in copied
    shutil.copytree(whole, tmp_path / "copy")
    with no_pictures():
        assert compare(options(tmp_path / "copy", resume=True))
    printed = " ".join(capsys.readouterr().out.split())
    assert line in printed
    assert printed.index(line) < printed.index("Last third of the steps")


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
    assert seen == [(4, 6)]
    rows_timed = (tmp_path / "speed.json").read_bytes()
    for bench in (False, True):  # a report that is written again keeps what was timed
        assert compare(options(tmp_path, resume=True, bench=bench))
        assert (tmp_path / "speed.json").read_bytes() == rows_timed
    assert len(seen) == 1
    html = (tmp_path / "report.html").read_text()
    printed = capsys.readouterr().out
    for text in ("this run [4, 6]", "eager", "12.5", "noisy, busy"):
        assert text in html
        assert text in printed
    assert printed.count(f"\nReport: {tmp_path / 'report.html'}\n") == 3
    assert printed.count("Timing the KL step") == 1
