"""How Sphinx builds the site: `make docs`, whose warnings are errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "_ext")]

import formulas

import klfast

project = "klfast"
author = "the klfast developers"
project_copyright = author
version = release = klfast.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "frameworks",
    "mathml",
    "outside",
]
exclude_patterns = ["upstream", "_build"]
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(klfast\.compat\.\w+\.|torch|Tensor|ProcessGroup|optional|collections|Path).*",
    ),  # not of this site
]

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # notebooks are kept without outputs
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
html_math_renderer = "mathml"

templates_path = ["_templates"]
autosummary_context = {"formulas": formulas.FORMULAS}
autodoc_mock_imports = ["transformers"]  # the base of a callback
autodoc_typehints = "none"  # the signature has them
autodoc_member_order = "bysource"
# It reads defaults from a function's source, but a controller's signature shows its base's too.
autodoc_preserve_defaults = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 80

html_theme = "furo"
html_title = "klfast"
html_static_path = ["_static"]
html_css_files = ["klfast.css"]
html_extra_path = ["llms.txt"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fbf", "color-brand-content": "#1f5fbf"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ff", "color-brand-content": "#7fb2ff"},
}
copybutton_exclude = ".linenos, .gp, .go"
