"""The gradients of a call, accumulated over its chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from relskew_core._array.namespace import device
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import BY_KEY, BY_QUERY, TABLES, Gradients, Operands, named
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.view import Tables, View
from relskew_core._positions.skew import pad_last


class Sums(Protocol):
    """What gathers the gradients of all chunks, from their views of the same kind."""

    def add_queries(self, view: Any, **pieces: Array | None) -> None: ...
    def add_keys(self, view: Any, name: str, weights: Array, rows: Array, more: Array | None = None) -> None: ...
    def add_table(self, view: Any, name: str, low: int, high: int, relative: Array, rows: Array | None) -> None: ...
    def add_mask(self, view: Any, d_logits: Array) -> None: ...


class RunningSum:
    """A sum of pieces along axis -2 whose starts never decrease, of which only the growing part is kept open."""

    def __init__(self, like: Array, xp: Namespace) -> None:
        self._like, self._xp = like, xp
        self._done: list[Array] = []
        self.growing: Array | None = None
        self._first = 0

    def _zeros(self, rows: int) -> Array:
        shape = (*self._like.shape[:-2], rows, self._like.shape[-1])
        return self._xp.zeros(shape, dtype=self._like.dtype, device=device(self._like))

    def add(self, first: int, piece: Array) -> None:
        """Add a piece that starts at row ``first``."""
        if self.growing is None:
            self._done.append(self._zeros(first))
            self._first, self.growing = first, piece
            return
        closed = min(first - self._first, self.growing.shape[-2])
        if closed:
            self._done.append(self.growing[..., :closed, :])
            self.growing = self.growing[..., closed:, :]
        gap = first - self._first - closed
        if gap:
            self._done.append(self._zeros(gap))
        self._first = first
        missing = piece.shape[-2] - self.growing.shape[-2]
        if missing > 0:
            self.growing = self._xp.concat([self.growing, self._zeros(missing)], axis=-2)
        elif missing < 0:
            piece = self._xp.concat([piece, self._zeros(-missing)], axis=-2)
        self.growing = self.growing + piece

    def total(self) -> Array:
        """Return the sum, with the shape of the array whose gradient it is."""
        pieces = [*self._done, *([] if self.growing is None else [self.growing])]
        rows = sum(piece.shape[-2] for piece in pieces)
        pieces.append(self._zeros(self._like.shape[-2] - rows))
        return self._xp.concat(pieces, axis=-2)


@dataclass
class GradientSums:
    operands: Operands
    tables: Tables
    xp: Namespace

    def __post_init__(self) -> None:
        given = {name: x for name, x in named(self.operands).items() if x is not None}
        self._by_query: dict[str, list[Array]] = {name: [] for name in BY_QUERY if name in given}
        self._by_key = {name: RunningSum(given[name], self.xp) for name in BY_KEY if name in given}
        self._columns: dict[str, Array] = {}
        self._mask: list[Array] = []

    def add_queries(self, view: View, **pieces: Array | None) -> None:
        """Add a chunk's gradients of the operands by query; an operand without a piece gets zeros."""
        self._add_queries(view.chunk, **pieces)

    def _add_queries(self, chunk: Chunk, **pieces: Array | None) -> None:
        for name, done in self._by_query.items():
            own = getattr(self.operands, name)[..., chunk.start : chunk.stop, :]
            piece = pieces.get(name)
            done.append(self.xp.zeros_like(own) if piece is None else piece)

    def add_keys(self, view: View, name: str, weights: Array, rows: Array, more: Array | None = None) -> None:
        """Add to the gradient of keys or values: ``Σ_i weights_i rows_iᵀ`` and, if given, more of that shape."""
        piece = grouped_outer(weights, rows, getattr(self.operands, name).shape[-3], xp=self.xp)
        self._by_key[name].add(view.chunk.first, piece if more is None else piece + more)

    def add_nothing(self, chunk: Chunk) -> None:
        """Add a chunk that sees no key: zeros for the gradients of its queries."""
        self._add_queries(chunk)
        mask = self.operands.mask
        if mask is not None and mask.shape[-2] > 1:
            self._mask.append(self.xp.zeros_like(mask[..., chunk.start : chunk.stop, :]))

    def done(self) -> list[Array]:
        """Return the sums that contain the gradients of the last chunk."""
        latest = [piece for pieces in (*self._by_query.values(), self._mask) for piece in pieces[-1:]]
        growing = [total.growing for total in self._by_key.values() if total.growing is not None]
        return [*latest, *self._columns.values(), *growing]

    def add_table(self, view: View, name: str, low: int, high: int, relative: Array, rows: Array | None) -> None:
        """Add ``Σ_i rows_i relative_i`` to the columns ``low … high`` of a table; ``rows`` of ones if ``None``."""
        xp, table = self.xp, view.table(name)
        extension = table.plan(low, high)
        piece = columns_gradient(extension.fold(relative, xp=xp), rows, table.columns.shape[:-2], xp=xp)
        piece = extension.place(piece, table.columns.shape[-1], xp=xp)
        self._columns[name] = piece if name not in self._columns else self._columns[name] + piece

    def add_mask(self, view: View, d_logits: Array) -> None:
        mask, xp = self.operands.mask, self.xp
        if mask is None or xp.isdtype(mask.dtype, "bool"):
            return
        piece = mask_gradient(d_logits, mask, xp=xp)
        if mask.shape[-1] != 1:
            piece = pad_last(piece, view.chunk.first, mask.shape[-1] - view.chunk.end, xp=xp)
        if mask.shape[-2] == 1 and self._mask:
            self._mask[0] = self._mask[0] + piece
        else:
            self._mask.append(piece)

    def gradients(self) -> Gradients:
        xp, operands, mask = self.xp, self.operands, self.operands.mask

        def table(name: str) -> Array | None:
            value = getattr(operands, name)
            if value is None:
                return None
            found = self._columns.get(name)
            return xp.zeros_like(value) if found is None else self.tables.gradient(name, found, xp=xp)

        return Gradients(
            mask=None if mask is None or xp.isdtype(mask.dtype, "bool") else _joined(self._mask, mask, xp=xp),
            **{name: _joined(pieces, getattr(operands, name), xp=xp) for name, pieces in self._by_query.items()},
            **{name: total.total() for name, total in self._by_key.items()},
            **{name: table(name) for name in TABLES},
        )


