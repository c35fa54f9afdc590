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
    offset: int = 0,
) -> Tensor:
    """Attend like ``relative_attention``, without any condition on lengths."""
    x: Any = operands
    q, k, v = x.q, x.k, x.v
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    rel_factor = factor if rel_scale is None else rel_scale
    n, m = q.shape[-2], k.shape[-2]
    places = _Columns(Span(0, 0, "zero") if span is None else span, n, m, offset)
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
        terms.append(_seen(n, m, offset, left, right, q.device))
    if x.mask is not None:
        terms.append(x.mask)
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    weights = torch.softmax(functools.reduce(_plus, [q @ k.mT * factor, *terms]), -1)
    out: Tensor = weights @ v
    return out if x.rel_v is None else out + places.values(weights, x.rel_v)


def _plus(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype == y.dtype == torch.bool:
        return x & y
    if torch.bool not in (x.dtype, y.dtype):
        return x + y
    mask, numbers = (x, y) if x.dtype == torch.bool else (y, x)
    return torch.where(mask, numbers, -math.inf)


def _seen(n: int, m: int, offset: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    """Return the keys that a query sees, ``(n, m)``."""
    own = torch.arange(n, dtype=torch.int64, device=device)[:, None] + offset
    keys = torch.arange(m, dtype=torch.int64, device=device)
    if left is None or right is None:
        return keys >= own - left if left is not None else keys <= own + (right or 0)
    return (keys >= own - left) & (keys <= own + right)


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
