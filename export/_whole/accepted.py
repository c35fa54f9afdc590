"""Nodes of torch's exporter in the form that runtimes on CPUs accept."""

from __future__ import annotations

from typing import Any

import numpy as np

_EXACT = ("Add", "Sub", "Mul", "Div")
"""Float32 has so many more bits that these results, rounded to bfloat16, are the same as those in bfloat16."""


def compute_in_float32(model: Any) -> None:
    """Compute sums and products of bfloat16 in float32, and round the results: Falcon has such in ALiBi's bias."""
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


def expand_rotary(model: Any) -> None:
    """Expand the cosines and sines of ``RotaryEmbedding`` to the batch: onnxruntime rejects a batch of one."""
    import onnx_ir as ir

    def constant(name: str, numbers: list[int]) -> Any:
        return ir.node("Constant", [], attributes={"value": ir.tensor(np.array(numbers, np.int64), name=name)})

    for node in list(model.graph):
        if node.op_type != "RotaryEmbedding" or node.domain or any(node.inputs[3:]):  # position ids select these rows
            continue
        x, *caches = node.inputs[:3]
        if any(cache.shape is not None and cache.shape[0] != 1 for cache in caches):
            continue
        ones = constant("ones", [1, 1])
        batch = ir.node("Shape", [x], attributes={"start": 0, "end": 1})
        sizes = ir.node("Concat", [batch.outputs[0], ones.outputs[0]], attributes={"axis": 0})
        made = [ir.node("Expand", [cache, sizes.outputs[0]]) for cache in caches]
        for place, expand in enumerate(made, 1):
            node.replace_input_with(place, expand.outputs[0])
        model.graph.insert_before(node, [ones, batch, sizes, *made])
