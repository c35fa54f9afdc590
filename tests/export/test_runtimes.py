"""The table of runtimes at small cost: how a graph is tried, rules of runtimes that are not here, the page's record."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.runner import ROOT, Record
from benchmarks.runtimes import RELEASES, Graph, graphs
from benchmarks.trial import BEYOND, RUNTIMES, attempt
from onnx_sessions import RELEASE, opened
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import to_onnx, validate

BUILT_BY_QNN = set(re.findall(r"\w+", """
    Add And Cast Clip Concat Div Equal Expand Gather GatherElements Greater GreaterOrEqual Less LessOrEqual Log MatMul
    Max Min Mod Mul Neg Not Or Pow Reciprocal ReduceMax ReduceSum Reshape ScatterElements Sigmoid Slice Softmax Split
    Squeeze Sub Tanh Tile Transpose Unsqueeze Where
"""))  # fmt: skip
"""Of what onnxruntime-qnn has a builder for (its op_builder_factory.cc, March 2026), what ours could use."""
NEEDS_CONSTANT_AXES = {"Slice": 3, "Squeeze": 1, "Unsqueeze": 1}
"""In TensorRT, by the table of operators of onnx-tensorrt 10.0."""
EXPANDS_ATTENTION = RELEASE >= (1, 32)
"""Whether onnxruntime loads opsets 27 and 28, and makes many nodes of `Attention` from opset 25 on."""


@pytest.fixture(scope="module")
def portable() -> dict[str, Graph]:
    return {case.name: case for case in graphs("portable")}


@pytest.mark.parametrize("opset", [25, 26, 27, 28])
@pytest.mark.parametrize("profile", ["ort", "portable", "trt"])
def test_each_opset_runs_where_the_page_says(profile: Any, opset: int) -> None:
    spec = BlockSpec(8, 2, Span.causal(9), causal=True)
    weights = init_weights(spec, seed=0)
    model, ran = to_onnx(spec, weights, profile=profile, opset=opset, past=True), {}
    for runtime in ("onnxruntime", "openvino", "reference"):
        report = validate(model, spec, weights, runtimes=[runtime], lengths=[1, 5], batches=(2,))
        ran[runtime] = report.ok
        assert report.ok or f"Opset {opset} is" in report.failures[0].detail, report.table()
    assert ran == {"onnxruntime": opset <= (28 if EXPANDS_ATTENTION else 26), "openvino": True, "reference": True}


@pytest.mark.parametrize("opset", [23, 24, 25, 26])
def test_onnxruntime_expands_attention_where_the_page_says(opset: int, tmp_path: Path) -> None:
    spec = BlockSpec(8, 2, Span.causal(9), causal=True)
    model = to_onnx(spec, init_weights(spec, seed=0), opset=opset, past=True)
    opened(model, optimized_model_filepath=str(tmp_path / "optimised.onnx"))
    nodes = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    kept = opset <= 24 or not EXPANDS_ATTENTION
    assert nodes.count("Attention") == kept
    assert (len(nodes) < 30) == kept


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino", "onnxscript"])
def test_graphs_are_tried_as_the_table_says(runtime: str, portable: dict[str, Graph], tmp_path: Path) -> None:
    for name in ("cache", "blocks"):
        portable[name].save(tmp_path)
        assert attempt(RUNTIMES[runtime], tmp_path / f"{name}.onnx") == ""


def test_a_wrong_or_broken_graph_is_reported(portable: dict[str, Graph], tmp_path: Path) -> None:
    portable["full"].save(tmp_path)
    graph, calls = tmp_path / "full.onnx", tmp_path / "full.npz"
    stored = dict(np.load(calls))
    np.savez(calls, **stored | {"0/out/0": stored["0/out/0"] + 1})
    assert attempt(RUNTIMES["onnxruntime"], graph).startswith("wrong by 1.0e+00")
    np.savez(calls, **stored | {"0/out/0": stored["0/out/0"][:1]})
    assert attempt(RUNTIMES["onnxruntime"], graph).startswith("a result of shape")
    np.savez(calls, **stored | {"beyond/in/x": stored["2/in/x"]})
    assert attempt(RUNTIMES["onnxruntime"], graph) == BEYOND
    np.savez(calls, **stored | {"beyond/in/x": np.zeros((2, 10, 8), np.float32)})
    assert attempt(RUNTIMES["onnxruntime"], graph) == ""
    graph.write_bytes(b"no model")
    assert "InvalidProtobuf" in attempt(RUNTIMES["onnxruntime"], graph)


def test_qnn_has_the_operators_of_portable_graphs(portable: dict[str, Graph]) -> None:
    """Shapes are fixed there, so that what works on lengths is folded; loops are not for it."""
    for name, case in portable.items():
        if name != "chunks":
            used = {node.op_type for node in case.model.graph.node if node.name.startswith("relskew/compute/")}
            assert used <= BUILT_BY_QNN, name


def test_tensorrt_has_the_operators_of_its_graphs() -> None:
    for case in graphs("trt"):
        constants = {tensor.name for tensor in case.model.graph.initializer}
        for node in case.model.graph.node:
            axes = node.input[NEEDS_CONSTANT_AXES.get(node.op_type, len(node.input)) :][:1]
            assert set(axes) <= constants, node.name
            if node.op_type == "Attention":
                causal = [attribute.i for attribute in node.attribute if attribute.name == "is_causal"]
                assert (len(node.input), len(node.output), any(causal)) == (4, 1, False), case.name
            assert node.domain == ""


def test_the_record_has_every_release() -> None:
    rows = Record.newest("runtimes").rows
    here = ("onnxruntime", "openvino", "onnxscript")
    apart = {release.name for release in RELEASES if release.packages}
    released = {row.contender for row in rows if row.case["opset"] is None}
    assert {name for name in released if name.split()[0] not in here} <= apart
    assert len(released) == len(RELEASES)
    assert len({str(row.case) for row in rows if row.case["opset"] is not None}) == 23


def test_the_releases_are_those_that_make_installs() -> None:
    (web,) = (release for release in RELEASES if release.runtime == "onnxruntime-web")
    assert web.packages[0] in (ROOT / "Makefile").read_text(encoding="utf-8")
