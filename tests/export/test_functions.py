"""Graphs folded into functions: few boxes on top, the same nodes inside, the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from export_forms import made
from onnx_sessions import opened
from relskew_core.export import to_onnx, validate
from relskew_core.export._plan import make_plan
from relskew_core.export._validate.trials import make_inputs, make_trials

FOLDED = [
    ("causal", {}), ("full, grouped", {"profile": "portable"}), ("cache, mask", {}), ("cross, window, mask", {}),
    ("clip, values", {"chunk_size": 3}), ("cache, mask", {"chunk_size": 3}), ("blocks", {}), ("bias alone", {}),
    ("in place: cache", {}), ("core: full", {}),
]  # fmt: skip
folded = pytest.mark.parametrize(("form", "options"), FOLDED, ids=[f"{form} {more}" for form, more in FOLDED])


@folded
def test_validates(form: str, options: dict[str, Any]) -> None:
    spec, own, weights = made(form)
    model = to_onnx(spec, weights, functions=True, **own, **options)
    onnx.checker.check_model(model, full_check=True)
    report = validate(model, spec, weights, batches=(2,), lengths=[1, 5], runtimes=["onnxruntime", "reference"])
    assert report.ok, report.table()


@folded
def test_the_same_nodes_and_numbers(form: str, options: dict[str, Any]) -> None:
    spec, own, weights = made(form)
    flat, boxed = (to_onnx(spec, weights, functions=chosen, **own, **options) for chosen in (False, True))
    assert [function.name for function in boxed.functions][-1] == "AttentionOfParts"
    # Projections with biases, and one box.
    assert [node.op_type for node in boxed.graph.node].count("AttentionOfParts") == 1
    assert len(boxed.graph.node) == (1 if "core" in form else 9)
    stored = {tensor.name for tensor in boxed.graph.initializer}
    assert stored == {
        tensor.name for tensor in flat.graph.initializer if not tensor.name.startswith("relskew/constant/")
    }
    inside = {node.name for function in boxed.functions for node in function.node if node.op_type != "Constant"}
    names = {node.name for node in boxed.graph.node} | inside | nested(boxed.functions[-1].node)
    assert {node.name for node in flat.graph.node} | nested(flat.graph.node) <= names
    plan = make_plan(spec, np.dtype(np.float32), **own, **options)
    feeds = make_inputs(plan, make_trials(plan, [4], [3], 0)[0][0], seed=0)
    runs = []
    for model in (flat, boxed):
        session = opened(model)
        runs.append(list[Any](session.run(None, feeds)))
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


def nested(nodes: Any) -> set[str]:
    """Names of the nodes in loops and branches."""
    bodies = [attribute.g.node for node in nodes for attribute in node.attribute if attribute.HasField("g")]
    return {node.name for body in bodies for node in body}.union(*(nested(body) for body in bodies))


def test_without_them_there_are_none() -> None:
    spec, own, weights = made("causal")
    model = to_onnx(spec, weights, **own)
    assert not model.functions
    assert [entry.domain for entry in model.opset_import] == [""]
    with pytest.raises(TypeError, match="`functions` must be a bool"):
        to_onnx(spec, weights, functions=1)  # type: ignore[arg-type]


def test_other_peoples_functions_are_named() -> None:
    spec, own, weights = made("causal")
    model = to_onnx(spec, weights, functions=True, **own)
    imports = [onnx.helper.make_opsetid("", 23)]
    identity = onnx.helper.make_node("Identity", ["a"], ["b"])
    model.functions.append(onnx.helper.make_function("strange", "Odd", ["a"], ["b"], [identity], imports))
    model.opset_import.append(onnx.helper.make_opsetid("strange", 1))
    failed = {check.name: check.detail for check in validate(model, spec, weights, batches=(1,)).failures}
    assert failed == {"standard": "domain strange; local function Odd"}


def test_notices_a_change_inside_a_function() -> None:
    spec, own, weights = made("causal")
    model = to_onnx(spec, weights, functions=True, **own)
    (attention,) = (node for function in model.functions for node in function.node if node.op_type == "Attention")
    next(attribute for attribute in attention.attribute if attribute.name == "scale").f = 0.5
    assert "y" in {check.name for check in validate(model, spec, weights, batches=(1,)).failures}
