"""Checks of the shapes of a call's arrays, tables and masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from relskew_core._array import checks
from relskew_core._array.checks import LAYOUT, check_bool, check_int, check_offset, check_window, describe, layout_hint
from relskew_core._array.known import exported, holds, same_length
from relskew_core._array.precision import bits_of, integer
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import KINDS, Arguments, kind_of_table
from relskew_core._kernel.kinds import MaskKind, RowsKind
from relskew_core._positions.ragged import RaggedVisibility, is_ragged, ragged_offsets
from relskew_core._positions.span import Span, span_hint
from relskew_core._positions.visibility import FURTHEST, Visibility


def default_span(name: str, rows: int, *, causal: bool, n_keys: Any = None, span_name: str = "span") -> Span:
    """Return the default span of a table: causal, or full for an odd number of rows."""
    if causal:
        if n_keys is not None and not exported(rows, n_keys) and rows == 2 * n_keys - 1 > 1:
            raise ValueError(
                f"`{span_name}` must be given for `{name}`: its {rows} rows are those of Span.full({n_keys}) for the "
                f"{n_keys} keys, of which a causal call reads the past, or else those of Span.causal({rows})"
            )
        return Span.causal(rows)
    if holds(rows % 2 == 1):
        return Span.full((rows + 1) // 2)
    raise ValueError(
        f"`{span_name}` must be given for `{name}`: {rows} rows are not a full span of 2n - 1; Span.full, "
        "Span.clipped or Span(left, right) gives the relative positions of its rows (causal=True takes "
        f"Span.causal({rows})){checks.SLOPES.get(name, '')}"
    )


def default_offset(n_queries: Any, n_keys: Any) -> int:
    """Return the default offset of a call: 0 if there are as many queries as keys, or none of either."""
    if same_length(n_queries, n_keys) or (not exported(n_queries, n_keys) and 0 in (n_queries, n_keys)):
        return 0
    raise ValueError(
        f"`offset` must be given where there are {n_queries} queries and {n_keys} keys: 0 if queries begin where keys "
        f"begin, Lk - Lq = {n_keys - n_queries} when decoding, got offset=None"
    )


def check_layout(tables: dict[str, Array | None], q: Array, n_keys: Any, *, causal: bool) -> None:
    """Refuse a shared table without a span that fits an axis of lengths only if heads and lengths are exchanged."""
    if q.ndim < 3 or exported(*q.shape, n_keys) or not (1 < q.shape[-2] < q.shape[-3] and n_keys < q.shape[-3]):
        return
    fits = q.shape[-3] if causal else 2 * q.shape[-3] - 1
    for name, table in tables.items():
        shared = len(kind_of_table(name).axes) - 1
        if table is not None and table.ndim == shared and not exported(table.shape[0]) and table.shape[0] == fits:
            raise ValueError(
                f"`{name}` has {fits} rows, which fit axis -3 of `q`, {tuple(q.shape)}, and not axis -2; {LAYOUT} "
                f"If the table is meant to reach further than the {n_keys} keys, give its `span`"
            )


def check_tables(
    tables: dict[str, Array | None], span: Span | None, q: Array, *, causal: bool, n_keys: Any = None
) -> Span:
    """Check the tables' shapes against the span, and return it; by default the first table determines it."""
    if span is not None and not isinstance(span, Span):
        raise TypeError(f"`span` must be a Span or None{span_hint(span)}, got {describe(span)}")
    for name, table in tables.items():
        if table is None:
            continue
        rows = kind_of_table(name).check(name, table, q)
        if span is None:
            span = default_span(name, rows, causal=causal, n_keys=n_keys)
        if not holds(rows == span.rows):
            raise ValueError(f"`{name}` must have the {span.rows} rows of {span}, got {describe(table)}")
    if span is None:
        return Span(0, 0, "zero")
    # subclasses may have more fields, which kernels do not take
    return span if type(span) is Span else Span(span.left, span.right, span.beyond)


def check_shapes(q: Array, k: Array, v: Array) -> None:
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
        hint = layout_hint(k.shape[-2] > 0 and q.shape[-2] % k.shape[-2] == 0)
        raise ValueError(
            f"`k` must have a number of heads that divides the {q.shape[-3]} heads of `q`{hint}, got {describe(k)}"
        )


