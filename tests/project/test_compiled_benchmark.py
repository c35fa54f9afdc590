"""The benchmark of the compiled kernels: with and without them the same is computed, and the page gets the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import compiled, report
from relskew_core.backends import _compiled


@pytest.mark.skipif(_compiled.kernels is None, reason="the kernels were not compiled at installation")
@pytest.mark.parametrize("library", compiled.LIBRARIES)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("options", [{"mask": True}, {"segments": 3}, {"positions": True}], ids=str)
def test_both_compute_the_same(library: str, training: bool, options: dict[str, Any]) -> None:
    call = compiled.Call("try", 40, reach=5, tables=("rel_k", "rel_v"), options=options)
    row = compiled.measure(call, library, training=training, seconds=0.0)
    assert (row.call, row.length) == ("try", 40)
    assert _compiled.kernels is not None


def test_the_page_gets_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "compiled.md"
    page.write_text("a\n<!-- measured: python -m benchmarks.compiled --docs -->\nold\n<!-- end of measured -->\nb\n")
    monkeypatch.setattr(compiled, "PAGE", page)
    rows = [compiled.Row("causal", 256, "torch", False, 2e-3, 4e-3, 1e-3)]
    compiled.write(rows, {"cpu": "a CPU", "level": "base", "commit": "abc", "date": "2026-11-22 10:00"})
    assert "old" not in page.read_text()
    assert report.markdown(compiled.table(rows)) in page.read_text()
    assert "| causal, 256 | 2 ms, 2.00 (4.00) | – | – | – |" in page.read_text()
