"""One Attention node, and the results of queries that see nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from relskew_core.export._form.plan import GraphPlan
from relskew_core.export._nodes.emitter import BOOL, Emitter, Value
from relskew_core.export._nodes.parts import AttentionInputs, Present, as_given, keys_and_values, present_values

FLOAT32 = np.dtype(np.float32)


def attend_fused(
    g: Emitter, plan: GraphPlan, inputs: AttentionInputs, queries: Value, bias: Value
) -> tuple[Value, Present | None]:
    """Attention by the standard operator, with the relative logits as its additive mask."""
    spec, projected, past = plan.spec, inputs.projected, inputs.past
    attributes = fused_attributes(g, plan)
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


def fused_attributes(g: Emitter, plan: GraphPlan, scale: float = 1.0) -> dict[str, Any]:
    """Return the attributes of an `Attention` with softmax in at least float32."""
    attributes: dict[str, Any] = {"scale": scale, "is_causal": int(plan.causal_attribute)}
    return attributes | ({"softmax_precision": TensorProto.FLOAT} if g.dtype.itemsize == 2 else {})


def without_dead_rows(g: Emitter, plan: GraphPlan, heads: Value, condition: Value | None) -> Value:
    """Return zeros for queries that see no key; runtimes return zeros, NaN or the mean of all values.

    The heads are (batch, H, queries, D), or (batch, queries, H · D).
    """
    if condition is None or not plan.dead_rows:
        return heads
    seen = g.cast(condition, FLOAT32, "attention/seen")
    shape = (*condition.shape[:-1], 1)
    most = g.compute("ReduceMax", [seen, g.constant([len(shape) - 1])], "attention/most_seen", shape, FLOAT32)
    alive = g.cast(most, BOOL, "attention/alive")
    zero = g.constant(0.0, g.dtype)
    if len(heads.shape) == 4:
        return g.compute("Where", [alive, heads, zero], "attention/dead_rows", heads.shape)
    batch, length, width = heads.shape
    shape = (batch, length, plan.spec.num_heads, plan.spec.head_dim)
    apart = g.compute("Reshape", [heads, g.constant([0, 0, *shape[2:]])], "attention/apart", shape)
    if len(alive.shape) == 2:
        alive = g.compute("Unsqueeze", [alive, g.constant([1])], "attention/alive_by_query", (*alive.shape, 1), BOOL)
    else:
        alive = g.transpose(alive, "attention/alive_by_query", [0, 2, 1, 3])
    apart = g.compute("Where", [alive, apart, zero], "attention/dead_rows", shape)
    return g.compute("Reshape", [apart, g.constant([0, 0, int(width)])], "attention/together", (batch, length, width))
