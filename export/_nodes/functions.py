"""The attention as a function of the model, and what reads or changes the nodes of a finished graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from relskew_core.export._nodes.operator import DOMAIN, NAME, VERSION

PROJECTIONS = tuple(f"relskew/compute/{name}_proj" for name in ("q", "k", "v", "out"))


def fold_into_operator(
    model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, Any]
) -> None:
    """Replace everything between the projections by the operator's node, and keep it as a function of the same name."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.name.startswith("relskew/constant/")}
    before = {node.name for node in graph.node if node.output[0] in inputs}
    inner = [node for node in graph.node if not node.name.startswith(PROJECTIONS) and node.name not in before]
    function = _fold(graph, inner, constants, model, list(inputs), list(outputs), attributes)
    used = set(names_read(graph.node))
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name in constants and graph.initializer[index].name not in used:
            del graph.initializer[index]
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def _fold(
    graph: onnx.GraphProto, nodes: list[onnx.NodeProto], constants: Mapping[str, onnx.TensorProto],
    model: onnx.ModelProto, inputs: list[str], outputs: list[str], attributes: Mapping[str, Any],
) -> onnx.FunctionProto:  # fmt: skip
    path = "relskew/compute/relative_attention"
    kept_names = {node.name for node in graph.node} - {node.name for node in nodes}
    kept = [node for node in graph.node if node.name in kept_names]
    made = {output for node in nodes for output in node.output}
    read = dict.fromkeys(one for one in names_read(nodes) if one not in made)
    wanted = {*names_read(kept), *(value.name for value in graph.output)}
    assert {one for one in read if one not in constants} <= set(inputs)
    assert {output for node in nodes for output in node.output if output in wanted} == set(outputs)
    stored = [
        helper.make_node("Constant", [], [one], name=f"{path}/{one}", value=constants[one])
        for one in read
        if one in constants
    ]
    opset = opset_of(model)
    foreign = [entry for entry in model.opset_import if entry.domain]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION), *foreign]
    infos = [info for info in graph.value_info if info.name in made]
    named = [one or f"none_{place}" for place, one in enumerate(inputs)]
    function = helper.make_function(
        DOMAIN, NAME, named, outputs, [*stored, *nodes], imports, list(attributes), value_info=infos
    )
    call = helper.make_node(NAME, inputs, outputs, name=path, domain=DOMAIN, **attributes)
    # The call replaces the last of the nodes: nodes before it produce its inputs, and nodes after it read its outputs.
    last = max(index for index, node in enumerate(graph.node) if node.name not in kept_names)
    before = [node for node in graph.node[: last + 1] if node.name in kept_names]
    after = list(graph.node[last + 1 :])
    late = {*outputs}
    moved = [node for node in before if late & set(names_read([node]))]
    refill(graph.node, [*(node for node in before if node not in moved), call, *moved, *after])
    refill(graph.value_info, [info for info in graph.value_info if info.name not in made - wanted])
    return function


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_graphs(attribute.g)


def opset_of(model: onnx.ModelProto) -> int:
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def metadata_of(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def results_of(graph: onnx.GraphProto) -> set[str]:
    return {value.name for part in all_graphs(graph) for value in part.output}


def readers_of(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """Return the nodes that read each tensor, including those in branches and loops."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for part in all_graphs(graph):
        for node in part.node:
            for name in node.input:
                found.setdefault(name, []).append(node)
    return found


def vectors_of(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    return {one.name: numpy_helper.to_array(one) for one in graph.initializer if len(one.dims) == 1}


def cut_axes(node: onnx.NodeProto, vectors: Mapping[str, np.ndarray]) -> list[int]:
    """Return the axes along which a node slices its first input; none if it does anything else."""
    sliced = node.op_type == "Slice" and not node.domain and len(node.input) == 4 and node.input[3] in vectors
    return vectors[node.input[3]].tolist() if sliced else []


def read_once(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that one node reads, not counting the reading of a shape."""
    counts = Counter(name for node in graph.node if node.op_type != "Shape" for name in node.input)
    return {name for name, count in counts.items() if count == 1}


def refill(field: Any, entries: Iterable[Any]) -> None:
    kept = list(entries)
    del field[:]
    field.extend(kept)


def names_read(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Return the names that nodes read, including outer names that their loops read."""
    for node in nodes:
        yield from filter(None, node.input)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                body = attribute.g
                own = {value.name for value in body.input} | {name for inner in body.node for name in inner.output}
                outer = [*names_read(body.node), *(value.name for value in body.output)]
                yield from (name for name in outer if name not in own)


def rename(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    for node in nodes:
        for field in (node.input, node.output):
            if any(name in names for name in field):
                field[:] = [names.get(name, name) for name in field]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                rename(attribute.g.node, names)
                for value in attribute.g.output:
                    value.name = names.get(value.name, value.name)
