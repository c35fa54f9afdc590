"""The comparison of replaced models with themselves, without transformers: turns, memory, the table and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.families import __main__ as cli
from benchmarks.families.models import MODELS, Model

ROOT = Path(__file__).parents[2]
MACHINE = {
    "clock": "Time of a thread",
    "cpu": "a processor",
    "load_average": 0.7,
    "versions": {"torch": "2"},
    "date": "2026-01-01",
    "cores": 2,
}


def test_a_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every length, with the memory of the longest, and while it generates."""

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(x.shape[0], 2**20) * 2

        def generate(self, **options: Any) -> int:
            return int(options["max_new_tokens"])

    monkeypatch.setattr(cli, "replace_attention", lambda model: model)
    model = Model(Twice, lambda length: {"x": torch.zeros(length)}, Twice, lengths=(1, 2, 4, 99))
    rows = list(cli.measured("twice", model, longest=4, budget=0.01))
    assert [row["length"] for row in rows] == [1, 2, 4, "generate 40"]
    assert all(len(row["seconds"]) == 2 for row in rows)
    peaks = rows[2]["bytes"]
    assert all(peak is None or peak > 4 * 2**22 for peak in peaks)


def record() -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {"model": "T5", "length": length, "seconds": [2.0, 1.0]} for length in (64, 256, 1024)
    ]
    rows.append({"model": "T5", "length": 4096, "seconds": [8.0, 2.0], "bytes": [2**30, 2**25]})
    rows.append({"model": "T5", "length": "generate 40", "seconds": [1.0, 0.9]})
    rows.append({"model": "BEiT, pixels", "length": 64, "seconds": [1.0, 1.5], "bytes": [2**20, 2**20]})
    return {"machine": MACHINE, "rows": rows}


def test_the_table() -> None:
    table = cli.table(record())
    assert table.rows[0] == ("T5", "0.50", "0.50", "0.50", "0.25", "0.90", "8.00 s → 2.00 s", "1024 MiB → 32 MiB")
    assert table.rows[1][:6] == ("BEiT, pixels: 64", "1.50", "", "", "", "")


def test_the_page_keeps_what_stands_around(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = "<!-- measured: python -m benchmarks.families --docs -->", "<!-- end of measured -->"
    page.write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n")
    cli.write(record(), page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "Time of a thread of a processor, which others used as well (load 0.7), torch 2, 2026-01-01." in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="must have the lines"):
        cli.write(record(), page)


def test_the_record_of_the_page(tmp_path: Path) -> None:
    """What is stored is what the page shows, of models that are still measured."""
    (stored,) = sorted((ROOT / "benchmarks" / "records").glob("families-*.json"))[-1:]
    result = json.loads(stored.read_text())
    assert {row["model"] for row in result["rows"]} <= set(MODELS)
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "huggingface.md").read_text())
    before = page.read_text()
    cli.write(result, page)
    assert page.read_text() == before
    cli._save(result, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == result
