"""The comparison of whole models: what attends differs and what comes out does not, the tables and their page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import models, report

ROOT = Path(__file__).parents[2]
RELATIVE = [name for name in models.MODELS if name != "no positions"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "WIDTH", 32)


def test_ways_to_attend_agree() -> None:
    """With the same weights, at once and token by token; the model without positions differs."""
    first, *others = (models.Model(models.MODELS[name], 12).eval() for name in (*RELATIVE, "no positions"))
    weights = first.state_dict()
    tokens = torch.randint(models.VOCABULARY, (2, 9))
    with torch.inference_mode():
        expected = first(tokens)
        for number, model in enumerate(others):
            theirs = model.state_dict()
            model.load_state_dict({name: weights[name.replace(".table", ".rel_k")] for name in theirs})
            assert torch.allclose(model(tokens), expected, atol=1e-5) == (number < len(others) - 1)
        for model in (first, *others[:-1]):
            logits, past = model(tokens[:1, :5], model.empty_cache(12))
            parts = [logits]
            for token in tokens[:1, 5:].split(1, dim=1):
                logits, past = model(token, past)
                parts.append(logits)
            torch.testing.assert_close(torch.cat(parts, dim=1), expected[:1], rtol=0, atol=1e-5)


def test_every_task_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "TASKS", {task: (make, (6,)) for task, (make, _) in models.TASKS.items()})
    rows = list(models.measured(0.001, lambda _: None))
    assert {(row.task, row.model) for row in rows} == {(task, name) for task in models.TASKS for name in models.MODELS}
    assert all(row.seconds > 0 for row in rows)


RESULT: dict[str, Any] = {
    "machine": {"cpu": "a processor", "versions": {"torch": "2"}, "date": "2026-01-01", "cores": 2},
    "rows": [
        {"model": "no positions", "task": "a step", "size": 8, "seconds": 2.0},
        {"model": "RelativeMultiheadAttention", "task": "a step", "size": 8, "seconds": 3.0},
    ],
    "graphs": [["lengths", 5, 2]],
}


def test_the_tables() -> None:
    times, graphs = models.tables(RESULT)
    assert times.rows[1] == ("`RelativeMultiheadAttention`", "3.00 s (1.50×)")
    assert times.rows[2] == ("pad, reshape, slice", "–")
    assert graphs.rows == [("lengths", "5", "2", "1")]


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match=r"must have the lines <!-- measured: python -m benchmarks\.models --docs -->"):
        report.put(page, "benchmarks.models", models.text(RESULT))


def test_the_record_of_the_page(tmp_path: Path) -> None:
    """What is stored is what the page shows."""
    stored = sorted((ROOT / "benchmarks" / "records").glob("models-*.json"))[-1]
    result = json.loads(stored.read_text())
    page = tmp_path / "page.md"
    page.write_text(models.PAGE.read_text())
    report.put(page, "benchmarks.models", models.text(result))
    assert page.read_text() == models.PAGE.read_text()
    models.save(result, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == result
    assert all(found == 2 for _, _, found in result["graphs"])
