"""Attention of projected queries, keys and values: one Attention node, its parts, or a loop over its parts."""

from __future__ import annotations

from onnx import TensorProto

from relskew_core.export._chunks import attend_chunks
from relskew_core.export._emitter import Emitter, Value
from relskew_core.export._parts import (
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
from relskew_core.export._plan import Plan
from relskew_core.export._visible import visible
from relskew_core.export._window import Lengths, Tables, Window


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
    spec = plan.spec
    queries = split_heads(g, projected.q, spec.num_heads, spec.head_dim, "q")
    if plan.chunk_size is not None:
        keys, values, present = keys_and_values(g, plan, projected, past)
        chunked = attend_chunks(g, plan, queries, keys, values, tables, lengths, mask)
        if len(projected.q.shape) == 4:
            chunked = split_heads(g, chunked, spec.num_heads, spec.head_dim, "out")
        return chunked, present
    window = Window(g, plan, tables, lengths)
    if plan.fused:
        bias = relative_logits(g, plan, queries, window, lengths)
        condition = visible(g, plan, lengths, mask) if condition is None else condition
        return _fused(g, plan, projected, queries, bias, condition, past)
    condition = visible(g, plan, lengths, mask) if condition is None else condition
    keys, values, present = keys_and_values(g, plan, projected, past)
    heads = weighted_heads(g, plan, queries, keys, values, window, lengths, condition)
    return as_given(g, projected, heads), present


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
    path = "relskew/compute/attention"
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
