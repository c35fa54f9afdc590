"""The block in float64, straight from its definition: slow, and written with nothing of the library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from relskew_core._block.spec import BlockSpec


def reference_block(
    spec: BlockSpec,
    weights: Mapping[str, np.ndarray],
    x: np.ndarray,
    memory: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    past: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    rows: np.ndarray | None = None,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], float]:
    """Return ``y``, of the queries ``rows`` only if given, all keys and values, and the largest logit's size.

    All in float64. Raises ``IndexError`` where one of those queries sees past the table's reach.
    """
    source = x if memory is None else memory

    def project(data: np.ndarray, name: str, heads: int) -> np.ndarray:
        flat = linear(data, name)
        return flat.reshape(*data.shape[:2], heads, spec.head_dim).transpose(0, 2, 1, 3)

    def linear(data: np.ndarray, name: str) -> np.ndarray:
        weight, bias = (np.asarray(weights.get(f"{name}.{part}", 0.0), np.float64) for part in ("weight", "bias"))
        return np.asarray(data, np.float64) @ weight.T + bias

    q = project(x, "q_proj", spec.num_heads)
    k, v = project(source, "k_proj", spec.num_kv_heads), project(source, "v_proj", spec.num_kv_heads)
    out, present, peak = reference_attention(spec, weights, q, k, v, mask, past, rows=rows)
    merged = out.transpose(0, 2, 1, 3).reshape(len(x), out.shape[2], -1)
    return linear(merged, "out_proj"), present, peak


def reference_attention(
    spec: BlockSpec,
    tables: Mapping[str, np.ndarray],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None = None,
    past: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    rows: np.ndarray | None = None,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], float]:
    """Return :func:`reference_block`'s results without projections: the heads' outputs ``(batch, H, rows, D)``."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    double = {key: np.asarray(array, np.float64) for key, array in tables.items() if key.startswith("rel_")}
    offset = 0
    if past is not None:
        offset = past[0].shape[2]
        k = np.concatenate([np.asarray(past[0], np.float64), k], axis=2)
        v = np.concatenate([np.asarray(past[1], np.float64), v], axis=2)
    chosen = np.arange(q.shape[2]) if rows is None else rows
    out = np.zeros((*q.shape[:2], len(chosen), q.shape[3]))
    allowed = None if mask is None else np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
    peak = 0.0
    for b, h, place in np.ndindex(out.shape[:3]):
        i = int(chosen[place])
        keys, values = (array[b, h // (spec.num_heads // spec.num_kv_heads)] for array in (k, v))
        distance = np.arange(len(keys)) - (i + offset)
        seen = _seen(spec, distance, i + offset)
        if allowed is not None:
            seen &= allowed[b, h, i]
        found, present = _rows(spec, distance[_seen(spec, distance, i + offset)], distance[seen])
        if not seen.any():
            continue
        if spec.rel_keys:
            keys = keys.copy()
            keys[seen] += _head(double["rel_k"], h, 2)[found] * present
        logits = keys[seen] @ q[b, h, i] / math.sqrt(spec.head_dim)
        if spec.rel_bias:
            logits += _head(double["rel_bias"], h, 1)[found] * present[:, 0]
        peak = max(peak, float(np.abs(logits).max()))
        share = np.exp(logits - logits.max())
        share /= share.sum()
        out[b, h, place] = share @ values[seen]
        if spec.rel_values:
            out[b, h, place] += share @ (_head(double["rel_v"], h, 2)[found] * present)
    return out, (k, v), peak


def _seen(spec: BlockSpec, distance: np.ndarray, position: int) -> np.ndarray:
    """Which keys a query sees, by the block's own rules."""
    seen = np.ones(distance.shape, bool)
    if spec.causal:
        seen &= distance <= 0
    if spec.window is not None:
        before, after = spec.window
        seen &= (distance >= -before) if before is not None else True
        seen &= (distance <= after) if after is not None else True
    if spec.block_size is not None:
        seen &= (distance + position) // spec.block_size >= position // spec.block_size - 1
    return seen


def _rows(spec: BlockSpec, visible: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each wanted distance's row, and 1 where it counts, 0 where it lies past a table that ends in zeros."""
    left, right = spec.span.left, spec.span.right
    inside = (wanted >= -left) & (wanted <= right)
    if spec.span.beyond == "error" and not np.all((visible >= -left) & (visible <= right)):
        raise IndexError("a query sees a position past the table's reach")
    weight = np.where(inside | (spec.span.beyond == "clip"), 1.0, 0.0)
    return np.clip(wanted + left, 0, left + right), weight[:, None]


def _head(table: np.ndarray, head: int, shared: int) -> Any:
    return table if table.ndim == shared else table[head]