def check_arrays(given: Arguments, *, xp: Namespace) -> Arguments:
    """Check every array but the tables by its kind; return the call, whose weakly typed arrays have a dtype."""
    arrays = {name: x for name, x in given.arrays().items() if x is not None}
    found = {
        name: kind.check(name, x, given.q, given.k, xp=xp)
        for name, x in arrays.items()
        if isinstance(kind := KINDS[name], RowsKind | MaskKind)
    }
    return given if all(arrays[name] is x for name, x in found.items()) else replace(given, **found)


def check_widths(given: Arguments) -> None:
    q, k, v, rel_q = given.q, given.k, given.v, given.rel_q
    if given.rel_k is None and rel_q is not None:
        raise ValueError(f"`rel_q` needs `rel_k`, got rel_k=None and {describe(rel_q)}")
    related = ("q", q) if rel_q is None else ("rel_q", rel_q)
    for name, (other, x) in {"rel_k": related, "rel_v": ("v", v), "key_table": ("k", k)}.items():
        table = getattr(given, name)
        if table is not None and table.shape[-1] != x.shape[-1]:
            raise ValueError(f"`{name}` must have the width of `{other}`, {x.shape[-1]}, got {describe(table)}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The checked visibility of keys, at any position."""

    left: int | None = None
    right: int | None = None
    block_size: int | None = None
    blocks_before: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether a query sees every key, at any position."""
        return self.left is None and self.right is None and self.block_size is None

    def of(
        self, q: Array, n_keys: int, offset: Any, *, by_value: bool = False, name: str = "q", xp: Namespace
    ) -> Visibility:
        """Return the pattern of a call with one offset for all items or one for each.

        Without an offset there must be as many queries as keys.
        """
        if offset is None:
            offset = default_offset(q.shape[-2], n_keys)
        narrow = bits_of(integer(xp), xp=xp) == 32
        if not is_ragged(offset):
            sides = self._sides(2**32 - 2 if narrow and by_value else FURTHEST)
            return Visibility(q.shape[-2], n_keys, check_offset("offset", offset), *sides, by_value)
        sides = self._sides(2**30 if narrow else FURTHEST)
        offsets, known = ragged_offsets(offset, q, name=name, xp=xp)
        if narrow and known and max(map(abs, known)) > 2**29 and sides != self._sides(FURTHEST):
            raise ValueError(
                "`offset` must be less than 2**29 either way, with a window or blocks of more than 2**30 positions, "
                f"unless jax_enable_x64 is set, got {describe(offset)}"
            )
        bounds: dict[str, Any] = dict(zip(("left", "right", "block_size", "blocks_before"), sides, strict=True))
        return RaggedVisibility(q.shape[-2], n_keys, 0, **bounds, offset_by_item=offsets, known=known)

    def _sides(self, furthest: int) -> tuple[int | None, int | None, int | None, int | None]:
        """Return the sides and the blocks, with numbers limited to the largest distance between positions."""
        left, right = (None if side is None or side > furthest else side for side in (self.left, self.right))
        if self.block_size is None:
            return left, right, None, None
        size = min(self.block_size, furthest)
        # None would mean one block.
        return left, right, size, None if self.blocks_before is None else min(self.blocks_before, furthest // size)


def check_pattern(given: Arguments) -> Pattern:
    """Return the combined visibility of ``causal``, ``window``, ``block_size`` and ``blocks_before``."""
    causal = check_bool("causal", given.causal)
    left, right = check_window("window", given.window) or (None, None)
    block_size, before = given.block_size, given.blocks_before
    if block_size is not None:
        block_size = check_int("block_size", block_size, minimum=1)
    if before is not None:
        before = check_int("blocks_before", before, minimum=0)
        if block_size is None:
            raise ValueError(f"`blocks_before` needs `block_size`, got blocks_before={before} and block_size=None")
    elif block_size is not None:
        causal = True
    if causal and before == 1:
        before = None  # the same as local attention
    return Pattern(left, 0 if causal else right, block_size, before)
