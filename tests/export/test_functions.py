"""Functions of a model: those of others are named, and a change inside ours is noticed."""

from __future__ import annotations

import onnx

from export_forms import made
from relskew_core.export import to_onnx, validate


def test_other_peoples_functions_are_named() -> None:
    spec, own, weights = made("causal")
    model = to_onnx(spec, weights, operator=True, **own)
    imports = [onnx.helper.make_opsetid("", 23)]
    identity = onnx.helper.make_node("Identity", ["a"], ["b"])
    model.functions.append(onnx.helper.make_function("strange", "Odd", ["a"], ["b"], [identity], imports))
    model.opset_import.append(onnx.helper.make_opsetid("strange", 1))
    failed = {check.name: check.detail for check in validate(model, spec, weights, batches=(1,)).failures}
    assert failed == {"standard": "domain strange; local function Odd"}


def test_notices_a_change_inside_a_function() -> None:
    spec, own, weights = made("causal")
    model = to_onnx(spec, weights, operator=True, **own)
    (attention,) = (node for function in model.functions for node in function.node if node.op_type == "Attention")
    next(attribute for attribute in attention.attribute if attribute.name == "scale").f = 0.5
    assert "y" in {check.name for check in validate(model, spec, weights, batches=(1,)).failures}
