"""Attention of projected queries, keys and values, dense: one Attention node or its parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from relskew_core.export._emitter import Emitter, Shape, Value
from relskew_core.export._plan import Plan
from relskew_core.export._skew import skew, unskew
from relskew_core.export._visible import hides_by_condition, visible
from relskew_core.export._window import Lengths, Window

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Projected:
    """Queries, keys and values after their projections, ``(batch, length, heads * head_dim)``."""

    q: Value
    k: Value
    v: Value


@dataclass(frozen=True, slots=True)
class Tables:
    """The stored tables."""

    rel_k: Value
    rel_v: Value | None


Present = tuple[Value, Value]


def split_heads(g: Emitter, x: Value, heads: int, head_dim: int, name: str, *, transposed: bool = False) -> Value:
    """Return ``(batch, length, heads * D)`` as ``(batch, heads, length, D)``, or ``(batch, heads, D, length)``."""
    batch, length = x.shape[:2]
    split = g.constant([0, 0, heads, head_dim])
    whole = g.compute("Reshape", [x, split], f"{name}/split", (batch, length, heads, head_dim))
    if transposed:
        return g.compute("Transpose", [whole], f"{name}/heads", (batch, heads, head_dim, length), perm=[0, 2, 3, 1])
    return g.compute("Transpose", [whole], f"{name}/heads", (batch, heads, length, head_dim), perm=[0, 2, 1, 3])


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
    """Return the heads side by side, ``(batch, queries, H * D)``, and the presents if there is a past.

    ``condition`` replaces the visibility worked out here (blocks folded into the batch bring their own).
    """
    spec = plan.spec
    queries = split_heads(g, projected.q, spec.num_heads, spec.head_dim, "q")
    window = Window(g, plan, lengths)
    rel_k = window.of(tables.rel_k, len(tables.rel_k.shape) - 1, "rel_k")
    logits = g.compute("MatMul", [queries, rel_k], "relative/logits", (*queries.shape[:3], window.symbol))
    if not hides_by_condition(plan):
        logits = window.hide(logits)
    bias = skew(g, logits, lengths, one_sided=plan.one_sided)
    if condition is None:
        condition = visible(g, plan, lengths, mask)
    if plan.fused:
        return _fused(g, plan, projected, queries, bias, condition, past)
    keys, values, present = _keys_and_values(g, plan, projected, past)
    weights = _weights(g, plan, queries, keys, bias, condition)
    heads = _weighted_sum(g, plan, weights, values)
    if tables.rel_v is not None:
        moved = unskew(g, weights, lengths, one_sided=plan.one_sided, symbol=window.symbol)
        rel_v = window.of(tables.rel_v, len(tables.rel_v.shape) - 2, "rel_v")
        relative = g.compute("MatMul", [moved, rel_v], "relative/values", heads.shape)
        heads = g.compute("Add", [heads, relative], "attention/add_relative_values", heads.shape)
    return _merge_heads(g, heads), present


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
        hidden = g.constant(plan.masked_value, g.dtype)
        bias = g.compute("Where", [condition, bias, hidden], "attention/mask", bias.shape)
    attributes = {"scale": 1.0, "is_causal": int(plan.causal_attribute)}
    if g.dtype.itemsize == 2:
        attributes["softmax_precision"] = TensorProto.FLOAT
    path = "relskew/compute/attention"
    if past is not None and not plan.profile.cache_inputs:
        keys, values, present = _keys_and_values(g, plan, projected, past, transpose_keys=False)
        heads = Value(f"{path}/output", queries.shape, g.dtype)
        g.node("Attention", [queries, keys, values, bias], path, [heads], **attributes)
        return _merge_heads(g, heads), present
    attributes |= {"q_num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads}
    output = Value(f"{path}/output", projected.q.shape, g.dtype)
    inputs = [projected.q, projected.k, projected.v, bias]
    if past is None:
        g.node("Attention", inputs, path, [output], **attributes)
        return output, None
    present = _present(g, plan, past)
    g.node("Attention", [*inputs, *past], path, [output, *present], **attributes)
    return output, present


def _present(g: Emitter, plan: Plan, past: Present) -> Present:
    shape: Shape = (past[0].shape[0], plan.spec.num_kv_heads, "total_length", plan.spec.head_dim)
    return Value("present_key", shape, g.dtype), Value("present_value", shape, g.dtype)


def _keys_and_values(
    g: Emitter, plan: Plan, projected: Projected, past: Present | None, *, transpose_keys: bool = True
) -> tuple[Value, Value, Present | None]:
    """Return keys ``(batch, Hkv, D, keys)``, or not transposed, and values ``(batch, Hkv, keys, D)``."""
    spec = plan.spec
    heads = (spec.num_kv_heads, spec.head_dim)
    keys = split_heads(g, projected.k, *heads, "k", transposed=transpose_keys and past is None)
    values = split_heads(g, projected.v, *heads, "v")
    if past is None:
        return keys, values, None
    present = _present(g, plan, past)
    for cached, new, whole in zip(past, (keys, values), present, strict=True):
        g.node("Concat", [cached, new], f"relskew/compute/cache/{whole.name}", [whole], axis=2)
    keys, values = present
    if transpose_keys:
        batch, _, length, _ = keys.shape
        shape = (batch, spec.num_kv_heads, spec.head_dim, length)
        keys = g.compute("Transpose", [keys], "cache/keys_transposed", shape, perm=[0, 1, 3, 2])
    return keys, values, present


def _weights(g: Emitter, plan: Plan, queries: Value, keys: Value, bias: Value, condition: Value | None) -> Value:
    """Softmax of content and relative logits, in float32 at least; zeros where no key may be seen."""
    logits = _grouped_product(g, plan, queries, keys, "attention/content", bias.shape)
    logits = g.compute("Add", [logits, bias], "attention/logits", bias.shape)
    if condition is not None:
        hidden = g.constant(plan.masked_value, g.dtype)
        logits = g.compute("Where", [condition, logits, hidden], "attention/mask", bias.shape)
    if g.dtype.itemsize == 2:
        single = g.compute("Cast", [logits], "attention/to_float32", bias.shape, FLOAT32, to=TensorProto.FLOAT)
        soft = g.compute("Softmax", [single], "attention/softmax", bias.shape, FLOAT32, axis=-1)
        to = TensorProto.FLOAT16 if g.dtype == np.float16 else TensorProto.BFLOAT16
        weights = g.compute("Cast", [soft], "attention/weights", bias.shape, to=to)
    else:
        weights = g.compute("Softmax", [logits], "attention/softmax", bias.shape, axis=-1)
    if plan.dead_rows and condition is not None:
        zero = g.constant(0.0, g.dtype)
        weights = g.compute("Where", [condition, weights, zero], "attention/dead_rows", bias.shape)
    return weights


def _weighted_sum(g: Emitter, plan: Plan, weights: Value, values: Value) -> Value:
    shape = (*weights.shape[:3], plan.spec.head_dim)
    return _grouped_product(g, plan, weights, values, "attention/values", shape)


def _grouped_product(g: Emitter, plan: Plan, x: Value, y: Value, name: str, shape: Shape) -> Value:
    """Multiply ``(batch, H, queries, ·)`` by ``(batch, Hkv, ·, ·)``: a group's queries stand in one matrix."""
    spec = plan.spec
    if spec.num_heads == spec.num_kv_heads:
        return g.compute("MatMul", [x, y], name, shape)
    batch = x.shape[0]
    rows: Shape = (batch, spec.num_kv_heads, "group_queries", x.shape[3])
    # A zero keeps the dimension at its place, the last one here.
    grouped = g.compute("Reshape", [x, g.constant([0, spec.num_kv_heads, -1, 0])], f"{name}/group", rows)
    product = g.compute("MatMul", [grouped, y], name, (*rows[:3], shape[3]))
    return g.compute("Reshape", [product, g.constant([0, spec.num_heads, -1, 0])], f"{name}/ungroup", shape)


def _merge_heads(g: Emitter, heads: Value) -> Value:
    batch, count, length, head_dim = heads.shape
    turned = g.compute("Transpose", [heads], "merge/turn", (batch, length, count, head_dim), perm=[0, 2, 1, 3])
    width = int(count) * int(head_dim)
    return g.compute("Reshape", [turned, g.constant([0, 0, width])], "merge/heads", (batch, length, width))
