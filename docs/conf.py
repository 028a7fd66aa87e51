"""How Sphinx builds the site: `make docs`, whose warnings are errors."""

import builtins
import re
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh, ProcessGroup

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "_ext")]

import formulas
from sphinx.pycode import ModuleAnalyzer
from typing_extensions import Unpack

import klfast

# Signatures name types that klfast imports for type checkers alone. Sphinx needs all of them.
groups = {"ProcessGroup": ProcessGroup, "Group": ProcessGroup | DeviceMesh}
of_klfast = {"Estimator": klfast.Estimator, "EstimatorName": klfast.EstimatorName}
of_torch = {"torch": torch, "Optimizer": torch.optim.Optimizer}
vars(builtins).update(of_torch, Unpack=Unpack, **groups, **of_klfast)

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
    "searched",
]
exclude_patterns = ["upstream", "_build"]
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(klfast\.(compat\.\w+|controllers\.(base|watchers)|args\.checks)\."
        r"|torch|Tensor|ProcessGroup|optional|collections|Path).*",
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
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# It reads defaults from a function's source, but a controller's signature shows its base's too.
autodoc_preserve_defaults = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"klfast {version}"
html_static_path = ["_static"]
html_css_files = ["klfast.css"]
html_extra_path = ["llms.txt"]
html_search_scorer = str(HERE / "_ext" / "scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1f5fbf",
        "color-brand-content": "#1f5fbf",
        "code-font-size": "0.8rem",  # 100 characters fit into a page
    },
    "dark_css_variables": {"color-brand-primary": "#7fb2ff", "color-brand-content": "#7fb2ff"},
}
copybutton_exclude = ".linenos, .gp, .go"


def setup(app):
    """Show a function's arguments once, and not in a signature for each overload."""

    def shown(app, what, name, obj, options, arguments, returned):
        if what == "function":
            analyzer = ModuleAnalyzer.for_module(obj.__module__)
            analyzer.analyze()
            analyzer.overloads.clear()
        # A class as a default is shown by its name, which Sphinx can parse.
        by_name = arguments and re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", arguments)
        return by_name and (by_name, returned)

    app.connect("autodoc-process-signature", shown)
