"""Stand-ins for what frameworks import at their top and no CPU has."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

OF_OPENRLHF = ("deepspeed", "flash_attn", "vllm")


class StandIns(MetaPathFinder, Loader):
    """Finds each of the packages, with any submodule and any name in it.

    They have no metadata, and by that transformers, accelerate and peft know that they are not
    installed. ``test_versions.py`` asks them.
    """

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(name=spec.name)

    def exec_module(self, module):
        pass


def install(*packages):
    """Serve them to whoever imports them from now on."""
    # After all others: a package that is there comes first.
    sys.meta_path.append(StandIns(packages))
