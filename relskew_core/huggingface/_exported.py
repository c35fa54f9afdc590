"""Relative attention in exports of whole models: matrix products for any length."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from relskew_core._kernel.call import Operands
from relskew_core._positions.span import Span


def exported(
    operands: Operands,
    *,
    span: Span | None = None,
    scale: float | None = None,
    rel_scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    offset: int | Tensor = 0,
    positions: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend like ``relative_attention``, without any condition on lengths."""
    x: Any = operands
    q, k, v = x.q, x.k, x.v
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    rel_factor = factor if rel_scale is None else rel_scale
    n, m = q.shape[-2], k.shape[-2]
    span = Span(0, 0, "zero") if span is None else span
    if isinstance(offset, Tensor):
        positions, offset = _from(offset, n, m, q), 0
    places = _Columns(span, n, m, offset) if positions is None else _Pairs(span, *positions)
    terms = []
    if x.rel_k is not None:
        terms.append(places.logits((q if x.rel_q is None else x.rel_q) * rel_factor, x.rel_k))
    if x.key_table is not None:
        terms.append(places.from_keys().logits(k * rel_factor, x.key_table.flip(-2)).mT)
    if x.rel_bias is not None:
        terms.append(places.bias(x.rel_bias))
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    if left is not None or right is not None:
        terms.append(_seen(*(_from(offset, n, m, q) if positions is None else positions), left, right))
    if x.mask is not None:
        terms.append(x.mask)
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    weights = torch.softmax(functools.reduce(_plus, [q @ k.mT * factor, *terms]), -1)
    out: Tensor = weights @ v
    return out if x.rel_v is None else out + places.values(weights, x.rel_v)


