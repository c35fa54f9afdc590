"""The benchmark of compiled kernels: all that this machine has compute the same, and the page gets the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compiled, report


def test_all_compute_the_same() -> None:
    rows = compiled.measure(256, seconds=0.0)
    assert [row.what for row in rows] == ["three products", *compiled.contenders()]
    lines = compiled.table(rows).rows
    assert lines[0][1].endswith("(1.00)")
    assert len(lines) == len(rows)


def test_the_page_gets_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "short.md"
    page.write_text("a\n<!-- measured: python -m benchmarks.compiled --docs -->\nold\n<!-- end of measured -->\nb\n")
    monkeypatch.setattr(compiled, "PAGE", page)
    rows = [compiled.Row("three products", 256, 2e-4), compiled.Row("softmax, torch", 256, 5e-5)]
    compiled.write(rows, "here")
    assert "old" not in page.read_text()
    assert "here\n\n" + report.markdown(compiled.table(rows)) in page.read_text()
    assert "| softmax, torch | 50 µs (0.25) |" in page.read_text()
