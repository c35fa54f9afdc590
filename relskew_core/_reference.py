"""The reference: the attention block in float64, directly from its definition, and the tolerances of everything else.

Written with NumPy and nothing of the library but the spec, so that it can judge the rest. Only what needs NumPy anyway
imports it: ``export/`` and the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relskew_core._block.spec import BlockSpec

F64 = NDArray[np.float64]
Array = NDArray[Any]

TOLERANCES = {"float64": 1e-12, "float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}
"""Largest relative L2 error by element type."""

_TABLES = {"rel_k": "rel_keys", "rel_v": "rel_values"}  # and the field of the spec that enables it


class Reference(NamedTuple):
    """The result, all keys and values (including the past), and the size of the largest logit."""

    out: F64
    keys: F64
    values: F64
    largest_logit: float


def reference_block(
    spec: BlockSpec,
    weights: Mapping[str, Array],
    x: Array,
    memory: Array | None = None,
    mask: Array | None = None,
    past: tuple[Array, Array] | None = None,
    *,
    segments: Array | None = None,
    queries: Array | None = None,
) -> Reference:
    """Return the block's output ``(batch, length, E)``, only for the query numbers ``queries`` if given.

    ``segments (batch, keys)`` are those of all keys, the past included; of self-attention, whose queries are the last.
    Raises ``ValueError`` where one of these queries sees past the table's reach.
    """
    source = x if memory is None else memory

    def linear(data: Array, name: str) -> F64:
        weight, bias = (np.asarray(weights.get(f"{name}.{part}", 0.0), np.float64) for part in ("weight", "bias"))
        return np.asarray(data, np.float64) @ weight.T + bias

    def project(data: Array, name: str, heads: int) -> F64:
        flat = linear(data, name)
        return flat.reshape(*data.shape[:2], heads, spec.head_dim).transpose(0, 2, 1, 3)

    q = project(x, "q_proj", spec.num_heads)
    k, v = project(source, "k_proj", spec.num_kv_heads), project(source, "v_proj", spec.num_kv_heads)
    attended = reference_attention(spec, weights, q, k, v, mask, past, segments=segments, queries=queries)
    side_by_side = attended.out.transpose(0, 2, 1, 3).reshape(len(x), attended.out.shape[2], -1)
    return attended._replace(out=linear(side_by_side, "out_proj"))


def reference_attention(
    spec: BlockSpec,
    tables: Mapping[str, Array],
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    past: tuple[Array, Array] | None = None,
    *,
    segments: Array | None = None,
    queries: Array | None = None,
) -> Reference:
    """Return :func:`reference_block`'s results without projections: the heads' outputs ``(batch, H, queries, D)``."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    offset = 0
    if past is not None:
        offset = past[0].shape[2]
        k, v = (np.concatenate([np.asarray(old, np.float64), new], 2) for old, new in zip(past, (k, v), strict=True))
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (np.repeat(heads, group, axis=1) for heads in (k, v))
    chosen = np.arange(q.shape[2], dtype=np.int64) if queries is None else queries
    out = np.zeros((*q.shape[:2], len(chosen), q.shape[3]), dtype=np.float64)
    allowed = None if mask is None else np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
    # A sink is a logit without a value; e^-inf if there is none.
    sinks = np.asarray(tables["sinks"] if spec.sinks else [-np.inf], np.float64)[:, None]
    largest = 0.0
    for place, i in enumerate(chosen):
        seen = np.flatnonzero(_visible(spec, int(i) + offset, np.arange(k.shape[2], dtype=np.int64)))
        relative = seen - (int(i) + offset)
        rows, counts = _rows(spec, relative)
        rel_k, rel_v = (_looked_up(tables, spec, name, rows, counts) for name in ("rel_k", "rel_v"))
        rel_bias = _bias(tables, spec, relative, rows, counts)
        logits = np.einsum("bhd,bhkd->bhk", q[:, :, i], keys[:, :, seen] + rel_k) / np.sqrt(spec.head_dim) + rel_bias
        shown = np.ones(logits.shape, bool) if allowed is None else allowed[:, :, i, seen]
        if segments is not None:
            shown &= (segments[:, seen] == segments[:, [int(i) + offset]])[:, None, :]
        largest = max(largest, float(np.max(np.abs(logits), initial=0.0, where=shown)))
        top = np.maximum(np.max(logits, axis=-1, keepdims=True, initial=-np.inf, where=shown), sinks)
        top = np.where(np.isfinite(top), top, 0.0)
        share = np.exp(logits - top, where=shown, out=np.zeros_like(logits))
        total = share.sum(axis=-1, keepdims=True) + np.exp(sinks - top)
        share /= np.maximum(total, np.finfo(np.float64).tiny)  # zeros for queries that see nothing
        out[:, :, place] = np.einsum("bhk,bhkd->bhd", share, values[:, :, seen] + rel_v)
    return Reference(out, k, v, largest)


