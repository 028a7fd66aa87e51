"""The part of a grid that ``make test`` runs."""

pytest_plugins = ["pytester"]


SUITE = """
import pytest

@pytest.mark.grid
@pytest.mark.parametrize("c", range(4))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("a", ["x", "y"])
def test_pairs(a, b, c): pass

@pytest.mark.grid(each="a")
@pytest.mark.parametrize("c", range(2))
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("a", ["x", "y"])
def test_pairs_of_each(a, b, c): pass

@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("c", [pytest.param(-1, marks=pytest.mark.exhaustive), *range(4)])
@pytest.mark.parametrize("b", range(4))
def test_values(b, c): pass

def test_plain(): pass
"""


def test_markers_part_a_suite_in_two(pytester):
    pytester.makepyfile(SUITE)
    pytester.makeini("[pytest]\nmarkers =\n    grid\n    exhaustive\n")
    pytester.makeconftest(
        "import grids, pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): grids.mark_exhaustive(items)"
    )
    done = pytester.inline_run("-m", "not exhaustive")
    tests = [report.nodeid.partition("::")[2] for report in done.listoutcomes()[0]]
    counts = {"test_pairs": 16, "test_pairs_of_each": 8, "test_values": 4}
    assert {name: sum(test.startswith(f"{name}[") for test in tests) for name in counts} == counts
    assert "test_plain" in tests
