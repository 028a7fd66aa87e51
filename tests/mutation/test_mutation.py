"""Every planted fault has its place and its tests. The script finds what catches one."""

import ast
import json
import runpy
from collections import Counter
from pathlib import Path

import pytest

RUN = runpy.run_path(str(Path(__file__).with_name("run.py")))
FAULTS = {fault.name: fault for fault in RUN["read_faults"]()}


def test_every_fault_has_one_place():
    places = {name: RUN["place_of"](fault) for name, fault in FAULTS.items()}
    assert [name for name, place in places.items() if place is None] == []
    for file, old, new in places.values():
        assert old != new
        if file.endswith(".py"):
            ast.parse((RUN["ROOT"] / file).read_text().replace(old, new))


def test_every_fault_names_tests_that_are_there():
    for fault in FAULTS.values():
        named = [test for test in fault.tests if test.startswith("tests/")]  # the rest are options
        assert named, fault.name
        for path, _, name in (test.partition("::") for test in named):
            text = (RUN["ROOT"] / path).read_text()
            assert (f"def {name}(" if name else "def test_") in text, (fault.name, path, name)


def test_the_record_has_every_fault():
    assert [*json.loads(RUN["CAUGHT"].read_text())] == [*FAULTS]
    assert Counter(f.kind for f in FAULTS.values()) >= Counter(python=30, cpu=12, cuda=12, triton=6)


def test_a_fault_is_found_where_its_code_has_moved():
    fault = FAULTS["nan-logged-as-0"]
    moved = fault._replace(file="klfast/moved.py")
    assert RUN["place_of"](moved) == RUN["place_of"](fault)
    assert RUN["place_of"](moved._replace(spellings=(("import torch", ""),))) is None


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_planted_fault_is_caught(tmp_path):
    fault = FAULTS["nan-logged-as-0"]
    caught = RUN["run_kind"]("python", {fault: RUN["place_of"](fault)}, [fault], tmp_path)
    assert caught == {fault.name: fault.tests[0]}
