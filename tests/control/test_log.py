"""KLLog writes to trackers or JSON lines, under frameworks' names."""

import copy
import json
import math
import pickle
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import readme
import torch

import klfast
from klfast import KLLog
from klfast.stats.kl import OF_TOKENS


def batch():
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -0.2, -9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    ref_logprobs = logprobs - torch.tensor([0.5, -0.25, 0.1])
    _, stats = klfast.kl_penalty(
        logprobs, ref_logprobs, mask, reduction="token-mean", return_stats=True
    )
    return logprobs, ref_logprobs, mask, stats


class Board:
    """A stand-in for TensorBoard's SummaryWriter."""

    def __init__(self, log_dir=None):
        self.log_dir, self.written = log_dir, []

    def add_scalar(self, name, value, step):
        self.written.append((name, value, step))


class Run:
    """A stand-in for a run of Weights & Biases."""

    def __init__(self):
        self.logged = []

    def log(self, values, step):
        self.logged.append((values, step))


def test_statistics_between_sampler_and_trainer_have_names_of_their_own():
    logprobs, rollout_logprobs, mask, stats = batch()
    rollout = klfast.rollout_correction(logprobs, rollout_logprobs, mask).stats
    run = Run()
    log = KLLog(run, names="trl")
    both = log(0, stats, rollout=rollout)
    assert log(1, rollout) == rollout.to_floats()
    assert both == {**log(2, stats), **rollout.to_floats()}
    assert {"kl/token_mean", "rollout/k3", "kl"} <= both.keys()
    with pytest.raises(TypeError, match="rollout must be a RolloutStats or None, got KLStats"):
        log(3, rollout=stats)
    with pytest.raises(TypeError, match="stats must be a KLStats or None, got RolloutStats"):
        log(3, rollout, rollout=rollout)
    with pytest.raises(
        ValueError, match="extra must not have a name that KLLog writes, got 'rollout/k3'"
    ):
        log(3, rollout, extra={"rollout/k3": 1.0})


def test_the_line_of_the_page_has_the_names_that_are_written():
    logprobs, ref_logprobs, mask, stats = batch()
    controller, alarm = klfast.NuPIKLController(0.1, 6.0), klfast.KLDriftAlarm(100.0)
    rollout = klfast.rollout_correction(logprobs, ref_logprobs, mask).stats
    written = KLLog(Run(), names="trl")(
        7, stats, controller=controller, monitor=alarm, rollout=rollout
    )
    shown = json.loads(readme.code("log-line")).keys() - {"step"}
    assert shown <= written.keys()
    assert {name for name in written.keys() - shown if not name.startswith("rollout/")} == {"kl/k2"}


def test_the_block_of_the_page_logs_the_clip_fraction_and_the_entropy(monkeypatch):
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run, init=lambda **_: run))
    logprobs, ref_logprobs, mask, stats = batch()
    # The clip changes the first token and the fourth.
    ratio = torch.tensor([[1.5, 0.5, 1.0], [0.5, 1.5, 1.5]])
    advantages, entropy = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0, 2, 3], [4, 5, 9]])
    corrected = klfast.rollout_correction(logprobs, ref_logprobs, mask)
    given = {"controller": klfast.FixedKLController(0.1), "alarm": klfast.KLDriftAlarm(100.0)}
    given |= {"ratio": ratio, "advantages": advantages, "entropy": entropy, "mask": mask}
    readme.run("log", klfast=klfast, step=3, stats=stats, corrected=corrected, **given)
    ((values, step),) = run.logged
    assert step == 3
    assert values["clip_fraction"] == pytest.approx(2 / 5)
    assert values["entropy"] == pytest.approx(3)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert (gain != ratio * advantages)[mask != 0].sum() == 2


