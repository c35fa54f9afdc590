"""Attention of projected queries, keys and values: one Attention node, separate nodes, or a loop over them."""

from __future__ import annotations

from dataclasses import replace

from relskew_core.export._graph.by_head import attend_by_head
from relskew_core.export._graph.chunks import attend_chunks, chunks_of
from relskew_core.export._graph.emitter import BOOL, Emitter, Value
from relskew_core.export._graph.fused import attend_fused, without_dead_rows
from relskew_core.export._graph.guard import guarded
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
    """Return the heads, laid out like the queries, and the presents if there is a past."""
    if plan.looped:
        return (_by_length if plan.profile.branches else _in_chunks)(g, plan, inputs)
    queries = split_heads(g, inputs.projected.q, plan.spec.num_heads, plan.spec.head_dim, "q")
    window = TableWindow(g, plan, inputs.tables, inputs.lengths)
    if plan.fused:
        bias = relative_logits(g, plan, queries, window, inputs.lengths)
        condition = _condition(g, plan, inputs)
        bias = hide(g, plan, bias, condition)
        heads, present = attend_fused(g, plan, inputs, queries, bias)
        return without_dead_rows(g, plan, heads, condition), present
    condition = _condition(g, plan, inputs)
    keys, values, present = keys_and_values(g, plan, inputs.projected, inputs.past)
    heads = weighted_heads(g, plan, Heads(queries, keys, values, inputs.sinks), window, inputs.lengths, condition)
    return as_given(g, inputs.projected, heads), present


def _by_length(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> tuple[Value, Present | None]:
    """Attention in chunks, or at once for a single chunk of queries, for which a loop would cost more than it saves."""

    def results(heads: Value, present: Present | None) -> list[Value]:
        return [heads, *(present or ())]

    compared = [g.dim(inputs.lengths.queries), g.constant([plan.chunk_size])]
    one_chunk = g.index("LessOrEqual", compared, "chunks/one_is_enough", (1,), BOOL)
    heads = Value(g.path("heads"), inputs.projected.q.shape, g.dtype)
    present = None if inputs.past is None else present_values(g, plan, inputs.past)
    g.choose(
        one_chunk, "attention_by_length", results(heads, present),
        short=lambda g: results(*attend(g, replace(plan, looped=False, guarded=False), inputs)),
        long=lambda g: results(*_in_chunks(g, plan, inputs)),
    )  # fmt: skip
    return heads, present


def _in_chunks(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> tuple[Value, Present | None]:
    """Attention in a loop over chunks of queries."""
    count, width, projected = plan.spec.num_heads, plan.spec.head_dim, inputs.projected
    queries = split_heads(g, projected.q, count, width, "q")
    keys, values, present = keys_and_values(g, plan, projected, inputs.past)
    inputs = replace(inputs, lengths=guarded(g, plan, inputs.lengths))
    form = attend_by_head if plan.profile.by_head and plan.spec.num_kv_heads > 1 else attend_chunks
    heads = form(g, plan, inputs, Heads(queries, keys, values, inputs.sinks), chunks_of(g, plan, inputs))
    if len(projected.q.shape) == 4:
        heads = split_heads(g, heads, count, width, "out")
    return heads, present


def _condition(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> Value | None:
    if inputs.condition is not None:
        return inputs.condition
    return visible(g, plan, inputs.lengths, inputs.mask, inputs.segments)
