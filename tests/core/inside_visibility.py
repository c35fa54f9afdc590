"""Who sees whom, in integers: every range, bound and mask against one look at every query and key."""

import contextlib
import functools
import math
from dataclasses import replace
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oracles
import symbols
from relskew_core import Span
from relskew_core._array.namespace import namespace_of
from relskew_core._kernel.call import Arguments, Options
from relskew_core._kernel.chunk import SCRATCH_BYTES, Chunk, chunk_size, chunks, documents_of, keys_seen
from relskew_core._kernel.key_side import SMALLEST, blocks
from relskew_core._kernel.problem import problem
from relskew_core._kernel.shapes import Pattern, check_pattern
from relskew_core._positions.labels import Documents, check_reach_of, consecutive_offsets, known_items
from relskew_core._positions.ragged import RaggedTables, RaggedVisibility
from relskew_core._positions.visibility import FURTHEST, Visibility

SIDES = st.none() | st.integers(0, 5)
BOUNDS: dict[str, Any] = {"causal": st.booleans(), "window": st.none() | st.tuples(SIDES, SIDES)}
IN_BLOCKS = BOUNDS | {"block_size": st.integers(1, 4), "blocks_before": st.none() | st.integers(0, 3)}
PATTERNS = st.fixed_dictionaries(BOUNDS) | st.fixed_dictionaries(IN_BLOCKS)
OFFSETS = st.integers(-9, 14)
LENGTHS = st.integers(0, 8)
XP = namespace_of(np)
ONE = np.zeros((1, 1))


def seen_by(n: int, m: int, offset: int, options: dict[str, Any]) -> NDArray[np.bool_]:
    """Look at every query and key."""
    pairs = [[oracles.sees(i, j, offset=offset, **options) for j in range(m)] for i in range(n)]
    return np.asarray(pairs, dtype=bool).reshape(n, m)


def pattern_of(n: int, m: int, offset: Any, options: dict[str, Any]) -> Any:
    """Check the options as a call does."""
    lead = () if isinstance(offset, int) else (len(offset),)
    q, k = np.zeros((*lead, 1, n, 1)), np.zeros((*lead, 1, m, 1))
    return problem(Arguments(q, k, k, offset=offset, **options)).options.visibility


def bounds(flags: Any) -> tuple[int, int] | None:
    """Return the first and the last place of true entries."""
    places = np.flatnonzero(flags)
    return (int(places[0]), int(places[-1])) if len(places) else None


@settings(max_examples=300, deadline=None)
@given(n=LENGTHS, m=LENGTHS, offset=OFFSETS, options=PATTERNS, part=st.tuples(*[st.integers(0, 8)] * 4))
@example(n=8, m=8, offset=0, options={"window": (None, 1), "block_size": 3, "blocks_before": 1}, part=(0, 8, 0, 8))
@example(n=3, m=8, offset=0, options={"window": (None, 1), "block_size": 3, "blocks_before": 1}, part=(2, 3, 0, 8))
@example(n=2, m=4, offset=0, options={"block_size": 4, "blocks_before": 1}, part=(0, 2, 0, 4))
@example(n=2, m=5, offset=0, options={"block_size": 4, "blocks_before": 1}, part=(0, 2, 0, 5))
@example(n=3, m=3, offset=0, options={"block_size": 2, "blocks_before": 0}, part=(0, 3, 0, 3))
@example(n=4, m=4, offset=0, options={"window": (3, None)}, part=(0, 4, 0, 4))
@example(n=4, m=4, offset=0, options={"window": (2, None)}, part=(0, 4, 0, 4))
@example(n=4, m=4, offset=0, options={"window": (None, 2)}, part=(0, 4, 0, 4))
def test_a_pattern_is_what_it_says(
    n: int, m: int, offset: int, options: dict[str, Any], part: tuple[int, int, int, int]
) -> None:
    seen = seen_by(n, m, offset, options)
    pattern: Visibility = pattern_of(n, m, offset, options)
    i, j = np.nonzero(seen)
    r = j - i - offset
    assert pattern.positions() == ((r.min(), r.max()) if len(r) else None)
    assert pattern.some_query_sees_nothing() == bool((~seen.any(1)).any())
    for query in range(n):
        first, last = pattern.first_key(query + offset), pattern.last_key(query + offset)
        assert (first, last) == bounds(seen[query]) or (first > last and not seen[query].any())

    (start, stop), (first, end) = (sorted(np.minimum(ends, size)) for ends, size in ((part[:2], n), (part[2:], m)))
    if start == stop:
        return
    low, high = pattern.keys(start, stop)
    own = bounds(seen[start:stop].any(0))
    assert low == high if own is None else (low, high - 1) == own
    block = seen[start:stop, first:end]
    for narrowed in (pattern, pattern.bounded(), pattern.within(start, stop, first, end)):
        mask = narrowed.mask(start, stop, first, end, xp=XP, device="cpu")
        np.testing.assert_array_equal(np.broadcast_to(True if mask is None else mask, block.shape), block)
        assert mask is None or not block.all() or first == end


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 7), m=st.integers(1, 7), offsets=st.lists(OFFSETS, min_size=1, max_size=3), options=PATTERNS,
       part=st.tuples(*[st.integers(0, 7)] * 4))  # fmt: skip
