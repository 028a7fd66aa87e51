"""The drawing of the reductions shows the numbers that klfast computes."""

import re

import pytest
import readme
import torch

import klfast
from klfast.types.reduction import REDUCTIONS

DRAWING = (readme.ROOT / "docs" / "drawings" / "reductions.svg").read_text()
VALUES = torch.tensor([[1.0, 2.0, 6.0, torch.nan], [4.0, 6.0, torch.nan, torch.nan]])
SHOWN = re.findall(
    r'class="code"[^>]*>([\w-]+)</text>(?:\n<text.*){2}\n<text[^>]*>(.*)</text>', DRAWING
)


def test_it_has_every_reduction():
    assert [name for name, _ in SHOWN] == [*REDUCTIONS]


@pytest.mark.parametrize(("name", "shown"), SHOWN)
def test_its_numbers_are_those_of_both_layouts(name, shown):
    numbers = [float(number) for number in re.findall(r"[\d.]+", shown)]
    padded = klfast.reduce(VALUES, ~VALUES.isnan(), reduction=name)
    edges = torch.tensor([0, 3, 5])
    packed = klfast.reduce(VALUES[~VALUES.isnan()], reduction=name, cu_seqlens=edges)
    assert padded.flatten().tolist() == pytest.approx(numbers)
    assert packed.flatten().tolist() == pytest.approx([n for n in numbers if n or name != "none"])
