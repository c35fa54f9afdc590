"""How Sphinx makes the site of what ``docs.site`` has brought together."""

import sys
from pathlib import Path

from numpydoc.xref import DEFAULT_LINKS

import relskew_core

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.site.reference import modules

project = "relskew"
author = project_copyright = "the relskew developers"
version = release = relskew_core.__version__
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "docs.site.marks",
]
exclude_patterns = ["README.md"]

# Pages
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

# Reference: signatures stay short, the types stand in the docstrings; names of ours in them are links.
add_module_names = False
autodoc_typehints = "none"
autosummary_generate = False
numpydoc_show_class_members = False
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
DEFAULT_LINKS.clear()  # they lead to other projects' sites, which nothing is fetched from
numpydoc_xref_aliases = {name: f"{module.__name__}.{name}" for module in modules() for name in module.__all__}

# What it looks like. There are no fonts and no scripts from elsewhere.
html_theme = "furo"
html_title = "relskew"
html_static_path = ["static"]
html_css_files = ["relskew.css"]
html_domain_indices = False
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1d5fa8", "color-brand-content": "#1d5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7cb7f2", "color-brand-content": "#7cb7f2"},
}
pygments_style = "a11y-light"
pygments_dark_style = "a11y-dark"
