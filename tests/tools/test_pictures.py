"""The scripts that draw the pictures of docs/, at toy size."""

import subprocess
import sys

import pytest
import readme

SCRIPTS = {"estimators": [], "directions": ["--steps", "5"]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_picture_is_drawn(name, tmp_path):
    picture = tmp_path / "picture.png"
    command = [sys.executable, f"examples/{name}.py", *SCRIPTS[name], "--out", str(picture)]
    done = subprocess.run(command, cwd=readme.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (readme.ROOT / "docs" / f"{name}.png").exists()
