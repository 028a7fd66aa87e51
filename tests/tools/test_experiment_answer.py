"""The answer of a run, and what it says to copy."""

import pytest
import torch
from made_up_run import rows

import klfast
from lab.reading import answer, controller_text, estimator_text, recipe
from lab.settings import ARMS, Settings, on_policy
from lab.summary import summarise
from lab.train import ESTIMATOR, estimator

# The last third of 6 steps is 2.
NONE = rows("none", [0, 20, 40, 60, 80, 100], coefficient=0.0, reward=0.9)
LOW = rows("fixed-low", [0, 4, 8, 10, 11, 13], coefficient=0.012, reward=0.5)
HIGH = rows("fixed-high", [0, 1, 2, 3, 3.1, 2.9], coefficient=0.05, reward=0.2)
GOOD = rows("adaptive", [0, 5, 7, 6, 6.1, 6.3], reward=[0.1, 0.1, 0.2, 0.3, 0.3, 0.32])
WORSE = rows("exponential", [0, 5, 7, 6, 6.9, 7.0], reward=0.35)


def of(*arms, **changes):
    records = [row for arm in arms for row in arm]
    names = tuple(dict.fromkeys(row["arm"] for row in records))
    settings = Settings(**{"steps": 6, "arms": names, "target": 6.0, **changes})
    found = answer(summarise(records, settings), settings)
    return found, " ".join([found.line, *found.notes])


def test_the_answer_is_the_arm_that_held_best_with_its_reward_and_the_closest_fixed_coefficient():
    found, text = of(NONE, LOW, HIGH, WORSE, GOOD)
    assert found.line == (
        "Adaptive (Ziegler) held the target best: a KL of 6.2 ± 0.141 nats per sequence "
        "(3% above the target of 6) with a reward of 31.0%; the fixed coefficient 0.05 got 20.0% "
        "at 3 nats (50% below the target of 6)."
    )
    assert (found.arm, found.held) == ("adaptive", True)
    assert "The next best was further off by more than the noise" in text
    assert "the fixed coefficient, of 2 the one closest to the target, got less reward" in text
    assert "reward at less KL." in text
    assert "one run with one seed (0), its numbers the means of the last 2 steps of 6, ±" in text


def test_a_tie_is_said():
    noisy = rows("nupi", [0, 5, 7, 6, 5.5, 7.1], reward=0.4)
    found, text = of(GOOD, noisy, WORSE)
    assert found.arm == "adaptive"
    assert (
        "held the target best, level within the noise with nuPI: a KL of 6.2 ± 0.141" in found.line
    )
    assert "Not to be told apart from it by noise: the arm “nuPI” (6.3 nats, 40.0%)." in text
    assert "exponential" not in text
    same = of(GOOD, rows("dual", [0, 5, 7, 6, 6.1, 6.3], reward=0.31))[1]
    assert "the arm “dual ascent” (6.2 nats" in same


def test_a_single_step_cannot_rank():
    text = of(GOOD[:3], WORSE[:3], steps=3, target=7.0)[1]
    assert "The means are of a single step, which cannot tell the arms that steer apart." in text
    fixed = of(GOOD[:3], LOW[:3], steps=3, target=7.0)[1]
    assert "got as much reward (within the noise) at as much KL (within the noise)" in fixed


def test_an_arm_that_never_reached_the_target_did_not_hold_it():
    far = rows("adaptive", [0, 20, 19, 18, 17, 16], reward=0.7)
    found, text = of(far, HIGH)
    assert found.line.startswith("Adaptive (Ziegler) came closest, and did not hold it: a KL of 16")
    assert (found.arm, found.held) == ("adaptive", False)
    assert "within 20% of the target of 6, and no step of any came there." in text
    passing = rows("adaptive", [0, 6, 9, 9, 9, 9], reward=0.7)
    text = of(passing, HIGH)[1]
    assert "though steps of the arm “adaptive (Ziegler)” came there" in text


