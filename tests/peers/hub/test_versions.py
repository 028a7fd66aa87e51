"""The ``kernels`` of requirements.txt is what the tests here import."""

import pytest
from pins import check_import, check_version, pins


@pytest.mark.parametrize("name", pins("hub"))
def test_the_pinned_version_is_installed(name):
    check_version("hub", name)


def test_it_is_what_python_imports():
    check_import("hub", "kernels")
