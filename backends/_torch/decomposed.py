"""Attention by torch's own operators, with no condition on lengths, for exporters without a translation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakSet

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.nn.functional import pad

from relskew_core._array.extras import warn_caller
from relskew_core._array.namespace import private
from relskew_core._array.precision import widened
from relskew_core._kernel.call import Operands, Options, has_tables
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility

_decompositions: dict[Any, Any] = private("_decomp.decomposition_table", {})
_shapes: dict[Any, Any] = private("_decomp.meta_table", {})
_export_of = private("_guards.detect_fake_mode", type)

_KEPT: ContextVar[str] = ContextVar("relskew_kept", default="")
_WARNED: WeakSet[Any] = WeakSet()


@contextmanager
def operators_kept(heads: Literal["vary", "fixed"] = "vary") -> Iterator[None]:
    """Mark exports as having a translation of the operators, perhaps by an exporter that lets every axis vary."""
    token = _KEPT.set(heads)
    try:
        yield
    finally:
        _KEPT.reset(token)


def must_decompose() -> bool:
    """Whether torch exports a program, possibly by an exporter without a translation of the operators."""
    return torch.compiler.is_exporting() and not _KEPT.get()


def fix_heads(*arrays: Tensor) -> None:
    """Fix the numbers of heads and their widths, which translations need, for an exporter that lets them vary."""
    if torch.compiler.is_exporting() and _KEPT.get() == "fixed":  # torch.compile cannot read the variable
        for x in arrays:
            int(x.shape[-3]), int(x.shape[-1])  # torch then treats them as numbers


def decompose(operator: Any, fake: Callable[..., Any], decomposed: Callable[..., Any]) -> None:
    """Let ``torch.onnx.export`` write an operator without a translation as other operators.

    The exporter looks into this table for what it cannot translate. Fake tensors look there too, but never for what has
    a kernel of shapes in Python.
    """
    _shapes[operator] = fake
    _decompositions[operator] = decomposed


def for_exporter(x: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    """Attend in place of an operator, and warn once in each export."""
    if options.dropout:
        raise ValueError("`dropout` belongs to training: call `model.eval()` before the export")
    export = _export_of(x)
    if export not in _WARNED:
        _WARNED.add(export)
        warn_caller(
            "torch.onnx.export writes relative attention as many operators on all pairs of positions: "
            "relskew_core.export.torch_to_onnx writes it as few nodes and compares the graph with torch, and so does "
            "torch.onnx.export without the comparison with custom_translation_table=torch_translation_table(opset)"
        )
    return attention(x, options)


def dense(
    operands: Operands,
    *,
    span: Span | None = None,
    scale: float | None = None,
    rel_scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    offset: Any = 0,
    positions: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend like ``relative_attention``, whose arguments these are, without any condition on lengths."""
    q, k = operands.q, operands.k
    left, right = (None, None) if window is None else window
    if positions is not None:
        operands = operands._replace(q_positions=positions[0], k_positions=positions[1])
    pattern = Visibility(q.shape[-2], k.shape[-2], offset, left, 0 if causal else right, by_value=positions is not None)
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    rel_factor: Any = factor if rel_scale is None else rel_scale
    return attention(operands, Options(Span(0, 0, "zero") if span is None else span, pattern, factor, rel_factor))[0]


