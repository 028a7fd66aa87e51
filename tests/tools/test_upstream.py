"""The report in docs/upstream: its reproduction shows the leak, and its fix ends it."""

import re
import sys
from pathlib import Path

import commands
import pytest
import readme
import torch

HEADER = "torch/csrc/stable/stableivalue_conversions.h"
LINE = re.compile(r"(\d+) characters: ([\d.]+) bytes a call")


def lost(text):
    """(characters, bytes lost a call) of each round."""
    return [(int(size), float(count)) for size, count in LINE.findall(text)]


def reproduced(folder, *flags):
    """The output of the reproduction, compiled with further flags."""
    (folder / "leak.cpp").write_text(readme.code("leak-cpp"))
    program = folder / "leak.py"
    own = "extra_cflags=["
    source = readme.code("leak-python")
    assert own in source
    program.write_text(source.replace(own, own + "".join(f"{flag!r}, " for flag in flags)))
    return commands.run(
        sys.executable,
        program,
        timeout=600,
        folder=folder,
        TORCH_EXTENSIONS_DIR=str(folder / "built"),
        MAX_JOBS="1",
    )


@pytest.mark.exhaustive
def test_the_leak_of_strings_is_as_it_was_reported(tmp_path):
    printed = lost(reproduced(tmp_path))
    expected = lost(readme.code("leak-printed"))
    assert [size for size, _ in printed] == [size for size, _ in expected]
    # The first strings may fill holes that malloc has.
    counts, wanted = ([count for _, count in of[2:]] for of in (printed, expected))
    assert counts == pytest.approx(wanted, rel=0.1)


@pytest.mark.exhaustive
def test_the_suggested_fix_ends_the_leak(tmp_path):
    original = Path(torch.__file__).parent / "include" / HEADER
    mended, count = re.subn(
        r"auto strptr = new std::string.*?return \*strptr;",
        lambda _: readme.code("leak-fix"),
        original.read_text(),
        flags=re.DOTALL,
    )
    assert count == 1
    copy = tmp_path / "headers" / HEADER
    copy.parent.mkdir(parents=True)
    copy.write_text(mended)
    printed = lost(reproduced(tmp_path, f"-I{tmp_path / 'headers'}"))
    assert [count for _, count in printed[1:]] == pytest.approx([0.0] * 5, abs=0.5)
