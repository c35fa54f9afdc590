"""The descriptions and social cards of pages, and the page for missing addresses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.application import Sphinx

URLS: dict[str, str] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"].get(
    "urls", {}
)
"""Where the project is published: the site as ``Documentation``, the repository as ``Repository``."""
LONGEST = 160
"""Characters of a description that search engines show."""

NOT_FOUND = """---
orphan: true
---

# Page not found

There is no page at this address. Begin at the [home page](index.md), [find your model](chooser.md), look a name up in
the [API reference](reference.md), or use the search.
"""


def description(doctree: nodes.document | None) -> str:
    """Return the first sentences of a page's first paragraph, as many as fit."""
    paragraphs = doctree.findall(nodes.paragraph) if doctree else ()
    text = " ".join(next((found.astext() for found in paragraphs if len(found.astext()) > 30), "").split())
    if len(text) <= LONGEST:
        return text
    end = text.rfind(". ", 0, LONGEST) + 1
    return text[:end] if end > LONGEST // 3 else text[: text.rfind(" ", 0, LONGEST - 1)] + "…"


def describe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Give the template what it says about a page to search engines and to those who share its address."""
    base = app.config.html_baseurl
    context["description"] = description(doctree) or app.config.project
    context["card"] = f"{base}_static/card.png" if base else context["pathto"]("_static/card.png", 1)


def from_the_root(app: Sphinx, error: Exception | None) -> None:
    """Let the links of the page for missing ones begin at the root of the site: it is served in every folder."""
    page = Path(app.outdir) / "404.html"
    if error is None and page.exists():
        root = urlsplit(app.config.html_baseurl).path or "/"
        text = page.read_text().replace('data-content_root="./"', f'data-content_root="{root}"')
        page.write_text(re.sub(r'((?:\bhref| src)=")(?![\w+]+:|[#/])', rf"\1{root}", text))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", from_the_root)
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
