"""Stand-ins for what OpenRLHF imports at its top and no CPU has."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

STAND_INS = ("deepspeed", "flash_attn", "vllm")


class StandIns(MetaPathFinder, Loader):
    """Finds each of these packages, with any submodule and any name in it.

    They have no metadata, and by that transformers, accelerate and peft know that they are not
    installed. ``test_versions.py`` asks them.
    """

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in STAND_INS:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(name=spec.name)

    def exec_module(self, module):
        pass


def install():
    """Serve them to whoever imports them from now on."""
    sys.meta_path.append(StandIns())  # after all others: a package that is there comes first
