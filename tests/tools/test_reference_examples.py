"""Each example of the reference's pages runs, and prints what its comments say."""

import re
import runpy

import pytest
import readme

FOLDER = readme.ROOT / "docs" / "api" / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
PRINTED = re.compile(r"print\(.*\)(?:  |\n *)# (.*)$", re.MULTILINE)
OF_FRAMEWORKS = ("Patch", "PatchError", "patch")  # their output depends on the installed packages


def test_every_page_of_the_reference_has_one():
    index = (FOLDER.parent / "index.rst").read_text()
    names = re.findall(r"^   ([\w.]+)$", index, re.MULTILINE)
    pages = {name.rpartition(".")[2] for name in names if name != "names"}
    assert pages == {path.stem for path in EXAMPLES}


@pytest.mark.filterwarnings("ignore:klfast.* is disabled:RuntimeWarning")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(path, capsys):
    runpy.run_path(str(path))
    printed = capsys.readouterr().out.splitlines()
    assert printed
    if path.stem not in OF_FRAMEWORKS:
        assert printed == PRINTED.findall(path.read_text())
