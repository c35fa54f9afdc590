"""A checked call of relative attention, in one form for every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relskew_core._array.checks import (
    check_bool,
    check_int,
    check_known_sizes,
    check_offset,
    check_real,
    check_window,
    describe,
    is_array,
)
from relskew_core._array.known import exporting
from relskew_core._array.namespace import check_companion, device, namespace_of_arrays
from relskew_core._array.precision import cast, wide, widened
from relskew_core._array.seed import check_seed
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.by_head import HeadScales, check_by_head
from relskew_core._kernel.call import (
    CHECKS,
    KINDS,
    TABLES,
    Arguments,
    Gradients,
    Kind,
    Operands,
    Options,
    Part,
    names_of,
)
from relskew_core._positions.labels import Pair, check_labels, check_reach_of, consecutive_offsets
from relskew_core._positions.ragged import RaggedTables, RaggedVisibility, is_ragged, ragged_offsets
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import FURTHEST, Visibility

WHOLE = Part()


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked call: what the kernels get, and what the caller gets back."""

    given: Operands  # in the caller's dtype
    options: Options
    xp: Namespace
    dtype: Any  # of the caller's arrays, which the results are returned in
    heads: bool  # whether the caller's arrays have a heads axis
    ragged: RaggedTables | None  # of a batch whose items have offsets of their own
    sinks: Array | None  # (H,)
    scales: HeadScales | None

    def result(self, x: Array, *, dtype: Any = None) -> Array:
        """Bring an array of a kernel into the caller's form."""
        x = x if self.heads else x[0, ...]
        return cast(x, self.dtype if dtype is None else dtype, xp=self.xp)

    @property
    def wide(self) -> Any:
        """The dtype of the accumulation."""
        return wide(self.dtype, xp=self.xp)

    def operands(self, *, half: bool = False) -> Operands:
        """Return the arrays in the dtype of the accumulation, or as they are for kernels that take half precision."""
        return self.given if half else Operands(*widened(self.given, self.dtype, xp=self.xp))

    def operand(self, x: Array, *, half: bool) -> Array:
        """Bring an array of the caller's, shaped as the queries, into the kernels' form."""
        x = x if self.heads else x[None, ...]
        return x if half else cast(x, self.wide, xp=self.xp)

    def gradients(self, gradients: Gradients, arguments: Arguments) -> Gradients:
        """Bring the kernels' gradients into the shapes and dtypes of the caller's arrays."""
        given = arguments if self.scales is None else self.scales.applied(arguments)

        def own(name: str, x: Array | None) -> Array | None:
            if x is None:
                return None
            argument = getattr(given, name)
            if KINDS.get(name) is Kind.SEQUENCE:
                return self.result(x, dtype=argument.dtype)
            if self.ragged is not None and name in TABLES:
                x = self.ragged.gradient(x[..., None] if KINDS[name] is Kind.BIAS else x, argument)
            x = self.xp.reshape(x, argument.shape)
            return cast(x, argument.dtype, xp=self.xp)

        found = Gradients(*(own(name, x) for name, x in zip(gradients._fields, gradients, strict=True)))
        return found if self.scales is None else self.scales.gradients(found, arguments)


