"""Converts decoders whose caches grow into decoders with caches of a fixed length, written in place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relskew_core._array.checks import check_choice, describe
from relskew_core.export._form.plan import IN_PLACE_OPSET
from relskew_core.export._nodes.emitter import INT64, Emitter, Shape, Value
from relskew_core.export._nodes.functions import opset_of, read_once, refill
from relskew_core.export._nodes.in_place import CACHE_LENGTH, attend_filled
from relskew_core.export._nodes.operator_nodes import SCALE, attending, read_side_by_side, with_caches

PAST_LENGTH = "past_length"  # the input with the number of filled places of the caches
INT8 = "int8"  # the dtype of caches whose rows have a scale each


def caches_in_place(
    model: onnx.ModelProto, *, past: str = "past_key_values.", present: str = "present.", cache_dtype: str | None = None
) -> onnx.ModelProto:
    """Replace the growing caches of a decoder by caches of fixed length, which it updates in place.

    A growing cache is copied at every step, and its shape changes. A cache of fixed length is one buffer, bound as
    input and output, of which ``past_length`` positions are filled; attention copies these, or reads the whole cache if
    most of it is filled.

    Parameters
    ----------
    model : onnx.ModelProto
        A decoder of opset 24, with inputs ``past_key_values.N.key`` and ``past_key_values.N.value``
        ``(batch, heads, past_length, D)`` and outputs ``present.N.key`` and ``present.N.value``, each a ``Concat`` of
        its past and the new keys or values; not modified.
    past, present : str
        Prefixes of the names of these inputs and outputs; the rest of the names is the same.
    cache_dtype : {"int8"}, optional
        Store keys and values in int8, each row with a scale: the decoder gets inputs ``past_key_values.N.key_scale``
        and ``past_key_values.N.value_scale (batch, heads, cache_length)`` of float32, and outputs
        ``present.N.key_scale`` and ``present.N.value_scale``. One node ``relskew::RelativeAttention`` must read each
        pair of caches, and nothing else.

    Returns
    -------
    onnx.ModelProto
        The decoder with caches ``(batch, heads, cache_length, D)`` and one more input, ``past_length (1,)`` of int64,
        the same for every item of the batch. Positions after it are not seen; initialise the caches with zeros. If
        there is no room for more tokens, the runtime fails.

    Examples
    --------
    >>> import onnx
    >>> growing = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 24]>
    ...     decoder (float[batch, 2, n, 8] new, float[batch, 2, past_length, 8] past_k)
    ...         => (float[batch, 2, total_length, 8] present_k)
    ...     { present_k = Concat<axis = 2>(past_k, new) }''')
    >>> model = caches_in_place(growing, past="past_", present="present_")
    >>> [node.op_type for node in model.graph.node if node.output[0] == "present_k"]
    ['TensorScatter']
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"`model` must be an onnx.ModelProto, got {describe(model)}")
    if cache_dtype is not None:
        check_choice("cache_dtype", cache_dtype, (INT8,))
    opset = opset_of(model)
    if opset < IN_PLACE_OPSET:
        raise ValueError(f"`model` must have opset {IN_PLACE_OPSET}, which brought TensorScatter, got {opset}")
    changed = copy.deepcopy(model)
    caches = _caches(changed.graph, past, present)
    refill(changed.graph.node, _Writer(changed, caches, cache_dtype).nodes())
    _declare(changed, caches, cache_dtype)
    read_side_by_side(changed)
    return changed


def _caches(graph: onnx.GraphProto, past: str, present: str) -> list[JoinedCache]:
    made = {output: node for node in graph.node for output in node.output}
    pasts = {value.name.removeprefix(past): value.name for value in graph.input if value.name.startswith(past)}
    found = []
    for value in graph.output:
        common = value.name.removeprefix(present)
        if not value.name.startswith(present) or common not in pasts:
            continue
        join = made.get(value.name, onnx.NodeProto())
        axes = [one.i for one in join.attribute if one.name == "axis"]
        if join.op_type != "Concat" or axes not in ([2], [-2]) or list(join.input[:1]) != [pasts[common]]:
            raise ValueError(f"`model` must make {value.name} by a Concat of {pasts[common]} and new values on axis 2")
        found.append(JoinedCache(pasts[common], value.name, join))
    if not found:
        raise ValueError(f"`model` must have outputs {present}… and inputs {past}… with the same endings, got none")
    return found


def _declare(model: onnx.ModelProto, caches: list[JoinedCache], cache_dtype: str | None) -> None:
    names = {name for cache in caches for name in (cache.past, cache.present)}
    for values in (model.graph.input, model.graph.output):
        for value in [value for value in values if value.name in names]:
            tensor = value.type.tensor_type
            tensor.shape.dim[2].dim_param = CACHE_LENGTH
            if cache_dtype is None:
                continue
            tensor.elem_type = TensorProto.INT8
            scales = values.add(name=f"{value.name}{SCALE}")
            scales.type.tensor_type.elem_type = TensorProto.FLOAT
            scales.type.tensor_type.shape.dim.extend(tensor.shape.dim[:3])
    doc = "how many places of the caches are filled, where the tokens go on"
    model.graph.input.append(helper.make_tensor_value_info(PAST_LENGTH, TensorProto.INT64, (1,), doc_string=doc))
    for entry in model.metadata_props:
        if entry.key == "relskew.decoder":
            entry.value = "in_place"


KEPT = ("scale", "softcap", "softmax_precision")
"""The attributes of an Attention that may have any value; others must be zero."""


class JoinedCache(NamedTuple):
    past: str
    present: str
    join: onnx.NodeProto

    @property
    def new(self) -> str:
        return str(self.join.input[1])

    @property
    def filled(self) -> str:
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
        dims: Shape = tuple(
            size.dim_value or size.dim_param or f"{name}/axis_{axis}" for axis, size in enumerate(tensor.shape.dim)
        )
        return Value(name, dims, helper.tensor_dtype_to_np_dtype(tensor.elem_type))


class _Writer:
    """Rewrites the nodes of a decoder: joins become writes, and readers of a cache read its filled part."""

    def __init__(self, model: onnx.ModelProto, caches: list[JoinedCache], cache_dtype: str | None) -> None:
        self._graph, self._caches = model.graph, caches
        self._joins = {cache.present: cache for cache in caches}
        self._pasts = {cache.past: cache for cache in caches}
        self._model, self._operators = model, attending(model.graph, self._joins)
        self._served = {name for node in self._operators.values() for name in node.input[1:3]}
        self._in_int8 = cache_dtype is not None
        others = sorted(set(self._joins) - self._served)
        if others and self._in_int8:
            raise ValueError(
                "`cache_dtype='int8'` requires that only a node relskew::RelativeAttention, whose queries continue a "
                f"cache, reads it, but {others[0]} is read by other nodes or at other positions"
            )
        self._calls = FilledAttentions(model.graph, caches)

    def nodes(self) -> Iterator[onnx.NodeProto]:
        started = False
        # The graph's list of nodes is replaced only after the new ones are collected.
        for node in self._graph.node:
            cache = self._joins.get(node.output[0])
            if cache is not None:
                if not started:
                    yield from self._lengths(cache)
                    started = True
                if cache.present not in self._served:
                    yield from self._written(cache)
            elif node.output[0] in self._operators:
                keys, values = (self._joins[name] for name in node.input[1:3])
                new, past = (keys.new, values.new), (keys.past, values.past)
                yield with_caches(self._model, node, new, past, in_int8=self._in_int8)
            elif node.output[0] in self._calls.nodes:
                yield from self._calls.rewritten(node)
            else:
                yield from self._reading(node)

    def _lengths(self, first: JoinedCache) -> Iterator[onnx.NodeProto]:
        yield _node("Shape", [first.past], "batch", start=0, end=1)
        yield _node("Shape", [first.new], "new_length", start=2, end=3)
        yield _node("Add", [PAST_LENGTH, shared("new_length")], "total_length")
        yield _node("Expand", [PAST_LENGTH, shared("batch")], "starts")
        if self._calls.nodes:
            yield _node("Shape", [first.past], "cache_length", start=2, end=3)

    def _written(self, cache: JoinedCache) -> Iterator[onnx.NodeProto]:
        operands, name = [cache.past, cache.new, shared("starts")], f"{cache.join.name}/write"
        yield helper.make_node("TensorScatter", operands, [cache.present], name=name, axis=2)
        if any(cache.present in node.input for node in self._calls.nodes.values()):
            return
        store(self._graph, "zero", np.zeros(1, np.int64))
        store(self._graph, "axis", np.full(1, 2, np.int64))
        bounds = [shared("zero"), shared("total_length"), shared("axis")]
        yield helper.make_node("Slice", [cache.present, *bounds], [cache.filled], name=f"{cache.join.name}/filled")

    def _reading(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield a node with the filled parts of caches as its inputs; most nodes only read a length."""
        changed = copy.deepcopy(node)
        for index, name in enumerate(node.input):
            cache = self._joins.get(name) or self._pasts.get(name)
            if cache is None or (node.op_type == "Shape" and not _reads_length(node)):
                continue
            if node.op_type == "Shape":
                length = shared("total_length") if name == cache.present else PAST_LENGTH
                yield helper.make_node("Identity", [length], list(node.output), name=node.name)
                return
            if name == cache.past:
                raise ValueError(f"`model` must read {name} by its Concat and by attention alone, got {node.name}")
            changed.input[index] = cache.filled
        yield changed


def _node(op_type: str, inputs: list[str], name: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, [shared(name)], name=shared(name), **attributes)


def _reads_length(node: onnx.NodeProto) -> bool:
    """Whether a Shape reads the length of a cache; one that reads more is not supported."""
    found = {one.name: one.i for one in node.attribute}
    start, end = found.get("start", 0) % 4, found.get("end", 4)
    end = end if end >= 0 else end + 4
    if start <= 2 < end and (start, end) != (2, 3):
        raise ValueError(f"`model` must read only axis 2 of a cache's shape, got {node.name}")
    return (start, end) == (2, 3)


def shared(name: str) -> str:
    return f"relskew/shape/caches/{name}"


def store(graph: onnx.GraphProto, name: str, array: np.ndarray) -> None:
    if all(tensor.name != shared(name) for tensor in graph.initializer):
        graph.initializer.append(numpy_helper.from_array(array, shared(name)))
