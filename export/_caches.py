"""Converts decoders whose caches grow into decoders with caches of a fixed length, written in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relskew_core._array.checks import check_bool, describe
from relskew_core.export._graph.grouped import DOMAIN
from relskew_core.export._graph.in_place_node import attending, with_caches
from relskew_core.export._graph.side_by_side import read_side_by_side
from relskew_core.export._profiles import IN_PLACE_OPSET

PAST_LENGTH = "past_length"
"""The input with the number of filled places of the caches."""

CACHE_LENGTH = "cache_length"
"""The symbol of the caches' length, as long as it is not a number."""


def caches_in_place(
    model: onnx.ModelProto, *, past: str = "past_key_values.", present: str = "present.", contrib: bool = False
) -> onnx.ModelProto:
    """Replace the growing caches of a decoder by caches of fixed length, which it updates in place.

    A growing cache is copied at every step, and its shape changes. A cache of fixed length is one buffer, bound as
    input and output, of which ``past_length`` positions are filled; attention reads only these.

    Parameters
    ----------
    model : onnx.ModelProto
        A decoder of opset 24, with inputs ``past_key_values.N.key`` and ``past_key_values.N.value``
        ``(batch, heads, past_length, D)`` and outputs ``present.N.key`` and ``present.N.value``, each a ``Concat`` of
        its past and the new keys or values; not modified.
    past, present : str
        Prefixes of the names of these inputs and outputs; the rest of the names is the same.
    contrib : bool, default False
        Use onnxruntime's ``GroupQueryAttention``, which reads a cache in place; otherwise its filled part is copied.
        Every layer must use one ``Attention`` whose mask hides the future, with a head dimension that is a multiple of
        8. Several tokens after a past are supported for a batch of one.

    Returns
    -------
    onnx.ModelProto
        The decoder with caches ``(batch, heads, cache_length, D)`` and one more input, ``past_length (1,)`` of int64,
        the same for every item of the batch. Positions after it are not seen; initialise the caches with zeros. If
        there is no room for more tokens, the runtime fails.

    Raises
    ------
    ValueError, TypeError
        If the model is not such a decoder; the message names the cache.

    See Also
    --------
    decoder_to_onnx : exports such caches with ``in_place=True``.
    to_onnx : exports one block with such caches.

    Examples
    --------
    >>> from onnx import helper
    >>> def tensor(name, *shape):
    ...     return helper.make_tensor_value_info(name, 1, shape)
    >>> nodes = [helper.make_node("Concat", ["past.k", "new"], ["present.k"], axis=2)]
    >>> inputs = [
    ...     tensor("new", "batch", 2, "length", 8),
    ...     tensor("past.k", "batch", 2, "past_length", 8),
    ... ]
    >>> graph = helper.make_graph(
    ...     nodes, "g", inputs, [tensor("present.k", "batch", 2, "total_length", 8)]
    ... )
    >>> growing = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    >>> model = caches_in_place(growing, past="past.")
    >>> [node.op_type for node in model.graph.node if node.output[0] == "present.k"]
    ['TensorScatter']
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"`model` must be an onnx.ModelProto, got {describe(model)}")
    check_bool("contrib", contrib)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset < IN_PLACE_OPSET:
        raise ValueError(f"`model` must have opset {IN_PLACE_OPSET}, which brought TensorScatter, got {opset}")
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    caches = _caches(changed.graph, past, present)
    nodes = list(_Writer(changed, caches, contrib).nodes())
    del changed.graph.node[:]
    changed.graph.node.extend(nodes)
    _declare(changed, caches)
    read_side_by_side(changed)
    if contrib:
        changed.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return changed


@dataclass(frozen=True, slots=True)
class _Cache:
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


def _caches(graph: onnx.GraphProto, past: str, present: str) -> list[_Cache]:
    """Return the caches of a graph in the order of its outputs."""
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
        found.append(_Cache(pasts[common], value.name, join))
    if not found:
        raise ValueError(f"`model` must have outputs {present}… and inputs {past}… with the same endings, got none")
    return found


def _declare(model: onnx.ModelProto, caches: list[_Cache]) -> None:
    """Name the caches' length in the inputs and outputs, and add an input."""
    names = {name for cache in caches for name in (cache.past, cache.present)}
    for value in (*model.graph.input, *model.graph.output):
        if value.name in names:
            value.type.tensor_type.shape.dim[2].dim_param = CACHE_LENGTH
    doc = "how many places of the caches are filled, where the tokens go on"
    model.graph.input.append(helper.make_tensor_value_info(PAST_LENGTH, TensorProto.INT64, (1,), doc_string=doc))
    for entry in model.metadata_props:
        if entry.key == "relskew.decoder":
            entry.value = "in_place"


