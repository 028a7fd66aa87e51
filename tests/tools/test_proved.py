"""The cases that stand in for a GPU are counted from reports of tests alone."""

import json

import pytest

from benchmarks import proved

CASES = """
<testcase classname="tests.penalty.test_masking" name="test_masked[native-emulated-fp32]"/>
<testcase classname="tests.penalty.test_masking" name="test_masked[native-fp32]"/>
<testcase classname="tests.penalty.test_masking" name="test_gone[native-emulated]">
  <skipped/></testcase>
<testcase classname="tests.gpu.test_triton_interpreted" name="test_kernels[penalty]">
  <properties><property name="interpreted" value="41"/></properties></testcase>
<testcase classname="tests.gpu.test_guarded_memory" name="test_every[native]">
  <properties><property name="guarded" value="2000"/></properties></testcase>
<testcase classname="tests.gpu.test_guarded_memory" name="test_every[native-emulated]">
  <properties><property name="guarded" value="2100"/></properties></testcase>
<testcase classname="tests.gpu.test_launches" name="test_a"/>
<testcase classname="tests.gpu.test_cuda_build" name="test_a"/>
<testcase classname="tests.gpu.test_cuda_build" name="test_b"/>
<testcase classname="tests.gpu.test_triton_compiles" name="test_a"/>
"""
ELSEWHERE = '<testcase classname="tests.tools.test_a" name="test_c"><failure/></testcase>'
COUNTS = {
    "emulator": 2,
    "interpreter": 41,
    "guarded": 2100,
    "launches": 1,
    "compiled": 2,
    "compiled Triton": 1,
}


@pytest.fixture
def report(tmp_path):
    def write(cases):
        path = tmp_path / "report.xml"
        path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        return path

    return write


def test_what_passed_is_counted(report, tmp_path):
    out = tmp_path / "proved.json"
    assert proved.main([str(report(CASES + ELSEWHERE)), "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["cases"] == COUNTS


def test_every_part_of_a_run_on_ptx_is_in_one_line():
    ptx = json.loads((proved.RESULTS / "ptx-coverage-sm90.json").read_text())
    lines = proved.ptx_lines(ptx)
    assert all(count > 0 for _, count, _ in lines)
    assert sum(count for _, count, _ in lines) == ptx["passed"] == ptx["cases"]
