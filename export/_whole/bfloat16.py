"""bfloat16 inside models of another dtype, in a form that runtimes on CPUs have: Falcon computes ALiBi's bias in it."""

from __future__ import annotations

from typing import Any

_EXACT = ("Add", "Sub", "Mul", "Div")
"""Float32 has so many more bits that these results, rounded to bfloat16, are the same as those in bfloat16."""


def compute_in_float32(model: Any) -> None:
    """Compute sums and products of bfloat16 in float32, and round the results."""
    import onnx_ir as ir

    def cast(x: Any, node: Any, dtype: ir.DataType) -> Any:
        return ir.node("Cast", [x], attributes={"to": dtype}, metadata_props=dict(node.metadata_props))

    for node in list(model.graph):
        (result, *_) = node.outputs
        if node.op_type not in _EXACT or node.domain or result.dtype != ir.DataType.BFLOAT16:
            continue
        wide = [cast(x, node, ir.DataType.FLOAT) for x in node.inputs]
        inner = ir.node(node.op_type, [x.outputs[0] for x in wide], metadata_props=dict(node.metadata_props))
        rounded = cast(inner.outputs[0], node, ir.DataType.BFLOAT16)
        made = [*wide, inner, rounded]
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], made, [result], rounded.outputs)
