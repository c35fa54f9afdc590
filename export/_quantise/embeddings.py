"""Embeddings in the blocks in which onnxruntime's products store weights, so that a head may share them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from relskew_core.export._nodes.functions import all_graphs, readers_of, refill, results_of
from relskew_core.export._quantise.row_products import MIDDLE, is_large

PREFIX = "relskew/blocks"


def store_in_blocks(model: onnx.ModelProto, tool: Any, block: int, least: int) -> None:
    """Store tables whose rows are looked up as ``tool`` stores weights in 8 bits, once for a head that has the same."""
    graph = model.graph
    readers, results = readers_of(graph), results_of(graph)
    names: dict[str, list[str]] = {}
    for tensor in list(graph.initializer):
        found = readers.get(tensor.name, ())
        looked_up = found and all(looks_up(node) and node.input[1] != tensor.name for node in found)
        if not looked_up or tensor.name in results or not is_large(tensor, least):
            continue
        if len(tensor.dims) == 2 and tensor.dims[1] % block == 0:
            matrix = np.ascontiguousarray(numpy_helper.to_array(tensor).T)
            packed, scales, _ = tool.qbits_block_quant(matrix)
            graph.initializer.remove(tensor)
            kept = ("Q8", packed), ("scales", scales)
            names[tensor.name] = [_stored(graph, array, f"{tensor.name}_{kind}") for kind, array in kept]
    if not names:
        return
    constants: dict[str, np.ndarray] = {
        "one": np.array(1, np.float32),
        "zero": np.array(MIDDLE, np.uint8),
        "last": np.array([-1], np.int64),
    }
    graph.initializer.extend(numpy_helper.from_array(value, f"{PREFIX}/{name}") for name, value in constants.items())
    for part in all_graphs(graph):
        refill(part.node, [made for node in part.node for made in _reading(node, names)])


def looks_up(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gather" and not node.domain and not any(one.i for one in node.attribute)


def _stored(graph: onnx.GraphProto, array: np.ndarray, name: str) -> str:
    """Return the name of a stored tensor with these numbers, or store one."""
    made = numpy_helper.from_array(array, name)
    for tensor in graph.initializer:
        if tensor.dims == made.dims and tensor.raw_data == made.raw_data:
            return str(tensor.name)
    graph.initializer.append(made)
    return name


def _reading(node: onnx.NodeProto, names: dict[str, list[str]]) -> Iterator[onnx.NodeProto]:
    if not node.input or node.input[0] not in names:
        yield node
        return
    (table, places), (result,) = node.input, node.output
    packed, scales = names[table]

    def step(kind: str, inputs: list[str], name: str) -> onnx.NodeProto:
        given = [f"{PREFIX}/{each[1:]}" if each.startswith(":") else each for each in inputs]
        attributes: dict[str, Any] = {"axis": 0} if kind in ("Gather", "Concat") else {}
        return helper.make_node(
            kind, given, [f"{result}/{name}" if name else result], f"{node.name}/{name}", **attributes
        )

    yield step("Gather", [packed, places], "rows")
    yield step("DequantizeLinear", [f"{result}/rows", ":one", ":zero"], "numbers")
    yield step("Gather", [scales, places], "scales")
    yield step("Unsqueeze", [f"{result}/scales", ":last"], "scale")
    yield step("Mul", [f"{result}/numbers", f"{result}/scale"], "blocks")
    yield step("Shape", [places], "places")
    yield step("Concat", [f"{result}/places", ":last"], "shape")
    yield step("Reshape", [f"{result}/blocks", f"{result}/shape"], "")
