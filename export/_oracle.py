"""The whole block in float64, straight from its definition: slow, and written with nothing of the library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from relskew_core._spec import BlockSpec


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
    double = {key: np.asarray(array, np.float64) for key, array in weights.items()}
    source = x if memory is None else memory

    def project(data: np.ndarray, name: str, heads: int) -> np.ndarray:
        flat = np.asarray(data, np.float64) @ double[f"{name}.weight"].T + double.get(f"{name}.bias", 0.0)
        return flat.reshape(*data.shape[:2], heads, spec.head_dim).transpose(0, 2, 1, 3)

    q = project(x, "q_proj", spec.num_heads)
    k, v = project(source, "k_proj", spec.num_kv_heads), project(source, "v_proj", spec.num_kv_heads)
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
        table = _head(double["rel_k"], h)[found] * present
        logits = (keys[seen] + table) @ q[b, h, i] / math.sqrt(spec.head_dim)
        peak = max(peak, float(np.abs(logits).max()))
        share = np.exp(logits - logits.max())
        share /= share.sum()
        out[b, h, place] = share @ values[seen]
        if spec.rel_values:
            out[b, h, place] += share @ (_head(double["rel_v"], h)[found] * present)
    merged = out.transpose(0, 2, 1, 3).reshape(len(x), len(chosen), -1)
    return merged @ double["out_proj.weight"].T + double.get("out_proj.bias", 0.0), (k, v), peak


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


def _head(table: np.ndarray, head: int) -> Any:
    return table if table.ndim == 2 else table[head]
