"""The tests of a folder import the versions that its requirements.txt pins."""

import importlib
import os
from importlib import metadata
from pathlib import Path

import pytest

FOLDER = Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0])
"""The folder that ``make test-peers`` puts first: ``build/peers/trl/site-packages``."""

PEER = FOLDER.parent.name
MODULES = {
    "hub": ["kernels"],
    "ms_swift": [
        "swift.megatron.trainers.grpo_trainer",
        "swift.rlhf_trainers.gkd_trainer",
        "swift.rlhf_trainers.grpo_trainer",
        "trl",
    ],
    "skyrl": ["skyrl.backends.skyrl_train.utils.ppo_utils", "skyrl.train.trainer", "jaxtyping"],
    "trl": ["trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "liger_kernel.chunked_loss"],
    "verl": [
        "hydra",  # verl imports it late, to make its configurations
        "openrlhf.models.loss",
        "openrlhf.trainer.ppo_utils.experience_maker",
        "openrlhf.trainer.ray.ppo_actor",
        "trl.trainer.ppo_trainer",
        "verl.trainer.distillation.losses",
        "verl.trainer.ppo.ray_trainer",
        "verl.workers.utils.losses",
    ],
}


def test_the_pinned_versions_are_installed():
    lines = (Path(__file__).with_name(PEER) / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    # Without ``path`` it finds the copies that ray adds to sys.path.
    found = {
        name: [each.version for each in metadata.distributions(name=name, path=[str(FOLDER)])]
        for name in pins
    }
    assert found == {name: [version] for name, version in pins.items()}


@pytest.mark.parametrize("name", MODULES[PEER])
def test_the_module_imports_from_there(name):
    assert Path(importlib.import_module(name).__file__).is_relative_to(FOLDER)


@pytest.mark.skipif(PEER != "verl", reason="the others have no stand-ins for these packages")
def test_nobody_takes_a_stand_in_for_the_package():
    import accelerate.utils
    import transformers.utils
    from transformers.integrations import is_deepspeed_available

    assert not is_deepspeed_available()
    assert not accelerate.utils.is_deepspeed_available()
    assert not transformers.utils.is_flash_attn_2_available()