class _Writer:
    """Rewrites the nodes of a decoder: joins become writes, and readers of a cache read its filled part."""

    def __init__(self, model: onnx.ModelProto, caches: list[_Cache], contrib: bool) -> None:
        self._graph, self._caches, self._contrib = model.graph, caches, contrib
        self._joins = {cache.present: cache for cache in caches}
        self._pasts = {cache.past: cache for cache in caches}
        self._calls = self._attentions(model) if contrib else {}
        self._model, self._operators = model, attending(model.graph, self._joins)
        self._served = {name for node in self._operators.values() for name in node.input[1:3]}

    def nodes(self) -> Iterator[onnx.NodeProto]:
        """Yield the nodes in order."""
        started = False
        # The graph's list of nodes is replaced only after the new ones are collected.
        for node in self._graph.node:
            cache = self._joins.get(node.output[0])
            if cache is not None:
                if not started:
                    yield from self._lengths(cache)
                    started = True
                if not self._contrib and cache.present not in self._served:
                    yield from self._written(cache)
            elif node.output[0] in self._operators:
                keys, values = (self._joins[name] for name in node.input[1:3])
                yield with_caches(self._model, node, (keys.new, values.new), (keys.past, values.past))
            elif node.output[0] in self._calls:
                yield from self._grouped(node, *self._calls[node.output[0]])
            else:
                yield from self._reading(node)

    def _lengths(self, first: _Cache) -> Iterator[onnx.NodeProto]:
        """Yield nodes for all caches: where their tokens continue, and how many places are filled then."""
        yield _node("Shape", [first.past], "batch", start=0, end=1)
        yield _node("Shape", [first.new], "new_length", start=2, end=3)
        yield _node("Add", [PAST_LENGTH, _name("new_length")], "total_length")
        yield _node("Expand", [PAST_LENGTH, _name("batch")], "starts")
        if not self._contrib:
            return
        # GroupQueryAttention lets a cache grow if its buffer is not shared; TensorScatter fails if one is full.
        self._store("none", np.zeros(1, np.uint8))
        self._store("one", np.ones(1, np.int64))
        self._store("scalar", np.zeros(0, np.int64))
        yield _node("Shape", [first.past], "cache_length", start=2, end=3)
        for name, length in (("room", "cache_length"), ("fresh", "new_length")):
            yield _node("Concat", [_name("batch"), _name(length)], f"{name}_shape", axis=0)
            yield _node("Expand", [_name("none"), _name(f"{name}_shape")], name)
        yield _node("TensorScatter", [_name("room"), _name("fresh"), _name("starts")], "written", axis=1)
        # Equal symbolic shapes let onnxruntime write into the cache's buffer; otherwise it copies it, and warns at
        # every step.
        rows = self._dims(first.past)[0]
        for name in ("room", "written"):
            shape = (rows.dim_param or rows.dim_value or None, CACHE_LENGTH)
            self._graph.value_info.append(helper.make_tensor_value_info(_name(name), TensorProto.UINT8, shape))
        yield _node("Shape", [_name("written")], "rows", start=0, end=1)
        yield _node("Sub", [_name("total_length"), _name("one")], "last")
        yield _node("Expand", [_name("last"), _name("rows")], "lasts")
        yield _node("Cast", [_name("lasts")], "lasts_in_32_bits", to=TensorProto.INT32)
        yield _node("Reshape", [_name("total_length"), _name("scalar")], "total")
        yield _node("Cast", [_name("total")], "total_in_32_bits", to=TensorProto.INT32)

    def _written(self, cache: _Cache) -> Iterator[onnx.NodeProto]:
        """Yield the node that writes new keys or values into a cache, and the one that reads its filled part."""
        self._store("zero", np.zeros(1, np.int64))
        self._store("axis", np.full(1, 2, np.int64))
        operands, name = [cache.past, cache.new, _name("starts")], f"{cache.join.name}/write"
        yield helper.make_node("TensorScatter", operands, [cache.present], name=name, axis=2)
        bounds = [_name("zero"), _name("total_length"), _name("axis")]
        yield helper.make_node("Slice", [cache.present, *bounds], [cache.filled], name=f"{cache.join.name}/filled")

    def _reading(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield a node with the filled parts of caches as its inputs; most nodes only read a length."""
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        for index, name in enumerate(node.input):
            cache = self._joins.get(name) or self._pasts.get(name)
            if cache is None or (node.op_type == "Shape" and not _asks_length(node)):
                continue
            if node.op_type == "Shape":
                length = _name("total_length") if name == cache.present else PAST_LENGTH
                yield helper.make_node("Identity", [length], list(node.output), name=node.name)
                return
            if name == cache.past or self._contrib:
                raise ValueError(f"`model` must read {name} by its Concat and by attention alone, got {node.name}")
            changed.input[index] = cache.filled
        yield changed

    def _attentions(self, model: onnx.ModelProto) -> dict[str, tuple[_Cache, _Cache, int]]:
        """Return each attention's caches and number of heads, by its output."""
        inferred = onnx.shape_inference.infer_shapes(model).graph
        shapes = {value.name: value.type.tensor_type.shape.dim for value in (*inferred.value_info, *inferred.input)}
        calls, served = {}, []
        for node in self._graph.node:
            pair = [self._joins.get(name) for name in node.input[1:3]]
            if node.op_type != "Attention" or None in pair:
                continue
            keys, values = pair
            assert keys is not None
            assert values is not None
            if len(node.input) < 4 or not node.input[3]:
                raise ValueError(f"`model` must hide the future by a mask in {node.name} for contrib=True")
            if any(node.output[1:]):
                raise ValueError(f"`model` must use only the first output of {node.name} for contrib=True")
            dims = shapes.get(node.input[0], ())
            if len(dims) != 4 or not dims[1].dim_value or dims[3].dim_value % 8 or not dims[3].dim_value:
                raise ValueError(
                    f"`model` must give {node.name} queries (batch, heads, length, D) for contrib=True, with D a "
                    "multiple of 8"
                )
            calls[node.output[0]] = keys, values, dims[1].dim_value
            served += [keys.present, values.present]
        for cache in self._caches:
            if served.count(cache.present) != 1:
                raise ValueError(f"`model` must attend to {cache.present} by one Attention for contrib=True")
        return calls

    def _grouped(self, node: onnx.NodeProto, keys: _Cache, values: _Cache, heads: int) -> Iterator[onnx.NodeProto]:
        """Yield GroupQueryAttention in place of Attention, with the heads side by side as it requires."""
        # The -1 fails for an empty batch, for which GroupQueryAttention would end the process.
        self._store("side_by_side", np.array([0, 0, -1], dtype=np.int64))
        self._store("apart", np.array([0, 0, heads, -1], dtype=np.int64), f"{heads}")
        operands = []
        for given, name in ((node.input[0], "q"), (keys.new, "k"), (values.new, "v")):
            turned, flat = f"{node.name}/{name}/turned", f"{node.name}/{name}/side_by_side"
            yield helper.make_node("Transpose", [given], [turned], name=turned, perm=[0, 2, 1, 3])
            yield helper.make_node("Reshape", [turned, _name("side_by_side")], [flat], name=flat)
            operands.append(flat)
        lengths = [_name("lasts_in_32_bits"), _name("total_in_32_bits")]
        (kv_heads,) = {dims[1].dim_value for dims in (self._dims(keys.past), self._dims(values.past))}
        kept = {one.name: helper.get_attribute_value(one) for one in node.attribute if one.name in ("scale", "softcap")}
        joined, apart = f"{node.name}/joined", f"{node.name}/apart"
        yield helper.make_node(
            "GroupQueryAttention", [*operands, keys.past, values.past, *lengths, "", "", "", node.input[3]],
            [joined, keys.present, values.present], name=node.name, domain=DOMAIN, num_heads=heads,
            kv_num_heads=kv_heads, **kept,
        )  # fmt: skip
        yield helper.make_node("Reshape", [joined, _name(f"apart/{heads}")], [apart], name=apart)
        yield helper.make_node("Transpose", [apart], [node.output[0]], name=f"{node.name}/heads", perm=[0, 2, 1, 3])

    def _dims(self, name: str) -> list[onnx.TensorShapeProto.Dimension]:
        (value,) = (value for value in self._graph.input if value.name == name)
        return list(value.type.tensor_type.shape.dim)

    def _store(self, name: str, array: np.ndarray, suffix: str = "") -> None:
        """Store a constant once."""
        whole = _name(f"{name}/{suffix}" if suffix else name)
        if all(tensor.name != whole for tensor in self._graph.initializer):
            self._graph.initializer.append(numpy_helper.from_array(array, whole))


def _name(name: str) -> str:
    return f"relskew/shape/caches/{name}"


def _node(op_type: str, inputs: list[str], name: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, [_name(name)], name=_name(name), **attributes)


def _asks_length(node: onnx.NodeProto) -> bool:
    """Whether a Shape reads the length of a cache; one that reads more is not supported."""
    found = {one.name: one.i for one in node.attribute}
    start, end = found.get("start", 0) % 4, found.get("end", 4)
    end = end if end >= 0 else end + 4
    if start <= 2 < end and (start, end) != (2, 3):
        raise ValueError(f"`model` must read only axis 2 of a cache's shape, got {node.name}")
    return (start, end) == (2, 3)
