"""Operator nodes that write the caches that they read, read tables in int8, and projections with heads side by side."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
from onnx import TensorProto, helper

from relskew_core.export._nodes.functions import names_read, read_once, readers_of, refill
from relskew_core.export._nodes.operator import DOMAIN, INPUTS, NAME, OUTPUTS

SCALE = "_scale"  # the end of the names of the scales of a cache in int8, behind the name of the cache
ALIGNED = "aligned"  # an attribute: 1 if there is one key for each position of the past and for each query
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
    model: onnx.ModelProto, node: onnx.NodeProto, new: tuple[str, str], past: tuple[str, str], *, in_int8: bool = False
) -> onnx.NodeProto:
    """Return a node with the same result from the new keys and values and the past, which also gives the presents."""
    changed = copy.deepcopy(node)
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
    made = copy.deepcopy(function)
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


def tables_in_int8(model: onnx.ModelProto, node: onnx.NodeProto, stored: Mapping[str, Sequence[str]]) -> None:
    """Let a node read tables in int8, by the names of their inputs, with a scale for each row."""
    (function,) = (one for one in model.functions if (one.name, one.overload) == (NAME, node.overload))
    made, count = copy.deepcopy(function), len(INPUTS)
    made.overload = node.overload = "_".join([node.overload, *stored, "int8"])
    inputs = [*node.input, *[""] * (count - len(node.input))]
    named = [*made.input, *(f"none_{place}" for place in range(len(made.input), count))]
    nodes = [helper.make_node("Constant", [], ["table/last"], value_ints=[-1])]
    for name, tensors in stored.items():
        place, rows, scales = (INPUTS.index(f"{name}{end}") for end in ("", "_int8", SCALE))
        inputs[place], inputs[rows], inputs[scales] = "", *tensors
        table, named[place] = named[place], f"none_{place}"
        nodes += [
            helper.make_node("Cast", [named[rows]], [f"table/{name}"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", [named[scales], "table/last"], [f"table/{name}{SCALE}"]),
            helper.make_node("Mul", [f"table/{name}", f"table/{name}{SCALE}"], [table]),
        ]
    while not inputs[-1]:
        inputs.pop()
    node.input[:], made.input[:] = inputs, named[: len(inputs)]
    refill(made.node, [*nodes, *made.node])
    if all(one.overload != made.overload for one in model.functions):
        model.functions.append(made)


def drop_unused(model: onnx.ModelProto) -> None:
    used = {node.overload for node in model.graph.node if node.domain == DOMAIN}
    called = [one for one in model.functions if one.domain != DOMAIN or one.name != NAME or one.overload in used]
    refill(model.functions, called)


ATTRIBUTES = {"q": "num_heads", "k": "kv_num_heads", "v": "kv_num_heads"}
PERM = [0, 2, 1, 3]

Sizes = tuple["int | str", ...]


class _Wide(NamedTuple):
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
    made = copy.deepcopy(function)
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
