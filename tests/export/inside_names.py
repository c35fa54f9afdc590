"""Names in graphs that torch's exporter made: who made a node and what for, and nothing of the machine."""

from typing import Any

import onnx
import onnx_ir
from onnx import TensorProto, helper

from relskew_core.export._models.names import SCOPES, name_lengths, name_nodes


def node(op_type: str, inputs: str, output: str, scopes: list[str] | None, name: str = "", **more: Any) -> Any:
    made = helper.make_node(op_type, inputs.split(), output.split(), name=name or f"node_{output}", **more)
    if scopes is not None:
        made.metadata_props.add(key=SCOPES, value=repr(scopes))
    made.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="/home/somebody/model.py")
    return made


def made() -> Any:
    """Return what torch's exporter leaves of ``model`` with layers ``a`` and ``b``; ``b`` attends twice."""
    a, b = ["", "model.a", "aten"], ["", "model", "model.b", "call"]
    inner = helper.make_graph(
        [node("Neg", "x", "val_9", a)], "branch", [], [helper.make_tensor_value_info("val_9", TensorProto.FLOAT, None)]
    )
    nodes = [
        node("Add", "x model.a.weight", "val_0", a),
        node("Add", "val_0 val_1", "val_2", a),
        node("Softmax", "val_2", "val_3", ["", "model.a", "x"], "relskew/compute/attention_1/skew/rows"),
        node("Split", "val_3", "val_4 val_5", b, "relskew/shape/attention_2/split"),
        node("Mul", "val_4 val_5", "val_6", b, "relskew/compute/attention_3/out"),
        node("If", "flag", "val_7", None, then_branch=inner, else_branch=inner),
        node("Mul", "val_6 val_7", "val_8", ["", "other.c", "x"], "relskew/compute/attention_4/out"),
        node("Relu", "val_8", "val_10", ["model.a", "x"], "relskew/shape/attention_1/rest"),
        node("Neg", "val_10", "val_11", ["x"]),
        node("Abs", "val_11", "y", ["", "model.a", "x"], "strange/relskew/compute/attention_1/out"),
    ]
    tensor = helper.make_tensor_value_info
    stored = [helper.make_tensor(name, TensorProto.FLOAT, [1], [0.0]) for name in ("model.a.weight", "val_1", "loose")]
    graph = helper.make_graph(
        nodes, "g", [tensor("x", TensorProto.FLOAT, ["s0"]), tensor("flag", TensorProto.BOOL, [])],
        [tensor("y", TensorProto.FLOAT, ["s0"])], stored,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    model.metadata_props.add(key="torch", value="/home/somebody")
    model.graph.metadata_props.add(key="torch", value="/home/somebody")
    return onnx_ir.serde.deserialize_model(model)


def test_nodes_are_named_by_module_and_purpose() -> None:
    model = made()
    name_nodes(model, "model.")
    text = onnx_ir.serde.serialize_model(model)
    assert [(node.name, list(node.output)) for node in text.graph.node] == [
        ("a/Add", ["a/Add"]), ("a/Add_2", ["a/Add_2"]), ("a/skew/rows", ["a/skew/rows"]),
        ("b/attention_2/split", ["b/attention_2/split", "b/attention_2/split/1"]),
        ("b/attention_3/out", ["b/attention_3/out"]), ("If", ["If"]), ("attention_4/out", ["attention_4/out"]),
        ("a/rest", ["a/rest"]), ("Neg", ["Neg"]), ("a/Abs", ["y"]),
    ]  # fmt: skip
    branches = [attribute.g for node in text.graph.node for attribute in node.attribute if attribute.HasField("g")]
    assert [[node.name for node in branch.node] for branch in branches] == [["a/Neg"], ["a/Neg_2"]]
    assert {tensor.name for tensor in text.graph.initializer} == {"a.weight", "a/Add_2/constant", "loose"}
    assert list(text.graph.node[0].input) == ["x", "a.weight"]
    assert list(text.graph.node[1].input) == ["a/Add", "a/Add_2/constant"]
    assert "somebody" not in str(text)
    onnx.checker.check_model(text)


def test_a_name_that_a_tensor_of_the_model_has_is_taken() -> None:
    model = made()
    model.graph.inputs[0].name = "a/Add"
    model.graph.outputs[0].name = "If"
    name_nodes(model, "model.")
    assert [node.name for node in model.graph][:2] == ["a/Add_2", "a/Add_3"]
    assert [node.name for node in model.graph][5] == "If_2"


def test_lengths_have_names() -> None:
    sizes: list[Any] = ["s0", "s1 + u2", "u2 + s1", "s3", "s1", "s1*(s1 + s0)", 5, None, "s10"]
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["z"]), helper.make_node("Neg", ["w"], ["y"])], "g",
        [tensor("x", TensorProto.FLOAT, sizes)], [tensor("y", TensorProto.FLOAT, ["s0", None])],
        [helper.make_tensor("w", TensorProto.FLOAT, [1, 1], [0.0])], value_info=[tensor("z", TensorProto.FLOAT, ["s0"])]
    )  # fmt: skip
    model = onnx_ir.serde.deserialize_model(helper.make_model(graph))
    name_lengths(model, {"s0": "batch", "s1": "length", "u2": "past", "length + past": "total", "s9": "none"})
    values = model.graph.inputs[0], model.graph.outputs[0], model.graph.node(0).outputs[0]
    x, y, z = ([getattr(size, "value", size) for size in value.shape or ()] for value in values)
    assert x == ["batch", "total", "total", "s3", "length", "length*(length + batch)", 5, None, "s10"]
    assert y == ["batch", None]
    assert z == ["batch"]
