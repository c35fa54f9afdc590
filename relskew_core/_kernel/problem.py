"""A checked call of relative attention, in one form for every kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from relskew_core._array.checks import (
    check_bool,
    check_known_sizes,
    check_offset,
    check_real,
    check_static,
    describe,
    is_array,
)
from relskew_core._array.known import exporting
from relskew_core._array.namespace import device, namespace_of_arrays
from relskew_core._array.precision import cast, integers, wide, widened
from relskew_core._array.seed import check_seed
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.by_head import HeadScales, check_by_head
from relskew_core._kernel.call import (
    CHECKS,
    CONSTANTS,
    KINDS,
    LABELS,
    TABLES,
    Arguments,
    Gradients,
    Operands,
    Options,
    Part,
    named,
)
from relskew_core._kernel.kinds import MASK, RowsKind, TableKind
from relskew_core._kernel.shapes import (
    check_arrays,
    check_layout,
    check_pattern,
    check_shapes,
    check_tables,
    check_widths,
)
from relskew_core._positions.labels import Pair, check_labels, check_reach_of, consecutive_offsets
from relskew_core._positions.ragged import RaggedTables, RaggedVisibility, is_ragged, ragged_offsets

WHOLE = Part()


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked call: the operands of the kernels, and the form of the caller's results."""

    given: Operands  # in the caller's dtype; those that a factor is applied to are wide
    options: Options
    xp: Namespace
    dtype: Any  # of the caller's arrays and of the results
    heads: bool  # whether the caller's arrays have a heads axis
    ragged: RaggedTables | None  # of a batch with one offset per item
    sinks: Array | None  # (H,) or (..., H, Lq)
    scales: HeadScales | None
    _wide: list[Operands] = field(default_factory=list, init=False, repr=False, compare=False)

    def result(self, x: Array, *, dtype: Any = None) -> Array:
        """Convert a result of a kernel to the caller's form."""
        x = x if self.heads else x[0, ...]
        return cast(x, self.dtype if dtype is None else dtype, xp=self.xp)

    @property
    def wide(self) -> Any:
        """The dtype of the accumulation."""
        return wide(self.dtype, xp=self.xp)

    @property
    def is_final(self) -> bool:
        """Whether a kernel's output is the caller's result, which the kernel may then round."""
        return self.sinks is None and self.scales is None and not self.options.part.of_more

    def operands(self, *, half: bool = False) -> Operands:
        """Return the arrays in the dtype of the accumulation, or unchanged for kernels that accept half precision.

        They are widened once for all who ask: who looks whether a path serves, and the path itself.
        """
        if half and self.scales is None:
            return self.given
        if half:  # the scaled queries are rounded
            return Operands(*(cast(x, self.dtype, xp=self.xp) if x is not None and x.dtype == self.wide else x
                              for x in self.given))  # fmt: skip
        if not self._wide:
            self._wide.append(Operands(*widened(self.given, self.dtype, xp=self.xp)))
        return self._wide[0]

    def operand(self, x: Array, *, half: bool) -> Array:
        """Convert an array of the caller, shaped like the queries, to the kernels' form."""
        x = x if self.heads else x[None, ...]
        return x if half else cast(x, self.wide, xp=self.xp)

    def gradients(self, gradients: Gradients, arguments: Arguments) -> Gradients:
        """Convert the kernels' gradients to the shapes and dtypes of the caller's arrays."""
        given = _scaled(arguments, self.scales, xp=self.xp)

        def own(name: str, x: Array | None) -> Array | None:
            if x is None:
                return None
            argument = getattr(given, name)
            kind = KINDS.get(name)  # `None` for numbers by head
            if isinstance(kind, RowsKind):
                return self.result(x, dtype=argument.dtype)
            if self.ragged is not None and isinstance(kind, TableKind):
                x = self.ragged.gradient(kind.with_width(x), argument)
            x = self.xp.reshape(x, argument.shape)
            return cast(x, argument.dtype, xp=self.xp)

        found = Gradients(**{name: own(name, x) for name, x in named(gradients).items()})
        if self.scales is None:
            return found
        found = self.scales.gradients(found, arguments)
        own_dtype = {name: x if x is None else cast(x, getattr(arguments, name).dtype, xp=self.xp)
                     for name, x in named(found).items()}  # fmt: skip
        return Gradients(**own_dtype)


def _scaled(given: Arguments, scales: HeadScales | None, *, xp: Namespace) -> Arguments:
    """Return a call with its factors applied, to arrays in the dtype of the sums, as products are not to be rounded."""
    if scales is None:
        return given
    arrays = {name: x for name, x in given.arrays().items() if KINDS[name] is not MASK}
    return scales.applied(
        replace(given, **dict(zip(arrays, widened(arrays.values(), given.q.dtype, xp=xp), strict=True)))
    )


