"""Workflows and the release checklist run existing commands, and have no needless permissions."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHECKLIST = ROOT / "release" / "README.md"
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
MORE = {
    ("docs.yml", "publish"): {"pages": "write", "id-token": "write"},
    ("wheels.yml", "publish"): {"id-token": "write"},
    ("wheels.yml", "page"): {"contents": "write", "id-token": "write", "attestations": "write"},
}
"""Jobs that may do more than read the repository."""

each = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def jobs_of(path):
    return yaml.safe_load(path.read_text())["jobs"]


def steps_of(path):
    return [step for job in jobs_of(path).values() for step in job["steps"]]


def commands_of(path):
    """Shell commands of a workflow, or of the checklist's blocks."""
    if path.suffix == ".yml":
        return "\n".join(step["run"] for step in steps_of(path) if "run" in step)
    return "\n".join(re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL))


@each
def test_a_job_may_do_what_it_must(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert job.get("permissions", {}) == MORE.get((path.name, name), {})
        assert job["timeout-minutes"] <= 360


@each
def test_actions_have_a_version(path):
    for step in steps_of(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+(\.\d+)*|release/v\d+)", step["uses"])
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@each
def test_there_are_no_secrets_and_no_addresses(path):
    text = path.read_text()
    assert "secrets" not in text
    assert "://" not in text


@each
def test_commands_take_no_text_from_outside(path):
    """A title or a branch could end the command and begin another."""
    assert "${{" not in commands_of(path)


@pytest.mark.parametrize("path", [*WORKFLOWS, CHECKLIST], ids=lambda path: path.name)
def test_commands_exist(path):
    commands = commands_of(path)
    assert commands
    subprocess.run(["bash", "-n"], input=commands, text=True, check=True)
    assert set(re.findall(r"\bmake ([\w-]+)", commands)) <= TARGETS
    for script in re.findall(r"(?<![\w/])((?:release|\.ci|benchmarks|tests)/[\w./-]+)", commands):
        assert (ROOT / script).exists(), script


def test_what_must_pass_runs_in_every_change():
    assert ".ci/run" in commands_of(ROOT / ".github" / "workflows" / "ci.yml").splitlines()
    run = (ROOT / ".ci" / "run").read_text()
    for target in ("test", "test-rest", "docs", "wheel"):
        assert re.search(rf"\bmake {target}( |$)", run, re.MULTILINE)


def test_a_release_is_published_by_a_tag_from_its_environment():
    publish = jobs_of(ROOT / ".github" / "workflows" / "wheels.yml")["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert publish["environment"] == "release"
    assert publish["needs"] == ["sdist", "wheels"]
    (step,) = [step for step in publish["steps"] if "publish" in step.get("uses", "")]
    assert step["with"] == {"attestations": True}
