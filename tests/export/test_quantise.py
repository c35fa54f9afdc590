"""Models in fewer bits: what is stored, what comes out, and that masks still hide."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import quantise as benchmark
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import quantize, save, to_onnx, validate

SPEC = BlockSpec(64, 2, Span.causal(64), causal=True)
WEIGHTS = {key: np.asarray(x) for key, x in init_weights(SPEC, seed=0).items()}
TOLERANCES = {"dynamic": 0.1, "static": 0.3, "weights-8": 0.03, "weights-4": 0.4}


def inputs(factor: float = 1.0) -> list[dict[str, np.ndarray]]:
    drawn = np.random.default_rng(0).standard_normal((2, 64, 64))
    return [{"x": (factor * drawn).astype(np.float32)}]


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": x})[0]
    return result


@pytest.mark.parametrize("profile", ["ort", "portable"])
@pytest.mark.parametrize("kind", TOLERANCES)
def test_kinds(kind: str, profile: str, tmp_path: Path) -> None:
    model = to_onnx(SPEC, WEIGHTS, profile=profile)
    before = model.SerializeToString()
    given = inputs() if kind == "static" else None
    path = quantize(model, tmp_path / "quantised.onnx", kind, inputs=given)
    assert model.SerializeToString() == before
    with pytest.raises(FileExistsError):
        quantize(model, path, kind, inputs=given)
    assert path.stat().st_size < 0.5 * save(model, tmp_path / "whole.onnx").stat().st_size
    made = onnx.load(path)
    assert not [
        tensor.name for tensor in made.graph.initializer if tensor.data_type == 1 and np.prod(tensor.dims) > 512
    ]
    report = validate(made, SPEC, WEIGHTS, lengths=[1, 7, 64], batches=(2,), tolerance=TOLERANCES[kind])
    assert report.ok, report.table()
    for tolerance in (None, 1e-4):
        wrong = validate(made, SPEC, WEIGHTS, lengths=[7], batches=(2,), tolerance=tolerance)
        assert "y" in {check.name for check in wrong.failures}


@pytest.mark.parametrize("profile", ["ort", "portable"])
def test_tables_of_branches_and_loops(profile: str, tmp_path: Path) -> None:
    model = to_onnx(SPEC, WEIGHTS, profile=profile, chunk_size=16)
    made = onnx.load(quantize(model, tmp_path / "chunks.onnx", "weights-8"))
    assert "rel_k_int8" in {tensor.name for tensor in made.graph.initializer}
    assert validate(made, SPEC, WEIGHTS, lengths=[7, 40], batches=(2,), tolerance=0.03).ok


@pytest.mark.parametrize("factor", [1.0, 20.0])
def test_masks_hide_large_logits_behind_scales(factor: float, tmp_path: Path) -> None:
    model = to_onnx(SPEC, WEIGHTS, profile="portable")
    path = quantize(model, tmp_path / "static.onnx", "static", inputs=inputs(factor))
    (x,) = inputs(factor)[0].values()
    other = x.copy()
    other[:, 32:] = other[:, 32:][:, ::-1]
    first, second = run(path, x), run(path, other)
    assert np.array_equal(first[:, :32], second[:, :32])
    assert not np.array_equal(first[:, 32:], second[:, 32:])


def test_tables_of_anything_that_is_looked_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "embedding": rng.standard_normal((100, 16)) * np.logspace(-3, 3, 16),
        "both": rng.standard_normal((100, 16)),  # something reads the whole
        "small": rng.standard_normal((100, 2)),
        "zeros": np.zeros((100, 16)),
    }
    nodes = [helper.make_node("Gather", [name, "tokens"], [f"{name}_row"], name=name) for name in arrays]
    nodes.append(helper.make_node("Exp", ["both"], ["whole"], name="whole"))
    nodes.append(helper.make_node("Transpose", ["turned"], ["table"], name="turn", perm=[1, 0]))  # as torch leaves it
    nodes.append(helper.make_node("Gather", ["table", "tokens"], ["table_row"], name="table"))
    outputs = [*(f"{name}_row" for name in arrays), "whole", "table_row"]
    stored = arrays | {"turned": rng.standard_normal((16, 100))}
    graph = helper.make_graph(
        nodes, "lookups", [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in stored.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, tmp_path / "lookups.onnx")
    path = quantize(tmp_path / "lookups.onnx", tmp_path / "int8.onnx", "dynamic")
    kept = {tensor.name for tensor in onnx.load(path).graph.initializer if tensor.name[-6:] != "_scale"}
    assert kept == {"embedding_int8", "zeros_int8", "table_int8", "both", "small"}
    tokens = rng.integers(0, 100, (3, 5))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = dict(zip(outputs, session.run(None, {"tokens": tokens}), strict=True))
    for name, array in (arrays | {"table": stored["turned"].T}).items():  # each column has a scale of its own
        bound = np.max(np.abs(array), axis=0) / 250 + 1e-6
        assert np.all(np.abs(found[f"{name}_row"] - array[tokens]) <= bound), name


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("int8", None, "`kind` must be one of 'dynamic'"),
        ("static", None, "`inputs` go with kind='static'"),
        ("dynamic", inputs(), "`inputs` go with kind='static'"),
        ("static", [], "`inputs` must be at least one"),
    ],
)
def test_wrong_arguments(kind: str, given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(to_onnx(SPEC, WEIGHTS), tmp_path / "none.onnx", kind, inputs=given)
    assert not list(tmp_path.iterdir())


def test_logging_stays_as_it_was(tmp_path: Path) -> None:
    before = logging.root.level, list(logging.root.handlers), logging.root.manager.disable
    quantize(to_onnx(SPEC, WEIGHTS), tmp_path / "block.onnx")
    assert before == (logging.root.level, list(logging.root.handlers), logging.root.manager.disable)


def test_the_table_of_the_page() -> None:
    table = benchmark.measure(64, 64)
    assert [row[0] for row in table.rows] == [f"`{kind}`" for kind in benchmark.KINDS]
    errors = {row[0]: float(row[2]) for row in table.rows}
    assert errors["`float32`"] < 1e-5 < errors["`float16`"] < errors["`weights-8`"] < errors["`weights-4`"] < 1
