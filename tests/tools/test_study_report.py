"""docs/controllers.md has the numbers of the recorded study."""

import json
from pathlib import Path

import torch

from lab.study import table as report
from lab.study.plant import fit, load_records

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_results():
    page = (ROOT / "docs" / "controllers.md").read_text()
    assert report.filled(page) == page
    assert all(block in page for block in report.blocks().values())


def test_the_plant_of_the_page_is_the_fit_to_the_recorded_runs(set_num_threads):
    set_num_threads(1)
    records = load_records()
    assert records.kl.shape[1] == 100
    assert torch.equal(records.kl[:, 0], torch.zeros(len(records.arms), dtype=torch.float64))

    expected = json.loads((ROOT / "benchmarks" / "results" / "study.json").read_text())["plant"]
    for name, number in vars(fit(records)).items():
        assert abs(number - expected[name]) <= 1e-3 * abs(expected[name]) + 1e-6, name
