"""The SkyRL of requirements.txt is what the tests here import."""

import pytest
from pins import check_import, check_version, pins


@pytest.mark.parametrize("name", pins("skyrl"))
def test_the_pinned_version_is_installed(name):
    check_version("skyrl", name)


@pytest.mark.parametrize(
    "name", ["skyrl.backends.skyrl_train.utils.ppo_utils", "skyrl.train.trainer", "jaxtyping"]
)
def test_the_module_imports(name):
    check_import("skyrl", name)
