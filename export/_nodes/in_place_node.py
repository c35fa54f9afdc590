"""Operator nodes that write the caches that they read, instead of separate nodes that write and copy them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

from relskew_core.export._nodes.functions import read_once, refill
from relskew_core.export._nodes.operator import DOMAIN, INPUTS, NAME, OUTPUTS

SCALE = "_scale"
"""The end of the names of the scales of a cache in int8, behind the name of the cache."""

ALIGNED = "aligned"
"""An attribute: 1 if there is one key for each position of the past and for each query."""

K, V, OFFSET = (INPUTS.index(name) for name in ("k", "v", "offset"))
PAST, PAST_INT8 = (INPUTS.index(name) for name in ("past_key", "past_key_int8"))
PRESENT_INT8 = OUTPUTS.index("present_key_int8")


def attending(graph: onnx.GraphProto, presents: Mapping[str, object]) -> dict[str, onnx.NodeProto]:
    """Return, by output, the nodes that are the only readers of two caches and whose queries continue them."""
    alone, found = read_once(graph), {}
    for node in graph.node:
        if (node.domain, node.op_type) != (DOMAIN, NAME) or len(node.input) <= OFFSET or not node.input[OFFSET]:
            continue
        pair = node.input[K], node.input[V]
        own = pair[0] != pair[1] and alone.issuperset(pair) and all(name in presents for name in pair)
        if own and any(one.name == ALIGNED and one.i for one in node.attribute):
            found[node.output[0]] = node
    return found


def with_caches(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    new: tuple[str, str],
    past: tuple[str, str],
    *,
    in_int8: bool = False,
) -> onnx.NodeProto:
    """Return a node with the same result from the new keys and values and the past, which also gives the presents."""
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    presents = node.input[K], node.input[V]
    inputs, outputs = [*node.input], [node.output[0], *presents, *node.output[3:]]
    if in_int8:
        inputs += [*[""] * (PAST_INT8 - len(inputs)), *past, *(f"{name}{SCALE}" for name in past)]
        outputs = [node.output[0], "", "", *node.output[3:], *[""] * (PRESENT_INT8 - max(3, len(node.output)))]
        outputs += [*presents, *(f"{name}{SCALE}" for name in presents)]
    else:
        inputs += [*[""] * (PAST - len(inputs)), *past]
    inputs[K], inputs[V] = new
    changed.input[:], changed.output[:] = inputs, outputs
    changed.overload = f"{node.overload}_in_place{'_int8' if in_int8 else ''}"
    if all(function.overload != changed.overload for function in model.functions):
        (function,) = (one for one in model.functions if one.overload == node.overload and one.name == NAME)
        model.functions.append(_with_caches(function, changed.overload, in_int8=in_int8))
    return changed


def _with_caches(function: onnx.FunctionProto, overload: str, *, in_int8: bool) -> onnx.FunctionProto:
    """Return a function that writes its caches, reads the filled parts, and calls another function with them."""
    made = onnx.FunctionProto()
    made.CopyFrom(function)
    made.overload = overload
    start = PAST_INT8 if in_int8 else PAST
    inputs = [*function.input, *(f"none_{place}" for place in range(len(function.input), start)), "past/k", "past/v"]
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
    kinds, outputs = {"k": function.input[K], "v": function.input[V]}, [*function.output]
    if in_int8:
        inputs += ["past_scale/k", "past_scale/v"]
        none = [f"none/{place}" for place in range(len(outputs), PRESENT_INT8)]  # a function computes all its outputs
        nodes += [helper.make_node("Constant", [], [name], value_ints=[0]) for name in none]
        outputs += [*none, "present/k", "present/v", "present_scale/k", "present_scale/v"]
        nodes += [helper.make_node("Constant", [], [f"cache/{name}"], **value) for name, value in NUMBERS.items()]
    else:
        outputs[1:3] = ["present/k", "present/v"]
    for kind, filled in kinds.items():
        if in_int8:
            nodes += _quantising(kind, filled)
        else:
            nodes += _writing(f"past/{kind}", f"new/{kind}", f"present/{kind}", filled)
    made.input[:], made.output[:] = inputs, outputs
    refill(made.node, [*nodes, *function.node])
    return made


def _writing(past: str, new: str, present: str, filled: str) -> list[onnx.NodeProto]:
    """Return nodes that write rows into a cache, and read its filled part."""
    return [
        helper.make_node("TensorScatter", [past, new, "cache/starts"], [present], axis=2),
        helper.make_node("Slice", [present, "cache/zero", "cache/total", "cache/axis"], [filled]),
    ]


NUMBERS: dict[str, dict[str, Any]] = {
    "last": {"value_ints": [-1]},
    "most": {"value_float": 127.0},
    "least": {"value_float": 2.0**-126},  # of normal numbers: quotients by smaller scales may exceed 127
    "unit": {"value_float": 1.0},
}


def _quantising(kind: str, filled: str) -> Iterator[onnx.NodeProto]:
    """Yield nodes that write rows into a cache in int8 with a scale for each row, and dequantise its filled part."""

    def node(op_type: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
        names = [name if name.startswith("cache/") else f"{name}/{kind}" for name in inputs.split()]
        return helper.make_node(op_type, names, [f"{output}/{kind}"], **attributes)

    yield node("Cast", "new", "wide", to=TensorProto.FLOAT)
    yield node("Abs", "wide", "size")
    yield node("ReduceMax", "size cache/last", "largest", keepdims=0)
    yield node("Div", "largest cache/most", "scale")
    yield node("Greater", "scale cache/least", "is_scaled")
    yield node("Where", "is_scaled scale cache/unit", "divisor")
    yield node("Unsqueeze", "divisor cache/last", "divisor_of_row")
    yield node("Div", "wide divisor_of_row", "divided")
    yield node("Round", "divided", "rounded")
    yield node("Cast", "rounded", "rounded_row", to=TensorProto.INT8)
    yield from _writing(f"past/{kind}", f"rounded_row/{kind}", f"present/{kind}", f"filled/{kind}")
    yield from _writing(f"past_scale/{kind}", f"scale/{kind}", f"present_scale/{kind}", f"filled_scale/{kind}")
    yield node("Cast", "filled", "numbers", to=TensorProto.FLOAT)
    yield node("Unsqueeze", "filled_scale cache/last", "scale_of_row")
    yield node("Mul", "numbers scale_of_row", "dequantised")
    yield helper.make_node("CastLike", [f"dequantised/{kind}", f"new/{kind}"], [filled])


def drop_unused(model: onnx.ModelProto) -> None:
    """Remove the functions that no node calls."""
    used = {node.overload for node in model.graph.node if node.domain == DOMAIN}
    called = [one for one in model.functions if one.domain != DOMAIN or one.name != NAME or one.overload in used]
    refill(model.functions, called)
