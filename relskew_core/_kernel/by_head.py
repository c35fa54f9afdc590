"""Arguments with a number for each head, or one for all: factors, applied before a kernel, and sinks, after it.

Sinks may have a number for each query of each head, too.

A factor that ``torch.compile`` traces as a number that varies is taken in the same way: a kernel's operator would have
it compile anew for each one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from relskew_core._array.checks import check_real, describe, is_array, layout_hint
from relskew_core._array.known import depending, varies
from relskew_core._array.namespace import check_companion
from relskew_core._array.precision import cast, settled, widened
from relskew_core._array.softmax import as_sums, of_rank, share_of, shares_of
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import Arguments, Gradients, with_gradients
from relskew_core._kernel.chunk import is_empty


def check_by_head(name: str, x: Any, q: Array, *, one: bool = False, xp: Namespace) -> Array:
    """Return an array with a number for each head, or also with ``one`` for all, else for each query of each head."""
    check_companion(name, x, "q", q, xp=xp)
    n_heads, rows = q.shape[-3] if q.ndim > 2 else 1, tuple(q.shape[:-1])
    if tuple(x.shape) != (n_heads,) and not (x.ndim == 0 if one else tuple(x.shape) == rows):
        shape, other = ("shape (H,) or none", "") if one else ("shape (H,)", f", or (..., H, Lq) = {rows}")
        hint = layout_hint(tuple(x.shape) == (q.shape[-2],))
        raise ValueError(
            f"`{name}` must have {shape}, a number for each of the {n_heads} heads{other}{hint}, got {describe(x)}"
        )
    x = settled(x, q.dtype, xp=xp)
    if x.dtype != q.dtype:
        raise TypeError(f"`{name}` must have the dtype of `q`, {q.dtype}, got {describe(x)}")
    return x


@dataclass(frozen=True, slots=True)
class HeadScales:
    """Factors of the two products, applied to the queries and to ``key_table`` before the call."""

    scale: Array | float | None  # the factor of q
    rel_scale: Array | float | None  # the factor of the products with rel_k and key_table
    alike: bool  # whether one argument gave both
    xp: Namespace

    @classmethod
    def of(cls, given: Arguments, *, xp: Namespace) -> HeadScales | None:
        """Return the factors of a call that are arrays or vary, ``None`` if both are known numbers."""
        scale, rel_scale = (cls._factor(name, getattr(given, name), given.q, xp=xp) for name in ("scale", "rel_scale"))
        if scale is None and rel_scale is None:
            return None
        alike = given.rel_scale is None
        return cls(scale, scale if alike else rel_scale, alike, xp)

    @staticmethod
    def _factor(name: str, x: Any, q: Array, *, xp: Namespace) -> Array | float | None:
        if is_array(x):
            return check_by_head(name, x, q, one=True, xp=xp)
        return check_real(name, x) if varies(x) else None

    def applied(self, given: Arguments) -> Arguments:
        changed: dict[str, Any] = {"q": self._times(given.q, self.scale)}
        if given.rel_k is None and given.key_table is None and not self.alike:
            # it scales no product, but gets a gradient of zeros
            changed["q"] = depending(changed["q"], [self.rel_scale], xp=self.xp)
        if given.rel_k is not None and (given.rel_q is not None or not self.alike):  # these products need own queries
            changed["rel_q"] = self._times(given.q if given.rel_q is None else given.rel_q, self.rel_scale)
        if given.key_table is not None and self.rel_scale is not None:
            changed["key_table"] = self._times(_with_heads(given.key_table, self.rel_scale), self.rel_scale)
        if self.scale is not None:
            changed["scale"] = 1.0
        if self.rel_scale is not None:
            changed["rel_scale"] = 1.0
        return replace(given, **changed)

    def _times(self, x: Array, factor: Array | float | None) -> Array:
        if factor is None:
            return x
        factor = cast(factor, x.dtype, xp=self.xp) if is_array(factor) else factor
        # NumPy's products have the byte order of the machine
        return cast(x * by_head(factor, x), x.dtype, xp=self.xp)

    def gradients(self, found: Gradients, given: Arguments) -> Gradients:
        """Return the gradients of a call from those of the call with factors applied."""
        changed: dict[str, Array | None] = {"q": self._times(found.q, self.scale)}
        of_scale: list[tuple[Array, Array]] = [(found.q, given.q)]
        of_rel_scale: list[tuple[Array, Array]] = []
        if found.rel_q is not None:
            own = self._times(found.rel_q, self.rel_scale)
            changed["rel_q"] = own if given.rel_q is not None else None
            changed["q"] = changed["q"] if given.rel_q is not None else cast(changed["q"] + own, own.dtype, xp=self.xp)
            of_rel_scale.append((found.rel_q, given.q if given.rel_q is None else given.rel_q))
        if found.key_table is not None and given.key_table is not None and self.rel_scale is not None:
            table = self._times(found.key_table, self.rel_scale)
            changed["key_table"] = table if given.key_table.ndim == table.ndim else self._of_all_heads(table)
            of_rel_scale.append((found.key_table, given.key_table))
        if self.alike:
            of_scale, of_rel_scale = of_scale + of_rel_scale, []
        changed["scale"] = self._summed(of_scale, self.scale)
        changed["rel_scale"] = self._summed(of_rel_scale, None if self.alike else self.rel_scale)
        return with_gradients(found, **changed)

    def _of_all_heads(self, table: Array) -> Array:
        [wide] = widened([table], table.dtype, xp=self.xp)
        return cast(self.xp.sum(wide, axis=0), table.dtype, xp=self.xp)

    def _summed(self, pairs: list[tuple[Array, Array]], like: Array | float | None) -> Array | None:
        """Sum the products of pairs (..., H, L, D), by head if there is a number for each."""
        if like is None or isinstance(like, (int, float)):
            return None
        [total] = widened([self.xp.zeros_like(like)], like.dtype, xp=self.xp)
        for pair in pairs:
            a, b = widened(pair, like.dtype, xp=self.xp)
            axes = tuple(axis for axis in range(a.ndim) if like.ndim == 0 or axis != a.ndim - 3)
            total = total + self.xp.reshape(self.xp.sum(a * b, axis=axes), like.shape)
        return cast(total, like.dtype, xp=self.xp)


def _with_heads(table: Array, factor: Array | float) -> Array:
    """Return a table (R, D) as a table by head, because each head multiplies it by a different factor."""
    return table if isinstance(factor, (int, float)) or factor.ndim == 0 or table.ndim > 2 else table[None, ...]


def by_head(factor: Array | float, x: Array) -> Array | float:
    """Return a factor in a shape that multiplies an array (..., H, L, D) or (L, D)."""
    if isinstance(factor, (int, float)) or factor.ndim == 0:
        return factor
    return of_rank(factor[:, None, None], x.ndim) if x.ndim > 2 else factor[:, None]


def with_sinks(out: Array, sums: Array, sinks: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """Add one logit without a value to every row's softmax: (..., H, L, Dv), (..., H, L, 2), sinks (H,) or (..., H, L).

    A sink is attention to one more key, whose value is zero: merged with the rest.
    """
    wide = _by_row(sinks, sums, xp=xp)
    if is_empty(*sums.shape):  # not every library reduces empty axes; results still depend on the sinks
        return out * cast(wide[..., None], out.dtype, xp=xp), sums + wide[..., None]
    shares, total = shares_of([sums, as_sums(wide, xp=xp)], xp=xp)
    return out * cast(shares[..., :1], out.dtype, xp=xp), total


def sinks_gradient(sinks: Array, d_out: Array, out: Array, sums: Array, d_lse: Array | None, *, xp: Namespace) -> Array:
    """Return the gradient of the sinks, (H,) or (..., H, L), from results that count them."""
    dtype = sums.dtype
    products = cast(d_out, dtype, xp=xp) * cast(out, dtype, xp=xp)
    delta = xp.sum(products, axis=-1)
    delta = delta if d_lse is None else delta - d_lse
    weights = share_of(as_sums(_by_row(sinks, sums, xp=xp), xp=xp), sums, xp=xp)
    axes = tuple(axis for axis in range(delta.ndim) if axis != delta.ndim - 2)
    return -(weights * delta if sinks.ndim > 1 else xp.sum(weights * delta, axis=axes))


def _by_row(sinks: Array, sums: Array, *, xp: Namespace) -> Array:
    """Return sinks for each row of the sums, in their dtype."""
    wide = xp.astype(sinks, sums.dtype)
    return xp.broadcast_to(wide[:, None] if wide.ndim == 1 and sums.ndim > 2 else wide, sums.shape[:-1])
