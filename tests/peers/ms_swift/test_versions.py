"""The ms-swift of requirements.txt is what the tests here import."""

import pytest
from pins import check_import, check_version, pins


@pytest.mark.parametrize("name", pins("ms_swift"))
def test_the_pinned_version_is_installed(name):
    check_version("ms_swift", name)


@pytest.mark.parametrize(
    "name",
    [
        "swift.megatron.trainers.grpo_trainer",
        "swift.rlhf_trainers.gkd_trainer",
        "swift.rlhf_trainers.grpo_trainer",
        "trl",
    ],
)
def test_the_module_imports(name):
    check_import("ms_swift", name)
