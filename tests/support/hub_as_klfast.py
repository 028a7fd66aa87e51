"""A pytest plugin: klfast is the kernel, so that klfast's own tests are the kernel's.

``pytest --noconftest -p hub_as_klfast``, with the kernel as ``hub_kernel.run`` gives it. A module
that the kernel has not cannot be imported.
"""

import importlib
import pkgutil
import sys

import grids
import hub_kernel
import kernels
import pytest
import torch

KERNEL = kernels.get_kernel(hub_kernel.REPOSITORY, version=0)

sys.modules["klfast"] = KERNEL
for found in pkgutil.walk_packages(KERNEL.__path__, f"{KERNEL.__name__}."):
    module = importlib.import_module(found.name)
    sys.modules["klfast" + found.name.removeprefix(KERNEL.__name__)] = module


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    grids.mark_exhaustive(items)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
