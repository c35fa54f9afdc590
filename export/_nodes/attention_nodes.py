"""Attention nodes of any graph that read caches of a fixed length, rewritten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relskew_core.export._nodes.emitter import INT64, Emitter, Shape, Value
from relskew_core.export._nodes.functions import read_once
from relskew_core.export._nodes.in_place import attend_filled

KEPT = ("scale", "softcap", "softmax_precision")
"""The attributes of an Attention that may have any value; others must be zero."""


@dataclass(frozen=True, slots=True)
class JoinedCache:
    """A cache of keys or values: its input, its output, and the node that joins new and past entries."""

    past: str
    present: str
    join: onnx.NodeProto

    @property
    def new(self) -> str:
        return str(self.join.input[1])

    @property
    def filled(self) -> str:
        """The name of the filled part, which attention reads."""
        return f"{self.present}.filled"


class FilledAttentions:
    """The nodes ``Attention`` that are the only readers of two caches, with a mask to add."""

    def __init__(self, graph: onnx.GraphProto, caches: Sequence[JoinedCache]) -> None:
        self._graph, self._pasts = graph, {cache.present: cache.past for cache in caches}
        self._types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input)}
        self._emitters: dict[np.dtype[Any], Emitter] = {}
        alone = read_once(graph)
        self.nodes = {
            node.output[0]: node
            for node in graph.node
            if node.op_type == "Attention" and alone.issuperset(node.input[1:3]) and self._fits(node)
        }
        """The nodes, by output."""

    def _fits(self, node: onnx.NodeProto) -> bool:
        if len(node.input) != 4 or any(node.output[1:]) or any(name not in self._pasts for name in node.input[1:3]):
            return False
        types = [self._types.get(name) for name in (node.input[0], *(self._pasts[name] for name in node.input[1:3]))]
        if any(one is None or len(one.shape.dim) != 4 or not one.shape.dim[1].dim_value for one in types):
            return False
        mask = self._types.get(node.input[3])
        others = [helper.get_attribute_value(one) for one in node.attribute if one.name not in KEPT]
        return mask is not None and mask.elem_type in (TensorProto.FLOAT, TensorProto.FLOAT16) and not any(others)

    def rewritten(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that replace one of ``nodes``."""
        queries, mask = (self._value(node.input[place], self._types[node.input[place]]) for place in (0, 3))
        keys, values = (self._value(name, self._types[self._pasts[name]]) for name in node.input[1:3])
        g = self._emitters.setdefault(queries.dtype, Emitter(queries.dtype))
        g.scope, before = f"{node.name}/", len(g.graph(node.name).node)
        kept = {one.name: helper.get_attribute_value(one) for one in node.attribute if one.name in KEPT}
        lengths = [Value(shared(name), (1,), INT64) for name in ("new_length", "total_length", "cache_length")]
        heads = Value(node.output[0], queries.shape, queries.dtype)
        attend_filled(g, queries, (keys, values), mask, (lengths[0], lengths[1], lengths[2]), heads, **kept)
        stored = {tensor.name for tensor in self._graph.initializer}  # the name of a constant is its content
        self._graph.initializer.extend(tensor for tensor in g.initializers if tensor.name not in stored)
        yield from g.graph(node.name).node[before:]

    def _value(self, name: str, tensor: onnx.TypeProto.Tensor) -> Value:
        """Return a tensor; an axis without a length has a symbol."""
        dims: Shape = tuple(
            size.dim_value or size.dim_param or f"{name}/axis_{axis}" for axis, size in enumerate(tensor.shape.dim)
        )
        return Value(name, dims, helper.tensor_dtype_to_np_dtype(tensor.elem_type))


def shared(name: str) -> str:
    """Return the name of a tensor that the nodes of all caches read."""
    return f"relskew/shape/caches/{name}"


def store(graph: onnx.GraphProto, name: str, array: np.ndarray) -> None:
    """Store a constant once."""
    if all(tensor.name != shared(name) for tensor in graph.initializer):
        graph.initializer.append(numpy_helper.from_array(array, shared(name)))
