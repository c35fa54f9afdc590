"""The tutorials as they lie in git: with the outputs of their code, a title, a reader, and extras that exist."""

import json
import re
from pathlib import Path

import pytest

from notebooks import TUTORIALS, cells_of, fingerprint, run
from tracked import PROJECT

NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
READERS = ("teachers", "researchers", "JAX", "production")  # a word of who each kind of reader is


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_every_kind_of_reader_has_a_notebook() -> None:
    readers = [cells_of(path)[0].source.split("**")[1] for path in NOTEBOOKS]
    assert all(any(reader in one for one in readers) for reader in READERS)


@each_notebook
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


@each_notebook
def test_the_first_cell_says_what_for_whom_and_with_extras_that_bring_what_is_imported(path: Path) -> None:
    first, *others = cells_of(path)
    assert re.match(r"# \w[^\n]+\n\n\*\*For [^*]+\.\*\* \w+ minutes", first.source)
    (extras,) = re.findall(r'`pip install "[\w.-]+\[([\w,-]+)\]"`', first.source)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    brought = {
        "numpy": {"numpy"}, "torch": {"torch"}, "torch-onnx": {"torch", "onnx"}, "onnxruntime": {"onnxruntime"},
        "plot": {"matplotlib"}, "flax": {"jax", "flax", "optax"},
    }  # fmt: skip
    there = {"relskew_core", "time", "tracemalloc", "tempfile", "pathlib"}.union(
        *(brought[x] for x in extras.split(","))
    )
    code = "\n".join(cell.source for cell in others if cell.kind == "code")
    assert set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) <= there


@each_notebook
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    pyplot.switch_backend("Agg")
    try:
        assert any(value is not None for value in run(path))
    finally:
        pyplot.close("all")
