"""Operator nodes that write the caches that they read, instead of separate nodes that write and copy them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from relskew_core.export._graph.operator import DOMAIN, INPUTS, NAME

ALIGNED = "aligned"
"""An attribute: 1 if there is one key for each position of the past and for each query."""

K, V, OFFSET, PAST = (INPUTS.index(name) for name in ("k", "v", "offset", "past_key"))


def attending(graph: onnx.GraphProto, presents: Mapping[str, object]) -> dict[str, onnx.NodeProto]:
    """Return, by output, the nodes that are the only readers of two caches and whose queries continue them."""
    readers: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + (node.op_type != "Shape")
    found = {}
    for node in graph.node:
        if (node.domain, node.op_type) != (DOMAIN, NAME) or len(node.input) <= OFFSET or not node.input[OFFSET]:
            continue
        pair = node.input[K], node.input[V]
        own = pair[0] != pair[1] and all(name in presents and readers[name] == 1 for name in pair)
        if own and any(one.name == ALIGNED and one.i for one in node.attribute):
            found[node.output[0]] = node
    return found


def with_caches(
    model: onnx.ModelProto, node: onnx.NodeProto, new: tuple[str, str], past: tuple[str, str]
) -> onnx.NodeProto:
    """Return a node with the same result from the new keys and values and the past, which also gives the presents."""
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    presents = node.input[K], node.input[V]
    inputs = [*node.input, *[""] * (PAST - len(node.input)), *past]
    inputs[K], inputs[V] = new
    del changed.input[:]
    changed.input.extend(inputs)
    del changed.output[:]
    changed.output.extend([node.output[0], *presents, *node.output[3:]])
    changed.overload = f"{node.overload}_in_place"
    if all(function.overload != changed.overload for function in model.functions):
        (function,) = (one for one in model.functions if one.overload == node.overload and one.name == NAME)
        model.functions.append(_with_caches(function, changed.overload))
    return changed


def _with_caches(function: onnx.FunctionProto, overload: str) -> onnx.FunctionProto:
    """Return a function that writes its caches, reads the filled parts, and calls another function with them."""
    made = onnx.FunctionProto()
    made.CopyFrom(function)
    made.overload = overload
    inputs = [*function.input, *(f"none_{place}" for place in range(len(function.input), PAST)), "past/k", "past/v"]
    inputs[K], inputs[V] = "new/k", "new/v"
    constants = {"cache/one": [1], "cache/zero": [0], "cache/axis": [2]}
    nodes = [helper.make_node("Constant", [], [name], value_ints=values) for name, values in constants.items()]
    nodes += [
        helper.make_node("Reshape", [function.input[OFFSET], "cache/one"], ["cache/filled"]),
        helper.make_node("Shape", ["new/k"], ["cache/length"], start=2, end=3),
        helper.make_node("Add", ["cache/filled", "cache/length"], ["cache/total"]),
        helper.make_node("Shape", ["new/k"], ["cache/batch"], start=0, end=1),
        helper.make_node("Expand", ["cache/filled", "cache/batch"], ["cache/starts"]),
    ]
    for kind, place in (("k", K), ("v", V)):
        whole, bounds = f"present/{kind}", ["cache/zero", "cache/total", "cache/axis"]
        written = [f"past/{kind}", f"new/{kind}", "cache/starts"]
        nodes.append(helper.make_node("TensorScatter", written, [whole], axis=2))
        nodes.append(helper.make_node("Slice", [whole, *bounds], [function.input[place]]))
    del made.input[:], made.output[:], made.node[:]
    made.input.extend(inputs)
    made.output.extend([function.output[0], "present/k", "present/v", *function.output[3:]])
    made.node.extend([*nodes, *function.node])
    return made


def drop_unused(model: onnx.ModelProto) -> None:
    """Remove the functions that no node calls."""
    used = {node.overload for node in model.graph.node if node.domain == DOMAIN}
    kept = [one for one in model.functions if one.domain != DOMAIN or one.name != NAME or one.overload in used]
    del model.functions[:]
    model.functions.extend(kept)
