"""Rotary positions in the form that runtimes accept: torch's exporter leaves cosines for a batch of one."""

from __future__ import annotations

from typing import Any

import numpy as np


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
