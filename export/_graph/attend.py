"""Attention of projected queries, keys and values: one Attention node, its parts, or a loop over its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx import TensorProto

from relskew_core.export._graph.chunks import attend_chunks
from relskew_core.export._graph.emitter import BOOL, Emitter, Value
from relskew_core.export._graph.parts import (
    Present,
    Projected,
    as_given,
    hide,
    keys_and_values,
    present_values,
    relative_logits,
    split_heads,
    weighted_heads,
)
from relskew_core.export._graph.visible import visible
from relskew_core.export._graph.window import Lengths, Tables, Window
from relskew_core.export._plan import Plan


def attend(
    g: Emitter,
    plan: Plan,
    projected: Projected,
    tables: Tables,
    lengths: Lengths,
    *,
    mask: Value | None = None,
    past: Present | None = None,
    condition: Value | None = None,
) -> tuple[Value, Present | None]:
    """Return the heads, laid out as the queries came, and the presents if there is a past.

    ``condition`` replaces the visibility worked out here (blocks folded into the batch bring their own).
    """
    if plan.looped:
        spread = _by_length if plan.profile.branches else _in_chunks
        return spread(g, plan, projected, tables, lengths, mask, past)
    queries = split_heads(g, projected.q, plan.spec.num_heads, plan.spec.head_dim, "q")
    window = Window(g, plan, tables, lengths)
    if plan.fused:
        bias = relative_logits(g, plan, queries, window, lengths)
        condition = visible(g, plan, lengths, mask) if condition is None else condition
        return _fused(g, plan, projected, queries, bias, condition, past)
    condition = visible(g, plan, lengths, mask) if condition is None else condition
    keys, values, present = keys_and_values(g, plan, projected, past)
    heads = weighted_heads(g, plan, queries, keys, values, window, lengths, condition)
    return as_given(g, projected, heads), present


def _by_length(
    g: Emitter,
    plan: Plan,
    projected: Projected,
    tables: Tables,
    lengths: Lengths,
    mask: Value | None,
    past: Present | None,
) -> tuple[Value, Present | None]:
    """Attention in chunks, or of one chunk's queries at once, for which a loop would cost more than it saves."""

    def short(g: Emitter) -> Sequence[Value]:
        at_once = replace(plan, looped=False, guarded=False)
        heads, present = attend(g, at_once, projected, tables, lengths, mask=mask, past=past)
        return [heads, *(present or ())]

    def long(g: Emitter) -> Sequence[Value]:
        heads, present = _in_chunks(g, plan, projected, tables, lengths, mask, past)
        return [heads, *(present or ())]

    inputs = [g.dim(lengths.queries), g.constant([plan.chunk_size])]
    one_chunk = g.index("LessOrEqual", inputs, "chunks/one_is_enough", (1,), BOOL)
    heads = Value(g.path("heads"), projected.q.shape, g.dtype)
    present = None if past is None else present_values(g, plan, past)
    g.choose(one_chunk, "attention_by_length", [heads, *(present or ())], short=short, long=long)
    return heads, present


def _in_chunks(
    g: Emitter,
    plan: Plan,
    projected: Projected,
    tables: Tables,
    lengths: Lengths,
    mask: Value | None,
    past: Present | None,
) -> tuple[Value, Present | None]:
    """Attention in a loop over chunks of queries."""
    count, width = plan.spec.num_heads, plan.spec.head_dim
    queries = split_heads(g, projected.q, count, width, "q")
    keys, values, present = keys_and_values(g, plan, projected, past)
    heads = attend_chunks(g, plan, queries, keys, values, tables, lengths, mask)
    if len(projected.q.shape) == 4:
        heads = split_heads(g, heads, count, width, "out")
    return heads, present


def _fused(
    g: Emitter,
    plan: Plan,
    projected: Projected,
    queries: Value,
    bias: Value,
    condition: Value | None,
    past: Present | None,
) -> tuple[Value, Present | None]:
    """Attention by the standard operator; the relative logits are its additive mask."""
    spec = plan.spec
    if condition is not None:
        bias = hide(g, plan, bias, condition)
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
    inputs = [projected.q, projected.k, projected.v, bias]
    if past is None:
        g.node("Attention", inputs, path, [output], **attributes)
        return output, None
    present = present_values(g, plan, past)
    g.node("Attention", [*inputs, *past], path, [output, *present], **attributes)
    return output, present
