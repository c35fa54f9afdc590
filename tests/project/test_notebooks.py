"""The tutorials as they lie in git: with the outputs of their code, a title, a reader, and extras that exist."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from notebooks import TUTORIALS, Cell, cells_of, fingerprint, run

ROOT = TUTORIALS.parents[1]
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
READERS = ("teachers", "researchers", "JAX", "production")
"""A word of who each kind of reader is."""


def named(path: Path) -> str:
    return path.stem


def first_cell(path: Path) -> str:
    return cells_of(path)[0].source


def test_every_kind_of_reader_has_a_notebook() -> None:
    firsts = [first_cell(path) for path in NOTEBOOKS]
    assert all(any(f"{reader}" in first.split("**")[1] for first in firsts) for reader in READERS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_outputs_are_those_of_the_code(path: Path) -> None:
    """``python tests/support/notebooks.py --store`` writes them."""
    cells = cells_of(path)
    code = [cell for cell in cells if cell.kind == "code"]
    assert {cell.kind for cell in cells} == {"code", "markdown"}
    assert json.loads(path.read_text())["metadata"]["code"] == fingerprint(cells), "a cell has changed since it was run"
    assert [cell.raw["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.raw["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert "/tmp/" not in str(outputs)
    identities = [cell.raw["id"] for cell in cells]
    assert len(set(identities)) == len(identities)
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_the_first_cell_says_what_for_whom_and_with_which_extras(path: Path) -> None:
    first = first_cell(path)
    assert re.match(r"# \w[^\n]+\n\n\*\*For [^*]+\.\*\* \w+ minutes", first)
    (extras,) = re.findall(r'`pip install "[\w.-]+\[([\w,-]+)\]"`', first)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)


def imported(cells: list[Cell]) -> set[str]:
    code = "\n".join(cell.source for cell in cells if cell.kind == "code")
    return set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_the_extras_bring_what_is_imported(path: Path) -> None:
    brought = {
        "numpy": {"numpy"}, "torch": {"torch"}, "torch-onnx": {"torch", "onnx"}, "onnxruntime": {"onnxruntime"},
        "plot": {"matplotlib"}, "flax": {"jax", "flax", "optax"},
    }  # fmt: skip
    (extras,) = re.findall(r'pip install "[\w.-]+\[([\w,-]+)\]"', first_cell(path))
    standard = {"relskew_core", "time", "tracemalloc", "tempfile", "pathlib"}
    assert imported(cells_of(path)) <= standard.union(*(brought[extra] for extra in extras.split(",")))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(cell.source for cell in cells_of(path) if cell.kind == "markdown")
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text)
    assert targets
    for target in targets:
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    pyplot.switch_backend("Agg")
    try:
        assert any(value is not None for value in run(path))
    finally:
        pyplot.close("all")
