"""Attention nodes of any graph that read caches of a fixed length, rewritten as ``GroupQueryAttention``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from relskew_core.export._graph.grouped import DOMAIN


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


class GroupedAttentions:
    """The nodes ``Attention`` that read caches; each cache must have one, of a form that the operator has."""

    def __init__(self, model: onnx.ModelProto, caches: Sequence[JoinedCache]) -> None:
        self._graph = model.graph
        self._joins = {cache.present: cache for cache in caches}
        inferred = onnx.shape_inference.infer_shapes(model).graph
        self._shapes = {
            value.name: value.type.tensor_type.shape.dim for value in (*inferred.value_info, *inferred.input)
        }
        self.nodes = {
            node.output[0]: node
            for node in model.graph.node
            if node.op_type == "Attention" and all(name in self._joins for name in node.input[1:3])
        }
        """The nodes, by output."""
        for node in self.nodes.values():
            self._check(node)
        served = [name for node in self.nodes.values() for name in node.input[1:3]]
        for cache in caches:
            if served.count(cache.present) != 1:
                raise ValueError(f"`model` must attend to {cache.present} by one Attention for contrib=True")

    def _check(self, node: onnx.NodeProto) -> None:
        if len(node.input) < 4 or not node.input[3]:
            raise ValueError(f"`model` must hide the future by a mask in {node.name} for contrib=True")
        if any(node.output[1:]):
            raise ValueError(f"`model` must use only the first output of {node.name} for contrib=True")
        dims = self._shapes.get(node.input[0], ())
        if len(dims) != 4 or not dims[1].dim_value or dims[3].dim_value % 8 or not dims[3].dim_value:
            raise ValueError(
                f"`model` must give {node.name} queries (batch, heads, length, D) for contrib=True, with D a "
                "multiple of 8"
            )

    def rewritten(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that replace one of ``nodes``; the operator requires heads side by side."""
        keys, values = (self._joins[name] for name in node.input[1:3])
        heads = self._shapes[node.input[0]][1].dim_value
        # The -1 fails for an empty batch, for which GroupQueryAttention would end the process.
        store(self._graph, "side_by_side", np.array([0, 0, -1], dtype=np.int64))
        store(self._graph, f"apart/{heads}", np.array([0, 0, heads, -1], dtype=np.int64))
        operands = []
        for given, name in ((node.input[0], "q"), (keys.new, "k"), (values.new, "v")):
            turned, flat = f"{node.name}/{name}/turned", f"{node.name}/{name}/side_by_side"
            yield helper.make_node("Transpose", [given], [turned], name=turned, perm=[0, 2, 1, 3])
            yield helper.make_node("Reshape", [turned, shared("side_by_side")], [flat], name=flat)
            operands.append(flat)
        lengths = [shared("lasts_in_32_bits"), shared("total_in_32_bits")]
        (kv_heads,) = {dims[1].dim_value for dims in (self._shapes[keys.past], self._shapes[values.past])}
        kept = {one.name: helper.get_attribute_value(one) for one in node.attribute if one.name in ("scale", "softcap")}
        joined, apart = f"{node.name}/joined", f"{node.name}/apart"
        yield helper.make_node(
            "GroupQueryAttention", [*operands, keys.past, values.past, *lengths, "", "", "", node.input[3]],
            [joined, keys.present, values.present], name=node.name, domain=DOMAIN, num_heads=heads,
            kv_num_heads=kv_heads, **kept,
        )  # fmt: skip
        yield helper.make_node("Reshape", [joined, shared(f"apart/{heads}")], [apart], name=apart)
        yield helper.make_node("Transpose", [apart], [node.output[0]], name=f"{node.name}/heads", perm=[0, 2, 1, 3])


def shared(name: str) -> str:
    """Return the name of a tensor that the nodes of all caches read."""
    return f"relskew/shape/caches/{name}"


def store(graph: onnx.GraphProto, name: str, array: np.ndarray) -> None:
    """Store a constant once."""
    if all(tensor.name != shared(name) for tensor in graph.initializer):
        graph.initializer.append(numpy_helper.from_array(array, shared(name)))
