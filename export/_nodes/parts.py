"""Attention on heads from standard operators: relative logits, softmax, weighted sums, or one Attention node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto

from relskew_core.export._form.plan import GraphPlan
from relskew_core.export._nodes.emitter import BOOL, Dim, Emitter, Shape, Value, element_type
from relskew_core.export._nodes.visible import Segments, broadcast
from relskew_core.export._nodes.window import HeadRange, Lengths, StoredTables, TableWindow, skew, unskew

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Projected:
    """Queries, keys and values: projected, ``(batch, length, heads * D)``, or heads, ``(batch, heads, length, D)``."""

    q: Value
    k: Value
    v: Value


class Heads(NamedTuple):
    """Queries ``(batch, H, queries, D)``, keys ``(batch, Hkv, D, keys)``, values ``(…, keys, D)`` and sinks."""

    queries: Value
    keys: Value
    values: Value
    sinks: Value | None = None  # (H, 1, 1)


Present = tuple[Value, Value]
OfWeights = Callable[[Value], Value]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The inputs of one attention.

    ``condition`` replaces the visibility that follows from the lengths: blocks folded into the batch bring their own.
    """

    projected: Projected
    tables: StoredTables
    lengths: Lengths
    mask: Value | None = None
    segments: Segments | None = None
    past: Present | None = None
    condition: Value | None = None
    sinks: Value | None = None
    heads: HeadRange | None = None  # the heads whose tables are read; None: all


def split_heads(g: Emitter, x: Value, heads: int, head_dim: int, name: str, *, transposed: bool = False) -> Value:
    """Return heads ``(batch, heads, length, D)``, or ``(batch, heads, D, length)``."""
    if len(x.shape) == 4:
        return g.transpose(x, f"{name}/heads") if transposed else x
    split = g.constant([0, 0, heads, head_dim])
    whole = g.compute("Reshape", [x, split], f"{name}/split", (*x.shape[:2], heads, head_dim))
    return g.transpose(whole, f"{name}/heads", [0, 2, 3, 1] if transposed else [0, 2, 1, 3])


def scaled(g: Emitter, x: Value, scale: float, name: str) -> Value:
    # One factor for each of D: onnxruntime folds a scalar into the products, and as a float32 even in float64.
    return g.compute("Mul", [x, g.constant(np.full(int(x.shape[-1]), scale, dtype=np.float64), g.dtype)], name, x.shape)


def relative_logits(g: Emitter, plan: GraphPlan, queries: Value, window: TableWindow, lengths: Lengths) -> Value:
    """Return the contribution of relative positions, by key: ``(batch, H, queries, keys)`` for ``queries (…, D)``.

    A bias alone is the same for every batch, ``(1, H or 1, queries, keys)``.
    """
    logits = window.logits(queries, lengths.queries, hide=not plan.dead_rows)
    return skew(g, logits, lengths, one_sided=window.one_sided, reach=plan.reach)


def weighted_heads(
    g: Emitter, plan: GraphPlan, heads: Heads, window: TableWindow, lengths: Lengths, condition: Value | None
) -> Value:
    bias, count = relative_logits(g, plan, heads.queries, window, lengths), lengths.queries
    logits = content_logits(g, plan, heads.queries, heads.keys, bias, count)
    relative = partial(relative_values, g, window, lengths)
    out, softmax = weighted_values(g, plan, logits, condition, heads.values, count, relative)
    return out if heads.sinks is None else with_sinks(g, out, softmax, heads.sinks)


def relative_values(g: Emitter, window: TableWindow, lengths: Lengths, weights: Value) -> Value:
    moved = unskew(g, weights, lengths, one_sided=window.one_sided, symbol=window.symbol)
    rows = window.rows()
    return g.compute("MatMul", [moved, rows], "relative/values", (*weights.shape[:3], rows.shape[-1]))


def weighted_values(
    g: Emitter, plan: GraphPlan, logits: Value, condition: Value | None, values: Value, count: Dim, relative: OfWeights
) -> tuple[Value, Softmax]:
    """Return the output of ``count`` queries, and their softmax; ``relative`` returns the contribution of ``rel_v``."""
    softmax, shape = softmax_weights(g, plan, logits, condition), (*logits.shape[:3], values.shape[3])
    out = grouped_product(g, plan, softmax.weights, values, count, "attention/values", shape)
    if plan.spec.rel_values:
        out = g.compute("Add", [out, relative(softmax.weights)], "attention/add_relative_values", shape)
    return out, softmax


