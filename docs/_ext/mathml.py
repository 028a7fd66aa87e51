"""Formulas as MathML, which browsers render by themselves: no script, no network."""

from docutils import nodes
from latex2mathml.converter import convert


def visit_inline(self, node):
    """An inline formula."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_block(self, node):
    """A formula on a line of its own."""
    self.body.append('<div class="formula">' + convert(node.astext(), display="block") + "</div>")
    raise nodes.SkipNode


def setup(app):
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
