"""A controller of a user's own, which keeps to ``klfast.KLController`` and inherits nothing."""

import json

import pytest
import readme
import torch

import klfast
from klfast import GroupedKLController, KLController, KLLog, KLPenalty

Halving = readme.run("klfast.controllers.grouped.KLController")["Halving"]


class WithoutState:
    value = 0.5

    def update(self, current):
        pass


BASE = torch.full((2, 3), -4.0)


def test_it_keeps_to_the_protocol():
    assert isinstance(Halving(0.5, 6.0), KLController)
    assert isinstance(klfast.NuPIKLController(0.5, 6.0), KLController)
    assert not isinstance(WithoutState(), KLController)


def test_a_penalty_takes_it_and_restores_it():
    penalty = KLPenalty(controller=Halving(0.5, 6.0), unit="token")
    loss = penalty(BASE + 0.1, BASE)
    torch.testing.assert_close(
        loss, klfast.kl_penalty(BASE + 0.1, BASE, estimator="k3+", reduction="token-mean", coef=0.5)
    )
    assert penalty.step()["kl/coef"] == 0.25
    assert "kl/skipped" not in penalty.state_dict()
    state = json.loads(json.dumps(penalty.state_dict()))
    again = KLPenalty(controller=Halving(1.0, 6.0))
    again.load_state_dict(state)
    assert again.coef == 0.25


def test_functions_take_it_as_a_coefficient():
    own = Halving(0.25, 6.0)
    kl = klfast.kl_penalty(BASE + 0.1, BASE, coef=own)
    assert kl.equal(klfast.kl_penalty(BASE + 0.1, BASE, coef=0.25))
    rewards = klfast.kl_rewards(torch.ones(2), BASE + 0.1, BASE, kl_coef=own)
    assert rewards.equal(klfast.kl_rewards(torch.ones(2), BASE + 0.1, BASE, kl_coef=0.25))


def test_a_log_writes_its_coefficient():
    seen = []

    class Run:
        def log(self, values, step):
            seen.append(values)

    written = KLLog(Run())(0, controller=Halving(0.25, 6.0))
    assert written == seen[0] == {"kl/coef": 0.25}


def test_groups_are_made_of_it():
    grouped = GroupedKLController(Halving, 0.5, {"chat": 6.0, "maths": 1.0})
    _, stats = klfast.kl_penalty(BASE + 2.0, BASE, estimator="k1", return_stats=True)
    assert grouped.update({"chat": stats, "maths": stats}) == {"chat": 0.25, "maths": 0.5}
    assert grouped.update({"chat": stats})["chat"] == 0.125
    assert grouped.skipped == {"chat": 0, "maths": 0}
    again = GroupedKLController(Halving, 1.0, {"chat": 6.0, "maths": 1.0})
    again.load_state_dict(json.loads(json.dumps(grouped.state_dict())))
    assert again.value == grouped.value


@pytest.mark.parametrize("given", [WithoutState(), Halving, "0.1", [0.1]])
def test_what_lacks_a_member_is_refused(given):
    with pytest.raises(TypeError, match="controller must be a controller with one coefficient"):
        KLPenalty(controller=given)


def test_a_group_without_the_members_is_refused():
    with pytest.raises(
        TypeError, match=r"controller must make objects with value, update, .*got Wi"
    ):
        GroupedKLController(lambda *_: WithoutState(), 0.5, {"chat": 6.0})
    with pytest.raises(TypeError, match="controller must be the class of a controller"):
        GroupedKLController(klfast.FixedKLController, 0.5, {"chat": 6.0})
