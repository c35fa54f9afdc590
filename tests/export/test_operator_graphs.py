"""Graphs whose attention is a node for the operator library: the same numbers with it, without it, and in plain."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from export_forms import exported
from onnx_sessions import opened
from operator_runs import needs_library
from relskew_core import BlockSpec, Span
from relskew_core.export import save, validate, without_operator

pytestmark = needs_library
CAUSAL = BlockSpec(8, 2, Span.causal(8), causal=True)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_a_session_runs_the_operator_instead_of_the_function(level: str) -> None:
    """No text of onnx says so: runtimes decide."""
    (model, *_), (right, *_) = exported(CAUSAL, operator=True), exported(CAUSAL)
    (function,) = model.functions
    made = [("Sub", [function.input[0]] * 2, "zero"), ("Add", ["seven", "zero"], function.output[0])]
    del function.node[:]
    function.node.append(onnx.helper.make_node("Constant", [], ["seven"], value_floats=[7.0]))
    function.node.extend(onnx.helper.make_node(kind, given, [result]) for kind, given, result in made)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)}
    settings = {"graph_optimization_level": getattr(onnxruntime.GraphOptimizationLevel, level)}
    with_it, without = (opened(model, library=each, **settings).run(None, feeds)[0] for each in (True, False))
    expected = opened(right).run(None, feeds)[0]
    np.testing.assert_allclose(with_it, expected, rtol=0, atol=1e-5)
    assert np.abs(without - expected).max() > 1


@pytest.mark.parametrize("form", ["cross, clip, short", "cross, zero, short"])
def test_a_length_that_cuts_a_table_at_one_end_is_refused(form: str) -> None:
    with pytest.raises(ValueError, match=r"`operator=True` requires a `max_length` that cuts both ends .* got 5"):
        exported(form, operator=True)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"excludes a bias by distance in half precision.* got dtype float16"):
        exported(BlockSpec.alibi(8, 2), operator=True, dtype="float16")
    with pytest.raises(TypeError, match=r"`operator` must be"):
        exported(CAUSAL, operator=1)
    with pytest.raises(ValueError, match=r"`model_or_path` must have nodes relskew::RelativeAttention"):
        without_operator(exported(CAUSAL)[0])
    with pytest.raises(TypeError, match=r"`model_or_path` must be an onnx.ModelProto or a path, got int 3"):
        without_operator(3)  # type: ignore[arg-type]


def test_without_operator_reads_a_file(tmp_path: Path) -> None:
    model, *_ = exported(CAUSAL, operator=True)
    path = save(model, tmp_path / "block.onnx")
    assert without_operator(path) == without_operator(str(path)) == without_operator(model)
    assert any(entry.domain == "relskew" for entry in model.opset_import)


def test_validate_names_functions_of_others() -> None:
    model, spec, weights = exported("causal", operator=True)
    imports = [onnx.helper.make_opsetid("", 23)]
    identity = onnx.helper.make_node("Identity", ["a"], ["b"])
    model.functions.append(onnx.helper.make_function("strange", "Odd", ["a"], ["b"], [identity], imports))
    model.opset_import.append(onnx.helper.make_opsetid("strange", 1))
    failed = {check.name: check.detail for check in validate(model, spec, weights, batches=(1,)).failures}
    assert failed == {"standard": "domain strange; local function Odd"}
