"""The formulas of the library, in float64. Nothing here comes from the library under test.

Attention is the dense formula as torch's expressions, which autograd differentiates, with everything of size ``n × m``
written out. Which key a query sees, which row serves a pair, and which weights dropout keeps is said by plain
loops over queries and keys. A span is anything with ``left``, ``right`` and ``beyond``.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Window = tuple[int | None, int | None]


class SpanLike(Protocol):
    """Relative positions ``-left … right`` of a table's rows."""

    @property
    def left(self) -> int: ...
    @property
    def right(self) -> int: ...
    @property
    def beyond(self) -> str: ...


class Reach(NamedTuple):
    left: int
    right: int
    beyond: str = "error"


def default_span(rows: int, *, causal: bool) -> Reach:
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
    i: int, j: int, *, offset: int = 0, causal: bool = False, window: Window | None = None,
    block_size: int | None = None, blocks_before: int | None = None,
) -> bool:  # fmt: skip
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


def span_of(tables: Iterable[tuple[Tensor | None, int]], span: SpanLike | None, *, causal: bool) -> SpanLike:
    """Span of tables with the axes of their rows; without any, one that is too short for nothing."""
    known = [x.shape[axis] for x, axis in tables if x is not None]
    if not known:
        return Reach(0, 0, "zero")
    return default_span(known[0], causal=causal) if span is None else span


class Attention(NamedTuple):
    out: Any
    lse: Any


