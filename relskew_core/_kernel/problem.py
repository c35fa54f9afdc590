"""One call of relative attention, checked and brought into one form for every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from relskew_core._array.checks import check_bool, check_int, check_real, check_window, describe
from relskew_core._array.namespace import check_companion, is_half, namespace_of_arrays
from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.ragged import RowVisibility, Windows, is_by_row, row_offsets
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility


class Operands(NamedTuple):
    """The arrays of a call, with a heads axis."""

    q: Array  # (..., H, Lq, D)
    k: Array  # (..., Hkv, Lk, D)
    v: Array  # (..., Hkv, Lk, Dv)
    rel_k: Array | None  # (R, Dr) or (H, R, Dr); by row (..., 1 or H, W, Dr)
    rel_v: Array | None  # (R, Dv) or (H, R, Dv); by row (..., 1 or H, W, Dv)
    rel_bias: Array | None  # (1, R) or (H, R); by row (..., 1 or H, W)
    rel_q: Array | None  # (..., H, Lq, Dr), None where it is q
    mask: Array | None  # boolean or additive, broadcasts to (..., H, Lq, Lk), at least two axes
    key_table: Array | None = None  # as rel_k; what keys meet, which no native path knows

    def without_key_table(self) -> tuple[Array | None, ...]:
        """Return what native paths take."""
        return self[:-1]


class Gradients(NamedTuple):
    """Gradients of :func:`relskew_core.relative_attention`, by argument; ``None`` for absent and boolean ones."""

    q: Array
    k: Array
    v: Array
    rel_k: Array | None
    rel_v: Array | None
    rel_bias: Array | None
    rel_q: Array | None
    mask: Array | None
    key_table: Array | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What is not an array."""

    span: Span
    visibility: Visibility
    scale: float
    rel_scale: float
    softcap: float | None
    chunk_size: int | None
    return_lse: bool

    def positions(self) -> tuple[int, int]:
        """Return the lowest and highest visible relative position; ``(0, 0)`` where nothing is seen."""
        return self.visibility.positions() or (0, 0)


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked call: what the kernels get, and what the caller gets back."""

    given: Operands  # in the caller's dtype
    options: Options
    xp: Namespace
    dtype: Any  # of the caller's arrays, which the results are returned in
    heads: bool  # whether the caller's arrays have a heads axis
    windows: Windows | None = None  # of the tables, where the batch's items have offsets of their own

    def result(self, x: Array, *, dtype: Any = None) -> Array:
        """Bring an array of a kernel into the caller's form."""
        x = x if self.heads else x[0, ...]
        dtype = self.dtype if dtype is None else dtype
        return x if x.dtype == dtype else self.xp.astype(x, dtype)

    @property
    def wide(self) -> Any:
        """The dtype of the accumulation."""
        return self.xp.float32 if is_half(self.dtype, xp=self.xp) else self.dtype

    @property
    def operands(self) -> Operands:
        """The arrays in the dtype of the accumulation."""
        if self.wide == self.dtype:
            return self.given
        return Operands(*[x if x is None or x.dtype != self.dtype else self._widened(x) for x in self.given])

    def _widened(self, x: Array) -> Array:
        return x if x.dtype == self.wide else self.xp.astype(x, self.wide)

    def operand(self, x: Array, dtype: Any = None) -> Array:
        """Bring an array of the caller's, shaped as the queries, into the kernels' form."""
        x = x if self.heads else x[None, ...]
        return self._widened(x) if dtype is None or dtype == self.wide else x

    def gradients(self, gradients: Gradients, arguments: dict[str, Array | None]) -> Gradients:
        """Bring the kernels' gradients into the shapes and the dtype of the caller's arrays."""

        def own(name: str, x: Array | None) -> Array | None:
            if x is None:
                return None
            if name in ("q", "k", "v", "rel_q"):
                return self.result(x)
            argument = arguments[name]
            if self.windows is not None and name != "mask":
                x = self.windows.gradient(x[..., None] if name == "rel_bias" else x, argument)
            x = self.xp.reshape(x, argument.shape)  # type: ignore[union-attr]  # what has a gradient was given
            return x if x.dtype == self.dtype else self.xp.astype(x, self.dtype)

        return Gradients(*(own(name, x) for name, x in gradients._asdict().items()))


