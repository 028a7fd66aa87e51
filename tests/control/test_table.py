"""One table of controllers, which all lists of them are made from or held to."""

import readme

import klfast
from klfast import TargetController
from klfast.controllers import CONTROLLERS
from lab.settings import ARMS


def kinds_below(cls):
    below = cls.__subclasses__()
    return {*below}.union(*map(kinds_below, below))


def test_every_controller_with_a_target_is_in_the_table():
    own = {cls for cls in kinds_below(TargetController) if cls.__module__.startswith("klfast.con")}
    assert own | {klfast.ScheduledKLController} == {*CONTROLLERS.values()}


def test_every_controller_is_public_and_in_the_page_s_table():
    page = (readme.ROOT / "docs" / "control.md").read_text()
    for cls in CONTROLLERS.values():
        assert getattr(klfast, cls.__name__) is cls
        assert f"\n| `{cls.__name__}(" in page


def test_an_arm_that_steers_has_the_name_of_its_controller():
    assert {name for name, arm in ARMS.items() if arm.steers} <= CONTROLLERS.keys()
