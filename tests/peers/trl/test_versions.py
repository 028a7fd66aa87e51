"""The trl, transformers and liger-kernel of requirements.txt are what the tests here import."""

import pytest
from pins import check_import, check_version, pins


@pytest.mark.parametrize("name", pins("trl"))
def test_the_pinned_version_is_installed(name):
    check_version("trl", name)


@pytest.mark.parametrize(
    "name", ["trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "liger_kernel.chunked_loss"]
)
def test_the_module_imports(name):
    check_import("trl", name)
