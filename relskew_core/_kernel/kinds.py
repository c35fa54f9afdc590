"""The kinds of the arrays of a call: what their axes run along, and how an array of each kind is checked and converted.

Code that cuts, moves or flattens arrays of a call asks their kind, so an array that is added needs its kind alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relskew_core._array.checks import describe, layout_hint
from relskew_core._array.known import holds
from relskew_core._array.namespace import check_companion
from relskew_core._array.precision import settled
from relskew_core._array.softmax import warn_of_ones
from relskew_core._array.typing import Array, Namespace

Along = int | str | None
"""What an axis runs along: a leading axis of the call, by its index; heads, queries or keys; or something else."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind whose arrays have no axes of the call, such as a seed."""

    axes: tuple[str | None, ...] = ()  # what the last axes run along; the leading axes of a call may come before

    def along(self, x: Array, q: Array) -> tuple[Along, ...]:
        """Return what each axis runs along, ``None`` also for an axis along which an array broadcasts."""
        named = (*range(len(q.shape) - 3), *self.axes)[-len(x.shape) :] if self.axes else (None,) * len(x.shape)
        return tuple(None if size == 1 else axis for size, axis in zip(x.shape, named, strict=True))

    def form(self, x: Array, *, heads: bool, xp: Namespace) -> Array:
        """Return an argument as an operand; the call has ``heads``, or gets an axis for them."""
        return x

    def flat(self, x: Array, lead: tuple[int, ...], *, maps: int = 0, xp: Namespace) -> Array:
        """Return an operand with one axis of items, or of length 1, instead of the leading axes, of lengths ``lead``.

        The first ``maps`` of these are the operand's in any case: of a call that JAX maps.
        """
        shape = (*x.shape[:maps], *(1,) * (len(lead) + len(self.axes) - x.ndim), *x.shape[maps:])
        own, core = shape[: len(lead)], shape[len(lead) :]
        x = x if shape == x.shape else xp.reshape(x, shape)
        if own != lead and any(size > 1 for size in own):
            x, own = xp.broadcast_to(x, (*lead, *core)), lead
        return x if len(lead) == 1 else xp.reshape(x, (math.prod(own), *core))

    def mapped(self, x: Array, axis: int | None, size: int, rank: int, *, xp: Namespace) -> Array | None:
        """Return an operand with a new leading axis, that of a map; ``None`` if the items must be separate calls.

        ``rank`` is that of the mapped queries.
        """
        return x if axis is None else None


class RowsKind(Kind):
    """Rows of a width, for each query or each key of each head of each item."""

    def along(self, x: Array, q: Array) -> tuple[Along, ...]:
        return (*range(len(x.shape) - 3), *self.axes)[-len(x.shape) :]

    def check(self, name: str, x: Array, q: Array, k: Array, *, xp: Namespace) -> Array:
        """Refuse an array whose shape differs from that of the queries or the keys, before its width."""
        like, other = ("q", q) if self is QUERY else ("k", k)
        before = tuple(other.shape[:-1])
        if tuple(x.shape[:-1]) != before:
            raise ValueError(f"`{name}` must have the shape of `{like}`, {before}, before its width, got {describe(x)}")
        return x

    def form(self, x: Array, *, heads: bool, xp: Namespace) -> Array:
        return x if heads else x[None, ...]

    def mapped(self, x: Array, axis: int | None, size: int, rank: int, *, xp: Namespace) -> Array | None:
        return xp.broadcast_to(x, (size, *x.shape)) if axis is None else _first(x, axis, xp=xp)


