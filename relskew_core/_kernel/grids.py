"""Attention over grids in parts: some rows of queries with the rows of keys that they see, and positions as a mask.

For what no kernel takes as one call: every array library, programs that are traced or exported, more axes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import pairwise, product
from operator import and_, mul
from typing import Any

from relskew_core._array.known import exported, exporting, joined, ranges, symbolic
from relskew_core._array.namespace import device, library_name, on_cpu
from relskew_core._array.precision import integers
from relskew_core._array.softmax import joint, moved, of_rank
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import EVERYWHERE, Operands, Options, Side
from relskew_core._kernel.chunk import SCRATCH_BYTES
from relskew_core._positions.skew import pad_last, skew_from
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility

SMALL = 2**17
"""Up to this many entries, a bias by query and key costs less than look-ups: the windows of a batch share it."""

Part = tuple[slice, Operands, Options]
"""Which queries, and a call of them without grids."""

Kernel = Callable[..., tuple[Array, Array | None]]
"""A kernel for calls without grids, like ``_kernel.forward.attention``."""


def is_small(x: Operands, options: Options) -> bool:
    """Whether a call has only a bias, which is small enough to be written for each query and key."""
    if exporting() or x.axis_tables is not None or x.rel_bias is None or any(side.hides for side in options.sides):
        return False
    lead = () if x.mask is None else x.mask.shape[:-3]
    return bool(math.prod((*lead, *x.q.shape[-3:-1], x.k.shape[-2])) <= SMALL)


def attention(x: Operands, options: Options, *, kernel: Kernel, xp: Namespace) -> tuple[Array, Array | None]:
    found = [kernel(own, of_part, xp=xp) for _, own, of_part in parts(x, options, xp=xp)]
    outs, sums = ([results[which] for results in found] for which in (0, 1))
    return joined(outs, axis=-2, xp=xp), joined(sums, axis=-2, xp=xp) if options.return_lse else None


def parts(x: Operands, options: Options, *, xp: Namespace) -> Iterator[Part]:
    """Cut a call into calls without grids."""
    sides, inner = options.sides, [math.prod([side[which] for side in options.sides[1:]]) for which in (0, 1)]
    before = x.q.shape[-2] - sides[0].queries * inner[0], x.k.shape[-2] - sides[0].keys * inner[1]
    numbers = Numbers(x.rel_bias, sides, prefixed=any(before), xp=xp)

    def part(chosen: slice, added: Array | None, rows: tuple[int, int] | None, visible: Array | None) -> Part:
        mask = x.mask if x.mask is None or x.mask.shape[-2] == 1 else x.mask[..., chosen, :]
        k, v = (of_rows(y, -2, rows) for y in (x.k, x.v))
        mask = mask if mask is None or mask.shape[-1] == 1 else of_rows(mask, -1, rows)
        size = chosen.stop - chosen.start
        plain = Options(
            Span(0, 0, "zero"), Visibility(size, k.shape[-2], 0), options.scale, options.scale,
            chunk_size=size, return_lse=options.return_lse, part=options.part,
        )  # fmt: skip
        mask = joint(added, joint(mask, visible, xp=xp), xp=xp)
        return chosen, Operands(x.q[..., chosen, :], k, v, mask=mask), plain

    def of_rows(y: Array, axis: int, rows: tuple[int, int] | None) -> Array:
        """Return the keys outside the grid and those in some rows of its first axis, along an axis."""
        if rows is None:
            return y
        behind = (slice(None),) * (-1 - axis)
        inside = y[(..., slice(before[1] + rows[0] * inner[1], before[1] + rows[1] * inner[1]), *behind)]
        return inside if not before[1] else xp.concat([y[(..., slice(0, before[1]), *behind)], inside], axis=axis)

    if before[0]:
        on_grid = x.k.shape[-2] - before[1]
        yield part(slice(0, before[0]), numbers.outside(before[1], on_grid, xp=xp), None, None)
    for top, bottom in _chunks(x, options, before[1]):
        everything = not any(side.hides for side in sides) or _traced(x, sides)
        first, last = (0, sides[0].keys) if everything else _rows(sides[0], top, bottom)
        visible = _visible(sides, (top, bottom, first, last), before[1], device=device(x.q), xp=xp)
        start, stop = (before[0] + row * inner[0] for row in (top, bottom))
        there, skipped = cut(sides, (top, bottom, first, last))
        added = None
        if x.axis_tables is not None:  # parts share nothing that is computed: torch may go back through each of them
            own = (x.q if x.rel_q is None else x.rel_q)[..., start:stop, :] * options.rel_scale
            added = axis_logits(own, _of_sides(x.axis_tables, sides, there, skipped), there, xp=xp)
        added = numbers.inside(added, there, skipped, before[1], xp=xp)
        whole = everything or (first, last) == (0, sides[0].keys)
        yield part(slice(start, stop), added, None if whole else (first, last), visible)


def cut(sides: Sequence[Side], rows: tuple[int, int, int, int]) -> tuple[tuple[Side, ...], int]:
    """Return the sides for some rows of the first one, and how many rows of its table come before."""
    top, bottom, first, last = rows
    outer, *others = sides
    skipped = (outer.queries - bottom) * outer.query_step + first * outer.key_step
    return (Side(bottom - top, last - first, *outer[2:]), *others), skipped


def _of_sides(tables: Any, whole: Sequence[Side], there: Sequence[Side], skipped: int) -> list[Array]:
    """Return the table of each side, without the rows that a part of the first one does not use."""
    found, first = [], 0
    for side, own in zip(whole, there, strict=True):
        found.append(tables[..., first + skipped : first + skipped + own.rows, :])
        first, skipped = first + side.rows, 0
    return found


def axis_logits(q: Array, tables: Sequence[Array | None], sides: Sequence[Side], *, xp: Namespace) -> Array:
    """Return the sum of the tables' logits for every query and key, ``(…, H, queries, keys)``; there is a table.

    A table has a row for each relative position of its side.
    """
    count = len(sides)
    cells = xp.reshape(q, (*q.shape[:-2], *(side.queries for side in sides), q.shape[-1]))
    total = None
    for axis in reversed(range(count)):
        table = tables[axis]
        if table is None:
            continue
        along = _along(moved(cells, axis - count - 1, -2, xp=xp), table, sides[axis], count, xp=xp)
        along = moved(along, -2, axis - count - 1, xp=xp)  # (…, n_0, n_1, …, m)
        part = along[(..., *(slice(None) if other == axis else None for other in range(count)))]
        total = part if total is None else part + total
    assert total is not None
    # a table may have a heads axis that q does not have
    total = xp.broadcast_to(total, (*total.shape[:-count], *(side.keys for side in sides)))
    return xp.reshape(total, (*q.shape[:-1], math.prod([side.keys for side in sides])))


def _along(x: Array, table: Array, side: Side, count: int, *, xp: Namespace) -> Array:
    """Relative logits along one axis, (..., H, a, n, D) -> (..., H, a, n, m), where ``a`` are the other axes."""
    if table.ndim == 3:  # by head: the other axes share the heads
        table = table[(slice(None), *(None,) * (count - 1), ...)]
    step, places = side.query_step, (side.keys - 1) * side.key_step + 1
    columns = pad_last(xp.matrix_transpose(table), step, 0, xp=xp)  # the skew reads that many before each row
    logits = skew_from(xp.matmul(x, columns), n_keys=places, first=side.queries * step, step=step, xp=xp)
    return logits[..., :: side.key_step]


def axis_bias(bias: Array, sides: Sequence[Side], *, xp: Namespace) -> Array:
    """Return a bias over all axes together by query and key, ``(…, R_0, R_1, …)`` to ``(…, queries, keys)``."""
    count = len(sides)
    lead = tuple(bias.shape[:-count])
    for side in sides:  # the axis is the first of the remaining ones; its two new axes are appended
        bias = diagonals(moved(bias, len(lead), -1, xp=xp), side.queries, side.keys, xp=xp)
    order = [*range(len(lead)), *(len(lead) + 2 * axis + which for which in (0, 1) for axis in range(count))]
    shape = [math.prod([side[which] for side in sides]) for which in (0, 1)]
    return xp.reshape(xp.permute_dims(bias, tuple(order)), (*lead, *shape))


def diagonals(row: Array, n: int, m: int, *, xp: Namespace) -> Array:
    """Return ``s[..., i, j] = row[..., n - 1 - i + j]``, shape (..., n, m), of a row of ``n + m - 1`` entries.

    Row ``i`` starts one entry before row ``i - 1``: a view takes a negative stride, which only some libraries have.
    """
    library = library_name(xp)
    if library in ("numpy", "cupy"):
        return xp.lib.stride_tricks.sliding_window_view(row, m, axis=-1)[..., ::-1, :]
    if library == "torch" and not symbolic(n, m):
        return xp.flip(row.unfold(-1, m, 1), axis=-2)
    spare = pad_last(row, 1, 0, xp=xp)[..., None, :]
    return skew_from(xp.broadcast_to(spare, (*row.shape[:-1], n, n + m)), n_keys=m, first=n, xp=xp)


class Numbers:
    """The numbers of ``rel_bias``: ``(1 or H, R_0, R_1, …)`` by cells, and all with the three of what is outside."""

    def __init__(self, row: Array | None, sides: Sequence[Side], *, prefixed: bool, xp: Namespace) -> None:
        self.cells: Array | None = None
        self.ends = row if prefixed else None
        rows = [side.rows for side in sides]
        if row is not None and row.shape[-1] - 3 * prefixed == math.prod(rows):  # else there is one for all cells
            self.cells = xp.reshape(row[..., 1:-2] if prefixed else row, (row.shape[0], *rows))

    def outside(self, queries: int, keys: int, *, xp: Namespace) -> Array | None:
        """Return the bias of the queries outside the grid, by the keys outside and those on it."""
        if self.ends is None:
            return None
        ends, lead = self.ends[..., None, :], self.ends.shape[:-1]
        columns = (ends[..., -2:-1], queries), (ends[..., :1], keys)
        return xp.concat([xp.broadcast_to(x, (*lead, 1, count)) for x, count in columns], axis=-1)

    def inside(self, added: Array | None, sides: Sequence[Side], skipped: int, keys: int, *, xp: Namespace) -> Any:
        """Add the bias of the queries on the grid to other logits, and put the ``keys`` outside before those on it."""
        if self.cells is not None:
            rows = slice(skipped, skipped + sides[0].rows)
            own = axis_bias(self.cells[(..., rows, *[slice(None)] * (len(sides) - 1))], sides, xp=xp)
            added = own if added is None else added + of_rank(own, added.ndim)
        like: Any = self.ends if added is None else added
        if not keys or like is None:
            return added

        def zeros(*shape: int) -> Array:
            return xp.zeros(shape, dtype=like.dtype, device=device(like))

        if added is None:
            n, m = [math.prod([side[which] for side in sides]) for which in (0, 1)]
            added = zeros(*like.shape[:-1], n, m)
        shape = (*added.shape[:-1], keys)
        before = zeros(*shape) if self.ends is None else xp.broadcast_to(self.ends[..., None, -1:], shape)
        return xp.concat([before, added], axis=-1)


@lru_cache(maxsize=256)
def places(sides: tuple[Side, ...], queries: int, keys: int, numbers: int) -> tuple[array[int], array[int]]:
    """Return the positions of queries and keys whose difference is the place of their number.

    The cells are counted as if each row of the grid went on until no difference of two cells is that of two others.
    If there is one number for all of them, they have the same position.
    """
    rows, prefixed = [side.rows for side in sides], queries * keys > math.prod(n * m for n, m, *_ in sides)
    by_cell = numbers - 3 * prefixed == math.prod(rows)
    steps = [math.prod(rows[axis + 1 :]) * by_cell for axis in range(len(sides))]
    found = []
    for which, count in enumerate((queries, keys)):
        cells = [sum(map(mul, place, steps)) for place in product(*(range(side[which]) for side in sides))]
        found.append((count - len(cells), cells))
    last = [cells[-1] for _, cells in found]
    left, right = last[0] + 1, last[1] + 2
    far = max(last[0] + right, last[1] + left + right - 1)  # of keys before the grid: beyond all cells
    (before_queries, queries_on), (before_keys, keys_on) = found
    return array("i", [far - right + 1] * before_queries + queries_on), array("i", [far] * before_keys + keys_on)


def _chunks(x: Operands, options: Options, outside: int) -> Iterable[tuple[int, int]]:
    """Return the rows of the first axis that are processed together, as ranges."""
    height = options.sides[0].queries
    if _traced(x, options.sides):  # a program has the same number of chunks for all sizes
        return [(0, height)]
    step = rows_of_chunk(x, options, outside)
    if not any(side.hides for side in options.sides):
        return ranges(height, step)
    # a constant for torch.compile, which would take minutes to trace windows of any height: they are an operator
    return pairwise([*range(0, height, step), height])


def _traced(x: Operands, sides: Sequence[Side]) -> bool:
    return exported(*sides[0], *(side[which] for side in sides[1:] for which in (0, 1)), *x.q.shape)


def rows_of_chunk(x: Operands, options: Options, outside: int) -> int:
    """Return how many rows of the first axis are processed together."""
    outer, others = options.sides[0], options.sides[1:]
    inner = math.prod([side.queries for side in others])
    if options.chunk_size is not None:
        return max(1, options.chunk_size // inner)
    reach = min(outer.keys, outer.before + outer.after + 1)
    row: int = math.prod(x.q.shape[:-2]) * inner * (outside + reach * math.prod([side.keys for side in others]))
    step = max(1, SCRATCH_BYTES["cpu" if on_cpu(x.q) else "other"] // (4 * max(1, row)))
    # A chunk of `reach` rows sees about twice as many.
    return max(1, min(step // 2, reach)) if reach < outer.keys else step


def _rows(side: Side, top: int, bottom: int) -> tuple[int, int]:
    """Return the key rows of the first axis that the query rows ``top … bottom - 1`` see, as a range."""
    m, step = side.keys, side.key_step
    low, high = (side.offset + row * side.query_step for row in (top, bottom - 1))
    if side.shifts:
        size = side.before + side.after + 1
        first, last = (min(max(place - side.before, 0), m - size) for place in (low, high))
        return first, last + size
    first = min(max(-(-(low - side.before) // step), 0), m - 1)
    return first, max(first + 1, min(max((high + side.after) // step + 1, 0), m))


def _visible(
    sides: Sequence[Side], rows: tuple[int, int, int, int], outside: int, *, device: Any, xp: Namespace
) -> Array | None:
    """Return the visible keys, ``(queries, keys)``, of the rows ``top, bottom, first, last`` of the first axis."""
    if not any(side.hides for side in sides):
        return None
    count, conditions = len(sides), []
    for axis, side in enumerate(sides):
        low, high, start, stop = rows if axis == 0 else (0, side.queries, 0, side.keys)
        queries = integers(low, high, device=device, xp=xp)[:, None] * side.query_step + side.offset
        keys = integers(start, stop, device=device, xp=xp)[None, :] * side.key_step
        for condition in _along_side(side, queries, keys, xp=xp):
            of_axis = tuple(slice(None) if place % count == axis else None for place in range(2 * count))
            conditions.append(condition[of_axis])
    top, bottom, first, last = rows
    shape = (bottom - top, *(side.queries for side in sides[1:]), last - first, *(side.keys for side in sides[1:]))
    whole = xp.broadcast_to(reduce(and_, conditions), shape)
    seen = xp.reshape(whole, (math.prod(shape[:count]), math.prod(shape[count:])))
    if not outside:
        return seen
    return xp.concat([xp.ones((seen.shape[0], outside), dtype=seen.dtype, device=device), seen], axis=-1)


def _along_side(side: Side, queries: Array, keys: Array, *, xp: Namespace) -> list[Array]:
    if side.shifts:
        size, first = side.before + side.after + 1, queries - side.before
        first = xp.where(first < 0, 0, xp.where(first > side.keys - size, side.keys - size, first))
        return [keys >= first, keys < first + size]
    found = [] if side.before == EVERYWHERE else [keys >= queries - side.before]
    return found if side.after == EVERYWHERE else [*found, keys <= queries + side.after]