def problem(
    q: Array,
    k: Array,
    v: Array,
    rel_k: Array | None,
    span: Span | None,
    *,
    rel_v: Array | None,
    rel_bias: Array | None,
    rel_q: Array | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    block_size: int | None,
    mask: Array | None,
    key_table: Array | None = None,
    offset: Any,
    scale: float | None,
    rel_scale: float | None,
    softcap: float | None,
    chunk_size: int | None,
    return_lse: bool = False,
) -> Problem:
    """Check a call; every error names its argument."""
    tables = {"rel_k": rel_k, "rel_v": rel_v, "rel_bias": rel_bias, "key_table": key_table}
    xp = namespace_of_arrays({"q": q, "k": k, "v": v}, {**tables, "rel_q": rel_q})
    _check_shapes(q, k, v)
    causal = check_bool("causal", causal)
    if block_size is not None:
        block_size, causal = check_int("block_size", block_size, minimum=1), True
    span = check_tables(tables, span, q, v, causal=causal)
    _check_rel_q(q, rel_k, rel_q)
    sight = (causal, check_window("window", window), block_size)
    visibility = visibility_of(q, k.shape[-2], offset, *sight, xp=xp)
    windows = Windows(visibility, span, xp) if isinstance(visibility, RowVisibility) else None
    if key_table is not None and key_table.shape[-1] != k.shape[-1]:
        raise ValueError(f"`key_table` must have the width of `k`, {k.shape[-1]}, got {describe(key_table)}")
    for name, table in tables.items():
        if table is not None:
            visibility.check_reach(name, span)
    factor: float = q.shape[-1] ** -0.5 if scale is None else check_real("scale", scale)
    options = Options(
        span=span if windows is None else windows.window_span,
        visibility=visibility,
        scale=factor,
        rel_scale=factor if rel_scale is None else check_real("rel_scale", rel_scale),
        softcap=None if softcap is None else check_real("softcap", softcap, positive=True),
        chunk_size=None if chunk_size is None else check_int("chunk_size", chunk_size, minimum=1),
        return_lse=check_bool("return_lse", return_lse),
    )
    if mask is not None:
        mask = check_mask(mask, q, k, xp=xp)
    if rel_bias is not None and rel_bias.ndim == 1:
        rel_bias = rel_bias[None, :]

    heads = q.ndim > 2

    def form(x: Array | None, *, rows: bool = True) -> Array | None:
        if x is None:
            return None
        return x[None, ...] if rows and not heads else x

    def by_position(x: Array | None) -> Array | None:
        x = form(x, rows=False)
        if x is None or windows is None:
            return x
        return windows.of(x)

    bias = form(rel_bias, rows=False)
    if bias is not None and windows is not None:
        bias = windows.of(bias[..., None])[..., 0]
    operands = Operands(
        form(q), form(k), form(v), by_position(rel_k), by_position(rel_v), bias,
        form(rel_q), form(mask, rows=False), by_position(key_table),
    )  # fmt: skip
    return Problem(operands, options, xp, q.dtype, heads, windows)


def visibility_of(
    q: Array,
    n_keys: int,
    offset: Any,
    causal: bool,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    *,
    xp: Namespace,
) -> Visibility:
    """Return the pattern of a call, whose offset is one for all or one for each item of the batch."""
    if not is_by_row(offset):
        return Visibility(q.shape[-2], n_keys, check_int("offset", offset), causal, window, block_size)
    offsets, known = row_offsets(offset, q, xp=xp)
    return RowVisibility(q.shape[-2], n_keys, 0, causal, window, block_size, offsets, known)


