"""Stand-ins for packages that frameworks import at their top and that need a GPU."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

OF_OPENRLHF = ("deepspeed", "flash_attn", "vllm")


class StandIns(MetaPathFinder, Loader):
    """Find each of the packages, with any submodule and any name in it.

    They have no metadata. By that transformers, accelerate and peft see that they are not
    installed, and ``test_versions.py`` checks it.
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
    """Serve the packages to later imports."""
    # Installed packages come first.
    sys.meta_path.append(StandIns(packages))
