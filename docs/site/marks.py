"""What is done to every page: public names become links, and tables get a class that depends on what they hold."""

from __future__ import annotations

import html
import importlib
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import relskew_core
from docs.site.reference import modules
from relskew_core._kernel.call import GROUPS

MODULES = [module.__name__ for module in modules() if module is not relskew_core]
FULL = [f"{module.__name__}.{name}" for module in modules() for name in module.__all__]
"""Every public name, in full."""


def full_name(text: str) -> str:
    """Return the one public name that code is about, or nothing: ``skew(x)``, ``export.save``, ``Span.causal(n)``."""
    match = re.match(r"(?:[\w.]+ = )?([\w.]+)(?:\(.*\))?$", text, re.DOTALL)
    if match is None or text in MODULES:
        return text if match else ""
    names = [match[1], match[1].rpartition(".")[0]]  # a name, or what a method is of
    for one in names[: 1 + names[1][:1].isupper()]:
        found = [full for full in FULL if f".{full}".endswith(f".{one}")]
        if len(found) == 1:
            return found[0]
    return ""


class Names(SphinxTransform):
    """Make links of code in the text of pages written in Markdown."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        for code in list(self.document.findall(nodes.literal)):
            target = full_name(code.astext())
            if not target or isinstance(code.parent, nodes.reference | addnodes.pending_xref | nodes.title):
                continue
            link = addnodes.pending_xref(
                "", code.deepcopy(), refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname
            )
            code.replace_self(link)


class Shapes(SphinxTransform):
    """Name what the style sheet treats apart: tables of words and of numbers, lists of cards, and drawings in text."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        for table in self.document.findall(nodes.table):
            numbers = any("text-right" in entry["classes"] for entry in table.findall(nodes.entry))
            table["classes"].append("numbers" if numbers else "words")
            repeat_names(table)
            if numbers:
                label_cells(table)
            if len(list(table.findall(nodes.colspec))) > MANY:
                table["classes"].append("many")
        if self.env.docname == "index":
            for cards in self.document.findall(nodes.bullet_list):
                cards["classes"].append("cards")
                for text in cards.findall(nodes.Text):
                    if text.startswith(": "):  # what follows a title on a line of a list
                        text.parent.replace(text, nodes.Text(text[2:3].upper() + text[3:]))
            if start := self.document.next_node(is_start):
                start["classes"].append("start")
        for block in self.document.findall(nodes.literal_block):
            columns = max(map(len, block.astext().splitlines()), default=0)
            if block.get("language", "default") in ("text", "default", "none") and columns <= WIDEST_DRAWING:
                block["classes"].append(f"columns-{-(-max(columns, 40) // 10) * 10}")


WIDEST_DRAWING = 80
"""Columns that a phone can show when it makes them smaller; longer lines are wrapped."""


MANY = 6
"""Columns, above which a table is written smaller."""


def is_start(node: nodes.Node) -> bool:
    """Say whether a paragraph is links alone, as the home page has them for where to begin."""
    if not isinstance(node, nodes.paragraph):
        return False
    links = [part for part in node.children if part.astext().strip()]
    return bool(links) and all(next(iter(part.findall(is_link)), None) for part in links)


def is_link(node: nodes.Node) -> bool:
    """Say whether a node is a link, resolved or not."""
    return isinstance(node, nodes.reference | addnodes.pending_xref)


def repeat_names(table: nodes.table) -> None:
    """Repeat the name of the row above in a row without one, for phones, where each row is a card."""
    name = ""
    for row in next(iter(table.findall(nodes.tbody))).children:
        first = next(iter(row.findall(nodes.entry)))
        if text := first.astext().strip():
            name = text
        elif name:
            first.children = []
            first += nodes.paragraph("", "", nodes.inline("", name, classes=["label"]))


def label_cells(table: nodes.table) -> None:
    """Say in each cell which column it is of, which phones show; keep numbers and units on one line."""
    heads = [[entry.astext() for entry in row.findall(nodes.entry)] for row in next(iter(table.findall(nodes.thead)))]
    for row in next(iter(table.findall(nodes.tbody))).children:
        for head, entry in list(zip(heads[-1], row.findall(nodes.entry), strict=False))[1:]:
            for text in list(entry.findall(nodes.Text)):
                together = re.sub(r"(?<=\d) (?=[µm]?s\b|[KMG]iB\b)", "\N{NO-BREAK SPACE}", text)
                text.parent.replace(text, nodes.Text(together))
            if entry.children and head.strip():
                entry.children[0].insert(0, nodes.inline("", head, classes=["label"]))


class Themes(SphinxTransform):
    """Show the picture that is drawn for dark pages, where there is one, on these."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            name, dot, ending = image["uri"].rpartition(".")
            if Path(self.env.relfn2path(f"{name}-dark{dot}{ending}", self.env.docname)[1]).exists():
                dark = image.deepcopy()
                dark["uri"] = f"{name}-dark{dot}{ending}"
                image["classes"].append("only-light")
                dark["classes"].append("only-dark")
                image.parent.insert(image.parent.index(image) + 1, dark)


class Titles(SphinxTransform):
    """Say in words what the notebooks draw: the title of each picture that relskew has drawn."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        for image in self.document.findall(nodes.image):
            if "alt" not in image and image["uri"].endswith(".svg"):
                drawn = Path(self.env.relfn2path(image["uri"], self.env.docname)[1]).read_text()
                if title := re.search("<title>(.*?)</title>", drawn):
                    image["alt"] = html.unescape(title[1])


def in_groups(app: Sphinx, domain: str, kind: str, content: Any) -> None:
    """Put a line with the name of its group above the first argument of each, where all of a call's are listed."""
    for row in list(content.findall(nodes.definition_list_item)):
        name = row.children[0].astext().partition(":")[0].partition(",")[0].strip()
        listed = [item.children[0].astext().partition(":")[0].strip() for item in row.parent.children]
        if name in GROUPS and "rel_k" in listed and "block_size" in listed:
            term = nodes.term("", GROUPS[name].capitalize(), classes=["group"])
            row.parent.insert(row.parent.index(row), nodes.definition_list_item("", term, nodes.definition()))


def without_wrappers(app: Sphinx, *given: Any) -> tuple[str | None, ...]:
    """Return a signature and what it returns with the bare names of types such as ``Array``."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in given[-2:])


def code_of(app: Sphinx, module: str, name: str) -> str | None:
    """Lead to the code of a class from its first page alone: the code has one way back."""
    value = getattr(importlib.import_module(module), name.partition(".")[0], None)
    homes = [home.__name__ for home in modules() if getattr(home, name.partition(".")[0], None) is value]
    return "builtins" if homes and module != homes[0] else None  # which have no code to show


def without_builtins(app: Sphinx, env: Any) -> None:
    """Leave out of the list of code what :func:`code_of` says has none."""
    getattr(env, "_viewcode_modules", {}).pop("builtins", None)


def by_its_last_part(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Resolve a name that a docstring says without its module, and leave the types of signatures that have no page."""
    target = full_name(node.get("reftarget", "").rpartition(".")[2])
    if node.get("refdomain") != "py":
        return None
    if not target:
        while node is not None and not isinstance(node, addnodes.desc_signature):
            node = node.parent
        return content if node else None
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(Names)
    app.add_transform(Shapes)
    app.add_transform(Themes)
    app.add_transform(Titles)
    app.connect("object-description-transform", in_groups)
    app.connect("autodoc-process-signature", without_wrappers)
    app.connect("viewcode-follow-imported", code_of)
    app.connect("env-check-consistency", without_builtins)
    app.connect("missing-reference", by_its_last_part)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
