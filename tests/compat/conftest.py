"""Fixtures of the tests of frameworks' functions."""

import pytest

from klfast import backends


@pytest.fixture(params=["native", "reference"])
def auto(request, monkeypatch):
    """The backend that "auto" takes, as the frameworks have no argument for it."""
    monkeypatch.setattr(backends, "_told", {"cpu"})  # that the reference is slow
    rows = dict(backends.BACKENDS)
    for name in rows.keys() - {request.param}:
        del backends.BACKENDS[name]
    yield
    backends.BACKENDS.clear()
    backends.BACKENDS.update(rows)  # in the order that "auto" tries them
