"""Which functions are not what they were: the mutants of all others have been tried."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mutants.record import Mutant

ROOT = Path(__file__).resolve().parents[2]


def has_changed(mutant: Mutant, commit: str) -> bool:
    """Say whether the function of a mutant was another one at a commit, or none."""
    now, then = _now(mutant.module), _then(mutant.module, commit)
    return then.get(mutant.function) != now[mutant.function]


def functions(source: str) -> dict[str, str]:
    """Return the functions and methods of a module by name, without their docstrings and layout."""
    return dict(_functions(ast.parse(source), ""))


def _functions(scope: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                del node.body[0]
            yield f"{prefix}{node.name}", ast.dump(node)


@cache
def _now(module: str) -> dict[str, str]:
    return functions(_file(module).read_text())


@cache
def _then(module: str, commit: str) -> dict[str, str]:
    path = _file(module).relative_to(ROOT).as_posix()
    shown = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
    return functions(shown.stdout) if shown.returncode == 0 else {}


def _file(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).resolve()