def test_a_fixed_coefficient_that_did_better_is_said_to():
    lucky = rows("fixed-low", [0, 5, 5, 5.9, 5.9, 6.0], coefficient=0.012, reward=0.6)
    text = of(GOOD, lucky)[1]
    assert "the fixed coefficient, the only one, got more reward at less KL; it held the" in text
    assert "; it held the target too, though nothing steered it there." in text
    assert "the fixed coefficient 0.012 got 60.0% at 5.95 nats (1% below" in text


def test_a_run_without_a_fixed_arm_or_without_a_steering_one():
    assert "No arm with a fixed coefficient ran beside it." in of(GOOD, NONE)[1]
    assert "No other arm of this run steers." in of(GOOD, NONE)[1]
    found, _ = of(NONE, LOW, HIGH)
    assert found.line.startswith("No arm of this run steers. The fixed coefficient 0.05 came close")
    assert (found.arm, found.held) == ("fixed-high", False)
    found, _ = of(NONE)
    assert (found.line, found.arm) == (
        "No arm of this run has a penalty: there is no answer in it.",
        None,
    )


def test_an_unfinished_run_has_no_answer():
    assert of(GOOD, WORSE[:4])[0].line == "No answer yet: 1 arm has not made all 6 steps."
    found, _ = of(GOOD, arms=("adaptive", "dual", "nupi"))
    assert found.line == "No answer yet: 2 arms have not made all 6 steps."
    assert found.arm is None
    assert of(arms=("none",))[0].arm is None


# What to copy

UNUSUAL = Settings(target=3.5, init_coef=0.07, horizon=123.0, gain=0.3, low_coef=0.02, clip=2.5)
of_an_arm = pytest.mark.parametrize("name", on_policy(ARMS))


@of_an_arm
@pytest.mark.parametrize("settings", [Settings(), UNUSUAL], ids=["defaults", "unusual"])
def test_the_controller_to_copy_is_that_of_the_run(name, settings):
    ran = ARMS[name].controller(settings)
    copied = eval(controller_text(ran), {"klfast": klfast})
    assert type(copied) is type(ran)
    but_whether_given = [vars(one) | {"_default_bound": None} for one in (copied, ran)]
    assert but_whether_given[0] == but_whether_given[1]
    for kl in (0.1, 5.0, 50.0, 6.0):
        ran.update(kl, settings.batch)
        copied.update(kl, settings.batch)
    assert copied.state_dict() == ran.state_dict()


@pytest.mark.parametrize(
    "of",
    [
        ESTIMATOR,
        estimator(UNUSUAL),
        klfast.Estimator("k1"),
        klfast.Estimator("k3", "none", "detached", 2.0, (-1.0, 2.0), 3.0, clip_weighted=True),
    ],
    ids=["run's", "clipped", "k1", "all"],
)
def test_the_estimator_to_copy_is_that_of_the_run(of):
    assert eval(estimator_text(of), {"klfast": klfast}) == of


@of_an_arm
def test_what_to_copy_runs_and_takes_the_runs_step(name):
    logprobs = -torch.rand(4, 9, dtype=torch.float64)
    given = {
        "logprobs": logprobs.clone().requires_grad_(),
        "ref_logprobs": logprobs - 0.3 * torch.randn(4, 9, dtype=torch.float64),
        "mask": torch.arange(9) < torch.tensor([[9], [4], [1], [6]]),
        "policy_loss": 0.0,
    }
    exec(recipe(name, UNUSUAL), given)
    ran = ARMS[name].controller(UNUSUAL)
    expected, stats = klfast.kl_penalty(
        given["logprobs"],
        given["ref_logprobs"],
        given["mask"],
        estimator=estimator(UNUSUAL),
        reduction="seq-mean-token-sum",
        coef=ran.value,
        return_stats=True,
    )
    ran.update(stats)
    assert given["loss"] == expected
    assert given["controller"].value == ran.value
