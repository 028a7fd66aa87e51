"""examples/ of verl and OpenRLHF, and the commands of their pages, with both installed."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import hydra
import programs
import pytest
import readme
import verl
from verl.workers.utils import losses

import klfast

LINE = re.compile(r"([\d.]+) nats apart: (\w+) off by (.*)")


def test_patch():
    before = losses.kl_penalty
    readme.run("patch")
    assert losses.kl_penalty is not before
    klfast.compat.unpatch("verl")
    assert losses.kl_penalty is before


@pytest.mark.parametrize(
    ("program", "framework"), [("verl_patch.py", "verl"), ("openrlhf_patch.py", "OpenRLHF")]
)
def test_the_patched_framework_has_its_own_numbers_and_more_digits(program, framework, capsys):
    runpy.run_path(str(programs.FOLDER / program), run_name="__main__")
    rows = [LINE.fullmatch(line).groups() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [
        (spread, name) for spread in ("0.3", "0.001") for name in (framework, "klfast")
    ]
    far, far_patched, near, near_patched = (
        [float(number) for number in re.findall(r"\d\.\de[+-]\d+", row[2])] for row in rows
    )
    assert len(near) == len(near_patched) == 3
    assert max(far) < 1e-6
    assert max(far_patched + near_patched) < 5e-7
    assert 0.02 < near[2] < 0.2


def test_the_hook_of_ray_waits_for_verl_and_replaces_what_the_page_lists():
    """The process has not imported verl before."""
    program = """
import sys
from klfast.compat.verl import setup_worker
setup_worker()
setup_worker()
assert "verl" not in sys.modules
from verl.workers.utils.losses import kl_penalty
setup_worker()
print(kl_penalty.__code__.co_filename, file=sys.stderr)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert Path(klfast.__file__).parent in Path(ran.stderr.splitlines()[-1]).parents
    replaced = re.compile(r"^  replaced  (\S+)", re.MULTILINE)
    assert replaced.findall(ran.stdout) == replaced.findall(readme.code("patched-verl"))


def arguments(block, program):
    """What a page's command passes to its program."""
    words = shlex.split(readme.code(block).replace("\\\n", ""))
    return words[words.index(program) + 1 :]


def test_verls_command_has_verls_options():
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose("ppo_trainer", arguments("verl-ray", "verl.trainer.main_ppo"))
    assert config.actor_rollout_ref.actor.kl_loss_type == "k3+"
    assert config.actor_rollout_ref.actor.use_kl_loss


def test_openrlhfs_command_has_openrlhfs_options(monkeypatch):
    """The parser and its checks are in the program; the training that would follow is stopped."""
    given = arguments("openrlhf-command", "openrlhf.cli.train_ppo_ray")
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", *given])
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("openrlhf.utils.get_strategy", stop)
    with pytest.raises(StopIteration) as stopped:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    args = stopped.value.value
    assert (args.algo.kl.use_loss, args.algo.kl.estimator) == (True, "k3")
    gpus = args.actor.num_nodes * args.actor.num_gpus_per_node
    assert gpus == args.vllm.num_engines * args.vllm.tensor_parallel_size  # train_ppo_ray asks for


def stop(args):
    raise StopIteration(args)
