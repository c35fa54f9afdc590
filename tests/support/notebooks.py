"""Notebooks without Jupyter: their cells, and running them one after the other as a notebook does.

``python tests/support/notebooks.py PATH …`` runs some, says how long each took, and writes what their cells show into
the folder that ``--show`` names.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


class Cell(NamedTuple):
    """A cell with what git keeps of it."""

    kind: str
    source: str
    raw: dict[str, Any]


def cells_of(path: Path) -> list[Cell]:
    return [Cell(raw["cell_type"], "".join(raw["source"]), raw) for raw in json.loads(path.read_text())["cells"]]


def run(path: Path) -> list[Any]:
    """Run the code of a notebook in one namespace; return what each cell shows: its last line, and its plots."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(cells_of(path)):
        if cell.kind != "code":
            continue
        tree = ast.parse(cell.source)
        last = tree.body[-1]
        place = f"{path.name}, cell {number}"
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(tree.body[:-1], []), place, "exec"), names)
            shown.append(eval(compile(ast.Expression(last.value), place, "eval"), names))
        else:
            exec(compile(tree, place, "exec"), names)
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            shown += [pyplot.figure(number) for number in pyplot.get_fignums()]
            pyplot.close("all")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=sorted(TUTORIALS.glob("*.ipynb")))
    parser.add_argument("--show", type=Path, help="a folder for what the cells show")
    given = parser.parse_args()
    for path in given.paths:
        start = time.perf_counter()
        shown = run(path.resolve())
        print(f"{path.name}: {time.perf_counter() - start:.1f} s")
        if given.show is not None:
            show(shown, given.show, path.stem)


def show(shown: list[Any], folder: Path, name: str) -> None:
    """Write pictures and plots into files, and print the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, value in enumerate(shown):
        if hasattr(value, "_repr_svg_"):
            (folder / f"{name}-{number:02d}.svg").write_text(value._repr_svg_())
        elif hasattr(value, "savefig"):
            value.savefig(folder / f"{name}-{number:02d}.png")
        elif value is not None:
            print(value)


if __name__ == "__main__":
    main()