def _joined(pieces: list[Array], like: Array, *, xp: Namespace) -> Array:
    return xp.concat(pieces, axis=-2) if pieces else xp.zeros_like(like)


def grouped_outer(x: Array, y: Array, groups: int, *, xp: Namespace) -> Array:
    """Return ``Σ x_i y_iᵀ`` over the queries of a key head: (..., H, n, m), (..., H, n, D) -> (..., Hkv, m, D)."""
    *lead, heads, n, _ = x.shape
    if heads != groups:
        x, y = (xp.reshape(z, (*lead, groups, heads // groups * n, z.shape[-1])) for z in (x, y))
    return xp.matmul(xp.matrix_transpose(x), y)


def columns_gradient(relative: Array, rows: Array | None, lead: tuple[int, ...], *, xp: Namespace) -> Array:
    """Return ``Σ_i rows_i relative_i``, (*lead, D, columns), summed over all that share a table; ``None`` for ones."""
    if rows is None:
        return sum_to(xp.sum(relative, axis=-2, keepdims=True), lead, xp=xp)
    if not lead:  # one product for all heads and items that share the table
        relative, rows = (xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])) for x in (relative, rows))
    return sum_to(xp.matmul(xp.matrix_transpose(rows), relative), lead, xp=xp)


def mask_gradient(d_logits: Array, mask: Array, *, xp: Namespace) -> Array:
    """Sum the gradient of logits along the axes on which a mask broadcasts."""
    for axis in (-2, -1):
        if mask.shape[axis] == 1:
            d_logits = xp.sum(d_logits, axis=axis, keepdims=True)
    return sum_to(d_logits, mask.shape[:-2], xp=xp)


def sum_to(x: Array, lead: tuple[int, ...], *, xp: Namespace) -> Array:
    """Sum the leading axes of (*batch, a, b) to ``lead``, along which a factor of ``x`` was broadcast."""
    extra = x.ndim - 2 - len(lead)
    axes = tuple(range(extra))
    axes += tuple(extra + axis for axis, size in enumerate(lead) if size == 1 and x.shape[extra + axis] != 1)
    if axes:
        x = xp.sum(x, axis=axes, keepdims=True)
    return xp.reshape(x, (*lead, *x.shape[-2:]))