def problem(arguments: Arguments, *, return_lse: bool = False, part: Part = WHOLE) -> Problem:
    given, (q, k, v) = arguments, (arguments.q, arguments.k, arguments.v)
    tables = {name: getattr(given, name) for name in TABLES}
    alike = {name: x for name, x in given.arrays().items() if KINDS[name] is not MASK}
    xp = namespace_of_arrays({"q": q, "k": k, "v": v}, alike)
    if xp.__name__ == "jax.numpy":
        check_static({**{name: getattr(given, name) for name in CONSTANTS}, "return_lse": return_lse})
        for name, array in given.arrays().items():
            if array is not None:
                check_known_sizes(name, array)
    check_shapes(q, k, v)
    pattern = check_pattern(given)
    if given.span is None:
        check_layout(tables, q, k.shape[-2], causal=pattern.right == 0)
    span = check_tables(tables, given.span, q, causal=pattern.right == 0, n_keys=k.shape[-2])
    given = check_arrays(given, xp=xp)
    check_widths(given)
    positions, offset = _check_positions(given, xp=xp)
    if offset is None and pattern.is_open and all(table is None for table in tables.values()):
        offset = 0  # nothing depends on the offset
    visibility = pattern.of(q, k.shape[-2], offset, by_value=positions is not None, xp=xp)
    for name, table in tables.items():
        if table is not None and positions is not None:
            check_reach_of(name, span, visibility, positions)
        elif table is not None:
            visibility.check_reach(name, span)
    ragged = RaggedTables(visibility, span, xp) if isinstance(visibility, RaggedVisibility) else None
    dropout, seed = _check_dropout(given, xp=xp)
    sinks = None if given.sinks is None else check_by_head("sinks", given.sinks, q, xp=xp)
    if sinks is not None and q.ndim == 2 and sinks.shape[0] != 1:  # a number for each query, without a heads axis
        sinks = sinks[None, ...]
    scales = HeadScales.of(given, xp=xp)
    given = _scaled(given, scales, xp=xp)
    scale: float = q.shape[-1] ** -0.5 if given.scale is None else check_real("scale", given.scale)
    checked: dict[str, Any] = {
        name: None if (x := getattr(given, name)) is None else check(name, x) for name, check in CHECKS.items()
    }
    options = Options(
        span=span if ragged is None else ragged.window_span,
        visibility=visibility,
        scale=scale,
        rel_scale=scale if given.rel_scale is None else check_real("rel_scale", given.rel_scale),
        dropout=dropout,
        return_lse=check_bool("return_lse", return_lse) or sinks is not None,
        part=part,
        **checked,
    )
    heads = q.ndim > 2

    def operand(name: str, x: Any) -> Array | None:
        if x is None:
            return None
        kind = KINDS[name]
        x = kind.form(x, heads=heads, xp=xp)
        if ragged is None or not isinstance(kind, TableKind):
            return x
        return kind.without_width(ragged.of(kind.with_width(x)))

    segments: tuple[Array | None, Array | None] = (None, None)
    if given.segments is not None:
        segments = check_labels("segments", given.segments, q, k, paired=False, xp=xp)
    labels = dict(zip(LABELS, (*segments, *(positions or (None, None))), strict=True))
    arrays = {name: operand(name, x) for name, x in given.arrays().items()}
    operands = Operands(**arrays, **labels, seed=seed)
    return Problem(operands, options, xp, q.dtype, heads, ragged, sinks, scales)


def _check_positions(given: Arguments, *, xp: Namespace) -> tuple[Pair | None, Any]:
    """Return the positions and the offset; consecutive positions become the equivalent offset."""
    if given.positions is None:
        by_value = exporting() and (is_array(given.offset) or isinstance(given.offset, (list, tuple)))
        return (_positions_of(given, xp=xp), 0) if by_value else (None, given.offset)
    if is_ragged(given.offset) or (given.offset is not None and check_offset("offset", given.offset) != 0):
        raise ValueError(
            f"`offset` excludes `positions`, which give the positions of the queries, got {describe(given.offset)}"
        )
    positions = check_labels("positions", given.positions, given.q, given.k, paired=True, xp=xp)
    # Dropout depends on the positions: its result must not change if positions turn out to be consecutive. And blocks
    # begin at multiples of their size, which cannot be derived from an offset from the first key.
    by_place = given.dropout or given.block_size is not None
    offsets = None if by_place else consecutive_offsets(positions)
    if offsets is None:
        return positions, 0
    if len(set(offsets)) <= 1:
        return None, offsets[0] if offsets else 0
    return (None, offsets) if max(x.ndim for x in positions) == 2 else (positions, 0)


def _positions_of(given: Arguments, *, xp: Namespace) -> Pair:
    """Return the offsets of a program for torch.export as positions, because operators do not support offsets."""
    offsets, _ = ragged_offsets(given.offset, given.q, xp=xp)
    queries, keys = (integers(0, x.shape[-2], device=device(given.q), xp=xp) for x in (given.q, given.k))
    return queries + offsets[..., None], keys


def _check_dropout(given: Arguments, *, xp: Namespace) -> tuple[float, Array | None]:
    dropout = check_real("dropout", given.dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must be at least 0 and less than 1, got {given.dropout}")
    if dropout and given.seed is None:
        raise ValueError(f"`seed` must be given because `dropout` is above 0, got seed=None and dropout={dropout}")
    seed = None if given.seed is None else check_seed(given.seed, given.q, xp=xp)
    return dropout, seed if dropout else None
