"""The study of controllers: its plant, the rules on it, its measures, its files."""

import json
import math

import pytest
import torch
from refusals import POSITIVE

from klfast.controllers import CONTROLLERS
from lab.__main__ import main
from lab.study.candidates import CANDIDATES, Candidate
from lab.study.plant import (
    Plant,
    Policy,
    Records,
    fit,
    load_records,
    read_run,
    save_records,
    without_noise,
)
from lab.study.simulate import FACTORS, Course, _octaves, judge, mean_miss, simulate
from lab.study.table import ranked, reading, table

pytestmark = pytest.mark.exhaustive

PLANT = Plant(
    level=-2.5,
    gain=1.3,
    least=0.003,
    rise=0.12,
    fall=0.04,
    delay=2,
    drift=0.002,
    first=2.5,
    noise=0.2,
    wander=0.1,
)
QUIET = Plant(**{**vars(PLANT), "noise": 0.0, "wander": 0.0})
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}


@pytest.fixture(autouse=True)
def _one_thread(set_num_threads):
    set_num_threads(1)


def records(kl, coefficient):
    return Records(("a", "b", "c"), coefficient, kl, kl)


# The plant


def test_the_plant_is_its_equations():
    coefficient = [0.1, 0.05, 0.2, 0.001, 0.01, 0.4, 0.4]
    found = without_noise(PLANT, torch.tensor([coefficient], dtype=torch.float64))[0].tolist()
    assert found[:2] == [0, 2.5]
    log_kl = math.log(2.5)
    for t in range(1, 6):
        value = coefficient[max(0, t - 2)]
        goal = -2.5 - 1.3 * math.log(value + 0.003) + 0.002 * t
        log_kl += (0.12 if goal > log_kl else 0.04) * (goal - log_kl)
        assert found[t + 1] == pytest.approx(math.exp(log_kl), rel=1e-12)


def test_the_balancing_coefficient_holds_the_target():
    still = Plant(**{**vars(QUIET), "drift": 0.0})
    value = torch.full((1, 900), still.balance(6.0), dtype=torch.float64)
    assert without_noise(still, value)[0, -1].item() == pytest.approx(6.0, rel=1e-6)


def test_noise_of_measuring_has_no_bias():
    policy = Policy(PLANT, (200_000,))
    policy.kl += 4.0
    n = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    measured = policy.measured(n)
    assert measured.mean().item() == pytest.approx(4.0, rel=3e-3)
    assert measured.log().std().item() == pytest.approx(0.2, rel=1e-2)


def test_the_task_may_change():
    still = Plant(**{**vars(QUIET), "drift": 0.0})
    policy = Policy(still, ())
    for _ in range(900):
        policy.update(torch.tensor(still.balance(6.0), dtype=torch.float64), push=2.0)
    assert policy.kl.item() == pytest.approx(12.0, rel=1e-6)


def test_the_fit_finds_the_plant_that_made_the_records():
    steps = torch.arange(60, dtype=torch.float64)
    coefficient = torch.stack(
        [
            torch.full_like(steps, 0.03),
            0.05 * torch.exp(torch.sin(steps / 5)),
            0.004 * 1.06**steps,
        ]
    )
    found = fit(records(without_noise(QUIET, coefficient), coefficient))
    for name in ("level", "gain", "least", "rise", "fall", "drift", "first"):
        assert getattr(found, name) == pytest.approx(getattr(QUIET, name), rel=0.05), name
    assert found.delay == 2
    assert found.noise == pytest.approx(0, abs=1e-6)
    assert found.wander < 0.01


# The rules on it


