"""The verl, OpenRLHF and trl of requirements.txt are what the tests here import."""

import pytest
from pins import check_import, check_version, pins


@pytest.mark.parametrize("name", pins("verl"))
def test_the_pinned_version_is_installed(name):
    check_version("verl", name)


@pytest.mark.parametrize(
    "name",
    [
        "hydra",  # verl imports it where it is used: to make its configurations
        "openrlhf.models.loss",
        "openrlhf.models.utils",
        "openrlhf.trainer.ppo_utils.experience_maker",
        "openrlhf.trainer.ppo_utils.kl_controller",
        "openrlhf.trainer.ray.ppo_actor",
        "trl.trainer.ppo_trainer",
        "verl",
        "verl.trainer.distillation.losses",
        "verl.trainer.ppo.core_algos",
        "verl.trainer.ppo.ray_trainer",
        "verl.workers.utils.losses",
    ],
)
def test_the_module_imports(name):
    check_import("verl", name)


def test_trl_is_the_last_with_the_old_ppo_trainer():
    from trl.trainer.ppo_trainer import PPOTrainer

    assert callable(PPOTrainer._kl_penalty)


def test_nobody_takes_a_stand_in_for_the_package():
    import accelerate.utils
    import transformers.utils
    from transformers.integrations import is_deepspeed_available

    assert not is_deepspeed_available()
    assert not accelerate.utils.is_deepspeed_available()
    assert not transformers.utils.is_flash_attn_2_available()