def problem(arguments: Arguments, *, return_lse: bool = False, part: Part = WHOLE) -> Problem:
    """Check a call; every error names its argument."""
    given, (q, k, v) = arguments, (arguments.q, arguments.k, arguments.v)
    tables = {name: getattr(given, name) for name in TABLES}
    xp = namespace_of_arrays({"q": q, "k": k, "v": v}, {**tables, "rel_q": given.rel_q})
    if xp.__name__ == "jax.numpy":
        for name, array in given.arrays().items():
            if array is not None:
                check_known_sizes(name, array)
    _check_shapes(q, k, v)
    pattern = check_pattern(given)
    span = check_tables(tables, given.span, q, causal=pattern.right == 0)
    _check_widths(given)
    positions, offset = _check_positions(given, xp=xp)
    visibility = pattern.of(q, k.shape[-2], offset, by_value=positions is not None, xp=xp)
    for name, table in tables.items():
        if table is not None and positions is not None:
            check_reach_of(name, span, visibility, positions)
        elif table is not None:
            visibility.check_reach(name, span)
    ragged = RaggedTables(visibility, span, xp) if isinstance(visibility, RaggedVisibility) else None
    dropout, seed = _check_dropout(given, xp=xp)
    sinks = None if given.sinks is None else check_by_head("sinks", given.sinks, q, xp=xp)
    scales = HeadScales.of(given, xp=xp)
    if scales is not None:
        given = scales.applied(given)
    scale: float = q.shape[-1] ** -0.5 if given.scale is None else check_real("scale", given.scale)
    options = Options(
        span=span if ragged is None else ragged.window_span,
        visibility=visibility,
        scale=scale,
        rel_scale=scale if given.rel_scale is None else check_real("rel_scale", given.rel_scale),
        dropout=dropout,
        return_lse=check_bool("return_lse", return_lse) or sinks is not None,
        part=part,
        **{name: None if (x := getattr(given, name)) is None else check(name, x) for name, check in CHECKS.items()},
    )
    heads = q.ndim > 2

    def operand(name: str, x: Any) -> Array | None:
        if x is not None and KINDS[name] is Kind.MASK:
            check_mask(x, q, k, xp=xp)
        x = form(name, x, heads=heads, xp=xp)
        if x is None or ragged is None or name not in TABLES:
            return x
        return ragged.of(x[..., None])[..., 0] if KINDS[name] is Kind.BIAS else ragged.of(x)

    segments: tuple[Array | None, Array | None] = (None, None)
    if given.segments is not None:
        segments = check_labels("segments", given.segments, q, k, paired=False, xp=xp)
    labels = dict(zip(names_of(Kind.LABEL), (*segments, *(positions or (None, None))), strict=True))
    arrays = {name: operand(name, x) for name, x in given.arrays().items()}
    operands = Operands(**arrays, **labels, seed=seed)
    return Problem(operands, options, xp, q.dtype, heads, ragged, sinks, scales)


