"""A decoder with a memory as two graphs: nodes that depend on the memory alone run once per text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from relskew_core.export._nodes.functions import all_graphs, names_read, rename

MADE = "memory."
"""The numbered names of the results of the memory's graph, and of the decoder's inputs for them."""


def memory_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the graph of the memory, next to the decoder's."""
    return Path(path).with_name(f"{Path(path).stem}_memory.onnx")


def split_off(model: onnx.ModelProto, inputs: Sequence[str]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Split the nodes that depend on these inputs alone into a model; return it and the rest, which uses its output."""
    graph = model.graph
    given = {value.name for value in graph.input}
    of_memory, others = set(inputs), given - set(inputs)
    first: list[onnx.NodeProto] = []
    later: list[onnx.NodeProto] = []
    fixed: list[onnx.NodeProto] = []  # these depend on no input, and both graphs may need them
    for node in graph.node:
        read = set(names_read([node]))
        if read & others:
            others.update(node.output)
            later.append(node)
        elif read & of_memory:
            of_memory.update(node.output)
            first.append(node)
        else:
            fixed.append(node)
    needed = set(names_read(later)) | {value.name for value in graph.output}
    crossing = [name for node in first for name in node.output if name in needed]
    crossing = [*(name for name in inputs if name in needed), *crossing]
    if not crossing:
        raise ValueError(f"`memory` must affect the outputs of `model`, got a model that reads none of {list(inputs)}")
    renamed = {name: f"{MADE}{number}" for number, name in enumerate(crossing)}
    known = {value.name: value for value in (*graph.value_info, *graph.input)}
    between = []
    for old, new in renamed.items():
        between.append(onnx.ValueInfoProto())
        between[-1].CopyFrom(known[old])
        between[-1].name = new
    passed = [onnx.helper.make_node("Identity", [name], [renamed[name]]) for name in inputs if name in renamed]
    made = {old: new for old, new in renamed.items() if old not in inputs}
    taken = [value for value in graph.input if value.name in inputs]
    kept = [value for value in graph.input if value.name not in inputs]
    memory = _part(model, [*fixed, *_with_names(first, made), *passed], taken, between)
    return memory, _part(model, [*fixed, *_with_names(later, renamed)], [*kept, *between], list(graph.output))


def _part(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    """Return a model of some nodes, with only their inputs."""
    needed = {value.name for value in outputs}
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if needed & set(node.output):
            needed.update(names_read([node]))
            kept.append(node)
    part = onnx.ModelProto(
        ir_version=model.ir_version, producer_name=model.producer_name, producer_version=model.producer_version,
        opset_import=model.opset_import, metadata_props=model.metadata_props,
    )  # fmt: skip
    graph = part.graph
    graph.name = model.graph.name
    graph.node.extend(reversed(kept))
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    graph.input.extend(inputs)
    graph.output.extend(outputs)
    made = {name for node in kept for name in node.output} - {value.name for value in outputs}
    graph.value_info.extend(value for value in model.graph.value_info if value.name in made)
    called = {(node.domain, node.op_type, node.overload) for inner in all_graphs(graph) for node in inner.node}
    part.functions.extend(one for one in model.functions if (one.domain, one.name, one.overload) in called)
    return part


def _with_names(nodes: Sequence[onnx.NodeProto], names: Mapping[str, str]) -> list[onnx.NodeProto]:
    """Return copies of nodes with other names of inputs and outputs."""
    copies = onnx.GraphProto(node=nodes).node
    rename(copies, names)
    return list(copies)