class TableKind(Kind):
    """Rows, or numbers, of relative positions, shared by all items: of all heads, or of each."""

    @property
    def row_axis(self) -> int:
        return 1 - len(self.axes)

    def check(self, name: str, x: Array, q: Array) -> int:
        """Refuse an array of the wrong axes or heads; return the number of its rows."""
        heads, numbers = q.shape[-3] if q.ndim > 2 else 1, self is BIAS
        if x.ndim not in (len(self.axes) - 1, len(self.axes)):
            expected = (
                "(R,) or (H, R), or, by query and key, be an additive `mask=`" if numbers else "(R, D) or (H, R, D)"
            )
            raise ValueError(f"`{name}` must have shape {expected}, got {describe(x)}")
        if x.ndim == len(self.axes) and x.shape[0] != heads and not (numbers and x.shape[0] == 1):
            hint = layout_hint(x.shape[0] == q.shape[-2])
            if numbers and x.shape[1] == heads:
                hint = "; conventions.T5(…).load reads a table of buckets, (buckets, H)"
            raise ValueError(f"`{name}` must have H = {heads} heads on its first axis{hint}, got {describe(x)}")
        rows: int = x.shape[self.row_axis]
        if not holds(rows > 0):
            raise ValueError(f"`{name}` must have at least one row, got {describe(x)}")
        return rows

    def form(self, x: Array, *, heads: bool, xp: Namespace) -> Array:
        return xp.reshape(x, (1, -1)) if x.ndim == 1 else x

    def with_width(self, x: Array) -> Array:
        """Return numbers as rows of width 1, and rows unchanged."""
        return x[..., None] if self is BIAS else x

    def without_width(self, x: Array) -> Array:
        """Undo :meth:`with_width`."""
        return x[..., 0] if self is BIAS else x

    def flat(self, x: Array, lead: tuple[int, ...], *, maps: int = 0, xp: Namespace) -> Array:
        """Return a table with one axis for items, which only ragged batches have, or for the items of maps."""
        ragged = not maps and x.ndim == len(lead) + len(self.axes)
        return super().flat(x, lead if ragged else lead[:maps], maps=maps, xp=xp)


class MaskKind(Kind):
    """Booleans, or numbers that are added to the logits; any axis may be missing or have length 1."""

    def check(self, name: str, x: Array, q: Array, k: Array, *, xp: Namespace) -> Array:
        """Return a mask, which must be boolean or additive, and broadcast."""
        check_companion(name, x, "q", q, xp=xp)
        x = settled(x, q.dtype, xp=xp)
        if x.dtype != q.dtype and not xp.isdtype(x.dtype, "bool"):
            raise TypeError(
                f"`{name}` must be boolean (True = may attend) or have the dtype of `q`, {q.dtype}, got {x.dtype}"
            )
        full = (*q.shape[:-1], k.shape[-2])
        fits = x.ndim <= len(full) and all(
            have == 1 or have == want for have, want in zip(x.shape, full[len(full) - x.ndim :], strict=True)
        )
        if not fits:
            padding = tuple(x.shape) == (*q.shape[:-3], k.shape[-2])
            hint = layout_hint(q.ndim > 2 and x.shape[-1:] == k.shape[-3:-2])
            hint = "; one per item and key, such as padding, is mask[..., None, None, :]" if padding else hint
            by_item = q.ndim > 3 and tuple(x.shape) == (*q.shape[:-3], *full[-2:])
            hint = "; one per item, query and key is mask[..., None, :, :]" if by_item else hint
            raise ValueError(
                f"`{name}` must broadcast to (..., heads, queries, keys) = {full}{hint}, got {describe(x)}"
            )
        if x.dtype == q.dtype:
            warn_of_ones(x)
        return x

    def form(self, x: Array, *, heads: bool, xp: Namespace) -> Array:
        return xp.reshape(x, (1, -1)) if x.ndim <= 1 else x

    def mapped(self, x: Array, axis: int | None, size: int, rank: int, *, xp: Namespace) -> Array | None:
        if axis is None:
            return x
        x = _first(x, axis, xp=xp)
        return xp.reshape(x, (size, *(1,) * (rank + 1 - x.ndim), *x.shape[1:]))


class LabelKind(Kind):
    """Integers of queries or of keys, shared by all items or of each."""

    def mapped(self, x: Array, axis: int | None, size: int, rank: int, *, xp: Namespace) -> Array | None:
        if axis is not None:
            return None
        return x if math.prod(x.shape[:-1]) <= 1 else xp.broadcast_to(x, (size, *x.shape))


def _first(x: Array, axis: int, *, xp: Namespace) -> Array:
    """Move an axis to the front, by the function that torch maps, too."""
    return xp.permute_dims(x, (axis, *(other for other in range(x.ndim) if other != axis % x.ndim)))


QUERY = RowsKind(("heads", "queries", None))  # (..., H, Lq, width), with the leading axes of the call
KEY = RowsKind(("key_heads", "keys", None))  # (..., Hkv, Lk, width)
TABLE = TableKind(("heads", None, None))  # (R, D) or (H, R, D)
BIAS = TableKind(("heads", None))  # (R,) or (H, R)
AXES = TableKind(("heads", None, None))  # (Σ R, D) or (H, Σ R, D): tables along each axis of grids, one after the other
MASK = MaskKind(("heads", "queries", "keys"))  # broadcasts to (..., H, Lq, Lk)
QUERY_LABEL, KEY_LABEL = LabelKind(("queries",)), LabelKind(("keys",))  # (..., L) without heads, or (L,)
SEED = Kind()  # (1,)