def default_span(name: str, rows: int, *, causal: bool, span_name: str = "span") -> Span:
    """Return the span of a table that comes without one: causal, or full for an odd number of rows."""
    if causal:
        return Span.causal(rows)
    if rows % 2:
        return Span.full((rows + 1) // 2)
    raise ValueError(
        f"`{span_name}` must be given for `{name}`: {rows} rows are no full span 2n - 1; Span.full, Span.clipped or "
        f"Span(left, right) says which relative positions they stand for (causal=True takes Span.causal({rows}))"
    )


def check_tables(
    tables: dict[str, Array | None], span: Span | None, q: Array, v: Array | None, *, causal: bool
) -> Span:
    """Check the tables' shapes against the span, and return the span, chosen by the first table if it is ``None``."""
    check_bool("causal", causal)
    if span is not None and not isinstance(span, Span):
        raise TypeError(f"`span` must be a Span or None, got {describe(span)}")
    n_heads = q.shape[-3] if q.ndim > 2 else 1
    for name, table in tables.items():
        if table is None:
            continue
        by_head = 2 if name == "rel_bias" else 3
        if table.ndim not in (by_head - 1, by_head):
            expected = "(R,) or (H, R)" if name == "rel_bias" else "(R, D) or (H, R, D)"
            raise ValueError(f"`{name}` must have shape {expected}, got {describe(table)}")
        if table.ndim == by_head and table.shape[0] != n_heads and not (name == "rel_bias" and table.shape[0] == 1):
            raise ValueError(f"`{name}` must have H = {n_heads} heads on its first axis, got {describe(table)}")
        rows = table.shape[-1] if name == "rel_bias" else table.shape[-2]
        if rows == 0:
            raise ValueError(f"`{name}` must have at least one row, got {describe(table)}")
        if span is None:
            span = default_span(name, rows, causal=causal)
        if rows != span.rows:
            raise ValueError(f"`{name}` must have the {span.rows} rows of {span}, got {describe(table)}")
    rel_v = tables.get("rel_v")
    if rel_v is not None and v is not None and rel_v.shape[-1] != v.shape[-1]:
        raise ValueError(f"`rel_v` must have the width of `v`, {v.shape[-1]}, got {describe(rel_v)}")
    return Span(0, 0, "zero") if span is None else span


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 2:
            raise ValueError(
                f"`{name}` must have shape (..., heads, length, width) or (length, width), got {describe(x)}"
            )
        if x.ndim != q.ndim or tuple(x.shape[:-3]) != tuple(q.shape[:-3]):
            raise ValueError(
                f"`{name}` must have the leading axes of `q`, {tuple(q.shape[:-3])}, and its heads, got {describe(x)}"
            )
    if k.shape[-1] != q.shape[-1] or q.shape[-1] == 0:
        raise ValueError(f"`k` must have the width of `q`, {q.shape[-1]}, at least 1, got {describe(k)}")
    if tuple(v.shape[:-1]) != tuple(k.shape[:-1]):
        raise ValueError(f"`v` must have the heads and length of `k`, {tuple(k.shape[:-1])}, got {describe(v)}")
    if q.ndim > 2 and (k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]):
        raise ValueError(
            f"`k` must have a number of heads that divides the {q.shape[-3]} heads of `q`, got {describe(k)}"
        )


def _check_rel_q(q: Array, rel_k: Array | None, rel_q: Array | None) -> None:
    if rel_k is None and rel_q is not None:
        raise ValueError(f"`rel_q` needs `rel_k`, got rel_k=None and {describe(rel_q)}")
    if rel_q is not None and tuple(rel_q.shape[:-1]) != tuple(q.shape[:-1]):
        raise ValueError(
            f"`rel_q` must have the shape of `q`, {tuple(q.shape[:-1])}, before its width, got {describe(rel_q)}"
        )
    multiplied, name = (q, "q") if rel_q is None else (rel_q, "rel_q")
    if rel_k is not None and rel_k.shape[-1] != multiplied.shape[-1]:
        raise ValueError(f"`rel_k` must have the width of `{name}`, {multiplied.shape[-1]}, got {describe(rel_k)}")


def check_mask(mask: Array, q: Array, k: Array, *, xp: Namespace) -> Array:
    """Return a mask of at least two axes, refusing what is neither boolean nor additive or does not broadcast."""
    check_companion("mask", mask, "q", q, xp=xp)
    if mask.dtype != q.dtype and not xp.isdtype(mask.dtype, "bool"):
        raise TypeError(
            f"`mask` must be boolean (True = may attend) or have the dtype of `q`, {q.dtype}, got {mask.dtype}"
        )
    full = (*q.shape[:-1], k.shape[-2])
    fits = mask.ndim <= len(full) and all(
        have == 1 or have == want for have, want in zip(mask.shape, full[len(full) - mask.ndim :], strict=True)
    )
    if not fits:
        raise ValueError(f"`mask` must broadcast to (..., heads, queries, keys) = {full}, got {describe(mask)}")
    return mask if mask.ndim > 1 else xp.reshape(mask, (1, -1))
