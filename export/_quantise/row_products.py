"""Products of rows that are rounded to 8 bits, with a scale for each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relskew_core.export._nodes.functions import all_graphs, opset_of, readers_of, refill, results_of

PREFIX = "relskew/in_bits"
AXES_AS_INPUT = 18  # the opset from which the axes of a maximum are an input
MIDDLE = 128  # the zero point of rows
LARGEST = 63  # of a weight in int8: 16 bits hold two products with uint8, as processors without VNNI require
CONSTANTS: dict[str, np.ndarray] = {
    "columns": np.array([2], np.int64), "last": np.array([-1], np.int64), "nothing": np.array(0, np.float32),
    "part": np.array(1 / 127, np.float32), "least": np.array(1e-30, np.float32), "one": np.array(1, np.float32),
    "zero": np.array(MIDDLE, np.uint8),
}  # fmt: skip


def is_large(tensor: onnx.TensorProto, least: int) -> bool:
    return bool(tensor.data_type == TensorProto.FLOAT and np.prod(tensor.dims) >= least)


def store_constants(model: onnx.ModelProto) -> None:
    """Store the constants that the nodes of this module read, once."""
    kept = {tensor.name for tensor in model.graph.initializer}
    named = {f"{PREFIX}/{name}": value for name, value in CONSTANTS.items()}
    model.graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in named.items() if name not in kept)


def multiply_rows(model: onnx.ModelProto, least: int) -> None:
    """Store weights of at least this many entries in int8, by column, and round the rows that they multiply."""
    graph = model.graph
    readers, results = readers_of(graph), results_of(graph)
    found: set[str] = set()
    for tensor in list(graph.initializer):
        nodes = readers.get(tensor.name, ())
        read = nodes and all(node.op_type == "MatMul" and node.input[0] != tensor.name for node in nodes)
        if read and len(tensor.dims) > 1 and tensor.name not in results and is_large(tensor, least):
            matrix = numpy_helper.to_array(tensor)
            scale = np.maximum(np.max(np.abs(matrix), axis=-2, keepdims=True) / LARGEST, np.float32(1e-30))
            graph.initializer.remove(tensor)
            stored = {"int8": np.rint(matrix / scale).astype(np.int8), "scale": scale.astype(np.float32)}
            graph.initializer.extend(numpy_helper.from_array(x, f"{tensor.name}_{end}") for end, x in stored.items())
            found.add(tensor.name)
    if not found:
        return
    store_constants(model)
    for part in all_graphs(graph):
        replace_products(part, {name: (f"{name}_int8", f"{name}_scale") for name in found}, opset_of(model))


def replace_products(graph: onnx.GraphProto, matrices: Mapping[str, Sequence[str]], opset: int) -> None:
    """Multiply rows by matrices in 8 bits; ``matrices`` has their names, those of their scales and of a zero point."""
    rows: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        if node.op_type != "MatMul" or node.input[1] not in matrices:
            nodes.append(node)
            continue
        (x, matrix), (result,) = node.input, node.output
        if x not in rows:
            rows[x] = f"{result}/rows"
            nodes.extend(round_rows(x, rows[x], opset))
        nodes.extend(multiply(rows[x], *matrices[matrix][:2], result, *matrices[matrix][2:]))
    refill(graph.node, nodes)


def round_rows(x: str, base: str, opset: int) -> Iterator[onnx.NodeProto]:
    """Yield nodes that round rows of ``x`` to ``{base}/bits``, with ``{base}/scale``."""
    axes: dict[str, Any] = {"axes": [-1]} if opset < AXES_AS_INPUT else {}
    # A maximum may pass over NaN, and rounding gives it a number: the sum is NaN for a row that is not finite.
    yield _node("ReduceSum", [x, ":last"], f"{base}/sum", keepdims=1)
    yield _node("Mul", [f"{base}/sum", ":nothing"], f"{base}/zero_or_nan")
    yield _node("Abs", [x], f"{base}/sizes")
    yield _node("ReduceMax", [f"{base}/sizes", *([] if axes else [":last"])], f"{base}/largest", keepdims=1, **axes)
    yield _node("Mul", [f"{base}/largest", ":part"], f"{base}/step")
    yield _node("Max", [f"{base}/step", ":least"], f"{base}/divisor")
    yield _node("Div", [x, f"{base}/divisor"], f"{base}/steps")
    yield _node("QuantizeLinear", [f"{base}/steps", ":one", ":zero"], f"{base}/bits")
    yield _node("Add", [f"{base}/divisor", f"{base}/zero_or_nan"], f"{base}/scale")


def multiply(rows: str, matrix: str, scale: str, result: str, *zero: str) -> Iterator[onnx.NodeProto]:
    """Yield the product of rounded rows with a matrix in 8 bits."""
    yield _node("MatMulInteger", [f"{rows}/bits", matrix, ":zero", *zero], f"{result}/sums")
    yield _node("Cast", [f"{result}/sums"], f"{result}/numbers", to=TensorProto.FLOAT)
    # onnxruntime 1.32 loses a bias that is added behind a product of scales.
    yield _node("Mul", [f"{result}/numbers", scale], f"{result}/columns")
    yield _node("Mul", [f"{result}/columns", f"{rows}/scale"], result)


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    given = [f"{PREFIX}/{each[1:]}" if each.startswith(":") else each for each in inputs]
    return helper.make_node(kind, given, [output], output, **attributes)
