"""The check of the site's links (docs/links.py), on a made-up site with every kind of fault."""

import runpy

import pytest
import readme

LINKS = runpy.run_path(str(readme.ROOT / "docs" / "links.py"))

INDEX = """<html><head><link href="style.css" rel="stylesheet">
<script src="searchindex.js"></script>
</head><body><a href="guide/page.html#part">guide</a> <a href="#here" id="here">here</a>
<a href="https://example.org/gone#x">elsewhere</a> <a href="mailto:a@example.org">mail</a>
<img src="picture.png" srcset="picture.png 1x, picture.png 2x"><a href="llms.txt">text</a>
</body></html>"""
FILES = {
    "index.html": INDEX,
    "guide/page.html": '<h1 id="part">Part</h1><a href="../index.html#here">home</a>',
    "style.css": "body { background: url('picture.png') }",
    "picture.png": "",
    "llms.txt": "- [guide](guide/page.html): all of it\n",
    "searchindex.js": 'Search.setIndex({"docnames": ["index", "guide/page"]})',
}


@pytest.fixture
def site(tmp_path):
    """A site whose links all resolve, beside a file that is not of it."""
    (tmp_path / "outside.html").touch()
    folder = tmp_path / "site"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("new.html", '\n<a href="gone.html">', "new.html:2: 'gone.html' is not there"),
        ("new.html", '<a href="guide/page.html#gone">', "new.html:1: 'guide/page.html#gone' is no"),
        ("new.html", '<a href="../outside.html">', "new.html:1: '../outside.html' leads out"),
        ("new.html", '<a href="/index.html">', "new.html:1: '/index.html' works on this machine"),
        ("style.css", "body { background: url(gone.png) }", "style.css: 'gone.png' is not there"),
        ("llms.txt", "[a](gone.html)", "llms.txt: 'gone.html' is not there"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(site, capsys, name, text, fault):
    assert LINKS["main"](str(site)) == 0
    (site / name).write_text(text)
    assert LINKS["main"](str(site)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(fault)
