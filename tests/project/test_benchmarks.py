"""The benchmarks at tiny sizes: every contender runs, agrees with float64 and with the others, and is reported."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console

from benchmarks import __main__ as cli
from benchmarks import contenders, memory, report
from benchmarks.inputs import Shape, error, make_inputs
from benchmarks.record import Record
from benchmarks.registry import CONTENDERS, MEMORY_LIMIT, Contender, prepare
from benchmarks.sections import SECTIONS, Effort, Row
from benchmarks.targets import outcomes
from benchmarks.timing import interleave, medians

TINY = {
    "causal": Shape(96, heads=2, dim=16),
    "peaky": Shape(96, heads=2, dim=16, std=30.0),
    "bidirectional": Shape(48, heads=2, dim=16, causal=False),
    "blocks": Shape(64, heads=2, dim=16, block_size=16),
    "window": Shape(64, heads=2, dim=16, window=16),
    "bias": Shape(64, heads=2, dim=16, bias=True),
}
OURS = ("torch-portable", "torch", "numpy-portable", "numpy")
MEETING = {
    "causal": ("huang", "sdpa-bias", "shaw", *OURS),
    "peaky": ("huang", "sdpa-bias", *OURS),
    "bidirectional": ("sdpa-bias", "shaw", *OURS),
    "blocks": ("huang-local", "sdpa-local", *OURS),
    "window": ("sdpa-local", *OURS),
    "bias": ("toeplitz-bias", *OURS),
}
CASES = [pytest.param(case, name, id=f"{case}-{name}") for case, names in MEETING.items() for name in names]


def able(name: str, shape: Shape) -> Contender:
    contender = CONTENDERS[name]
    excuse = contender.excuse(shape)
    if excuse is not None:
        pytest.skip(excuse)
    return contender


@pytest.mark.parametrize(("case", "name"), CASES)
def test_result_is_that_of_the_plain_formula(case: str, name: str) -> None:
    shape = TINY[case]
    inputs = make_inputs(shape)
    out = prepare(able(name, shape), inputs)()
    assert tuple(out.shape) == inputs.v.shape
    assert error(inputs, out, rows=shape.length) < report.GATE * max(1.0, shape.std)


@pytest.mark.parametrize(("case", "name"), CASES)
def test_gradients_agree_with_those_through_the_textbook(case: str, name: str) -> None:
    inputs = make_inputs(TINY[case])
    expected = prepare(CONTENDERS[MEETING[case][0]], inputs, backward=True)()
    found = prepare(able(name, TINY[case]), inputs, backward=True)()
    for one, other in zip(expected, found, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.linalg.norm(one - other) < 1e-5 * max(1.0, TINY[case].std) * np.linalg.norm(one)


def test_x_transformers_adds_the_same_bias() -> None:
    inputs = make_inputs(TINY["bias"])
    assert error(inputs, prepare(able("x-transformers", TINY["bias"]), inputs)(), rows=64) < report.GATE


def test_error_notices_a_wrong_result() -> None:
    inputs = make_inputs(TINY["causal"])
    out = prepare(CONTENDERS["huang"], inputs)()
    out[0, 1, 0] += 1e-3
    assert error(inputs, out, rows=TINY["causal"].length) > report.GATE
    assert error(inputs, prepare(CONTENDERS["plain"], inputs)()) > 0.1


def test_plain_attention_is_attention_without_a_table() -> None:
    inputs = make_inputs(TINY["causal"])
    without = inputs._replace(table=np.zeros_like(inputs.table))
    assert error(without, prepare(CONTENDERS["plain"], inputs)()) < report.GATE


def test_floor_multiplies_what_causal_attention_multiplies() -> None:
    inputs = make_inputs(Shape(300, heads=2, dim=16))
    out = contenders.products(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    for start, stop in ((0, 128), (128, 256), (256, 300)):
        expected = q[..., start:stop, :] @ k[..., :stop, :].swapaxes(-1, -2) @ v[..., :stop, :]
        np.testing.assert_allclose(out[..., start:stop, :], expected, rtol=1e-3, atol=1e-3)


def test_inputs_have_the_spread_that_was_asked_for() -> None:
    for std in (1.0, 30.0):
        inputs = make_inputs(Shape(256, heads=2, std=std))
        x = inputs.to_torch()
        logits = (x.q @ x.k.mT + x.q @ x.table.mT) / 8  # a row meets every table row once: the same spread
        assert float(logits.std()) == pytest.approx(std, rel=0.1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_agrees() -> None:
    shape = Shape(128, heads=2, dim=16)
    contender = able("flex", shape)
    inputs = make_inputs(shape)
    uncompiled = replace(contender, function=contenders.flex_eager)
    assert error(inputs, prepare(uncompiled, inputs)(), rows=128) < report.GATE


def test_timing_takes_turns_and_keeps_the_fastest() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = interleave(calls, rounds=3, budget=10.0)
    turns = [name for number, name in enumerate(order) if number == 0 or order[number - 1] != name]
    assert turns == ["a", "b", "a", "b"]  # rounds a b, b a, a b: equal neighbours run together
    assert all(0 < timing.seconds < timing.spent and timing.rounds == 3 for timing in timings.values())


def test_timing_stops_what_has_spent_its_budget() -> None:
    timings = interleave({"a": lambda: None}, rounds=5, budget=0.0)
    assert timings["a"].rounds == 2


def test_medians_are_of_calls_that_take_turns() -> None:
    turns: list[int] = []
    found = medians([lambda: turns.append(0), lambda: turns.append(1)], 0.01)
    assert turns[:4] == [0, 1, 0, 1]
    assert len(turns) % 2 == 0
    assert all(0 < median < 0.01 for median in found)


@pytest.mark.skipif(memory.unavailable() is not None, reason=str(memory.unavailable()))
def test_memory_sees_what_a_call_allocates() -> None:
    shape = Shape(1024, heads=2, dim=16)
    plain, textbook = (memory.measure(CONTENDERS[name], shape) for name in ("plain", "huang"))
    square = 4 * shape.heads * shape.length**2
    assert 2.9 * square < textbook.extra_bytes < 3.5 * square
    assert 0 < plain.extra_bytes < square
    assert textbook.error is not None
    assert textbook.error < report.GATE


@pytest.mark.skipif(memory.unavailable() is not None, reason=str(memory.unavailable()))
def test_memory_reports_what_a_child_says_when_it_fails() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)huang-local failed at Shape.*RuntimeError: shape"):
        memory.measure(CONTENDERS["huang-local"], Shape(64, heads=1))


def test_what_does_not_fit_is_skipped_with_the_reason() -> None:
    excuse = CONTENDERS["huang"].excuse(Shape(32768))
    assert excuse is not None
    assert excuse.startswith("needs about 1")
    assert CONTENDERS["torch-portable"].excuse(Shape(32768)) is None
    assert CONTENDERS["huang"].needs(Shape(4096)) < MEMORY_LIMIT


@pytest.mark.parametrize("name", SECTIONS)
def test_section_rows_are_measured_or_say_why_not(name: str) -> None:
    effort = Effort(lengths=(64, 128), rounds=2, budget=0.0, long=64, compile=False)
    section = SECTIONS[name]
    if section.peak:
        section = replace(section, contenders=("plain", "numpy-portable"))
    rows = list(section.run(effort, lambda _: None))
    assert {row.contender for row in rows} == set(section.contenders)
    for row in rows:
        assert (row.skipped is None) == (row.seconds is not None)
        assert not report.wrong(Record({}, [row]))
    printed = Console(record=True, width=200)
    for table in report.tables(Record({}, rows))[name]:
        report.show(table, printed)
        assert report.markdown(table).count("\n|") == len(table.rows) + 1
    assert "relskew on NumPy, portable" in printed.export_text()


def test_targets_compare_with_the_promise() -> None:
    def row(name: str, seconds: float) -> Row:
        return Row("forward", name, Shape(2048), seconds=seconds, rounds=1)

    def verdicts(torch_seconds: float) -> dict[str, bool | None]:
        rows = [row("plain", 0.01), row("torch", torch_seconds), row("numpy", 0.04), row("products", 0.01)]
        return {line.name: line.met for line in outcomes(rows)}

    name = "forward, torch, L = 2048, of plain SDPA"
    assert verdicts(0.0179)[name] is True
    assert verdicts(0.0181)[name] is False
    assert verdicts(0.01)["forward, NumPy, L = 2048, speed of its bare products"] is False
    assert verdicts(0.01)["one head, L = 65536, torch, extra memory"] is None


def test_wrong_results_are_reported() -> None:
    rows = [Row("forward", "torch", Shape(512), seconds=1.0, error=error) for error in (1e-7, 1e-3, float("nan"))]
    assert len(report.wrong(Record({}, rows))) == 2


def test_command_line_writes_a_record_that_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(typer.Exit) as stop:
        cli.main(lengths="64", rounds=1, only=["peaky", "bias"], json=path)
    assert stop.value.exit_code == 0
    stored = json.loads(path.read_text())
    assert stored["machine"]["cores"] >= 1
    again = Record.load(path)
    assert {row.section for row in again.rows} == {"peaky", "bias"}
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize("text", ["x", "512;1024", "8"])
def test_command_line_refuses_lengths_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="separated by commas"):
        cli.main(lengths=text)


def test_command_line_refuses_unknown_sections() -> None:
    with pytest.raises(typer.BadParameter, match="'nothing' is not a section"):
        cli.main(only=["nothing"])


def test_documentation_shows_every_section_and_target(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import document

    effort = Effort(lengths=(64, 128), rounds=1, budget=0.0, long=64, compile=False)
    rows: list[Row] = []
    for name in ("forward", "training", "blocks", "window"):
        section = SECTIONS[name]
        rows += section.run(effort, lambda _: None)
    rows += [
        replace(row, section="memory", extra_bytes=2**20) for row in rows if row.section == "forward" and row.seconds
    ]
    machine = {
        "cpu": "a machine",
        "cores": 2,
        "versions": {},
        "commit": "c",
        "date": "2026-01-01T",
        "load_average": 0.0,
    }
    document.write(Record(machine, rows), tmp_path)
    page = (tmp_path / "benchmarks.md").read_text()
    for picture in (tmp_path / "benchmarks").glob("*.png"):
        assert f"benchmarks/{picture.name}" in page
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "benchmarks").glob("*.png"))) == 4
    assert all(line.name in page for line in outcomes(rows))
    assert "matplotlib.pyplot" not in sys.modules or "agg" in sys.modules["matplotlib"].get_backend().lower()