def attention(
    q: Tensor, k: Tensor, v: Tensor, rel_k: Tensor | None = None, rel_v: Tensor | None = None,
    rel_bias: Tensor | None = None, rel_q: Tensor | None = None, mask: Tensor | None = None,
    key_table: Tensor | None = None, sinks: Tensor | None = None,
    segments: Tensor | tuple[Tensor, Tensor] | None = None, positions: tuple[Tensor, Tensor] | None = None, *,
    span: SpanLike | None = None, causal: bool = False, window: Window | None = None, block_size: int | None = None,
    blocks_before: int | None = None, offset: Any = 0, scale: float | Tensor | None = None,
    rel_scale: float | Tensor | None = None, softcap: float | None = None, dropout: float = 0.0, seed: int = 0,
    pairwise: bool = False,
) -> Attention:  # fmt: skip
    """Attend, with everything of size ``n × m`` written out.

    ``pairwise`` adds up a value for each pair: one that is hidden or dropped then counts for nothing even if it is NaN.
    """
    n, m = q.shape[-2], k.shape[-2]
    if q.ndim > 2:
        k, v = (x.repeat_interleave(q.shape[-3] // max(1, x.shape[-3]), dim=-3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rel_scale = scale if rel_scale is None else rel_scale
    by_head = (slice(None), None, None) if q.ndim > 2 else (slice(None), None)
    scale, rel_scale = (x[by_head] if isinstance(x, Tensor) else x for x in (scale, rel_scale))
    span = span_of(((rel_k, -2), (rel_v, -2), (rel_bias, -1), (key_table, -2)), span, causal=causal)
    pattern = {"causal": causal, "window": window, "block_size": block_size, "blocks_before": blocks_before}
    # Python's integers can hold every offset.
    places: list[NDArray[Any]] = [np.arange(n, dtype=object) + np.asarray(offset, object)[..., None],
                                  np.arange(m, dtype=object)]  # fmt: skip
    if positions is not None:
        places = [np.asarray(x.tolist(), object).reshape(tuple(x.shape)) for x in positions]
    visible, rows = pairs(places[0], places[1], span, heads=q.ndim > 2, **pattern)
    if segments is not None:
        of_queries, of_keys = segments if isinstance(segments, (tuple, list)) else (segments, segments)
        same = of_queries[..., :, None] == of_keys[..., None, :]
        visible = visible & (same[..., None, :, :] if q.ndim > 2 else same)

    def at_positions(table: Tensor) -> Tensor:
        """(..., R, D) -> (..., n, m, D), zeros where the table has nothing."""
        if q.ndim == 2 or table.ndim == 2:
            found = table[rows.clamp(min=0)]
        else:
            found = table[torch.arange(len(table))[:, None, None], rows.clamp(min=0)]
        return found.masked_fill((rows < 0)[..., None], 0.0)

    logits = scale * (q @ k.mT)
    if rel_k is not None:
        logits = logits + rel_scale * (at_positions(rel_k) @ (q if rel_q is None else rel_q)[..., None])[..., 0]
    if key_table is not None:
        logits = logits + rel_scale * (at_positions(key_table) * k[..., None, :, :]).sum(-1)
    if rel_bias is not None:
        logits = logits + at_positions(rel_bias[..., None])[..., 0]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    allowed = visible.expand(logits.shape)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        allowed = allowed & (mask if boolean else mask != -math.inf)
        logits = logits if boolean else logits + mask
    of_rows = by_head if sinks is None or sinks.ndim == 1 else (..., None)
    weights, lse = softmax(logits, allowed, None if sinks is None else sinks[of_rows])
    if dropout:
        here = kept(weights.shape, seed, offset, dropout)
        weights, allowed = weights * here.to(weights) / (1 - dropout), allowed & here

    def summed(values: Tensor) -> Tensor:
        """Add up the values of pairs, (..., n, m, D)."""
        return (weights[..., None] * values).masked_fill(~allowed[..., None], 0.0).sum(-2)

    out = summed(v[..., None, :, :]) if pairwise else weights @ v
    if rel_v is not None:
        values = at_positions(rel_v)
        out = out + (summed(values) if pairwise else (weights[..., None, :] @ values)[..., 0, :])
    return Attention(out, lse)


def pairs(
    stands: NDArray[Any], key_stands: NDArray[Any], span: SpanLike, *, heads: bool, **pattern: Any
) -> tuple[Tensor, Tensor]:
    """Which keys every query may see and which row of a table serves them, -1 for none, (..., 1 if heads, n, m)."""
    lead = np.broadcast_shapes(stands.shape[:-1], key_stands.shape[:-1])
    visible = torch.zeros((*lead, stands.shape[-1], key_stands.shape[-1]), dtype=torch.bool)
    rows = torch.full(visible.shape, -1)
    for item in np.ndindex(*lead):
        own, others = (x[item].tolist() if x.ndim > 1 else x.tolist() for x in (stands, key_stands))
        for i, position in enumerate(own):
            for j, key in enumerate(others):
                if sees(position, key, **pattern):
                    row = row_of(key - position, span)
                    visible[(*item, i, j)], rows[(*item, i, j)] = True, -1 if row is None else row
    return (visible[..., None, :, :], rows[..., None, :, :]) if heads else (visible, rows)


def softmax(logits: Tensor, allowed: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weights and the log-sum-exp over what is allowed, and over a sink (..., 1) without a value."""
    m, dead = logits.shape[-1], ~allowed.any(-1, keepdim=True)
    logits = logits.masked_fill(~allowed, -math.inf)
    if sinks is not None:
        logits, dead = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1), torch.zeros_like(dead)
    logits = logits.masked_fill(dead, 0.0)
    weights = logits.softmax(-1).masked_fill(dead, 0.0)[..., :m] if m else logits[..., :0]
    most = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else 0.0  # the gradient would round the sum
    lse = ((logits - most).logsumexp(-1, keepdim=True) + most)[..., 0]
    return weights, lse.masked_fill(dead[..., 0], -math.inf)


def kept(shape: tuple[int, ...], seed: int, offset: Any, dropout: float) -> Tensor:
    """Which weights (..., H, n, m) a seed keeps."""
    n, m, by_item = shape[-2], shape[-1], np.asarray(offset, object)[..., None] if np.ndim(offset) else offset
    firsts = enumerate(np.asarray(np.zeros(shape[:-2], object) + by_item, object).ravel())
    flat = [is_kept(seed, at, i + first, j, dropout) for at, first in firsts for i in range(n) for j in range(m)]
    return torch.tensor(flat, dtype=torch.bool).reshape(shape)


def skew(x: ArrayLike) -> Floats:
    """``s[i, j] = x[i, n - 1 - i + j]``."""
    x = np.asarray(x, dtype=np.float64)
    n, width = x.shape[-2:]
    i, j = np.indices((n, width - n + 1))
    return x[..., i, n - 1 - i + j]


def unskew(s: ArrayLike) -> Floats:
    """Put every number of the absolute layout back to its place in the relative layout, zeros elsewhere."""
    s = np.asarray(s, dtype=np.float64)
    n, m = s.shape[-2:]
    i, j = np.indices((n, m))
    x = np.zeros((*s.shape[:-1], n + m - 1))
    x[..., i, n - 1 - i + j] = s
    return x


def _rows(table: Floats, span: SpanLike | None, n: int, m: int, offset: int, causal: bool) -> tuple[Any, Any]:
    """Which row serves each query and key, (n, m), and where there is one."""
    span = span or default_span(table.shape[-2], causal=causal)
    _, rows = pairs(np.arange(n) + offset, np.arange(m), span, heads=False, causal=causal)
    return rows.clamp(min=0).numpy(), (rows >= 0).numpy()


def relative_logits(
    q: ArrayLike, table: ArrayLike, span: SpanLike | None = None, *, n_keys: int, offset: int = 0, causal: bool = False,
) -> Floats:  # fmt: skip
    """``q_i · e_r`` for every query and key; zero at ``r > 0`` where ``causal``."""
    q, table = np.asarray(q, dtype=np.float64), np.asarray(table, dtype=np.float64)
    rows, served = _rows(table, span, q.shape[-2], n_keys, offset, causal)
    products = q @ table.swapaxes(-1, -2)
    found = np.take_along_axis(products, np.broadcast_to(rows, (*products.shape[:-1], n_keys)), -1)
    return np.where(served, found, 0.0)


def relative_values(
    weights: ArrayLike, table: ArrayLike, span: SpanLike | None = None, *, offset: int = 0, causal: bool = False
) -> Floats:
    """``Σ_j w_ij · ev_r`` for every query; nothing comes from ``r > 0`` where ``causal``."""
    weights, table = np.asarray(weights, dtype=np.float64), np.asarray(table, dtype=np.float64)
    n, m = weights.shape[-2:]
    rows, served = _rows(table, span, n, m, offset, causal)
    values: Floats = np.where(served[..., None], weights[..., None] * table[..., rows, :], 0.0).sum(-2)
    return values


def relative_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, rel_k: ArrayLike | None = None, span: SpanLike | None = None, **given: Any
) -> Attention:
    """Return what `attention` returns of arrays of any library, in NumPy's float64."""

    def made(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(made, x))
        x = np.asarray(x)
        return torch.tensor(x if x.dtype == bool else x.astype("float64" if x.dtype.kind == "f" else "int64"))

    given = given | {"q": q, "k": k, "v": v, "rel_k": rel_k}
    arrays = {name for name, x in given.items() if np.ndim(x[0] if isinstance(x, tuple) else x)}
    tensors = {name: made(x) if name in arrays else x for name, x in given.items()}
    return Attention(*(x.numpy() for x in attention(**tensors, span=span, pairwise=True)))


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


def pattern(spec: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("causal", "window", "block_size", "blocks_before")}


def attention_block(
    x: ArrayLike, weights: Mapping[str, ArrayLike], spec: Any, *, memory: ArrayLike | None = None,
    past: tuple[ArrayLike, ArrayLike] | None = None,
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    x = np.asarray(x, dtype=np.float64)
    source = x if memory is None else np.asarray(memory, dtype=np.float64)
    named = {name: np.asarray(weight, dtype=np.float64) for name, weight in weights.items()}
    q = _into_heads(x, "q_proj", named, spec.num_heads)
    k, v = (_into_heads(source, name, named, spec.num_kv_heads) for name in ("k_proj", "v_proj"))
    offset = 0
    if past is not None:
        offset = np.shape(past[0])[-2]
        k, v = np.concatenate([past[0], k], axis=-2), np.concatenate([past[1], v], axis=-2)
    heads = relative_attention(q, k, v, named["rel_k"], spec.span, rel_v=named.get("rel_v"), sinks=named.get("sinks"),
                               offset=offset, **pattern(spec)).out  # fmt: skip
    joined = np.concatenate([heads[..., head, :, :] for head in range(spec.num_heads)], axis=-1)
    return _linear(joined, "out_proj", named), k, v


def relative_error(actual: ArrayLike, expected: ArrayLike, least: float = 0.0) -> float:
    """Relative L2 error over the whole array; infinite where one has a NaN or an infinity that the other has not.

    ``least`` is the least norm to divide by, so that what is zero but for rounding is compared as it is.
    """
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {actual.shape} and {expected.shape}")
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite]) or not np.all(np.isfinite(actual[finite])):
        return math.inf
    difference = float(np.linalg.norm(actual[finite] - expected[finite]))
    size = max(float(np.linalg.norm(expected[finite])), least)
    return difference if size == 0 else difference / size


def _linear(x: Floats, name: str, weights: Mapping[str, Floats]) -> Floats:
    y: Floats = np.einsum("...e,fe->...f", x, weights[f"{name}.weight"])
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _into_heads(x: Floats, name: str, weights: Mapping[str, Floats], heads: int) -> Floats:
    projected = _linear(x, name, weights)
    return np.stack(np.split(projected, heads, axis=-1), axis=-3)
