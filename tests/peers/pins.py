"""What a folder's requirements.txt promises, and that it is what Python imports."""

import importlib
from importlib import metadata
from pathlib import Path

PEERS = Path(__file__).parent
BUILD = PEERS.parents[1] / "build" / "peers"


def pins(peer):
    """The names and versions of ``tests/peers/<peer>/requirements.txt``."""
    lines = (PEERS / peer / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def check_version(peer, name):
    """The pinned version of ``name``, and no other, is in the folder of ``make test-peers``."""
    # Of all of sys.path it would be ray's: at its import it puts copies of its own in front.
    found = metadata.distributions(name=name, path=[str(BUILD / peer / "site-packages")])
    assert [each.version for each in found] == [pins(peer)[name]]


def check_import(peer, name):
    """The module ``name`` imports, and from there."""
    module = importlib.import_module(name)
    assert Path(module.__file__).is_relative_to(BUILD / peer / "site-packages")