def _visible(spec: BlockSpec, position: int, keys: NDArray[np.int_]) -> NDArray[np.bool_]:
    visible = np.ones(keys.shape, bool)
    if spec.causal:
        visible &= keys <= position
    if spec.window is not None:
        before, after = spec.window
        visible &= (keys >= position - before) if before is not None else True
        visible &= (keys <= position + after) if after is not None else True
    if spec.block_size is not None:
        before = 1 if spec.blocks_before is None else spec.blocks_before
        blocks_away = position // spec.block_size - keys // spec.block_size
        visible &= (blocks_away >= 0) & (blocks_away <= before)
    return visible


def _rows(spec: BlockSpec, relative: NDArray[np.int_]) -> tuple[NDArray[np.int_], NDArray[np.bool_]]:
    """Return the table's row for each relative position, and whether it counts: beyond ``"zero"`` tables none does."""
    left, right = spec.span.left, spec.span.right
    inside = (relative >= -left) & (relative <= right)
    if spec.span.beyond == "error" and not inside.all() and (spec.has_tables or spec.rel_bias):
        raise ValueError(f"the table has no row for the relative positions {relative.min()} … {relative.max()}")
    return np.clip(relative + left, 0, left + right), inside | (spec.span.beyond == "clip")


def _looked_up(
    tables: Mapping[str, Array], spec: BlockSpec, name: str, rows: NDArray[np.int_], counts: NDArray[np.bool_]
) -> F64 | float:
    """Return a table's rows, ``(H or 1, rows, D)``; 0 without a table."""
    if not getattr(spec, _TABLES[name]):
        return 0.0
    table = np.asarray(tables[name], np.float64)
    return (table if table.ndim == 3 else table[None])[:, rows] * counts[:, None]


def _bias(
    tables: Mapping[str, Array],
    spec: BlockSpec,
    relative: NDArray[np.int_],
    rows: NDArray[np.int_],
    counts: NDArray[np.bool_],
) -> F64 | float:
    """Return the bias of the logits by relative position, ``(H or 1, positions)``; 0 without a bias."""
    if not spec.rel_bias:
        return 0.0
    if spec.rel_bias == "alibi":
        power = 2 ** int(np.log2(spec.num_heads))
        slopes = 2.0 ** (-8 * np.arange(1, power + 1, dtype=np.float64) / power)
        more = 2.0 ** (-4 * np.arange(1, 2 * power + 1, 2, dtype=np.float64) / power)
        return -np.concatenate([slopes, more])[: spec.num_heads, None] * np.abs(relative)
    table = np.asarray(tables["rel_bias"], np.float64)
    if spec.rel_bias == "t5":
        return table[[_t5_bucket(spec, int(r)) for r in relative]].T.reshape(spec.num_heads, -1)
    return np.atleast_2d(table)[:, rows] * counts


def _t5_bucket(spec: BlockSpec, r: int) -> int:
    """Return T5's bucket of a relative position, with its logarithms as powers of whole numbers."""
    assert spec.num_buckets is not None
    assert spec.max_distance is not None
    side = spec.num_buckets if spec.causal else spec.num_buckets // 2
    distance = abs(r) if r <= 0 or not spec.causal else 0
    exact = side // 2
    bucket, wide = distance, side - exact
    if distance >= exact:
        bounds = (spec.max_distance**step * exact ** (wide - step) for step in range(1, wide))
        bucket = exact + sum(distance**wide >= bound for bound in bounds)
    return bucket + (side if r > 0 and not spec.causal else 0)
