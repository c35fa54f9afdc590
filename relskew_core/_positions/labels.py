"""Integers of queries and keys: segments of packed documents, and positions in any order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any

from relskew_core._array.checks import describe, has_shape, layout_hint
from relskew_core._array.known import known_values
from relskew_core._array.namespace import check_companion
from relskew_core._array.precision import bits_of, cast, integer, widest
from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility

Pair = tuple[Array, Array]


def check_labels(name: str, given: Any, q: Array, k: Array, *, paired: bool, xp: Namespace) -> Pair:
    """Return integers of the queries and of the keys, in a dtype in which differences do not wrap.

    Unless they have to come as a pair, as positions do, one array may serve both.
    """

    def refused(error: type[Exception], before: str = "", after: str = "") -> Exception:
        # torch.compile makes a constant of a size that a message contains
        pair = f"a pair of integer arrays, of the {q.shape[-2]} queries and the {k.shape[-2]} keys"
        return error(f"`{name}` must be {before}{pair}{after}, got {describe(given)}")

    if isinstance(given, (tuple, list)):
        if len(given) != 2:
            if not paired and isinstance(given, list):
                raise refused(ValueError, "an integer array, or ", "; make an array of the list first")
            raise refused(ValueError)
        names: Sequence[str] = (f"{name}[0]", f"{name}[1]")
    elif paired:
        raise refused(TypeError)
    elif q.shape[-2] != k.shape[-2]:
        raise refused(ValueError, after=", where their lengths differ")
    else:
        given, names = (given, given), (name, name)
    lengths = (q.shape[-2], k.shape[-2])
    check = check_place if paired else check_label
    of_queries, of_keys = (check(*each, q, xp=xp) for each in zip(names, given, lengths, strict=True))
    return of_queries, of_keys


def check_label(name: str, x: Any, length: int | None, q: Array, *, xp: Namespace) -> Array:
    """Return the integers of ``length`` queries or keys, of any number if it is ``None``."""
    check_companion(name, x, "q", q, xp=xp)
    if not xp.isdtype(x.dtype, "integral"):
        raise TypeError(f"`{name}` must be of integers, got {describe(x)}")
    lead = tuple(q.shape[:-3])
    length = (x.shape or (1,))[-1] if length is None else length
    if not has_shape(x, (length,), (*lead, length)):
        hint = layout_hint(q.ndim > 2 and tuple(x.shape[-1:]) == tuple(q.shape[-3:-2]))
        raise ValueError(f"`{name}` must have shape {(*lead, length)} or {(length,)}{hint}, got {describe(x)}")
    return cast(x, integer(xp), xp=xp)


def check_place(name: str, x: Any, length: int | None, q: Array, *, xp: Namespace) -> Array:
    """Return the positions of queries or keys; traced ones saturate at the limits of their dtype."""
    label, bits = check_label(name, x, length, q, xp=xp), bits_of(integer(xp), xp=xp)
    furthest = 2**61 if bits == 64 else 2**31 - 1  # the whole range
    far = [value for row in known_items(x) or () for value in row if not -furthest - 1 <= value <= furthest]
    if far:
        raise ValueError(f"`{name}` must be of integers of at most {furthest} either way, got {far[0]}")
    return label if x.dtype == label.dtype else widest(x, xp=xp)


def known_items(x: Array) -> list[list[int]] | None:
    """Return the integers of every item, ``None`` if reading them is not free."""
    values = known_values(x)
    if values is None or x.ndim == 1:
        return None if values is None else [values]
    for _ in range(x.ndim - 2):
        values = list(chain.from_iterable(values))
    return values


def consecutive_offsets(positions: Pair) -> list[int] | None:
    """Return each item's offset if all queries and keys are consecutive, ``None`` if not or if unknown."""
    queries, keys = (known_items(x) for x in positions)
    if queries is None or keys is None:
        return None
    if any(row and row != list(range(row[0], row[0] + len(row))) for row in chain(queries, keys)):
        return None
    return [(query[0] if query else 0) - (key[0] if key else 0) for query, key in _by_item(queries, keys)]


def _by_item(queries: list[list[int]], keys: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Return the integers of each item's queries and keys; shared ones are returned with every item."""
    count = len(keys) if len(queries) == 1 else len(queries)
    return list(zip(*(rows * count if len(rows) == 1 else rows for rows in (queries, keys)), strict=True))


def check_reach_of(name: str, span: Span, visibility: Visibility, positions: Pair) -> None:
    """Refuse a table with ``beyond="error"`` that is too short for a visible pair, if the positions are known."""
    queries, keys = (known_items(x) for x in positions)
    if span.beyond != "error" or queries is None or keys is None:
        return
    pairs = _by_item(queries, keys)
    seen = [bounds for pair in pairs if (bounds := _seen_positions(visibility, *pair)) is not None]
    if seen:
        low, high = min(low for low, _ in seen), max(high for _, high in seen)
        visibility.refuse_unreached(name, span, low, high)


def _seen_positions(visibility: Visibility, queries: Iterable[int], keys: Iterable[int]) -> tuple[int, int] | None:
    """Return the lowest and the highest visible relative position of an item, ``None`` if no key is visible."""
    ordered = sorted(set(keys))
    lows, highs = [], []
    for position in set(queries):
        first, last = visibility.bounds(position)
        start = 0 if first is None else bisect_left(ordered, first)
        end = len(ordered) if last is None else bisect_right(ordered, last)
        if start < end:
            lows.append(ordered[start] - position)
            highs.append(ordered[end - 1] - position)
    return (min(lows), max(highs)) if lows else None


class Documents:
    """The range of keys in the segment of each query, over all items of the batch."""

    def __init__(self, firsts: list[int], ends: list[int]) -> None:
        self._firsts, self._ends = firsts, ends

    @classmethod
    def of(cls, segments: Pair) -> Documents | None:
        queries, keys = (known_items(x) for x in segments)
        if queries is None or keys is None:
            return None
        rows = [_ranges(*pair) for pair in _by_item(queries, keys)]
        if not rows or not rows[0][0]:  # no items, or no queries
            return None
        firsts, ends = ([*map(least, *(row[side] for row in rows))] if len(rows) > 1 else rows[0][side]
                        for side, least in enumerate((min, max)))  # fmt: skip
        for index in range(len(firsts) - 2, -1, -1):  # later queries may see further back: make the starts ascend
            firsts[index] = min(firsts[index], firsts[index + 1])
        return cls(firsts, ends)

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        return self._firsts[start], max(self._ends[start:stop])

    @property
    def longest(self) -> int:
        return max(end - first for first, end in zip(self._firsts, self._ends, strict=True))


def _ranges(queries: list[int], keys: list[int]) -> tuple[list[int], list[int]]:
    """Return, for every query, the first key of its segment and the end after the last; past all keys if none."""
    first: dict[int, int] = {}
    end: dict[int, int] = {}
    place = 0
    for label, run in groupby(keys):
        first.setdefault(label, place)
        place += sum(1 for _ in run)
        end[label] = place
    return [first.get(label, place) for label in queries], [end.get(label, 0) for label in queries]
