"""The study of controllers: its command, files and page."""

import json

import pytest

from lab.__main__ import main
from lab.study import table as report
from lab.study.plant import fit, load_records
from lab.study.simulate import CANDIDATES
from lab.study.table import ranked, table


@pytest.fixture(autouse=True)
def _one_thread(set_num_threads):
    set_num_threads(1)


@pytest.mark.exhaustive
def test_the_command_writes_numbers_a_table_and_a_picture(tmp_path):
    out = tmp_path / "out"
    assert main(["study", "--seeds", "4", "--updates", "60", "--out", str(out)]) == 0
    numbers = json.loads((out / "study.json").read_text())
    assert {rule["name"] for rule in numbers["rules"]} == {c.name for c in CANDIDATES}
    assert (out / "study.md").read_text() == f"{table(numbers)}\n"
    assert (out / "study.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in out.iterdir()} == {"study.json", "study.md", "study.png"}
    for rule in numbers["rules"]:
        # the search includes the first gains
        assert rule["tuned"]["miss"] <= rule["first"]["miss"] + 1e-12
    misses = [rule["tuned"]["miss"] for rule in ranked(numbers)]
    assert misses == sorted(misses)


def test_the_page_has_the_results():
    page = report.PAGE.read_text()
    assert report.filled(page) == page
    assert all(block in page for block in report.blocks().values())


@pytest.mark.exhaustive
def test_the_plant_of_the_page_is_the_fit_to_the_recorded_runs():
    expected = json.loads(report.RESULTS.read_text())["plant"]
    for name, number in vars(fit(load_records())).items():
        assert abs(number - expected[name]) <= 1e-3 * abs(expected[name]) + 1e-6, name
