"""Attention of projected queries, keys and values: one Attention node, its parts, or a loop over its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx import TensorProto

from relskew_core.export._graph.chunks import attend_chunks
from relskew_core.export._graph.emitter import BOOL, Emitter, Value
from relskew_core.export._graph.grouped import attend_grouped
from relskew_core.export._graph.parts import (
    AttentionInputs,
    Heads,
    Present,
    as_given,
    hide,
    keys_and_values,
    present_values,
    relative_logits,
    split_heads,
    weighted_heads,
)
from relskew_core.export._graph.visible import visible
from relskew_core.export._graph.window import TableWindow
from relskew_core.export._plan import GraphPlan


def attend(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> tuple[Value, Present | None]:
    """Return the heads, laid out as the queries came, and the presents if there is a past."""
    if plan.looped:
        return (_by_length if plan.profile.branches else _in_chunks)(g, plan, inputs)
    queries = split_heads(g, inputs.projected.q, plan.spec.num_heads, plan.spec.head_dim, "q")
    window = TableWindow(g, plan, inputs.tables, inputs.lengths)
    if plan.fused:
        bias = relative_logits(g, plan, queries, window, inputs.lengths)
        return (_grouped if plan.profile.contrib else _fused)(g, plan, inputs, queries, _hidden(g, plan, inputs, bias))
    condition = _condition(g, plan, inputs)
    keys, values, present = keys_and_values(g, plan, inputs.projected, inputs.past)
    heads = weighted_heads(g, plan, Heads(queries, keys, values, inputs.sinks), window, inputs.lengths, condition)
    return as_given(g, inputs.projected, heads), present


def _by_length(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> tuple[Value, Present | None]:
    """Attention in chunks, or of one chunk's queries at once, for which a loop would cost more than it saves."""

    def short(g: Emitter) -> Sequence[Value]:
        heads, present = attend(g, replace(plan, looped=False, guarded=False), inputs)
        return [heads, *(present or ())]

    def long(g: Emitter) -> Sequence[Value]:
        heads, present = _in_chunks(g, plan, inputs)
        return [heads, *(present or ())]

    compared = [g.dim(inputs.lengths.queries), g.constant([plan.chunk_size])]
    one_chunk = g.index("LessOrEqual", compared, "chunks/one_is_enough", (1,), BOOL)
    heads = Value(g.path("heads"), inputs.projected.q.shape, g.dtype)
    present = None if inputs.past is None else present_values(g, plan, inputs.past)
    g.choose(one_chunk, "attention_by_length", [heads, *(present or ())], short=short, long=long)
    return heads, present


def _in_chunks(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> tuple[Value, Present | None]:
    """Attention in a loop over chunks of queries."""
    count, width, projected = plan.spec.num_heads, plan.spec.head_dim, inputs.projected
    queries = split_heads(g, projected.q, count, width, "q")
    keys, values, present = keys_and_values(g, plan, projected, inputs.past)
    heads = attend_chunks(g, plan, inputs, Heads(queries, keys, values, inputs.sinks))
    if len(projected.q.shape) == 4:
        heads = split_heads(g, heads, count, width, "out")
    return heads, present


def _condition(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> Value | None:
    if inputs.condition is not None:
        return inputs.condition
    return visible(g, plan, inputs.lengths, inputs.mask, inputs.segments)


def _hidden(g: Emitter, plan: GraphPlan, inputs: AttentionInputs, bias: Value) -> Value:
    condition = _condition(g, plan, inputs)
    return bias if condition is None else hide(g, plan, bias, condition)


def _grouped(
    g: Emitter, plan: GraphPlan, inputs: AttentionInputs, queries: Value, bias: Value
) -> tuple[Value, Present | None]:
    """Attention by onnxruntime's operator; every row of the batch has the same length."""
    total = inputs.lengths.keys
    last = g.dim(g.minus(total, 1, "attention/last"))
    batch = g.dim(g.length(queries, 0, "batch"))
    lasts = g.index("Expand", [last, batch], "attention/last_of_rows", (queries.shape[0],))
    return attend_grouped(g, plan, inputs.projected, bias, inputs.past, lasts, total)


def _fused(
    g: Emitter, plan: GraphPlan, inputs: AttentionInputs, queries: Value, bias: Value
) -> tuple[Value, Present | None]:
    """Attention by the standard operator; the relative logits are its additive mask."""
    spec, projected, past = plan.spec, inputs.projected, inputs.past
    attributes = {"scale": 1.0, "is_causal": int(plan.causal_attribute)}
    if g.dtype.itemsize == 2:
        attributes["softmax_precision"] = TensorProto.FLOAT
    path = g.path("attention")
    if past is not None and not plan.profile.cache_inputs:
        keys, values, present = keys_and_values(g, plan, projected, past, transpose_keys=False)
        heads = Value(f"{path}/output", queries.shape, g.dtype)
        g.node("Attention", [queries, keys, values, bias], path, [heads], **attributes)
        return as_given(g, projected, heads), present
    if len(projected.q.shape) == 3:
        attributes |= {"q_num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads}
    output = Value(f"{path}/output", projected.q.shape, g.dtype)
    operands = [projected.q, projected.k, projected.v, bias]
    if past is None:
        g.node("Attention", operands, path, [output], **attributes)
        return output, None
    present = present_values(g, plan, past)
    g.node("Attention", [*operands, *past], path, [output, *present], **attributes)
    return output, present