def test_the_block_of_a_page_on_a_high_kl(capsys):
    logprobs, ref_logprobs, mask, stats = batch()
    monitor = klfast.KLMonitor(1e-3, min_updates=1)
    given = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "mask": mask, "stats": stats}
    given |= {"token_ids": torch.arange(6).view(2, 3), "klfast": klfast}
    with pytest.warns(RuntimeWarning, match="worst_tokens"):
        readme.run("reading", monitor=monitor, **given)
    profile, worst = capsys.readouterr().out.splitlines()
    assert "kl/x_q50" in profile
    assert "sequence=0, position=0, token_id=0" in worst


def test_a_file_of_json_lines_has_every_number_of_every_step(tmp_path):
    logprobs, ref_logprobs, mask, stats = batch()
    path = tmp_path / "new" / "kl.jsonl"
    controller = klfast.NuPIKLController(0.1, 6.0)
    alarm = klfast.KLDriftAlarm(100.0)
    log = KLLog(path)
    profile = klfast.log_ratio_profile(logprobs, ref_logprobs, mask)
    for step in range(2):
        alarm.update(stats)
        log(
            step,
            stats,
            controller=controller,
            monitor=alarm,
            profile=profile,
            extra={"reward": 0.5, "loss": torch.tensor(0.25, dtype=torch.float64)},
        )
        controller.update(stats)
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 1)
    expected = stats.as_dict() | profile.as_dict()
    assert {name: first[name] for name in expected} == {
        name: value.item() for name, value in expected.items()
    }
    assert (first["kl/coef"], first["kl/skipped"], first["kl/alarm"]) == (0.1, 0, 0)
    assert second["kl/coef"] == klfast.NuPIKLController(0.1, 6.0).update(stats)
    assert (first["reward"], first["loss"]) == (0.5, 0.25)
    assert first.keys() == second.keys()


NAN_WITHOUT_TOKENS = {f"kl/{name}" for name in OF_TOKENS}

# Framework -> {its name: (klfast's name, a function of klfast's number)}
THEIRS = {
    "nemo_rl": {"kl_penalty": ("token_mean", float)},
    "openrlhf": {"kl": ("token_mean", float)},
    "roll": {"critic/kl": ("token_mean", float), "critic/kl_coef": ("coef", float)},
    "skyrl": {"loss/avg_kl": ("token_mean", float), "loss/kl_loss_coef": ("coef", float)},
    "slime": {"train/kl_loss": ("token_mean", float)},
    "trl": {"kl": ("token_mean", float), "kl_coef": ("coef", float)},
    "trlx": {
        "policy/sqrt_kl": ("sequence_mean", math.sqrt),
        "policy/kl_per_token": ("token_mean", math.sqrt),
        "kl_ctl_value": ("coef", float),
    },
    "verl": {
        "actor/kl_loss": ("token_mean", float),
        "actor/reward_kl_penalty": ("token_mean", float),
        "actor/kl_coef": ("coef", float),
        "actor/reward_kl_penalty_coeff": ("coef", float),
    },
}


@pytest.mark.parametrize("names", THEIRS)
def test_frameworks_names_stand_beside_klfasts(names):
    stats = batch()[-1]
    board = Board()
    written = KLLog(board, names=names)(7, stats, controller=klfast.FixedKLController(0.3))
    assert board.written == [(name, value, 7) for name, value in written.items()]
    own = KLLog(Board())(7, stats, controller=klfast.FixedKLController(0.3))
    assert {name: value for name, value in written.items() if name in own} == own
    added = {name: value for name, value in written.items() if name not in own}
    assert added == {
        name: change(own[f"kl/{ours}"]) for name, (ours, change) in THEIRS[names].items()
    }


def test_a_kl_of_nan_stays_nan_under_every_name(tmp_path):
    """A file has null there. A square root of 0 would be the best KL that there is."""
    one = torch.ones(1)
    stats = klfast.KLStats(one * math.nan, *[one] * 7)
    path = tmp_path / "kl.jsonl"
    written = KLLog(path, names="trlx")(0, stats, extra={"inf": math.inf, "c": 1})
    line = json.loads(path.read_text())
    for name in ("kl/token_mean", "policy/sqrt_kl", "policy/kl_per_token"):
        assert math.isnan(written[name])
        assert line[name] is None
    assert (written["inf"], line["inf"], line["c"]) == (math.inf, None, 1.0)
    below_0 = KLLog(Board(), names="trlx")(0, stats._replace(kl=-one))
    assert below_0["policy/sqrt_kl"] == 0


