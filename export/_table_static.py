"""Tables in graphs with ``QuantizeLinear`` and ``DequantizeLinear``, stored in the bits that products read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from relskew_core.export._graph.functions import all_graphs, cut_axes, readers_of, refill, vectors_of
from relskew_core.export._table_products import MIDDLE


class _Part(NamedTuple):
    """A node that reads a part of a table, those that transpose it, the one that rounds it, and its readers."""

    cut: onnx.NodeProto
    turns: list[onnx.NodeProto]
    rounds: onnx.NodeProto
    unpacked: list[onnx.NodeProto]

    def reads_rows(self, rank: int, vectors: Mapping[str, np.ndarray]) -> bool:
        """Whether it slices rows and transposes them, so that columns could be sliced instead."""
        swapped = [*range(rank - 2), rank - 1, rank - 2]
        turned = [list(one.ints) for node in self.turns for one in node.attribute] == [swapped]
        return turned and cut_axes(self.cut, vectors) == [rank - 2]


def round_tables(model: onnx.ModelProto, least: int) -> None:
    """Round tables of at least this many entries before parts of them are sliced, and not the part of every call.

    The scale is that of a whole table, not of the parts that the calibration has seen.
    """
    graph = model.graph
    readers = readers_of(graph)
    inner = (part for part in all_graphs(graph) if part is not graph)
    elsewhere = {name for part in inner for node in part.node for name in node.input}
    elsewhere |= {value.name for value in graph.output}
    vectors = vectors_of(graph)
    for tensor in list(graph.initializer):
        large = tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1 and np.prod(tensor.dims) >= least
        if not large or tensor.name in elsewhere:
            continue
        parts = [_part(node, tensor.name, readers, elsewhere) for node in readers.get(tensor.name, ())]
        found = [part for part in parts if part is not None]
        if found and len(found) == len(parts):
            _store(graph, tensor, found, columns=all(part.reads_rows(len(tensor.dims), vectors) for part in found))


def _part(
    cut: onnx.NodeProto, table: str, readers: Mapping[str, list[onnx.NodeProto]], elsewhere: set[str]
) -> _Part | None:
    """Follow a part of a table to the node that rounds it; ``None`` if it has other readers."""
    if cut.op_type != "Slice" or cut.input[0] != table:
        return None
    turns: list[onnx.NodeProto] = []
    node = cut
    while node.output[0] not in elsewhere and len(readers.get(node.output[0], ())) == 1:
        (node,) = readers[node.output[0]]
        if node.op_type == "QuantizeLinear":
            unpacked = readers.get(node.output[0], [])
            plain = node.output[0] not in elsewhere and all(one.op_type == "DequantizeLinear" for one in unpacked)
            return _Part(cut, turns, node, unpacked) if plain else None
        if node.op_type != "Transpose":
            return None
        turns.append(node)
    return None


def _store(graph: onnx.GraphProto, tensor: onnx.TensorProto, parts: list[_Part], *, columns: bool) -> None:
    """Store a table in 8 bits, columns first if only columns are read, with one scale for its products."""
    table = numpy_helper.to_array(tensor)
    scale = np.float32(max(np.abs(table).max() / 127, 1e-30))
    whole = (np.rint(table / scale) + MIDDLE).astype(np.uint8)
    whole = np.ascontiguousarray(whole.swapaxes(-2, -1)) if columns else whole
    stored: dict[str, np.ndarray] = {"uint8": whole, "scale": np.array(scale), "zero": np.array(MIDDLE, np.uint8)}
    stored |= {"axis": np.array([table.ndim - 1], np.int64)} if columns else {}
    names = {kind: f"{tensor.name}_{kind}" for kind in stored}
    graph.initializer.remove(tensor)
    graph.initializer.extend(numpy_helper.from_array(array, names[kind]) for kind, array in stored.items())
    changed, unread = set(), []
    for cut, turns, rounds, unpacked in parts:
        cut.input[0] = names["uint8"]
        if columns:
            cut.input[3] = names["axis"]
            unread += turns
        last = (cut, *turns)[0 if columns else -1].output[0]
        for node in unpacked:
            node.input[:] = [last, names["scale"], names["zero"]]
        unread.append(rounds)
        changed |= {node.output[0] for node in (cut, *turns)}
    for node in unread:
        graph.node.remove(node)
    refill(graph.value_info, [value for value in graph.value_info if value.name not in changed])
