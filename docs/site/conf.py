"""How Sphinx makes the site of what ``docs.site`` has brought together."""

import sys
from pathlib import Path

from numpydoc.xref import DEFAULT_LINKS

import relskew_core

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.site.heads import URLS
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
    "sphinx_copybutton",
    "docs.site.heads",
    "docs.site.marks",
]
exclude_patterns = ["README.md"]
templates_path = ["templates"]

# What is copied is what is typed: prompts and results are left out.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
copybutton_selector = '[class*="highlight-"]:not([class*="columns-"], .cell_output *) > .highlight > pre'

# Pages
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are stored with their outputs

# Reference: signatures have types, each argument on a line if they are long; public names in them are links.
add_module_names = False
autodoc_type_aliases = {name: name for name in ("Array", "Impl", "Namespace", "Cache")}
python_maximum_signature_line_length = 88
autosummary_generate = False
numpydoc_show_class_members = False
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
DEFAULT_LINKS.clear()  # they lead to other projects' sites, which nothing is fetched from
numpydoc_xref_aliases = {name: f"{module.__name__}.{name}" for module in modules() for name in module.__all__}

# What it looks like. There are no fonts and no scripts from elsewhere.
html_theme = "furo"
html_title = f"relskew {version}"
html_baseurl = URLS.get("Documentation", "")
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["relskew.css"]
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")
html_domain_indices = False
html_copy_source = True
html_show_sourcelink = True
html_sourcelink_suffix = ""
html_show_sphinx = False
html_theme_options = {
    "source_repository": URLS.get("Repository", ""),
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["view"],
    "light_logo": "favicon.svg",
    "dark_logo": "favicon.svg",
    "light_css_variables": {"color-brand-primary": "#1d5fa8", "color-brand-content": "#1d5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7cb7f2", "color-brand-content": "#7cb7f2"},
}
pygments_style = "a11y-light"
pygments_dark_style = "a11y-dark"
