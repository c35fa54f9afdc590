"""The comparison with torch's exporter at tiny sizes: textbooks compute the block, and what goes wrong is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import report
from benchmarks.export import __main__ as cli
from benchmarks.export.contenders import BARE, CHUNKED, IN_PLACE, forms, without_positions
from benchmarks.export.measure import Row, caller, measure, measure_decoding, open_session, past_the_end, wrong
from benchmarks.export.record import Record, tables, targets, write
from relskew_core import BlockSpec, Span, attention_block, init_weights

FORMS = forms(16, width=16, heads=2)
MACHINE = {
    "cpu": "a processor", "cores": 2, "date": "2026-01-01", "commit": "abc", "onnxruntime_threads": 1,
    "load_average": 0.7,
    "versions": {"onnxruntime": "1", "torch": "2", "relskew": "3"},
}  # fmt: skip


@pytest.mark.parametrize("name", ["causal", "full", "clip"])
@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_the_textbook_computes_the_block(name: str, length: int) -> None:
    form = FORMS[name]
    weights = init_weights(form.spec, seed=0, xp=torch)
    x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(0))
    expected: Any = attention_block(x, weights, form.spec)
    for textbook in form.textbooks.values():
        torch.testing.assert_close(textbook(form.spec, weights, 16)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "profile"), [("causal", "ort"), ("full", "ort"), ("clip", "ort"), ("causal", "ort-contrib")]
)
def test_the_bare_block_is_the_block_with_empty_tables(name: str, profile: str) -> None:
    spec = FORMS[name].spec
    weights = init_weights(spec, seed=0)
    weights["rel_k"] = weights["rel_k"] * 0
    model = without_positions(spec, init_weights(spec, seed=0), profile=profile)
    assert not {"rel_k"} & {tensor.name for tensor in model.graph.initializer}
    assert len(model.graph.node) == (9 if profile == "ort" else 18)
    x = np.random.default_rng(0).standard_normal((1, 7, 16)).astype(np.float32)
    y = caller(open_session(model.SerializeToString(), 1), x)()
    np.testing.assert_allclose(y, np.asarray(attention_block(x, weights, spec)), atol=1e-5)


def test_measure_and_record(tmp_path: Path) -> None:
    rows = list(measure("causal", FORMS["causal"], [1, 16], rounds=1, budget=0.0, threads=1, tell=lambda text: None))
    assert rows[0].label == BARE
    assert len(rows) == 10
    for row in rows:
        assert not row.refused, row
        assert not row.failed, row
        assert set(row.seconds) == set(row.multiples) == {1, 16}
    ours = [row for row in rows if "relskew" in row.label]
    assert {row.past_the_end for row in ours} == {"fails"}
    assert [row.nodes for row in ours] == [20, 80, 26, 38]
    record = Record(MACHINE, [1, 16], rows)
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record
    page = tmp_path / "page.md"
    marks = "<!-- measured: python -m benchmarks.export --docs -->", "<!-- end of measured -->"
    page.write_text(f"before\n{marks[0]}\nstale\n{marks[1]}\nafter\n")
    write(record, page, cli.heading(record))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of measured -->\nafter\n")
    assert "stale" not in text
    assert "| relskew `ort` | 20 |" in text
    assert "which others were using as well (load average 0.7 before the start)" in text
    with pytest.raises(ValueError, match="must have the lines"):
        write(record, tmp_path / "record.json", "")


def test_decoding() -> None:
    """One token behind two pasts: every graph is right, and has a multiple of the bare one's time."""
    spec = BlockSpec(16, 2, Span.causal(24), causal=True)
    found = measure_decoding(spec, [3, 23], 24, rounds=1, budget=0.0, threads=1, tell=lambda text: None)
    rows = list(found)
    assert len(rows) == 5
    for row in rows:
        assert not row.refused, row
        assert not row.failed, row
        assert set(row.multiples) == {3, 23}
    (table,) = tables(Record(MACHINE, [1], rows))
    assert table.header[-2:] == ("past = 3", "past = 23")


def test_what_goes_wrong_is_told() -> None:
    right = np.ones((1, 2))

    def broken() -> Any:
        raise RuntimeError("no\nkernel")

    assert wrong(lambda: right, right) == ""
    assert wrong(lambda: right * 1.01, right) == "wrong by 1.0e-02"
    assert wrong(lambda: right[:, :1], right) == "gives (1, 1)"
    assert wrong(broken, right) == "RuntimeError: no kernel"
    assert past_the_end(broken) == "fails"
    assert past_the_end(lambda: right) == "gives numbers"


def made(label: str, seconds: float, **more: Any) -> Row:
    return Row("causal", label, 1, 2**20, 0.1, seconds={1024: seconds}, multiples={1024: seconds}, **more)


def test_targets_and_tables() -> None:
    slow, fast = made("relskew `ort`", 1.3), made(CHUNKED, 1.05, past_the_end="fails")
    textbook = made("torch: x", 1.25, failed={7: "wrong by 3.0e-01"})
    lost = Row("causal", "torch: y", refused="ValueError: no")
    record = Record(MACHINE, [7, 1024], [made(BARE, 1.0), slow, fast, textbook, lost])
    assert targets(record).rows == [
        ("causal, L = 1024", "≤ 1.1×", "1.05×", "met"),
        ("causal, the textbook is faster", "nowhere", "nowhere", "met"),
    ]
    textbook.seconds[1024] = textbook.multiples[1024] = 1.1
    fast.seconds[1024] = fast.multiples[1024] = 1.3
    assert targets(record).rows == [
        ("causal, L = 1024", "≤ 1.1×", "1.30×", "MISSED"),
        ("causal, the textbook is faster", "nowhere", "at L = 1024 (1.18×)", "MISSED"),
    ]
    decoder = Row("decoding", IN_PLACE, multiples={128: 1.7, 1024: 1.2})
    assert targets(Record(MACHINE, [], [decoder])).rows == [
        ("decoding in place, every past", "≤ 1.6×", "1.70×", "MISSED")
    ]
    (table,) = tables(record)
    assert table.header[-3:] == ("L = 7", "L = 1024", "L = 1025, past the table")
    assert table.rows[2][-3:] == ("–", "1.30 s (1.30×)", "fails")
    assert table.rows[3][-3:] == ("wrong", "1.10 s (1.10×)", "–")
    assert table.notes == ("torch: x, L = 7: wrong by 3.0e-01", "torch: y: not exported: ValueError: no")
    report.show(table, Console(quiet=True))
