"""The attention block once more, in float64 NumPy: it shares nothing with the library but the spec."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relskew_core import BlockSpec

F64 = NDArray[np.float64]


def block_oracle(
    x: F64,
    weights: dict[str, F64],
    spec: BlockSpec,
    *,
    memory: F64 | None = None,
    past: tuple[F64, F64] | None = None,
) -> Any:
    """Return the block's output, query by query: ``O(L²·D)`` work, each key's table row looked up by its position.

    Parameters
    ----------
    x, memory : array, shape (B, L, E)
        Inputs of the queries, and of the keys and values.
    weights : dict of str to array
        As for ``attention_block``.
    spec : BlockSpec
        The block.
    past : (array, array), optional
        Cached keys and values, shape (B, Hkv, P, D).

    Returns
    -------
    array, shape (B, L, E), or (array, (keys, values)) with ``past``
    """
    source = x if memory is None else memory
    q = _heads(x, weights, "q_proj", spec.num_heads)
    k = _heads(source, weights, "k_proj", spec.num_kv_heads)
    v = _heads(source, weights, "v_proj", spec.num_kv_heads)
    offset = 0
    if past is not None:
        offset = past[0].shape[2]
        k, v = np.concatenate([past[0], k], axis=2), np.concatenate([past[1], v], axis=2)
    keys, values = (np.repeat(heads, spec.num_heads // spec.num_kv_heads, axis=1) for heads in (k, v))
    shape = (spec.num_heads, spec.span.rows, spec.head_dim)
    tables = {name: np.broadcast_to(weights[name], shape) for name in ("rel_k", "rel_v") if name in weights}
    attended = np.zeros(q.shape)
    key_positions = np.arange(k.shape[2])
    for i in range(q.shape[2]):
        seen = np.flatnonzero(_visible(i + offset, key_positions, spec))
        rows = _rows(seen - (i + offset), spec)
        logits = np.einsum("bhd,bhkd->bhk", q[:, :, i], keys[:, :, seen])
        logits += np.einsum("bhd,hkd->bhk", q[:, :, i], tables["rel_k"][:, rows])
        exponentials = np.exp((logits - logits.max(axis=-1, keepdims=True)) / np.sqrt(spec.head_dim))
        share = exponentials / exponentials.sum(axis=-1, keepdims=True)
        attended[:, :, i] = np.einsum("bhk,bhkd->bhd", share, values[:, :, seen])
        if "rel_v" in tables:
            attended[:, :, i] += np.einsum("bhk,hkd->bhd", share, tables["rel_v"][:, rows])
    y = _linear(np.concatenate(list(np.moveaxis(attended, 1, 0)), axis=-1), weights, "out_proj")
    return y if past is None else (y, (k, v))


def _visible(query: int, keys: NDArray[np.int_], spec: BlockSpec) -> NDArray[np.bool_]:
    """Return which keys the query at an absolute position sees."""
    visible = np.ones(keys.shape, dtype=bool)
    if spec.causal:
        visible &= keys <= query
    if spec.window is not None:
        left, right = spec.window
        visible &= (left is None) | (keys >= query - (left or 0))
        visible &= (right is None) | (keys <= query + (right or 0))
    if spec.block_size is not None:
        visible &= keys // spec.block_size >= query // spec.block_size - 1
    return visible


def _rows(relative: NDArray[np.int_], spec: BlockSpec) -> NDArray[np.int_]:
    """Return the table row of each relative position; only clipping may leave the span here."""
    rows = relative + spec.span.left
    if spec.span.beyond == "clip":
        rows = np.clip(rows, 0, spec.span.rows - 1)
    if len(rows) and not 0 <= rows.min() <= rows.max() < spec.span.rows:
        raise ValueError(f"the oracle has no row for the relative positions {relative.min()} … {relative.max()}")
    return rows


def _heads(x: F64, weights: dict[str, F64], name: str, heads: int) -> F64:
    projected = _linear(x, weights, name)
    return np.stack(np.split(projected, heads, axis=-1), axis=1)


def _linear(x: F64, weights: dict[str, F64], name: str) -> F64:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.float64(0))
