"""The experiment as a whole: what it writes, how it stops, how it goes on."""

import base64
import json
import re
import shutil
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from klfast.experiment import compare as compare_module
from klfast.experiment import folder, run
from klfast.experiment.compare import Options, compare
from klfast.experiment.settings import CompareError
from klfast.experiment.text import load_corpus

TINY = {
    "steps": 4,
    "arms": ("none", "adaptive"),
    "pretrain_steps": 3,
    "prompts": 2,
    "group": 2,
    "prompt_length": 4,
    "continuation_length": 6,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "held_out_windows": 4,
}


@pytest.fixture(autouse=True)
def _one_corpus(monkeypatch):
    monkeypatch.setattr(compare_module, "load_corpus", cached_corpus)


@pytest.fixture
def _no_picture(monkeypatch):
    """Saves a second in tests that are about something else."""
    for draw in ("draw_curves", "draw_estimators", "draw_sampler"):
        monkeypatch.setattr(compare_module, draw, lambda *of: b"a picture")


@cache
def cached_corpus():
    return load_corpus()


def options(out, resume=False, bench=False, **changes):
    chosen = {} if resume else TINY
    return Options(chosen={**chosen, **changes}, out=out, resume=resume, bench=bench)


def stop_after(checks):
    """True from the given check on; the run checks once before every step."""
    left = iter(range(checks))
    return lambda: next(left, None) is None


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def without_times(rows):
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]


def policy(out, name):
    return torch.load(out / "checkpoints" / f"{name}.pt", weights_only=True)["policy"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "load_corpus", cached_corpus)
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


def test_report_stands_alone(whole):
    html = (whole / "report.html").read_text()
    for name in ("curves.png", "estimators.png"):
        picture = (whole / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert f"data:image/png;base64,{base64.b64encode(picture).decode()}" in html
    assert not re.search(r"(src|href)=\"(?!data:)", html)
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
        if len(arm.rows) == 3:
            raise RuntimeError("killed")
        return train_step(arm, world, settings, team)

    monkeypatch.setattr(run, "train_step", killed_at_step_4)
    with pytest.raises(RuntimeError, match="killed"):
        compare(options(tmp_path))
    assert len(metrics(tmp_path)) == 3
    monkeypatch.setattr(run, "train_step", train_step)
    assert compare(options(tmp_path, resume=True))
    assert without_times(metrics(tmp_path)) == without_times(metrics(whole))


@pytest.mark.usefixtures("_no_picture")
def test_a_finished_run_can_be_resumed_to_no_effect(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    assert compare(options(tmp_path / "copy", resume=True, **TINY))
    assert metrics(tmp_path / "copy") == metrics(whole)


def contents(out):
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


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
        compare(options(tmp_path, learning_rate=1e30))
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


def test_missing_extras_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module, "EXTRAS", ("rich", "no_such_package"))
    with pytest.raises(CompareError, match=r"needs no_such_package: pip install 'klfast\[demo\]'"):
        compare(options(tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("_no_picture")
def test_the_run_ends_with_the_speed_of_the_kl_step(tmp_path, monkeypatch, capsys):
    seen = []

    def timed(logprobs, ref_logprobs, mask):
        seen.append((logprobs.shape, ref_logprobs.shape, mask.shape))
        row = {"case": "this run [4, 6]", "impl": "eager", "median_ms": 1.5, "min_ms": 1.25}
        return [{**row, "ratio": 12.5}]

    monkeypatch.setitem(sys.modules, "klfast.bench", SimpleNamespace(time_kl_step=timed))
    assert compare(options(tmp_path, bench=True))
    assert seen == [((4, 6),) * 3]
    html = (tmp_path / "report.html").read_text()
    printed = capsys.readouterr().out
    for text in ("this run [4, 6]", "eager", "12.5"):
        assert text in html
        assert text in printed
    assert printed.rstrip().endswith(f"Report: {tmp_path / 'report.html'}")
