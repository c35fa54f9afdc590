"""Notebooks without Jupyter: their cells, and running them one after the other as a notebook does.

``python tests/support/notebooks.py`` lets Jupyter run them, or some that are named, and keep what their cells show; do
that after each change of a cell.
"""

import ast
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import nbformat

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


def cells_of(path: Path) -> list[Any]:
    cells: list[Any] = nbformat.read(path, 4).cells  # type: ignore[no-untyped-call]  # has no types
    return cells


def fingerprint(cells: list[Any]) -> str:
    """Return a digest of the code of a notebook: outputs are of it, or old."""
    return hashlib.sha256("\0".join(cell.source for cell in cells if cell.cell_type == "code").encode()).hexdigest()


def store(path: Path) -> None:
    from nbclient import NotebookClient

    os.environ["PYTHONPATH"] = str(TUTORIALS.parents[1])
    notebook: Any = nbformat.read(path, 4)  # type: ignore[no-untyped-call]  # has no types
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":  # warnings of libraries differ between machines
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["code"] = fingerprint(cells_of(path))
    notebook.metadata.pop("language_info", None)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def run(path: Path) -> list[Any]:
    """Run the code of a notebook in one namespace; return what each cell shows: its last line, and its plots."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(cells_of(path)):
        if cell.cell_type != "code":
            continue
        tree, place = ast.parse(cell.source), f"{path.name}, cell {number}"
        last = tree.body[-1]
        body = tree.body[:-1] if isinstance(last, ast.Expr) else tree.body
        exec(compile(ast.Module(body, []), place, "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), place, "eval"), names))
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            shown += [pyplot.figure(number) for number in pyplot.get_fignums()]
            pyplot.close("all")
    return shown


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(TUTORIALS.glob("*.ipynb")):
        store(path.resolve())