def attention(x: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    """Attend, with all weights at once; return the sums of weights if they are requested."""
    pattern, span, dtype = options.visibility, options.span, x.q.dtype
    given: Any = Operands(*widened(x, dtype, xp=xp))
    q, k, v, mask = given.q, given.k, given.v, given.mask
    n, m = q.shape[-2], k.shape[-2]
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    places: _Columns | _Pairs
    if pattern.by_value:
        own, keys = given.q_positions, given.k_positions
        places = _Pairs(span, own, keys)
    else:
        own, keys = (torch.arange(size, dtype=torch.int64, device=q.device) for size in (n, m))
        own = own + pattern.offset
        places = _Columns(span, n, m, pattern.offset)
    logits = q @ k.mT * options.scale
    if given.rel_k is not None:
        logits = logits + places.logits((q if given.rel_q is None else given.rel_q) * options.rel_scale, given.rel_k)
    if given.key_table is not None:
        logits = logits + places.from_keys().logits(k * options.rel_scale, given.key_table.flip(-2)).mT
    if given.rel_bias is not None:
        logits = logits + places.bias(given.rel_bias)
    elif span.beyond == "error" and given.rel_k is None and given.key_table is None and has_tables(given):
        logits = logits + places.bias(q.new_zeros(1, span.rows))  # NaN where the table of values ends
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask
    seen = _and(_by_pair(own, keys, pattern.sees(own[..., None], keys[..., None, :], xp=xp)), mask)
    if given.q_segments is not None:
        same = given.q_segments[..., None] == given.k_segments[..., None, :]
        seen = _and(seen, _by_pair(given.q_segments, given.k_segments, same))
    if seen is not None:
        logits = torch.where(seen, logits, -math.inf)
    weights = torch.softmax(logits, -1)
    if seen is not None or mask is not None:  # a query may see nothing
        weights = torch.where((logits == -math.inf).all(-1, keepdim=True), 0.0, weights)
    out = weights @ v
    if given.rel_v is not None:
        out = out + places.values(weights, given.rel_v)
    sums = None
    if options.return_lse:
        empty = (logits == -math.inf).all(-1)
        lse = torch.where(empty, -math.inf, torch.logsumexp(logits, -1))
        sums = torch.stack((lse, torch.zeros_like(lse)), -1)
    return out if options.part.of_more else out.to(dtype), sums


def _and(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Return both conditions; a mask that is added is none."""
    if y is None or y.dtype != torch.bool:
        return x
    return y if x is None else x & y


def _by_pair(own: Tensor, keys: Tensor, x: Tensor | None) -> Tensor | None:
    """Return what is known of each pair of labels, with an axis for heads where items have separate labels."""
    return x if x is None or max(own.ndim, keys.ndim) == 1 else x.unsqueeze(-3)


def _rows(table: Tensor, span: Span, first: Any, count: Any, axis: int = -2, missing: float | None = None) -> Tensor:
    """Return the rows of ``count`` relative positions from ``first`` on, with ``missing`` in place of those beyond."""
    wanted = torch.arange(count, dtype=torch.int64, device=table.device) + (first + span.left)
    nearest = wanted.clamp(0, span.rows - 1)
    rows = table.index_select(axis, nearest)
    if span.beyond == "clip":
        return rows
    inside = (wanted == nearest)[:, None] if axis == -2 else wanted == nearest
    return torch.where(inside, rows, _missing(span) if missing is None else missing)


def _missing(span: Span) -> float:
    return math.nan if span.beyond == "error" else 0.0


def _absolute(x: Tensor, n: Any, m: Any) -> Tensor:
    """Relative layout ``(…, n, n + m)`` to absolute layout ``(…, n, m)``: a view."""
    return x.flatten(-2)[..., n:].unflatten(-1, (n, n + m - 1))[..., :m]


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
        found = row[:, rows if rows.ndim == 2 else rows.squeeze(-3)].movedim(0, -3)
        return self._known(found, inside)

    def values(self, weights: Tensor, table: Tensor) -> Tensor:
        """Return ``Σ_j w_ij · e_r``."""
        rows, inside = self._rows()
        weights = weights if self.span.beyond == "clip" else torch.where(inside, weights, 0.0)
        sums = weights.new_zeros((*weights.shape[:-1], self.span.rows))
        return sums.scatter_add(-1, rows.expand_as(weights), weights) @ table

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return the row of each pair, the nearest one outside of the table, and which pairs have one."""
        r: Any = _by_pair(self.own, self.keys, self.keys[..., None, :] - self.own[..., None])
        nearest = (r + self.span.left).clamp(0, self.span.rows - 1)
        return nearest, r + self.span.left == nearest

    def _known(self, x: Tensor, inside: Tensor) -> Tensor:
        return x if self.span.beyond == "clip" else torch.where(inside, x, _missing(self.span))


@dataclass(frozen=True)
class _Columns:
    """The columns of the relative layout, ``r = -(n + offset) … m - 1 - offset``."""

    span: Span
    n: Any
    m: Any
    offset: Any

    def from_keys(self) -> _Columns:
        """Return the columns seen from the keys, with the roles of queries and keys exchanged."""
        mirrored = Span(self.span.right, self.span.left, self.span.beyond)
        return _Columns(mirrored, self.m, self.n, -self.offset)

    def logits(self, x: Tensor, table: Tensor) -> Tensor:
        """Return ``x_i · e_r`` in absolute layout."""
        return _absolute(x @ self._read(table).mT, self.n, self.m)

    def bias(self, row: Tensor) -> Tensor:
        """Return the bias of every pair's relative position, ``(heads, n, m)``."""
        wide = self._read(row, -1)
        return _absolute(wide[..., None, :].expand(*wide.shape[:-1], self.n, -1), self.n, self.m)

    def values(self, weights: Tensor, table: Tensor) -> Tensor:
        """Return ``Σ_j w_ij · e_r``: the columns of keys that do not exist have no weight."""
        filled = pad(pad(weights, (0, self.n - 1)).flatten(-2), (self.n, 0))
        return filled.unflatten(-1, (self.n, self.n + self.m)) @ self._read(table, missing=0.0)

    def _read(self, table: Tensor, axis: int = -2, missing: float | None = None) -> Tensor:
        return _rows(table, self.span, -self.n - self.offset, self.n + self.m, axis, missing)


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
    if operands.rel_v is not None or operands.key_table is not None:  # of local drop-ins, none has these
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
    columns = -fold.side - fold.before * fold.side, fold.side + fold.around
    if x.rel_k is not None:
        rows = _rows(x.rel_k, where, *columns, missing=0.0).mT.unsqueeze(-3)
        rel_q = (q if x.rel_q is None else x.rel_q) * (factor if rel_scale is None else rel_scale)
        logits = logits + _absolute(fold.queries(rel_q) @ rows, fold.side, fold.around)
    if x.rel_bias is not None:
        row = _rows(x.rel_bias, where, *columns, axis=-1, missing=0.0)[..., None, None, :]
        logits = logits + _absolute(row.expand(*row.shape[:-2], fold.side, -1), fold.side, fold.around)
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

    def band(self, device: torch.device) -> Tensor:
        """Return the keys around its block that a query sees, ``(side, around)``."""
        keys = torch.arange(self.around, dtype=torch.int64, device=device) - self.before * self.side
        relative = keys - torch.arange(self.side, dtype=torch.int64, device=device)[:, None]
        return (relative >= -self.left) & (relative <= self.right)