@example(n=2, m=7, offsets=[4], options={"block_size": 4, "blocks_before": 0}, part=(0, 2, 0, 7))
@example(n=2, m=1, offsets=[-1], options={"block_size": 2, "blocks_before": 0}, part=(0, 2, 0, 1))
def test_the_pattern_of_a_batch_is_that_of_its_items(
    n: int, m: int, offsets: list[int], options: dict[str, Any], part: tuple[int, int, int, int]
) -> None:
    seen = np.stack([seen_by(n, m, offset, options) for offset in offsets])
    pattern: RaggedVisibility = pattern_of(n, m, offsets, options)
    assert {each.offset: each.sides for each in pattern.each()} == dict.fromkeys(offsets, pattern.sides)
    tables = RaggedTables(pattern, Span(1, 1, "zero"), XP)
    columns = np.arange(n + m) - n  # of the windows, whose relative positions are for offset 0
    assert (tables.window_span.left, tables.window_span.rows) == (n, n + m)
    assert tables.of(np.ones((3, 1))).shape == (len(offsets), 1, n + m, 1)
    occurs = pattern.occurs(columns - np.asarray(offsets)[:, None], xp=XP)
    for item, offset in enumerate(offsets):
        i, j = np.nonzero(seen[item])
        np.testing.assert_array_equal(occurs[item], np.isin(columns, j - i), err_msg=f"offset {offset}")
    low, high = pattern.positions() or (0, 0)
    assert (low, high) == (1 - n, m - 1)

    (start, stop), (first, end) = (sorted(np.minimum(ends, size)) for ends, size in ((part[:2], n), (part[2:], m)))
    if start < stop:
        own, (low, high) = bounds(seen[:, start:stop].any((0, 1))), pattern.keys(start, stop)
        assert own is None or low <= own[0] <= own[1] < high
        assert low <= high
        mask = pattern.mask(start, stop, first, end, xp=XP, device="cpu")
        block = seen[:, None, start:stop, first:end]
        np.testing.assert_array_equal(np.broadcast_to(True if mask is None else mask, block.shape), block)


@settings(max_examples=100, deadline=None)
@given(options=PATTERNS)
def test_what_a_pattern_leaves_of_all_positions(options: dict[str, Any]) -> None:
    pattern = check_pattern(Arguments(ONE, ONE, ONE, **options)).of(ONE, 1, 0, by_value=True, xp=XP)
    far = range(-40, 41)
    seen = [r for r in far if any(oracles.sees(place, place + r, **options) for place in range(4 * 3))]
    low, high = pattern.positions() or (0, 0)
    for bound, edge, unbounded in ((low, min(seen, default=1), -FURTHEST), (high, max(seen, default=-1), FURTHEST)):
        assert bound == (unbounded if abs(edge) == 40 else edge) or not seen
    assert low <= high or not seen


