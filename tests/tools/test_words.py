"""docs/glossary.md has the tables of frameworks' names that klfast.compat makes."""

import runpy

import readme

from klfast.args.estimator import Estimator
from klfast.compat import presets

WORDS = runpy.run_path(str(readme.ROOT / "docs" / "_ext" / "words.py"))
PAGE = (readme.ROOT / "docs" / "glossary.md").read_text()


def test_the_page_has_the_table_of_the_code():
    """`python docs/_ext/words.py` prints it."""
    assert PAGE.partition("<!-- words -->\n")[2] == WORDS["page"]()


def test_every_preset_is_in_it():
    listed = [words for _, words in WORDS["ESTIMATORS"]]
    own = {name: value for name, value in vars(presets).items() if name.isupper()}
    groups = [value for name, value in own.items() if not name.startswith(("K3_", "_"))]
    for group in groups:
        assert group in listed or group in [each for words in listed for each in words.values()]


def test_an_estimator_is_written_as_python_reads_it():
    for _, words in WORDS["ESTIMATORS"]:
        for estimator in words.values():
            text = WORDS["text_of"](estimator)
            read = eval(text, {"Estimator": Estimator})
            assert (Estimator(read) if isinstance(read, str) else read) == estimator
