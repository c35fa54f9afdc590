"""Products of queries with tables in 8 bits, which are read without dequantisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from relskew_core.export._nodes.functions import (
    all_graphs,
    cut_axes,
    opset_of,
    readers_of,
    refill,
    results_of,
    vectors_of,
)
from relskew_core.export._quantise.row_products import MIDDLE, PREFIX, is_large, replace_products, store_constants

ROWS = 1


class _Chain(NamedTuple):
    """A node that slices rows of a table, one that transposes them, and the products of queries with them."""

    cut: onnx.NodeProto
    turn: onnx.NodeProto
    products: list[onnx.NodeProto]


def multiply_in_bits(model: onnx.ModelProto, least: int) -> None:
    """Store tables of at least this many entries in 8 bits, columns first, if only queries are multiplied by them.

    Each query is rounded with a separate scale, so that no query changes what another one gets.
    """
    graph = model.graph
    find = _Finder(graph)
    found = {}
    for tensor in list(graph.initializer):
        if tensor.name in find.results or len(tensor.dims) != 3 or not is_large(tensor, least):
            continue
        chains = [find(node, tensor.name) for node in find.readers.get(tensor.name, ())]
        whole = [chain for chain in chains if chain is not None]
        if whole and len(whole) == len(chains):
            found[tensor.name] = whole
            _store(graph, tensor)
    if not found:
        return
    store_constants(model)
    for part in all_graphs(graph):
        _rewrite(part, found, opset_of(model))


class _Finder:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self.readers, self._vectors = readers_of(graph), vectors_of(graph)
        self.results = results_of(graph)

    def __call__(self, cut: onnx.NodeProto, table: str) -> _Chain | None:
        # A slice of rows is as fast along columns; gathering columns is far slower.
        turn = self._behind(cut) if cut.input[0] == table and cut_axes(cut, self._vectors) == [ROWS] else []
        if len(turn) != 1 or turn[0].op_type != "Transpose" or [list(x.ints) for x in turn[0].attribute] != [[0, 2, 1]]:
            return None
        columns, products = turn[0].output[0], self._behind(turn[0])
        if not products or any(node.op_type != "MatMul" or node.input[0] == columns for node in products):
            return None
        return _Chain(cut, turn[0], products)

    def _behind(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        name = node.output[0]
        return [] if name in self.results else self.readers.get(name, [])


def _store(graph: onnx.GraphProto, tensor: onnx.TensorProto) -> None:
    table = numpy_helper.to_array(tensor)
    scale = np.maximum(np.max(np.abs(table), axis=(1, 2), keepdims=True) / 127, np.float32(1e-30)).astype(np.float32)
    columns = np.ascontiguousarray((np.rint(table / scale) + MIDDLE).astype(np.uint8).swapaxes(1, 2))
    graph.initializer.remove(tensor)
    graph.initializer.append(numpy_helper.from_array(columns, f"{tensor.name}_uint8"))
    graph.initializer.append(numpy_helper.from_array(scale, f"{tensor.name}_scale"))


def _rewrite(graph: onnx.GraphProto, found: Mapping[str, list[_Chain]], opset: int) -> None:
    cuts = {chain.cut.output[0]: name for name, chains in found.items() for chain in chains}
    turns = {chain.turn.output[0]: chain.cut.output[0] for chains in found.values() for chain in chains}
    for node in graph.node:
        if node.output and node.output[0] in cuts:
            node.input[0] = f"{cuts[node.output[0]]}_uint8"
            node.input[3] = f"{PREFIX}/columns"
    replace_products(graph, {turn: (cut, f"{cuts[cut]}_scale", ":zero") for turn, cut in turns.items()}, opset)
    refill(graph.node, [node for node in graph.node if not node.output or node.output[0] not in turns])
    refill(graph.value_info, [value for value in graph.value_info if value.name not in {*cuts, *turns}])


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
        if not is_large(tensor, least) or len(tensor.dims) < 2 or tensor.name in elsewhere:
            continue
        parts = [_part(node, tensor.name, readers, elsewhere) for node in readers.get(tensor.name, ())]
        found = [part for part in parts if part is not None]
        if found and len(found) == len(parts):
            _store_quantised(
                graph, tensor, found, columns=all(part.reads_rows(len(tensor.dims), vectors) for part in found)
            )


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


def _store_quantised(graph: onnx.GraphProto, tensor: onnx.TensorProto, parts: list[_Part], *, columns: bool) -> None:
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
