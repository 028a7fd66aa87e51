"""The examples of verl and OpenRLHF, and docs/drop_in.md's patch, with both installed."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import programs
import pytest
import readme
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
assert "verl" not in sys.modules
from verl.workers.utils.losses import kl_penalty
print(kl_penalty.__code__.co_filename, file=sys.stderr)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert Path(klfast.__file__).parent in Path(ran.stderr.splitlines()[-1]).parents
    replaced = re.compile(r"^  replaced  (\S+)", re.MULTILINE)
    assert replaced.findall(ran.stdout) == replaced.findall(readme.code("patched-verl"))
