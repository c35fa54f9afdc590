"""Build the site: ``python -m docs.site [FOLDER]`` writes ``FOLDER/html``, without network.

Its pages are those of ``docs/``, the pages at the root that people read, and one for each public name. They are brought
together in ``FOLDER/source``, whose root is ``docs/``: links that led from one to the other are written anew.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

import relskew_core
from docs.site import reference
from docs.site.heads import NOT_FOUND

HERE = Path(__file__).parent
DOCS = HERE.parent
ROOT = DOCS.parent

AT_THE_ROOT = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "RELEASING.md",
    "SECURITY.md",
    "GOVERNANCE.md",
    "CODE_OF_CONDUCT.md",
)
"""README.md is no page of the site; its home includes parts of it."""

NOT_SEARCHED = "---\nnosearch: true\n---\n\n"
"""What the pages at the root and those of ``docs/development/`` begin with: users' questions do not find them."""

LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#\s]+)")


def place(path: Path) -> Path:
    """Return the path of a project's file on the site: files of ``docs/`` are at the root."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT)


def contents_below(page: Path) -> str:
    """Return what the site adds to the page of the reference: a table of contents."""
    if page != DOCS / "reference.md":
        return ""
    below = [reference.page_of(relskew_core, name) for name in relskew_core.__all__]
    below += [f"reference/{module.__name__}" for module in reference.modules() if module is not relskew_core]
    return "\n".join(("", "```{toctree}", ":hidden:", "", *below, "```", ""))


def files() -> dict[Path, bytes]:
    """Return every file of the source by its place."""
    found = {Path(name): text.encode() for name, text in ({"404.md": NOT_FOUND} | reference.pages()).items()}
    pages = [path for path in DOCS.rglob("*") if path.is_file() and HERE not in path.parents]

    for path in (*pages, *(ROOT / name for name in AT_THE_ROOT)):
        if path.suffix not in (".md", ".ipynb"):
            found[place(path)] = path.read_bytes()
            continue

        def moved(link: re.Match[str], path: Path = path) -> str:
            target = Path(os.path.normpath(path.parent / link[1]))
            if target.suffix == ".py":  # code to copy: the site offers it for download
                found[place(target)] = target.read_bytes()
            return os.path.relpath(place(target), place(path).parent)

        hidden = path.parent in (ROOT, DOCS / "development")
        text = (NOT_SEARCHED if hidden else "") + LINK.sub(moved, path.read_text()) + contents_below(path)
        found[place(path)] = text.encode()
    return found


def bring_together(source: Path) -> None:
    """Write what has changed, so that Sphinx reads only that again, and remove what is no longer there."""
    wanted = {source / name: content for name, content in files().items()}
    for path in source.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
    for path, content in wanted.items():
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def build(folder: Path) -> int:
    """Return Sphinx's exit status; every warning is an error, and so is a name that is referred to and not there."""
    bring_together(folder / "source")
    options = ["--nitpicky", "--fail-on-warning", "--quiet", "--conf-dir", str(HERE)]
    return sphinx([*options, "-d", str(folder / "doctrees"), str(folder / "source"), str(folder / "html")])


if __name__ == "__main__":
    folder = Path(sys.argv[1] if sys.argv[1:] else "site")
    status = build(folder)
    if not status:
        print(f"{folder / 'html' / 'index.html'} is the home page")
    sys.exit(status)
