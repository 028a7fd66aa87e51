"""The kernel, written once."""

import hub_kernel
import pytest


@pytest.fixture(scope="session")
def kernel(tmp_path_factory):
    """The folder of the kernel."""
    folder = tmp_path_factory.mktemp("hub") / "klfast"
    hub_kernel.generate.write(folder)
    return folder