def test_the_statistics_of_tokens_stay_if_all_are_nan():
    """A divergence without ids has none. Log-ratios of NaN have statistics of NaN."""
    nan = torch.full((2, 3), math.nan)
    stats = klfast.kl_penalty(nan, nan, return_stats=True)[1]
    _, exact = klfast.kl_divergence(*torch.zeros(2, 2, 3, 5), return_stats=True)[::4]
    assert not NAN_WITHOUT_TOKENS - KLLog(Board())(0, stats).keys()
    assert not NAN_WITHOUT_TOKENS & KLLog(Board())(0, exact).keys()
    assert ("k3" in repr(stats), "k3" in repr(exact)) == (True, False)
    assert klfast.KLMonitor(6.0).update(exact) == "ok"
    with pytest.warns(RuntimeWarning, match="skipped a KL of nan"):
        klfast.KLMonitor(6.0).update(stats, kl="k1")


@pytest.mark.parametrize(
    ("alarm", "kl", "status"),
    [
        (klfast.KLMonitor(1.0, window=8), 1.0, "ok"),
        (klfast.KLMonitor(1.0, window=8), 3.0, "high"),
        (klfast.KLMonitor(1.0, window=8), 0.1, "low"),
        (klfast.KLDriftAlarm(2.0, window=8), 3.0, "over"),
        (klfast.KLDriftAlarm(20.0, window=8), None, "drifting"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:(mean KL|KL is)")
def test_every_status_but_ok_is_an_alarm(alarm, kl, status):
    alarm = copy.copy(alarm)
    for step in range(8):
        alarm.update(2.0 * step if kl is None else kl)
    assert alarm.status == status
    assert KLLog(Board())(0, monitor=alarm) == {"kl/alarm": float(status != "ok")}


@pytest.mark.parametrize("begun", [False, True])
def test_trackers_are_imported_when_asked_for_and_only_then(monkeypatch, tmp_path, begun):
    module, boards = ModuleType("torch.utils.tensorboard"), []
    module.SummaryWriter = lambda folder: boards.append(Board(folder)) or boards[-1]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    KLLog("tensorboard:runs/x")(1, batch()[-1])
    KLLog("tensorboard")(1, extra={"a": 1})
    assert [board.log_dir for board in boards] == ["runs/x", None]
    assert ("kl/nonfinite", 0.0, 1) in boards[0].written
    assert boards[1].written == [("a", 1.0, 1)]

    run, projects = Run(), []
    wandb = ModuleType("wandb")
    wandb.run = run if begun else None  # an active run is used
    wandb.init = lambda project: projects.append(project) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    KLLog("wandb:steering")(3, extra={"a": 2})
    assert run.logged == [({"a": 2.0}, 3)]
    assert projects == ([] if begun else ["steering"])

    trackio = ModuleType("trackio")
    trackio.context_vars = SimpleNamespace(current_run=SimpleNamespace(get=lambda: wandb.run))
    trackio.init = wandb.init
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    KLLog("trackio")(4, extra={"a": 3})
    KLLog("trackio:steering")(5, extra={"a": 4})
    assert run.logged[1:] == [({"a": 3.0}, 4), ({"a": 4.0}, 5)]
    assert projects[1:] == ([] if begun else ["klfast", "steering"])

    mlflow, experiments = ModuleType("mlflow"), []
    mlflow.log_metrics, mlflow.set_experiment = run.log, experiments.append
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for to in ("mlflow", "mlflow:steering", mlflow):
        KLLog(to)(6, extra={"a": 5})
    assert run.logged[3:] == [({"a": 5.0}, 6)] * 3
    assert experiments == ["steering"]

    for to in ("tensorboard", "wandb", "trackio", "mlflow"):
        package = "torch.utils.tensorboard" if to == "tensorboard" else to
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=f"to='{to}' needs {to}: pip install {to}"):
            KLLog(to)
    KLLog(tmp_path / "kl.jsonl")(0, extra={"a": 1})


def test_coefficients_of_groups_of_a_device_and_of_ones_own():
    grouped = klfast.GroupedKLController(
        klfast.DualKLController, {"chat": 0.1, "maths": 0.2}, {"chat": 6.0, "maths": 20.0}
    )
    written = KLLog(Board())(0, controller=grouped)
    assert written == {
        "kl/chat/coef": 0.1,
        "kl/chat/skipped": 0,
        "kl/maths/coef": 0.2,
        "kl/maths/skipped": 0,
    }
    own = type("Own", (), {"value": 0.25})()
    assert KLLog(Board())(0, controller=own) == {"kl/coef": 0.25}
    controller = klfast.DualKLController(0.1, 6.0, device="cpu")
    assert KLLog(Board())(0, batch()[-1], controller=controller)["kl/coef"] == 0.1


def test_bad_arguments_are_named(tmp_path):
    path = tmp_path / "kl.jsonl"
    controller = klfast.DualKLController(0.1, 6.0)
    trackers = "'tensorboard', 'wandb', 'trackio', 'mlflow'"
    for to, error, text in (
        (SimpleNamespace(), TypeError, f"to must be {trackers}, a path, or .*got SimpleNamespace"),
        *(
            (to, ValueError, f"to must be one of {trackers}, or a path that ends in .jsonl, got .*")
            for to in ("Wandb", "tensorbord:x", "", "kl.json", tmp_path / "kl", ".jsonl")
        ),
        (path, ValueError, f"expected one of 'klfast', '{sorted(THEIRS)[0]}'"),
    ):
        with pytest.raises(error, match=text):
            KLLog(to, names="tensorboard" if to is path else "klfast")
    log = KLLog(path, names="trl")
    for step, options, error, text in (
        (-1, {}, ValueError, "step must be an integer >= 0"),
        (0, {"extra": {"x": torch.ones(2)}}, TypeError, r"extra must be numbers and .*'x'"),
        (0, {"extra": {"x": "y"}}, TypeError, r"extra\['x'\] must be a number .* got 'y'"),
        (0, {"controller": klfast.KLEarlyStop(1.0)}, TypeError, "controller must be .*KLEarlyStop"),
        (0, {"monitor": 1}, TypeError, "monitor must be a KLMonitor or a KLDriftAlarm, got int"),
        *(
            (
                *(0, {"controller": controller, "extra": {taken: 1.0}}, ValueError),
                f"a name that KLLog writes, got '{taken}'",
            )
            for taken in ("step", "kl/coef", "kl_coef")
        ),
    ):
        with pytest.raises(error, match=text):
            log(step, **options)
    assert not path.exists()


def test_a_log_to_a_file_is_pickled_and_goes_on(tmp_path):
    path = tmp_path / "new" / "kl.jsonl"
    log = KLLog(path, names="trl", prefix="policy/")
    log(0, batch()[-1])
    data = pickle.dumps(log)
    pickle.loads(data)(1, batch()[-1])
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {**second, "step": 0}
    assert {"policy/token_mean", "kl"} <= second.keys()
    shutil.rmtree(path.parent)
    pickle.loads(data)(2, extra={"a": 1})
    assert json.loads(path.read_text()) == {"step": 2, "a": 1}


@pytest.mark.parametrize("to", [Board(), Run()], ids=["add_scalar", "log"])
def test_a_log_to_a_writer_of_this_process_is_not_pickled(to):
    log = KLLog(to)
    expected = f"to must be a path for a KLLog to be pickled, got .*, {type(to).__name__}; make"
    with pytest.raises(TypeError, match=expected):
        pickle.dumps(log)
    for other in (copy.copy(log), copy.deepcopy(log)):
        other(3, extra={"a": 1})
    written = to.written if isinstance(to, Board) else to.logged
    assert len(written) == 2
