"""Blocks imports of klfast and the network, in processes of the Hub kernel.

Import it for its effect, or use it as a pytest plugin: ``pytest -p hub_alone``.
"""

import socket
import sys


class _NoKlfast:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "klfast":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


def _no_network(self, address):
    raise OSError(f"the network is blocked: {address}")


sys.meta_path.insert(0, _NoKlfast())
socket.socket.connect = _no_network
