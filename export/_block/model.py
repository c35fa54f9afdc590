"""The attention block as an ONNX model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import onnx

from relskew_core import __version__
from relskew_core._array.checks import check_bool, describe, explains
from relskew_core._block.spec import BlockSpec, check_spec
from relskew_core.export._block.description import digest, inputs_of, metadata, summary
from relskew_core.export._form import weights as stored_weights
from relskew_core.export._form.plan import GraphPlan, ProfileName, checked_chunk, make_plan
from relskew_core.export._nodes.attend import attend
from relskew_core.export._nodes.emitter import INT64_MAX, Emitter, Value
from relskew_core.export._nodes.functions import fold_into_operator
from relskew_core.export._nodes.in_place import attend_in_place
from relskew_core.export._nodes.local import attend_blocks
from relskew_core.export._nodes.operator import Places, attributes_of_block, places_of
from relskew_core.export._nodes.parts import AttentionInputs, Present, Projected, scaled
from relskew_core.export._nodes.visible import Segments
from relskew_core.export._nodes.window import Lengths, StoredTables


@explains
def to_onnx(
    spec: BlockSpec,
    weights: Mapping[str, Any],
    *,
    profile: ProfileName = "ort",
    opset: int | None = None,
    dtype: Any = None,
    max_length: int | None = None,
    past: bool = False,
    mask: bool = False,
    chunk_size: int | Literal["auto"] | None = "auto",
    device: Literal["cpu", "cuda"] | None = None,
    projections: bool = True,
    in_place: bool = False,
    segments: bool = False,
    operator: bool = False,
    name: str = "relative_attention_block",
) -> onnx.ModelProto:
    """Write an attention block as an ONNX graph with dynamic batch and lengths.

    The relative logits are the skew of Huang et al. 2018, section 3.4.1, in the two-sided form: a window of the table
    is multiplied, and two reshapes around a slice move columns of relative positions to columns of keys.

    Parameters
    ----------
    spec : BlockSpec
        The block.
    weights : mapping of str to array
        Exactly the keys and shapes of ``spec.weight_shapes()``, arrays of any library on any device; not modified.
        Without ``projections``, only those of the tables.
    profile : {"ort", "portable", "trt"}, default "ort"
        ``"ort"``: one standard ``Attention`` node, for onnxruntime. ``"portable"``: opset 18 primitives, for every
        other runtime. ``"trt"``: ``Attention`` with causality in its mask and one output, for TensorRT.
    opset : int, optional
        Version of the standard operators, from the default of the profile to 28; the defaults are 23, 18 and 23.
    dtype : str or dtype, optional
        ``float16``, ``bfloat16``, ``float32`` or ``float64``, as a string or as a NumPy, torch or JAX dtype; by default
        that of the weights.
    max_length : int, optional
        Longest input (including the past) that the graph must run: table rows that no shorter input reads are left out,
        and a longer input fails if it would read them.
    past : bool, default False
        Take and return a cache of keys and values: ``past_key``, ``past_value`` → ``present_key``, ``present_value``.
    mask : bool, default False
        Take a boolean ``mask``, ``True`` = may attend, broadcasting to ``(batch, heads, queries, keys)``.
    chunk_size : int, "auto" or None, default "auto"
        For more queries than this number, attention is a ``Loop`` over this many queries at a time: memory grows with
        ``length * chunk_size`` instead of ``length**2``, and keys that no query of a chunk sees cost nothing. Profile
        ``"ort"`` also processes the key heads one after the other, and runs shorter inputs without the loop.
        ``"auto"``: 256 in profile ``"ort"``, unless no input can be longer, the graph has a past, or the spec has
        blocks, which bound memory themselves, or ``device="cuda"``. None: no control flow; with ``in_place``, the
        filled part of the caches is then always copied.
    device : {"cpu", "cuda"}, optional
        Where the graph will run. On CUDA a loop takes many times as long as attention at once, so ``"auto"`` is None.
    projections : bool, default True
        The whole block from ``x`` to ``y``; if False, attention alone, from heads ``q (batch, H, query_length, D)``,
        ``k`` and ``v (batch, Hkv, query_length, D)``, with ``key_length`` if ``spec.cross``, to ``out`` of the shape of
        ``q``. Logits are scaled by ``D**-0.5`` in both cases.
    in_place : bool, default False
        With ``past``: caches of one length, ``past_key (batch, Hkv, cache_length, D)`` → ``present_key`` of the same
        shape, of which ``past_lengths (batch,)`` positions are filled, for each row of the batch separately. Opset 24,
        profile ``"ort"``; caches start as zeros.
    segments : bool, default False
        Take ``segments (batch, query_length)`` of int64: a query sees the keys of its segment, a document of a packed
        batch. With ``past``, segments of all keys so far, ``(batch, total_length)``; with ``in_place``, of every
        position of the cache, ``(batch, cache_length)``, including those that the call fills.
    operator : bool, default False
        Write attention as one node ``relskew::RelativeAttention``, which is also a function of the model: if
        :func:`custom_ops_library` is registered, onnxruntime runs the compiled kernels, and otherwise the function,
        which is made of the nodes of the plain graph. OpenVINO does not support functions: :func:`without_operator`
        makes the plain graph.
    name : str, default "relative_attention_block"
        Name of the graph.

    Returns
    -------
    onnx.ModelProto
        Inputs ``x (batch, query_length, E)``, ``memory (batch, memory_length, E)`` if ``spec.cross``, ``mask``,
        ``segments`` and the past if requested; output ``y (batch, query_length, E)`` and the presents. An input that
        reads past the table's reach makes the runtime fail instead of giving wrong numbers. With a past, a table with
        ``beyond="error"`` that is shorter than the reach of the blocks limits the graph to the length of the table,
        even if the next queries begin a block and would see less.

    See Also
    --------
    torch_to_onnx : a whole torch model.
    validate : compare a graph with its specification.

    Examples
    --------
    >>> from relskew_core import Span, init_weights
    >>> spec = BlockSpec(4, 2, Span.causal(8), causal=True)
    >>> model = to_onnx(spec, init_weights(spec, seed=0))
    >>> [value.name for value in model.graph.input], len(model.graph.node)
    (['x'], 20)

    With a cache as input and output:

    >>> cached = to_onnx(spec, init_weights(spec, seed=0), past=True)
    >>> [value.name for value in cached.graph.input]
    ['x', 'past_key', 'past_value']

    The attention alone, without projections:

    >>> tables = {"rel_k": init_weights(spec, seed=0)["rel_k"]}
    >>> [x.name for x in to_onnx(spec, tables, projections=False).graph.input]
    ['q', 'k', 'v']
    """
    check_spec(spec)
    check_bool("operator", operator)
    if not isinstance(name, str) or not name:
        raise TypeError(f"`name` must be a str that is not empty, got {describe(name)}")
    arrays = stored_weights.read_weights(spec, weights, projections=check_bool("projections", projections))
    kind = stored_weights.resolve_dtype(dtype, arrays)
    plan = make_plan(
        spec, kind, profile=profile, opset=opset, max_length=max_length, past=past, mask=mask,
        chunk_size=checked_chunk(chunk_size, device),
        projections=projections, in_place=in_place, segments=segments,
    )  # fmt: skip
    # One weight at a time, views last: apart from the given weights, only the model holds them all.
    ordered = sorted(arrays.items(), key=lambda item: not item[0].startswith(("q_proj", "rel_")))
    layout = stored_weights.graph_layout(
        plan, ((key, stored_weights.round_weight(key, array, plan.dtype)) for key, array in ordered)
    )
    g = Emitter(plan.dtype)
    places = _emit(g, plan, layout, operator=operator)
    # IR version 10 introduced the types of a function's values.
    ir_version = max(plan.ir_version, 10) if operator else plan.ir_version
    model = g.model(name, plan.opset, ir_version, summary(plan))
    model.graph.doc_string += f" Weights: SHA-256 {digest(model)}."
    model.producer_name = "relskew"
    model.producer_version = __version__
    if operator:
        fold_into_operator(model, *places, attributes_of_block(plan))
    onnx.helper.set_model_props(model, metadata(spec, plan))
    return model


def _emit(g: Emitter, plan: GraphPlan, layout: Iterator[stored_weights.StoredWeight], *, operator: bool) -> Places:
    spec, given = plan.spec, {one.name: g.input(*one) for one in inputs_of(plan)}
    stored = _stored(g, spec, layout)
    if plan.projections:
        query = given["x"]
        key = given.get("memory", query)
        sources = (("q", query), ("k", key), ("v", key))
        projected = Projected(*(_linear(g, x, f"{role}_proj", stored) for role, x in sources))
    else:
        query, key = given["q"], given["k"]
        projected = Projected(scaled(g, query, spec.head_dim**-0.5, "q/scaled"), key, given["v"])
    read = (projected.q, projected.k) if operator else (query, key)
    heads, present = _attend(g, plan, projected, stored, read, given)
    if plan.projections:
        g.output(_linear(g, heads, "out_proj", stored, output="y"), "result for each query")
    else:
        heads = g.rename(heads, "out")
        g.output(heads, "heads for each query")
    if present is not None:
        g.output(present[0], "keys so far, the next call's past_key")
        g.output(present[1], "values so far, the next call's past_value")
    return places_of(projected, stored, given, heads, present)


def _stored(g: Emitter, spec: BlockSpec, layout: Iterator[stored_weights.StoredWeight]) -> dict[str, Value]:
    stored = {}
    for weight in layout:
        stored[weight.key] = g.initializer(*weight)
        del weight  # free it before the next one is made
    places = {key: place for place, key in enumerate(spec.weight_shapes())}
    g.initializers.sort(key=lambda tensor: places.get(tensor.name, -1))
    return stored


def _attend(
    g: Emitter, plan: GraphPlan, projected: Projected, stored: Mapping[str, Value], sources: tuple[Value, Value],
    given: Mapping[str, Value],
) -> tuple[Value, Present | None]:  # fmt: skip
    tables = StoredTables(stored.get("rel_k"), stored.get("rel_v"), stored.get("rel_bias"))
    sinks = stored.get("sinks")
    if plan.in_place:
        return attend_in_place(g, plan, projected, tables, given, sinks)
    past = (given["past_key"], given["past_value"]) if plan.past else None
    lengths = _lengths(g, plan, *sources, past)
    segments = _segments(g, lengths, given.get("segments"))
    inputs = AttentionInputs(projected, tables, lengths, given.get("mask"), segments, past, sinks=sinks)
    return (attend_blocks(g, plan, inputs), None) if plan.local else attend(g, plan, inputs)


def _lengths(g: Emitter, plan: GraphPlan, queried: Value, keyed: Value, past: Present | None) -> Lengths:
    axis = len(queried.shape) - 2
    queries = g.length(queried, axis, "query_length")
    if plan.spec.cross:
        symbol = keyed.shape[axis]
        return Lengths(queries, g.length(keyed, axis, str(symbol)), 0, "query_length", symbol)
    if past is not None:
        before = g.length(past[0], 2, "past_length")
        return Lengths(queries, g.plus(before, queries, "total_length"), before, "query_length", "total_length")
    return Lengths(queries, queries, 0, "query_length", "query_length")


def _segments(g: Emitter, lengths: Lengths, of_keys: Value | None) -> Segments | None:
    """Return the segments of the queries, which are the last of the keys', and those of the keys."""
    if of_keys is None or lengths.past == 0:
        return None if of_keys is None else Segments(of_keys, of_keys)
    bounds = [g.dim(lengths.past), g.constant([INT64_MAX]), g.constant([1])]
    shape = (of_keys.shape[0], lengths.query_symbol)
    return Segments(g.index("Slice", [of_keys, *bounds], "segments/queries", shape), of_keys)


def _linear(g: Emitter, x: Value, name: str, stored: Mapping[str, Value], output: str | None = None) -> Value:
    weight, bias = stored[f"{name}.weight"], stored.get(f"{name}.bias")
    shape = (*x.shape[:2], weight.shape[1])
    if bias is None:
        return g.compute("MatMul", [x, weight], name, shape, output=output)
    product = g.compute("MatMul", [x, weight], f"{name}/matmul", shape)
    return g.compute("Add", [product, bias], name, shape, output=output)