def present_values(g: Emitter, plan: GraphPlan, past: Present) -> Present:
    shape: Shape = (past[0].shape[0], plan.spec.num_kv_heads, "total_length", plan.spec.head_dim)
    return Value(f"{g.scope}present_key", shape, g.dtype), Value(f"{g.scope}present_value", shape, g.dtype)


def keys_and_values(
    g: Emitter, plan: GraphPlan, projected: Projected, past: Present | None, *, transpose_keys: bool = True
) -> tuple[Value, Value, Present | None]:
    """Return keys ``(batch, Hkv, D, keys)``, or not transposed, and values ``(batch, Hkv, keys, D)``."""
    spec = plan.spec
    heads = (spec.num_kv_heads, spec.head_dim)
    keys = split_heads(g, projected.k, *heads, "k", transposed=transpose_keys and past is None)
    values = split_heads(g, projected.v, *heads, "v")
    if past is None:
        return keys, values, None
    present = present_values(g, plan, past)
    for cached, new, whole in zip(past, (keys, values), present, strict=True):
        g.node("Concat", [cached, new], f"relskew/compute/cache/{whole.name}", [whole], axis=2)
    keys, values = present
    if transpose_keys:
        keys = g.transpose(keys, "cache/keys_transposed")
    return keys, values, present


class Softmax(NamedTuple):
    """A softmax over keys: its weights in the graph's type, and its intermediate results, in at least float32."""

    weights: Value  # zero where no key is visible
    logits: Value
    shares: Value

    def log_sum(self, g: Emitter, *, lowest: float | None = None) -> Value:
        """Return the log-sum-exp of each query's logits, ``(batch, H, queries, 1)``; ``-inf`` if all are ``lowest``.

        The largest share is 1 over the sum of the exponentials, which saves a second pass of them.
        """
        # Axis 3 and not -1: onnxruntime does not count from the end if the batch is empty.
        shape, dtype, last = (*self.logits.shape[:3], 1), self.logits.dtype, g.constant([3])
        top = g.compute("ReduceMax", [self.logits, last], "attention/largest_logit", shape, dtype)
        share = g.compute("ReduceMax", [self.shares, last], "attention/largest_share", shape, dtype)
        log_share = g.compute("Log", [share], "attention/log_share", shape, dtype)
        total = g.compute("Sub", [top, log_share], "attention/log_sum", shape, dtype)
        if lowest is None:
            return total
        bound = g.constant(np.asarray(lowest, g.dtype), dtype)  # rounded like the logits that it limits
        dead = g.compute("LessOrEqual", [top, bound], "attention/dead", shape, BOOL)
        nothing = g.constant(-np.inf, dtype)
        return g.compute("Where", [dead, nothing, total], "attention/log_sum_of_seen", shape, dtype)


def content_logits(g: Emitter, plan: GraphPlan, queries: Value, keys: Value, bias: Value, count: Dim) -> Value:
    shape: Shape = (*queries.shape[:3], bias.shape[3])
    logits = grouped_product(g, plan, queries, keys, count, "attention/content", shape)
    return g.compute("Add", [logits, bias], "attention/logits", shape)


def softmax_weights(g: Emitter, plan: GraphPlan, logits: Value, condition: Value | None) -> Softmax:
    """Softmax of the logits, in at least float32; zeros if no key is visible."""
    shape = logits.shape
    logits = hide(g, plan, logits, condition)
    if g.dtype.itemsize == 2:
        logits = g.compute("Cast", [logits], "attention/to_float32", shape, FLOAT32, to=element_type(FLOAT32))
    shares = weights = g.compute("Softmax", [logits], "attention/softmax", shape, logits.dtype, axis=-1)
    if g.dtype.itemsize == 2:
        weights = g.cast(shares, g.dtype, "attention/weights")
    if plan.dead_rows and condition is not None:
        zero = g.constant(0.0, g.dtype)
        weights = g.compute("Where", [condition, weights, zero], "attention/dead_rows", shape)
    return Softmax(weights, logits, shares)


def with_sinks(g: Emitter, out: Value, softmax: Softmax, sinks: Value) -> Value:
    """Return the part of the output that remains with sinks: a sink adds an exponential to each row's sum."""
    total = softmax.log_sum(g)
    shape, dtype = total.shape, total.dtype
    if sinks.dtype != dtype:
        sinks = g.cast(sinks, dtype, "sinks/to_float32")
    above = g.compute("Sub", [total, sinks], "sinks/above", shape, dtype)
    kept = g.compute("Sigmoid", [above], "sinks/kept", shape, dtype)
    if dtype != g.dtype:
        kept = g.cast(kept, g.dtype, "sinks/kept_share")
    return g.compute("Mul", [out, kept], "sinks/out", out.shape)


