"""Operator nodes on heads that are side by side, as projections produce them, so that nothing is transposed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import onnx
from onnx import helper

from relskew_core.export._nodes.functions import names_read, readers_of, refill
from relskew_core.export._nodes.in_place_node import drop_unused
from relskew_core.export._nodes.operator import DOMAIN, INPUTS, NAME

ATTRIBUTES = {"q": "num_heads", "k": "kv_num_heads", "v": "kv_num_heads"}
PERM = [0, 2, 1, 3]

Sizes = tuple["int | str", ...]


class _Wide(NamedTuple):
    """A tensor ``(batch, length, heads * width)``."""

    name: str
    heads: int
    width: int


def read_side_by_side(model: onnx.ModelProto) -> None:
    """Let operator nodes read and write ``(batch, length, heads * width)`` where a graph has these tensors."""
    graph = _Graph(model.graph)
    for node in model.graph.node:
        if (node.domain, node.op_type) == (DOMAIN, NAME):
            _change(model, graph, node)
    drop_unused(model)
    _drop_unread(model.graph)


class _Graph:
    """The producers and consumers of tensors, and their sizes."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._made = {name: node for node in graph.node for name in node.output}
        self._readers = readers_of(graph)
        self._outputs = {value.name for value in graph.output}
        values = (*graph.input, *graph.value_info, *graph.output)
        self._sizes: dict[str, Sizes] = {
            value.name: tuple(size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim)
            for value in values
        }

    def rows(self, name: str) -> _Wide | None:
        """Return the tensor that heads ``(batch, heads, length, width)`` are split from."""
        turned = self._made.get(name)
        split = self._made.get(turned.input[0]) if turned is not None and _turns(turned) else None
        if split is None or split.op_type != "Reshape":
            return None
        return self._joined(split.input[0], split.output[0])

    def joined(self, name: str) -> _Wide | None:
        """Return the tensor that heads are joined to, if nothing else reads them."""
        turned = self._reader(name)
        joined = self._reader(turned.output[0]) if turned is not None and _turns(turned) else None
        if turned is None or joined is None or joined.op_type != "Reshape":
            return None
        return self._joined(joined.output[0], turned.output[0])

    def unmake(self, name: str) -> None:
        """Free a name for another node; its old producer gets a new one that nothing reads."""
        self._made[name].output[0] = f"{name}/unread"

    def _reader(self, name: str) -> onnx.NodeProto | None:
        found = self._readers.get(name, [])
        return found[0] if len(found) == 1 and name not in self._outputs else None

    def _joined(self, name: str, by_head: str) -> _Wide | None:
        """Return a tensor that equals another one with its last two axes joined, if the sizes show it."""
        whole, split = self._sizes.get(name, ()), self._sizes.get(by_head, ())
        if len(whole) != 3 or len(split) != 4 or not all(whole[:2]) or whole[:2] != split[:2]:
            return None
        heads, width = split[2:]
        if not isinstance(heads, int) or not isinstance(width, int) or heads * width != whole[2]:
            return None
        return _Wide(name, heads, width)


def _turns(node: onnx.NodeProto) -> bool:
    return node.op_type == "Transpose" and [list(one.ints) for one in node.attribute] == [PERM]


def _change(model: onnx.ModelProto, graph: _Graph, node: onnx.NodeProto) -> None:
    """Let one node read rows, and write them if its queries are rows."""
    found = {name: rows for name in ATTRIBUTES if (rows := graph.rows(node.input[INPUTS.index(name)]))}
    out = graph.joined(node.output[0])
    if "q" not in found or out is None:
        found.pop("q", None)
        out = None
    if not found:
        return
    function = next(one for one in model.functions if (one.name, one.overload) == (NAME, node.overload))
    node.overload = "_".join([node.overload, *(f"{name}{x.heads}x{x.width}" for name, x in found.items())])
    for name, x in found.items():
        node.input[INPUTS.index(name)] = x.name
    if out is not None:
        graph.unmake(out.name)
        node.output[0] = out.name
        node.overload += f"_out{out.width}"
    heads = {ATTRIBUTES[name]: x.heads for name, x in found.items()}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in heads.items())
    if all(one.overload != node.overload for one in model.functions):
        model.functions.append(_of_rows(function, node.overload, found, out, heads))


def _of_rows(
    function: onnx.FunctionProto, overload: str, found: dict[str, _Wide], out: _Wide | None, attributes: dict[str, int]
) -> onnx.FunctionProto:
    """Return a function that splits rows into heads, calls another function on them, and joins them."""
    made = onnx.FunctionProto()
    made.CopyFrom(function)
    made.overload = overload
    made.attribute.extend(attributes)
    del made.node[:]
    for name, x in found.items():
        place = INPUTS.index(name)
        made.input[place] = f"rows/{name}"
        made.node.extend(_split(made.input[place], function.input[place], x))
    made.node.extend(function.node)
    if out is not None:
        made.output[0] = "rows/out"
        size, turned = "rows/out/size", "rows/out/turned"
        made.node.append(helper.make_node("Transpose", [function.output[0]], [turned], perm=PERM))
        made.node.append(helper.make_node("Constant", [], [size], value_ints=[0, 0, out.heads * out.width]))
        made.node.append(helper.make_node("Reshape", [turned, size], [made.output[0]]))
    return made


def _split(rows: str, heads: str, x: _Wide) -> Iterator[onnx.NodeProto]:
    yield helper.make_node("Constant", [], [f"{rows}/size"], value_ints=[0, 0, x.heads, x.width])
    yield helper.make_node("Reshape", [rows, f"{rows}/size"], [f"{rows}/split"])
    yield helper.make_node("Transpose", [f"{rows}/split"], [heads], perm=PERM)


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Remove the nodes whose results are not read, and those that only they had read."""
    used, kept, dropped = {value.name for value in graph.output}, [], set()
    for node in reversed(graph.node):
        if used.isdisjoint(node.output):
            dropped.update(node.input)
            continue
        kept.append(node)
        used.update(names_read([node]))
    refill(graph.node, kept[::-1])
    refill(graph.value_info, [value for value in graph.value_info if value.name in used])
    for tensor in [tensor for tensor in graph.initializer if tensor.name in dropped - used]:
        graph.initializer.remove(tensor)
