"""docs/gallery.md has every example, notebooks have right numbers, and docs/upstream has a leak.

`make docs` runs the notebooks in a kernel of their own.
"""

import json
import re
import sys
from pathlib import Path

import commands
import matplotlib as mpl
import pytest
import readme
import torch

GALLERY = (readme.ROOT / "docs" / "gallery.md").read_text()
EXAMPLES = {f"examples/{path.name}" for path in readme.ROOT.glob("examples/*.py")}
NOTEBOOKS = sorted(readme.ROOT.glob("docs/notebooks/*.ipynb"))


def test_the_gallery_shows_every_example_and_how_to_run_it():
    assert {path.name for path in NOTEBOOKS} == {"controllers.ipynb", "estimators.ipynb"}
    shown = re.findall(r"^```\{literalinclude\} \.\./(.*)$", GALLERY, re.MULTILINE)
    assert set(shown) == EXAMPLES
    assert len(shown) == len(EXAMPLES)
    commands = re.findall(r"^`(?:python|torchrun --nproc-per-node 2) (.*?)`", GALLERY, re.MULTILINE)
    # trl_grpo.py imports tiny_llama.py.
    assert set(commands) - {"-m lab study"} == EXAMPLES - {"examples/tiny_llama.py"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_a_run_leaves(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    cells = notebook["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert "pip install" in "".join(cells[0]["source"])
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            assert not re.search(r"^\s*[%!]|/(home|root)/|https?:", "".join(cell["source"]))


@pytest.fixture
def run(capsys):
    """Run a notebook's cells, and return their names."""
    with mpl.rc_context():
        mpl.use("Agg")
        import matplotlib.pyplot as plt

        def run(name):
            names = {}
            notebook = json.loads((readme.ROOT / "docs" / "notebooks" / name).read_text())
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    code = compile("".join(cell["source"]), f"{name} {cell['id']}", "exec")
                    exec(code, names)
            assert len(plt.get_fignums()) >= 4
            return names

        yield run
        plt.close("all")


def test_the_notebook_of_estimators(run):
    names = run("estimators.ipynb")
    assert names["noise"]["k1"] > 5 * names["noise"]["k3"]
    assert names["far_kl"] > 1
    errors = names["gradient_errors"]
    assert errors["k1"] == pytest.approx(1, abs=1e-3)
    assert errors["k3"] > 0.5
    assert max(errors["k2"], errors["k3+"]) < 1e-3
    assert names["eager_error"].max() > 1
    assert names["fused_error"].max() < 4e-7


@pytest.mark.exhaustive  # `make docs` runs it too
@pytest.mark.long
def test_the_notebook_of_controllers(run):
    names = run("controllers.ipynb")
    for runs in (names["controlled"], names["changed"]):
        first, ziegler, nupi = names["misses_of"](runs).values()
        assert nupi < 0.7 * ziegler < ziegler < 0.8 * first
    assert names["difference"] < 1e-9
    assert names["first"].value == names["second"].value


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