def test_sides_that_no_integer_reaches_say_nothing() -> None:
    edge = Pattern(FURTHEST, FURTHEST, 3, FURTHEST // 3 - 1)
    assert edge.of(ONE, 1, 0, xp=XP).sides == (FURTHEST, FURTHEST, 3, FURTHEST // 3 - 1)
    beyond = Pattern(FURTHEST + 1, FURTHEST + 1, FURTHEST + 1, 1).of(ONE, 1, 0, xp=XP)
    assert beyond.sides == (None, None, FURTHEST, 1)  # two blocks, before position 0 and from it on
    assert Pattern(None, 0, 4, FURTHEST // 4 - 1).of(ONE, 1, 0, xp=XP).sides == (None, 0, 4, FURTHEST // 4 - 1)
    for before in (FURTHEST // 3 + 1, FURTHEST):
        assert Pattern(None, 0, 3, before).of(ONE, 1, 0, xp=XP).sides == (None, 0, 3, FURTHEST // 3)


def test_one_causal_block_before_is_the_default() -> None:
    def sides(**options: Any) -> Any:
        return check_pattern(Arguments(ONE, ONE, ONE, block_size=3, **options))

    assert sides() == sides(causal=True) == sides(causal=True, blocks_before=1) == Pattern(None, 0, 3, None)
    assert sides(causal=True, blocks_before=2) == Pattern(None, 0, 3, 2)
    assert sides(blocks_before=1) == Pattern(None, None, 3, 1)


def test_positions_of_a_batch_of_two_axes() -> None:
    q, steps = np.zeros((2, 1, 1, 4, 1)), np.arange(4) + np.asarray([[[0]], [[3]]])
    visibility = problem(Arguments(q, q, q, positions=(steps, np.arange(4)))).options.visibility
    assert (visibility.by_value, visibility.offset) == (True, 0)
    nobody, none = q[:0], np.zeros((0, 1, 4), np.int64)
    assert problem(Arguments(nobody, nobody, nobody, positions=(none, none))).options.visibility == Visibility(4, 4)
    same = problem(Arguments(q, q, q, positions=(steps * 0 + np.arange(4), np.arange(4)))).options.visibility
    assert same == Visibility(4, 4)


def test_no_queries_or_no_keys_have_no_positions() -> None:
    for n, m, offset in ((0, 3, 2), (3, 0, 2), (0, 3, [2, 3]), (3, 0, [2, 3])):
        assert pattern_of(n, m, offset, {}).positions() is None


def test_an_offset_without_axes_is_one_for_all() -> None:
    for offset in (3, np.asarray(3), np.asarray(3, np.uint8), torch.tensor(3)):
        x = np.zeros((2, 1, 4, 1)) if not isinstance(offset, torch.Tensor) else torch.zeros((2, 1, 4, 1))
        assert problem(Arguments(x, x, x, offset=offset)).options.visibility == Visibility(4, 4, 3)


def test_offsets_are_known_where_they_can_be_read() -> None:
    for make in (np.asarray, strict.asarray, torch.as_tensor):
        for offsets, lead in (([3, -2], (2,)), ([[3], [-2]], (2, 1))):
            x = make(np.zeros((*lead, 1, 4, 1)))
            visibility: Any = problem(Arguments(x, x, x, offset=make(offsets))).options.visibility
            assert (visibility.known, visibility.n_queries) == ((3, -2), 4)
    elsewhere = functools.partial(strict.asarray, device=strict.Device("device1"))
    x = elsewhere(np.zeros((2, 1, 4, 1)))
    visibility = problem(Arguments(x, x, x, offset=elsewhere([3, -2]))).options.visibility
    assert visibility.known is None
    assert visibility.keys(0, 4) == (0, 4)


def test_the_keys_of_a_batch_are_those_that_some_item_sees() -> None:
    pattern = pattern_of(2, 20, [3, 8], {"window": (1, 0)})
    assert pattern.keys(0, 2) == (2, 10)
    assert pattern_of(2, 20, np.asarray([3, 8]), {"window": (1, 0)}).keys(0, 2) == (2, 10)


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 6), m=LENGTHS, items=st.tuples(*[st.sampled_from([1, 2])] * 2), seed=st.integers(0, 2**31))
def test_documents_reach_over_all_keys_of_a_querys_own(n: int, m: int, items: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    queries, keys = rng.integers(0, 4, (items[0], n)), rng.integers(0, 4, (items[1], m))
    documents = Documents.of((queries, keys))
    assert documents is not None
    same = (queries[:, :, None] == keys[:, None, :]).any(0)  # in some item
    ranges = [bounds(row) for row in same]
    reaches = [documents.keys(query, query + 1) for query in range(n)]
    assert documents.longest == max(end - first for first, end in reaches)
    for start in range(n):
        for stop in range(start + 1, n + 1):
            first, end = documents.keys(start, stop)
            own = bounds(same[start:stop].any(0))
            assert own is None or first <= own[0] <= own[1] < end
            later = [span[0] for span in ranges[start:] if span is not None]
            assert first == min([*later, m])  # no further back than later queries see
            assert end == max([span[1] + 1 for span in ranges[start:stop] if span is not None], default=0)


def test_labels_whose_values_are_not_there_are_not_read() -> None:
    assert Documents.of((np.zeros((0,), np.int64), np.arange(3))) is None  # no queries

    class Hidden:
        device, ndim = "elsewhere", 1

    known, hidden = np.arange(4), Hidden()
    assert known_items(known) == [[0, 1, 2, 3]]
    assert known_items(np.arange(8).reshape(2, 2, 2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for pair in ((known, hidden), (hidden, known), (hidden, hidden)):
        assert Documents.of(pair) is None
        assert consecutive_offsets(pair) is None
        check_reach_of("rel_k", Span(0, 0), Visibility(4, 4), pair)


@pytest.mark.parametrize(("queries", "keys", "offsets"), [
    ([3, 4, 5], [1, 2], [2]), ([[3, 4], [7, 8]], [1, 2, 3], [2, 6]), ([[3, 4]], [[0], [5]], [3, -2]), ([5], [3], [2]),
    ([], [3, 4], [-3]), ([3, 4], [], [3]), ([3, 5], [1, 2], None), ([3, 4], [2, 1], None), ([3, 3], [2], None),
])  # fmt: skip
def test_offsets_of_positions_that_follow_one_another(queries: Any, keys: Any, offsets: list[int] | None) -> None:
    assert consecutive_offsets((np.asarray(queries, np.int64), np.asarray(keys, np.int64))) == offsets


@settings(max_examples=200, deadline=None)
@given(queries=st.lists(st.integers(-4, 9), max_size=3), keys=st.lists(st.integers(-4, 9), max_size=3),
       options=PATTERNS, left=st.integers(0, 6), right=st.integers(0, 6))  # fmt: skip
def test_a_table_must_reach_what_is_seen_at_positions(
    queries: list[int], keys: list[int], options: dict[str, Any], left: int, right: int
) -> None:
    pattern = check_pattern(Arguments(ONE, ONE, ONE, **options))
    visibility = pattern.of(np.zeros((len(queries), 1)), len(keys), 0, by_value=True, xp=XP)
    positions = np.asarray(queries, np.int64), np.asarray([keys, keys], np.int64)
    seen = [key - query for query in queries for key in keys if oracles.sees(query, key, **options)]
    short = any(not -left <= r <= right for r in seen)
    words = f"`name` .* queries see {min(seen, default=0)} … {max(seen, default=0)}:"
    with pytest.raises(ValueError, match=words) if short else contextlib.nullcontext():
        check_reach_of("name", Span(left, right), visibility, positions)
    check_reach_of("name", Span(left, right, "clip"), visibility, positions)


SPANS = st.builds(Span, st.integers(0, 6), st.integers(0, 6), st.sampled_from(["clip", "zero"]))
SHORT, STARTS = st.integers(1, 6), st.integers(0, 5)


@given(n=SHORT, m=SHORT, offset=OFFSETS, options=PATTERNS, span=SPANS, start=STARTS, by_value=st.booleans())
def test_chunks_have_the_columns_that_are_read_and_no_more(
    n: int, m: int, offset: int, options: dict[str, Any], span: Span, start: int, by_value: bool
) -> None:
    whole = replace(pattern_of(n + 5, m, 0 if by_value else offset, options), by_value=by_value)
    chunk = Chunk.of(Options(span, whole, 1.0, 1.0), start, start + n)
    if by_value:
        low, high = (min(max(r, -span.left), span.right) for r in whole.positions() or (0, 0))
        assert (chunk.low, chunk.high, chunk.spare, chunk.first, chunk.end) == (low, high, 0, 0, m)
        return
    keys = range(chunk.first, chunk.end)
    seen = {(i + start, j) for i, j in np.argwhere(seen_by(n + 5, m, offset, options)[start : start + n]).tolist()}
    assert {j for _, j in seen} <= set(keys)
    # Column `spare` is for the first query and the first key; a single query needs no columns before it.
    assert chunk.low + chunk.spare == chunk.first - start - offset
    assert chunk.spare == (n if n > 1 else 0)
    if len(seen) == n * len(keys) > 0:  # the last column that is read is for the last key of the first query
        assert chunk.width == chunk.spare + len(keys)
    assert all(chunk.low <= j - i - offset <= chunk.high for i, j in seen)
    assert len(keys) + (n > 1) <= chunk.width <= chunk.spare + len(keys) or not keys


@given(n=SHORT, keys=st.integers(1, 3 * SMALLEST), start=STARTS, offset=OFFSETS)
def test_blocks_of_keys_cover_each_key_once(n: int, keys: int, start: int, offset: int) -> None:
    """Each one key at least, and one column before those of their pairs for the skew."""
    whole = Options(Span(2, 1, "clip"), Visibility(n + 5, keys, offset), 1.0, 1.0)
    found = list(blocks(Chunk.of(whole, start, start + n), whole, xp=None))
    assert [key for block in found for key in range(block.start, block.stop)] == list(range(keys))
    for block in found:
        count = block.stop - block.start
        assert 1 <= count <= SMALLEST
        assert (block.first, block.end) == (start, start + n)
        pairs = [i + offset - j for i in range(start, start + n) for j in range(block.start, block.stop)]
        assert block.spare == (count if count > 1 else 0)
        assert (block.low + (count > 1), block.high) == (min(pairs), max(pairs))


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 8), m=st.integers(1, 8), offset=OFFSETS, options=PATTERNS, size=st.integers(1, 8))
def test_a_chunk_holds_every_pair_that_is_seen(n: int, m: int, offset: int, options: dict[str, Any], size: int) -> None:
    q, k = np.zeros((1, n, 1)), np.zeros((1, m, 1))
    call = problem(Arguments(q, k, k, offset=offset, chunk_size=size, **options))
    seen = seen_by(n, m, offset, options)
    highest = (call.options.visibility.positions() or (0, 0))[1]
    laid = list(chunks(call.operands(), call.options))
    assert [row for chunk in laid for row in range(chunk.start, chunk.stop)] == list(range(n))
    for chunk in laid:
        own = seen[chunk.start : chunk.stop]
        assert own.sum() == own[:, chunk.first : chunk.end].sum()
        if chunk.first == chunk.end:
            continue
        rows, columns = chunk.stop - chunk.start, chunk.end - chunk.first
        assert chunk.width <= min((rows if rows > 1 else 0) + columns, max(highest - chunk.low, columns) + 1)
        skewed = chunk.absolute(np.broadcast_to(np.arange(chunk.low, chunk.high + 1), (rows, chunk.width)), xp=XP)
        there = np.ones((rows, columns), dtype=np.int64)
        spread = chunk.relative(there, xp=XP)
        low, high = chunk.seen(call.options)
        for i, j in np.argwhere(own[:, chunk.first : chunk.end]):
            r = j + chunk.first - (i + chunk.start + offset)
            assert skewed[i, j] == r
            assert spread[i, r - chunk.low] == 1
            assert low <= r <= high


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("place", ["cpu", "other"])
def test_a_chunk_is_as_large_as_the_budget_of_its_logits(dtype: str, place: str) -> None:
    documents_of_900 = np.arange(10**5) // 900
    calls: list[tuple[tuple[int, ...], int, dict[str, Any], int]] = [
        ((), 50, {}, 50), ((1,), 700, {}, 700), ((3, 2), 6000, {}, 6000), ((1,), 10**5, {}, 10**5),
        ((2, 4), 10**7, {}, 10**7), ((8, 64), 10**5, {}, 10**5), ((8,), 10**5, {}, 10**5),
        ((3, 2), 10**5, {"window": (700, 299), "offset": 5000}, 1000),
        ((3, 2), 10**5, {"segments": (documents_of_900[:600], documents_of_900)}, 900),
    ]  # fmt: skip
    sizes = set()
    for lead, n_keys, options, most in calls:
        q, k = (np.broadcast_to(np.zeros((), dtype), (*lead, rows, 4)) for rows in (600, n_keys))
        call = problem(Arguments(q, k, k, **options))
        documents = documents_of(call.given)
        assert keys_seen(call.options, documents) == most
        size = chunk_size(call.given, call.options, documents, cpu=None if place == "cpu" else False)
        of_a_query = math.prod(lead) * most * q.dtype.itemsize
        sizes.add(size)
        assert size in (16, 32, 64, 128, 256, 512)
        assert size == 16 or size * of_a_query <= SCRATCH_BYTES[place]
        assert size == 512 or 2 * size * of_a_query > SCRATCH_BYTES[place]
        if place == "cpu":
            assert next(chunks(call.given, call.options)).stop == size
    assert len(sizes) > 2


def test_few_queries_are_one_chunk() -> None:
    q, k = np.zeros((64, 16, 4)), np.broadcast_to(np.zeros(()), (64, 10**6, 4))
    call = problem(Arguments(q, k, k))
    assert [(chunk.start, chunk.stop) for chunk in chunks(call.given, call.options)] == [(0, 16)]


@pytest.mark.parametrize("offset", [[3, -2], np.asarray([3, -2])], ids=["listed", "array"])
def test_offsets_by_item_are_positions_in_an_export_and_offsets_elsewhere(offset: Any) -> None:
    """Operators do not support offsets by item."""
    q = strict.asarray(np.zeros((2, 1, 4, 1)))
    given: Any = strict.asarray(offset) if isinstance(offset, np.ndarray) else offset
    assert not problem(Arguments(q, q, q, offset=given)).options.visibility.by_value
    with symbols.exporting():
        assert problem(Arguments(q, q, q, offset=given)).options.visibility.by_value
        assert not problem(Arguments(q, q, q, offset=3)).options.visibility.by_value
