"""Each step of docs/tutorial.md prints what its comment says."""

import re

import pytest
import readme

PRINTED = re.compile(r"^(?:\s*print\(.*\)  )?# (.*)$", re.MULTILINE)
STEPS = re.findall(
    r"<!-- example: (tutorial-\d+) -->", (readme.ROOT / "docs/tutorial.md").read_text()
)


@pytest.mark.filterwarnings("ignore:klfast:UserWarning")  # step 4 shows the warning of k1 in a loss
def test_every_step_prints_what_the_page_says(capsys):
    assert len(STEPS) == 10
    left = readme.run("tutorial-1")
    for step in STEPS[1:]:
        left = readme.run(step, **left)
    shown = [line for step in STEPS for line in PRINTED.findall(readme.code(step))]
    assert capsys.readouterr().out.splitlines() == shown
