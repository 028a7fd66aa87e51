"""The hunt: counts by category, a short form, and the table at the end."""

import json
import zlib
from pathlib import Path

import pytest
from hunt import COUNTS, Hunt, table

COUNTED = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--short", action="store_true", help="a seeded sample of the cases")


def pytest_configure(config):
    config.stash[COUNTED] = {}
    config.addinivalue_line("markers", "whole: left out of the short form")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--short"):
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("whole")])
        items[:] = [item for item in items if not item.get_closest_marker("whole")]


@pytest.fixture
def hunt(request):
    """The test's checks, under the category that its file names."""
    seed = zlib.crc32(request.node.name.encode())
    return Hunt(seed, whole=not request.config.getoption("--short"))


@pytest.fixture(autouse=True)
def _few_threads(set_num_threads):
    """Tensors are small, and pytest has a process for each core."""
    set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    hunt = item.funcargs["hunt"]
    counts = item.config.stash[COUNTED].setdefault(item.module.CATEGORY, [0, 0])
    counts[0] += hunt.checks
    counts[1] += hunt.bad_inputs
    hunt.conclude()
    return result


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # one of pytest-xdist's processes
        session.config.workeroutput["counted"] = session.config.stash[COUNTED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    counted = node.config.stash[COUNTED]
    for category, (checks, bad) in getattr(node, "workeroutput", {}).get("counted", {}).items():
        before = counted.get(category, [0, 0])
        counted[category] = [before[0] + checks, before[1] + bad]


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    counted = dict(sorted(config.stash[COUNTED].items()))
    terminalreporter.section("checks run and bad inputs tried")
    for line in table(counted):
        terminalreporter.write_line(line)
    if exitstatus == 0 and is_whole(config):
        COUNTS.write_text(json.dumps(counted, indent=2) + "\n")
        terminalreporter.write_line(
            f"written to {COUNTS}; python tests/break/hunt.py puts it in CONTRIBUTING.md"
        )


def is_whole(config):
    """Whether every test was to run, on every case."""
    option = config.option
    part = option.short or option.keyword or option.markexpr or option.deselect
    return not (part or option.collectonly) and (
        list(map(Path, option.file_or_dir)) == [Path("tests/break")]
    )
