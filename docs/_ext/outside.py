"""Links to pages outside of docs/, which the site includes, lead to the site's own pages."""

import re

INCLUDED = re.compile(r"\]\(\.\./(DESIGN|CONTRIBUTING|CHANGELOG|csrc)(?:/README)?\.md")


def rewrite(app, name, source):
    """The links of a page, before it is parsed."""
    source[0] = INCLUDED.sub(r"](\1.md", source[0])


def setup(app):
    """Rewrite every page."""
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
