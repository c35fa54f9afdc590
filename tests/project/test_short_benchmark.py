"""The benchmark of short calls at its smallest shapes: all compute the same, and the page holds what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import machine, report, short

ROOT = Path(__file__).parents[2]
SMALL = {(cell.library, cell.way): cell for cell in reversed(list(short.cells())) if cell.threads == 1}


@pytest.mark.parametrize("which", SMALL, ids=" ".join)
def test_all_compute_the_same(which: tuple[str, str]) -> None:
    pytest.importorskip(which[0])
    found = short.measure(SMALL[which], seconds=0.0)
    assert len(found.seconds) == (2 if which[1] in ("decoding", "continuing") else 3)
    assert found.ratio == found.seconds[0] / min(found.seconds[1:])


def test_the_page_gets_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "short.md"
    monkeypatch.setattr(short, "PAGE", page)
    page.write_text("a\n<!-- measured: python -m benchmarks.short --docs -->\nold\n<!-- end of measured -->\nb\n")
    torch, numpy = (short.Cell(library, "decoding", 1, 8, 1, 101, 64) for library in ("torch", "numpy"))
    cells = [replace(torch, seconds=(2e-5, 1e-5)), replace(numpy, seconds=(1e-5, 1e-5))]
    short.write(cells, machine.describe())
    text = page.read_text()
    assert text.startswith("a\n")
    assert text.endswith("b\n")
    assert "old" not in text
    assert "2 cells, 1 of them above 1.05×." in text
    assert "| decoding, B1 H8 L101 D64 | 20 µs (2.00×) | 10 µs (1.00×) |" in text
    assert report.markdown(short.table(cells)) in text


def test_the_record_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is what the page shows."""
    stored = json.loads(sorted((ROOT / "benchmarks" / "records").glob("short-*.json"))[-1].read_text())
    shown, page = short.PAGE.read_text(), tmp_path / "short.md"
    page.write_text(shown)
    monkeypatch.setattr(short, "PAGE", page)
    short.write([short.Cell(**row | {"seconds": tuple(row["seconds"])}) for row in stored["rows"]], stored["machine"])
    assert page.read_text() == shown


def test_there_are_enough_cells() -> None:
    assert len(set(short.cells())) == len(list(short.cells())) >= 120
