"""What layers have in common is computed once: lengths, equal nodes, and equal nodes in branches of one condition."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from relskew_core.export._translate.chunked import SHARED

MOST_ENTRIES = 2**16  # of constants that are compared, such as the buckets of distances
_LENGTH = re.compile(r"[su]\d+([-+* ]+[su]?\d+)*")  # torch's symbols, and sums and products of them


def share(model: Any) -> None:
    """Compute once what several layers of a graph of torch's exporter have in common; shapes have torch's symbols."""
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass, DeduplicateInitializersPass

    _share_lengths(model)
    DeduplicateInitializersPass(size_limit=MOST_ENTRIES)(model)
    CommonSubexpressionEliminationPass()(model)
    alike: dict[Hashable, list[Any]] = defaultdict(list)
    for node in model.graph:
        if SHARED in node.metadata_props:
            alike[node.inputs[0], node.metadata_props[SHARED]].append(node)
    for nodes in alike.values():
        first, equal = _equal_nodes(model.graph, nodes)
        if equal:
            _share_branch(model.graph, nodes, first, equal)


def _share_lengths(model: Any) -> None:
    """Read lengths with the same symbol from the first tensor that has them: each layer reads its own ones."""
    import onnx_ir as ir

    known: dict[Hashable, Any] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        x, graph = node.inputs[0] if node.op_type == "Shape" else None, node.graph
        if x is None or graph is None or x.shape is None or node.outputs[0].is_graph_output():
            continue
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(x.shape))
        sizes = tuple(size if isinstance(size, int) else size.value for size in x.shape[start:end])
        if not all(isinstance(size, int) or _LENGTH.fullmatch(size or "") for size in sizes):
            continue
        if sizes in known:
            node.outputs[0].replace_all_uses_with(known[sizes])
            graph.remove(node, safe=True)
        elif graph is model.graph:
            known[sizes] = node.outputs[0]


def _equal_nodes(graph: Any, nodes: Sequence[Any]) -> tuple[dict[Any, Any], list[list[Any]]]:
    """Return the first of equal tensors, and nodes of first branches that compute the same from tensors before all."""
    place = {node: number for number, node in enumerate(graph)}
    first: dict[Any, Any] = {}
    found: dict[Hashable, list[Any]] = defaultdict(list)

    def is_early(x: Any) -> bool:
        made = None if x is None else x.producer()
        return made is None or x in first or place.get(made, len(place)) < place[nodes[0]]

    for node in nodes:
        for inner in node.attributes["then_branch"].as_graph():
            plain = all(value.type.name in ("INT", "INTS", "FLOAT", "STRING") for value in inner.attributes.values())
            if plain and all(map(is_early, inner.inputs)) and not inner.outputs[0].is_graph_output():
                read = tuple(first.get(x, x) for x in inner.inputs)
                options = sorted((name, str(value.value)) for name, value in inner.attributes.items())
                found[(inner.op_identifier(), read, *options)].append(inner)
                one, *_ = found[(inner.op_identifier(), read, *options)]
                first.update(zip(inner.outputs, one.outputs, strict=True))
    return first, [equal for equal in found.values() if len(equal) > 1]


def _share_branch(graph: Any, nodes: Sequence[Any], first: Mapping[Any, Any], equal: Sequence[Sequence[Any]]) -> None:
    """Move equal nodes into an ``If`` in front of the others; its second branch, which needs none, is empty tensors."""
    import onnx_ir as ir

    moved, gone = [one for one, *_ in equal], {inner for several in equal for inner in several}
    inside: list[Any] = []
    outside: list[Any] = []
    readers: set[str] = set()
    for several in equal:
        for value, *others in zip(*(inner.outputs for inner in several), strict=True):
            users = [use for x in (value, *others) for use in x.uses() if use.node not in gone]
            if users:
                inside.append(value)
                outside.append(ir.val(value.name, value.dtype, [None] * len(value.shape)))  # the other branch has none
            for user, index in users:
                user.replace_input_with(index, outside[-1])
                readers.add(user.op_type)
    for inner in moved:
        for index, x in enumerate(inner.inputs):
            inner.replace_input_with(index, first.get(x, x))
    for inner in [*reversed([one for several in equal for one in several[1:]]), *moved]:
        inner.graph.remove(inner, safe=inner not in moved)
    nothing = [
        ir.node("Constant", [], {"value": ir.tensor(np.zeros((0,) * len(x.shape), x.dtype.numpy()))}) for x in inside
    ]
    name, few = nodes[0].name, nodes[0].inputs[0]
    bodies = {
        "then_branch": ir.Graph([], inside, nodes=moved, name=f"{name}/shared"),
        "else_branch": ir.Graph([], [one.outputs[0] for one in nothing], nodes=nothing, name=f"{name}/none"),
    }
    given = ir.convenience.convert_attributes(bodies)
    made = ir.Node("", "If", [few], given, outputs=outside, metadata_props=dict(nodes[0].metadata_props))
    graph.insert_before(nodes[0], made)
    if "Attention" in readers:  # which reads the bias
        before = few.producer()
        count = ir.node("Constant", [], {"value_ints": [int(nodes[0].metadata_props[SHARED])]})
        compared = ir.node("LessOrEqual", [before.inputs[0], *count.outputs], name=before.name)
        graph.insert_before(made, [count, compared])
        for node in (made, *nodes):
            node.replace_input_with(0, *compared.outputs)
        if not few.uses():
            graph.remove(before, safe=True)
