"""`relskew verify`: it passes right results, finds wrong ones and reports missing libraries."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cli.commands import Capture, output_of

import oracles
from relskew_core import BlockSpec, Span, attention_block
from relskew_core._array.extras import to_install
from relskew_core._reference import reference_block
from relskew_core.cli import _console, _libraries, _verify
from relskew_core.cli._libraries import PROBES, ArrayLibrary, Missing, libraries, runtimes
from relskew_core.cli._verify import Case, cases

CASES = {case.name: case for case in cases()}


def rows_of(capsys: Capture, status: int, *arguments: str) -> list[dict[str, Any]]:
    found = json.loads(output_of(capsys, "verify", "--json", *arguments, status=status))
    assert found["ok"] is (status == 0)
    rows: list[dict[str, Any]] = found["rows"]
    return rows


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_its_reference_equals_plain_loops(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_verify, "QUERIES", 33)
    monkeypatch.setattr(_verify, "MEMORY", 37)
    monkeypatch.setattr(_verify, "BATCH", 1)
    given = _verify.inputs(Case(case.name, case.spec, (30, 1, 2) if case.steps else ()), "float64")
    spec = case.spec
    past = (np.zeros((1, 4, 5, 16)), np.ones((1, 4, 5, 16))) if case.steps else None
    y, keys, values = oracles.attention_block(given.x, given.weights, spec, memory=given.memory, past=past)
    got, got_keys, got_values, _ = reference_block(spec, given.weights, given.x, given.memory, past=past)
    if past is not None:
        np.testing.assert_allclose(got_keys, keys, atol=1e-12)
        np.testing.assert_allclose(got_values, values, atol=1e-12)
    assert oracles.relative_error(got, y) < 1e-13


def test_its_reference_refuses_positions_without_a_row() -> None:
    given = _verify.inputs(CASES["window"], "float64")
    with pytest.raises(ValueError, match="no row for the relative positions"):
        reference_block(BlockSpec(64, 4, Span(24, 8)), given.weights, given.x)


def test_numbers_are_rounded_as_torch_rounds() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-20, 20).repeat(25)
    for dtype in ("bfloat16", "float32"):
        # Through float32, in which every library gets them.
        expected = torch.from_numpy(values.astype(np.float32)).to(getattr(torch, dtype)).to(torch.float64).numpy()
        assert np.array_equal(_verify.rounded(values, dtype), expected)
    halves = _verify.rounded(values[:600], "float16")
    assert np.array_equal(halves, values[:600].astype(np.float16).astype(np.float64))


@pytest.mark.parametrize("library", ["numpy", "array-api-strict", "torch", "jax", "mlx", "dask"])
def test_every_library_here_passes(capsys: Capture, library: str) -> None:
    found, missing = libraries((library,))
    if not found:
        pytest.skip(missing[0].reason)
    rows = rows_of(capsys, 0, "--library", library, "--case", "cached", "--case", "clip+values", "--dtype", "float32")
    cpu = [row for row in rows if row["device"] == "cpu"]
    assert [row["case"] for row in cpu] == ["cached", "clip+values"]
    for row in rows:
        assert 0 < row["error"] < row["gate"] == 2e-6
        assert row["seconds"] > 0
        assert row["version"]


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnx reference", "openvino"])
def test_every_runtime_here_passes(capsys: Capture, runtime: str) -> None:
    found, missing = runtimes((runtime,))
    if not found:
        pytest.skip(missing[0].reason)
    rows = rows_of(capsys, 0, "--library", runtime, "--dtype", "float32")
    assert {row["case"] for row in rows} == set(CASES)


def test_one_run_covers_every_case_and_dtype(capsys: Capture) -> None:
    rows = rows_of(capsys, 0, "--library", "numpy")
    assert {row["case"] for row in rows if row["dtype"] == "float32"} == set(CASES)
    assert {row["case"] for row in rows if row["dtype"] == "float64"} == set(_verify.FEW)
    assert len(rows_of(capsys, 0, "--library", "numpy", "--all")) == 3 * len(CASES)


def test_the_table_reads_well(capsys: Capture) -> None:
    told = output_of(capsys, "verify", "--library", "numpy", "--library", "array-api-strict", "--dtype", "float32")
    assert "9 (" in told
    assert "within the tolerances" in told
    assert max(len(line) for line in told.splitlines()) <= _console.PIPE_WIDTH
    told = output_of(capsys, "verify", "--library", "numpy", "--dtype", "float32", "--all")
    assert all(f"│ {case} " in told for case in CASES)


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no\nsuch kernel")


@pytest.mark.parametrize(("broken", "detail"), [
    (lambda *x, **more: (1 + 1e-5) * attention_block(*x, **more), "the error is above the gate"),
    (lambda *x, **more: np.nan * attention_block(*x, **more), "NaN or inf"),
    (lambda *x, **more: attention_block(*x, **more)[:, 1:, :], "a shape differs"),
    (raising, "RuntimeError: no such kernel"),
])  # fmt: skip
def test_a_broken_function_is_found(capsys: Capture, monkeypatch: pytest.MonkeyPatch, broken: Any, detail: str) -> None:
    monkeypatch.setattr(_verify, "attention_block", broken)
    (row,) = rows_of(capsys, 1, "--library", "numpy", "--case", "causal", "--dtype", "float32")
    assert row["ok"] is False
    assert detail in row["detail"]
    both = ("--library", "numpy", "--case", "causal", "--case", "full", "--dtype", "float32")
    told = " ".join(output_of(capsys, "verify", *both, status=1).split())
    assert all(part in told for part in ("NO", detail, "2 of 2 cases failed"))


def test_a_wrong_cache_is_found(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: Any, **kwargs: Any) -> Any:
        y, (keys, values) = attention_block(*args, **kwargs)
        return y, (keys, values * 0.999)

    monkeypatch.setattr(_verify, "attention_block", forgetful)
    (row,) = rows_of(capsys, 1, "--library", "numpy", "--case", "cached", "--dtype", "float32")
    assert row["error"] > row["gate"]


def test_a_wrong_graph_is_found(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    export = pytest.importorskip("relskew_core.export")
    to_onnx = export.to_onnx

    def wrong(spec: Any, weights: Any, **options: Any) -> Any:
        return to_onnx(spec, {**weights, "rel_k": weights["rel_k"][..., ::-1, :]}, **options)

    monkeypatch.setattr(export, "to_onnx", wrong)
    rows = rows_of(capsys, 1, "--library", "onnx reference", "--case", "full", "--case", "cached")
    assert not any(row["ok"] for row in rows)


def test_missing_libraries_are_listed_with_the_reason(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "openvino", None)
    found, missing = libraries(("cupy",))
    assert (found, missing) == ([], [Missing("cupy", "not installed")])
    names = ["--library", "cupy", "--library", "openvino", "--library", "numpy"]
    told = " ".join(output_of(capsys, "verify", *names, "--case", "full", "--dtype", "float32").split())
    assert "missing cupy not installed" in told
    assert "missing openvino" in told


def test_nothing_to_verify_is_not_ok(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "there was nothing to verify" in output_of(capsys, "verify", "--library", "cupy", status=1)


def test_a_library_that_breaks_when_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[ArrayLibrary]:
        raise OSError("libcuda.so.1: cannot open shared object file")
        yield

    monkeypatch.setitem(PROBES, "cupy", broken)
    assert libraries(("cupy",)) == ([], [Missing("cupy", "libcuda.so.1: cannot open shared object file")])


def test_without_onnx_the_runtimes_say_so(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "relskew_core.export", None)
    found, missing = runtimes()
    assert found == []
    assert [one.name for one in missing] == ["onnxruntime", "onnx reference", "openvino"]
    assert all(f"{to_install('onnx')}" in one.reason for one in missing)
    assert runtimes(("numpy",)) == ([], [])
    names = ("--library", "openvino", "--library", "numpy")
    assert to_install("onnx") in output_of(capsys, "verify", *names, "--case", "full", "--dtype", "float64")


def test_slow_calls_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(_libraries, "ENOUGH", 0.0)
    _libraries.timed(lambda: calls.append(1))
    assert len(calls) == 1 + 1
    monkeypatch.setattr(_libraries, "ENOUGH", 1e9)
    calls.clear()
    _libraries.timed(lambda: calls.append(1))
    assert len(calls) == 1 + _libraries.REPEATS


def test_sizes_and_times_for_people() -> None:
    assert [
        _console.as_bytes(size) for size in (5, 2048, 3 * 2**20, 5 * 2**30)
    ] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]  # fmt: skip
    assert [_console.as_time(seconds) for seconds in (None, 0.00123, 2.5)] == ["–", "1.23 ms", "2.50 s"]
    assert [_console.count(number, "case") for number in (1, 2)] == ["1 case", "2 cases"]


def test_progress_is_for_terminals_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with _console.progress("verify") as tell:
        tell("one")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with _console.progress("verify") as tell:
        tell("the first step")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the first step" in captured.err
