"""The formulas of the library as plain loops in float64 NumPy. Nothing here comes from the library under test.

A span is anything with ``left``, ``right`` and ``beyond``; every function walks over single queries and single keys and
looks a relative position up in its table one row at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Window = tuple[int | None, int | None]
Labels = ArrayLike | tuple[ArrayLike, ArrayLike]


class SpanLike(Protocol):
    """Relative positions ``-left … right`` of a table's rows."""

    @property
    def left(self) -> int: ...
    @property
    def right(self) -> int: ...
    @property
    def beyond(self) -> str: ...


class Reach(NamedTuple):
    """A span of the oracle's own."""

    left: int
    right: int
    beyond: str = "error"


class Attention(NamedTuple):
    """What attention returns: the output and the logarithm of the softmax's denominator."""

    out: Floats
    lse: Floats


def default_span(rows: int, *, causal: bool) -> Reach:
    """Span of a table of ``rows`` rows when none is given."""
    if causal:
        return Reach(rows - 1, 0)
    if rows % 2 == 0:
        raise ValueError(f"no default span for {rows} rows")
    return Reach(rows // 2, rows // 2)


def row_of(r: int, span: SpanLike) -> int | None:
    """Row of a table that serves relative position ``r``; ``None`` where it contributes nothing."""
    if -span.left <= r <= span.right:
        return r + span.left
    if span.beyond == "clip":
        return 0 if r < 0 else span.left + span.right
    if span.beyond == "zero":
        return None
    raise LookupError(f"relative position {r} is beyond the table")


def sees(
    i: int,
    j: int,
    *,
    offset: int = 0,
    causal: bool = False,
    window: Window | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
) -> bool:
    """Whether query ``i`` may see key ``j``, masks aside."""
    position = i + offset
    if causal and j > position:
        return False
    if window is not None:
        left, right = window
        if left is not None and j < position - left:
            return False
        if right is not None and j > position + right:
            return False
    if block_size is None:
        return True
    if blocks_before is None:
        return j <= position and j // block_size in (position // block_size, position // block_size - 1)
    return position // block_size - blocks_before <= j // block_size <= position // block_size


def is_kept(seed: int, place: int, position: int, key: int, dropout: float) -> bool:
    """Whether dropout keeps the weight of a key for a query of an item's head, all heads counted as one axis."""

    def mixed(x: int, *, whole: bool = True) -> int:
        x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
        x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
        return x ^ x >> 16 if whole else x

    query = mixed((mixed((position * 0x9E3779B1 + seed) % 2**32) + place * 0xC2B2AE3D) % 2**32)
    drawn = mixed(query ^ mixed((key * 0x85EBCA77 - seed) % 2**32), whole=False)
    return (drawn + 2**31) % 2**32 >= round(dropout * 2**32)


def skew(x: ArrayLike) -> Floats:
    """``s[i, j] = x[i, n - 1 - i + j]``, one number at a time."""
    x = np.asarray(x, dtype=np.float64)
    n, width = x.shape[-2:]
    s = np.zeros((*x.shape[:-1], width - n + 1))
    for i in range(n):
        for j in range(width - n + 1):
            s[..., i, j] = x[..., i, n - 1 - i + j]
    return s


def unskew(s: ArrayLike) -> Floats:
    """Put every number of the absolute layout back to its place in the relative layout, zeros elsewhere."""
    s = np.asarray(s, dtype=np.float64)
    n, m = s.shape[-2:]
    x = np.zeros((*s.shape[:-1], n + m - 1))
    for i in range(n):
        for j in range(m):
            x[..., i, n - 1 - i + j] = s[..., i, j]
    return x


def relative_logits(
    q: ArrayLike,
    table: ArrayLike,
    span: SpanLike | None = None,
    *,
    n_keys: int,
    offset: int = 0,
    causal: bool = False,
) -> Floats:
    """``q_i · e_r`` for every query and key; zero at ``r > 0`` where ``causal``."""
    q, table = np.asarray(q, dtype=np.float64), np.asarray(table, dtype=np.float64)
    span = span or default_span(table.shape[-2], causal=causal)
    logits = np.zeros((*q.shape[:-1], n_keys))
    for lead in _leads(q):
        rows = _of_head(table, 2, lead)
        for i in range(q.shape[-2]):
            for j in range(n_keys):
                if sees(i, j, offset=offset, causal=causal):
                    row = row_of(j - i - offset, span)
                    logits[(*lead, i, j)] = 0.0 if row is None else _dot(q[(*lead, i)], rows[row])
    return logits


def relative_values(
    weights: ArrayLike, table: ArrayLike, span: SpanLike | None = None, *, offset: int = 0, causal: bool = False
) -> Floats:
    """``Σ_j w_ij · ev_r`` for every query; nothing comes from ``r > 0`` where ``causal``."""
    weights, table = np.asarray(weights, dtype=np.float64), np.asarray(table, dtype=np.float64)
    span = span or default_span(table.shape[-2], causal=causal)
    values = np.zeros((*weights.shape[:-1], table.shape[-1]))
    for lead in _leads(weights):
        rows = _of_head(table, 2, lead)
        for i in range(weights.shape[-2]):
            for j in range(weights.shape[-1]):
                if sees(i, j, offset=offset, causal=causal):
                    row = row_of(j - i - offset, span)
                    if row is not None:
                        values[(*lead, i)] += weights[(*lead, i, j)] * rows[row]
    return values


def relative_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    rel_k: ArrayLike | None = None,
    span: SpanLike | None = None,
    *,
    rel_v: ArrayLike | None = None,
    rel_bias: ArrayLike | None = None,
    rel_q: ArrayLike | None = None,
    key_table: ArrayLike | None = None,
    causal: bool = False,
    window: Window | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    mask: ArrayLike | None = None,
    segments: Labels | None = None,
    sinks: ArrayLike | None = None,
    offset: int = 0,
    positions: Labels | None = None,
    scale: ArrayLike | None = None,
    rel_scale: ArrayLike | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Attention:
    """Attend one query at a time: logits, softcap, mask, softmax, values with their relative part."""
    q, k, v = (np.asarray(array, dtype=np.float64) for array in (q, k, v))
    rel_q = q if rel_q is None else np.asarray(rel_q, dtype=np.float64)
    tables = {"rel_k": (rel_k, 2), "rel_v": (rel_v, 2), "rel_bias": (rel_bias, 1), "key_table": (key_table, 2)}
    given = {
        name: (np.asarray(table, dtype=np.float64), ndim) for name, (table, ndim) in tables.items() if table is not None
    }
    if given and span is None:
        table, ndim = next(iter(given.values()))
        span = default_span(table.shape[-ndim], causal=causal)
    scale = np.asarray(q.shape[-1] ** -0.5 if scale is None else scale)
    rel_scale = scale if rel_scale is None else np.asarray(rel_scale)
    n, m = q.shape[-2], k.shape[-2]
    pattern: dict[str, Any] = {"causal": causal, "window": window, "block_size": block_size}
    pattern["blocks_before"] = blocks_before
    group = q.shape[-3] // max(1, k.shape[-3]) if q.ndim > 2 else 1
    mask = None if mask is None else np.broadcast_to(np.asarray(mask), (*q.shape[:-1], m))

    out, lse = np.zeros((*q.shape[:-1], v.shape[-1])), np.full(q.shape[:-1], -np.inf)
    for place, lead in enumerate(_leads(q)):
        shared = (*lead[:-1], lead[-1] // group) if lead else ()
        query_labels, key_labels = of_item(segments, lead, n, m)
        stands, key_stands = of_item(positions, lead, n, m)
        factor, rel_factor = (float(x if x.ndim == 0 else x[lead[-1] if lead else 0]) for x in (scale, rel_scale))
        sink = None if sinks is None else float(np.asarray(sinks)[lead[-1] if lead else 0])
        head_tables = {name: _of_head(table, ndim, lead) for name, (table, ndim) in given.items()}
        for i in range(n):
            logits: dict[int, float] = {}
            values: dict[int, Floats] = {}
            for j in range(m):
                position, key = (i + offset, j) if positions is None else (stands[i], key_stands[j])
                if not sees(position, key, **pattern) or (segments is not None and query_labels[i] != key_labels[j]):
                    continue
                row = row_of(key - position, span) if span is not None and given else None
                added = 0.0 if mask is None else _added(mask[(*lead, i, j)])
                if added == -np.inf:
                    continue
                logit = factor * _dot(q[(*lead, i)], k[(*shared, j)])
                if row is not None and "rel_k" in head_tables:
                    logit += rel_factor * _dot(rel_q[(*lead, i)], head_tables["rel_k"][row])
                if row is not None and "key_table" in head_tables:
                    logit += rel_factor * _dot(k[(*shared, j)], head_tables["key_table"][row])
                if row is not None and "rel_bias" in head_tables:
                    logit += float(head_tables["rel_bias"][row])
                if softcap is not None:
                    logit = softcap * math.tanh(logit / softcap)
                logits[j] = logit + added
                values[j] = v[(*shared, j)]
                if row is not None and "rel_v" in head_tables:
                    values[j] = values[j] + head_tables["rel_v"][row]
            every = [*logits.values(), *([] if sink is None else [sink])]
            if every:
                top = max(every)
                lse[(*lead, i)] = top + math.log(math.fsum(math.exp(logit - top) for logit in every))
            for j, logit in logits.items():
                if not dropout or is_kept(seed or 0, place, i + offset, j, dropout):
                    out[(*lead, i)] += math.exp(logit - lse[(*lead, i)]) / (1 - dropout) * values[j]
    return Attention(out, lse)


def of_item(labels: Labels | None, lead: tuple[int, ...], n: int, m: int) -> tuple[list[int], list[int]]:
    """Integers of one item's queries and keys; zeros where there are none."""
    pair = (np.zeros(n, int), np.zeros(m, int)) if labels is None else labels
    both = pair if isinstance(pair, (tuple, list)) else (pair, pair)
    own = [x if x.ndim == 1 else x[lead[:-1]] for x in map(np.asarray, both)]
    return [int(x) for x in own[0]], [int(x) for x in own[1]]


def merge_attention(outs: list[Floats], lses: list[Floats]) -> Attention:
    """Attention over the union of disjoint key sets, from the parts' outputs and denominators."""
    out, lse = np.zeros_like(outs[0]), np.full(lses[0].shape, -np.inf)
    for index in np.ndindex(lses[0].shape):
        top = max(float(part[index]) for part in lses)
        if top == -np.inf:
            continue
        shares = [math.exp(float(part[index]) - top) for part in lses]
        total = math.fsum(shares)
        lse[index] = top + math.log(total)
        for share, part in zip(shares, outs, strict=True):
            out[index] += share / total * part[index]
    return Attention(out, lse)


def attention_block(
    x: ArrayLike,
    weights: Mapping[str, ArrayLike],
    span: SpanLike,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    memory: ArrayLike | None = None,
    past: tuple[ArrayLike, ArrayLike] | None = None,
    **options: Any,
) -> tuple[Floats, Floats, Floats]:
    """Project, attend, project back; returns the output and all keys and values so far."""
    x = np.asarray(x, dtype=np.float64)
    source = x if memory is None else np.asarray(memory, dtype=np.float64)
    named = {name: np.asarray(weight, dtype=np.float64) for name, weight in weights.items()}
    q = _into_heads(x, "q_proj", named, num_heads)
    k, v = (_into_heads(source, name, named, num_kv_heads or num_heads) for name in ("k_proj", "v_proj"))
    offset = 0
    if past is not None:
        offset = np.shape(past[0])[-2]
        k, v = np.concatenate([past[0], k], axis=-2), np.concatenate([past[1], v], axis=-2)
    heads = relative_attention(q, k, v, named["rel_k"], span, rel_v=named.get("rel_v"), sinks=named.get("sinks"),
                               offset=offset, **options).out  # fmt: skip
    joined = np.concatenate([heads[..., head, :, :] for head in range(num_heads)], axis=-1)
    return _linear(joined, "out_proj", named), k, v


def relative_error(actual: ArrayLike, expected: ArrayLike) -> float:
    """Relative L2 error over the whole array; infinite where one has a NaN or an infinity that the other has not."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {actual.shape} and {expected.shape}")
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite]) or not np.all(np.isfinite(actual[finite])):
        return math.inf
    difference = float(np.linalg.norm(actual[finite] - expected[finite]))
    size = float(np.linalg.norm(expected[finite]))
    return difference if size == 0 else difference / size


def _linear(x: Floats, name: str, weights: Mapping[str, Floats]) -> Floats:
    y: Floats = np.einsum("...e,fe->...f", x, weights[f"{name}.weight"])
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _into_heads(x: Floats, name: str, weights: Mapping[str, Floats], heads: int) -> Floats:
    projected = _linear(x, name, weights)
    return np.stack(np.split(projected, heads, axis=-1), axis=-3)


def _leads(x: Floats) -> Iterator[tuple[int, ...]]:
    """Indices of the leading axes, the last of them the head."""
    return np.ndindex(x.shape[:-2])


def _of_head(table: Floats, ndim: int, lead: tuple[int, ...]) -> Floats:
    """The table of one head: the whole of a shared one (``ndim`` axes), else one entry of its first axis."""
    return table if table.ndim == ndim else table[lead[-1] if lead else 0]


def _added(entry: Any) -> float:
    """What an entry of a mask adds to a logit."""
    if entry.dtype == np.bool_:
        return 0.0 if entry else -np.inf
    return float(entry)


def _dot(a: Floats, b: Floats) -> float:
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))