def hide(g: Emitter, plan: GraphPlan, logits: Value, condition: Value | None, added: Value | None = None) -> Value:
    """Return ``logits`` where ``condition``, if there is one, else a number that the softmax makes zero.

    ``added`` is an additive mask, which needs a condition.
    """
    if condition is None:
        return logits
    hidden = g.constant(plan.masked_value, g.dtype)
    by_head = logits.shape[1] in (1, *condition.shape[-3:-2])
    if g.dtype.itemsize == 2 or (plan.dead_rows and not plan.fused) or by_head:
        # A hidden logit of half precision may have overflowed, so it is replaced; with as many heads, Where is cheaper.
        logits = with_additive(g, logits, added)
        return g.compute(
            "Where", [condition, logits, hidden], "attention/mask", broadcast(logits.shape, condition.shape)
        )
    shape = condition.shape if added is None else broadcast(condition.shape, added.shape)
    seen = g.constant(0.0, g.dtype) if added is None else added
    bias = g.compute("Where", [condition, seen, hidden], "attention/hidden", shape)
    return g.compute("Add", [logits, bias], "attention/mask", broadcast(logits.shape, shape))


def with_additive(g: Emitter, logits: Value, added: Value | None) -> Value:
    if added is None:
        return logits
    return g.compute("Add", [logits, added], "mask/add", broadcast(logits.shape, added.shape))


def grouped_product(g: Emitter, plan: GraphPlan, x: Value, y: Value, count: Dim, name: str, shape: Shape) -> Value:
    """Multiply ``(batch, H, queries, ·)`` by ``(batch, Hkv, ·, ·)``: the queries of a group form one matrix.

    ``count`` is how many queries there are: a reshape cannot infer it with an empty batch.
    """
    spec = plan.spec
    if spec.num_heads == spec.num_kv_heads:
        return g.compute("MatMul", [x, y], name, shape)
    batch = x.shape[0]
    rows: Shape = (batch, spec.num_kv_heads, "group_queries", x.shape[3])
    # A 0 keeps the size of the first and of the last axis.
    together = g.times(count, spec.num_heads // spec.num_kv_heads, "attention/group_queries")
    group = g.dims("attention/group_shape", 0, spec.num_kv_heads, together, 0)
    grouped = g.compute("Reshape", [x, group], f"{name}/group", rows)
    product = g.compute("MatMul", [grouped, y], name, (*rows[:3], shape[3]))
    ungroup = g.dims("attention/ungroup_shape", 0, spec.num_heads, count, 0)
    return g.compute("Reshape", [product, ungroup], f"{name}/ungroup", shape)


def merge_heads(g: Emitter, heads: Value, name: str = "merge") -> Value:
    batch, count, length, head_dim = heads.shape
    turned = g.transpose(heads, f"{name}/turn", [0, 2, 1, 3])
    width = int(count) * int(head_dim)
    return g.compute("Reshape", [turned, g.constant([0, 0, width])], f"{name}/heads", (batch, length, width))


def as_given(g: Emitter, projected: Projected, heads: Value) -> Value:
    return heads if len(projected.q.shape) == 4 else merge_heads(g, heads)


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
    attributes: dict[str, Any] = {"scale": scale, "is_causal": int(plan.causal_attribute)}
    return attributes | ({"softmax_precision": TensorProto.FLOAT} if g.dtype.itemsize == 2 else {})


def sees_some(g: Emitter, condition: Value) -> Value:
    """Return where a query sees a key, with one number for all keys."""
    seen = g.cast(condition, FLOAT32, "attention/seen")
    shape = (*condition.shape[:-1], 1)
    most = g.compute("ReduceMax", [seen, g.constant([len(shape) - 1])], "attention/most_seen", shape, FLOAT32)
    return g.cast(most, BOOL, "attention/alive")


def without_dead_rows(g: Emitter, plan: GraphPlan, heads: Value, condition: Value | None) -> Value:
    """Return zeros for queries that see no key; runtimes return zeros, NaN or the mean of all values.

    The heads are (batch, H, queries, D), or (batch, queries, H · D).
    """
    if condition is None or not plan.dead_rows:
        return heads
    alive, zero = sees_some(g, condition), g.constant(0.0, g.dtype)
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