def form(name: str, x: Any, *, heads: bool, xp: Namespace) -> Array | None:
    """Return an argument in the form of an operand: with an axis for heads, a mask with one for queries."""
    if x is None:
        return None
    if KINDS[name] is Kind.SEQUENCE:
        return x if heads else x[None, ...]
    if KINDS[name] in (Kind.BIAS, Kind.MASK):
        return x if x.ndim > 1 else xp.reshape(x, (1, -1))
    return x


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a query may see of the keys, checked, wherever it stands."""

    left: int | None = None
    right: int | None = None
    block_size: int | None = None
    blocks_before: int | None = None

    def of(
        self, q: Array, n_keys: int, offset: Any, *, by_value: bool = False, name: str = "q", xp: Namespace
    ) -> Visibility:
        """Return the pattern of a call, whose offset is one for all or one for each item of the batch."""
        sides = (self.left, self.right, self.block_size, self.blocks_before)
        # Further than any offset is from any key, and than integers can be counted from.
        narrow = (by_value or is_ragged(offset)) and xp.asarray(0).dtype == xp.int32
        furthest = 2**30 if narrow else FURTHEST
        left, right, block_size, before = (None if x is not None and x > furthest else x for x in sides)
        if block_size is None or before is None:
            before = None
        elif (before + 1) * block_size > furthest:
            before = furthest // block_size
        if not is_ragged(offset):
            offset = check_offset("offset", offset)
            return Visibility(q.shape[-2], n_keys, offset, left, right, block_size, before, by_value)
        offsets, known = ragged_offsets(offset, q, name=name, xp=xp)
        bounds: dict[str, Any] = {"left": left, "right": right, "block_size": block_size, "blocks_before": before}
        return RaggedVisibility(q.shape[-2], n_keys, 0, **bounds, offset_by_item=offsets, known=known)


def check_pattern(given: Arguments) -> Pattern:
    """Return what ``causal``, ``window``, ``block_size`` and ``blocks_before`` say together."""
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


def _check_positions(given: Arguments, *, xp: Namespace) -> tuple[Pair | None, Any]:
    """Return positions and the offset; where positions are known to be consecutive, the offset that says the same."""
    if given.positions is None:
        by_value = exporting() and (is_array(given.offset) or isinstance(given.offset, (list, tuple)))
        return (_positions_of(given, xp=xp), 0) if by_value else (None, given.offset)
    if is_ragged(given.offset) or check_offset("offset", given.offset) != 0:
        raise ValueError(f"`offset` excludes `positions`, which say where queries stand, got {describe(given.offset)}")
    positions = check_labels("positions", given.positions, given.q, given.k, paired=True, xp=xp)
    # Dropout is drawn by place: it must not matter whether somebody knows that positions follow one another. And blocks
    # begin where positions are multiples, which an offset from the first key does not say.
    by_place = given.dropout or given.block_size is not None
    offsets = None if by_place else consecutive_offsets(positions)
    if offsets is None:
        return positions, 0
    if len(set(offsets)) <= 1:
        return None, offsets[0] if offsets else 0
    return (None, offsets) if max(x.ndim for x in positions) == 2 else (positions, 0)


def _positions_of(given: Arguments, *, xp: Namespace) -> Pair:
    """Return where the offsets of a program for torch.export put queries and keys: no operator takes offsets."""
    offsets, _ = ragged_offsets(given.offset, given.q, xp=xp)
    queries, keys = (xp.arange(x.shape[-2], device=device(given.q)) for x in (given.q, given.k))
    return queries + offsets[..., None], keys


def _check_dropout(given: Arguments, *, xp: Namespace) -> tuple[float, Array | None]:
    dropout = check_real("dropout", given.dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must be at least 0 and less than 1, got {given.dropout}")
    if dropout and given.seed is None:
        raise ValueError(f"`seed` must be given where `dropout` is above 0, got seed=None and dropout={dropout}")
    seed = None if given.seed is None else check_seed(given.seed, given.q, xp=xp)
    return dropout, seed if dropout else None


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


def check_tables(tables: dict[str, Array | None], span: Span | None, q: Array, *, causal: bool) -> Span:
    """Check the tables' shapes against the span, and return the span, chosen by the first table if it is ``None``."""
    if span is not None and not isinstance(span, Span):
        raise TypeError(f"`span` must be a Span or None, got {describe(span)}")
    n_heads = q.shape[-3] if q.ndim > 2 else 1
    for name, table in tables.items():
        if table is None:
            continue
        of_numbers = KINDS.get(name) is Kind.BIAS
        by_head = 2 if of_numbers else 3
        if table.ndim not in (by_head - 1, by_head):
            expected = "(R,) or (H, R)" if of_numbers else "(R, D) or (H, R, D)"
            raise ValueError(f"`{name}` must have shape {expected}, got {describe(table)}")
        if table.ndim == by_head and table.shape[0] != n_heads and not (of_numbers and table.shape[0] == 1):
            raise ValueError(f"`{name}` must have H = {n_heads} heads on its first axis, got {describe(table)}")
        rows = table.shape[-1] if of_numbers else table.shape[-2]
        if rows == 0:
            raise ValueError(f"`{name}` must have at least one row, got {describe(table)}")
        if span is None:
            span = default_span(name, rows, causal=causal)
        if rows != span.rows:
            raise ValueError(f"`{name}` must have the {span.rows} rows of {span}, got {describe(table)}")
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


def _check_widths(given: Arguments) -> None:
    q, k, v, rel_q = given.q, given.k, given.v, given.rel_q
    if given.rel_k is None and rel_q is not None:
        raise ValueError(f"`rel_q` needs `rel_k`, got rel_k=None and {describe(rel_q)}")
    if rel_q is not None and tuple(rel_q.shape[:-1]) != tuple(q.shape[:-1]):
        raise ValueError(
            f"`rel_q` must have the shape of `q`, {tuple(q.shape[:-1])}, before its width, got {describe(rel_q)}"
        )
    meets = ("q", q) if rel_q is None else ("rel_q", rel_q)
    for name, (other, x) in {"rel_k": meets, "rel_v": ("v", v), "key_table": ("k", k)}.items():
        table = getattr(given, name)
        if table is not None and table.shape[-1] != x.shape[-1]:
            raise ValueError(f"`{name}` must have the width of `{other}`, {x.shape[-1]}, got {describe(table)}")


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