def _from(offset: int | Tensor, n: int, m: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of ``n`` queries from the offset on, and of ``m`` keys."""
    own, keys = (torch.arange(size, dtype=torch.int64, device=q.device) for size in (n, m))
    return own + offset, keys


def _plus(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype == y.dtype == torch.bool:
        return x & y
    if torch.bool not in (x.dtype, y.dtype):
        return x + y
    mask, numbers = (x, y) if x.dtype == torch.bool else (y, x)
    return torch.where(mask, numbers, -math.inf)


def _seen(own: Tensor, keys: Tensor, left: int | None, right: int | None) -> Tensor:
    """Return the keys that a query sees, ``(n, m)``, or ``(batch, 1, n, m)`` for positions of every item."""
    r = _relative_positions(own, keys)
    if left is None or right is None:
        return r >= -left if left is not None else r <= (right or 0)
    return (r >= -left) & (r <= right)


def _relative_positions(own: Tensor, keys: Tensor) -> Tensor:
    r = keys[..., None, :] - own[..., None]
    return r if r.ndim == 2 else r[..., None, :, :]  # the axis of the heads


@dataclass(frozen=True)
class _Pairs:
    """The row of every pair of a query and a key with positions in any order."""

    span: Span
    own: Tensor
    keys: Tensor

    def from_keys(self) -> _Pairs:
        """Return the pairs seen from the keys, with the roles of queries and keys exchanged."""
        return _Pairs(Span(self.span.right, self.span.left, self.span.beyond), self.keys, self.own)

    def logits(self, x: Tensor, table: Tensor) -> Tensor:
        """Return ``x_i · e_r``."""
        rows, inside = self._rows()
        products = x @ table.mT
        return self._known(products.gather(-1, rows.expand(*products.shape[:-1], rows.shape[-1])), inside)

    def bias(self, row: Tensor) -> Tensor:
        """Return the bias of every pair's relative position, ``(heads, n, m)`` or ``(batch, heads, n, m)``."""
        rows, inside = self._rows()
        found = row[..., rows] if rows.ndim == 2 else row[:, rows[:, 0]].transpose(0, 1)
        return self._known(found, inside)

    def values(self, weights: Tensor, table: Tensor) -> Tensor:
        """Return ``Σ_j w_ij · e_r``."""
        rows, inside = self._rows()
        weights = self._known(weights, inside)
        sums = weights.new_zeros((*weights.shape[:-1], self.span.rows))
        return sums.scatter_add(-1, rows.expand_as(weights), weights) @ table

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return the row of each pair, the nearest one outside of the table, and which pairs have one."""
        rows = _relative_positions(self.own, self.keys) + self.span.left
        nearest = rows.clamp(0, self.span.rows - 1)
        return nearest, rows == nearest

    def _known(self, x: Tensor, inside: Tensor) -> Tensor:
        return x if self.span.beyond == "clip" else torch.where(inside, x, 0)


@dataclass(frozen=True)
class _Columns:
    """The columns of the relative layout, ``r = -(n + offset) … m - 1``.

    A product with all rows is extended by as many columns as there are queries and keys. So the columns that count are
    a slice at a fixed place.
    """

    span: Span
    n: int
    m: int
    offset: int

    def from_keys(self) -> _Columns:
        """Return the columns seen from the keys, with the roles of queries and keys exchanged."""
        mirrored = Span(self.span.right, self.span.left, self.span.beyond)
        return _Columns(mirrored, self.m, self.n, -self.offset)

    def logits(self, x: Tensor, table: Tensor) -> Tensor:
        """Return ``x_i · e_r`` in absolute layout."""
        return self._absolute(self._slice(x @ table.mT))

    def bias(self, row: Tensor) -> Tensor:
        """Return the bias of every pair's relative position, ``(heads, n, m)``."""
        wide = self._slice(row)
        return self._absolute(wide[..., None, :].expand(*wide.shape[:-1], self.n, -1))

    def values(self, weights: Tensor, table: Tensor) -> Tensor:
        """Return ``Σ_j w_ij · e_r``."""
        if self.span.beyond == "clip":
            # No family needs them: only VITS has a table of values, which has zeros beyond its window.
            raise NotImplementedError("values of a clipped table cannot be exported with symbolic lengths")
        wide = pad(self._relative(weights), (self.span.left, self.span.right + 1))
        start = self.n + self.offset
        return wide[..., start : start + self.span.rows] @ table

    def _absolute(self, x: Tensor) -> Tensor:
        """Relative layout ``(…, n, n + m)`` to absolute layout ``(…, n, m)``: a view."""
        return x.flatten(-2)[..., self.n :].unflatten(-1, (self.n, self.n + self.m - 1))[..., : self.m]

    def _relative(self, x: Tensor) -> Tensor:
        """Invert :meth:`_absolute`, with zeros where there is no key."""
        return pad(pad(x, (0, self.n - 1)).flatten(-2), (self.n, 0)).unflatten(-1, (self.n, self.n + self.m))

    def _slice(self, x: Tensor) -> Tensor:
        before, after = self.n + self.offset, self.m
        if self.span.beyond == "clip":
            edges = (x[..., :1].expand(*x.shape[:-1], before), x, x[..., -1:].expand(*x.shape[:-1], after))
            wide = torch.cat(edges, -1)
        else:
            wide = pad(x, (before, after))
        return wide[..., self.span.left : self.span.left + self.n + self.m]


def banded(
    operands: Operands,
    *,
    window: tuple[int, int],
    span: Span | None = None,
    scale: float | None = None,
    rel_scale: float | None = None,
) -> Tensor:
    """Attend from every position to those around it; the mask is for keys alone, ``(batch, 1, 1, length)``.

    A block of queries sees its own keys and those of the blocks around it. Only the number of blocks is a symbol.
    """
    if operands.rel_v is not None or operands.key_table is not None:
        raise NotImplementedError("local attention with `rel_v` or `key_table` cannot have symbolic lengths")
    x: Any = operands
    q, k, v, mask = x.q, x.k, x.v, x.mask
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    fold = _Fold(q.shape[-2], *window)
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    k, v = fold.keys(k), fold.keys(v)
    logits = fold.queries(q * factor) @ k.mT
    where = Span(0, 0, "zero") if span is None else span
    if x.rel_k is not None:
        rows = fold.rows(x.rel_k.mT, where).unsqueeze(-3)
        rel_q = (q if x.rel_q is None else x.rel_q) * (factor if rel_scale is None else rel_scale)
        logits = logits + fold.skewed(fold.queries(rel_q) @ rows)
    if x.rel_bias is not None:
        row = fold.rows(x.rel_bias, where)[..., None, None, :]
        logits = logits + fold.skewed(row.expand(*row.shape[:-2], fold.side, -1))
    present = q.new_ones(1, 1, q.shape[-2], 1)
    if mask is not None and mask.dtype == torch.bool:
        present = mask.mT.to(q.dtype)
    elif mask is not None:
        logits = logits + fold.keys(mask.mT).mT
    seen = (fold.keys(present).mT != 0) & fold.band(q.device)
    weights = torch.softmax(torch.where(seen, logits, torch.finfo(q.dtype).min), -1)
    return fold.unfolded(weights @ v)


class _Fold:
    """A sequence in blocks of ``side`` queries, each with ``side * (before + 1 + after)`` keys around it."""

    def __init__(self, length: int, left: int, right: int) -> None:
        self.length, self.left, self.right = length, left, right
        self.side = max(8, (max(left, right) + 1) // 2)  # a query sees most of the keys of a block
        self.before, self.after = -(-left // self.side), -(-right // self.side)
        self.around = self.side * (self.before + 1 + self.after)
        # One extra block, because torch specialises an axis of length 1, as short examples have, to broadcasting.
        self.count = (length + self.side - 1) // self.side + 1

    def queries(self, x: Tensor) -> Tensor:
        """``(…, length, D)`` to ``(…, blocks, side, D)``."""
        return pad(x, (0, 0, 0, self.count * self.side - self.length)).unflatten(-2, (self.count, self.side))

    def keys(self, x: Tensor) -> Tensor:
        """``(…, length, D)`` to ``(…, blocks, around, D)``."""
        blocks = self.before + self.count + self.after
        ends = (self.before * self.side, (self.count + self.after) * self.side - self.length)
        wide = pad(x, (0, 0, *ends)).unflatten(-2, (blocks, self.side))
        near = [wide[..., i : i + self.count, :, :] for i in range(self.before + 1 + self.after)]
        return torch.cat(near, -2)

    def unfolded(self, x: Tensor) -> Tensor:
        return x.flatten(-3, -2)[..., : self.length, :]

    def rows(self, table: Tensor, span: Span) -> Tensor:
        """Return the columns of a table ``(…, R)`` that the skew of a block reads, ``(…, side + around)``."""
        first = -self.side - self.before * self.side
        wanted = (
            torch.arange(first, first + self.side + self.around, dtype=torch.int64, device=table.device) + span.left
        )
        columns = table.index_select(-1, wanted.clamp(0, span.rows - 1))
        inside = (wanted >= 0) & (wanted < span.rows)
        return columns if span.beyond == "clip" else torch.where(inside, columns, 0.0)

    def skewed(self, x: Tensor) -> Tensor:
        """Relative layout ``(…, side, side + around)`` to absolute layout ``(…, side, around)``."""
        width = self.side + self.around - 1
        return x.flatten(-2)[..., self.side :].unflatten(-1, (self.side, width))[..., : self.around]

    def band(self, device: torch.device) -> Tensor:
        """Return the keys around its block that a query sees, ``(side, around)``."""
        keys = torch.arange(self.around, dtype=torch.int64, device=device) - self.before * self.side
        relative = keys - torch.arange(self.side, dtype=torch.int64, device=device)[:, None]
        return (relative >= -self.left) & (relative <= self.right)