@pytest.mark.parametrize("name", BY_NAME)
def test_the_simulation_runs_klfasts_controllers(name):
    """A seed's course is what the controller itself makes of the same plant without noise."""
    course = Course(updates=60, seeds=3, spread=2.0)
    kl = simulate(BY_NAME[name], BY_NAME[name].gains, QUIET, course)[0]
    share = 2 * torch.rand(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    for seed in range(3):
        controller = BY_NAME[name].make(course.target)
        first = QUIET.balance(course.target) * 2.0 ** share[seed].item()
        controller = type(controller)(
            first, 6.0, unit="sequence", min_coef=1e-6, max_coef=100.0, **BY_NAME[name].gains
        )
        policy = Policy(QUIET, ())
        for t in range(course.updates):
            assert kl[seed, t].item() == pytest.approx(policy.kl.item(), rel=1e-9, abs=1e-12)
            measured = policy.kl.item()
            push = course.jump if t >= 30 else 1.0
            value = torch.tensor(controller.value, dtype=torch.float64)
            policy.update(value, 0.0, push)
            controller.update(measured, 40)


def test_many_gains_at_once_are_each_of_them_alone():
    course = Course(updates=60, seeds=4)
    candidate = BY_NAME["nupi"]
    factors = torch.tensor([0.5, 4.0], dtype=torch.float64)
    gains = candidate.scaled(candidate.gains, factors, torch.ones(2, dtype=torch.float64))
    both = simulate(
        candidate, {name: value[:, None] for name, value in gains.items()}, PLANT, course
    )
    for i in range(2):
        alone = {name: value[i].item() for name, value in gains.items()}
        assert torch.equal(simulate(candidate, alone, PLANT, course)[0], both[i])
    assert not torch.equal(both[0], both[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nupi", 0.15),
        ("pid-lagrangian", 0.2),
        ("control-vae", 0.15),
        ("dual", 0.35),
    ],
)
def test_default_gains_hold_the_plant_of_the_recorded_runs(name, error):
    defaults = Candidate(name, "default", {})
    course = Course(updates=400, seeds=32, seed=5)
    held = judge(simulate(defaults, {}, fit(load_records()), course)[0], course)
    assert held.lost <= 0.05
    assert held.error < error


def test_nupis_default_is_the_calmer_one_where_a_coefficient_acts_late():
    """What docs/controllers.md says of ki=0.2 and of the default, at a delay of 5 updates."""
    late = Plant(**{**vars(fit(load_records())), "delay": 5})
    nupi = BY_NAME["nupi"]
    fast, calm = (
        judge(simulate(nupi, {**nupi.gains, **gains}, late, Course(seed=7))[0], Course())
        for gains in ({"ki": 0.2}, {})
    )
    assert fast.overshoot == pytest.approx(0.6, abs=0.05)
    assert calm.overshoot == pytest.approx(0.2, abs=0.05)


def test_first_gains_that_are_klfasts_are_its_defaults():
    for candidate in CANDIDATES:
        plain = CONTROLLERS[candidate.name](1.0, 6.0)
        if candidate.source == "default":
            for name, gain in candidate.gains.items():
                assert getattr(plain, name) == gain


# The measures


def course_of(kl):
    """One seed per row."""
    return torch.tensor(kl, dtype=torch.float64)


def test_settling_overshoot_error_and_recovery_of_a_made_up_course():
    course = Course(updates=120)
    kl = torch.full((1, 120), 6.0, dtype=torch.float64)
    kl[:, :20] = 0.6  # too low, then in one step on target
    kl[:, 35] = 7.1
    kl[:, 60:75] = 12.0  # the change, and 15 updates to recover
    held = judge(kl, course)
    assert held.overshoot == pytest.approx(7.1 / 6 - 1)
    # of ten updates' mean: within 20 % once at most two in ten are at 0.6
    assert held.settling == pytest.approx(20 + 7)
    assert held.recovery == pytest.approx(15 + 7)
    assert held.error == 0
    assert held.lost == 0
    miss = 10 * math.log(10) + math.log(7.1 / 6) + 15 * math.log(2)
    assert held.miss == pytest.approx(miss / 110)


def test_a_course_that_never_settles_says_so():
    course = Course(updates=120)
    held = judge(torch.full((3, 120), 20.0, dtype=torch.float64), course)
    assert held.settling is held.recovery is None
    assert held.lost == 1
    assert held.overshoot == pytest.approx(20 / 6 - 1)
    assert mean_miss(torch.full((2, 3, 120), 6e9), course).tolist() == pytest.approx(
        [math.log(10)] * 2
    )


def test_octaves_are_the_unbroken_range_around_the_tuned_gains():
    misses = torch.full((len(FACTORS),), 9.0)
    middle = len(FACTORS) // 2
    misses[middle - 2 : middle + 4] = torch.tensor([1.4, 1.2, 1.0, 1.1, 1.3, 1.5])
    misses[0] = 1.0  # good again, far away
    assert _octaves(misses) == pytest.approx(2.5)


# Records and files


def test_records_survive_their_file(tmp_path):
    kl = torch.rand(3, 5, dtype=torch.float64)
    save_records(records(kl, kl / 10), tmp_path / "records.json")
    again = load_records(tmp_path / "records.json")
    assert again.arms == ("a", "b", "c")
    torch.testing.assert_close(again.kl, kl, rtol=1e-6, atol=0)
    torch.testing.assert_close(again.coefficient, kl / 10, rtol=1e-6, atol=0)


def write_run(folder, arms, coefficient=0.1):
    rows = [
        {
            "arm": name,
            "coefficient": coefficient,
            "kl_per_sequence_exact": 1.0 + step,
            "kl_per_sequence_k3": 1.5 + step,
        }
        for name, steps in arms.items()
        for step in range(steps)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_of_compare_is_read(tmp_path):
    write_run(tmp_path, {"none": 3, "nupi": 3})
    read = read_run(tmp_path)
    assert read.arms == ("none", "nupi")
    assert read.kl.tolist() == [[1.0, 2.0, 3.0]] * 2
    assert read.measured.tolist() == [[1.5, 2.5, 3.5]] * 2


def test_arms_whose_sampler_is_not_the_policy_are_left_out(tmp_path):
    write_run(tmp_path, {"none": 3, "stale": 2})
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row |= {"rollout": {}} if row["arm"] == "stale" else {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(tmp_path).arms == ("none",)


@pytest.mark.parametrize(
    ("steps", "coefficient", "said"),
    [
        (20, 0.0, "must have an arm with a coefficient > 0 in every step, got none"),
        (1, 0.1, "arms must have at least 10 steps, got 1"),
    ],
)
def test_a_run_that_nothing_can_be_fitted_to_is_named(tmp_path, capsys, steps, coefficient, said):
    write_run(tmp_path, {"none": steps}, coefficient)
    assert main(["study", "--fit", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    assert main(["study", "--seeds", "4", "--updates", "60", "--out", str(out)]) == 0
    return out


def test_the_command_writes_numbers_a_table_and_a_picture(out):
    numbers = json.loads((out / "study.json").read_text())
    assert {rule["name"] for rule in numbers["rules"]} == set(BY_NAME)
    assert (out / "study.md").read_text() == table(numbers)
    assert (out / "study.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in out.iterdir()} == {"study.json", "study.md", "study.png"}
    for rule in numbers["rules"]:
        # the search has the first gains in it
        assert rule["tuned"]["miss"] <= rule["first"]["miss"] + 1e-12
        assert len(rule["misses"]) == len(rule["factors"]) == len(FACTORS)
        middle = rule["misses"][len(FACTORS) // 2]
        assert middle == pytest.approx(rule["tuned"]["miss"])
    misses = [rule["tuned"]["miss"] for rule in ranked(numbers)]
    assert misses == sorted(misses)


def test_the_sentences_follow_from_the_numbers(out):
    numbers = json.loads((out / "study.json").read_text())
    text = " ".join(reading(numbers))
    assert f"Tuned, {ranked(numbers)[0]['label']} misses its target least" in text
    for rule in numbers["rules"]:
        rule["first"]["lost"] = 0.0
    numbers["rules"][2]["first"]["lost"] = 0.5
    text = " ".join(reading(numbers))
    assert "by a factor of 2 or more: nuPI (50% of the seeds)." in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "0"], "seeds must be a whole number >= 1, got 0"),
        (["--updates", "10"], "updates must be a whole number >= 60, got 10"),
        (["--target", "nan"], f"target {POSITIVE}, got nan"),
        (["--target", "1e300"], "target must be a KL that the plant can be held at, between"),
        (["--target", "1e-300"], "target must be a KL that the plant can be held at, between"),
        (["--jump", "-1"], f"jump {POSITIVE}, got -1.0"),
        (["--fit", "nowhere"], "not the folder of a run of python -m lab compare"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_options_are_one_sentence(tmp_path, capsys, arguments, said):
    assert main(["study", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_earlier_study_is_refused_untouched_and_kept_with_force(tmp_path, capsys):
    short = ["study", "--seeds", "1", "--updates", "60", "--no-plot", "--out", str(tmp_path)]
    (tmp_path / "notes.txt").write_text("mine")
    assert main(short) == 0
    earlier = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main([*short, "--seed", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"python -m lab study: error: {tmp_path} holds an earlier study (study.md, study.json): "
        f"move it to {tmp_path / 'earlier'} (--force), or choose another folder\n"
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == earlier
    assert main([*short, "--seed", "1", "--force"]) == 0
    (place,) = (tmp_path / "earlier").iterdir()
    assert f"The earlier study is kept in {place}\n" in capsys.readouterr().out
    kept = {path.name: path.read_bytes() for path in place.iterdir()}
    assert kept == {name: data for name, data in earlier.items() if name != "notes.txt"}
    assert (tmp_path / "study.json").read_bytes() != kept["study.json"]
