"""The floors of docs/architecture.md: every module stands on one, and imports only what is on its floor or above."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import relskew_core

ROOT = Path(relskew_core.__file__).parent
PAGE = ROOT.parent / "docs" / "architecture.md"


def floors() -> list[list[str]]:
    """Patterns of module names, floor by floor, from the table under "Floors"."""
    section = PAGE.read_text().partition("\n## Floors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [\w ]+ \| ([^|]*`[^|]*) \|", section, re.MULTILINE)
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def name_of(path: Path) -> str:
    """``relskew_core/export/_save.py`` is ``export._save``; a package's ``__init__`` is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "relskew_core"


MODULES = {
    name_of(path): path
    for path in sorted([*ROOT.glob("*.py"), *(path for folder in ROOT.iterdir() for path in folder.glob("*.py"))])
}


def floor_of(module: str) -> int:
    names = [module] if "." in module or module not in ("backends", "export", "cli") else [f"{module}.__init__"]
    found = [floor for floor, patterns in enumerate(floors()) if any(fnmatch(n, p) for n in names for p in patterns)]
    assert len(found) == 1, f"{module} must stand on one floor of docs/architecture.md, stands on {len(found)}"
    return found[0]


def imports_of(module: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in it but under ``if TYPE_CHECKING``."""
    tree = ast.parse(MODULES[module].read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in typing_only or not node.module:
            continue
        package, _, rest = node.module.partition(".")
        if package == "relskew_core":
            inner = [f"{rest}.{alias.name}" if rest else alias.name for alias in node.names]
            found |= {name if name in MODULES else rest or "relskew_core" for name in inner}
    return found - {module}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    here = floor_of(module)
    wrong = sorted(name for name in imports_of(module) if floor_of(name) > here)
    assert not wrong, f"{module} imports {wrong} from a later floor"


def test_every_pattern_of_the_page_stands_for_a_module() -> None:
    names = [*MODULES, *(f"{package}.__init__" for package in ("backends", "export", "cli"))]
    for patterns in floors():
        for pattern in patterns:
            assert any(fnmatch(name, pattern) for name in names), f"no module is called {pattern}"
