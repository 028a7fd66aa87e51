"""The release under test is the requested one. verl's and OpenRLHF's imports work."""

import os
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[1]
FOLDER = Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0]).parent
"""The folder that ``make test-peers`` puts first: ``verl-0.7.1``."""

NAME, _, VERSION = FOLDER.name.partition("-")

sys.path[:0] = [str(PEERS / "verl"), str(PEERS / "trl")]

if NAME != "trl":
    import stand_ins

    stand_ins.install(*stand_ins.OF_OPENRLHF)


@pytest.fixture(scope="session")
def release():
    """(its folder, name, version)."""
    lines = (PEERS / "older" / "releases.txt").read_text().splitlines()
    assert f"{NAME}=={VERSION}" in lines
    return FOLDER, NAME, VERSION


@pytest.fixture(scope="session")
def whole_patch(release):
    """The report of a patch. It names the version."""
    import klfast

    with klfast.compat.patch(NAME) as made:
        assert str(made).startswith(f"klfast in {NAME} {VERSION}\n")
        return made
